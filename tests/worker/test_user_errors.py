"""Tests how exceptions in a rehearsal are explained, and passed on to a script."""

import inspect
import json
import pathlib
import re
import sysconfig
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from autotrain_mem.methods.configs import script_parser
from autotrain_mem.support.errors import described
from autotrain_mem.worker.client import _cause
from autotrain_mem.worker.user_errors import failure, library_of, passed_on

STEP = "Rehearsing the trainer"


class Broken:
    """A trainer of the user's own, in their own file: this one."""

    def __init__(self, act: Callable[[], Any]) -> None:
        act()


def raised_by(act: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any kind, and which is asked afterwards
        Broken(act)
    assert isinstance(caught.value, Exception)
    return caught.value


def at(function: Callable[..., Any], offset: int) -> str:
    line = inspect.getsourcelines(function)[1] + offset
    return f"{function.__qualname__} ({pathlib.Path(__file__).name}:{line})"


def own_bug() -> None:
    raise ValueError("my own bug")


def in_a_library() -> None:
    torch.nn.Conv1d(2, 2, 1)(torch.zeros(3, 3, 3))  # DeepSpeed replaces the function of linear layers


def reads_a_value() -> None:
    with FakeTensorMode():
        torch.ones(1).item()


def test_a_script_gets_the_line_of_its_own_code_and_the_fix_for_one_that_reads_a_tensors_value() -> None:
    own, library = (failure(STEP, raised_by(act), from_python=True) for act in (own_bug, in_a_library))
    assert own.message == "Rehearsing the trainer failed: ValueError: my own bug"
    assert own.hint == f"It was raised in {at(own_bug, 1)}, during a rehearsal."
    assert library.hint == f"It was raised in torch, called by {at(in_a_library, 1)}, during a rehearsal."
    error = raised_by(reads_a_value)
    hint = failure(STEP, error, from_python=True).hint
    assert hint.startswith(f"{at(reads_a_value, 2)} reads the value of a tensor, and in a rehearsal")
    assert passed_on(error) is None


def test_a_command_gets_hints_on_flags_and_a_script_on_arguments() -> None:
    command = failure(STEP, raised_by(own_bug), from_python=False)
    script = failure(STEP, ValueError("never raised anywhere"), from_python=True)
    assert all("in the installed libraries: ValueError" in each.message for each in (command, script))
    assert "--debug" in command.hint
    assert "--" not in script.hint
    assert "argument" in script.hint
    missing = failure(STEP, ImportError("no module x"), from_python=False)
    assert missing.hint.startswith("Install the package that it names")
    ours = failure(STEP, raised_by(lambda: script_parser("nobody_has_this")), from_python=False)
    assert "pip install --upgrade autotrain_mem" in ours.hint
    assert "pip install -e ." in ours.hint


def test_an_error_without_a_text_names_the_code_that_raised_it() -> None:
    for error in (AssertionError(), ValueError("  \n")):
        place = rf"{type(error).__name__}: raised by act \({pathlib.Path(__file__).name}:\d+\)"
        assert re.fullmatch(place, described(raised_by(of_kind(error))))
        assert described(error.with_traceback(None)) == type(error).__name__


class Unmatched(ValueError):
    """As PEFT's NoMatchingPeftModuleError."""


def of_kind(error: Exception) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def test_a_passed_on_error_has_the_same_text_and_class() -> None:
    for error, kind in (
        (ValueError("a"), ValueError),
        (Unmatched("no module matches"), ValueError),
        (KeyError("a column"), KeyError),
        (KeyError(5), KeyError),
        (FileNotFoundError(2, "No such file", "x"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"), UnicodeError),
    ):
        told = json.loads(json.dumps({"raised": passed_on(raised_by(of_kind(error))), "traceback": "where"}))
        again = _cause(told)
        assert (type(again), str(again)) == (kind, str(error))
        assert again.__notes__ == [f"It was raised in {at(of_kind, 2).replace('of_kind', 'act')}, during a rehearsal."]
    assert passed_on(raised_by(in_a_library)) is None
    of_peft = passed_on(raised_by(lambda: LoraConfig(layers_to_transform=[1], target_modules="a.*", use_dora=True)))
    assert (of_peft or {})["kind"] == "ValueError", "of all libraries, PEFT's errors alone are passed on"


def test_the_library_of_a_code_file() -> None:
    libraries = {
        **dict.fromkeys((__file__, "<stdin>", "<ipython-input-3-abc>", "/home/me/trl/mine.py"), ""),
        "<string>": "Python",
        f"{sysconfig.get_path('stdlib')}/json/decoder.py": "Python",
        torch.__file__: "torch",
        "/usr/lib/python3/dist-packages/six.py": "six",
        inspect.getfile(failure): "autotrain_mem",
    }
    assert {file: library_of(file) for file in libraries} == libraries
