"""The roofline, against sums that a reader can do."""

from dataclasses import replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS, memory_of

from autotrain_mem.estimator import step_time as module
from autotrain_mem.estimator.step_time import GATHERED_IN, shared_work, step_time
from autotrain_mem.types import Estimate, Hardware, Kind, Knobs, Owner, Phase, StepTime, Topology, Work, Workload

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


def seconds(
    *works: Work,
    hardware: Hardware = CARD,
    accumulation: int = 1,
    share: float = 1.0,
    rows: float = 1.0,
    overlaps: bool = True,
    **counts: int,
) -> float:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "tokens": 1.0, "share": share}
    options |= {"rows": rows, "overlaps": overlaps}
    return step_time(load(*works, **counts), hardware, **options).step_seconds


LINKED = Topology(devices=4, link="toy", link_bytes_per_second=10**10, network_bytes_per_second=10**9)
SEVERAL = replace(CARD, topology=LINKED)
TURING = replace(CARD, bf16_flops_per_second=None)
SECOND_OF_ATTENTION = round(100e12 * module.ATTENTION_EFFICIENCY)


def collective(number: float, seconds_of_each: float, phase: Phase = Phase.BACKWARD, **fields: Any) -> Work:
    """So many calls, among the devices of a node."""
    moved = round(seconds_of_each * round(10**10 * module.COLLECTIVE_EFFICIENCY))
    return work(phase, **{"kind": Kind.COLLECTIVE, "fixed_bytes": moved, "count": number, **fields})


ONE = work(flops=SECOND_OF_MATMUL)
UPDATED = work(Phase.OPTIMIZER_STEP, Kind.POINTWISE, fixed_bytes=SECOND_OF_MEMORY)
ON_HOST = work(Phase.OPTIMIZER_STEP, Kind.HOST_STEP, fixed_bytes=3 * module.HOST_BYTES_PER_SECOND)
GENERATED = work(Phase.GENERATE, flops=10 * SECOND_OF_MATMUL)
FIVE = work(Phase.BACKWARD, flops=5 * SECOND_OF_MATMUL)
REDUCED = collective(4, 1.0, of_step=True)


@pytest.mark.parametrize(
    ("works", "options", "expected"),
    [
        # An operator takes the longer of computing and moving.
        ([work(flops=SECOND_OF_MATMUL, bytes=SECOND_OF_MEMORY // 2)], {}, 1),
        ([work(flops=SECOND_OF_MATMUL, bytes=SECOND_OF_MEMORY * 2)], {}, 2),
        # fp32 is computed by the ordinary cores, and bf16 too where a card has none for it.
        ([replace(ONE, dtype="float32")], {}, 10),
        ([ONE], {"hardware": TURING}, 10),
        ([replace(ONE, dtype="float16")], {"hardware": TURING}, 1),
        # Many small kernels take as long as the host takes to launch them.
        ([work(flops=1, launches=1, count=1e6)], {}, 1e6 * module.LAUNCH_SECONDS),
        # The optimizer on the host goes through the host's memory, whose bandwidth the processes of a node share.
        ([ON_HOST], {}, 3),
        ([ON_HOST], {"hardware": SEVERAL}, 4 * 3),
        # Micro-steps repeat and the update does not.
        ([ONE, UPDATED], {"accumulation": 8}, 9),
        ([ONE, UPDATED], {"accumulation": 8, "micro_steps": 2}, 5),
        # PPO updates once in every pass over a rollout that is generated once.
        (
            [GENERATED, ONE, replace(ONE, phase=Phase.OPTIMIZER_STEP)],
            {"accumulation": 2, "passes": 4, "micro_steps_per_generation": 8},
            10 + 4 * (2 + 1),
        ),
        # Completions that serve two steps count half in each.
        ([GENERATED, ONE], {"accumulation": 4, "micro_steps_per_generation": 8}, 5 + 4),
        # Shorter rows save what grows with tokens and nothing else.
        ([ONE], {"share": 0.5}, 0.5),
        ([work(fixed_bytes=SECOND_OF_MEMORY)], {"share": 0.5}, 1),
        ([work(Phase.OPTIMIZER_STEP, bytes=SECOND_OF_MEMORY)], {"share": 0.5}, 1),
        ([work(kind=Kind.ATTENTION, flops=SECOND_OF_ATTENTION)], {"share": 0.5}, 0.25),
        # More rows are larger operators and more chunks of a loss; only fewer chunks write less than all tokens.
        ([ONE, replace(ONE, of_chunk=True), work(kind=Kind.ATTENTION, flops=SECOND_OF_ATTENTION)], {"rows": 2.0}, 6),
        ([work(fixed_bytes=SECOND_OF_MEMORY), work(Phase.OPTIMIZER_STEP, bytes=SECOND_OF_MEMORY)], {"rows": 2.0}, 2),
        ([work(bytes=SECOND_OF_MEMORY, of_chunk=True)], {"rows": 2.0}, 2),
        ([work(bytes=SECOND_OF_MEMORY, of_chunk=True)], {"rows": 0.5}, 0.25),
        # Copies on a stream of their own hide behind computing and others do not.
        ([FIVE, work(Phase.BACKWARD, Kind.OVERLAPPED_COPY, bytes=SECOND_OF_LINK)], {}, 5),
        ([FIVE, work(Phase.BACKWARD, Kind.COPY, bytes=SECOND_OF_LINK)], {}, 6),
        # Four gathers beside 5 s of computing: the first is waited for.
        ([FIVE, collective(4, 1.0)], {"hardware": SEVERAL}, 1 + 5),
        # Ten take longer than what is computed.
        ([FIVE, collective(10, 1.0)], {"hardware": SEVERAL}, 10),
        # Shorter rows leave weights and gradients what they are.
        ([FIVE, collective(10, 1.0)], {"hardware": SEVERAL, "share": 0.2}, 10),
        # DDP reduces after the backward pass.
        ([FIVE, collective(4, 1.0)], {"hardware": SEVERAL, "overlaps": False}, 4 + 5),
        # What is reduced once in a step is not reduced in each of its micro-steps, of which one was rehearsed or two.
        ([FIVE, REDUCED], {"hardware": SEVERAL, "accumulation": 3, "overlaps": False}, 4 + 3 * 5),
        ([FIVE, REDUCED], {"hardware": SEVERAL, "accumulation": 3}, 1 + 3 * 5),
        ([FIVE, collective(10, 1.0, of_step=True)], {"hardware": SEVERAL, "accumulation": 3}, 10 + 2 * 5),
        (
            [replace(FIVE, count=2.0), REDUCED],
            {"hardware": SEVERAL, "accumulation": 6, "micro_steps": 2, "overlaps": False},
            6 * 5 + 4,
        ),
        # Both of a last micro-step: the first that is gathered and the last that is reduced.
        (
            [FIVE, collective(4, 1.0), collective(4, 0.5, of_step=True)],
            {"hardware": SEVERAL, "accumulation": 2},
            (1 + 5) + (1 + 0.5 + 5),
        ),
        # Between nodes it takes ten times as long, and is under way at the same time.
        ([FIVE, collective(4, 1.0), collective(4, 1.0, kind=Kind.NETWORK_COLLECTIVE)], {"hardware": SEVERAL}, 40),
        # Groups of all processes of two nodes: a tenth of the link's rate for each of four devices, used together.
        ([collective(4, 1.0)], {"hardware": SEVERAL}, 4),
        ([collective(4, 1.0)], {"hardware": replace(SEVERAL, topology=replace(LINKED, nodes=2))}, 10 / 4 * 4),
        # Each costs a latency, however small.
        (
            [collective(1000, 0.0, launches=1)],
            {"hardware": SEVERAL, "overlaps": False},
            1000 * (module.COLLECTIVE_SECONDS + module.LAUNCH_SECONDS),
        ),
    ],
)
def test_a_step_takes_the_sum_that_a_reader_can_do(works: list[Work], options: dict[str, Any], expected: float) -> None:
    assert seconds(*works, **options) == pytest.approx(expected)


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


def test_a_link_that_is_not_known_is_assumed_and_named_where_it_is_used() -> None:
    unknown = replace(CARD, topology=replace(LINKED, link_bytes_per_second=None, network_bytes_per_second=None))
    options: dict[str, Any] = {"gradient_accumulation_steps": 1, "tokens": 1.0}
    for kind, name in ((Kind.COLLECTIVE, "PCIe 4.0"), (Kind.NETWORK_COLLECTIVE, "400 Gb/s per node of 8 GPUs")):
        time = step_time(load(collective(1, 1.0, kind=kind)), unknown, **options)
        assert time.assumed == name
        assert time.step_seconds > 0
    assert not step_time(load(work(flops=SECOND_OF_MATMUL)), unknown, **options).assumed
    nothing_known = replace(unknown, bandwidth_bytes_per_second=None)
    assert step_time(load(collective(1, 1.0)), nothing_known, **options).assumed == "a100-80gb, PCIe 4.0"


SHARDED = replace(TRL_DEFAULTS, processes=8, sharding="fsdp2")
WEIGHTS = 32_000_000
UPDATE = work(Phase.OPTIMIZER_STEP, Kind.POINTWISE, dtype="float32", fixed_bytes=800, launches=1)
FORWARD = replace(UPDATE, phase=Phase.FORWARD, kind=Kind.COLLECTIVE, fixed_bytes=1, dtype="bfloat16")
REHEARSED = Workload(work=(UPDATE, FORWARD, replace(FORWARD, phase=Phase.BACKWARD)), micro_steps=2, optimizer_steps=1)


def known(knobs: Knobs, nodes: int = 1) -> Estimate:
    topology = Topology(nodes=nodes, devices=8 // nodes)
    card = Hardware(name="toy", origin="named", total_bytes=1, free_bytes=1, non_torch_bytes=0, topology=topology)
    memory = memory_of(owners_at_peak={Owner.WEIGHTS: WEIGHTS // knobs.shards})
    return Estimate(knobs=knobs, hardware=card, memory=memory, budget_bytes=1, time=StepTime(tokens=1.0))


def sent(work: Workload) -> dict[tuple[Phase, Kind], int]:
    """Millions of bytes in all that was rehearsed."""
    total: dict[tuple[Phase, Kind], float] = {}
    for each in work.work:
        if each.kind in (Kind.COLLECTIVE, Kind.NETWORK_COLLECTIVE):
            key = each.phase, each.kind
            total[key] = total.get(key, 0.0) + each.count * each.fixed_bytes / 1e6
    return {key: round(size) for key, size in total.items()}


WITHIN, BETWEEN = Kind.COLLECTIVE, Kind.NETWORK_COLLECTIVE


def test_what_is_sent_follows_from_the_bytes_of_the_model() -> None:
    for sharding, nodes, expected in (
        # 32 MB of float32 gradients go around twice, once in a step: 2 x 32 x 7/8.
        ("ddp", 1, {(Phase.BACKWARD, WITHIN): 56}),
        # 16 MB of bfloat16 weights are gathered in each of two micro-steps (2 x 14), and gradients reduced.
        ("fsdp2-no-reshard", 1, {(Phase.FORWARD, WITHIN): 28, (Phase.BACKWARD, WITHIN): 28}),
        ("fsdp2", 1, {(Phase.FORWARD, WITHIN): 28, (Phase.BACKWARD, WITHIN): 56}),
        ("fsdp2", 2, {(Phase.FORWARD, BETWEEN): 28, (Phase.BACKWARD, BETWEEN): 56}),
        # Shards of four: 2 x 16 x 3/4; between two nodes the quarter of 16 MB goes around in each micro-step.
        ("hsdp", 2, {(Phase.FORWARD, WITHIN): 24, (Phase.BACKWARD, WITHIN): 48, (Phase.BACKWARD, BETWEEN): 8}),
    ):
        knobs = replace(SHARDED, sharding=sharding, dp_replicate_size=nodes if sharding == "hsdp" else None)
        for before in (SHARDED, replace(SHARDED, sharding="ddp")):
            work = shared_work(REHEARSED, known(before, nodes), knobs)
            assert sent(work) == expected, sharding
            (update,) = (each for each in work.work if each.phase is Phase.OPTIMIZER_STEP)
            assert update.fixed_bytes == 800 * before.shards // knobs.shards


def test_an_adapter_is_gathered_with_its_base_and_reduced_with_next_to_nothing() -> None:
    lora = {"use_peft": True, "dtype": "bfloat16"}
    before = known(replace(SHARDED, **lora))
    assert sent(shared_work(REHEARSED, before, replace(SHARDED, sharding="ddp", **lora))) == {}
    work = shared_work(REHEARSED, before, replace(SHARDED, **lora))
    assert sent(work) == {(Phase.FORWARD, WITHIN): 56, (Phase.BACKWARD, WITHIN): 56}
    assert {each.count for each in work.work if each.kind is WITHIN} == {2.0 * GATHERED_IN}


@pytest.mark.parametrize("of_layers", ["bfloat16", "float32"])
def test_a_loss_in_float32_under_fsdp2_is_one_in_the_layers_precision_under_ddps_autocast(of_layers: str) -> None:
    layers = replace(UPDATE, phase=Phase.FORWARD, kind=Kind.MATMUL, dtype=of_layers, flops=900)
    loss = replace(layers, dtype="float32", flops=100, of_chunk=True)
    rehearsed = replace(REHEARSED, work=(*REHEARSED.work, layers, loss))
    work = shared_work(rehearsed, known(SHARDED), replace(SHARDED, sharding="ddp"))
    assert [each.dtype for each in work.work if each.kind is Kind.MATMUL] == [of_layers, of_layers]
    still = shared_work(rehearsed, known(SHARDED), replace(SHARDED, sharding="fsdp2-no-reshard"))
    assert [each.dtype for each in still.work if each.kind is Kind.MATMUL] == [of_layers, "float32"]
