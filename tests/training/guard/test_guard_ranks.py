"""Under DDP each rank handles a full device by itself, and the gradient of every step is the undisturbed one.

As a script under torchrun, this file trains while a rank is out of memory in another place of each step."""

import os
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from guarded import NO_MEANS_OVER_ROWS, Faults, Told, blocks, fail_in_backward, fail_in_forward
from peft import LoraConfig
from tiny_trainers import rows, trainer
from transformers import TrainerCallback

from autotrain_mem.training.guard import ranks as ranks_module
from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.training.process.longest_batch import attach_longest_batch
from autotrain_mem.types import LearnedLimits
from tests.forked import Forge

averages = Mock(wraps=ranks_module.average)
UNTIMED = ("runtime", "second", "step_time", "eps")
Disturb = Callable[[Any], Any]


def after_gathering(*at: int) -> Disturb:
    """Between two of the collectives with which a trainer gathers what it logs."""

    def disturb(made: Any) -> None:
        gather, faults = made.accelerator.gather_for_metrics, Faults(list(at))

        def gather_once(value: Any) -> Any:
            gathered = gather(value)
            faults()
            return gathered

        made.accelerator.gather_for_metrics = gather_once

    return disturb


def before_any_gradient(made: Any) -> None:
    backward, faults = made.accelerator.backward, Faults([1])
    made.accelerator.backward = lambda loss, **options: (faults(), backward(loss, **options))


def learned(made: Any) -> None:
    """Its micro-batches are split before anything fails."""
    made.guard.context.limits["train_tokens"].most = 60


FORWARD, BACKWARD = "forward: split into 2 + 2 rows", "backward: split into 2 + 2 rows"
PAIRS = "split into 2 + 2 pairs"
HOST = "forward: repeated with activations offloaded to the host"
Befalls = tuple[Disturb | None, list[str]]
CALM: Befalls = (None, [])

LORA = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "v_proj"])
STEPS: dict[str, dict[str, tuple[Befalls, Befalls]]] = {
    "sft": {
        "nothing": (CALM, CALM),
        "backward of the first micro-step": ((partial(fail_in_backward, at=[0]), [BACKWARD]), CALM),
        "backward of the last micro-step": ((partial(fail_in_backward, at=[1]), [BACKWARD]), CALM),
        "before any gradient of the last": (CALM, (before_any_gradient, [BACKWARD])),
        "both ranks in different places": (
            (partial(fail_in_backward, at=[1]), [BACKWARD]),
            (partial(fail_in_forward, at=[1, 3, 4]), [FORWARD, "forward: split into 1 + 1 rows", HOST]),
        ),
        "between two metrics": (CALM, (after_gathering(1), [FORWARD])),
        "learned before": (CALM, (learned, [])),
        "evaluation": ((partial(fail_in_forward, at=[0], training=False), ["evaluate: split into 4 + 4 rows"]), CALM),
    },
    "dpo": {
        "adapters that are switched off and on": (
            (partial(fail_in_forward, at=[0]), [f"forward: {PAIRS}"]),
            (partial(fail_in_backward, at=[1]), [f"backward: {PAIRS}"]),
        )
    },
    "grpo": {"metrics of many kinds": (CALM, (partial(fail_in_forward, at=[0]), [FORWARD]))},
}
"""A step has two training forwards where nothing is repeated."""
AVERAGED = {"sft": [1, 1, 1, 1, 2, 1, 1, 0], "dpo": [1], "grpo": [1]}
"""How often a step's gradients are averaged after its backward passes: not if DDP did during the last one, once if the
first of two micro-steps or the last backward pass failed, twice if the last forward pass did."""
TOLERANCE = 1e-5
"""Of fp32 sums in another order, of the largest number in a parameter's gradient; the worst was 9e-7."""
CHANGES: dict[str, dict[str, Any]] = {
    # DDP looks for unused parameters where transformers lets it: with adapters, and without checkpointing.
    "sft": {"ddp_find_unused_parameters": False, "eval_strategy": "steps", "eval_steps": len(STEPS["sft"])},
    "dpo": {"build": {"peft_config": LORA}},
    "grpo": {"ddp_find_unused_parameters": False},
}


class Disturbances(TrainerCallback):
    def __init__(self, made: Any, disturb: list[Disturb | None]) -> None:
        self.made = made
        self.left = disturb
        self.gradients: list[dict[str, Any]] = []
        self.averaged: list[int] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        for name in ("gather_for_metrics", "backward"):
            vars(self.made.accelerator).pop(name, None)
        averages.reset_mock()
        for block in blocks(self.made):
            block._forward_pre_hooks.clear()
        if hasattr(self.made, "guard"):
            context = self.made.guard.context
            context.limits["train_tokens"].most, context.on_host = None, False
            if (disturb := self.left.pop(0)) is not None:
                disturb(self.made)

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.averaged.append(averages.call_count)
        named = getattr(model, "module", model).named_parameters()
        self.gradients.append({name: None if each.grad is None else each.grad.clone() for name, each in named})


def train(method: str, folder: pathlib.Path, model: pathlib.Path, rank: int | None) -> tuple[Disturbances, Any, Told]:
    """Train; as trl's own class does where no rank is given."""
    told, steps, changes = Told(), STEPS[method], dict(CHANGES.get(method, {}))
    torch.manual_seed(0)  # of the adapters
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": len(steps)}
    sizes |= {"learning_rate": 1e-5}
    evaluated = rows(method) if "eval_strategy" in changes else None
    made = trainer(method, model, folder / "out", eval_dataset=evaluated, **sizes, **changes)
    disturb = [] if rank is None else [ranks[rank][0] for ranks in steps.values()]
    if rank is not None:
        if method == "grpo":  # a parameter that no rank uses: DDP alone ends such a run, unless it looks for them
            made.model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
        made.guard = attach_guard(made, learned=LearnedLimits(), on_incident=told)
        if method == "sft":  # nothing befalls its first step, whose numbers are then the same to the bit
            attach_longest_batch(made, lambda batch: None)
    callback = Disturbances(made, disturb)
    made.add_callback(callback)
    made.train()
    return callback, made, told


def largest_error(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative to the largest number in its parameter's."""
    relative = [0.0]
    for name, gradient in gradients.items():
        other = expected.get(name)
        assert (gradient is None) == (other is None), name
        if gradient is not None and other.abs().max() > 0:
            relative.append(float((gradient - other).abs().max() / other.abs().max()))
    return max(relative)


def logs(made: Any) -> list[dict[str, float]]:
    """Everything but times, of each step and of the evaluation."""
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in UNTIMED)}
        for entry in made.state.log_history
        if "train_runtime" not in entry
    ]


def main() -> None:
    model, folder, rank = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(os.environ["RANK"])
    ranks_module.average = averages
    for method, steps in STEPS.items():
        expected, plain, _ = train(method, folder, model, None)
        callback, made, told = train(method, folder, model, rank)
        assert callback.averaged == AVERAGED[method], (method, callback.averaged)
        for number, (name, ranks) in enumerate(steps.items()):
            evaluates, case = name == "evaluation", f"{method}: {name}"
            error = largest_error(callback.gradients[number], expected.gradients[number])
            assert error < TOLERANCE, (case, error)
            incidents = [f"{each.phase}: {each.remedy}" for each in told.incidents if each.step == number + evaluates]
            assert incidents == ranks[rank][1], (case, incidents)
        both = [*zip(logs(made), logs(plain), strict=True)]
        assert len(both) == len(steps) + (method == "sft"), "with its evaluation"
        assert method != "sft" or both[0][0] == both[0][1], "nothing befell it"
        for logged, wanted in both:
            assert logged.keys() == wanted.keys()
            for name in [name for name in logged if not any(each in name for each in NO_MEANS_OVER_ROWS)]:
                assert logged[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), (name, logged, wanted)
    torch.distributed.destroy_process_group()


def test_averaging_reaches_parameters_in_the_order_in_which_ddp_can_overlap_a_models_backward() -> None:
    parameters, reached = [torch.nn.Parameter(torch.ones(2)) for _ in range(12)], list[int]()
    for number, each in enumerate(parameters):
        each.register_post_accumulate_grad_hook(lambda _, number=number: reached.append(number))
    ranks_module._nothing(parameters).backward()
    assert reached == [*reversed(range(12))]
    assert not any(each.grad.any() for each in parameters)


@pytest.mark.slow
def test_steps_that_one_rank_repeats_stay_the_same(qwen: pathlib.Path, tmp_path: pathlib.Path, forge: Forge) -> None:
    script = pathlib.Path(__file__)
    path = os.pathsep.join((str(script.parent), str(script.parents[1]), os.environ.get("PYTHONPATH", "")))
    forge.two_ranks([script, qwen, tmp_path], tmp_path / "log", PYTHONPATH=path)


if __name__ == "__main__":
    main()
