"""A snapshot's file: whole or not there, and every target that cannot be written is named with what to do."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from report_examples import estimate

from autotrain_mem import files
from autotrain_mem.errors import OutputFolderError
from autotrain_mem.report.snapshot import check_snapshot, snapshot_view, write_snapshot
from autotrain_mem.units import GIB, format_bytes

SNAPSHOT = {"segments": [], "device_traces": [[]]}


def test_a_file_of_that_name_is_overwritten_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "run.pickle").write_text("an older one")
    (tmp_path / "latest").symlink_to("run.pickle")
    write_snapshot(tmp_path / "latest", SNAPSHOT)
    assert (tmp_path / "latest").is_symlink()
    assert pickle.loads((tmp_path / "run.pickle").read_bytes()) == SNAPSHOT


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = tmp_path / "run.pickle"
    path.write_text("an older one")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(OutputFolderError) as refused:
        write_snapshot(path, SNAPSHOT)
    assert "--snapshot" in refused.value.hint
    assert path.read_text() == "an older one"
    assert os.listdir(tmp_path) == ["run.pickle"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "a folder of that name is in the way"),
        ("missing/run.pickle", "its folder is not there"),
        ("file/run.pickle", "its folder is not there or is a file"),
        ("fifo", "it is no file"),
        ("x" * 300, "its name is too long"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_there_is_a_snapshot(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for refuse in (lambda: check_snapshot(tmp_path / name), lambda: write_snapshot(tmp_path / name, SNAPSHOT)):
        with pytest.raises(OutputFolderError, match=reason) as refused:
            refuse()
        assert refused.value.hint
    assert sorted(os.listdir(tmp_path)) == ["fifo", "file", "folder"]


def test_a_device_is_never_replaced_by_a_file() -> None:
    with pytest.raises(OutputFolderError, match="it is no file"):
        write_snapshot(Path("/dev/null"), SNAPSHOT)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_what_is_said_of_it_names_what_it_does_not_show(tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    write_snapshot(path, SNAPSHOT)
    alone = estimate()
    said = snapshot_view(path, alone).plain
    assert f"history to {path} ({path.stat().st_size} B)." in said
    assert f"It shows torch's allocator; {format_bytes(alone.outside_bytes)} outside it are not in it." in said
    with_vllm = replace(alone, vllm_share_bytes=7 * GIB)
    assert ", 7.00 GiB of it vLLM's, outside it are not in it." in snapshot_view(path, with_vllm).plain
