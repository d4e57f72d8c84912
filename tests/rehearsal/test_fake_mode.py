"""What the mode answers from memory is what torch's own answers, and shares the storages that torch's shares."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotrain_mem.rehearsal import fake_mode
from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.rehearsal.known_values import know, known_value

ATEN = torch.ops.aten


@pytest.fixture
def mode() -> Iterator[QuickFakeMode]:
    with torch.no_grad(), QuickFakeMode() as mode:
        yield mode


def tensors() -> dict[str, torch.Tensor]:
    """Those that calls are made with, new ones each time."""
    return {
        "matrix": torch.empty(4, 6),
        "turned": torch.empty(6, 4).t(),
        "half": torch.empty(4, 6, dtype=torch.bfloat16),
        "rows": torch.empty(3, dtype=torch.long),
    }


CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "new": (ATEN.exp.default, ("turned",), {}),
    "promoted": (ATEN.add.Tensor, ("matrix", "half"), {"alpha": 2}),
    "of no tensor": (ATEN.zeros.default, ([2, 3],), {"dtype": torch.float16, "device": torch.device("cpu")}),
    "view": (ATEN.slice.Tensor, ("matrix", 0, 1, 3), {}),
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
    with FakeTensorMode() as plain, plain:
        args = filled(pattern, tensors())
        expected = seen(func(*args, **kwargs), args)
    first, again = (filled(pattern, tensors()) for _ in range(2))
    assert seen(func(*first, **kwargs), first) == expected
    with patch.object(FakeTensorMode, "_cached_dispatch_impl", side_effect=AssertionError("torch's own is asked")):
        assert seen(mode.answer(func, again, kwargs), again) == expected
        assert seen(func(*again, **kwargs), again) == expected, "the same from under the dispatcher"


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
    "an offset": lambda: torch.empty(5, 6)[1:],
    "a resized storage": lambda: torch.empty(4, 6).resize_(8, 6).resize_(4, 6),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_arguments_that_look_different_are_different(name: str, mode: QuickFakeMode) -> None:
    plain, other = torch.empty(4, 6), ORDINARY[name]()
    assert mode._key(ATEN.exp.default, (plain,), {}) == mode._key(ATEN.exp.default, (torch.empty(4, 6),), {})
    assert mode._key(ATEN.exp.default, (plain,), {}) != mode._key(ATEN.exp.default, (other,), {})


def test_numbers_of_different_types_are_different(mode: QuickFakeMode) -> None:
    keys = {mode._key(ATEN.full.default, ([2], number), {}) for number in (1, 1.0, True)}
    assert len(keys) == 3


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
