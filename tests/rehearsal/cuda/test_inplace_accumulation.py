"""Under a recorder a backward pass takes the memory that torch's profiler reports without one."""

import itertools
from collections.abc import Callable

import pytest
import torch
from real_run import peak
from torch.profiler import ProfilerActivity, profile

from autotrain_mem.rehearsal.trace.recorder import Recorder

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
