"""Two runs never write to one folder, and none writes over what another wrote."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training import run_folder
from autotrain_mem.training.process.train import save_in_place
from autotrain_mem.training.run_folder import LOCK_NAME, LastRun, check_folder, hold_folder
from tests.support.test_processes import parent
from tests.waiting import until


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "run"
    made.mkdir()
    return made


CHECKS = (check_folder, lambda folder, **options: hold_folder(folder, **options).__enter__())


def _refused(folder: Path) -> None:
    for overwrite in (False, True):
        with (
            pytest.raises(OutputFolderError, match="Another run is under way in the output folder"),
            hold_folder(str(folder), resuming=not overwrite, overwrite=overwrite),
        ):
            pass
    with pytest.raises(OutputFolderError, match=r"\(process \d+ on .+\)"):
        check_folder(str(folder), resuming=True)
    assert [path.name for path in folder.parent.glob("run*")] == ["run"]


def test_a_folder_is_one_runs_until_it_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with hold_folder(str(folder), resuming=False) as held:
        held.begin(LastRun(number="first", start=None))
        (folder / "run.json").write_text("{}")
        _refused(folder)
    events: list[Any] = []
    with hold_folder(str(folder), resuming=True) as held:
        assert held.last_run() == LastRun(number="first", start=None)
    with hold_folder(str(folder), resuming=False, overwrite=True, on_event=events.append) as held:
        assert events == [{"event": "moved_aside", "path": str(tmp_path / "run.previous-1")}]
        assert held.last_run() is None
        with pytest.raises(OutputFolderError, match="under way"):
            check_folder(str(folder), resuming=False)


WORDS = ("--nodes", "2")

HOLDER = """
import os, time
from autotrain_mem.support.processes import Child
from autotrain_mem.training.run_folder import hold_folder

with hold_folder({!r}, resuming=False) as held:
    child = Child("outlives", {{}}, has_children=True, keeps_open=(held.lock,))
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_training_process_that_outlives_its_parent_keeps_the_folder(tmp_path: Path) -> None:
    (tmp_path / "outlives.py").write_text("import time; time.sleep(600)")
    with parent(HOLDER.format(str(tmp_path / "run")), PYTHONPATH=str(tmp_path)) as (process, _):
        process.kill()
        process.wait()
        _refused(tmp_path / "run")
    until(lambda: run_folder.is_under_way(tmp_path / "run") is False)
    check_folder(str(tmp_path / "run"), resuming=False)


def test_a_filesystem_without_locks_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks = Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    events: list[Any] = []
    with hold_folder(str(tmp_path / "run"), resuming=False, on_event=events.append) as held:
        assert held.path.is_dir()
    (note,) = events
    assert "cannot be locked (No locks available): make sure that no other run writes there" in note["message"]


def test_a_lock_of_a_folder_that_was_moved_is_not_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, folder = run_folder.fcntl.flock, tmp_path / "run"

    def moved_first(file: int, operation: int) -> None:
        monkeypatch.setattr(run_folder.fcntl, "flock", lock)
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        lock(file, operation)

    monkeypatch.setattr(run_folder.fcntl, "flock", moved_first)
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 5.0)
    with hold_folder(str(folder), resuming=False) as held:
        assert os.path.samestat(os.fstat(held.lock), os.stat(folder / LOCK_NAME))


def test_a_run_whose_folder_was_moved_saves_into_no_other_runs(tmp_path: Path) -> None:
    folder, saved = tmp_path / "run", []
    trainer = SimpleNamespace(_save_checkpoint=lambda: None, save_model=saved.append)
    with hold_folder(str(folder), resuming=False) as held:
        save_in_place(trainer, SimpleNamespace(output_dir=str(folder), folder=held.identity))
        trainer.save_model("in place")
        folder.rename(tmp_path / "moved")
        trainer.save_model("with nothing in its place")
        with (
            hold_folder(str(folder), resuming=False),
            pytest.raises(OutputFolderError, match="moved away, and another run has begun"),
        ):
            trainer.save_model("in another's")
    assert saved == ["in place", "with nothing in its place"]


@pytest.mark.parametrize("name", ["model-00001-of-00005.safetensors", "model.safetensors.index.json", "a.pt"])
def test_weights_that_somebody_else_wrote_are_refused_or_moved_whole(folder: Path, name: str) -> None:
    (folder / name).write_text("")
    for check in CHECKS:
        with pytest.raises(OutputFolderError, match="already holds weights") as raised:
            check(str(folder), resuming=False)
        assert "--overwrite_output_dir" in raised.value.hint
    with hold_folder(str(folder), resuming=False, overwrite=True):
        assert (folder.parent / "run.previous-1" / name).is_file()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to(path.parents[1] / "victim"), "it is a symbolic link, which is not followed"),
        (os.mkfifo, "it is a device, a pipe or a socket, not a file"),
    ],
)
def test_a_lock_that_is_no_file_is_not_written_through(folder: Path, make: Callable[[Path], None], reason: str) -> None:
    victim = folder.parent / "victim"
    victim.write_text("mine")
    make(folder / LOCK_NAME)
    for check in CHECKS:
        with pytest.raises(OutputFolderError, match=f"run: {LOCK_NAME}: {reason}") as raised:
            check(str(folder), resuming=False)
        assert raised.value.hint == "Remove the file of that name, or give another --output_dir."
    assert run_folder.is_under_way(folder) is None
    assert not run_folder.is_left_by(str(folder), WORDS)
    assert not run_folder.is_held_by(folder, os.getpid(), "here")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["README.md", "train.rank3.log"])
def test_a_file_of_the_users_own_that_a_run_would_write_over_is_refused_by_its_name(folder: Path, name: str) -> None:
    (folder / name).write_text("mine")
    (folder / "data.jsonl").write_text("mine")
    for overwrite in (False, True):
        for check in CHECKS:
            with pytest.raises(OutputFolderError, match=rf"no earlier run .+\({re.escape(name)}\)") as raised:
                check(str(folder), resuming=False, overwrite=overwrite)
            assert "--overwrite_output_dir" not in raised.value.hint
    assert {path.name: path.read_text() for path in folder.iterdir() if path.name != LOCK_NAME} == {
        name: "mine",
        "data.jsonl": "mine",
    }
    assert os.listdir(folder.parent) == ["run"]


def test_files_of_a_run_of_ours_and_files_of_other_names_are_gone_on_beside(folder: Path) -> None:
    for name in ("data.jsonl", "train.py"):
        (folder / name).write_text("mine")
    with hold_folder(str(folder), resuming=False):
        (folder / "probe.log").write_text("it did not fit")  # the run ended here
    check_folder(str(folder), resuming=False)
    with hold_folder(str(folder), resuming=False) as held:
        assert held.last_run() is None
    assert (folder / "data.jsonl").read_text() == (folder / "train.py").read_text() == "mine"
    of_trl = folder.parent / "trl"
    (of_trl / "checkpoint-5").mkdir(parents=True)
    (of_trl / "README.md").write_text("TRL's")
    check_folder(str(of_trl), resuming=True)
    with hold_folder(str(of_trl), resuming=True) as held:
        assert held.last_run() is None


def test_a_run_of_several_machines_is_known_by_its_words_which_nobody_can_read_there(tmp_path: Path) -> None:
    words = (*WORDS, "--hub_token", "hf_secret")
    with hold_folder(str(tmp_path), resuming=False) as held:
        held.begin(LastRun(number="first", start=None, command=words))
    (tmp_path / "checkpoint-4").mkdir()
    assert run_folder.is_left_by(str(tmp_path), words)
    assert not run_folder.is_left_by(str(tmp_path), WORDS)
    assert "hf_secret" not in (tmp_path / LOCK_NAME).read_text()
