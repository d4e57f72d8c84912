"""What processes would send each other if they shared a model otherwise, in sums that a reader can do."""

from dataclasses import replace

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.estimator.step_time import GATHERED_IN, shared_work
from autotrain_mem.settings.knobs import Sharding
from autotrain_mem.types import (
    Estimate,
    Hardware,
    Knobs,
    MemoryEstimate,
    Owner,
    Phase,
    ReservedByMode,
    ReservedEstimate,
    StepTime,
    Topology,
    Work,
    Workload,
)
from autotrain_mem.types.work import Kind

SHARDED = replace(TRL_DEFAULTS, processes=8, sharding="fsdp2")
WEIGHTS = 32_000_000
"""Bytes of the whole model, in float32."""
UPDATE = Work(
    phase=Phase.OPTIMIZER_STEP,
    kind=Kind.POINTWISE,
    dtype="float32",
    flops=0,
    bytes=0,
    fixed_bytes=800,
    launches=1,
    count=1.0,
)
FORWARD = replace(UPDATE, phase=Phase.FORWARD, kind=Kind.COLLECTIVE, fixed_bytes=1, dtype="bfloat16")
REHEARSED = Workload(work=(UPDATE, FORWARD, replace(FORWARD, phase=Phase.BACKWARD)), micro_steps=2, optimizer_steps=1)


def known(knobs: Knobs, nodes: int = 1) -> Estimate:
    topology = Topology(nodes=nodes, devices=8 // nodes)
    card = Hardware(name="toy", origin="named", total_bytes=1, free_bytes=1, non_torch_bytes=0, topology=topology)
    mode = ReservedEstimate(
        peak_allocated_bytes=1,
        peak_reserved_bytes=1,
        peak_limited_bytes=1,
        slack_bytes=0,
        num_alloc_retries=0,
        largest_refused_bytes=None,
    )
    memory = MemoryEstimate(
        peak_allocated_bytes=1,
        peak_phase=Phase.BACKWARD,
        phases={},
        owners_at_peak={Owner.WEIGHTS: WEIGHTS // knobs.shards},
        modules_at_peak=(),
        reserved=ReservedByMode(native=mode, expandable_segments=mode),
        not_counted=(),
        rehearsal_seconds=1.0,
    )
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


@pytest.mark.parametrize(
    ("sharding", "nodes", "expected"),
    [
        # 32 MB of float32 gradients go around twice, once in a step: 2 x 32 x 7/8.
        ("ddp", 1, {(Phase.BACKWARD, WITHIN): 56}),
        # 16 MB of bfloat16 weights are gathered in each of two micro-steps (2 x 14), and gradients reduced.
        ("fsdp2-no-reshard", 1, {(Phase.FORWARD, WITHIN): 28, (Phase.BACKWARD, WITHIN): 28}),
        ("fsdp2", 1, {(Phase.FORWARD, WITHIN): 28, (Phase.BACKWARD, WITHIN): 56}),
        ("fsdp2", 2, {(Phase.FORWARD, BETWEEN): 28, (Phase.BACKWARD, BETWEEN): 56}),
        # Shards of four: 2 x 16 x 3/4; between two nodes the quarter of 16 MB goes around in each micro-step.
        ("hsdp", 2, {(Phase.FORWARD, WITHIN): 24, (Phase.BACKWARD, WITHIN): 48, (Phase.BACKWARD, BETWEEN): 8}),
    ],
)
def test_what_is_sent_follows_from_the_bytes_of_the_model(
    sharding: Sharding, nodes: int, expected: dict[tuple[Phase, Kind], int]
) -> None:
    knobs = replace(SHARDED, sharding=sharding, dp_replicate_size=nodes if sharding == "hsdp" else None)
    for before in (SHARDED, replace(SHARDED, sharding="ddp")):
        work = shared_work(REHEARSED, known(before, nodes), knobs)
        assert sent(work) == expected
        (update,) = (each for each in work.work if each.phase is Phase.OPTIMIZER_STEP)
        assert update.fixed_bytes == 800 * before.shards // knobs.shards


def test_an_adapter_is_gathered_with_its_base_and_reduced_with_next_to_nothing() -> None:
    lora = {"use_peft": True, "dtype": "bfloat16"}
    before = known(replace(SHARDED, **lora))
    assert sent(shared_work(REHEARSED, before, replace(SHARDED, sharding="ddp", **lora))) == {}
    work = shared_work(REHEARSED, before, replace(SHARDED, **lora))
    assert sent(work) == {(Phase.FORWARD, WITHIN): 56, (Phase.BACKWARD, WITHIN): 56}
    assert {each.count for each in work.work if each.kind is WITHIN} == {2.0 * GATHERED_IN}


@pytest.mark.parametrize(("of_layers", "under_ddp"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_loss_in_float32_under_fsdp2_is_one_in_half_precision_under_ddps_autocast(
    of_layers: str, under_ddp: str
) -> None:
    layers = replace(UPDATE, phase=Phase.FORWARD, kind=Kind.MATMUL, dtype=of_layers, flops=900)
    loss = replace(layers, dtype="float32", flops=100, of_chunk=True)
    rehearsed = replace(REHEARSED, work=(*REHEARSED.work, layers, loss))
    work = shared_work(rehearsed, known(SHARDED), replace(SHARDED, sharding="ddp"))
    assert [each.dtype for each in work.work if each.kind is Kind.MATMUL] == [of_layers, under_ddp]
    still = shared_work(rehearsed, known(SHARDED), replace(SHARDED, sharding="fsdp2-no-reshard"))
    assert [each.dtype for each in still.work if each.kind is Kind.MATMUL] == [of_layers, "float32"]
