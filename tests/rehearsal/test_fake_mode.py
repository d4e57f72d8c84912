"""The fake mode's cached answers equal torch's own, and share the same storages."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotrain_mem.rehearsal import fake_mode
from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.rehearsal.known_values import KnownValues, know, known_value
from autotrain_mem.rehearsal.trace.recorder import Recorder

ATEN = torch.ops.aten


@pytest.fixture
def mode() -> Iterator[QuickFakeMode]:
    with torch.no_grad(), QuickFakeMode() as mode:
        yield mode


def tensors(offset: int = 0) -> dict[str, torch.Tensor]:
    """Those that calls are made with, new ones each time, at an offset in their storages."""
    matrix, turned, half = (torch.empty(26, dtype=each)[offset : offset + 24] for each in (None, None, torch.bfloat16))
    rows = torch.empty(3, dtype=torch.long)
    return {"matrix": matrix.view(4, 6), "turned": turned.view(6, 4).t(), "half": half.view(4, 6), "rows": rows}


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "new": (ATEN.exp.default, ("turned",), {}),
    "promoted": (ATEN.add.Tensor, ("matrix", "half"), {"alpha": 2}),
    "of no tensor": (ATEN.zeros.default, ([2, 3],), {"dtype": torch.float16, "device": torch.device("cpu")}),
    "view": (ATEN.slice.Tensor, ("matrix", 0, 1, 3), {}),
    "view of the storage": (ATEN.as_strided.default, ("matrix", [2, 2], [1, 2], 1), {}),
    "view of another size": (ATEN.view.dtype, ("matrix", torch.float16), {}),
    "expanded view": (ATEN.expand.default, ("matrix", [5, 4, 6]), {}),
    "in place": (ATEN.mul_.Tensor, ("matrix", "half"), {}),
    "several": (ATEN.native_layer_norm.default, ("matrix", [6], None, None, 1e-5), {}),
    "several and none": (
        ATEN.native_layer_norm_backward.default,
        ("matrix", "matrix", [6], "column", "column", None, None, [True, False, False]),
        {},
    ),
    "lists": (ATEN.cat.default, (["matrix", "half"], 1), {}),
    "written lists": (ATEN._foreach_add_.Scalar, (["matrix", "half"], 1.0), {}),
}


def filled(items: Any, found: dict[str, torch.Tensor]) -> Any:
    """Arguments with tensors in the place of their names."""
    if isinstance(items, str):
        return found["matrix"].narrow(1, 0, 1) if items == "column" else found[items]
    return type(items)(filled(item, found) for item in items) if isinstance(items, (list, tuple)) else items


def seen(result: Any, args: Any) -> Any:
    """All that can be told of a result: what it looks like, and which argument it is or shares its storage with."""
    if isinstance(result, (list, tuple)):
        return type(result), [seen(item, args) for item in result]
    if not isinstance(result, torch.Tensor):
        return result
    given = [item for item in args if isinstance(item, torch.Tensor)]
    storages = [item.untyped_storage()._cdata for item in given]
    return (
        (type(result), result.dtype, result.device, result.shape, result.stride(), result.storage_offset()),
        (result.untyped_storage().nbytes(), result.requires_grad, result.is_inference(), result.is_meta),
        torch._C._dispatch_keys(result).raw_repr(),
        sorted(result.__dict__),
        [result is item for item in given],
        [result.untyped_storage()._cdata == storage for storage in storages],
    )


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_what_torch_would_have_made(name: str, mode: QuickFakeMode) -> None:
    func, pattern, kwargs = CALLS[name]
    for offset in (0, 2):
        with FakeTensorMode() as plain, plain:
            args = filled(pattern, tensors(offset))
            expected = seen(func(*args, **kwargs), args)
        first, again = (filled(pattern, tensors(offset)) for _ in range(2))
        assert seen(func(*first, **kwargs), first) == expected
        with patch.object(FakeTensorMode, "_cached_dispatch_impl", side_effect=AssertionError("torch's own is asked")):
            assert seen(mode.answer(func, again, kwargs), again) == expected
            assert seen(func(*again, **kwargs), again) == expected, "the same from under the dispatcher"


def test_windows_of_one_tensor_take_the_first_ones_answer(mode: QuickFakeMode) -> None:
    image = torch.empty(8, 6)
    ATEN.exp.default(image[:4])
    assert mode.answer(ATEN.exp.default, (image[4:],), {}) is not NotImplemented


def test_what_is_known_of_one_tensor_is_not_known_of_the_next(mode: QuickFakeMode) -> None:
    known = torch.empty(4, 6)
    know(known, torch.Tensor())
    for _ in range(3):
        result = ATEN.exp.default(known)
        assert known_value(result) is None
        know(result, torch.Tensor())


ORDINARY = {
    "a dtype": lambda: torch.empty(4, 6, dtype=torch.float64),
    "a stride": lambda: torch.empty(6, 4).t(),
    "a larger storage": lambda: torch.empty(5, 6)[1:],
    "a resized storage": lambda: torch.empty(4, 6).resize_(8, 6).resize_(4, 6),
}


def test_arguments_that_look_different_and_numbers_of_different_types_are_different(mode: QuickFakeMode) -> None:
    plain, same = (mode._key(ATEN.exp.default, (torch.empty(4, 6),), {}) for _ in range(2))
    assert plain == same
    for name, other in ORDINARY.items():
        assert mode._key(ATEN.exp.default, (other(),), {}) != plain, name
    assert len({mode._key(ATEN.full.default, ([2], number), {}) for number in (1, 1.0, True)}) == 3


def test_what_is_no_ordinary_tensor_is_left_to_torch(mode: QuickFakeMode) -> None:
    with FakeTensorMode():
        of_another = torch.empty(2)
    for stranger in (
        torch.sparse_coo_tensor(size=(2, 2)),
        torch.tensor(3.0),  # a constant, whose value torch carries along
        of_another,
    ):
        assert isinstance(stranger, FakeTensor)
        assert mode.answer(ATEN.neg.default, (stranger,), {}) is NotImplemented


def test_a_torch_that_lacks_something_is_left_to_itself(mode: QuickFakeMode) -> None:
    fake_mode._is_quick.cache_clear()
    try:
        with patch.object(torch._C, "_dispatch_keys", side_effect=AttributeError("of a later torch")):
            assert not fake_mode._is_quick()
            assert QuickFakeMode().answer(ATEN.exp.default, (torch.empty(2),), {}) is NotImplemented
    finally:
        fake_mode._is_quick.cache_clear()
    assert fake_mode._is_quick()


LABELS = [[-100, -100, 7, 3], [-100, 5, 5, -100]]


class Rehearsal:
    """Fake tensors with known values among them, under a recorder, as the stage sets them up."""

    def __init__(self) -> None:
        self.mode = QuickFakeMode()
        self.values = KnownValues(self.mode)
        self.recorder = Recorder(self.values.run)

    def data(self, rows: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that arrives with a batch: known."""
        with torch._C._DisableTorchDispatch():
            real = torch.tensor(rows, dtype=dtype)
        fake = self.values.arrive({"x": real})["x"]
        assert isinstance(fake, torch.Tensor)
        return fake

    def weights(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor of the model: not known."""
        return torch.empty(shape, dtype=dtype)


@pytest.fixture
def rehearsal() -> Iterator[Rehearsal]:
    stage = Rehearsal()
    with stage.mode, stage.recorder:
        yield stage


def value_of(tensor: torch.Tensor) -> Any:
    """The known value as a list; fails when it is not known."""
    assert isinstance(tensor, FakeTensor)
    known = known_value(tensor)
    assert known is not None, "the value is not known"
    with torch._C._DisableTorchDispatch():
        assert (known.shape, known.dtype) == (tensor.shape, tensor.dtype), "a value of another shape or dtype"
        return known.tolist()


def is_known(tensor: torch.Tensor) -> bool:
    return known_value(tensor) is not None


Make = Callable[[Rehearsal], torch.Tensor]

KNOWN: dict[str, tuple[Make, Any]] = {
    "labels that are not masked": (lambda r: (r.data(LABELS) != -100).sum(), 4),
    "labels but the first": (lambda r: (r.data(LABELS)[..., 1:] != -100).sum(), 4),
    "a mask with a hole": (lambda r: r.data([[1, 1], [1, 0]]).bool().all(), False),
    "nonzero": (lambda r: (r.data(LABELS) != -100).nonzero(), [[0, 2], [0, 3], [1, 1], [1, 2]]),
    "a boolean index": (lambda r: (labels := r.data(LABELS))[labels != -100], [7, 3, 5, 5]),
    "unique": (lambda r: torch.unique(r.data(LABELS)), [-100, 3, 5, 7]),
    "repeat_interleave": (lambda r: torch.repeat_interleave(r.data([1, 0, 2])), [0, 2, 2]),
    "argsort": (lambda r: r.data([30, 10, 20]).argsort(), [1, 2, 0]),
    "arange": (lambda r: torch.arange(3), [0, 1, 2]),
    # Torch fills these on the host, unseen, and lifts them into the rehearsal as real tensors.
    "tensor": (lambda r: torch.tensor([1, 2]), [1, 2]),
    "new_tensor": (lambda r: torch.arange(2).new_tensor([1, 2]), [1, 2]),
    "cumsum": (lambda r: r.data([[1, 1, 0], [1, 1, 1]]).cumsum(-1), [[1, 2, 2], [1, 2, 3]]),
    "row": (lambda r: r.data(LABELS)[1], [-100, 5, 5, -100]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_follows_from_data_alone_is_known(name: str, rehearsal: Rehearsal) -> None:
    make, expected = KNOWN[name]
    made = make(rehearsal)
    assert value_of(made) == expected
    if not isinstance(expected, list):
        assert made.item() == expected, "read as it is"


def test_a_batch_arrives_with_its_values_and_keeps_what_is_no_tensor(rehearsal: Rehearsal) -> None:
    with torch._C._DisableTorchDispatch():
        labels = torch.tensor(LABELS)
    batch = rehearsal.values.arrive({"labels": labels, "seq_lengths": [[4], [4]]})
    with torch._C._DisableTorchDispatch():
        labels.zero_()
    assert value_of(batch["labels"]) == LABELS, "a later change on the host does not reach the device"
    assert batch["seq_lengths"] == [[4], [4]]


def test_weights_indexed_by_a_known_mask_have_the_true_size(rehearsal: Rehearsal) -> None:
    labels = rehearsal.data(LABELS)
    hidden = rehearsal.weights(2, 4, 16)
    selected = hidden[labels != -100]
    assert selected.shape == (4, 16)
    assert not is_known(selected)
    assert hidden.masked_select((labels != -100).unsqueeze(-1)).shape == (4,), "as large as the mask has ones"


def test_a_known_write_is_seen_through_every_view_and_in_no_copy(rehearsal: Rehearsal) -> None:
    """``labels[labels == pad] = -100`` hands the operator a real scalar tensor."""
    labels = rehearsal.data([[1, 2], [3, 4]])
    flat, row, copy = labels.view(-1), labels[1], labels.clone()
    labels[labels == 3] = -100
    row.mul_(2)
    copy[0].fill_(0)
    assert value_of(labels) == [[1, 2], [-200, 8]]
    assert value_of(flat) == [1, 2, -200, 8]
    assert value_of(row) == [-200, 8]
    assert value_of(copy) == [[0, 0], [3, 4]]


def test_a_write_by_an_operator_that_returns_nothing_is_not_missed(rehearsal: Rehearsal) -> None:
    """The in-place foreach operators; AdamW counts its steps with one."""
    steps = [rehearsal.data(0.0), rehearsal.data(1.0)]
    torch._foreach_add_(steps, 1)
    assert [value_of(step) for step in steps if is_known(step)] in ([1.0, 2.0], [])
    torch._foreach_copy_(steps, [rehearsal.weights(), rehearsal.weights()])
    assert not any(is_known(step) for step in steps)


UNKNOWN: dict[str, Make] = {
    "matmul": lambda r: r.weights(2, 2) @ r.weights(2, 2),
    "where": lambda r: torch.where(r.data([1.0, 2.0]) > 1, r.weights(2), r.data([1.0, 2.0])),
    "cat": lambda r: torch.cat([r.data([1.0, 2.0]), r.weights(2)]),
    "copy_": lambda r: r.data([1.0, 2.0]).copy_(r.weights(2)),
    "out": lambda r: torch.sin(r.weights(2), out=r.data([1.0, 2.0])),
    "bytes that nobody wrote": lambda r: torch.empty(3),
    "new_empty": lambda r: torch.zeros(3).new_empty(3),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_depends_on_the_weights_or_on_nothing_is_unknown(name: str, rehearsal: Rehearsal) -> None:
    assert not is_known(UNKNOWN[name](rehearsal))


def test_an_unknown_number_keeps_the_run_going(rehearsal: Rehearsal) -> None:
    assert isinstance(rehearsal.weights(4).mean().item(), float)
    assert rehearsal.weights(4).sum().item() > 0, "a loss is positive, a norm can be divided by"
    assert isinstance(rehearsal.weights(4).argmax().item(), int)
    assert not bool(torch.isnan(rehearsal.weights(4).sum()))
    assert not bool(torch.isinf(rehearsal.weights(4).sum()).any())


def test_an_unknown_selection_has_its_largest_possible_size(rehearsal: Rehearsal) -> None:
    scores = rehearsal.weights(3, 4)
    assert (scores > 0).nonzero().shape == (12, 2)
    assert scores[scores > 0].shape == (12,)
    assert scores.masked_select(scores > 0).shape == (12,)
    assert rehearsal.weights(3, 8)[rehearsal.weights(3) > 0].shape == (3, 8)


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "add_": lambda a, b: a.add_(b),
    "copy_": lambda a, b: a.copy_(b),
    "flip": lambda a, b: a.flip(0),
    "half": lambda a, b: a[:2],
    "where": lambda a, b: torch.where(a > b, a, b),
    "view": lambda a, b: a.view(-1),
    "sort": lambda a, b: a.sort().values,
}


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_a_value_that_is_known_is_the_true_one(program: list[tuple[str, int, int]]) -> None:
    """The same program on real tensors, whose second input stands for the weights; the rehearsal never sees it."""
    real = [torch.tensor([3, 1, 4, 1]), torch.tensor([2, 7, 1, 8])]
    stage = Rehearsal()
    with stage.mode, stage.recorder:
        fake = [stage.data([3, 1, 4, 1]), stage.weights(4, dtype=torch.long)]
        for name, first, second in program:
            i, j = first % len(real), second % len(real)
            if real[i].shape == real[j].shape:
                with torch._C._DisableTorchDispatch():
                    real.append(STEPS[name](real[i], real[j]))
                fake.append(STEPS[name](fake[i], fake[j]))
        assert not is_known(fake[1]) or any(name == "copy_" for name, *_ in program)
        for seen, true in zip(fake, real, strict=True):
            assert not is_known(seen) or value_of(seen) == true.tolist()
