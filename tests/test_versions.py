"""What makes a kept result count no more."""

import os
import pathlib

import pytest

from autotrain_mem import versions
from autotrain_mem.versions import content_digest, versions_key


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "module.py").write_text("x = 1\n")
    (tmp_path / "main.py").write_text("y = 1\n")
    return tmp_path


def test_every_library_that_a_rehearsal_runs_is_named_with_its_version() -> None:
    import torch
    import trl

    key = versions_key()
    assert key["torch"] == str(torch.__version__)
    assert key["trl"] == trl.__version__
    assert key["trl files"]
    assert key["autotrain_mem"] == content_digest(pathlib.Path(versions.__file__).parent)


def test_a_changed_file_of_ours_changes_the_digest_and_its_date_does_not(package: pathlib.Path) -> None:
    before = content_digest(package)
    os.utime(package / "main.py", (1, 1))
    (package / "notes.txt").write_text("no code")
    assert content_digest(package) == before
    (package / "inner" / "module.py").write_text("x = 2\n")
    changed = content_digest(package)
    (package / "inner" / "module.py").rename(package / "inner" / "renamed.py")
    assert len({before, changed, content_digest(package)}) == 3


def test_an_edited_trl_and_any_edited_checkout_are_noticed(
    package: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(versions, "PACKAGES", ("edited_checkout", "edited_release"))
    monkeypatch.setattr(versions, "OFTEN_EDITED", ())
    monkeypatch.setattr(versions, "installed_version", lambda name: "1.2.dev0" if name == "edited_checkout" else "1.2")
    monkeypatch.syspath_prepend(str(package.parent))
    package = package.rename(package.parent / "edited_checkout")
    before = versions_key.__wrapped__()
    (package / "main.py").write_text("y = 22\n")
    after = versions_key.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"edited_checkout files"}
