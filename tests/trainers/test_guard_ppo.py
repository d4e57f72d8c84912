"""A PPO run on a device that refuses: what was done in parts gives what the whole would have given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_runs import NEEDS_PPO, config, logged, models, prompts, same_weights, trainer, weights

from autotrain_mem.types import Learned, Phase
from tests.training.guard.guarded import Told

pytestmark = NEEDS_PPO

ROWS = 5
"""Of a micro-batch: odd, so that its parts differ."""
UPDATES = 2


class Run(Told):
    """A run, before and after it trained, and what its guard told."""

    def __init__(self, built: Any) -> None:
        super().__init__()
        self.trainer = built

    def met(self) -> list[tuple[Phase, str]]:
        return [(incident.phase, incident.remedy) for incident in self.incidents]


Start = Callable[..., Run]


def guard(run: Run, learned: Learned | None = None, grow_after: int = 100) -> None:
    from autotrain_mem.training.guard.attach import attach_guard

    attach_guard(run.trainer, learned=learned or Learned(), on_incident=run, grow_after=grow_after)


def built(model: Path, folder: Path, *, use_lora: bool = False, **changes: Any) -> Run:
    """Not yet guarded; by SGD, since Adam makes large steps of small differences."""
    settings = {"per_device_train_batch_size": ROWS, "num_ppo_epochs": 2, "max_steps": UPDATES, "optim": "sgd"}
    args = config(folder, **settings | {"learning_rate": 0.1, "max_grad_norm": 0.0} | changes)
    return Run(trainer(model, args, prompts(2 * ROWS * UPDATES), use_lora=use_lora))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    def start(*, guarded: bool = True, learned: Learned | None = None, grow_after: int = 100, **changes: Any) -> Run:
        run = built(model, tmp_path, **changes)
        if guarded:
            guard(run, learned, grow_after)
        return run

    return start


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Without a guard; shared."""
    run = built(model, tmp_path_factory.mktemp("undisturbed"))
    run.trainer.train()
    return run


class Refusals:
    """A device that refuses where a layer meets more than ``most`` rows, ``times`` times."""

    def __init__(self, most: int, times: int = 10**6) -> None:
        self.most, self.times = most, times

    def __call__(self, rows: int) -> None:
        if rows > self.most and self.times > 0:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nmore")


def in_forward(layer: torch.nn.Module, refuse: Refusals, *, with_graph: bool = True) -> None:
    def before(_: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() is with_graph:
            refuse(len(inputs[0]))

    layer.register_forward_pre_hook(before)


def in_backward(layer: torch.nn.Module, refuse: Refusals) -> None:
    def after(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: refuse(len(gradient)))

    layer.register_forward_hook(after)


def assert_same(run: Run, undisturbed: Run) -> None:
    """To rounding: fp32 sums of other shapes, over some steps of size 0.1; the weights moved by more than 0.01."""
    torch.testing.assert_close(weights(run.trainer), weights(undisturbed.trainer), rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(logged(run.trainer, "loss"), logged(undisturbed.trainer, "loss"), rtol=1e-4, atol=1e-6)


def test_a_guard_that_nothing_refuses_changes_not_one_bit(start: Start, undisturbed: Run) -> None:
    run = start()
    run.trainer.train()
    assert same_weights(run.trainer, undisturbed.trainer)
    assert run.incidents == []


@pytest.mark.parametrize("most", [4, 1])
def test_a_refused_forward_is_made_in_parts(most: int, start: Start, undisturbed: Run) -> None:
    run = start()
    in_forward(run.trainer.policy_model.model.layers[1], Refusals(most))
    run.trainer.train()
    assert_same(run, undisturbed)
    assert run.met()[0] == (Phase.FORWARD, "split into 3 + 2 rows")


PLACES = (
    *("policy_model.lm_head", "policy_model.model.layers.1.mlp.down_proj", "policy_model.model.embed_tokens"),
    *("policy_model.model.layers.0.self_attn.v_proj", "value_model.model.layers.1.mlp.down_proj"),
    "value_model.model.layers.0.mlp.up_proj",
)
"""Heads, last and first layers, and the embedding."""


@pytest.mark.parametrize("place", PLACES)
def test_a_refused_backward_goes_on_in_parts_and_adds_no_gradient_twice(
    place: str, start: Start, undisturbed: Run
) -> None:
    run = start()
    model, _, module = place.partition(".")
    in_backward(getattr(run.trainer, model).get_submodule(module), Refusals(2))
    run.trainer.train()
    assert_same(run, undisturbed)
    assert run.met() == [(Phase.BACKWARD, "split into 3 + 2 rows"), (Phase.BACKWARD, "split into 2 + 1 rows")]
    length = run.incidents[0].tokens
    assert length is not None
    assert run.learned[-1] == Learned(train_tokens=2 * length // ROWS)


def test_a_part_may_be_refused_in_any_micro_batch(start: Start, undisturbed: Run) -> None:
    """Each time anew: the parts grow back after every update."""
    run = start(grow_after=1)
    in_backward(run.trainer.policy_model.model.layers[0], Refusals(3))
    run.trainer.train()
    assert_same(run, undisturbed)
    assert [incident.step for incident in run.incidents] == [0, 1]


@pytest.mark.parametrize("changes", [{"activation_checkpointing": True}, {"use_lora": True}, {"bf16": True}])
def test_parts_keep_to_the_config(changes: dict[str, Any], start: Start) -> None:
    """Recomputed layers, adapters, and mixed precision, whose rounding is that of 8 bits."""
    whole = start(guarded=False, **changes)
    whole.trainer.train()
    parts = start(**changes)
    in_backward(parts.trainer.policy_model.get_input_embeddings(), Refusals(2))
    in_backward(parts.trainer.value_model.model.layers[0].mlp.up_proj, Refusals(2))
    parts.trainer.train()
    assert parts.incidents
    tolerance = 2**-7 if "bf16" in changes else 2e-6  # a unit in the last place of 8 bits
    torch.testing.assert_close(weights(parts.trainer), weights(whole.trainer), rtol=1e-4, atol=tolerance)


def refuse_first(owner: Any, name: str, *, after: bool = False, only: Callable[..., bool] = lambda *_: True) -> None:
    """Have a function of the trainer's refuse its first call, before or after it does its work."""
    refuse, function = Refusals(0, times=1), getattr(owner, name)

    def refused(*args: Any, **options: Any) -> Any:
        result = function(*args, **options) if after else None
        if only(*args):
            refuse(1)
        return result if after else function(*args, **options)

    setattr(owner, name, refused)


def is_trained(logits: torch.Tensor, *_: Any) -> bool:
    return logits.requires_grad


BELOW: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Phase, str]] = {
    "_log_probabilities": (lambda run: run, {"only": is_trained}, Phase.FORWARD, "without the models' graph"),
    "backward": (lambda run: run.accelerator, {"after": True}, Phase.BACKWARD, "without the models' graph"),
    "step": (lambda run: run.optimizer.optimizer, {}, Phase.OPTIMIZER_STEP, "with one parameter after the other"),
    "generate": (lambda run: run.policy_model, {"after": True}, Phase.GENERATE, "after the cache was emptied"),
}


@pytest.mark.parametrize("name", BELOW)
def test_what_is_refused_once_is_done_again_and_gives_the_same(name: str, start: Start, undisturbed: Run) -> None:
    """Below the guard, which stands in for what the trainer has when it comes."""
    owner, how, phase, remedy = BELOW[name]
    run = start(guarded=False)
    refuse_first(owner(run.trainer), name, **how)
    guard(run)
    run.trainer.train()
    assert_same(run, undisturbed)
    assert run.met() == [(phase, f"repeated {remedy}")]


def test_a_norm_that_is_refused_is_taken_again(start: Start) -> None:
    run = start(guarded=False, max_grad_norm=1.0)
    refuse_first(run.trainer.accelerator, "clip_grad_norm_")
    guard(run)
    run.trainer.train()
    assert [incident.phase for incident in run.incidents] == [Phase.OPTIMIZER_STEP]
    assert all(logged(run.trainer, "grad_norm"))


def test_a_single_row_that_does_not_fit_ends_the_run(start: Start) -> None:
    run = start()
    in_forward(run.trainer.policy_model.model.layers[1], Refusals(0))
    with pytest.raises(torch.OutOfMemoryError, match=r"a single row of \d+ tokens is too large"):
        run.trainer.train()


def test_fewer_prompts_are_answered_at_once(start: Start) -> None:
    run, refuse, seen = start(), Refusals(3), []
    generate = run.trainer.policy_model.generate

    def refused(**inputs: Any) -> Any:
        seen.append(len(inputs["input_ids"]))
        refuse(seen[-1])
        return generate(**inputs)

    run.trainer.policy_model.generate = refused
    run.trainer.train()
    rows = 2 * ROWS
    assert seen == [rows, rows, rows // 2, 3, 3, 3, 1, 3, 3, 3, 1]
    assert run.learned[-1].generate_rows == 3


@pytest.mark.parametrize("judge", ["reference", "value", "reward"])
def test_completions_are_judged_in_parts(judge: str, start: Start, undisturbed: Run) -> None:
    run = start()
    in_forward(models(run.trainer)[judge].model.layers[1], Refusals(3), with_graph=False)
    run.trainer.train()
    assert_same(run, undisturbed)
    assert [incident.phase for incident in run.incidents] == [Phase.SCORE] * 2
    assert run.learned[-1].score_rows == 3


def test_a_run_that_knows_makes_parts_from_its_first_step_on(start: Start, undisturbed: Run) -> None:
    run = start(learned=Learned(train_tokens=30, score_rows=3))
    in_forward(run.trainer.policy_model.model.layers[1], Refusals(3))
    run.trainer.train()
    assert_same(run, undisturbed)
    assert run.incidents == []


def test_a_resumed_run_knows_what_its_checkpoint_knew(start: Start) -> None:
    run = start(save_strategy="steps", save_steps=1, max_steps=1)
    in_backward(run.trainer.policy_model.lm_head, Refusals(3))
    run.trainer.train()
    run.trainer._save_checkpoint(run.trainer.model, trial=None)
    resumed = start(max_steps=2)
    in_backward(resumed.trainer.policy_model.lm_head, Refusals(3))
    resumed.trainer.train(resume_from_checkpoint=True)
    assert resumed.incidents == []
