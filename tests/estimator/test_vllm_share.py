"""A colocated vLLM that sleeps has its share of the card while it generates, and little while the trainer trains."""

from dataclasses import replace

import pytest
from nouns import TRL_DEFAULTS
from traces import block, trace

from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.estimator.vllm_share import asleep_bytes, estimate_while_awake, with_sleep
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Estimate, Hardware, Job, MemoryEstimate, Owner, Phase, StepTime, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED, EngineMark
from autotrain_mem.types.vllm import ASLEEP_BYTES, ASLEEP_PARALLEL_BYTES

ENDLESS = DeviceCapacity(capacity_bytes=None)
CARD = Hardware(name="toy24", origin="named", total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=GIB)
SLEEPING = {"use_vllm": True, "vllm_enable_sleep_mode": True}


def run(*, cached_mib: int = 0, activations_mib: int = 200) -> Trace:
    """100 MiB of weights; an engine that is awake for a gathered weight of 20; then a step; then awake once more.

    Args:
        cached_mib: Of what is freed between the emptying of the cache and the engine's waking.
    """
    blocks = [
        block(100 * MIB, Owner.WEIGHTS),
        block(20 * MIB, Owner.GATHERED_WEIGHTS),
        block(activations_mib * MIB, Owner.ACTIVATIONS, "layer"),
        block(max(1, cached_mib) * MIB),
    ]
    events = [1, CACHE_EMPTIED, 2, -2, CACHE_EMPTIED, 3, -3, CACHE_EMPTIED, 4, -4, CACHE_EMPTIED]
    phases = [(0, Phase.LOAD), (1, Phase.GENERATE), (5, Phase.FORWARD), (7, Phase.GENERATE), (10, Phase.SCORE)]
    last_woken = 10 if cached_mib else 8
    marks = [(2, EngineMark.WAKES), (2, EngineMark.WAKES), (4, EngineMark.SLEEPS)]
    marks += [(last_woken, EngineMark.WAKES), (10, EngineMark.SLEEPS)]
    return replace(trace(blocks, events, phases), engine_marks=tuple(marks))


def awake(run: Trace) -> MemoryEstimate:
    found = estimate_while_awake(run, ENDLESS, estimate_memory(run, ENDLESS))
    assert found is not None
    return found


def test_only_what_is_alive_while_the_engine_is_awake_is_beside_its_share() -> None:
    memory = awake(run())
    assert memory.peak_allocated_bytes == 120 * MIB == sum(memory.owners_at_peak.values())
    assert memory.owners_at_peak[Owner.GATHERED_WEIGHTS] == 20 * MIB
    assert memory.phases == {Phase.GENERATE: 120 * MIB}
    assert (memory.peak_phase, memory.modules_at_peak) == (Phase.GENERATE, ())
    assert memory.reserved.native.peak_reserved_bytes == 120 * MIB, "what the step left is given back before it wakes"
    assert memory.reserved.native.fits
    cached = awake(run(cached_mib=60))
    assert cached.peak_allocated_bytes == 120 * MIB
    assert cached.reserved.native.peak_reserved_bytes == 160 * MIB, "what is cached as it wakes lies beside it"
    assert cached.reserved.native.slack_bytes == 60 * MIB


def estimate(memory: MemoryEstimate) -> Estimate:
    time = StepTime(tokens=1.0, phases={})
    sizes = {"budget_bytes": 10 * GIB, "vllm_share_bytes": GIB}
    return Estimate(knobs=TRL_DEFAULTS, hardware=CARD, memory=memory, time=time, **sizes)


def test_an_engine_that_never_sleeps_has_its_share_throughout() -> None:
    never = replace(run(), engine_marks=())
    memory = estimate_memory(never, ENDLESS)
    assert estimate_while_awake(never, ENDLESS, memory) is None
    estimated = estimate(memory)
    assert with_sleep(estimated, None, asleep_bytes=5) is estimated


def test_the_card_needs_the_larger_of_both_moments() -> None:
    awake_mib, asleep_mib = 1024 + 1024 + 120, 1024 + 512 + 1900
    for activations_mib, needed, phase in ((200, awake_mib, Phase.GENERATE), (1800, asleep_mib, Phase.FORWARD)):
        one = run(activations_mib=activations_mib)
        estimated = with_sleep(estimate(estimate_memory(one, ENDLESS)), awake(one), asleep_bytes=512 * MIB)
        assert (estimated.required_bytes, estimated.memory.peak_phase) == (needed * MIB, phase)
        assert estimated.vllm_sleep is not None
        assert estimated.required_bytes == CARD.non_torch_bytes + estimated.vllm_sleep.needed_bytes
        assert estimated.vllm_sleep.is_decided_awake is (phase is Phase.GENERATE)


def test_it_never_keeps_more_than_its_share() -> None:
    for words, kept_bytes in (
        (SLEEPING, ASLEEP_BYTES),
        (SLEEPING | {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5}, ASLEEP_PARALLEL_BYTES),
        (SLEEPING | {"vllm_gpu_memory_utilization": 0.1}, 2.4 * GIB),
        ({"use_vllm": True}, 7.2 * GIB),
        ({"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}, 12 * GIB),
        ({}, 0),
        (SLEEPING | {"vllm_mode": "server"}, 0),
    ):
        assert asleep_bytes(Job(method="grpo", model="m", dataset=None, arguments=words), CARD) == pytest.approx(
            kept_bytes
        ), words
