"""Where a trainer is and whose the bytes are: whole rehearsals of generating trainers against real runs."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import transformers
from tiny import tiny_config, tiny_folder

from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.materialize import materialize
from autotrain_mem.rehearsal.phases import follow
from autotrain_mem.rehearsal.recorder import Recorder
from autotrain_mem.rehearsal.stage import fake_tensors
from autotrain_mem.rehearsal.values import KnownValues
from autotrain_mem.rehearsal.vllm import vllm_stand_in
from autotrain_mem.spec import Owner, Phase, Trace

TOKENS = 12
ROWS = 4
KV_HEADS, HEAD_SIZE, LAYERS = 2, 16, 2

Make = Callable[[str], Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_folder(tmp_path_factory.mktemp("model"), "qwen2")
    return transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")


def make_real(kind: str) -> Any:
    return getattr(transformers, kind).from_config(_config(), dtype=torch.float32)


def make_fake(kind: str) -> Any:
    with torch.device("meta"):
        model = getattr(transformers, kind).from_config(_config(), dtype=torch.float32)
    model.tie_weights()
    return materialize(model)


def _config() -> Any:
    config = tiny_config("qwen2")
    config.num_labels = 1
    return config


def adapter(wanted: bool) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear") if wanted else None


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(index % 3) for index in range(len(completions))]


SETTINGS = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 2}


def build_groups(
    method: str, make: Make, tokenizer: Any, folder: pathlib.Path, *, lora: bool = False, **settings: Any
) -> Any:
    """GRPO and RLOO; where they load a reference model from a path, one is made."""
    import trl
    from datasets import Dataset

    trainer, config = (getattr(trl, f"{method}{kind}") for kind in ("Trainer", "Config"))
    generating = {} if settings.get("use_vllm") else {"generation_kwargs": {"min_new_tokens": TOKENS}}
    arguments = config(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        num_generations=ROWS,
        max_completion_length=TOKENS,
        **SETTINGS,
        **generating,
        **settings,
    )
    rows = Dataset.from_dict({"prompt": ["What is 3 + 4?" + " and 5" * (index % 2) for index in range(16)]})
    module = __import__(trainer.__module__, fromlist=["create_model_from_path"])
    with patch.object(module, "create_model_from_path", lambda *args, **kwargs: make("AutoModelForCausalLM")):
        return trainer(
            model=make("AutoModelForCausalLM"),
            reward_funcs=[reward],
            args=arguments,
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=adapter(lora),
        )


def build_ppo(make: Make, tokenizer: Any, folder: pathlib.Path, *, lora: bool = False) -> Any:
    """Every prompt begins with padding, so that all micro-batches are alike whatever the order of rows."""
    ppo = pytest.importorskip("trl.experimental.ppo")
    from datasets import Dataset

    arguments = ppo.PPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=8,
        response_length=TOKENS,
        local_rollout_forward_batch_size=2,
        num_sample_generations=0,
        gradient_checkpointing=False,
        **SETTINGS,
    )
    rows = Dataset.from_dict({"input_ids": [[tokenizer.pad_token_id] + [5] * 9] * 16})
    policy = make("AutoModelForCausalLM")
    trainer = ppo.PPOTrainer(
        args=arguments,
        processing_class=tokenizer,
        model=policy,
        ref_model=None if lora else make("AutoModelForCausalLM"),
        reward_model=make("AutoModelForSequenceClassification"),
        value_model=make("AutoModelForSequenceClassification"),
        train_dataset=rows,
        eval_dataset=rows,
        peft_config=adapter(lora),
    )
    policy.generation_config.eos_token_id = None  # a real policy would draw an end sooner or later
    return trainer


def train(build: Callable[[Make], Any], *, fake: bool, engine: AbstractContextManager[None] | None = None) -> Trace:
    torch.manual_seed(0)
    numpy.random.seed(0)  # PPO draws its micro-batches with it
    with _stage(fake) as recorder, engine or nullcontext():
        trainer = build(make_fake if fake else make_real)
        follow(trainer, recorder)
        with recorder.recording():
            trainer.train()
    return recorder.trace()


@contextmanager
def _stage(fake: bool) -> Iterator[Recorder]:
    if not fake:
        yield Recorder()
        return
    with fake_tensors() as mode, generation_by_its_ends():
        yield Recorder(KnownValues(mode).run)


def peaks(trace: Trace) -> dict[str, int]:
    """Largest live bytes within each phase."""
    live, largest = 0, {}
    for phase, sign, block in trace.walk():
        live += sign * block.size_bytes
        largest[phase.value] = max(largest.get(phase.value, 0), live)
    return largest


def births(trace: Trace) -> list[tuple[str, str, int, str]]:
    """All but those of the generation, of which a rehearsal takes the two ends."""
    return [
        (phase.value, block.owner.value, block.size_bytes, block.module)
        for phase, sign, block in trace.walk()
        if sign > 0 and phase is not Phase.GENERATE
    ]


GROUPS = {
    "full": {},
    "lora-bf16": {"lora": True, "bf16": True},
    "reference": {"beta": 0.1, "bf16": True},
    "lora-reference-reused": {"lora": True, "beta": 0.1, "num_iterations": 2, "gradient_checkpointing": False},
}


@pytest.mark.parametrize(
    ("method", "which"), [*(("GRPO", which) for which in GROUPS), ("RLOO", "full"), ("RLOO", "lora-reference-reused")]
)
def test_a_rehearsal_of_groups_has_the_peaks_of_the_real_run(
    method: str, which: str, tokenizer: Any, tmp_path: pathlib.Path
) -> None:
    def build(make: Make) -> Any:
        return build_groups(method, make, tokenizer, tmp_path, **GROUPS[which])

    real, fake = (train(build, fake=fake) for fake in (False, True))
    assert {"generate", "score", "forward", "backward", "optimizer_step"} <= set(peaks(real))
    assert peaks(fake) == peaks(real)
    assert births(fake) == births(real)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_rehearsal_of_ppo_has_the_peaks_of_the_real_run(lora: bool, tokenizer: Any, tmp_path: pathlib.Path) -> None:
    def build(make: Make) -> Any:
        return build_ppo(make, tokenizer, tmp_path, lora=lora)

    real, fake = (train(build, fake=fake) for fake in (False, True))
    assert {"generate", "score", "forward", "backward", "optimizer_step"} <= set(peaks(real))
    assert peaks(fake) == peaks(real)
    assert births(fake) == births(real)
    states = {block.owner for block in real.blocks}
    assert {Owner.GRADIENTS, Owner.OPTIMIZER_STATE} <= states, "the optimizer was there before it was followed"


@pytest.mark.parametrize(("method", "mode"), [("GRPO", "colocate"), ("GRPO", "server"), ("RLOO", "server")])
def test_what_vllm_generated_is_scored_and_trained_on_alike(
    method: str, mode: str, tokenizer: Any, tmp_path: pathlib.Path
) -> None:
    def build(make: Make) -> Any:
        return build_groups(method, make, tokenizer, tmp_path, lora=True, bf16=True, use_vllm=True, vllm_mode=mode)

    real, fake = (train(build, fake=fake, engine=vllm_stand_in()) for fake in (False, True))
    assert peaks(fake) == peaks(real)
    assert births(fake) == births(real)


@pytest.fixture(scope="module")
def full(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A rehearsal with a reference model."""
    folder = tmp_path_factory.mktemp("full")
    return train(lambda make: build_groups("GRPO", make, tokenizer, folder, beta=0.1), fake=True)


def test_the_models_that_are_not_trained_are_weights_with_names_of_their_own(full: Trace) -> None:
    names = [block.module for block in full.blocks if block.owner is Owner.WEIGHTS]
    assert "model.norm.weight" in names
    assert "ref_model.model.norm.weight" in names


def test_the_reference_scores(full: Trace) -> None:
    scoring = {block.module for phase, _, block in full.walk() if phase is Phase.SCORE}
    assert "ref_model.model.layers.1.mlp.down_proj" in scoring


def test_the_kv_cache_is_told_from_what_else_generates(full: Trace) -> None:
    """At the last step it holds, per layer, keys and values of all tokens but the one that is being made."""
    sizes = [block.size_bytes for block in full.blocks if block.owner is Owner.KV_CACHE]
    prompt = max(sizes) // (ROWS * 2 * KV_HEADS * HEAD_SIZE * 4) - TOKENS + 1
    largest = 2 * ROWS * KV_HEADS * HEAD_SIZE * 4 * (prompt + TOKENS - 1)
    generations = 2
    assert prompt > 5
    assert sizes.count(largest) == generations * LAYERS * 2
    assert {phase for phase, sign, block in full.walk() if sign > 0 and block.owner is Owner.KV_CACHE} == {
        Phase.GENERATE
    }


def test_phases_come_in_the_order_of_a_step(full: Trace) -> None:
    order = [phase.value for _, phase in full.phase_starts]
    micro_step = ["forward", "backward", "optimizer_step"]
    assert order == ["load", *(["score", "generate", "score", *micro_step, *micro_step] * 2)]


def test_generation_within_an_evaluation_belongs_to_it(tokenizer: Any, tmp_path: pathlib.Path) -> None:
    recorder = Recorder()
    seen: list[Phase] = []
    trainer = build_groups("GRPO", make_real, tokenizer, tmp_path)

    def looking(*args: Any, **kwargs: Any) -> None:
        seen.append(recorder.phase)

    trainer._generate_and_score_completions = looking
    trainer.model.generate = looking

    def evaluate() -> None:
        trainer._generate_and_score_completions()
        trainer.model.generate()

    trainer.evaluate = evaluate
    follow(trainer, recorder)
    trainer.evaluate()
    trainer._generate_and_score_completions()
    trainer.model.generate()
    assert seen == [Phase.EVALUATE, Phase.EVALUATE, Phase.SCORE, Phase.GENERATE]
    assert recorder.phase is Phase.SCORE


def test_reward_models_are_weights_each_with_its_name() -> None:
    def module() -> torch.nn.Module:
        return torch.nn.Linear(2, 2, bias=False)

    accelerator = SimpleNamespace(backward=None)
    trainer = SimpleNamespace(
        model=module(), reward_funcs=[module(), reward, module()], accelerator=accelerator, optimizer=None,
        compute_loss=None, evaluate=None, _save_checkpoint=None, create_optimizer=None,
    )  # fmt: skip
    recorder = Recorder()
    follow(trainer, recorder)
    names = [block.module for block in recorder.trace().blocks]
    assert names == ["reward_model.weight", "reward_model_1.weight", "weight"]
