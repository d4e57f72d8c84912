"""Whatever a rehearsal exchanges in torch, transformers, TRL and accelerate is put back, whether it ends or fails."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest

from autotrain_mem.rehearsal.cuda.fused_head import fused_head_stand_ins
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, every_rule
from autotrain_mem.rehearsal.fake_run import fake_tensors
from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.trainers.weightless import without_weights

Exchanged = list[tuple[Any, str, Any]]
ABSENT = object()

CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a rehearsal": lambda: cuda_semantics(Recorder(), (8, 0)),
    "a simulated card": lambda: cuda_semantics(Recorder(), (8, 0), "real cpu"),
    "a GPU's fake tensors": lambda: cuda_semantics(Recorder(), (8, 0), "fake cuda"),
    "fake tensors": fake_tensors,
    "no weights": without_weights,
    "generation": lambda: generation_by_its_ends(Recorder()),
    "vLLM": vllm_stand_in,
    "the fused head": fused_head_stand_ins,
}
MAY_BE_EMPTY = ("the fused head",)
"""TRL before 1.16 has none."""


@contextmanager
def exchanges() -> Iterator[Exchanged]:
    """Every attribute and every key that is patched inside: of what, its name, and what it was."""
    noted: Exchanged = []
    enter, enter_dict = mock._patch.__enter__, mock._patch_dict.__enter__

    def note(target: Any, name: str) -> None:
        if not any(owner is target and noted_name == name for owner, noted_name, _ in noted):
            noted.append((target, name, current(target, name)))

    def noting(patcher: Any) -> Any:
        note(patcher.getter(), patcher.attribute)
        return enter(patcher)

    def noting_keys(patcher: Any) -> Any:
        for name in patcher.values:
            note(patcher.in_dict, name)
        return enter_dict(patcher)

    with (
        mock.patch.object(mock._patch_dict, "__enter__", noting_keys),
        mock.patch.object(mock._patch, "__enter__", noting),
    ):
        yield noted


def current(target: Any, name: str) -> Any:
    return (target if isinstance(target, dict) else vars(target)).get(name, ABSENT)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_everything_is_put_back(name: str, nested: bool, fails: bool) -> None:
    with ExitStack() as outer:
        if nested:
            outer.enter_context(CONTEXTS[name]())
        with exchanges() as exchanged:
            with pytest.raises(ZeroDivisionError) if fails else nullcontext(), CONTEXTS[name]():
                changed = [name for target, name, old in exchanged if current(target, name) is not old]
                assert changed or not exchanged
                if fails:
                    raise ZeroDivisionError
            assert exchanged or name in MAY_BE_EMPTY
            assert all(current(target, attribute) is old for target, attribute, old in exchanged)


def test_every_rule_exchanges_something_or_registers_kernels() -> None:
    """Else it would imitate nothing; autocast's policy is made of kernels alone, the fused head of newer TRL's."""
    idle = 0
    for rule in every_rule():
        with exchanges() as exchanged, rule.imitate(Recorder(), (8, 0)):
            idle += not exchanged
    assert idle <= 2
