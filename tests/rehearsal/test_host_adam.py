"""DeepSpeed's Adam for the host steps as torch's does, without being compiled."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotrain_mem.rehearsal.ranks.zero_offload import HostAdam

RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.98), 1e-6, 0.1


def test_its_steps_are_those_of_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 65)) for _ in range(2))
    average, square = torch.zeros(65), torch.zeros(65)
    optimizer = torch.optim.AdamW([theirs], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    step = HostAdam().adam_update
    for number in range(1, 4):
        theirs.grad = torch.randn(65)
        optimizer.step()
        step(0, number, RATE, *BETAS, EPS, DECAY, True, ours.data, theirs.grad, average, square)
    torch.testing.assert_close(ours.data, theirs.data)
    torch.testing.assert_close(average, optimizer.state[theirs]["exp_avg"])


def test_it_looks_at_no_fake_values() -> None:
    with FakeTensorMode():
        tensors = [torch.ones(3) for _ in range(4)]
        assert HostAdam().adam_update(0, 1, RATE, *BETAS, EPS, DECAY, True, *tensors) == 0
