"""Where a trainer is and whose the bytes are, in trainers that generate."""

from collections.abc import Callable
from pathlib import Path

import pytest
from real_run import COMPLETION, LENGTH, SMALL, case, difference, peaks, rehearsed, trained

from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.types import Owner, Phase, Trace

pytestmark = pytest.mark.slow

ROWS = SMALL.effective_batch_size
KV_HEADS, HEAD_SIZE, LAYERS = 2, 16, 2

Folder = Callable[[str], Path]


@pytest.mark.parametrize(("method", "mode"), [("grpo", "colocate"), ("grpo", "server"), ("rloo", "server")])
def test_what_vllm_generated_is_scored_and_trained_on_alike(
    method: str, mode: str, model_folder: Folder, tmp_path: Path
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


def test_the_reference_is_weights_with_names_of_its_own_and_scores(full: Trace) -> None:
    names = [block.module for block in full.blocks if block.owner is Owner.WEIGHTS]
    assert {"model.norm.weight", "ref_model.model.norm.weight"} <= {*names}
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
    assert order == ["load", *(["score", "generate", "score", *micro_step, *micro_step] * 2), "save"]
