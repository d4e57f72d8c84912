"""Cards of one kernel class take the same kernels with the same buffers, so that one rehearsal serves them."""

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_run import case, rehearsal_of

from autotrain_mem.machine.catalog import catalog
from autotrain_mem.rehearsal.cuda import workspaces
from autotrain_mem.rehearsal.cuda.attention_kernels import (
    Backend,
    Inputs,
    KernelCall,
    _efficient_workspace_bytes,
    choose,
)
from autotrain_mem.rehearsal.cuda.rules import not_imitated
from autotrain_mem.trainers.model_support import why_no_attention
from autotrain_mem.types.hardware import Capability, kernel_class

CAPABILITIES = sorted({card.compute_capability for card in catalog() if card.compute_capability is not None})
MERGED = [capability for capability in CAPABILITIES if kernel_class(capability) != capability]
HEADS = (16, 20, 40, 64, 72, 80, 96, 128, 160, 192, 224, 256, 288)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_a_class_is_named_by_one_of_its_own_cards_and_an_unknown_card_is_one_of_its_own() -> None:
    classes = {kernel_class(capability) for capability in CAPABILITIES}
    assert {kernel_class(one) for one in classes} == classes
    assert classes < set(CAPABILITIES)
    assert [kernel_class(capability) for capability in ((6, 1), (8, 7), (12, 1))] == [(6, 1), (8, 7), (12, 1)]


def calls(rows: int) -> list[Inputs]:
    """Queries, keys and values of every head size and dtype, with grouped heads and without; they hold no bytes."""

    def tensor(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(2, heads, rows, size, dtype=dtype, device="meta", requires_grad=True)

    return [
        (tensor(8, size, dtype), tensor(heads, size, dtype), tensor(heads, size, dtype))
        for size, dtype, heads in itertools.product(HEADS, DTYPES, (8, 2))
    ]


def decisions(capability: Capability) -> list[tuple[Any, ...]]:
    """Which kernel every call takes, and the workspace that memory-efficient attention would take for it."""
    found: list[tuple[Any, ...]] = []
    for inputs in [*calls(1), *calls(300)]:
        mask = torch.empty(2, 1, inputs[0].size(2), inputs[1].size(2), device="meta")
        for bias, dropout, causal in itertools.product((None, mask), (0.0, 0.1), (False, True)):
            facts: dict[str, Any] = {"dropout": dropout, "is_causal": causal, "enable_gqa": True}
            found.append((choose(inputs, bias, capability=capability, **facts),))
        call = KernelCall(Backend.EFFICIENT, capability)
        found.append((_efficient_workspace_bytes(inputs, call),))
    found += [(why_no_attention("flash_attention_2", capability, dtype, 128),) for dtype in DTYPES if capability[0] > 7]
    return [*found, (workspaces._product_workspaces(capability), not_imitated(capability))]


@pytest.mark.parametrize("capability", MERGED)
def test_cards_of_one_class_decide_alike(capability: Capability) -> None:
    assert decisions(capability) == decisions(kernel_class(capability))


def test_classes_that_are_kept_apart_decide_otherwise() -> None:
    apart = sorted({kernel_class(capability) for capability in CAPABILITIES})
    made = [decisions(capability) for capability in apart]
    assert not [pair for pair in itertools.combinations(range(len(apart)), 2) if made[pair[0]] == made[pair[1]]]


@pytest.mark.parametrize("capability", MERGED)
def test_the_card_that_stands_for_a_class_takes_no_less_for_a_sum_over_rows(capability: Capability) -> None:
    own, standing = workspaces._sum_over(capability), workspaces._sum_over(kernel_class(capability))
    for rows, columns in itertools.product((64, 1000, 4096, 65_536, 1_000_000), (8, 896, 4096, 28_672)):
        args = (torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), [0])
        out = torch.empty(columns, dtype=torch.bfloat16, device="meta")
        assert own(args, {}, out) <= standing(args, {}, out)


@pytest.mark.slow
def test_rehearsals_for_cards_of_one_class_are_the_same(model_folder: Callable[[str], pathlib.Path]) -> None:
    less = {"gradient_checkpointing": False, "gradient_accumulation_steps": 1}
    one = case("sft", model_folder("gemma3"), {"bf16": False}, **less)

    def trace(capability: Capability) -> tuple[Any, ...]:
        rehearsed = rehearsal_of(one.job, one.knobs, one.length, compute_capability=capability)
        return rehearsed.blocks, rehearsed.events, rehearsed.not_counted

    for capability in MERGED:
        assert trace(capability) == trace(kernel_class(capability))
