"""What a killed parent leaves behind is removed, and nothing else."""

import pathlib

import pytest

from autotrain_mem.worker.scratch_folders import SCRATCH, ScratchFolders


def folder_with_a_file(path: pathlib.Path) -> pathlib.Path:
    path.mkdir()
    (path / "call").write_text("rows", encoding="utf-8")
    return path


def test_a_worker_removes_its_own_folder_and_those_of_scripts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, handed, kept = (folder_with_a_file(tmp_path / name) for name in ("autofit-own", "autofit-handed", "data"))
    monkeypatch.setenv(SCRATCH, str(own))
    first, second = ScratchFolders(), ScratchFolders()
    for scratch_folders in (first, second):  # two workers of one parent
        scratch_folders.note({"operation": "parse"})
        scratch_folders.note({"operation": "describe", "job": {"python_call": None}})
        scratch_folders.note({"operation": "describe", "job": {"python_call": {"path": str(handed / "call")}}})
        scratch_folders.note({"operation": "describe", "job": {"python_call": {"path": str(kept / "call")}}})
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == [kept]


def test_a_worker_that_was_given_no_folder_removes_none(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SCRATCH, raising=False)
    monkeypatch.setenv("TMPDIR", str(folder_with_a_file(tmp_path / "autofit-everyones")))
    ScratchFolders().remove()
    assert len(list(tmp_path.iterdir())) == 1
