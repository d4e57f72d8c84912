"""Where a trainer is and whose the bytes are, in trainers that generate."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_run import COMPLETION, LENGTH, SMALL, case, difference, peaks, rehearsed, trained

from autotrain_mem.rehearsal.rehearse import trainer_spec
from autotrain_mem.rehearsal.trace.phases import follow
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.spec import Owner, Phase, Trace

pytestmark = pytest.mark.slow

ROWS = SMALL.effective_batch_size
KV_HEADS, HEAD_SIZE, LAYERS = 2, 16, 2

Folder = Callable[[str], pathlib.Path]


@pytest.mark.parametrize(("method", "mode"), [("grpo", "colocate"), ("grpo", "server"), ("rloo", "server")])
def test_what_vllm_generated_is_scored_and_trained_on_alike(
    method: str, mode: str, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    one = case(method, model_folder("qwen2"), {"use_vllm": True, "vllm_mode": mode}, use_peft=True)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, _ = trained(one, tmp_path / "real")
    assert not difference(one, fake, real)
    assert {"generate", "score", "forward", "backward", "optimizer_step"} <= set(peaks(real))


@pytest.fixture(scope="module")
def full(model_folder: Folder) -> Trace:
    """A rehearsal with a reference model."""
    return rehearsed(case("grpo", model_folder("qwen2"), {"beta": 0.1}))


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
    largest = ROWS * KV_HEADS * HEAD_SIZE * 4 * (LENGTH - 1)
    generations = 2
    assert COMPLETION > 2, "a last step that is not the first"
    assert max(sizes) == largest
    assert sizes.count(largest) == generations * LAYERS * 2
    assert {phase for phase, sign, block in full.walk() if sign > 0 and block.owner is Owner.KV_CACHE} == {
        Phase.GENERATE
    }


def test_phases_come_in_the_order_of_a_step(full: Trace) -> None:
    order = [phase.value for _, phase in full.phase_starts]
    micro_step = ["forward", "backward", "optimizer_step"]
    assert order == ["load", *(["score", "generate", "score", *micro_step, *micro_step] * 2)]


def test_generation_within_an_evaluation_belongs_to_it(model_folder: Folder, tmp_path: pathlib.Path) -> None:
    recorder = Recorder()
    seen: list[Phase] = []
    one = case("grpo", model_folder("qwen2"))
    trainer = trainer_spec(one.job, one.knobs, one.length, str(tmp_path)).build()

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
        model=module(), reward_funcs=[module(), len, module()], accelerator=accelerator, optimizer=None,
        compute_loss=None, evaluate=None, _save_checkpoint=None, create_optimizer=None,
    )  # fmt: skip
    recorder = Recorder()
    follow(trainer, recorder)
    names = [block.module for block in recorder.trace().blocks]
    assert names == ["reward_model.weight", "reward_model_1.weight", "weight"]
