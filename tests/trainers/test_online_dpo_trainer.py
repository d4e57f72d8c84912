"""Our subclass of TRL's OnlineDPOTrainer: TRL's numbers to the bit, and gradients that are means over a step's rows."""

import importlib
import pathlib
from typing import Any

import pytest
import torch

from autotrain_mem.trainers.online_dpo_trainer import OnlineDPOTrainer
from tests.training.tiny_trainers import trainer

pytestmark = [pytest.mark.slow, pytest.mark.newest]


def trls() -> Any:
    return importlib.import_module("trl.experimental.online_dpo")


def test_one_micro_batch_a_step_trains_as_trls_own_to_the_bit(qwen: pathlib.Path, tmp_path: pathlib.Path) -> None:
    logs, weights = [], []
    for kind in (trls().OnlineDPOTrainer, OnlineDPOTrainer):
        made = trainer("online_dpo", qwen, tmp_path, kind=kind)
        made.train()
        logs.append([entry for entry in made.state.log_history if "loss" in entry])
        weights.append([value.detach().clone() for value in made.model.state_dict().values()])
    assert len(logs[0]) == 3
    assert logs[0] == logs[1]
    assert all(map(torch.equal, *weights))


def gradient(kind: Any, folder: pathlib.Path, out: pathlib.Path, micro_steps: int) -> tuple[torch.Tensor, float]:
    """Of the same micro-batch with the same completions, that many times; and the loss that is told."""
    made = trainer("online_dpo", folder, out, kind=kind, gradient_accumulation_steps=micro_steps)
    made.create_optimizer_and_scheduler(1)
    made.current_gradient_accumulation_steps = micro_steps
    told = 0.0
    for _ in range(micro_steps):
        torch.manual_seed(0)
        told += float(made.training_step(made.model, {"prompt": ["What is 1 plus 2?", "What is 3?"]}))
    return torch.cat([value.grad.flatten() for value in made.model.parameters()]), told


def test_gradients_of_micro_batches_are_a_mean_trls_are_a_sum(qwen: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Where TRL divides by itself one day, the last line fails, and our division has to go."""
    folder = qwen
    one, loss = gradient(OnlineDPOTrainer, folder, tmp_path, 1)
    two, loss_of_two = gradient(OnlineDPOTrainer, folder, tmp_path, 2)
    torch.testing.assert_close(two, one)
    assert one.abs().max() > 1e-3
    assert loss_of_two == pytest.approx(loss)
    torch.testing.assert_close(gradient(trls().OnlineDPOTrainer, folder, tmp_path, 2)[0], 2 * one)
