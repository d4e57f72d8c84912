"""A loss or a gradient that is no number is told of at its step, though transformers logs another loss."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_trainers import trainer
from transformers import TrainerCallback

from autotrain_mem.report.run_history import event_line
from autotrain_mem.training.process.finite_values import FiniteValues
from autotrain_mem.training.process.world import World


class SpoilWeights(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            next(model.parameters()).data.fill_(math.nan)


def spoil_gradient(made: Any) -> None:
    weight = next(made.model.parameters())
    weight.register_hook(lambda gradient: gradient * (math.nan if made.state.global_step == 1 else 1))


def no_mean(made: Any) -> None:
    """As of a micro-batch in which no token counts."""
    step = made.training_step
    made.training_step = lambda *args: step(*args) * (math.nan if made.state.global_step == 1 else 1)


DISTURB: dict[str, Any] = {
    "weights": (lambda made: made.add_callback(SpoilWeights()), ("nan", "nan", True)),
    "gradient": (spoil_gradient, ("finite", "nan", True)),
    "mean": (no_mean, ("nan", "finite", False)),
    "nothing": (lambda made: None, None),
}


@pytest.mark.parametrize(("what", "logging_steps"), [(what, 3) for what in DISTURB] + [("gradient", 1)])
def test_the_first_step_that_is_no_number_is_told_of_once_and_what_it_spoils_takes_no_checkpoints_place(
    what: str, logging_steps: int, qwen: Path, tmp_path: Path
) -> None:
    disturb, expected = DISTURB[what]
    sizes = {"max_steps": 3, "gradient_accumulation_steps": 2, "logging_steps": logging_steps}
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    made, events = trainer("sft", qwen, tmp_path, **sizes | saves), []
    disturb(made)
    made.add_callback(FiniteValues(made, events.append, World(made.args)))
    made.train()
    is_spoilt = expected is not None and expected[2]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1" if is_spoilt else "checkpoint-3"]
    if expected is None:
        assert not events
        return
    (event,) = json.loads(json.dumps(events))
    assert event["step"] == 2
    assert (event["loss"], event["gradient"], event["spoils"]) == expected
    assert event_line(event).startswith(f"warning: step 2: loss {expected[0]}, norm of the gradient {expected[1]}: ")
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, logged)), "what transformers logs says nothing"


def test_what_ppo_logs_is_looked_at_and_a_gradient_that_a_scaler_judges_is_not(qwen: Path, tmp_path: Path) -> None:
    made, events = trainer("sft", qwen, tmp_path), []
    made.accelerator.scaler = torch.amp.GradScaler("cpu")
    values = FiniteValues(made, events.append, World(made.args))
    made.state.global_step = 4
    values.on_log(made.args, made.state, None, {"loss": 1.0, "grad_norm": math.inf})
    assert not events
    values.on_log(made.args, made.state, None, {"loss/policy_avg": math.nan})
    assert [(event["step"], event["spoils"]) for event in events] == [(4, True)]
