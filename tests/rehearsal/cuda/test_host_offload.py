"""What goes to the host leaves the record of the device; what comes back is born again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from real_run import Case, Folder, assert_alike, case, peak, rehearsed
from trl.models import activation_offloading

from autotrain_mem.rehearsal.cuda.host_offload import host_offloading
from autotrain_mem.rehearsal.fake_run import fake_tensors
from autotrain_mem.rehearsal.known_values import KnownValues, known_value
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Owner, Phase, Trace
from autotrain_mem.types.work import Kind


@pytest.fixture
def training(model_folder: Folder) -> Callable[..., Case]:
    """``training(activation_offloading=True)``: a small one with these knobs."""
    return partial(case, "sft", model_folder("qwen2"))


@pytest.mark.parametrize(
    "knobs",
    [
        {"activation_offloading": True, "gradient_checkpointing": False},
        {"activation_offloading": True, "gradient_checkpointing": True, "use_peft": True},
        {"optimizer_offload": True, "optim": "adamw_torch"},
        {"optimizer_offload": True, "optim": "adagrad"},  # it starts with state
    ],
    ids=str,
)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    knobs: dict[str, Any], training: Callable[..., Case], tmp_path: Path
) -> None:
    fake, true, _ = assert_alike(training(**knobs), tmp_path)
    assert [block.stream for block in fake.blocks] == [block.stream for block in true.blocks]
    assert {block.stream for block in fake.blocks} == ({0, 1} if "activation_offloading" in knobs else {0})
    assert [use[1:] for use in fake.stream_uses] == [use[1:] for use in true.stream_uses]
    assert peak(fake, Owner.ACTIVATIONS) == peak(true, Owner.ACTIVATIONS)


def copied(trace: Trace, kind: Kind) -> dict[Phase, float]:
    """Bytes of a micro-step, or an optimizer step, by phase."""
    found: dict[Phase, float] = {}
    for work in trace.work.work:
        if work.kind is kind:
            found[work.phase] = found.get(work.phase, 0.0) + (work.bytes + work.fixed_bytes) * work.count
    return found


def test_what_leaves_the_device_in_a_forward_comes_back_in_the_backward(training: Callable[..., Case]) -> None:
    trace = rehearsed(training(activation_offloading=True, gradient_checkpointing=False))
    gone, back = (copied(trace, Kind.OVERLAPPED_COPY)[phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
    # The last to leave may come back before their copy is done, and are then taken from where they were.
    assert 0.9 * gone < back <= gone


def test_the_optimizer_on_the_host_gets_gradients_and_gives_weights_and_keeps_its_state_there(
    training: Callable[..., Case],
) -> None:
    on_host, on_device = (rehearsed(training(optimizer_offload=there)) for there in (True, False))
    gradients = {block.module: block.size_bytes for block in on_host.blocks if block.owner is Owner.GRADIENTS}
    weights = sum(gradients.values())
    assert copied(on_host, Kind.COPY) == {Phase.OPTIMIZER_STEP: 2 * weights}
    assert copied(on_host, Kind.HOST_STEP) == {Phase.OPTIMIZER_STEP: 7 * weights}
    assert peak(on_host, Owner.OPTIMIZER_STATE) == 0
    for owner in (Owner.WEIGHTS, Owner.GRADIENTS):
        assert peak(on_host, owner) == peak(on_device, owner)
    saved = peak(on_device) - peak(on_host)
    assert saved > 0.99 * peak(on_device, Owner.OPTIMIZER_STATE) > 0, "all, or the peak moves into the backward pass"


REAL_OR_FAKE = pytest.mark.parametrize("tensors", [nullcontext, fake_tensors], ids=["real", "fake"])
ELEMENTS = 1000


@contextmanager
def recording(model: Any = None, *, offload: bool = True, recorder: Recorder | None = None) -> Iterator[Recorder]:
    """Inside, what a forward pass saves goes to the host, and the device is recorded."""
    recorder = recorder or Recorder()
    with host_offloading(recorder):
        model = model or torch.nn.Linear(2, 2)
        context = activation_offloading.get_act_offloading_ctx_manager(model) if offload else nullcontext()
        with recorder.recording(), context:
            yield recorder


def chain(*, offload: bool) -> Trace:
    """What is recorded of 40 times sin, each of which saves its input."""
    out = torch.linspace(0, 1, ELEMENTS).requires_grad_()
    with recording(offload=offload) as recorder:
        for _ in range(40):
            out = (out * 1.5).sin()
        out.sum().backward()
    return recorder.trace()


@REAL_OR_FAKE
def test_few_activations_are_on_the_device_at_once_and_what_comes_back_is_born_again(
    tensors: Callable[[], Any],
) -> None:
    """TRL keeps the five last, whose copy may still run (``max_fwd_stash_size``), and copies on one stream of its own,
    beside the default one on which the rest of the training stays."""
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
def test_what_is_still_referred_to_after_its_node_is_recorded_as_used_on_the_default_stream(
    tensors: Callable[[], Any],
) -> None:
    """TRL's own case for ``record_stream``: something has kept a view of the tensor that came back."""
    with tensors():
        _Keep.kept = []
        out = torch.ones(ELEMENTS, requires_grad=True)
        with recording() as recorder:
            for _ in range(10):
                out = _Keep.apply(out * 1.5)
            out.sum().backward()
        trace = recorder.trace()
        _Keep.kept = []
    assert {use.stream for use in trace.stream_uses} == {0}
    assert {trace.blocks[use.block - 1].stream for use in trace.stream_uses} == {1}
    born = {event: index for index, event in enumerate(trace.events) if event > 0}
    assert all(born[use.block] < use.event for use in trace.stream_uses)


class _Keep(torch.autograd.Function):
    """Holds on to what comes back."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        _Keep.kept.append(x.view(-1))
        return grad * x


@REAL_OR_FAKE
def test_a_view_is_not_taken_for_its_neighbour(tensors: Callable[[], Any]) -> None:
    """TRL tells storages apart by address plus offset: fake ones all lie at 0, and numbered ones lie close together."""
    with tensors():
        out = torch.ones(ELEMENTS, requires_grad=True)
        with recording() as recorder:
            for _ in range(20):
                out = (out * 1.5)[1:].sin()
                out = (out * 1.5).sin()
            out.sum().backward()
    assert peak(recorder.trace()) <= 12 * ELEMENTS * 4, "five sent away, each with the view's copy, and two of now"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(-1, 64),
        lambda x: x[0].expand(32, 64),
    ],
    ids=["whole", "transposed", "offset", "strided", "broadcast-columns", "broadcast-rows"],
)
def test_a_view_comes_back_as_it_left(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def gradient(offload: bool) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(32, 64, requires_grad=True)
        with recording(offload=offload):
            (view(x * 2).sin() * view(x.exp())).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


@REAL_OR_FAKE
def test_weights_do_not_leave_the_device(tensors: Callable[[], Any]) -> None:
    """Neither as parameters nor as the transposed views that a product saves."""
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
    """What is known about token ids and masks is known after their way to the host too."""
    ids = torch.arange(1000)
    with fake_tensors() as mode:
        values = KnownValues(mode)
        batch = values.arrive({"ids": ids})
        weight = torch.ones(1000, requires_grad=True)
        with recording(recorder=Recorder(values.run)):
            out = _Scale.apply(weight, batch["ids"] * 3)
            for _ in range(20):
                out = out.sin()
            out.sum().backward()
    assert _Scale.met is not None
    assert _Scale.met.tolist() == (ids * 3).tolist()


class _Scale(torch.autograd.Function):
    """Saves data, and looks at its value in the backward pass; long after, so that it did leave."""

    met: torch.Tensor | None = None

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Scale.met = known_value(ctx.saved_tensors[0])
        return grad, None
