"""Where results are kept."""

from __future__ import annotations

import pathlib
import sys

import pytest

from autotrain_mem.machine.cache import cache_folder


def test_results_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("AUTOFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    assert folder is not None
    assert folder.name == "autofit"
    assert not sys.platform.startswith("linux") or folder == tmp_path / "autofit"


def test_the_variable_names_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_an_empty_variable_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", "")
    assert cache_folder() is None
