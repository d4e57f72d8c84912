"""Attention under the rules has CUDA's choice of kernel, CUDA's bytes and the CPU's values."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import live, sizes

from autotrain_mem.machine.catalog import catalog
from autotrain_mem.rehearsal.cuda import attention_kernels, workspaces
from autotrain_mem.rehearsal.cuda.attention import _flash_functions, cuda_attention
from autotrain_mem.rehearsal.cuda.attention_kernels import Backend, KernelCall, _efficient_workspace_bytes, choose
from autotrain_mem.rehearsal.cuda.rules import not_imitated
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.trainers.model_support import why_no_attention
from autotrain_mem.types import Owner
from autotrain_mem.types.hardware import Capability, kernel_class

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
    """Returns query, key and value as B x H x S x D, in memory B x S x H x D."""
    torch.manual_seed(0)
    shapes = [(BATCH, tokens, heads, size) for heads in (HEADS, groups, groups)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_(trains) for shape in shapes]


def padding_mask(tokens: int = TOKENS) -> torch.Tensor:
    mask = torch.ones(BATCH, 1, tokens, tokens, dtype=torch.bool).tril()
    mask[-1, ..., -1] = False
    return mask


CHOICES = [
    # dtype, card, has a mask, head size, repeated heads (GQA), trains, expected
    (BF16, A100, False, 128, False, True, Backend.FLASH),
    (BF16, A100, False, 128, True, True, Backend.FLASH),
    (BF16, A100, True, 128, False, True, Backend.EFFICIENT),
    (BF16, A100, True, 128, True, True, Backend.MATH),
    (FP32, A100, False, 128, False, True, Backend.EFFICIENT),
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


def choice(*inputs: torch.Tensor, mask: Any = None, card: Any = A100, **facts: Any) -> Backend:
    return choose(inputs, mask, capability=card, **{"dropout": 0.0, "is_causal": True, "enable_gqa": False, **facts})


@pytest.mark.parametrize(("dtype", "card", "masked", "size", "grouped", "trains", "expected"), CHOICES)
def test_the_kernel_is_the_one_that_cuda_picks(
    dtype: Any, card: Any, masked: bool, size: int, grouped: bool, trains: bool, expected: Backend
) -> None:
    inputs = projections(dtype, GROUPS if grouped else HEADS, size, tokens=8, trains=trains)
    mask = padding_mask(8) if masked else None
    assert choice(*inputs, mask=mask, card=card, is_causal=not masked, enable_gqa=grouped) is expected


def test_flash_takes_neither_grouped_heads_without_enable_gqa_nor_a_longer_cache() -> None:
    assert choice(*projections(BF16, groups=1), is_causal=False) is Backend.MATH
    query, (_, key, value) = projections(BF16, tokens=8)[0], projections(BF16, tokens=16)
    assert choice(query, key, value) is Backend.EFFICIENT
    assert choice(query, key, value, is_causal=False) is Backend.FLASH


@pytest.mark.parametrize("card", [T4, A100, H100])
@pytest.mark.parametrize("groups", [HEADS, GROUPS], ids=["heads", "gqa"])
@pytest.mark.parametrize("how", ["causal", "mask", "full"])
@pytest.mark.parametrize(("dtype", "size"), [(FP32, SIZE), (BF16, SIZE), (BF16, 20)])  # flash pads heads of 20
def test_values_and_gradients_are_the_cpus(dtype: torch.dtype, size: int, how: str, groups: int, card: Any) -> None:
    """Tolerances: a rounding step of the type at values of this size; math works in float32 where the CPU does not."""
    inputs = projections(dtype, groups, size)
    options = {"attn_mask": padding_mask() if how == "mask" else None, "is_causal": how == "causal"}
    options["enable_gqa"] = groups != HEADS
    weights = torch.randn(BATCH, HEADS, TOKENS, size, dtype=dtype)
    results = []
    for rules in (nullcontext(), cuda_attention(card)):
        with rules:
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        results.append([out, *torch.autograd.grad(out, inputs, weights)])
    close = {"atol": 1e-5, "rtol": 1e-4} if dtype is FP32 else {"atol": 6e-2, "rtol": 2e-2}
    torch.testing.assert_close(results[1], results[0], **close)


def test_a_mask_that_learns_gets_its_gradient() -> None:
    inputs = projections(FP32)
    mask = torch.zeros(1, HEADS, TOKENS, TOKENS, requires_grad=True)
    with cuda_attention(A100):
        torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3).sum().backward()
    assert mask.grad is not None


@pytest.mark.parametrize(("card", "dtype", "fused"), [(T4, FP16, 1), (A100, BF16, 1), (H100, BF16, 1), (T4, BF16, 0)])
def test_dropout_keeps_a_byte_per_score_in_math_alone(card: tuple[int, int], dtype: torch.dtype, fused: bool) -> None:
    with cuda_attention(card), Recorder().recording() as recorder:
        torch.nn.functional.scaled_dot_product_attention(*projections(dtype), None, 0.5, True)
    made = sizes(recorder.trace())
    assert (max(made) < ROWS * TOKENS * 2) if fused else (ROWS * TOKENS in made)


def recorded(
    tensors: Callable[[], Any], card: Capability, dtype: torch.dtype, groups: int = HEADS, **options: Any
) -> tuple[list[int], list[int]]:
    """Returns the sizes that live after a call, and those that its backward pass allocates."""
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


CAUSAL, MASKED, UNTRAINED = {"is_causal": True}, {"masked": True}, {"trains": False, "is_causal": True}
MASK = BATCH * TOKENS * TOKENS * 2  # one for all heads
PADDED, LOGSUMEXP = BATCH * HEADS * 128, BATCH * HEADS * 64 * 4  # 40 rows padded to 128, and to 64
FLASH_SCRATCH = [PADDED * 4, PADDED * 32 * 4]  # row sums and an accumulator
EFFICIENT_SCRATCH = [ROWS * 4, BATCH * HEADS * (16 + 64 * 64 * 4)]  # row sums and the kernel's workspace
CUDNN_WORKSPACE = ROWS * 4 + ROWS * SIZE * 4 + 2 * OUT

BYTES: dict[str, tuple[Capability, torch.dtype, int, dict[str, Any], list[int], list[int]]] = {
    # sizes that live after a call, and the first that its backward pass allocates
    "flash": (A100, BF16, HEADS, CAUSAL, [OUT, ROWS * 4, 16], [OUT, OUT, OUT, *FLASH_SCRATCH]),
    "grouped": (A100, BF16, GROUPS, CAUSAL, [OUT, ROWS * 4, 16], [OUT, GROUPED, GROUPED, *FLASH_SCRATCH, OUT, OUT]),
    "untrained": (A100, BF16, HEADS, UNTRAINED, [OUT], []),
    "efficient": (A100, BF16, HEADS, MASKED, [MASK, OUT, LOGSUMEXP], [OUT, OUT, OUT, *EFFICIENT_SCRATCH]),
    "float32": (A100, FP32, HEADS, CAUSAL, [2 * OUT, LOGSUMEXP], [2 * OUT] * 4 + [ROWS * 4] * 2),
    "cuDNN": (H100, BF16, GROUPS, MASKED, [MASK, OUT, ROWS * 4, 8, 8], [OUT, GROUPED, GROUPED, CUDNN_WORKSPACE]),
    "cuDNN untrained": (H100, BF16, HEADS, UNTRAINED, [OUT], []),
}


@pytest.mark.parametrize("kernel", BYTES)
def test_a_kernel_keeps_and_takes_what_cudas_does(kernel: str) -> None:
    card, dtype, groups, options, expected, expected_backward = BYTES[kernel]
    kept, backward = recorded(FakeTensorMode, card, dtype, groups, **options)
    assert sorted(kept) == sorted(expected)
    assert backward[: len(expected_backward)] == expected_backward


def test_math_keeps_score_matrices_and_efficient_pads_a_mask_that_is_not_aligned() -> None:
    assert ROWS * TOKENS * 4 in recorded(FakeTensorMode, T4, BF16, is_causal=True)[0], "float32, for bfloat16 inputs"
    assert BATCH * 37 * 40 * 2 in recorded(FakeTensorMode, A100, BF16, masked=True, tokens=37)[0]


@pytest.mark.parametrize("card", [T4, A100, H100])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("how", [MASKED, CAUSAL], ids=["mask", "causal"])
def test_fake_tensors_allocate_what_real_ones_do(how: dict[str, Any], dtype: torch.dtype, card: Capability) -> None:
    for size, groups in itertools.product((16, 72, 144), (HEADS, GROUPS)):
        fake, real = (recorded(mode, card, dtype, groups, size=size, **how) for mode in (FakeTensorMode, nullcontext))
        assert fake == real


def test_large_cards_and_small_cards_differ_in_the_efficient_workspace() -> None:
    """Heads of 128 stay in registers if the 128 x 128 kernel fits; otherwise keys and values have accumulators."""
    large, small = (recorded(FakeTensorMode, card, BF16, masked=True, size=128)[1][-1] for card in (A100, RTX_4090))
    assert large == BATCH * HEADS * (16 + 128 * 128 * 4)
    assert small == BATCH * HEADS * (2 * (16 + 64 * 64 * 4) + 2 * 64 * 128 * 4)


FLASH, FLASH3 = "flash_attention_2", "flash_attention_3"


def test_flash_attention_by_name_computes_what_sdpa_does_and_packed_documents_stay_apart() -> None:
    dense, packed = _flash_functions(Backend.FLASH, A100)
    q, k, v = (tensor.transpose(1, 2).detach() for tensor in projections(BF16, GROUPS))
    ends = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
    flat = [tensor.reshape(-1, *tensor.shape[2:]) for tensor in (q, k, v)]
    apart = dense(q, k, v, causal=True)
    together = packed(*flat, ends, ends, TOKENS, TOKENS, causal=True)
    torch.testing.assert_close(together.view(apart.shape), apart, atol=2e-2, rtol=2e-2)
    expected = plain_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(apart.transpose(1, 2), expected, atol=2e-2, rtol=2e-2)


def test_a_name_that_cannot_run_is_refused_with_its_reason() -> None:
    assert why_no_attention(None, T4, FP32, 512) is None
    assert why_no_attention("kernels-community/vllm-flash-attn3", H100, FP16, 256) is None
    refused = {
        (FLASH, T4, FP16, 64): "compute capability",
        (FLASH, A100, FP32, 64): "float32",
        (FLASH, A100, BF16, 512): "at most 256",
        (FLASH3, (10, 0), BF16, 64): "9.x",
        ("flex_attention", H100, BF16, 64): "not rehearsed",
    }
    for given, reason in refused.items():
        assert reason in str(why_no_attention(*given))


CAPABILITIES = sorted({card.compute_capability for card in catalog() if card.compute_capability is not None})
HEAD_SIZES = (16, 20, 40, 64, 72, 80, 96, 128, 160, 192, 224, 256, 288)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_a_class_is_named_by_one_of_its_cards_and_an_unknown_card_is_its_own_class() -> None:
    classes = {kernel_class(capability) for capability in CAPABILITIES}
    assert {kernel_class(one) for one in classes} == classes
    assert classes < set(CAPABILITIES)
    assert [kernel_class(capability) for capability in ((6, 1), (8, 7), (12, 1))] == [(6, 1), (8, 7), (12, 1)]


def calls(rows: int) -> list[attention_kernels.Inputs]:
    """Returns meta tensors of every head size and dtype, with and without grouped heads."""

    def tensor(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(2, heads, rows, size, dtype=dtype, device="meta", requires_grad=True)

    return [
        (tensor(8, size, dtype), tensor(heads, size, dtype), tensor(heads, size, dtype))
        for size, dtype, heads in itertools.product(HEAD_SIZES, DTYPES, (8, 2))
    ]


def decisions(capability: Capability) -> list[Any]:
    """Returns everything that depends on the capability, except the number of multiprocessors."""
    found: list[Any] = [workspaces.cublas_bytes(capability), not_imitated(capability)]
    for inputs in [*calls(1), *calls(300)]:
        mask = torch.empty(2, 1, inputs[0].size(2), inputs[1].size(2), device="meta")
        for bias, dropout, causal in itertools.product((None, mask), (0.0, 0.1), (False, True)):
            facts: dict[str, Any] = {"dropout": dropout, "is_causal": causal, "enable_gqa": True}
            found.append(choose(inputs, bias, capability=capability, **facts))
        found.append(_efficient_workspace_bytes(inputs, KernelCall(Backend.EFFICIENT, capability)))
    return found + [why_no_attention(FLASH, capability, dtype, 128) for dtype in DTYPES if capability[0] > 7]


def test_cards_decide_alike_if_and_only_if_they_are_of_one_class() -> None:
    made = {capability: decisions(capability) for capability in CAPABILITIES}
    for one, other in itertools.combinations(CAPABILITIES, 2):
        assert (made[one] == made[other]) is (kernel_class(one) == kernel_class(other)), (one, other)


@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if kernel_class(each) != each])
def test_the_card_that_represents_a_class_takes_no_less_for_a_sum_over_rows(capability: Capability) -> None:
    own, standing = workspaces._sum_over(capability), workspaces._sum_over(kernel_class(capability))
    for rows, columns in itertools.product((64, 1000, 4096, 65_536, 1_000_000), (8, 896, 4096, 28_672)):
        args = (torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), [0])
        out = torch.empty(columns, dtype=torch.bfloat16, device="meta")
        assert own(args, {}, out) <= standing(args, {}, out)
