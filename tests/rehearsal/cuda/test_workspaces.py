"""Kernels' inner workspaces have the sizes that were computed by hand, and a recording has them at the right moment."""

import csv
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from trace_reading import REAL_AND_FAKE, SmallCard

from autotrain_mem.machine import catalog
from autotrain_mem.rehearsal.cuda.workspaces import MULTIPROCESSORS, workspaces
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.units import MIB
from autotrain_mem.types import Block, Owner

aten = torch.ops.aten
AMPERE, HOPPER = (8, 0), (9, 0)
BF16 = torch.bfloat16


def recorded(step: Callable[[], Any]) -> Recorder:
    recorder = Recorder(workspace=workspaces(AMPERE))
    with recorder.recording():
        step()
    return recorder


def scratch(step: Callable[[], Any]) -> list[int]:
    """Returns the bytes that one step takes and gives back within an operator."""
    trace = recorded(step).trace()
    pairs = zip(trace.events, trace.events[1:], strict=False)
    return [trace.blocks[born - 1].size_bytes for born, died in pairs if died == -born and born > 0]


def asked(operator: Any, *args: Any, card: tuple[int, int] = AMPERE, **kwargs: Any) -> list[int]:
    """Returns the table's sizes for one call, on fake tensors."""
    with FakeTensorMode():
        made = [arg() if callable(arg) else arg for arg in args]
        result = operator(*made, **kwargs)
        return [taken.size_bytes for taken in workspaces(card)(operator, tuple(made), kwargs, result)]


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], torch.Tensor]:
    return lambda: torch.empty(shape, dtype=dtype)


def embedding(tokens: int, hidden: int, vocabulary: int) -> list[int]:
    grad, ids = fake(tokens, hidden, dtype=BF16), fake(tokens, dtype=torch.long)
    return asked(aten.embedding_dense_backward.default, grad, ids, vocabulary, -1, False)


def partials(tokens: int, hidden: int, vocabulary: int) -> int:
    """Returns the bytes of float32 partial sums, and of int64 positions."""
    segments = min(tokens, vocabulary)
    parts = tokens // 10 + segments
    return parts * hidden * 4 + (2 * tokens + tokens + 2 * segments + parts) * 8


def sort(rows: int, columns: int) -> list[int]:
    sizes = asked(aten.sort.default, fake(rows, columns), -1, True)
    assert asked(aten.sort.stable, fake(rows, columns), stable=True, dim=1) == sizes
    return sizes


def scatter(mask_columns: int) -> list[int]:
    image = fake(1, 4096, 2048, dtype=BF16)
    return asked(aten.masked_scatter.default, image, fake(1, 4096, mask_columns, dtype=torch.bool), image)


def sum_of(tensor: Callable[[], torch.Tensor], dims: list[int] | None, card: tuple[int, int] = HOPPER) -> list[int]:
    return asked(aten.sum.dim_IntList, tensor, dims, card=card)


MASK, WIDE = fake(8, 1024, dtype=torch.bool), fake(4096, 11_008, dtype=BF16)
SHARE = 32 * 4 * 11_008 * 4
SIZES: dict[str, tuple[Callable[[], list[int]], list[int]]] = {
    "an embedding's backward": (lambda: embedding(4 * 4096, 4096, 128_256), [partials(4 * 4096, 4096, 128_256)]),
    "a small vocabulary bounds it": (lambda: embedding(8192, 64, 100), [partials(8192, 64, 100)]),
    "more than 3072 tokens": (lambda: embedding(3073, 64, 5000), [partials(3073, 64, 5000)]),
    "fewer take the kernel without buffers": (lambda: embedding(3072, 64, 5000), []),
    "a small sort": (lambda: sort(8, 4096), []),
    "of one row": (lambda: sort(1, 50_000), [50_000 * (8 + 12 - 4 + 4)]),
    "of few rows": (lambda: sort(8, 50_000), [8 * 50_000 * (8 + 8 + 4 + 12)]),
    "of many rows": (lambda: sort(200, 50_000), [200 * 50_000 * (8 + 12)]),
    "of long rows": (lambda: sort(2, 1_000_000), [1_000_000 * 20]),
    "a scatter by mask counts through all elements": (lambda: scatter(2048), [4096 * 2048 * 8]),
    "and copies a mask that was expanded": (lambda: scatter(1), [4096 * 2048 * 9]),
    "a sum's part for every block that shares it": (lambda: sum_of(fake(4096, 896), [0]), [29_360_128]),
    "whatever the dtype": (lambda: sum_of(fake(4096, 896, dtype=BF16), [0]), [29_360_128]),
    "leading dimensions are one": (lambda: sum_of(fake(4, 1024, 896), [0, 1]), [29_360_128]),
    "threads load two columns at once": (lambda: sum_of(fake(4096, 130), [0]), [4096 // 8 // 16 * 32 * 2 * 130 * 4]),
    "as many as divide a row": (lambda: sum_of(fake(4096, 131), [0]), [4096 // 16 // 16 * 32 * 131 * 4]),
    "by halves beyond 2 GiB": (lambda: sum_of(fake(4 * 4096, 151_936), [0]), sum_of(fake(2048, 151_936), [0])),
    "partial norms of each tensor by the largest": (
        lambda: asked(aten._foreach_norm.Scalar, lambda: [torch.empty(n, dtype=BF16) for n in (70_000, 10, 10)], 2),
        [3 * 2 * 4],
    ),
    "of each row": (lambda: sum_of(fake(4096, 896), [1]), []),
    "of all": (lambda: sum_of(fake(4096, 896), None), []),
    "a sum of 800 rows": (lambda: sum_of(fake(800, 896), [0]), []),
    "of grouped heads": (lambda: sum_of(fake(2, 2, 7, 512, 64), [2]), []),
    "of nothing": (lambda: sum_of(fake(0, 4), [0]), []),
    "along memory, in any order of dimensions": (lambda: sum_of(lambda: torch.empty(896, 4096).T, [0]), []),
    "more multiprocessors split a wide sum further": (lambda: sum_of(WIDE, [0]), [25 * SHARE]),
    "than those of an A100": (lambda: sum_of(WIDE, [0], AMPERE), [21 * SHARE]),
    "an unknown card has the most": (lambda: sum_of(WIDE, [0], (1, 0)), [35 * SHARE]),
    "a mask is counted as int64": (lambda: asked(aten.sum.default, MASK), [8 * 1024 * 8]),
    "and by rows": (lambda: sum_of(MASK, [1], AMPERE), [8 * 1024 * 8]),
    "as int64 are": (lambda: asked(aten.sum.default, fake(8, dtype=torch.long)), []),
    "halves to float32": (lambda: asked(aten.sum.default, fake(8, dtype=BF16), dtype=torch.float32), []),
    "cuBLAS before Hopper": (lambda: asked(aten.mm.default, fake(2, 2), fake(2, 2), card=(8, 9)), [8_519_680]),
    "cuBLAS on Hopper and later": (lambda: asked(aten.mm.default, fake(2, 2), fake(2, 2), card=(12, 0)), [32 * MIB]),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_kernel_takes_what_its_source_says(name: str) -> None:
    take, expected = SIZES[name]
    assert take() == expected


def test_no_card_of_the_catalog_has_more_multiprocessors_than_its_capability_is_taken_to_have() -> None:
    with open(catalog._ROWS, encoding="utf-8", newline="") as file:
        cards = [row for row in csv.DictReader(file) if row["compute_capability"]]
    assert len(cards) > 20
    for card in cards:
        major, minor = map(int, card["compute_capability"].split("."))
        assert int(card["multiprocessors"]) <= MULTIPROCESSORS[major, minor], card["key"]


def backward(out: torch.Tensor) -> Callable[[], Any]:
    grad = torch.ones_like(out)
    return lambda: out.backward(grad)


def scores(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(50, 60, dtype=dtype, requires_grad=True)


def cut(softmax: Callable[..., Any], first: int, last: int) -> Callable[[], Any]:
    logits, kept = torch.ones(4, 50, 60), []  # type: ignore[var-annotated]
    return lambda: kept.append(softmax(logits[:, first:last], -1))


def step(operator: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    x = torch.ones(50, 60)
    return lambda: operator(x)


STEPS: dict[str, tuple[Callable[[], Callable[[], Any]], list[int]]] = {
    "softmax's backward holds gradient times output": (lambda: backward(scores().softmax(-1)), [50 * 60 * 4]),
    "in bfloat16 too": (lambda: backward(scores(torch.bfloat16).softmax(-1)), [50 * 60 * 2]),
    "log_softmax's backward holds nothing": (lambda: backward(scores().log_softmax(-1)), []),
    "but copies a gradient that is one number": (lambda: backward(scores().log_softmax(-1).sum()), [50 * 60 * 4]),
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
    assert [(block.size_bytes, block.owner) for block in cublas(recorder)] == [(8_519_680, Owner.OTHER)] * 2
    trace = recorder.trace()
    dead = [trace.blocks[-event - 1].module for event in trace.events if event < 0]
    assert "cuBLAS workspace" not in dead


def test_a_workspace_that_was_refused_is_requested_again() -> None:
    x, recorder = torch.ones(4, 4), Recorder(device=SmallCard(1 << 22), workspace=workspaces(AMPERE))
    with recorder.recording():
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                x @ x
    assert len(cublas(recorder)) == 2


def test_a_recompute_within_the_backward_pass_uses_the_backwards_workspace() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert [len(cublas(recorded(lambda: model(model(x))))) for _ in range(2)] == [1, 1], "each run takes its own"
    assert len(cublas(recorded(lambda: checkpoint(model, x, use_reentrant=False).sum().backward()))) == 2


def test_scratch_that_does_not_fit_is_out_of_memory_and_leaves_nothing_behind() -> None:
    gpu = SmallCard(16 * MIB)
    recorder = Recorder(device=gpu, workspace=workspaces(AMPERE))
    logits = torch.ones(3 * MIB)  # 12 MiB, and 12 MiB more within logsumexp
    with recorder.recording():
        recorder.mark(logits, Owner.OTHER, "logits")
        with pytest.raises(torch.OutOfMemoryError):
            logits.logsumexp(0)
        assert gpu.allocated_bytes == 12 * MIB
    assert sum(sign * block.size_bytes for _, sign, block in recorder.trace().walk()) == 12 * MIB
