"""The longest rows, and those with most images, run first; losses, weights and row order stay unchanged."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tiny_vision_trainers
import torch
from accelerate import DistributedType
from datasets import Dataset, List, Value
from tiny_trainers import METHODS, lengths, outcome, rows, trainer
from tiny_vision_trainers import SIZES, vision_trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autotrain_mem.data.longest_rows import longest_image_rows
from autotrain_mem.trainers.finish import keep_cache_in_evaluation
from autotrain_mem.training.process import longest_batch
from autotrain_mem.training.process.probe import take_longest

Model = Callable[[str], Path]


def trained(made: Any, *, worst_first: bool, **options: Any) -> tuple[Any, list[longest_batch.LongestBatch]]:
    told: list[longest_batch.LongestBatch] = []
    if worst_first:
        longest_batch.attach_longest_batch(made, told.append)
    made.train(**options)
    return outcome(made), told


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_steps": 2}
PACKED = {"packing": True, "max_length": 16, "padding_free": False, "packing_strategy": "wrapped"}
SHORT = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2, "max_steps": 2}
ENTROPY = {"use_adaptive_entropy": True, "entropy_coef_max": 1.0, "beta": 0.1, "num_iterations": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, ACCUMULATED) for method in METHODS},
    "dpo": ("dpo", {"max_length": 8} | ACCUMULATED),
    "grpo": ("grpo", {"steps_per_generation": 4} | ACCUMULATED),
    "sft_packed": ("sft", PACKED | {"include_num_input_tokens_seen": "all"}),
    "cpo_simpo": ("cpo", ACCUMULATED),
    "grpo_entropy_evaluates": ("grpo", ENTROPY | {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}),
    "grpo_images": ("grpo", SHORT),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.newest] * (name in METHODS)) for name in CASES])
def test_losses_weights_and_the_order_of_rows_are_equal_to_the_bit_with_and_without_it(
    name: str, gpt2: Path, vision_folder: Model, tmp_path: Path
) -> None:
    (method, changes), has_images = CASES[name], name == "grpo_images"
    data = {"eval_dataset": rows(method).select(range(2))} if "eval_steps" in changes else {}
    make, model = (vision_trainer, vision_folder("qwen2_5_vl")) if has_images else (trainer, gpt2)
    runs = [trained(make(method, model, tmp_path, **changes, **data), worst_first=first) for first in (False, True)]
    assert runs[0][0] == runs[1][0]
    (batch,) = runs[1][1]
    assert not batch.why_not
    assert batch.rows == 2 or not has_images
    assert batch.longest_tokens >= (21 if has_images else min(max(lengths()), changes.get("max_length", 99)))
    assert any("eval_loss" in entry for entry in runs[0][0][0]) == bool(data)


def test_a_resumed_run_goes_on_as_if_it_had_not_been_there(gpt2: Path, tmp_path: Path) -> None:
    trainer("grpo", gpt2, tmp_path, save_strategy="steps", save_steps=2).train()
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    resumed = [trained(trainer("grpo", gpt2, tmp_path), worst_first=first, **resume)[0] for first in (False, True)]
    assert resumed[0] == resumed[1]


def test_the_batch_holds_the_longest_rows_of_the_data(gpt2: Path, tmp_path: Path) -> None:
    made, shapes = trainer("dpo", gpt2, tmp_path), []
    result = longest_batch.run_longest_batch(
        made, made.model, lambda _, inputs, items: shapes.append(inputs["input_ids"].shape)
    )
    assert result.rows == 2
    assert shapes == [(4, result.longest_tokens)]


def test_an_error_is_shown_with_the_stand_ins_and_leaves_the_trainer_as_it_was(gpt2: Path, tmp_path: Path) -> None:
    made = trainer("sft", gpt2, tmp_path, gradient_accumulation_steps=2)
    parameters, backward = [*made.model.parameters()], made.accelerator.backward
    shown: list[tuple[str, bool, int]] = []

    def full(loss: Any, **options: Any) -> None:
        backward(loss, **options)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def show(error: BaseException) -> None:
        has_gradients = all(parameter.grad is not None for parameter in parameters)
        shown.append((str(error), has_gradients, len(made.optimizer.optimizer.state)))

    made.accelerator.backward = full
    longest_batch.attach_longest_batch(made, lambda batch: None, show)
    with pytest.raises(torch.OutOfMemoryError):
        made.train()
    assert shown == [("CUDA out of memory.", True, len(parameters))]
    assert not made.optimizer.optimizer.state
    assert all(parameter.grad is None for parameter in parameters)
    assert not made._metrics["train"]
    made.accelerator.backward = backward
    again, _ = trained(made, worst_first=False)
    assert len(again[0]) == 4


def test_optimizer_state_stands_in_as_adam_keeps_it_where_it_is_not_there_yet() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16)), torch.nn.Parameter(torch.zeros(2))]
    weights[1].requires_grad_(False)
    stepped = torch.optim.AdamW(weights)
    assert [dtype for _, dtype in longest_batch._kept_by_adam(stepped)] == [torch.bfloat16]
    assert longest_batch._kept_by_adam(torch.optim.SGD(weights, momentum=0.9)) == []
    weights[0].grad = torch.ones_like(weights[0])
    stepped.step()
    assert longest_batch._kept_by_adam(stepped) == []
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weights = [torch.nn.Parameter(torch.zeros(4096)), torch.nn.Parameter(torch.zeros(4095))]
    kept = longest_batch._kept_by_adam(bitsandbytes.optim.AdamW8bit(weights))
    assert [dtype for _, dtype in kept] == [torch.uint8, torch.float32]
    assert longest_batch._kept_by_adam(bitsandbytes.optim.PagedAdamW8bit(weights)) == []


def test_completions_have_their_full_length_and_advantages_without_rewards(gpt2: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(prompts: list[Any], **_: Any) -> list[float]:
        calls.append(len(prompts))
        return [float(number) for number, _ in enumerate(prompts)]

    made, batches = trainer("rloo", gpt2, tmp_path, reward=counted, max_completion_length=6, max_steps=2), []
    score = made._generate_and_score_completions
    made._generate_and_score_completions = lambda inputs: batches.append(score(inputs)) or batches[-1]
    _, (result,) = trained(made, worst_first=True)
    worst = batches[0]
    assert worst["completion_ids"].shape == (2, 6)
    assert worst["completion_mask"].all()
    assert worst["prompt_ids"].shape == (2, result.longest_tokens)
    assert len({float(each) for each in worst["advantages"]}) == 2
    assert calls == [2, 2], "of the two steps alone"


def test_a_vllm_engine_is_not_asked(gpt2: Path, tmp_path: Path) -> None:
    """Its random state is out of reach: without the stand-in it would sample other completions afterwards."""

    class Engine:
        calls = 0

        def sync_weights(self) -> None:
            pass

        def generate(self, prompts: Any, **_: Any) -> Any:
            self.calls += 1
            return prompts, [[5, 6 + self.calls] for _ in prompts], [[[0.0], [0.0]] for _ in prompts], None

    made = trainer("grpo", gpt2, tmp_path, max_steps=2)
    made.use_vllm, made.vllm_generation, made._last_loaded_step = True, Engine(), -1
    made.vllm_importance_sampling_correction = False
    trained(made, worst_first=True)
    assert made.vllm_generation.calls == 2


def test_what_cannot_run_first_has_a_reason(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer("sft", gpt2, tmp_path, max_steps=1)
    rows_of_it, made.train_dataset = made.train_dataset, rows("sft").to_iterable_dataset()
    batch = longest_batch.run_longest_batch(made, made.model, made.training_step)
    assert (batch.rows, "stream" in batch.why_not) == (0, True)
    made.train_dataset = rows_of_it
    next(made.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    assert "within the backward pass" in longest_batch._why_not(made)
    with monkeypatch.context() as under_zero:  # whose stages 1 and 2 have such hooks too
        under_zero.setattr(made.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
        assert "DeepSpeed's backward" in longest_batch._why_not(made)
    made.train_dataset = rows("sft")
    assert "text" in longest_batch._why_not(made)


class Growing(torch.nn.Module):
    """As a rotary embedding that grows with the longest row (``transformers/modeling_rope_utils.py``)."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 4
        self.register_buffer("frequencies", torch.arange(4.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] > self.longest:
            self.longest = rows.shape[0]
            self.register_buffer("frequencies", torch.arange(float(rows.shape[0])))
        return rows


def bare(**attributes: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), Growing())
    accelerator = SimpleNamespace(gradient_state=SimpleNamespace(_shared_state={"sync_gradients": False}), scaler=None)
    state = SimpleNamespace(num_input_tokens_seen=7, log_history=[])
    return SimpleNamespace(model=model, model_wrapped=model, accelerator=accelerator, state=state, **attributes)


def test_buffers_and_the_models_mode_are_put_back_to_the_bit_after_an_error_too() -> None:
    made = bare(_step=3)
    made.model.eval()
    before = {name: (buffer, buffer.clone()) for name, buffer in made.model.named_buffers()}

    def step() -> None:
        with longest_batch.untouched(made):
            made._step = 4
            made.model.train()
            made.model(torch.randn(9, 3))
            assert made.model[1].num_batches_tracked == 1
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert made._step == 3
    after = dict(made.model.named_buffers())
    assert after.keys() == before.keys()
    for name, (buffer, values) in before.items():
        assert after[name] is buffer
        assert torch.equal(buffer, values)
    assert made.model[2].longest == 4
    assert not any(module.training for module in made.model.modules())


def test_whole_gradients_that_fsdp2_keeps_between_micro_steps_are_dropped(request: pytest.FixtureRequest) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    request.addfinalizer(torch.distributed.destroy_process_group)
    made = bare()
    made.model = made.model_wrapped = model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    def gradients() -> list[Any]:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    expected = gradients()
    model.zero_grad()
    with longest_batch.untouched(made):
        assert not longest_batch.keeps_whole_gradients(model)
        model.set_requires_gradient_sync(False)
        assert longest_batch.keeps_whole_gradients(model)
        model(torch.ones(2, 3)).sum().backward()
        model.set_requires_gradient_sync(True)
    assert all(map(torch.equal, gradients(), expected))


def test_all_random_states_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    of_cards, put_back = [torch.tensor([1]), torch.tensor([2])], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: of_cards)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    with longest_batch.untouched(bare()):
        inside = drawn()
    assert drawn() == inside
    assert put_back == [of_cards]


def test_a_scaler_has_the_scale_that_it_had_and_a_method_that_was_replaced_for_good_stays_replaced() -> None:
    made = bare()
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = made.accelerator.scaler.state_dict()
    with longest_batch.untouched(made):
        made.accelerator.scaler.scale(torch.ones(()))
        made.accelerator.scaler.update(2.0)
    assert made.accelerator.scaler._scale is None
    assert made.accelerator.scaler.state_dict() == before
    made = bare(compute_loss=min)
    with longest_batch.untouched(made):
        made.compute_loss = max
        made.guard = SimpleNamespace()  # which may have learned to keep activations on the host
    assert made.compute_loss is max
    assert made.guard


def test_evaluation_itself_keeps_the_cache(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callers: set[str] = set()
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: callers.update(sys._getframe(above).f_code.co_name for above in (2, 3))
    )

    def own(answers: Any, compute_result: bool) -> dict[str, float]:
        torch.cuda.empty_cache()
        return {}

    told = {
        "sft": {"batch_eval_metrics": True, "build": {"compute_metrics": own}},
        "grpo": {"eval_accumulation_steps": 1},
    }
    for method, changes in told.items():
        made = trainer(method, gpt2, tmp_path, eval_dataset=rows(method).select(range(4)), **changes)
        made.evaluate()
        assert "evaluation_loop" in callers
        callers.clear()
        keep_cache_in_evaluation(made)
        made.evaluate()
        assert callers == ({"unless_loop", "own"} if method == "sft" else set())


ONE_LARGE, THREE_SMALL = 2, 5
UNEQUAL = [[], [(56, 56)], [(168, 112)], [(56, 56)], [(60, 60)], [(56, 56)] * 3, [], [(58, 58)]]


@pytest.mark.parametrize(("family", "longest"), [("qwen2_5_vl", ONE_LARGE), ("gemma3", THREE_SMALL)])
def test_the_longest_row_is_found_with_images(family: str, longest: int, vision_folder: Model, tmp_path: Path) -> None:
    """Qwen's tokens follow the pixels; Gemma makes as many of each image."""
    made = vision_trainer("sft", vision_folder(family), tmp_path)
    data = tiny_vision_trainers.rows("sft", UNEQUAL)
    tokens = [made.data_collator([data[number]])["input_ids"].shape[1] for number in range(len(data))]
    assert longest_image_rows(made, data, 1) == ([longest], max(tokens))
    assert [tokens[number] for number in longest_image_rows(made, data, 3)[0]] == sorted(tokens)[:-4:-1]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_a_probe_is_left_the_longest_rows_with_images(method: str, vision_folder: Model, tmp_path: Path) -> None:
    made = vision_trainer(method, vision_folder("qwen2_5_vl"), tmp_path, **SHORT)
    (longest, *_), tokens = longest_image_rows(made, made.train_dataset, 1)
    assert take_longest(made) == tokens
    sizes = [[image.size for image in row["images"]] for row in made.train_dataset]
    assert sizes[0] == SIZES[longest] == SIZES[2]


def test_rows_whose_images_cannot_be_read_are_not_run_first(vision_folder: Model, tmp_path: Path) -> None:
    made = vision_trainer("sft", vision_folder("qwen2_5_vl"), tmp_path)
    columns = {"messages": made.train_dataset["messages"][:], "images": [["https://a.b/c.png"]] * len(SIZES)}
    made.train_dataset = Dataset.from_dict(columns).cast_column("images", List(Value("string")))
    batch = longest_batch.run_longest_batch(made, made.model, made.training_step)
    why_not = "An image of row 1 cannot be read: https://a.b/c.png is on another machine"
    assert (batch.rows, batch.why_not) == (0, why_not)
