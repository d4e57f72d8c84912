"""What a PPO run saves, and that one which goes on from there ends where an unbroken one does, bit for bit; so do two
processes (DDP on the CPU), each with the environment that torchrun gives it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from ppo_runs import NEEDS_PPO, ROLLOUT, config, logged, prompts, same_weights, trainer, weights
from tiny import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.trainers.ppo_resume import load_weights
from tests.forked import ROOT, Forge

pytestmark = NEEDS_PPO


def run(model: Path, folder: Path, *, steps: int = 4, resume: Any = None, **options: Any) -> Any:
    """Updates that save after each one; the schedule, the shuffling and the rollouts all move on."""
    changes = {name: options.pop(name) for name in ("save_total_limit", "num_sample_generations") if name in options}
    args = config(folder, max_steps=steps, save_strategy="steps", save_steps=1, num_ppo_epochs=2, **changes)
    built = trainer(model, args, **options)
    built.train(resume_from_checkpoint=resume)
    return built


@pytest.mark.parametrize("use_lora", [False, True])
def test_a_run_that_goes_on_with_its_newest_whole_checkpoint_ends_where_an_unbroken_one_does_and_saves_both_models(
    use_lora: bool, model: Path, tmp_path: Path
) -> None:
    """Within the second pass over the data; and by name, with LoRA, as that begins."""
    options = {
        "dataset": prompts(2 * ROLLOUT + 1),
        "use_lora": use_lora,
        "eval_dataset": prompts(8),  # samples are shown after steps 1 and 3, which must not move the generators
        "num_sample_generations": 2,
    }
    straight = run(model, tmp_path, **options)
    torch.save(torch.get_rng_state(), tmp_path / "rng.pt")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # as if killed while it was written
    resume = str(tmp_path / "checkpoint-2") if use_lora else True
    resumed = run(model, tmp_path, resume=resume, save_total_limit=1, **options)
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
        value = AutoModelForSequenceClassification.from_pretrained(folder / "value_model").state_dict()
        assert torch.equal(value["score.weight"], trained["value_model.score.weight"])
        if not use_lora:
            name = "model.layers.0.self_attn.q_proj.weight"
            assert torch.equal(policy[name], trained[f"policy.{name}"])


def test_prompts_come_from_the_beginning_where_none_are_to_be_left_out(model: Path, tmp_path: Path) -> None:
    built = trainer(model, config(tmp_path, max_steps=3))
    built.state.max_steps = 3

    def first(*, done: int, ignore_data_skip: bool) -> Any:
        built.state.global_step, built.args.ignore_data_skip = done, ignore_data_skip
        return next(built._prompts(built.dataloader, None))["input_ids"].tolist()

    beginning = first(done=0, ignore_data_skip=False)
    assert first(done=2, ignore_data_skip=True) == beginning
    assert first(done=2, ignore_data_skip=False) != beginning


def test_a_run_that_is_done_trains_no_further_and_one_of_another_batch_size_cannot_go_on(
    model: Path, tmp_path: Path
) -> None:
    done = run(model, tmp_path, steps=1)
    again = run(model, tmp_path, steps=1, resume=True)
    assert again.state.global_step == 1
    assert same_weights(again, done)
    args = config(tmp_path, max_steps=8, per_device_train_batch_size=1)
    with pytest.raises(TrainingError, match="an update takes 2 now"):
        trainer(model, args).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_saved_under_other_names_load(dtype: torch.dtype, tmp_path: Path) -> None:
    """A mixture's experts are one tensor in the model and one each in the file."""
    saved, other = (AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"), dtype=dtype) for _ in range(2))
    saved.save_pretrained(tmp_path)
    held = dict(other.named_parameters())
    load_weights(other, tmp_path)
    for name, value in saved.named_parameters():
        assert torch.equal(held[name], value), name  # in the parameters that an optimizer holds


def test_what_is_no_checkpoint_of_this_trainer_or_of_another_adapter_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputFolderError, match="holds no checkpoint"):
        run(model, tmp_path, resume=True)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")  # as TRL's own PPOTrainer leaves one
    with pytest.raises(TrainingError, match=r"lacks optimizer\.pt, scheduler\.pt, value_model"):
        run(model, tmp_path, resume=True)
    run(model, tmp_path / "lora", steps=1, use_lora=True)
    other = LoraConfig(r=4, target_modules=["k_proj"], task_type="CAUSAL_LM")
    with pytest.raises(TrainingError, match="are not those of this model"):
        run(model, tmp_path / "lora", use_lora=True, peft_config=other, resume=True)


SCRIPT = Path(__file__).with_name("ppo_script.py")


@pytest.fixture(scope="module")
def ran(model: Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the folder that the processes wrote to, what each of them found)."""
    folder = tmp_path_factory.mktemp("ddp")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", SCRIPT.parent)))
    forge.two_ranks([SCRIPT, model, folder], folder / "log", PYTHONPATH=path)
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_train_the_same_weights_resume_bit_for_bit_and_write_checkpoints_once(
    kind: str, ran: Any
) -> None:
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
