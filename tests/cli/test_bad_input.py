"""What a user reads after every mistake.

``AUTOFIT_UPDATE_GOLDEN=1 scripts/test tests/cli/test_bad_input.py`` writes the golden texts again, and fills a file
that is put beside them with two lines, ``$ autofit ...`` and ``exit code 2``, for one more message.
"""

import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from mistakes import EARLY, MISTAKES, SHELL

from autotrain_mem import api
from autotrain_mem.support import errors
from autotrain_mem.worker import pool
from tests.golden import kept
from tests.place import Autofit, Ran

GOLDEN = Path(__file__).parent / "golden"
TYPED = re.compile(r"\$ (?:(?P<variable>\w+)=(?P<value>\S+) )?autofit (?P<line>.+)\nexit code (?P<code>\d+)\n")
WHOLE = {path.stem: TYPED.match(path.read_text(encoding="utf-8")) for path in sorted(GOLDEN.glob("*.txt"))}

ELSEWHERE = {1, 3, 12, 13, 50, 51, 52, 60, 61, 130}
"""Exit codes that no command line alone brings about: tests of machine, processes and trainers meet them."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_one_message(name: str, autofit: Autofit, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, line, words = MISTAKES[name]
    if name in SHELL:
        monkeypatch.setenv(*SHELL[name])
    if name in EARLY:
        monkeypatch.setattr(pool, "Workers", None)
    on_one_line = " ".join(message_of(autofit(*shlex.split(line)), code, files).split())
    absent = [word for word in shlex.split(words) if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", on_one_line)]
    assert words
    assert not absent, on_one_line


@pytest.mark.parametrize("name", WHOLE)
def test_a_lasting_message_is_golden(name: str, autofit: Autofit, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = WHOLE[name]
    assert typed is not None
    if typed["variable"]:
        monkeypatch.setenv(typed["variable"], typed["value"])
    if name in EARLY:
        monkeypatch.setattr(pool, "Workers", None)
    message = message_of(autofit(*shlex.split(typed["line"])), int(typed["code"]), files)
    if name.startswith("does_not_fit"):  # sizes differ with the installed libraries
        message = re.sub(r"[\d.]+ (B|KiB|MiB)\b", "SIZE", message)
    text = typed[0] + message
    assert text == kept(GOLDEN / f"{name}.txt", text)


def message_of(ran: Ran, code: int, files: Path) -> str:
    """The one message of a command that ends with this exit code."""
    assert ran.code == code
    assert len(re.findall("^error: ", ran.err, re.MULTILINE)) == 1
    assert "Traceback" not in ran.out + ran.err
    assert ran.out.strip() == "" or ran.out.strip().startswith("1. A tiny model")  # quickstart's first chapter
    message = ran.err[ran.err.index("error: ") :].replace(str(files), "FILES")  # before it stands what was rehearsed
    first, *hints = message.rstrip().splitlines()
    assert len(first) > len("error: ") + 10
    assert hints, "what to do about it is missing"
    assert all(hint.startswith("  ") for hint in hints)
    return message


def test_every_exit_code_is_met() -> None:
    met = {code for code, *_ in MISTAKES.values()} | {int(typed["code"]) for typed in WHOLE.values() if typed}
    codes = [kind.exit_code for kind in errors._tree(errors.AutofitError).values() if "exit_code" in vars(kind)]
    assert len(codes) == len(set(codes))
    assert set(codes) == met | set(ELSEWHERE)


def test_debug_shows_a_traceback_and_nothing_else_does(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("estimate", "sft", "--model", "no_config", "--gpu", "300MiB")
    plain, debugged = autofit(*line, "--json"), autofit(*line, "--debug")
    assert (plain.code, plain.out, "Traceback" in plain.err) == (20, "", False)
    assert "Traceback" in debugged.err
    assert plain.err in debugged.err
    cleared = autofit("estimate", "sft", "--model", "no\x1b[2Jwhere", "--gpu", "300MiB", "--debug").err
    assert cleared.count(r"no\x1b[2Jwhere") > 1
    assert "\x1b" not in cleared
    monkeypatch.setenv("COLUMNS", "40")
    assert autofit(*line).err == plain.err, "a message is whole in a log of any width"
    monkeypatch.setattr(api, "catalog", Mock(side_effect=ZeroDivisionError("ours")))
    unforeseen = autofit("gpus")
    assert (unforeseen.code, unforeseen.out) == (1, "")
    assert "--debug" in unforeseen.err
    assert "Traceback" not in unforeseen.err
