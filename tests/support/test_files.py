"""Tests that files are written whole or not at all, and the errors of the operating system."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autotrain_mem.support import files
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.support.files import A_LINK, NOT_ORDINARY, JsonLines, write_json
from autotrain_mem.support.processes import Child

OLD = {"steps": 1}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    write_json(path, OLD)
    return path


def read(path: Path) -> object:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int | None, *, call: str = "fsync") -> None:
    """Let the operating system refuse, as it may do late: ENOSPC often comes no earlier than at fsync. None: Ctrl-C."""

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, call, refuse)


def test_json_is_read_back_and_a_diverged_loss_is_a_text(written: Path) -> None:
    with pytest.raises(TypeError):
        write_json(written, {"steps": object()})
    assert read(written) == OLD
    write_json(written, {"model": "größe", "last_loss": float("nan"), "losses": [1.5, None, float("inf")]})
    assert read(written) == {"model": "größe", "last_loss": "nan", "losses": [1.5, None, "inf"]}
    assert os.listdir(written.parent) == ["run.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("refusal", "raised"),
    [(errno.ENOSPC, OutputFolderError), (errno.EFBIG, OutputFolderError), (None, KeyboardInterrupt)],
)
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(
    written: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None, raised: type[BaseException], call: str
) -> None:
    fail_with(monkeypatch, refusal, call=call)
    with pytest.raises(raised):
        write_json(written, {"steps": 2})
    assert read(written) == OLD
    assert os.listdir(written.parent) == ["run.json"]


@pytest.mark.parametrize(
    ("path", "reason", "hint"),
    [
        ("missing/run.json", "its folder does not exist", "Make the folder first, or give --out a file elsewhere."),
        ("file/run.json", "or is a file", "Make the folder first, or give --out a file elsewhere."),
        ("folder", "in the way", "Move it away, or give --out a file elsewhere."),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_with_the_flag(
    tmp_path: Path, path: str, reason: str, hint: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputFolderError, match=reason) as raised:
        write_json(tmp_path / path, OLD, place="--out a file")
    assert raised.value.hint == hint


@pytest.mark.parametrize(
    ("make", "reason"), [(Path.symlink_to, A_LINK), (lambda path, _: os.mkfifo(path), NOT_ORDINARY)]
)
def test_lines_and_logs_are_written_to_regular_files_only(
    tmp_path: Path, make: Callable[[Path, Path], None], reason: str
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "events.jsonl"
    victim.write_text("mine\n")
    make(path, victim)
    for write in (lambda: JsonLines(path).write({}), lambda: Child("no_module", {}, path)):
        with pytest.raises(OSError, match=reason):
            write()
    assert victim.read_text() == "mine\n"
