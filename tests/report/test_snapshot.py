"""A snapshot's file: whole or not there, and every target that cannot be written is named with what to do."""

import os
import pickle
from pathlib import Path

import pytest

from autotrain_mem.report.estimate_view import check_snapshot, write_snapshot
from autotrain_mem.support.errors import OutputFolderError

SNAPSHOT = {"segments": [], "device_traces": [[]]}


def test_an_older_snapshot_is_overwritten_and_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "run.pickle").write_bytes(pickle.dumps("an older one"))
    (tmp_path / "latest").symlink_to("run.pickle")
    write_snapshot(tmp_path / "latest", SNAPSHOT)
    assert (tmp_path / "latest").is_symlink()
    assert pickle.loads((tmp_path / "run.pickle").read_bytes()) == SNAPSHOT


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "a folder of that name is in the way"),
        ("fifo", "it is a device, a pipe or a socket, not a file"),
        ("notes.md", "notes.md exists and is not a snapshot, so it is not overwritten"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_there_is_a_snapshot(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "notes.md").write_text("mine")
    for refuse in (lambda: check_snapshot(tmp_path / name), lambda: write_snapshot(tmp_path / name, SNAPSHOT)):
        with pytest.raises(OutputFolderError, match=reason) as refused:
            refuse()
        assert refused.value.hint
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "notes.md"]
    assert (tmp_path / "notes.md").read_text() == "mine"
