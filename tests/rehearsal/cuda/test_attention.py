"""Attention under the rules: CUDA's choice, CUDA's bytes, the CPU's values; fake and real tensors alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import REAL_AND_FAKE, live, sizes

from autotrain_mem.rehearsal.cuda.attention import cuda_attention, why_not
from autotrain_mem.rehearsal.cuda.attention_choice import Backend, choose
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.spec import Owner

BATCH, HEADS, GROUPS, TOKENS, SIZE = 2, 4, 2, 40, 16
ROWS = BATCH * HEADS * TOKENS
OUT = ROWS * SIZE * 2
GROUPED = BATCH * GROUPS * TOKENS * SIZE * 2
T4, A100, A10, RTX_4090, H100, RTX_5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

plain_attention = torch.nn.functional.scaled_dot_product_attention


def projections(
    dtype: torch.dtype, groups: int = HEADS, size: int = SIZE, tokens: int = TOKENS, trains: bool = True
) -> list[torch.Tensor]:
    """Query, key and value as a model's projections leave them: B x H x S x D, in memory B x S x H x D."""
    torch.manual_seed(0)
    shapes = [(BATCH, tokens, heads, size) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_(trains) for shape in shapes]


def padding_mask(tokens: int = TOKENS) -> torch.Tensor:
    mask = torch.ones(BATCH, 1, tokens, tokens, dtype=torch.bool).tril()
    mask[-1, ..., -1] = False
    return mask


# -- the choice ----------------------------------------------------------------------------------------------------

CHOICES = [
    # dtype, card, has a mask, head size, repeated heads (GQA), trains, expected
    (BF16, A100, False, 128, False, True, Backend.FLASH),
    (BF16, A100, False, 128, True, True, Backend.FLASH),
    (BF16, A100, True, 128, False, True, Backend.EFFICIENT),
    (BF16, A100, True, 128, True, True, Backend.MATH),
    (FP32, A100, False, 128, False, True, Backend.EFFICIENT),
    (FP32, A100, False, 128, True, True, Backend.MATH),
    (FP32, H100, False, 128, False, True, Backend.EFFICIENT),
    (BF16, H100, False, 128, True, True, Backend.CUDNN),
    (BF16, H100, True, 128, True, True, Backend.CUDNN),
    (BF16, H100, False, 256, False, True, Backend.FLASH),
    (BF16, H100, True, 256, False, True, Backend.EFFICIENT),
    (FP16, T4, False, 128, False, True, Backend.EFFICIENT),
    (BF16, T4, False, 128, False, True, Backend.MATH),
    (FP32, T4, True, 128, False, True, Backend.EFFICIENT),
    (BF16, A10, False, 200, False, True, Backend.EFFICIENT),
    (BF16, A10, False, 200, False, False, Backend.FLASH),
    (BF16, A10, False, 256, False, True, Backend.FLASH),
    (BF16, RTX_5090, False, 128, False, True, Backend.FLASH),
    (BF16, RTX_5090, False, 224, False, True, Backend.EFFICIENT),
    (BF16, A100, False, 288, False, True, Backend.EFFICIENT),
    (BF16, A100, True, 20, False, True, Backend.MATH),
    (BF16, A100, False, 20, False, True, Backend.FLASH),
    (torch.float64, A100, False, 128, False, True, Backend.MATH),
]


@pytest.mark.parametrize(("dtype", "card", "masked", "size", "grouped", "trains", "expected"), CHOICES)
def test_the_kernel_is_the_one_that_cuda_picks(
    dtype: torch.dtype,
    card: tuple[int, int],
    masked: bool,
    size: int,
    grouped: bool,
    trains: bool,
    expected: Backend,
) -> None:
    query, key, value = projections(dtype, GROUPS if grouped else HEADS, size, tokens=8, trains=trains)
    mask = padding_mask(8) if masked else None
    facts = {"dropout": 0.0, "is_causal": not masked, "enable_gqa": grouped}
    assert choose(query, key, value, mask, capability=card, **facts) is expected


def test_grouped_heads_that_nobody_announced_take_no_fused_kernel() -> None:
    query, key, value = projections(BF16, groups=1)
    facts: dict[str, Any] = {"dropout": 0.0, "is_causal": False, "enable_gqa": False}
    assert choose(query, key, value, None, capability=A100, **facts) is Backend.MATH


def test_causal_attention_over_a_longer_cache_is_not_for_flash() -> None:
    query, (_, key, value) = projections(BF16, tokens=8)[0], projections(BF16, tokens=16)
    facts: dict[str, Any] = {"dropout": 0.0, "enable_gqa": False}
    assert choose(query, key, value, None, capability=A100, is_causal=True, **facts) is Backend.EFFICIENT
    assert choose(query, key, value, None, capability=A100, is_causal=False, **facts) is Backend.FLASH


# -- the values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", [T4, A100, H100])
@pytest.mark.parametrize("groups", [HEADS, GROUPS], ids=["heads", "gqa"])
@pytest.mark.parametrize("how", ["causal", "mask", "full"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_values_and_gradients_are_the_cpus(dtype: torch.dtype, how: str, groups: int, card: tuple[int, int]) -> None:
    """Tolerances: a rounding step of the type at values of this size; math works in float32 where the CPU does not."""
    inputs = projections(dtype, groups)
    options = {"attn_mask": padding_mask() if how == "mask" else None, "is_causal": how == "causal"}
    options["enable_gqa"] = groups != HEADS
    weights = torch.randn(BATCH, HEADS, TOKENS, SIZE, dtype=dtype)
    expected = plain_attention(*inputs, **options)
    expected_grads = torch.autograd.grad(expected, inputs, weights)
    with cuda_attention(card):
        got = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype is FP32 else {"atol": 6e-2, "rtol": 2e-2}
    for mine, theirs in zip(
        [got, *torch.autograd.grad(got, inputs, weights)], [expected, *expected_grads], strict=True
    ):
        torch.testing.assert_close(mine, theirs, **close)


def test_head_sizes_that_flash_pads_keep_their_values() -> None:
    inputs = projections(BF16, size=20)
    expected = plain_attention(*inputs, is_causal=True)
    with cuda_attention(A100):
        got = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)  # one rounding step of bfloat16


def test_a_mask_that_learns_gets_its_gradient() -> None:
    inputs = projections(FP32)
    mask = torch.zeros(1, HEADS, TOKENS, TOKENS, requires_grad=True)
    with cuda_attention(A100):
        torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3).sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize(("card", "dtype", "fused"), [(T4, FP16, 1), (A100, BF16, 1), (H100, BF16, 1), (T4, BF16, 0)])
def test_dropout_keeps_a_byte_per_score_in_the_math_kernel_alone(
    card: tuple[int, int], dtype: torch.dtype, fused: bool
) -> None:
    with cuda_attention(card), Recorder().recording() as recorder:
        torch.nn.functional.scaled_dot_product_attention(*projections(dtype), None, 0.5, True)
    made = sizes(recorder.trace())
    assert (max(made) < ROWS * TOKENS * 2) if fused else (ROWS * TOKENS in made)


# -- the bytes -----------------------------------------------------------------------------------------------------


def recorded(
    tensors: Callable[[], Any], card: tuple[int, int], dtype: torch.dtype, groups: int = HEADS, **options: Any
) -> tuple[list[int], list[int]]:
    """Sizes born in a call and what lives after it, and those born in its backward pass."""
    masked, trains = options.pop("masked", False), options.pop("trains", True)
    size, tokens = options.pop("size", SIZE), options.pop("tokens", TOKENS)
    with tensors(), cuda_attention(card):
        inputs = projections(dtype, groups, size, tokens, trains)
        if masked:
            options["attn_mask"] = padding_mask(tokens)
        weights = torch.randn(BATCH, tokens, HEADS, size).to(dtype).transpose(1, 2)
        recorder = Recorder()
        given = [*inputs, weights, *([options["attn_mask"]] if masked else [])]
        for tensor in given:
            recorder.mark(tensor, Owner.OTHER, "given")
        with recorder.recording():
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=groups != HEADS, **options)
            trace = recorder.trace()
            kept = [block.size_bytes for block in live(trace)][len(given) :]
            if not trains:
                return kept, []
            torch.autograd.grad(out, inputs, weights)
            return kept, sizes(recorder.trace())[len(trace.blocks) :]


@REAL_AND_FAKE
def test_flash_keeps_one_number_per_query_and_unfolds_grouped_heads_in_its_backward(tensors: Callable[[], Any]) -> None:
    rows = BATCH * 128  # 40 queries round up to 128
    for groups in (HEADS, GROUPS):
        kept, backward = recorded(tensors, A100, BF16, groups, is_causal=True)
        assert kept == [OUT, ROWS * 4, 16]
        if groups == HEADS:  # gradients, row sums, accumulator
            assert backward == [OUT, OUT, OUT, rows * HEADS * 4, rows * HEADS * 32 * 4]
        else:
            assert (backward[:3], backward[-2:]) == ([OUT, GROUPED, GROUPED], [OUT, OUT])


@REAL_AND_FAKE
def test_efficient_keeps_a_float_mask_of_its_own(tensors: Callable[[], Any]) -> None:
    kept, backward = recorded(tensors, A100, BF16, masked=True)
    mask = BATCH * TOKENS * TOKENS * 2
    assert sorted(kept) == sorted([mask, OUT, BATCH * HEADS * 64 * 4]), "one mask for all heads; 40 rows padded to 64"
    workspace = BATCH * HEADS * (16 + 64 * 64 * 4)
    assert backward == [OUT, OUT, OUT, ROWS * 4, workspace]
    unaligned, _ = recorded(tensors, A100, BF16, masked=True, tokens=37)
    assert BATCH * 37 * 40 * 2 in unaligned, "a mask that is not aligned is padded"


@REAL_AND_FAKE
def test_efficient_in_float32_multiplies_beforehand(tensors: Callable[[], Any]) -> None:
    kept, backward = recorded(tensors, A100, FP32, is_causal=True)
    assert kept == [2 * OUT, BATCH * HEADS * 64 * 4]
    assert backward[:6] == [2 * OUT] * 4 + [ROWS * 4] * 2


@REAL_AND_FAKE
def test_cudnn_takes_grouped_heads_and_masks(tensors: Callable[[], Any]) -> None:
    kept, backward = recorded(tensors, H100, BF16, GROUPS, masked=True)
    assert sorted(kept) == sorted([BATCH * TOKENS * TOKENS * 2, OUT, ROWS * 4, 8, 8])
    assert backward[:3] == [OUT, GROUPED, GROUPED]
    assert backward[3] == ROWS * 4 + ROWS * SIZE * 4 + 2 * OUT


@REAL_AND_FAKE
def test_math_keeps_score_matrices_and_flash_without_gradients_nothing(tensors: Callable[[], Any]) -> None:
    kept, _ = recorded(tensors, T4, BF16, is_causal=True)
    assert ROWS * TOKENS * 4 in kept, "float32 weights, for bfloat16 inputs"
    for card in (A100, H100):
        assert recorded(tensors, card, BF16, trains=False, is_causal=True)[0] == [OUT]


@pytest.mark.parametrize("card", [T4, A100, A10, H100])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("groups", [HEADS, GROUPS], ids=["heads", "gqa"])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("size", [16, 72, 144])
def test_fake_tensors_allocate_what_real_ones_do(
    size: int, masked: bool, groups: int, dtype: torch.dtype, card: tuple[int, int]
) -> None:
    options: dict[str, Any] = {"masked": True} if masked else {"is_causal": True}
    real = recorded(nullcontext, card, dtype, groups, size=size, **options)
    assert recorded(FakeTensorMode, card, dtype, groups, size=size, **options) == real


def test_large_cards_and_small_cards_differ_in_the_efficient_workspace() -> None:
    """Heads of 128 stay in registers where the 128 x 128 kernel fits; elsewhere keys and values are added up apart."""
    large, small = (recorded(FakeTensorMode, card, BF16, masked=True, size=128)[1][-1] for card in (A100, RTX_4090))
    assert large == BATCH * HEADS * (16 + 128 * 128 * 4)
    assert small == BATCH * HEADS * (2 * (16 + 64 * 64 * 4) + 2 * 64 * 128 * 4)


# -- autocast, checkpoints, hooks, caches --------------------------------------------------------------------------


@REAL_AND_FAKE
def test_under_autocast_attention_runs_in_half_precision(tensors: Callable[[], Any]) -> None:
    with tensors(), cuda_attention(A100):
        inputs = projections(FP32)
        with torch.autocast("cpu", dtype=BF16):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert out.dtype is BF16
    assert {grad.dtype for grad in grads} == {FP32}


@REAL_AND_FAKE
def test_what_is_kept_goes_through_the_hooks_of_saved_tensors(tensors: Callable[[], Any]) -> None:
    """Gradient checkpointing and activation offloading live by them."""
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel() * tensor.dtype.itemsize)
        return tensor

    with tensors(), cuda_attention(A100):
        inputs = projections(BF16)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    assert seen == [OUT, OUT, OUT, OUT, ROWS * 4, 16]


@REAL_AND_FAKE
@pytest.mark.parametrize("card", [A100, H100])
def test_one_query_against_a_cache_runs_without_gradients(tensors: Callable[[], Any], card: tuple[int, int]) -> None:
    with tensors(), cuda_attention(card), torch.no_grad():
        _, key, value = projections(BF16, trains=False)
        query = projections(BF16, tokens=1, trains=False)[0]
        with Recorder().recording() as recorder:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert out.shape == query.shape
    assert max(sizes(recorder.trace())) == BATCH * HEADS * SIZE * 2


# -- a model's training step ---------------------------------------------------------------------------------------


def births_of_training(
    fake: bool, family: str, card: tuple[int, int], checkpointing: bool, name: str | None = None, padded: bool = True
) -> tuple[list[int], list[float]]:
    """Births of two training steps of a tiny model, and its losses."""
    from tiny import tiny_config
    from transformers import AutoModelForCausalLM
    from transformers.utils import import_utils

    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    torch.manual_seed(0)
    ids = torch.randint(10, 100, (2, 24))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -5:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    losses: list[float] = []
    with mode, cuda_attention(card), patch.object(import_utils, "is_fake_tensor", lambda value: False):
        values = KnownValues(mode) if isinstance(mode, FakeTensorMode) else None
        options = {} if name is None else {"attn_implementation": name}
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=FP32, **options).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        recorder = Recorder(values.run) if values is not None else Recorder()
        recorder.adopt_model(model)
        arrived = values.arrive(batch) if values is not None else batch
        recorder.adopt_batch(arrived.values())
        with recorder.recording():
            for _ in range(2):
                with torch.autocast("cpu", dtype=BF16):
                    loss = model(**arrived).loss
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return sizes(recorder.trace()), losses


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no-checkpointing"])
@pytest.mark.parametrize("card", [T4, A100, H100])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_fake_training_step_allocates_what_a_real_one_does(
    family: str, card: tuple[int, int], checkpointing: bool
) -> None:
    rehearsed, _ = births_of_training(True, family, card, checkpointing)
    real, losses = births_of_training(False, family, card, checkpointing)
    assert rehearsed == real
    assert losses[1] < losses[0], "a real run learns"


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no-checkpointing"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn2", "flash_attention_3"])
def test_flash_attention_by_name_trains_without_the_package(name: str, padded: bool, checkpointing: bool) -> None:
    rehearsed, _ = births_of_training(True, "qwen2", H100, checkpointing, name, padded)
    real, losses = births_of_training(False, "qwen2", H100, checkpointing, name, padded)
    assert rehearsed == real
    assert losses[1] < losses[0]


def test_flash_attention_by_name_computes_what_sdpa_does() -> None:
    """float32 weights under bfloat16 autocast: two kernels part by bfloat16's rounding, 0.8 %."""
    _, by_name = births_of_training(False, "llama", A100, False, "flash_attention_2")
    _, by_default = births_of_training(False, "llama", A100, False)
    assert by_name == pytest.approx(by_default, rel=8e-3)


def test_packed_documents_stay_apart() -> None:
    from autotrain_mem.rehearsal.cuda.attention import _flash_functions

    dense, packed = _flash_functions(Backend.FLASH, A100)
    q, k, v = (tensor.transpose(1, 2).detach() for tensor in projections(BF16, GROUPS))
    ends = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
    flat = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v)]
    apart = dense(q, k, v, causal=True)
    together = packed(*flat, ends, ends, TOKENS, TOKENS, causal=True)
    torch.testing.assert_close(together.view(apart.shape), apart, atol=2e-2, rtol=2e-2)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "card", "dtype", "size", "expected"),
    [
        (None, T4, FP32, 512, None),
        ("eager", T4, BF16, 512, None),
        ("flash_attention_2", A100, BF16, 128, None),
        ("kernels-community/vllm-flash-attn3", H100, FP16, 256, None),
        ("flash_attention_2", T4, FP16, 64, "compute capability"),
        ("flash_attention_2", A100, FP32, 64, "float32"),
        ("flash_attention_2", A100, BF16, 512, "at most 256"),
        ("flash_attention_3", (10, 0), BF16, 64, "9.x"),
        ("flex_attention", H100, BF16, 64, "not rehearsed"),
        ("flash_attention_4", H100, BF16, 64, "not rehearsed"),
    ],
)
def test_a_name_that_cannot_run_is_refused_with_its_reason(
    name: str | None, card: tuple[int, int], dtype: torch.dtype, size: int, expected: str | None
) -> None:
    reason = why_not(name, card, dtype, size)
    assert reason is None if expected is None else expected in (reason or "")
