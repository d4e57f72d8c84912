"""Where results are kept."""

from __future__ import annotations

import pathlib
import sys

import pytest

from autotrain_mem.store import cache_folder


def test_results_are_kept_in_the_users_cache_or_where_the_variable_says_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("AUTOFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    assert folder.name == "autofit"
    assert not sys.platform.startswith("linux") or folder == tmp_path / "autofit"
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("AUTOFIT_CACHE", "")
    assert cache_folder() is None
