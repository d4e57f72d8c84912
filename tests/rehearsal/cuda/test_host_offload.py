"""Offloaded tensors leave the device's record, and are allocated again when they return (see also ``test_parity``)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from real_run import case, peak, rehearsed
from trl.models import activation_offloading

from autotrain_mem.rehearsal.cuda.host_offload import host_offloading
from autotrain_mem.rehearsal.fake_run import fake_tensors
from autotrain_mem.rehearsal.known_values import KnownValues, known_value
from autotrain_mem.rehearsal.trace.operator_costs import host_step
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Kind, Owner, Phase, Trace


def copied(trace: Trace, kind: Kind) -> dict[Phase, int]:
    """Returns the bytes of such copies by phase."""
    found: Counter[Phase] = Counter()
    for work in trace.work.work:
        if work.kind is kind:
            found[work.phase] += int((work.bytes + work.fixed_bytes) * work.count)
    return found


def test_what_leaves_the_device_in_a_forward_comes_back_in_the_backward(qwen: Path) -> None:
    trace = rehearsed(case("sft", qwen, activation_offloading=True, gradient_checkpointing=False))
    gone, back = (copied(trace, Kind.OVERLAPPED_COPY)[phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    # TRL keeps the last tensors until their copy is done, and may use them before.
    assert 0.9 * gone < back <= gone


def test_the_optimizer_on_the_host_gets_gradients_gives_weights_and_keeps_its_state(qwen: Path) -> None:
    ways = [{"optimizer_offload": True}, {}, {"optimizer_offload": True, "optim": "adamw_torch", "fp16": True}]
    on_host, on_device, plain = (rehearsed(case("sft", qwen, **way)) for way in ways)
    gradients = {block.module: block.size_bytes for block in on_host.blocks if block.owner is Owner.GRADIENTS}
    weights = sum(gradients.values())
    assert copied(on_host, Kind.COPY) == {Phase.OPTIMIZER_STEP: 2 * weights}
    assert copied(on_host, Kind.HOST_STEP) == {Phase.OPTIMIZER_STEP: 7 * weights}
    assert copied(plain, Kind.HOST_STEP) == {Phase.OPTIMIZER_STEP: 18 * weights}
    assert host_step([torch.ones(3)], fused=False, decays=True)[1].fixed_bytes == 20 * 3 * 4
    assert peak(on_host, Owner.OPTIMIZER_STATE) == 0
    for owner in (Owner.WEIGHTS, Owner.GRADIENTS):
        assert peak(on_host, owner) == peak(on_device, owner)
    saved = peak(on_device) - peak(on_host)
    assert saved > 0.99 * peak(on_device, Owner.OPTIMIZER_STATE) > 0


REAL_OR_FAKE = pytest.mark.parametrize("tensors", [nullcontext, fake_tensors], ids=["real", "fake"])
ELEMENTS = 1000


@contextmanager
def recording(model: Any = None, *, offload: bool = True, recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Within the block, saved tensors are offloaded and the device is recorded."""
    recorder = recorder or Recorder()
    with host_offloading(recorder):
        model = model or torch.nn.Linear(2, 2)
        context = activation_offloading.get_act_offloading_ctx_manager(model) if offload else nullcontext()
        with recorder.recording(), context:
            yield recorder


def chain(*, offload: bool) -> Trace:
    """Returns the record of 40 times sin, which saves its input."""
    out = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    with recording(offload=offload) as recorder:
        for _ in range(40):
            out = (out * 1.5).sin()
        out.sum().backward()
    return recorder.trace()


@REAL_OR_FAKE
def test_few_activations_are_on_the_device_at_once_and_what_returns_is_born_again(tensors: Callable[[], Any]) -> None:
    """TRL keeps the five last, whose copy may still run (``max_fwd_stash_size``), and copies on a stream of its own."""
    with tensors():
        offloaded, kept = (chain(offload=offload) for offload in (True, False))
    assert peak(kept) >= 40 * ELEMENTS * 4
    assert peak(offloaded) <= 10 * ELEMENTS * 4
    still_leaving = 5
    more = Counter(block.size_bytes for block in offloaded.blocks) - Counter(block.size_bytes for block in kept.blocks)
    assert 40 - still_leaving <= more[ELEMENTS * 4] <= 40
    aside = [block for block in offloaded.blocks if block.stream]
    assert {block.stream for block in aside} == {1}
    assert {block.size_bytes for block in aside} == {ELEMENTS * 4}
    assert 40 - still_leaving <= len(aside) <= 40
    assert not any(block.stream for block in kept.blocks)


def test_a_copy_that_is_contiguous_for_the_way_out_is_born_there_too() -> None:
    x = torch.ones(64, 32, requires_grad=True)
    with recording() as recorder:
        (x * 2).t().sin()
    (copy,) = [block for block in recorder.trace().blocks if block.stream == 1]
    assert copy.size_bytes == 64 * 32 * 4


@REAL_OR_FAKE
def test_what_is_referred_to_after_its_node_is_recorded_as_used_on_the_default_stream(
    tensors: Callable[[], Any],
) -> None:
    """TRL's own case for ``record_stream``: something has kept a view of the tensor that came back."""
    kept: list[torch.Tensor] = []
    with tensors():
        out = torch.ones(ELEMENTS, requires_grad=True)
        with recording() as recorder:
            for _ in range(10):
                out = _Saving.apply(out * 1.5, out, lambda saved: kept.append(saved.view(-1)))
            out.sum().backward()
        trace = recorder.trace()
    assert {use.stream for use in trace.stream_uses} == {0}
    assert {trace.blocks[use.block - 1].stream for use in trace.stream_uses} == {1}
    born = {event: index for index, event in enumerate(trace.events) if event > 0}
    assert all(born[use.block] < use.event for use in trace.stream_uses)


class _Saving(torch.autograd.Function):
    """Saves a tensor, and passes it to a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saved: torch.Tensor, look: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.save_for_backward(saved)
        ctx.look = look
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.look(ctx.saved_tensors[0])
        return grad * 2, None, None


@REAL_OR_FAKE
def test_a_view_is_not_taken_for_its_neighbour(tensors: Callable[[], Any]) -> None:
    """TRL recognises storages by address plus offset, which is 0 for all fake ones."""
    with tensors():
        out = torch.ones(ELEMENTS, requires_grad=True)
        with recording() as recorder:
            for _ in range(20):
                out = (out * 1.5)[1:].sin()
                out = (out * 1.5).sin()
            out.sum().backward()
    assert peak(recorder.trace()) <= 12 * ELEMENTS * 4, "five offloaded with their view's copy, and two current ones"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "offset": lambda x: x[1:],
    "strided": lambda x: x[:, ::2],
    "broadcast-columns": lambda x: x[:, :1].expand(-1, 64),
    "broadcast-rows": lambda x: x[0].expand(32, 64),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_comes_back_as_it_left(name: str) -> None:
    gradients = []
    for offload in (True, False):
        torch.manual_seed(0)
        x = torch.randn(32, 64, requires_grad=True)
        with recording(offload=offload):
            (VIEWS[name](x * 2).sin() * VIEWS[name](x.exp())).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@REAL_OR_FAKE
def test_weights_do_not_leave_the_device(tensors: Callable[[], Any]) -> None:
    """Neither do the transposed views that a product saves."""
    recorder = Recorder()
    with tensors():
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(20)])
        x = torch.ones(1, 64, requires_grad=True)
        recorder.adopt_model(model)
        with recording(model, recorder=recorder):
            model(x).sum().backward()
    weights_and_gradients = 20 + 20
    assert Counter(block.size_bytes for block in recorder.trace().blocks)[64 * 64 * 4] == weights_and_gradients


def test_the_values_of_fake_data_come_back_with_them() -> None:
    """The values of token ids and masks are still known."""
    ids, met = torch.arange(1000), list[Any]()
    with fake_tensors() as mode:
        values = KnownValues(mode)
        batch = values.arrive({"ids": ids})
        weight = torch.ones(1000, requires_grad=True)
        with recording(recorder=Recorder(values.run)):
            out = _Saving.apply(weight, batch["ids"] * 3, lambda saved: met.append(known_value(saved)))
            for _ in range(20):  # later tensors, so that the first one leaves the device
                out = out.sin()
            out.sum().backward()
    assert met[0].tolist() == (ids * 3).tolist()
