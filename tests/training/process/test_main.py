"""The process that trains answers once its log says why."""

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.support import codec
from autotrain_mem.training.process import main as process
from autotrain_mem.training.process import train


def test_a_traceback_is_in_the_log_before_the_parent_hears_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parent ends this process when it has the answer."""
    logged: list[str] = []

    class Channel:
        def __init__(self, **_: object) -> None:
            pass

        def receive(self) -> Mapping[str, Any]:
            return {}

        def send(self, message: Mapping[str, Any]) -> None:
            assert "The trainer raised ValueError: no such row" in str(message)
            logged.append(capsys.readouterr().err)

    class Request:
        task, output_dir, knobs, processes_here = "train", ".", TRL_DEFAULTS, 1

    def fail(*_: object) -> None:
        raise ValueError("no such row")

    monkeypatch.setattr(process, "Channel", Channel)
    monkeypatch.setattr(codec, "from_json", lambda *_: Request)
    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    process.main()
    assert "in fail" in logged[0]


def test_an_error_is_told_as_it_was_raised_where_the_output_folder_is_gone(tmp_path: Path) -> None:
    gone = str(tmp_path / "moved" / "run")
    raised, denied = ValueError("no such row"), PermissionError(errno.EACCES, "Permission denied")
    assert process._failure(raised, gone).message == "The trainer raised ValueError: no such row"
    assert re.search("run, whose disk has .+ free: .*Permission denied", process._failure(denied, gone).message)
