"""What makes a kept result count no more."""

import importlib.metadata
import os
import pathlib

import pytest

from autotrain_mem.support import versions
from autotrain_mem.support.versions import PACKAGES, content_digest, installed_versions, local_key, versions_key


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
    assert key["autotrain_mem"] == content_digest(pathlib.Path(versions.__file__).parents[1])


def test_a_changed_file_of_ours_changes_the_digest_and_its_date_the_key_of_this_machine_alone(
    package: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "OURS", package)
    before, here = content_digest(package), local_key.__wrapped__()
    os.utime(package / "main.py", (1, 1))
    moved = local_key.__wrapped__()
    assert {name for name in here if here[name] != moved[name]} == {"autotrain_mem"}
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
    for installed in ("edited_checkout-1.2.dev0", "edited_release-1.2"):
        (package.parent / f"{installed}.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(package.parent))
    package = package.rename(package.parent / "edited_checkout")
    before = versions_key.__wrapped__()
    (package / "main.py").write_text("y = 22\n")
    after = versions_key.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"edited_checkout files"}


def test_versions_equal_those_of_the_metadata(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_older.layout-1.5-py3.11.egg-info").write_text("Metadata-Version: 1.0\nName: x\nVersion: 1.5\n")
    (tmp_path / "Shadowed_By-2.0.dist-info").mkdir()
    (tmp_path / "trl-0.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed_versions([*PACKAGES, "an-older-layout", "shadowed.by", "not-there"])
    known = {package: metadata_version(package) for package in PACKAGES if package != "trl"}
    assert found == {**known, "trl": "0.1", "an-older-layout": "1.5", "shadowed.by": "2.0", "not-there": None}


def metadata_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
