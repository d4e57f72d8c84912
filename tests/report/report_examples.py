"""Nouns that the report's tests render: one plan with every kind of lever, and what surrounds it."""

from dataclasses import replace
from typing import Any

from nouns import TRL_DEFAULTS, divided, reserved

from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataSummary, Harm, Job, Knobs, Lever, Owner, Phase, Plan, Proposal, StepTime, Trained
from autotrain_mem.types.estimate import Candidate, Estimate, MemoryEstimate, MixedLengths, ReservedByMode
from autotrain_mem.types.hardware import Hardware, Topology
from autotrain_mem.types.report import MemoryReading, Report
from autotrain_mem.types.vllm import VllmSleep

RTX3060 = Hardware(
    name="rtx3060",
    origin="named",
    total_bytes=11910 * MIB,
    free_bytes=11910 * MIB,
    non_torch_bytes=205 * MIB,
    compute_capability=(8, 6),
    bandwidth_bytes_per_second=360 * 10**9,
    bf16_flops_per_second=25_500 * 10**9,
)

IMAGINED = Hardware(name="300MiB", origin="imagined", total_bytes=300 * MIB, free_bytes=300 * MIB, non_torch_bytes=0)

SHARED = replace(
    RTX3060,
    name="NVIDIA GeForce RTX 3060",
    origin="detected",
    free_bytes=8000 * MIB,
    index=0,
    source="memory: NVML, without the driver's reserve; speed: catalog, rtx3060; outside torch: catalog, not measured: "
    "another process took or freed memory meanwhile",
)

HOST = Hardware(name="cpu", origin="cpu", total_bytes=16 * GIB, free_bytes=12 * GIB, non_torch_bytes=1 * GIB)

CHOSEN = divided(TRL_DEFAULTS, 4, 16, max_length=768, use_peft=True, dtype="bfloat16")

OWNERS = {
    Owner.WEIGHTS: 3_087_428_608,
    Owner.GRADIENTS: 36_929_536,
    Owner.OPTIMIZER_STATE: 73_860_096,
    Owner.ACTIVATIONS: 2_905_374_720,
    Owner.TEMPORARY: 1_866_465_792,
    Owner.OTHER: 139_776,
}

TRAINED = Trained(parameters=18_464_768, of_parameters=1_562_179_072, dtype="float32")
ALL_TRAINED = Trained(parameters=1_543_714_304, of_parameters=1_543_714_304, dtype="float32")


def memory(owners: dict[Owner, int] = OWNERS, *, scale: float = 1.0, **changes: object) -> MemoryEstimate:
    owners = {owner: int(size * scale) for owner, size in owners.items()}
    peak = sum(owners.values())
    estimated = MemoryEstimate(
        peak_allocated_bytes=peak,
        peak_phase=Phase.BACKWARD,
        phases={
            Phase.LOAD: owners[Owner.WEIGHTS],
            Phase.FORWARD: peak - owners[Owner.TEMPORARY] // 2,
            Phase.BACKWARD: peak,
            Phase.OPTIMIZER_STEP: owners[Owner.WEIGHTS] + 4 * owners[Owner.GRADIENTS],
        },
        owners_at_peak=owners,
        modules_at_peak=(
            ("base_model.model.lm_head", 2_489_319_424),
            ("base_model.model.model.layers.*.mlp.gate_proj.lora_A.default", 169_869_312),
            ("base_model.model.model.layers.*.self_attn", 84_934_656),
        ),
        reserved=ReservedByMode(
            native=reserved(peak + int(peak * 0.12), slack_bytes=peak // 8),
            expandable_segments=reserved(peak + peak // 100, slack_bytes=peak // 50),
        ),
        not_counted=("kernels' inner workspaces", "fragmentation of a run of many hours: the rehearsal has two steps"),
        rehearsal_seconds=5.312,
    )
    return replace(estimated, **changes)


TIME = StepTime(tokens=8_184.0, phases={Phase.FORWARD: 2.0, Phase.BACKWARD: 4.5, Phase.OPTIMIZER_STEP: 0.1})
ASSUMED_TIME = replace(TIME, assumed="a100-80gb")


def estimate(hardware: Hardware = RTX3060, *, scale: float = 1.0, knobs: Knobs = CHOSEN) -> Estimate:
    made = memory(scale=scale, trained=TRAINED if knobs.use_peft else ALL_TRAINED)
    if hardware.origin == "cpu":  # which has no caching allocator
        allocated = reserved(made.peak_allocated_bytes)
        made = replace(made, reserved=ReservedByMode(native=allocated, expandable_segments=allocated))
    time = ASSUMED_TIME if hardware.bf16_flops_per_second is None else TIME
    return Estimate(knobs=knobs, hardware=hardware, memory=made, budget_bytes=hardware.budget_bytes(), time=time)


def crowded(*, refused_bytes: int | None = 1_288_490_189, fits_expanded: bool = True) -> Estimate:
    """What is allocated would fit, and what fixed-size segments take for it does not."""
    tried = estimate(scale=1.3)
    peak, room = tried.memory.peak_allocated_bytes, tried.budget_bytes - tried.outside_bytes
    native = reserved(room + GIB, slack_bytes=room + GIB - peak, retries=7, refused_bytes=refused_bytes)
    expandable = reserved(peak + 40 * MIB, slack_bytes=40 * MIB)
    if not fits_expanded:
        expandable = reserved(room + GIB // 2, slack_bytes=room + GIB // 2 - peak, retries=2)
    both = ReservedByMode(native=native, expandable_segments=expandable)
    return replace(tried, memory=replace(tried.memory, reserved=both))


def attempt(knobs: Knobs, needed_gib: float, *, tokens_per_second: float | None = None, **more: Any) -> Candidate:
    return Candidate(
        knobs=knobs,
        required_bytes=int(needed_gib * GIB),
        budget_bytes=RTX3060.budget_bytes(),
        tokens_per_second=tokens_per_second,
        **more,
    )


def alternative(level: str, knobs: Knobs, needed_gib: float, **more: Any) -> Candidate:
    speed = more["ratio"] * TIME.tokens_per_second if "ratio" in more else None
    return attempt(knobs, needed_gib, tokens_per_second=speed, level=level, **more)


DATA = DataSummary(
    rows=7_473,
    tokens=1_263_411,
    longest=1_203,
    percentiles=(152, 377, 752, 1_033),
    padding_fraction=0.311,
    truncated_rows_fraction=0.0321,
    truncated_tokens_fraction=0.0112,
)
WHOLE = replace(DATA, truncated_rows_fraction=0.0, truncated_tokens_fraction=0.0)
PROMPTS = replace(WHOLE, rows=103_022, tokens=9_271_980, longest=311, percentiles=(88, 163, 214, 290))


def lever(name: str, before: object, after: object, harm: Harm, why: str) -> Lever:
    return Lever(name=name, before=before, after=after, harm=harm, why=why)


LESS_AT_ONCE = (
    "a micro-batch of 8 rows needs 14.9 GiB, the budget is 11.2 GiB: a smaller micro-batch with more gradient "
    "accumulation: the same optimizer steps in less memory"
)
ADAPTER = (
    "full fine-tuning needs at least 17.3 GiB, the budget is 11.2 GiB: a LoRA adapter is trained and the base model "
    "stays frozen"
)
LEVERS = (
    lever("micro_batch", "8 x 8", "4 x 16", Harm.TIME, LESS_AT_ONCE),
    lever("dtype", "float32", "bfloat16", Harm.ROUNDING, "the base model is frozen and loses no update to rounding"),
    lever("use_peft", False, True, Harm.WHAT_IS_TRAINED, ADAPTER),
    lever("max_length", 1024, 768, Harm.DATA, "rows are truncated to fewer tokens"),
)

SMALLEST = divided(CHOSEN, 1, 64)

FULL = replace(SMALLEST, use_peft=False, dtype="float32")
TWICE = divided(CHOSEN, 8, 8)

JOB = Job(
    method="sft",
    model="Qwen/Qwen2.5-1.5B",
    dataset="gsm8k.jsonl",
    arguments={"learning_rate": 1e-4, "lora_target_modules": ["q_proj", "v_proj"], "max_length": "auto"},
    environment={"TOKENIZERS_PARALLELISM": "false"},
    effective_batch_size=64,
    forbid=frozenset({"packing", "4bit_base"}),
)
VERSIONS = {"python": "3.11.7", "autotrain_mem": "5eab1d3", "torch": "2.13.0", "transformers": "5.23.0"} | {
    **{"trl": "1.12.0", "trl files": "c0ffee", "flash-attn": None}
}

REQUIRED_GIB = estimate().required_bytes / GIB
PLAN = Plan(
    job=JOB,
    level="shorter rows",
    estimate=estimate(),
    defaults=TRL_DEFAULTS,
    levers=LEVERS,
    attempts=(
        attempt(FULL, 31.2, tokens_per_second=402.0, rehearsed_layers=4),
        attempt(SMALLEST, 4.37, tokens_per_second=980.5, rehearsed_layers=4),
        attempt(TWICE, 14.7, tokens_per_second=1301.0, rehearsed_layers=4),
        attempt(CHOSEN, REQUIRED_GIB, tokens_per_second=1240.0, rehearsed_layers=4),
        attempt(CHOSEN, REQUIRED_GIB, tokens_per_second=1240.0),
        attempt(TWICE, 14.9, tokens_per_second=1302.0),
    ),
    alternatives=(
        alternative("lossless", FULL, 31.2, would_fit=("l40s (44.4 GiB)", "2 of these (--gpus 2), 9.8 GiB each")),
        alternative("rounding", replace(FULL, dtype="bfloat16"), 17.3, would_fit=("rtx4090 (23.5 GiB)",)),
    ),
    data=DATA,
    proposals=(
        Proposal(flags="--packing", why="31.1 % of what is computed is padding; packed, a step takes 0.69 of the time"),
    ),
    warnings=("The tokenizer has no padding token. Give --pad_token '<|endoftext|>'.",),
    optimizer_steps=935,
    seconds=41.27,
    row_tokens=768,
    versions=VERSIONS,
    model_digest="0f1e2d3c",
    allocator="max_split_size_mb:512",
)

UNCHANGED_PLAN = Plan(
    job=Job(method="sft", model="tiny", dataset=None),
    level="lossless",
    estimate=estimate(HOST, scale=0.1, knobs=TRL_DEFAULTS),
    defaults=TRL_DEFAULTS,
    levers=(),
    attempts=(attempt(TRL_DEFAULTS, 1.8),),
    data=WHOLE,
    optimizer_steps=935,
    seconds=6.0,
    row_tokens=1024,
    versions=VERSIONS,
    model_digest="",
    objects="",
)

OFFLOADED = replace(FULL, activation_offloading=True, optimizer_offload=True)
PASSED_OVER = replace(
    PLAN,
    level="LoRA",
    levers=LEVERS[:3],
    alternatives=(
        alternative("lossless", OFFLOADED, 10.9, ratio=0.19),
        alternative("rounding", replace(OFFLOADED, dtype="bfloat16"), 10.1, ratio=0.238),
        alternative("LoRA on an 8-bit base", replace(CHOSEN, load_in_8bit=True), 6.41, ratio=0.81),
    ),
    proposals=(),
    warnings=(),
)

EXPANDED = replace(CHOSEN, expandable_segments=True)

SAMPLING_OWNERS = {
    **dict.fromkeys(Owner, 0),
    Owner.WEIGHTS: 3_087_428_608,
    Owner.KV_CACHE: 1_812_332_544,
    Owner.TEMPORARY: 866_465_792,
    Owner.OTHER: 139_776,
}


def sampling(knobs: Knobs, *, vllm_share_bytes: int = 0) -> Estimate:
    """An estimate of a run that peaks while it generates."""
    load, peak = SAMPLING_OWNERS[Owner.WEIGHTS], sum(SAMPLING_OWNERS.values())
    phases = {Phase.LOAD: load, Phase.GENERATE: peak, Phase.SCORE: peak - GIB, Phase.BACKWARD: peak - GIB // 2}
    made = memory(SAMPLING_OWNERS, peak_phase=Phase.GENERATE, phases=phases, modules_at_peak=())
    return replace(estimate(knobs=knobs), memory=made, vllm_share_bytes=vllm_share_bytes)


GRPO_KNOBS = replace(CHOSEN, max_length=None, max_completion_length=512, num_generations=8)
SLEEPING = VllmSleep(
    awake_bytes=RTX3060.total_bytes * 3 // 10,
    asleep_bytes=3 * GIB,
    reserved_awake_bytes=6 * GIB,
    reserved_asleep_bytes=7 * GIB,
)
GRPO_PLAN = replace(
    PLAN,
    job=replace(JOB, method="grpo"),
    estimate=sampling(GRPO_KNOBS, vllm_share_bytes=RTX3060.total_bytes * 3 // 10),
    levers=LEVERS[:3],
    level="LoRA",
    attempts=(attempt(GRPO_KNOBS, 10.2),),
    alternatives=(),
    data=None,
    proposals=(),
    warnings=(),
    optimizer_steps=None,
    row_tokens=512,
)

PPO_KNOBS = replace(CHOSEN, max_length=None, response_length=53, local_rollout_forward_batch_size=16)
PPO_PLAN = replace(
    GRPO_PLAN,
    job=replace(JOB, method="ppo", prompt_length=311),
    estimate=sampling(PPO_KNOBS),
    attempts=(
        attempt(replace(PPO_KNOBS, local_rollout_forward_batch_size=4, use_peft=False, dtype="float32"), 55.0),
        attempt(replace(PPO_KNOBS, local_rollout_forward_batch_size=4), 6.0),
        attempt(replace(PPO_KNOBS, local_rollout_forward_batch_size=64), 12.0),
        attempt(PPO_KNOBS, 7.0),
    ),
    data=PROMPTS,
    row_tokens=311,
)

MIXED = MixedLengths(native=(int(8.4 * GIB), int(8.5 * GIB), int(8.6 * GIB)), expandable_segments=(int(7.7 * GIB),) * 3)

AS_GIVEN = replace(
    UNCHANGED_PLAN, level="as given", estimate=estimate(scale=1.5), attempts=(), data=None, optimizer_steps=None
)

DPO_PLAN = replace(
    PLAN, job=replace(JOB, method="dpo"), estimate=estimate(knobs=replace(CHOSEN, optimizer_offload=True))
)
PLANS = (PLAN, UNCHANGED_PLAN, GRPO_PLAN, PPO_PLAN, PASSED_OVER, AS_GIVEN)

MEASURED = MemoryReading(
    allocated_bytes=3_123_000_000,
    peak_allocated_bytes=7_951_000_000,
    reserved_bytes=8_402_000_000,
    peak_reserved_bytes=8_804_892_672,
    num_alloc_retries=0,
)

REPORT = Report(
    output_dir="runs/[first] try",
    steps=120,
    knobs=CHOSEN,
    trained=TRAINED,
    schedule="linear",
    step_tokens=TIME.tokens,
    first_loss=2.3142,
    last_loss=1.8701,
    predicted_peak_bytes=7_970_198_528,
    predicted_peak_reserved_bytes=8_767_218_380,
    measured=MEASURED,
    seconds=200.4,
)

FOUR = replace(RTX3060, topology=Topology(devices=4, link="pcie4", link_bytes_per_second=20 * 10**9))
IN_SHARDS = divided(TRL_DEFAULTS, 2, 4, processes=4, sharding="fsdp2", gradient_checkpointing=False)
SHARED_PLAN = replace(
    PLAN,
    level="lossless",
    estimate=replace(estimate(FOUR, knobs=IN_SHARDS), memory=memory({Owner.GATHERED_WEIGHTS: 1 * GIB, **OWNERS})),
    defaults=replace(TRL_DEFAULTS, processes=4, sharding="ddp"),
    levers=(),
    attempts=(
        attempt(divided(IN_SHARDS, 8, 1), 14.2),
        attempt(IN_SHARDS, 9.6, tokens_per_second=1_240.0),
        attempt(replace(IN_SHARDS, sharding="ddp", gradient_checkpointing=True), 13.1),
    ),
    alternatives=(),
)
