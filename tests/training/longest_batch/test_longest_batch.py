"""The longest rows run first, and nothing of it stays: losses, weights and the order of rows are those without it."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_trainers import METHODS, lengths, outcome, rows, trainer

from autotrain_mem.training.longest_batch.restore import _kept_by_adam
from autotrain_mem.training.longest_batch.rows import LongestBatch, longest_rows
from autotrain_mem.training.longest_batch.run import _why_not, attach_longest_batch


def trained(made: Any, *, worst_first: bool, **options: Any) -> tuple[Any, list[LongestBatch]]:
    told: list[LongestBatch] = []
    if worst_first:
        attach_longest_batch(made, told.append)
    made.train(**options)
    return outcome(made), told


@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=pytest.mark.newest)])
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_weights_are_equal_to_the_bit_with_and_without_it(
    method: str, accumulated: int, gpt2: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    runs = [
        trained(trainer(method, gpt2, tmp_path, gradient_accumulation_steps=accumulated), worst_first=worst_first)
        for worst_first in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    (told,) = runs[1][1]
    assert not told.why_not
    assert told.longest_tokens >= max(lengths())


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft_packed": ("sft", {"packing": True, "max_length": 16, "padding_free": False, "packing_strategy": "wrapped"}),
    "grpo_entropy": ("grpo", {"use_adaptive_entropy": True, "entropy_coef_max": 1.0, "beta": 0.1, "num_iterations": 2}),
    "grpo_generations": (
        "grpo",
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    ),
    "rloo_generations": ("rloo", {"steps_per_generation": 2, "num_iterations": 2}),
    "sft_workers": ("sft", {"dataloader_num_workers": 1, "max_steps": 2}),
    "sft_tokens_seen": ("sft", {"include_num_input_tokens_seen": "all"}),
    "dpo_short": ("dpo", {"max_length": 8}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_so_are_those_of_runs_that_keep_more_between_their_steps(
    name: str, gpt2: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    method, changes = VARIANTS[name]
    runs = [trained(trainer(method, gpt2, tmp_path, **changes), worst_first=first) for first in (False, True)]
    assert runs[0][0] == runs[1][0]
    assert not runs[1][1][0].why_not


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_so_are_those_of_a_run_that_evaluates(method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    changes = {"eval_dataset": rows(method), "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    runs = [trained(trainer(method, gpt2, tmp_path, **changes), worst_first=first) for first in (False, True)]
    assert runs[0][0] == runs[1][0]
    assert any("eval_loss" in entry for entry in runs[0][0][0])


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_resumed_run_goes_on_as_if_it_had_not_been_there(
    method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(method, gpt2, tmp_path, **saves)
    made.train()
    resumed = [
        trained(
            trainer(method, gpt2, tmp_path),
            worst_first=first,
            resume_from_checkpoint=str(tmp_path / "checkpoint-2"),
        )[0]
        for first in (False, True)
    ]
    assert resumed[0] == resumed[1]


@pytest.mark.parametrize("method", METHODS)
def test_rows_come_in_the_same_order(method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    seen: list[list[Any]] = []
    for first in (False, True):
        made = trainer(method, gpt2, tmp_path)
        collate, drawn = made.data_collator, []

        def noted(batch: Any, collate: Any = collate, drawn: list[Any] = drawn) -> Any:
            drawn.append(repr(batch))
            return collate(batch)

        made.data_collator = noted
        trained(made, worst_first=first)
        seen.append(drawn)
    assert len(seen[1]) == len(seen[0]) + 1
    (worst,) = [number for number, batch in enumerate(seen[1]) if seen[1][:number] + seen[1][number + 1 :] == seen[0]][
        :1
    ]
    assert seen[1][worst].count("apple" if method in ("grpo", "rloo") else ", ") > 30


# -- what is run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sft", "reward", "dpo"])
def test_the_batch_holds_the_longest_rows_of_the_data(method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer(method, gpt2, tmp_path, max_steps=1)
    batches: list[Any] = []
    step = made.training_step

    def noted(model: Any, inputs: Any, items: Any) -> Any:
        batches.append({name: value.shape for name, value in inputs.items() if torch.is_tensor(value)})
        return step(model, inputs, items)

    made.training_step = noted
    _, (told,) = trained(made, worst_first=True)
    assert len(batches) == 2
    sequences = 2 if method == "sft" else 4
    assert batches[0]["input_ids"] == (sequences, told.longest_tokens)
    assert told.rows == 2


def test_what_is_attached_before_it_sees_the_batch_and_may_split_it(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a guard does; the loss of the run is none the wiser."""
    made = trainer("sft", gpt2, tmp_path)
    step = made.training_step
    sizes: list[int] = []

    def guarded(model: Any, inputs: Any, items: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if len(sizes) > 1:
            return step(model, inputs, items)
        halves = [{name: value[part : part + 1] for name, value in inputs.items()} for part in (0, 1)]
        return sum(step(model, half, items) for half in halves)

    made.training_step = guarded
    with_guard, _ = trained(made, worst_first=True)
    without, _ = trained(trainer("sft", gpt2, tmp_path), worst_first=False)
    assert sizes == [2, 2, 2, 2]
    assert with_guard == without


def test_it_runs_once_and_takes_itself_away(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer("sft", gpt2, tmp_path)
    below = made.training_step
    attach_longest_batch(made, lambda told: None)
    assert made.training_step != below
    made.train()
    assert made.training_step == below


def test_an_error_of_it_passes_and_leaves_the_trainer_as_it_was(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer("sft", gpt2, tmp_path)
    backward = made.accelerator.backward

    def full(loss: Any, **options: Any) -> None:
        backward(loss, **options)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    made.accelerator.backward = full
    with pytest.raises(torch.OutOfMemoryError):
        trained(made, worst_first=True)
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert not made._metrics["train"]
    made.accelerator.backward = backward
    again, _ = trained(made, worst_first=False)
    assert len(again[0]) == 4


@pytest.mark.parametrize(("accumulated", "there"), [(1, False), (2, True)])
def test_gradients_of_a_micro_step_before_and_optimizer_state_are_there_as_they_will_be(
    accumulated: int, there: bool, gpt2: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    made = trainer("sft", gpt2, tmp_path, gradient_accumulation_steps=accumulated, max_steps=1)
    compute, found = made.compute_loss, []

    def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(any(parameter.grad is not None for parameter in model.parameters()))
        return compute(model, *args, **kwargs)

    made.compute_loss = noted
    trained(made, worst_first=True)
    assert found[0] is there


def test_optimizer_state_stands_in_as_torchs_adam_keeps_it() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16)), torch.nn.Parameter(torch.zeros(2))]
    weights[1].requires_grad_(False)
    (kept,) = _kept_by_adam(torch.optim.AdamW(weights))
    assert kept[0] is weights[0]
    assert kept[1] is torch.bfloat16


def test_eight_bit_state_stands_in_as_bitsandbytes_keeps_it() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weights = [torch.nn.Parameter(torch.zeros(4096)), torch.nn.Parameter(torch.zeros(4095))]
    kept = _kept_by_adam(bitsandbytes.optim.AdamW8bit(weights))
    assert [dtype for _, dtype in kept] == [torch.uint8, torch.float32]
    assert _kept_by_adam(bitsandbytes.optim.PagedAdamW8bit(weights)) == []


def test_state_that_is_there_or_unknown_has_no_stand_in() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    stepped = torch.optim.AdamW([weight])
    stepped.step()
    assert _kept_by_adam(stepped) == []
    assert _kept_by_adam(torch.optim.SGD([weight], momentum=0.9)) == []


def test_an_error_is_shown_while_what_stands_in_is_there(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer("sft", gpt2, tmp_path, gradient_accumulation_steps=2)
    shown: list[tuple[str, bool, int]] = []

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def show(error: BaseException) -> None:
        has_gradients = all(parameter.grad is not None for parameter in made.model.parameters())
        shown.append((str(error), has_gradients, len(made.optimizer.optimizer.state)))

    made.compute_loss = full
    attach_longest_batch(made, lambda told: None, show)
    with pytest.raises(torch.OutOfMemoryError):
        made.train()
    assert shown == [("CUDA out of memory.", True, len(list(made.model.parameters())))]
    assert not made.optimizer.optimizer.state


# -- online methods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_reward_functions_are_not_called_for_it(method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    calls: list[int] = []

    def counted(prompts: list[Any], **_: Any) -> list[float]:
        calls.append(len(prompts))
        return [float(number) for number, _ in enumerate(prompts)]

    trained(trainer(method, gpt2, tmp_path, reward=counted, max_steps=2), worst_first=True)
    assert calls == [2, 2]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_completions_have_their_full_length_and_advantages_differ(
    method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    made = trainer(method, gpt2, tmp_path, max_completion_length=6, max_steps=1)
    score, found = made._generate_and_score_completions, []

    def noted(inputs: Any) -> Any:
        found.append(score(inputs))
        return found[-1]

    made._generate_and_score_completions = noted
    _, (told,) = trained(made, worst_first=True)
    worst = found[0]
    assert worst["completion_ids"].shape == (2, 6)
    assert worst["completion_mask"].all()
    assert worst["prompt_ids"].shape == (2, told.longest_tokens)
    assert len({float(each) for each in worst["advantages"]}) == 2


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_vllm_engine_is_not_asked(method: str, gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its random state is out of reach: without the stand-in it would sample other completions afterwards."""

    class Engine:
        calls = 0

        def sync_weights(self) -> None:
            pass

        def generate(self, prompts: Any, **_: Any) -> Any:
            self.calls += 1
            return prompts, [[5, 6 + self.calls] for _ in prompts], [[[0.0], [0.0]] for _ in prompts], None

    made = trainer(method, gpt2, tmp_path, max_steps=2)
    made.use_vllm, made.vllm_generation, made._last_loaded_step = True, Engine(), -1
    made.vllm_importance_sampling_correction = False
    trained(made, worst_first=True)
    assert made.vllm_generation.calls == 2


# -- where it is not run ---------------------------------------------------------------------------------------------


def test_a_stream_is_left_alone_and_that_is_said(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer("sft", gpt2, tmp_path, max_steps=1, build={"train_dataset": rows("sft").to_iterable_dataset()})
    _, (told,) = trained(made, worst_first=True)
    assert told.rows == 0
    assert "stream" in told.why_not


def test_an_optimizer_that_steps_in_the_backward_pass_is_left_alone(gpt2: pathlib.Path, tmp_path: pathlib.Path) -> None:
    made = trainer("sft", gpt2, tmp_path, max_steps=1)
    next(made.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    _, (told,) = trained(made, worst_first=True)
    assert "backward" in told.why_not


def test_columns_that_are_not_known_are_left_alone() -> None:
    made = SimpleNamespace(train_dataset=rows("sft"), args=SimpleNamespace(optim="adamw_torch"))
    assert "text" in _why_not(made)


def test_longest_rows_are_found_quickly_and_in_order() -> None:
    assert longest_rows([3, 9, 1, 9, 4], 3) == [1, 3, 4]
    assert longest_rows([3], 8) == [0]
