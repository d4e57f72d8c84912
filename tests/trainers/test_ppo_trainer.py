"""Each promise of PPO's config, kept: measured on what a run does, not on what is set. A run that goes on ends where an
unbroken one does, bit for bit; so do two processes (DDP on the CPU), each with the environment that torchrun gives it.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from peft import LoraConfig
from ppo_runs import ROLLOUT, config, logged, prompts, trainer, weights
from tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback, TrainerControl

from autotrain_mem.support import errors
from autotrain_mem.support.errors import EmptyDatasetError, TrainingError, UsageError
from autotrain_mem.trainers.ppo_resume import load_weights
from autotrain_mem.training.process.train import ProgressCallback
from autotrain_mem.training.process.world import World
from tests.forked import ROOT, Forge

HAS_PPO = find_spec("trl.experimental.ppo") is not None
pytestmark = pytest.mark.skipif(not HAS_PPO, reason="TRL 1.13 and later have no PPO")

Build = Callable[..., Any]
"""Takes the data, ``options`` of the trainer, and all others of the config."""
LIBRARIES_LACK = ("deepspeed", "fsdp")
"""Arguments that a config refuses without libraries that are not here: they are put into it."""


@pytest.fixture
def build(qwen: Path, tmp_path: Path) -> Build:
    AcceleratorState._reset_state()  # it keeps the precision of an earlier test's trainer, and refuses another

    def build(dataset: Any = None, options: dict[str, Any] | None = None, **changes: Any) -> Any:
        args = config(tmp_path, **{name: changes[name] for name in changes if name not in LIBRARIES_LACK})
        vars(args).update(changes if changes.keys() & LIBRARIES_LACK else {})
        return trainer(qwen, args, **{"dataset": dataset, **(options or {})})

    return build


def layers(built: Any) -> tuple[Any, Any]:
    base = built.policy_model.get_base_model() if built.is_peft_model else built.policy_model
    return base.model.layers[1], built.value_model.model.layers[1]


def training_told(built: Any) -> list[bool]:
    """Grows as it trains: False as a rollout begins, True with each forward pass after it."""
    told: list[bool] = []
    wrapper, generate = built.accelerator.unwrap_model(built.model), built._generate_rollout
    before_forward = wrapper.before_forward
    wrapper.before_forward = lambda: (told.append(True), before_forward())
    built._generate_rollout = lambda *given: (told.append(False), generate(*given))[1]
    return told


@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float32])
def test_precision_is_the_configs_each_time(asked: torch.dtype, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    Accelerator(cpu=True, mixed_precision="no" if asked is torch.bfloat16 else "bf16")
    before = dict(os.environ)
    built = build(bf16=asked is torch.bfloat16)
    assert dict(os.environ) == before
    seen = {name: set[torch.dtype]() for name in ("policy_model", "ref_model", "value_model", "reward_model")}
    for name, dtypes in seen.items():
        layer = getattr(built, name).model.layers[0]
        layer.mlp.register_forward_hook(lambda _, __, out, dtypes=dtypes: dtypes.add(out.dtype))
    built.train()
    assert seen == {name: {asked} for name in seen}


def test_a_4_bit_policy_trains_in_mixed_precision(qwen: Path, build: Build) -> None:
    """TRL casts its head to bf16 and its norms to fp32: they only meet under autocast, in the rollout as well."""
    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    policy = AutoModelForCausalLM.from_pretrained(qwen, quantization_config=quantized)
    built = build(options={"use_lora": True, "model": policy}, bf16=True, gradient_checkpointing=True)
    before = weights(built)
    built.train()
    assert all(not torch.equal(before[name], value) for name, value in weights(built).items() if "lora_B" in name)


@pytest.mark.parametrize(("asked", "reentrant"), [(False, None), (True, None), (True, True)])
def test_checkpointing_recomputes_both_models_where_it_is_asked_for_and_never_as_responses_are_generated(
    asked: bool, reentrant: bool | None, build: Build
) -> None:
    """A checkpointed layer drops the cache without an error, and the responses would be read without their prompts."""
    how = {"gradient_checkpointing_kwargs": reentrant and {"use_reentrant": True}}
    built = build(options={"use_lora": bool(reentrant)}, gradient_checkpointing=asked, **how)
    told, before, calls = training_told(built), weights(built), Counter[tuple[str, bool, bool]]()

    def called(name: str, layer: Any) -> None:
        calls[name, told[-1], layer.gradient_checkpointing and layer.training] += 1

    for name, layer in zip(("policy", "value"), layers(built), strict=True):
        layer.mlp.register_forward_pre_hook(lambda *_, given=(name, layer): called(*given))
    built.train()
    in_training = {name: count for name, count in calls.items() if name[1]}
    twice = 2 * (1 + asked)  # of two micro-batches
    assert in_training == {("policy", True, asked): twice, ("value", True, asked): twice}
    assert calls["policy", False, False] > 0
    as_reference = int(built.is_peft_model)  # the policy without its adapter, which generates nothing
    assert calls["policy", False, True] == as_reference
    for layer in layers(built) if asked else ():  # TRL's own enabling after a generation forgets the options
        assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is bool(reentrant)
    after = weights(built)
    assert all(not torch.equal(before[name], after[name]) for name in before if "q_proj" in name)


def test_gradients_are_clipped_once_per_step(build: Build) -> None:
    by_sgd = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    built = build(max_grad_norm=1e-3, **by_sgd)
    before = weights(built)
    built.train()
    after = weights(built)
    moved = torch.sqrt(sum((after[name] - before[name]).double().square().sum() for name in before))
    # One step of SGD moves by rate x clipped norm; float32 sums of 200,000 squares are good to 1e-3.
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)
    assert logged(built, "grad_norm")[0] > 1e-3


def test_gradients_are_accumulated_over_the_last_prompts_too(build: Build) -> None:
    """TRL alone would step after each micro-batch while it trains on the last batch of a pass over the data."""
    built = build(prompts(ROLLOUT), max_steps=2)
    steps: list[None] = []
    built.optimizer.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    built.train()
    assert len(steps) == 2


def test_max_steps_and_total_episodes_bound_updates_and_schedule(qwen: Path, tmp_path: Path) -> None:
    args = config(tmp_path, max_steps=2, learning_rate=1e-2, lr_scheduler_type="linear")
    built = trainer(qwen, args)
    built.train()
    assert args.total_episodes is None  # the caller's arguments can build the next trainer
    assert built.state.global_step == built.state.max_steps == 2
    assert logged(built, "lr") == pytest.approx([1e-2, 0.5e-2])

    for max_steps, episodes, updates in ((1, 3 * ROLLOUT, 1), (9, 2 * ROLLOUT, 2)):
        smaller = trainer(qwen, config(tmp_path, max_steps=max_steps, total_episodes=episodes))
        assert smaller.args.num_total_batches == updates, "the smaller of max_steps and total_episodes counts"


def test_the_narrator_hears_every_step_and_its_wish_to_stop_is_heard(build: Build, tmp_path: Path) -> None:
    events: list[Any] = []
    built = build(max_steps=5, save_strategy="steps", save_steps=100)
    narrator = ProgressCallback(events.append, lambda: None, World(built.args))

    class Interruption(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            events.append({"event": "end", "episode": state.episode})

    built.add_callback(narrator)
    built.add_callback(Interruption())
    built.train()
    assert [event["event"] for event in events] == ["start", "log", "step", "log", "step", "end"]
    assert events[0]["total_steps"] == 5
    assert built.state.global_step == 2
    assert events[-1]["episode"] == 2 * ROLLOUT
    assert (tmp_path / "checkpoint-2").is_dir()
    assert [event["logs"]["loss"] for event in events if event["event"] == "log"] == logged(built, "loss")

    narrator.interrupted, built.state.global_step, control = False, 5, TrainerControl()
    narrator.on_step_end(built.args, built.state, control)
    assert (narrator.interrupted, control.should_training_stop) == (False, False), "it is done, and saves the model"


def test_the_logged_loss_is_the_mean_of_what_is_minimised(build: Build) -> None:
    built = build(num_mini_batches=2, vf_coef=0.5)
    losses: list[float] = []
    backward = built.accelerator.backward
    built.accelerator.backward = lambda loss, **options: (losses.append(loss.item()), backward(loss, **options))
    built.train()
    assert logged(built, "loss") == pytest.approx([sum(losses) / len(losses)], rel=1e-5)


def test_samples_are_shown_as_often_as_asked(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.ppo import ppo_trainer

    built = build(options={"eval_dataset": prompts(8)}, max_steps=4, num_sample_generations=2)
    shown: list[int] = []
    monkeypatch.setattr(ppo_trainer, "print_rich_table", lambda table: shown.append(built.state.global_step))
    built.train()
    assert shown == [1, 3]


def test_prompts_are_padded_on_the_left_by_the_collator_of_now(build: Build) -> None:
    """A rehearsal puts its own in, after the dataloader is built."""
    built = build()
    pad, collate, seen = built.processing_class.pad_token_id, built.data_collator, []
    assert built._collate([{"input_ids": [7]}, {"input_ids": [8, 9]}])["input_ids"].tolist() == [[pad, 7], [8, 9]]
    built.data_collator = lambda rows: (seen.append(len(rows)), collate(rows))[1]
    built.train()
    assert seen[0] == ROLLOUT


LOST: dict[str, tuple[dict[str, Any], Any]] = {
    # as a later accelerator.unwrap_model(keep_fp32_wrapper=False) does
    "mixed precision bf16": (
        {"bf16": True},
        lambda built: setattr(built.model, "forward", built.model._original_forward),
    ),
    "off in the value model": (
        {"gradient_checkpointing": True},
        lambda built: built.value_model.activation_checkpointing_disable(),
    ),
    "not be clipped to 0.5": ({"max_grad_norm": 0.5}, lambda built: delattr(built.optimizer, "step")),
}


@pytest.mark.parametrize("words", LOST)
def test_a_promise_that_is_broken_after_construction_is_an_error(words: str, build: Build) -> None:
    changes, lose = LOST[words]
    built = build(**changes)
    lose(built)
    with pytest.raises(TrainingError, match=words):
        built.train()


def padded_with(pad: str | None, model: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = pad and tokenizer.eos_token
    return {"processing_class": tokenizer}


UNTOKENIZED = {"prompt": ["a"] * ROLLOUT}
REFUSED: dict[str, tuple[type[Exception], dict[str, Any], Any]] = {
    "--deepspeed would be ignored": (UsageError, {"deepspeed": "full_shard"}, None),
    "--fsdp would be ignored": (UsageError, {"fsdp": "full_shard"}, None),
    "--save_strategy epoch would never save": (UsageError, {"save_strategy": "epoch"}, None),
    "mixed precision should be fp16 and is none on cpu": (TrainingError, {"fp16": True}, None),
    "The padding token is the end token": (UsageError, {}, lambda model: padded_with("eos", model)),
    "with a padding token": (UsageError, {}, lambda model: padded_with(None, model)),
    # TRL's loop would look for a batch without end
    "3 prompts do not fill one rollout, which takes 4": (EmptyDatasetError, {}, lambda _: {"dataset": prompts(3)}),
    "the rows have prompt": (errors.DatasetFormatError, {}, lambda _: {"dataset": Dataset.from_dict(UNTOKENIZED)}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_do_something_else_than_it_says_is_refused(words: str, qwen: Path, build: Build) -> None:
    error, changes, options = REFUSED[words]
    with pytest.raises(error, match=words):
        build(options=options and options(qwen), **changes)


def same_weights(one: Any, other: Any) -> bool:
    expected = weights(other)
    return all(torch.equal(value, expected[name]) for name, value in weights(one).items())


def run(model: Path, folder: Path, *, steps: int = 4, resume: Any = None, **options: Any) -> Any:
    """Updates that save after each one; the schedule, the shuffling and the rollouts all move on."""
    changes = {name: options.pop(name) for name in ("save_total_limit", "num_sample_generations") if name in options}
    args = config(folder, max_steps=steps, save_strategy="steps", save_steps=1, num_ppo_epochs=2, **changes)
    built = trainer(model, args, **options)
    built.train(resume_from_checkpoint=resume)
    return built


@pytest.mark.parametrize("use_lora", [False, True])
def test_a_run_that_goes_on_with_its_newest_whole_checkpoint_ends_where_an_unbroken_one_does_and_saves_both_models(
    use_lora: bool, qwen: Path, tmp_path: Path
) -> None:
    """Within the second pass over the data; and by name, with LoRA, as that begins."""
    options = {
        "dataset": prompts(2 * ROLLOUT + 1),
        "use_lora": use_lora,
        "eval_dataset": prompts(8),  # samples are shown after steps 1 and 3, which must not move the generators
        "num_sample_generations": 2,
    }
    straight = run(qwen, tmp_path, **options)
    torch.save(torch.get_rng_state(), tmp_path / "rng.pt")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # as if killed while it was written
    resume = str(tmp_path / "checkpoint-2") if use_lora else True
    resumed = run(qwen, tmp_path, resume=resume, save_total_limit=1, **options)
    assert same_weights(straight, resumed)
    for name in ("objective/scores", "objective/kl", "lr", "episode", "grad_norm", "loss"):
        assert logged(straight, name) == logged(resumed, name), name
    assert (resumed.state.global_step, resumed.state.episode) == (4, 4 * ROLLOUT)
    assert torch.equal(torch.get_rng_state(), torch.load(tmp_path / "rng.pt"))
    resumed.save_model(str(tmp_path))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    parts = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "tokenizer.json"}
    assert parts <= {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    trained = weights(straight)
    for folder in (tmp_path, tmp_path / "checkpoint-4"):
        assert (folder / "adapter_model.safetensors").exists() == use_lora
        policy = AutoModelForCausalLM.from_pretrained(folder).state_dict()  # adapters load through their base model
        value = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "value_model").state_dict()
        assert torch.equal(value["score.weight"], trained["value_model.score.weight"])
        if not use_lora:
            name = "model.layers.0.self_attn.q_proj.weight"
            assert torch.equal(policy[name], trained[f"policy.{name}"])


def test_prompts_come_from_the_beginning_where_none_are_to_be_left_out(qwen: Path, tmp_path: Path) -> None:
    built = trainer(qwen, config(tmp_path, max_steps=3))
    built.state.max_steps = 3

    def first(*, done: int, ignore_data_skip: bool) -> Any:
        built.state.global_step, built.args.ignore_data_skip = done, ignore_data_skip
        return next(built._prompts(built.dataloader, None))["input_ids"].tolist()

    beginning = first(done=0, ignore_data_skip=False)
    assert first(done=2, ignore_data_skip=True) == beginning
    assert first(done=2, ignore_data_skip=False) != beginning


def test_a_run_that_is_done_trains_no_further_and_another_batch_size_is_refused(qwen: Path, tmp_path: Path) -> None:
    done = run(qwen, tmp_path, steps=1)
    again = run(qwen, tmp_path, steps=1, resume=True)
    assert again.state.global_step == 1
    assert same_weights(again, done)
    args = config(tmp_path, max_steps=8, per_device_train_batch_size=1)
    with pytest.raises(TrainingError, match="an update takes 2 now"):
        trainer(qwen, args).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_saved_under_other_names_load(dtype: torch.dtype, tmp_path: Path) -> None:
    """A mixture's experts are one tensor in the model and one each in the file."""
    saved, other = (AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=dtype) for _ in range(2))
    saved.save_pretrained(tmp_path)
    held = dict(other.named_parameters())
    load_weights(other, tmp_path)
    for name, value in saved.named_parameters():
        assert torch.equal(held[name], value), name  # in the parameters that an optimizer holds


def test_what_is_no_checkpoint_of_this_trainer_or_of_another_adapter_is_named(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.OutputFolderError, match="holds no checkpoint"):
        run(qwen, tmp_path, resume=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")  # as TRL's own PPOTrainer leaves one
    with pytest.raises(TrainingError, match=r"lacks optimizer\.pt, scheduler\.pt, value_model"):
        run(qwen, tmp_path, resume=True)
    run(qwen, tmp_path / "lora", steps=1, use_lora=True)
    other = LoraConfig(r=4, target_modules=["k_proj"], task_type="CAUSAL_LM")
    with pytest.raises(TrainingError, match="are not those of this model"):
        run(qwen, tmp_path / "lora", use_lora=True, peft_config=other, resume=True)


SCRIPT = Path(__file__).with_name("ppo_script.py")


@pytest.fixture(scope="module")
def ran(qwen: Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the folder that the processes wrote to, what each of them found)."""
    folder = tmp_path_factory.mktemp("ddp")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", SCRIPT.parent)))
    forge.two_ranks([SCRIPT, qwen, folder], folder / "log", PYTHONPATH=path)
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_train_the_same_weights_resume_exactly_and_write_checkpoints_once(kind: str, ran: Any) -> None:
    folder, found = ran
    results = [found[rank][kind][run] for rank in range(2) for run in ("straight", "resumed")]
    assert {result["weights"] for result in results} == {results[0]["weights"]}
    assert {tuple(result["scores"]) for result in results} == {tuple(results[0]["scores"])}
    assert (results[0]["distributed"], results[0]["precision"]) == ("MULTI_CPU", "bf16")
    assert all(len(result["grad_norm"]) == 2 for result in results)
    first, second = sorted((folder / kind).glob("checkpoint-*"))
    assert (first.name, second.name) == ("checkpoint-1", "checkpoint-2")
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    for name in (weights, "value_model/model.safetensors"):
        assert all((place / name).is_file() for place in (folder / kind, second))
    assert (folder / kind / "README.md").is_file()
    assert {path.name for path in second.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_a_policy_saved_by_two_processes_loads_and_a_wish_of_one_to_stop_and_save_is_that_of_all(ran: Any) -> None:
    folder, found = ran
    _, loading = AutoModelForCausalLM.from_pretrained(folder / "full", output_loading_info=True)
    assert not loading["missing_keys"], "DDP's prefix in the names would leave every weight newly drawn"
    assert not loading["unexpected_keys"]
    assert [of_rank["stopped"] for of_rank in found] == [1, 1]
    assert (folder / "stopped" / "checkpoint-1" / "optimizer.pt").is_file()
