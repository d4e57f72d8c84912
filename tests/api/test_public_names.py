"""What ``autotrain_mem`` offers: complete, importable without torch, documented with examples that run, typed."""

import ast
import doctest
import enum
import inspect
import os
import signal
import typing
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from test_contract import SLOW_TO_IMPORT, loaded_by

import autotrain_mem
from autotrain_mem.types import MethodFacts, PythonCall
from tests.forked import Forge

ROOT = Path(__file__).parents[2]
TRAINERS = tuple(name for name in autotrain_mem.__all__ if name.endswith("Trainer"))
COLD = [name for name in autotrain_mem.__all__ if name not in (*TRAINERS, "MemoryWatch", "__version__")]
VERBS = [name for name in COLD if inspect.isfunction(getattr(autotrain_mem, name))]


def public(name: str) -> Any:
    return getattr(autotrain_mem, name)


def test_every_name_is_of_the_module_that_the_package_names() -> None:
    assert dir(autotrain_mem) == sorted(autotrain_mem.__all__)
    checked = next(node for node in ast.parse(inspect.getsource(autotrain_mem)).body if isinstance(node, ast.If))
    typed = [alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted([*typed, "__version__"]) == dir(autotrain_mem), "type checkers see them all"
    assert {"plan", "estimate", "fit", "gpus", "cards", "write_report"} == set(VERBS)
    assert all(public(name).__name__ == name for name in COLD)
    with pytest.raises(AttributeError, match="has no attribute 'plann'"):
        public("plann")


def test_importing_the_package_its_cold_names_and_its_api_loads_no_torch() -> None:
    code = "import autotrain_mem\nassert 'autotrain_mem.api' not in sys.modules\n"
    loaded, _ = loaded_by(f"{code}for name in {COLD}: getattr(autotrain_mem, name)\nimport autotrain_mem.api")
    assert not loaded & {*SLOW_TO_IMPORT, "yaml"}


def mentioned(kind: Any) -> set[type]:
    """Classes of ours in an annotation: in ``Mapping[Phase, int] | None`` it is Phase."""
    found = {kind} if inspect.isclass(kind) and kind.__module__.startswith("autotrain_mem") else set()
    return found.union(*(mentioned(inner) for inner in typing.get_args(kind)))


def nouns_of(name: str) -> set[type]:
    target = public(name)
    hints = [typing.get_type_hints(target)]
    if inspect.isclass(target):
        properties = [member.fget for member in vars(target).values() if isinstance(member, property)]
        hints += [typing.get_type_hints(each) for each in properties if each is not None]
    return set().union(*(mentioned(kind) for each in hints for kind in each.values()))


def test_every_noun_that_a_public_name_takes_or_gives_is_public_too_and_frozen() -> None:
    """But what a trainer hands to its planning, which lives no longer than that, and our own table of methods."""
    nouns = set().union(*map(nouns_of, COLD)) - {PythonCall, MethodFacts}
    assert {kind.__name__ for kind in nouns} - set(autotrain_mem.__all__) == set()
    classes = [noun for noun in map(public, COLD) if inspect.isclass(noun)]
    values = [noun for noun in classes if not issubclass(noun, enum.Enum | Exception)]
    assert [noun for noun in values if not noun.__dataclass_params__.frozen] == []


def run_examples(name: str) -> int:
    """How many there were."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for test in doctest.DocTestFinder(recurse=False).find(public(name), name, module=False, globs={}):
        runner.run(test, out=said.append)
    assert not said, "".join(said)
    return runner.summarize(verbose=False).attempted


@pytest.mark.parametrize("name", [name for name in COLD if name != "fit"])
def test_the_example_of_every_public_name_that_does_something_runs(name: str, here: Path) -> None:
    """A noun that only holds what the library found needs no example: it would be read back as it was made."""
    own = [member for key, member in vars(public(name)).items() if not key.startswith("_")]
    does = name in VERBS or any(isinstance(member, property | classmethod | FunctionType) for member in own)
    assert run_examples(name) >= 2 * does


@pytest.mark.slow
def test_the_example_of_fit_leaves_nothing_behind(here: Path, forge: Forge, capfd: pytest.CaptureFixture[str]) -> None:
    environment, interrupt = dict(os.environ), signal.getsignal(signal.SIGINT)
    children = forge.alive()
    with forge.children():
        assert run_examples("fit") >= 3
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) is interrupt
    assert forge.alive() == children
    assert capfd.readouterr() == ("", "")
    assert autotrain_mem.Plan.load(here / "first-run").knobs.per_device_train_batch_size == 2
