"""Whole trainings on a device that is full now and then end as the undisturbed ones do."""

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import NO_MEANS_OVER_ROWS, Faults, Told, blocks, fail_in_forward, failing, numbers
from tiny_trainers import rows, trainer

from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.fake_run import Watch
from autotrain_mem.training.guard.attach import Guard, attach_guard
from autotrain_mem.types import LearnedLimits, Phase

SIZES = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
Disturb = Callable[[Any], Any]
WORKSPACES_BYTES = 2 * 8_519_680
"""cuBLAS's, forward and backward, which are kept for good (``rehearsal.cuda.workspaces``)."""


def guarded(
    method: str, model: Path, folder: Path, disturb: Disturb = lambda made: None, grow_after: int = 50, **changes: Any
) -> tuple[Any, Told]:
    made, told = trainer(method, model, folder, **(SIZES | changes)), Told()
    attach_guard(made, learned=LearnedLimits(), on_incident=told, grow_after=grow_after)
    disturb(made)
    return made, told


def run(*args: Any, resume: str | None = None, **changes: Any) -> tuple[Any, Told]:
    made, told = guarded(*args, **changes)
    made.train(resume_from_checkpoint=resume)
    return made, told


def weights(made: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in made.model.parameters()])


def assert_same_run(one: Any, other: Any) -> None:
    """To fp32 rounding, which AdamW's first steps make larger: they divide by gradients near zero."""
    assert numbers(one, "loss", "eval_loss") == pytest.approx(numbers(other, "loss", "eval_loss"), rel=2e-3, abs=1e-5)
    assert (weights(one) - weights(other)).abs().mean() < 1e-3


def fail_in_layer(at: list[int], when: Callable[[Any, Any], bool]) -> Disturb:
    """In forward passes of the second layer for which ``when`` holds, given the trainer and what the layer is given."""

    def disturb(made: Any) -> None:
        faults = Faults(at)
        blocks(made)[1].register_forward_pre_hook(lambda _, args: faults() if when(made, args[0]) else None)

    return disturb


def fail_in_evaluation(at: list[int]) -> Disturb:
    return partial(fail_in_forward, at=at, training=False)


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_an_evaluation_in_parts_gives_the_same_loss_and_predictions(method: str, qwen: Path, tmp_path: Path) -> None:
    answers, found = [], []
    for at in ([], [0, 1]):
        made, told = guarded(method, qwen, tmp_path, fail_in_evaluation(at), eval_dataset=rows(method))
        answers.append(made.evaluate())
        batch = next(iter(made.get_eval_dataloader()))
        made.model.eval()
        found.append(made.prediction_step(made.model, batch, False))
    assert [incident.phase for incident in told.incidents] == [Phase.EVALUATE] * 2
    assert told.learned[-1].evaluate_tokens is not None
    timed = ("second", "time", *NO_MEANS_OVER_ROWS)
    for name in (name for name in answers[0] if not any(each in name for each in timed)):
        assert answers[1][name] == pytest.approx(answers[0][name], rel=1e-3, abs=1e-5), name
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_evaluation_of_one_row_is_repeated_once(qwen: Path, tmp_path: Path) -> None:
    few = rows("sft").select(range(2))
    made, told = guarded("sft", qwen, tmp_path, eval_dataset=few, per_device_eval_batch_size=1)
    whole = made.evaluate()["eval_loss"]
    fail_in_evaluation([0])(made)
    assert made.evaluate()["eval_loss"] == pytest.approx(whole, rel=1e-6)
    assert told.remedies == ["repeated after the cache was emptied"]
    fail_in_evaluation([0, 1])(made)
    with pytest.raises(torch.OutOfMemoryError, match="a single row is too large"):
        made.evaluate()


def test_an_evaluation_of_a_generating_trainer_generates_once(qwen: Path, tmp_path: Path) -> None:
    losses = []
    for at in ([], [0]):
        made, told = guarded("grpo", qwen, tmp_path, fail_in_scores(at), eval_dataset=rows("grpo").select(range(4)))
        torch.manual_seed(3)
        losses.append(made.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    assert told.incidents


def fail_in_scores(at: list[int]) -> Disturb:
    """Below the guard, where dropout has drawn random numbers by then."""
    faults = Faults(at)

    def fault() -> None:
        try:
            faults()
        except torch.OutOfMemoryError:
            torch.rand(1)
            raise

    def disturb(made: Any) -> None:
        scoring = made._get_per_token_logps_and_entropies.__self__
        scoring._judge = failing(scoring._judge, fault)

    return disturb


def fail_in_generation(at: list[int]) -> Disturb:
    """Where one token is added to all completions: by then random numbers have been drawn."""
    return fail_in_layer(at, lambda _, hidden: hidden.shape[1] == 1)


def test_prompts_that_are_too_many_at_once_are_answered_in_parts(qwen: Path, tmp_path: Path) -> None:
    survived, told = run("grpo", qwen, tmp_path, fail_in_generation([1, 3]))
    assert told.remedies == ["generated for 2 + 2 prompts separately, which draws other samples than one call for all"]
    assert told.learned[0].generate_rows == 2
    assert survived.state.global_step == 3


REPEATED = "repeated after the cache was emptied"


@pytest.mark.parametrize(
    ("method", "disturb", "phase", "remedies"),
    [
        ("grpo", fail_in_generation([1]), Phase.GENERATE, [REPEATED]),
        ("rloo", fail_in_scores([0, 1]), Phase.SCORE, [f"scored {n} completions at a time" for n in (2, 1)]),
    ],
    ids=["generation", "scores"],
)
def test_what_is_done_again_gives_the_same_run(
    method: str, disturb: Disturb, phase: Phase, remedies: list[str], qwen: Path, tmp_path: Path
) -> None:
    """To the bit, and with the same samples, where it is done as a whole."""
    undisturbed, _ = run(method, qwen, tmp_path)
    survived, told = run(method, qwen, tmp_path, disturb)
    assert_same_run(survived, undisturbed)
    if remedies == [REPEATED]:
        assert numbers(survived, "reward", "loss") == numbers(undisturbed, "reward", "loss")
        assert torch.equal(weights(survived), weights(undisturbed))
        assert told.learned == [LearnedLimits()]
    assert [(incident.phase, incident.remedy) for incident in told.incidents] == [(phase, each) for each in remedies]


def fail_above(tokens: int) -> Disturb:
    """A device on which no more fits: rows have 6 to 62 tokens, four are trained at once."""
    always = [*range(1000)]
    return fail_in_layer(always, lambda made, hidden: made.model.training and hidden.shape[:2].numel() > tokens)


def test_after_enough_clean_steps_all_is_tried_at_once_again(qwen: Path, tmp_path: Path) -> None:
    made, told = run("sft", qwen, tmp_path, fail_above(70), grow_after=2, max_steps=12)
    steps = [incident.step for incident in told.incidents]
    assert len(steps) >= 2, "it was tried again"
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert gaps == sorted(gaps), "and each time after more steps"
    guard = next(one for one in made.callback_handler.callbacks if isinstance(one, Guard))
    assert guard.learned == told.learned[-1] or guard.learned.train_tokens is None


def test_what_was_learned_is_in_the_checkpoint_and_a_resumed_run_starts_with_it(qwen: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first, told = run("sft", qwen, tmp_path, fail_above(70), **saving)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["autofit_guard"]["learned"]["train_tokens"] is not None
    resume, restored = str(tmp_path / "checkpoint-2"), {"restore_callback_states_from_checkpoint": True}
    resumed, later = run("sft", qwen, tmp_path, fail_above(70), resume=resume, **saving, **restored)
    assert_same_run(resumed, first)
    assert 0 < len(told.incidents) <= 3, "long batches are split beforehand once one of them did not fit"
    assert not later.incidents


def train_on(capacity_bytes: float, model: Path, folder: Path, **changes: Any) -> tuple[Any, Told, SimulatedGpu]:
    """On a card that is full of so much, with room enough for its allocator."""
    gpu = SimulatedGpu(named("1GiB"))
    watch, allocator = Watch(gpu), gpu._allocator

    def refuse(size_bytes: int) -> None:
        if allocator.allocated_bytes + size_bytes > capacity_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def tell(*said: Any) -> None:
        told(*said)
        told.held.append(allocator.allocated_bytes)

    gpu.before_allocation = refuse
    with watch.cuda_semantics():
        made, told = trainer("sft", model, folder, **SIZES | changes), Told()
        attach_guard(made, learned=LearnedLimits(), on_incident=tell)
        watch.train(made)
    return made, told, gpu


def test_on_a_simulated_card_of_less_room_it_trains_the_same(qwen: Path, tmp_path: Path) -> None:
    """Of single rows there is nothing to split: the second, the longest, waits on the host."""
    one = {"per_device_train_batch_size": 1, "loss_type": "nll", "max_steps": 2}
    for changes in ({}, one):
        undisturbed, _, roomy = train_on(float("inf"), qwen, tmp_path, **changes)
        # Weights, gradients and the state of AdamW are there whatever the batch.
        resting = 4 * 4 * sum(value.numel() for value in undisturbed.model.parameters())
        peak = roomy.reading().peak_allocated_bytes
        capacity = peak - 200_000 if changes else resting + 0.85 * (peak - resting)
        survived, told, _ = train_on(capacity, qwen, tmp_path, **changes)
        assert numbers(survived, "loss") == pytest.approx(numbers(undisturbed, "loss"), rel=2e-3, abs=1e-5)
        held, room = (size - resting - WORKSPACES_BYTES for size in (max(told.held), capacity))
        assert held < 0.5 * room, "nothing of a failed try is held when it is told"
        assert {remedy.startswith("repeated with activations offloaded") for remedy in told.remedies} == {bool(changes)}
