"""The roofline, against sums that a reader can do."""

from dataclasses import replace
from typing import Any

import pytest

from autotrain_mem.estimator import step_time as module
from autotrain_mem.estimator.step_time import step_time
from autotrain_mem.spec import Hardware, Phase, Work, Workload
from autotrain_mem.spec.work import Kind

RATES = {
    "bandwidth_bytes_per_second": 1000 * 10**9,
    "bf16_flops_per_second": 100 * 10**12,
    "fp16_flops_per_second": 100 * 10**12,
    "fp32_flops_per_second": 10 * 10**12,
    "host_link_bytes_per_second": 10 * 10**9,
}
CARD = Hardware(name="toy", origin="named", total_bytes=1, free_bytes=1, non_torch_bytes=0, **RATES)
SECOND_OF_MATMUL = round(100e12 * module.MATMUL_EFFICIENCY)
SECOND_OF_MEMORY = round(1000e9 * module.BANDWIDTH_EFFICIENCY)
SECOND_OF_LINK = round(10e9 * module.LINK_EFFICIENCY)


def work(phase: Phase = Phase.FORWARD, kind: Kind = Kind.MATMUL, **fields: Any) -> Work:
    none = {"dtype": "bfloat16", "flops": 0, "bytes": 0, "fixed_bytes": 0, "launches": 0, "count": 1.0}
    return Work(phase=phase, kind=kind, **{**none, **fields})


def load(*works: Work, **counts: int) -> Workload:
    return Workload(work=works, **{"micro_steps": 1, "optimizer_steps": 1, **counts})


def seconds(*works: Work, hardware: Hardware = CARD, accumulation: int = 1, share: float = 1.0, **counts: int) -> float:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "tokens": 1.0, "share": share}
    return step_time(load(*works, **counts), hardware, **options).step_seconds


TURING = replace(CARD, bf16_flops_per_second=None)


@pytest.mark.parametrize(
    ("done", "hardware", "expected"),
    [
        # An operator takes the longer of computing and moving.
        (work(flops=SECOND_OF_MATMUL, bytes=SECOND_OF_MEMORY // 2), CARD, 1.0),
        (work(flops=SECOND_OF_MATMUL, bytes=SECOND_OF_MEMORY * 2), CARD, 2.0),
        # fp32 is computed by the ordinary cores, and bf16 too where a card has none for it.
        (work(dtype="float32", flops=SECOND_OF_MATMUL), CARD, 10.0),
        (work(flops=SECOND_OF_MATMUL), TURING, 10.0),
        (work(flops=SECOND_OF_MATMUL, dtype="float16"), TURING, 1.0),
        # Many small kernels take as long as the host takes to launch them.
        (work(flops=1, launches=1, count=1e6), CARD, 1e6 * module.LAUNCH_SECONDS),
        # The optimizer on the host goes through the host's memory.
        (work(Phase.OPTIMIZER_STEP, Kind.HOST_STEP, fixed_bytes=3 * module.HOST_BYTES_PER_SECOND), CARD, 3.0),
    ],
)
def test_an_operator_takes_as_long_as_what_limits_it(done: Work, hardware: Hardware, expected: float) -> None:
    assert seconds(done, hardware=hardware) == pytest.approx(expected)


def test_micro_steps_repeat_and_the_update_does_not() -> None:
    works = work(flops=SECOND_OF_MATMUL), work(Phase.OPTIMIZER_STEP, Kind.POINTWISE, fixed_bytes=SECOND_OF_MEMORY)
    assert seconds(*works, accumulation=8) == pytest.approx(9.0)
    assert seconds(*works, accumulation=8, micro_steps=2) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("updates", "counts", "expected"),
    [
        # PPO updates once in every pass over a rollout that is generated once.
        (1, {"accumulation": 2, "passes": 4, "micro_steps_per_generation": 8}, 10 + 4 * (2 + 1)),
        # Completions that serve two steps count half in each.
        (0, {"accumulation": 4, "micro_steps_per_generation": 8}, 5 + 4),
    ],
)
def test_a_generation_serves_its_steps(updates: int, counts: dict[str, int], expected: float) -> None:
    update = [work(Phase.OPTIMIZER_STEP, flops=SECOND_OF_MATMUL)] * updates
    works = work(Phase.GENERATE, flops=10 * SECOND_OF_MATMUL), work(flops=SECOND_OF_MATMUL), *update
    assert seconds(*works, **counts) == pytest.approx(expected)


def test_shorter_rows_save_what_grows_with_tokens_and_nothing_else() -> None:
    assert seconds(work(flops=SECOND_OF_MATMUL), share=0.5) == pytest.approx(0.5)
    assert seconds(work(fixed_bytes=SECOND_OF_MEMORY), share=0.5) == pytest.approx(1.0)
    assert seconds(work(Phase.OPTIMIZER_STEP, bytes=SECOND_OF_MEMORY), share=0.5) == pytest.approx(1.0)
    flops = round(100e12 * module.ATTENTION_EFFICIENCY)
    assert seconds(work(kind=Kind.ATTENTION, flops=flops), share=0.5) == pytest.approx(0.25)


def test_copies_on_a_stream_of_their_own_hide_behind_computing_and_others_do_not() -> None:
    computing, copied = work(flops=2 * SECOND_OF_MATMUL), {"bytes": SECOND_OF_LINK}
    assert seconds(computing, work(kind=Kind.OVERLAPPED_COPY, **copied)) == pytest.approx(2.0)
    assert seconds(computing, work(kind=Kind.COPY, **copied)) == pytest.approx(3.0)


def test_phases_add_up_and_tokens_are_divided_by_all_of_them() -> None:
    workload = load(work(flops=SECOND_OF_MATMUL), work(Phase.BACKWARD, flops=3 * SECOND_OF_MATMUL))
    time = step_time(workload, CARD, gradient_accumulation_steps=2, tokens=1600.0)
    assert time.phases == pytest.approx({Phase.FORWARD: 2.0, Phase.BACKWARD: 6.0})
    assert (time.tokens_per_second, time.assumed) == (pytest.approx(200.0), "")


@pytest.mark.parametrize("name", [field for field in RATES if not field.startswith("bf16")])
def test_a_card_with_a_rate_unknown_is_ranked_by_another_card_and_says_so(name: str) -> None:
    unknown = replace(CARD, **{name: None})
    time = step_time(load(work(flops=312 * 10**12)), unknown, gradient_accumulation_steps=1, tokens=1.0)
    assert time.assumed == "a100-80gb"
    assert time.step_seconds == pytest.approx(1 / module.MATMUL_EFFICIENCY)
