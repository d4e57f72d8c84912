"""The table of kernels' inner workspaces: its sizes by hand, and that a recording meets them at the right moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_card import SmallCard
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import REAL_AND_FAKE, sizes

from autotrain_mem.machine import catalog
from autotrain_mem.machine.simulated import SimulatedGpu
from autotrain_mem.rehearsal.cuda.workspaces import MULTIPROCESSORS, workspaces
from autotrain_mem.rehearsal.trace.recorder import Recorder, Scratch
from autotrain_mem.spec import Block, Hardware, Owner, Phase
from autotrain_mem.units import MIB

AMPERE, HOPPER = (8, 0), (9, 0)


def recorded(step: Callable[[], Any], device: Any = None) -> Recorder:
    recorder = Recorder(device=device, workspace=workspaces(AMPERE))
    with recorder.recording():
        step()
    return recorder


def scratch(step: Callable[[], Any]) -> list[int]:
    """Bytes that one step takes and gives back within an operator: born, and dead in the next event."""
    trace = recorded(step).trace()
    pairs = zip(trace.events, trace.events[1:], strict=False)
    return [trace.blocks[born - 1].size_bytes for born, died in pairs if died == -born and born > 0]


def asked(operator: Any, *args: Any, out: Any = None, card: tuple[int, int] = AMPERE, **kwargs: Any) -> list[int]:
    """What the table says of one call, on tensors too large to make."""
    with FakeTensorMode():
        made = [arg() if callable(arg) else arg for arg in args]
        result = operator(*made, **kwargs) if out is None else out()
        return [taken.size_bytes for taken in workspaces(card)(operator, tuple(made), kwargs, result)]


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(shape, dtype=dtype)


# -- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), 8_519_680), (AMPERE, 8_519_680), ((8, 9), 8_519_680), (HOPPER, 32 * MIB), ((12, 0), 32 * MIB)],
)
def test_the_cublas_workspace_of_each_generation(capability: tuple[int, int], expected: int) -> None:
    x = torch.ones(2, 2)
    taken = workspaces(capability)(torch.ops.aten.mm.default, (x, x), {}, x)
    assert taken == (Scratch(expected, kept_as="cuBLAS workspace"),)


def partials(tokens: int, hidden: int, vocabulary: int) -> int:
    """The float32 partial sums of rows, and positions in int64: as they came, sorted, and of each segment."""
    segments = min(tokens, vocabulary)
    parts = tokens // 10 + segments
    return parts * hidden * 4 + (2 * tokens + tokens + 2 * segments + parts) * 8


@pytest.mark.parametrize(
    ("tokens", "hidden", "vocabulary", "expected"),
    [
        (4 * 4096, 4096, 128_256, [partials(4 * 4096, 4096, 128_256)]),
        (8192, 64, 100, [partials(8192, 64, 100)]),  # a small vocabulary bounds them
        (3073, 64, 5000, [partials(3073, 64, 5000)]),
        (3072, 64, 5000, []),  # few tokens take the kernel without buffers
    ],
)
def test_an_embeddings_backward_holds_float32_partials_of_its_rows(
    tokens: int, hidden: int, vocabulary: int, expected: list[int]
) -> None:
    grad, ids = fake(tokens, hidden, dtype=torch.bfloat16), fake(tokens, dtype=torch.long)
    assert asked(torch.ops.aten.embedding_dense_backward.default, grad, ids, vocabulary, -1, False) == expected
    assert partials(4 * 4096, 4096, 128_256) == pytest.approx(282 * MIB, rel=0.01), "as the docstring has it"


def test_clipping_holds_partial_norms_for_every_tensor_by_the_largest() -> None:
    largest, count = 128_256 * 4096, 291
    tensors = [fake(largest, dtype=torch.bfloat16), *[fake(10, dtype=torch.bfloat16)] * (count - 1)]
    with FakeTensorMode():
        made = [tensor() for tensor in tensors]
        (taken,) = workspaces(AMPERE)(torch.ops.aten._foreach_norm.Scalar, (made, 2), {}, [])
    assert taken.size_bytes == count * 8016 * 4


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (8, 4096, []),
        (1, 50_000, [50_000 * (8 + 12 - 4 + 4)]),
        (8, 50_000, [8 * 50_000 * (8 + 8 + 4 + 12)]),
        (200, 50_000, [200 * 50_000 * (8 + 12)]),
        (2, 1_000_000, [1_000_000 * 20]),
    ],
    ids=["small", "one row", "few rows", "many rows", "long rows"],
)
def test_sorting_a_vocabulary(rows: int, columns: int, expected: list[int]) -> None:
    assert asked(torch.ops.aten.sort.default, fake(rows, columns), -1, True) == expected
    assert asked(torch.ops.aten.sort.stable, fake(rows, columns), stable=True, dim=1) == expected


def test_a_scatter_by_mask_counts_through_all_elements() -> None:
    image = fake(1, 4096, 2048, dtype=torch.bfloat16)
    whole = asked(torch.ops.aten.masked_scatter.default, image, fake(1, 4096, 2048, dtype=torch.bool), image)
    assert whole == [4096 * 2048 * 8]
    wide = asked(torch.ops.aten.masked_scatter.default, image, fake(1, 4096, 1, dtype=torch.bool), image)
    assert wide == [4096 * 2048 * 9]


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (4096, 896, 29_360_128),
        (4096, 128, 4_194_304),
        (2048, 512, 8_388_608),
        (2048, 128, 2_097_152),
        (4096, 512, 16_777_216),
        (8192, 896, 58_720_256),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_rows_holds_a_part_for_every_block_that_shares_it(
    rows: int, columns: int, expected: int, dtype: torch.dtype
) -> None:
    operator = torch.ops.aten.sum.dim_IntList
    assert asked(operator, fake(rows, columns, dtype=dtype), [0], True, card=HOPPER) == [expected]
    split = fake(4, rows // 4, columns, dtype=dtype)
    assert asked(operator, split, [0, 1], True, card=HOPPER) == [expected], "leading dimensions are one"


@pytest.mark.parametrize(
    ("card", "shares"),
    [(HOPPER, 25), (AMPERE, 21), ((8, 6), 12), ((7, 5), 7), ((12, 0), 27), ((1, 0), 35)],
)
def test_a_card_with_more_multiprocessors_splits_a_wide_sum_further(card: tuple[int, int], shares: int) -> None:
    wide = fake(4096, 11_008, dtype=torch.bfloat16)
    taken = asked(torch.ops.aten.sum.dim_IntList, wide, [0], True, card=card)
    assert taken == [shares * 32 * 4 * 11_008 * 4]


SUMS: dict[str, tuple[Callable[[], torch.Tensor], list[int] | None, list[int]]] = {
    "threads load two columns at once": (fake(4096, 130), [0], [4096 // 8 // 16 * 32 * 2 * 130 * 4]),
    "as many as divide a row": (fake(4096, 131), [0], [4096 // 16 // 16 * 32 * 131 * 4]),
    "of each row": (fake(4096, 896), [1], []),
    "of all": (fake(4096, 896), None, []),
    "few rows": (fake(800, 896), [0], []),
    "grouped heads": (fake(2, 2, 7, 512, 64), [2], []),
    "a scalar": (fake(), [0], []),
    "nothing": (fake(0, 4), [0], []),
    "along memory, whatever the order of dimensions": (lambda: torch.empty(896, 4096).T, [0], []),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_holds_parts_over_rows_alone(name: str) -> None:
    tensor, dims, expected = SUMS[name]
    assert asked(torch.ops.aten.sum.dim_IntList, tensor, dims, card=HOPPER) == expected


def test_a_sum_beyond_two_gibibytes_is_made_by_halves() -> None:
    operator, columns = torch.ops.aten.sum.dim_IntList, 151_936
    whole, eighth = fake(4 * 4096, columns), fake(2048, columns)
    assert asked(operator, whole, [0], card=HOPPER) == asked(operator, eighth, [0], card=HOPPER)


def test_a_mask_is_counted_as_int64() -> None:
    mask = fake(8, 1024, dtype=torch.bool)
    assert asked(torch.ops.aten.sum.default, mask) == [8 * 1024 * 8]
    assert asked(torch.ops.aten.sum.dim_IntList, mask, [1]) == [8 * 1024 * 8]
    assert asked(torch.ops.aten.sum.default, fake(8, dtype=torch.long)) == []
    assert asked(torch.ops.aten.sum.default, fake(8, dtype=torch.bfloat16), dtype=torch.float32) == []


def test_no_card_of_the_catalog_has_more_multiprocessors_than_its_capability_is_taken_to_have() -> None:
    cards = [card for card in catalog._cards() if card.compute_capability is not None]
    assert all(card.multiprocessors <= MULTIPROCESSORS[card.compute_capability] for card in cards)


# -- as a recording meets them -------------------------------------------------------------------------------------


def backward(out: torch.Tensor) -> Callable[[], Any]:
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


def scores(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(50, 60, dtype=dtype, requires_grad=True)


def embedded() -> torch.Tensor:
    weight, ids = torch.ones(50, 8, requires_grad=True), torch.zeros(4000, dtype=torch.long)
    return torch.nn.functional.embedding(ids, weight)


def cut(softmax: Callable[..., Any], first: int, last: int) -> Callable[[], Any]:
    logits, kept = torch.ones(4, 50, 60), []  # type: ignore[var-annotated]
    return lambda: kept.append(softmax(logits[:, first:last], -1))


def step(operator: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    x = torch.ones(50, 60)
    return lambda: operator(x)


_PARTIALS = 4000 // 10 + 50
_ADDING = (4000 + 2 * 50 + _PARTIALS) * 8 + _PARTIALS * 8 * 4

STEPS: dict[str, tuple[Callable[[], Callable[[], Any]], list[int]]] = {
    "softmax's backward holds gradient times output": (lambda: backward(scores().softmax(-1)), [50 * 60 * 4]),
    "in bfloat16 too": (lambda: backward(scores(torch.bfloat16).softmax(-1)), [50 * 60 * 2]),
    "log_softmax's backward holds nothing": (lambda: backward(scores().log_softmax(-1)), []),
    "but copies a gradient that is one number": (lambda: backward(scores().log_softmax(-1).sum()), [50 * 60 * 4]),
    "an embedding's backward": (lambda: backward(embedded()), [2 * 4000 * 8 + max(_ADDING, 3 * 4000 * 8)]),
    "softmax copies logits that were cut": (lambda: cut(torch.softmax, 9, -1), [4 * 40 * 60 * 4]),
    "log_softmax too": (lambda: cut(torch.log_softmax, 9, -1), [4 * 40 * 60 * 4]),
    "and no whole ones": (lambda: cut(torch.softmax, 0, 50), []),
    "logsumexp holds the exponentials": (lambda: step(lambda x: x.logsumexp(-1)), [50 * 60 * 4]),
    "most operators take nothing": (lambda: step(lambda x: x.add_(x)), []),
    "sampling holds a draw for each": (lambda: step(lambda x: torch.multinomial(x, 1)), [50 * 60 * 4]),
}


@REAL_AND_FAKE
@pytest.mark.parametrize("name", STEPS)
def test_a_kernel_takes_its_scratch_in_a_recording(name: str, tensors: Callable[[], Any]) -> None:
    prepare, expected = STEPS[name]
    with tensors():
        assert scratch(prepare()) == expected


@REAL_AND_FAKE
def test_the_gradient_of_a_bias_is_summed_by_blocks(tensors: Callable[[], Any]) -> None:
    with tensors():
        assert 4_194_304 in scratch(backward(torch.nn.Linear(8, 128)(torch.ones(2, 2048, 8))))


@REAL_AND_FAKE
def test_dropouts_mask_is_made_before_its_result(tensors: Callable[[], Any]) -> None:
    with tensors():
        x = torch.ones(50, 60)
        trace = recorded(lambda: torch.native_dropout(x, 0.5, True)).trace()
    assert sizes(trace) == [50 * 60, 50 * 60 * 4]


def test_rows_are_picked_and_put_back_by_position() -> None:
    logits, mask = torch.ones(10, 20, 30, requires_grad=True), torch.arange(200).reshape(10, 20) < 70
    plain, rows = torch.ones(100, 30, requires_grad=True), torch.zeros(70, dtype=torch.long)
    whole, picked = logits.detach(), list[torch.Tensor]()
    assert scratch(lambda: picked.append(whole[mask])) == [70 * 2 * 8]
    assert scratch(lambda: picked.append(torch.masked_select(mask, mask))) == [70 * 2 * 8]
    assert scratch(lambda: picked.append(whole[rows[:5]])) == []
    assert scratch(backward(plain[rows])) == [70 * 6 * 8], "the positions are sorted"
    assert scratch(backward(logits[mask])) == [70 * (6 + 2) * 8], "and found again"
    written, zero = plain.detach(), torch.zeros(())
    assert scratch(lambda: written.index_put_((rows,), zero)) == [], "writing sorts nothing"


def cublas(recorder: Recorder) -> list[Block]:
    return [block for block in recorder.trace().blocks if block.module == "cuBLAS workspace"]


@REAL_AND_FAKE
def test_cublas_keeps_one_workspace_for_forward_and_one_for_backward(tensors: Callable[[], Any]) -> None:
    def two_steps() -> None:
        for _ in range(2):
            model(x).sum().backward()

    with tensors():
        model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        recorder = recorded(two_steps)
    kept = cublas(recorder)
    assert [block.size_bytes for block in kept] == [8_519_680] * 2
    assert {block.owner for block in kept} == {Owner.OTHER}
    trace = recorder.trace()
    dead = [trace.blocks[-event - 1].module for event in trace.events if event < 0]
    assert "cuBLAS workspace" not in dead


def test_every_run_takes_one_workspace_and_no_more_without_gradients() -> None:
    x = torch.ones(4, 4)
    assert [len(cublas(recorded(lambda: x @ x @ x))) for _ in range(2)] == [1, 1]


def test_a_workspace_that_was_refused_is_asked_for_again() -> None:
    x, fits = torch.ones(4, 4), SimulatedGpu(card(1 << 26))
    full = SimulatedGpu(card(1 << 22))
    for device, times in ((fits, 1), (full, 2)):
        recorder = Recorder(device=device, workspace=workspaces(AMPERE))
        with recorder.recording():
            for _ in range(2):
                with contextlib.suppress(torch.OutOfMemoryError):
                    x @ x
        assert len(cublas(recorder)) == times


def card(size_bytes: int) -> Hardware:
    return Hardware(name="tiny", origin="imagined", total_bytes=size_bytes, free_bytes=size_bytes, non_torch_bytes=0)


def test_a_recompute_within_the_backward_pass_uses_the_backwards_workspace() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    assert len(cublas(recorded(lambda: checkpoint(model, x, use_reentrant=False).sum().backward()))) == 2


def test_a_workspace_is_alive_together_with_its_operators_inputs_and_results() -> None:
    n = 1_000_000
    card = SmallCard()
    x = torch.ones(n)

    def step() -> None:
        recorder.mark(x, Owner.OTHER, "x")
        x.clone().logsumexp(0)

    recorder = Recorder(device=card, workspace=workspaces(AMPERE))
    with recorder.recording():
        step()
    assert card.peak_bytes >= 3 * n * 4, "x, its clone and the exponentials"
    assert card.peak_bytes < 3 * n * 4 + 4096


def test_a_workspace_that_does_not_fit_is_out_of_memory_and_leaves_nothing_behind() -> None:
    gpu = SmallCard(16 * MIB)
    recorder = Recorder(device=gpu, workspace=workspaces(AMPERE))
    logits = torch.ones(3 * MIB)  # 12 MiB, and 12 MiB more within logsumexp
    with recorder.recording():
        recorder.enter_phase(Phase.FORWARD)
        recorder.mark(logits, Owner.OTHER, "logits")
        with pytest.raises(torch.OutOfMemoryError):
            logits.logsumexp(0)
        assert gpu.allocated_bytes == 12 * MIB
        logits.sum()
    trace = recorder.trace()
    assert sum(sign * block.size_bytes for _, sign, block in trace.walk()) == 12 * MIB
