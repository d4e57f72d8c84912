"""The bytes of real tensors are recorded under the right phase, owner and module; gradients add up as torch says."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_run import peak
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from trace_reading import SmallCard, live

from autotrain_mem.rehearsal.trace.ledger import PinnedMemory
from autotrain_mem.rehearsal.trace.recorder import Recorder, Scratch
from autotrain_mem.support.units import KIB
from autotrain_mem.types import CACHE_EMPTIED, Block, Owner, Phase, Trace

FLOAT = 4
N = 1000
"""Elements of a planted tensor: 4,000 bytes, a size that nothing else here has."""


def events(recorder: Recorder) -> list[int]:
    return list(recorder.trace().events)


def live_bytes(trace: Trace) -> int:
    return sum(sign * block.size_bytes for _, sign, block in trace.walk())


def of_size(trace: Trace, size_bytes: int) -> list[Block]:
    return [block for block in trace.blocks if block.size_bytes == size_bytes]


def test_a_storage_that_gets_its_bytes_back_keeps_its_owner_and_name() -> None:
    """FSDP2 frees a parameter's storage, and refills it by operators that return nothing; here it dies unrecorded."""
    with Recorder().recording() as recorder:
        tensor = torch.zeros(N)
        recorder.mark(tensor, Owner.WEIGHTS, "layer.weight")
        tensor.untyped_storage().resize_(0)
        assert events(recorder) == [1, -1]
        tensor.untyped_storage().resize_(N * FLOAT)
        tensor.zero_()
        assert events(recorder) == [1, -1, 2]
        assert {(block.owner, block.module) for block in recorder.trace().blocks} == {(Owner.WEIGHTS, "layer.weight")}
    del tensor
    assert events(recorder) == [1, -1, 2, -2]


def test_a_models_parameters_and_buffers_are_weights_under_their_names() -> None:
    model = torch.nn.BatchNorm1d(N, dtype=torch.float64)
    recorder = Recorder()
    recorder.adopt_model(model)
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    expected = [(name, Owner.WEIGHTS, 8 if name == "num_batches_tracked" else N * 8) for name in names]
    assert [(block.module, block.owner, block.size_bytes) for block in recorder.trace().blocks] == expected


@pytest.mark.parametrize(
    ("phase", "owner"),
    [(Phase.FORWARD, Owner.ACTIVATIONS)]
    + [(each, Owner.TEMPORARY) for each in (Phase.BACKWARD, Phase.OPTIMIZER_STEP, Phase.EVALUATE, Phase.SAVE)],
)
def test_only_what_a_forward_keeps_is_activations(phase: Phase, owner: Owner) -> None:
    with Recorder().recording() as recorder:
        recorder.enter_phase(phase)
        with torch.set_grad_enabled(phase is Phase.FORWARD):
            kept, dropped = torch.zeros(N), torch.zeros(2 * N)
            del dropped
        recorder.enter_phase(Phase.LOAD)
        del kept
    assert [block.owner for block in recorder.trace().blocks] == [owner, Owner.TEMPORARY]


def test_a_module_that_raises_leaves_the_stack_of_names() -> None:
    model = torch.nn.ModuleDict({"small": torch.nn.Linear(1, 1), "linear": torch.nn.Linear(10, 30)})
    with Recorder().recording() as recorder:
        recorder.adopt_model(model)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model["small"](torch.zeros(1, 10))
        outside = torch.zeros(N)
        inside = model["linear"](torch.zeros(11, 10))
        trace = recorder.trace()
    assert [block.module for block in of_size(trace, N * FLOAT)] == [""]
    assert [block.module for block in of_size(trace, 11 * 30 * FLOAT)] == ["linear"]
    del outside, inside


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_what_a_checkpoint_recomputes_in_the_backward_pass_is_activations(use_reentrant: bool) -> None:
    leaf = torch.ones(N, requires_grad=True)
    with Recorder().recording() as recorder:
        recorder.enter_phase(Phase.FORWARD)
        loss = checkpoint(lambda x: (x.exp().exp() * 2).sum(), leaf, use_reentrant=use_reentrant)
        kept_by_forward = [block for block in live(recorder.trace()) if block.size_bytes == N * FLOAT]
        recorder.enter_phase(Phase.BACKWARD)
        loss.backward()
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
    assert not kept_by_forward, "a checkpoint keeps only its inputs"
    born = {(phase, block.owner, block.size_bytes): block for phase, sign, block in recorder.trace().walk() if sign > 0}
    activations = [block for block in of_size(recorder.trace(), N * FLOAT) if block.owner is Owner.ACTIVATIONS]
    assert len(activations) == 2, "each exp keeps its result for the backward pass"
    assert (Phase.BACKWARD, Owner.ACTIVATIONS, N * FLOAT) in born
    assert (Phase.FORWARD, Owner.ACTIVATIONS, N * FLOAT) not in born
    assert (Phase.BACKWARD, Owner.TEMPORARY, N * FLOAT) in born, "intermediate gradients"


def test_out_of_memory_passes_through_a_forward_and_a_backward() -> None:
    leaf = torch.ones(1024, requires_grad=True)
    device = SmallCard(10 * KIB)  # exp's result and the loss; its gradient and the leaf's are two too many
    with Recorder(device=device).recording():
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.nn.functional.linear(torch.zeros(32, 16), torch.zeros(64, 16))
        assert device.allocated_bytes == 0, "the failed forward freed its memory"
        loss = leaf.exp().exp().sum()
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            loss.backward()
        del loss
        assert device.allocated_bytes == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["make", "view", "drop", "in_place", "resize", "empty", "refill", "copy", "phase"]),
        st.integers(0, 7),
        st.integers(1, 300),
    ),
    max_size=40,
)


def storages(tensors: list[torch.Tensor]) -> dict[int, int]:
    with torch._C._DisableTorchDispatch():
        kept = [tensor.untyped_storage() for tensor in tensors]
        return {storage._cdata: storage.nbytes() for storage in kept}


@settings(deadline=None, max_examples=60)
@given(steps)
def test_births_less_deaths_are_the_bytes_of_live_storages(program: list[tuple[str, int, int]]) -> None:
    tensors: list[torch.Tensor] = []
    device = SmallCard()
    recorder = Recorder(device=device)
    phases = list(Phase)
    with recorder.recording():
        for action, index, size in program:
            if action == "make" or not tensors:
                tensors.append(torch.zeros(size, dtype=torch.uint8))
            chosen = index % len(tensors)
            if action == "view":
                tensors.append(tensors[chosen].view(-1)[:1])
            elif action == "drop":
                del tensors[chosen]
            elif action == "in_place":
                tensors[chosen].add_(1)
            elif action == "resize":
                tensors[chosen].resize_(size)
            elif action in ("empty", "refill"):
                storage = tensors[chosen].untyped_storage()
                before = storage.nbytes()
                storage.resize_(0)
                if action == "refill":
                    storage.resize_(before)
                    tensors[chosen].zero_()
                else:  # torch would crash if a view were used after its bytes
                    tensors = [tensor for tensor in tensors if tensor.untyped_storage()._cdata != storage._cdata]
                del storage
            elif action == "copy":
                tensors.append(tensors[chosen].clone())
            elif action == "phase":
                recorder.enter_phase(phases[index % len(phases)])
        trace = recorder.trace()
        assert live_bytes(trace) == sum(storages(tensors).values())
        assert sum(device._live.values()) == device.allocated_bytes
        tensors.clear()
        trace = recorder.trace()
    assert live_bytes(trace) == 0
    assert device.allocated_bytes == 0
    births = [event for event in trace.events if event > 0]
    assert births == list(range(1, len(trace.blocks) + 1)), "blocks are numbered in the order of their births"
    assert sorted(-event for event in trace.events if event < 0) == births, "every block dies exactly once"


def test_scratch_is_born_after_the_result_and_dead_before_the_next_operator() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    scratch = {torch.ops.aten.relu.default: (Scratch(3 * N),)}
    recorder = Recorder(workspace=lambda operator, args, kwargs, out: scratch.get(operator, ()))
    recorder.adopt_model(model)
    with recorder.recording():
        x = torch.ones(N)
        total = model(x) + 1
        trace = recorder.trace()
    assert list(trace.events) == [1, 2, 3, -3, 4, -2]
    assert trace.blocks[2] == Block(size_bytes=3 * N, owner=Owner.TEMPORARY, module="0")
    del total


def test_an_emptied_cache_is_an_event_in_its_place() -> None:
    device = SmallCard()
    recorder = Recorder(device=device)
    with recorder.recording():
        first = torch.ones(N)
        recorder.empty_cache()
        recorder.enter_phase(Phase.FORWARD)
        second = torch.ones(N)
        del first
        recorder.empty_cache()
    trace = recorder.trace()
    assert list(trace.events) == [1, CACHE_EMPTIED, 2, -1, CACHE_EMPTIED]
    assert trace.phase_starts == ((0, Phase.LOAD), (2, Phase.FORWARD))
    assert device.emptied == 2
    del second


def test_a_use_on_another_stream_is_recorded_before_the_events_that_follow() -> None:
    device = SmallCard()
    recorder = Recorder(device=device)
    with recorder.recording():
        paged = torch.ones(N)
        recorder.disown(paged)
        first = torch.ones(N)
        with recorder.on_stream(1):
            second = torch.ones(N)
        recorder.record_stream(second, 0)
        recorder.record_stream(first.view(10, -1), 2)
        recorder.record_stream(paged, 2)
        recorder.record_stream(first, 0)  # its own: ``recordStream`` returns at once
        del second
        recorder.record_stream(first, 1)
    trace = recorder.trace()
    assert list(trace.events) == [1, 2, -2]
    assert trace.stream_uses == ((2, 2, 0), (2, 1, 2), (3, 1, 1))
    assert device.stream_uses == [(2, 0), (1, 2), (0, 2), (1, 1)]
    assert device.streams == {0: 0, 1: 0, 2: 1}
    assert [block.stream for block in trace.blocks] == [0, 1]
    del first, paged


def test_memory_without_a_tensor_is_allocated_while_it_is_taken() -> None:
    device = SmallCard(4 * KIB)
    recorder = Recorder(device=device)
    with recorder.taken(4 * KIB, Owner.TEMPORARY, "warm-up"):
        assert device.allocated_bytes == 4 * KIB
    (block,) = recorder.trace().blocks
    assert (block.size_bytes, block.owner, block.module) == (4 * KIB, Owner.TEMPORARY, "warm-up")
    assert events(recorder) == [1, -1]
    assert device.allocated_bytes == 0
    with pytest.raises(torch.OutOfMemoryError), recorder.taken(5 * KIB, Owner.TEMPORARY, "warm-up"):
        raise AssertionError
    assert live_bytes(recorder.trace()) == 0


class Holder:
    """Holds a pinned tensor."""


def test_a_freed_pinned_block_serves_its_own_size_and_stays() -> None:
    pinned = PinnedMemory()
    first, second = Holder(), Holder()
    pinned.take(first, 60)
    pinned.take(second, 64)
    del first
    third = Holder()
    pinned.take(third, 50)
    assert pinned.peak_bytes == 2 * 64
    fourth = Holder()
    pinned.take(fourth, 20)
    assert pinned.peak_bytes == 2 * 64 + 32
    del second, third, fourth
    assert pinned.peak_bytes == 2 * 64 + 32

    pinned.keep([60, 60])
    pinned.keep([60, 60])
    assert pinned.peak_bytes == 4 * 64 + 32, "the last call counts"


ROWS, WIDTH = 64, 256
SLACK_BYTES = 4096
"""Scalars and 64-byte alignment, which only torch's profiler counts."""


def residual(x: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(WIDTH, WIDTH)
    hidden = x * 2.0
    for _ in range(3):
        hidden = hidden + (hidden @ weight).tanh()
    return hidden.sum()


def gathered(x: torch.Tensor) -> torch.Tensor:
    logits = x / 0.9
    chosen = logits.gather(-1, torch.zeros(ROWS, 1, dtype=torch.long))
    return (chosen - logits.logsumexp(-1, keepdim=True)).sum()


def indexed(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2.0
    return (hidden[torch.arange(ROWS // 2)].exp().sum() + hidden.tanh().sum()) * 1.0


def largest(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2.0
    return hidden.max(-1).values.sum() + hidden.tanh().sum()


def shared(x: torch.Tensor) -> torch.Tensor:
    """Both parts get the sum's gradient itself, and add to it."""
    first, second = x * 2.0, x * 3.0
    return ((first + second).exp() + first.sin() + second.cos()).sum()


def kept_by_the_user(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 2.0
    hidden.retain_grad()
    return (hidden.exp() * hidden.sin()).sum()


GRAPHS = [residual, gathered, indexed, largest, shared, kept_by_the_user]


def run(graph: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = torch.linspace(0.0, 1.0, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()
    graph(x).backward()
    assert x.grad is not None
    return x.grad


def peak_by_torch(graph: Callable[[torch.Tensor], torch.Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(graph)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), index) for index, event in enumerate(events) if event.name() == "[memory]")
    return max(itertools.accumulate(events[index].nbytes() for _, index in changes))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_a_backward_pass_peaks_where_torch_says_and_its_gradients_are_the_same(
    graph: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with Recorder() as recorder:
        gradient = run(graph)
    assert abs(peak(recorder.trace()) - peak_by_torch(graph)) <= SLACK_BYTES
    assert torch.equal(gradient, run(graph))


def test_a_sum_that_someone_holds_is_left_alone() -> None:
    class Adding(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            held = grad * 2.0
            total = held + grad
            return total - held

    x = torch.ones(ROWS, requires_grad=True)
    with Recorder():
        Adding.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(ROWS))
