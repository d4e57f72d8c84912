"""Weights of a rehearsed process of several go to vLLM as those of a real one that talks to another through gloo."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from rank_run import moves_in_order, trained_by_ranks
from real_run import case, peaks, rehearsed

from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.types import Owner, Phase

PICKLED = 2500
"""Bytes up to which blocks are told apart: prompts and metrics, which a group that is not there does not pickle."""

MODES = [
    ({"vllm_mode": "server"}, {"sharding": "fsdp2", "use_peft": True}),
    ({"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}, {"sharding": "fsdp2-no-reshard"}),
]


@pytest.mark.parametrize(("given", "knobs"), MODES)
def test_weights_are_gathered_for_vllm_as_by_real_ranks(
    given: dict[str, Any], knobs: dict[str, Any], model_folder: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    one = case("grpo", model_folder("qwen2"), {"use_vllm": True, **given}, processes=2, **knobs)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, *_ = trained_by_ranks(one, tmp_path)
    made, really_made = ([move for move in moves_in_order(trace, PICKLED) if move[1] > 0] for trace in (fake, real))
    assert made == really_made
    for phase, peak_bytes in peaks(real).items():
        assert peaks(fake)[phase] == pytest.approx(peak_bytes, abs=2 * PICKLED), phase


def test_one_weight_at_a_time_is_gathered_for_an_engine_of_the_same_process(
    model_folder: Callable[[str], pathlib.Path],
) -> None:
    one = case("grpo", model_folder("qwen2"), {"use_vllm": True}, processes=2, sharding="fsdp2")
    trace = rehearsed(one)
    embedding = max(block.size_bytes for block in trace.blocks if block.owner is Owner.WEIGHTS) * 2
    alive = most = 0
    for phase, sign, block in trace.walk():
        if phase is Phase.GENERATE and block.size_bytes * 2 >= embedding:
            alive += sign * block.size_bytes
            most = max(most, alive)
    assert embedding <= most < 2 * embedding, "it dies before the next"
