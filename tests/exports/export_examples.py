"""One plan as a search would make it, and its job: QLoRA of an 8B model on a card of 24 GB."""

from dataclasses import fields, replace
from typing import Any

from nouns import TRL_DEFAULTS

from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Estimate, Hardware, Job, Knobs, Plan, ReservedByMode, StepTime, Topology
from tests.report.report_examples import PLAN, reserved

CARD = Hardware(name="rtx4090", origin="named", total_bytes=24 * GIB, free_bytes=24 * GIB, non_torch_bytes=255 * MIB)
HOST = replace(CARD, name="cpu", origin="cpu")
QLORA = replace(
    TRL_DEFAULTS,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    max_length=2048,
    use_peft=True,
    dtype="bfloat16",
    load_in_4bit=True,
    use_bnb_nested_quant=True,
    expandable_segments=True,
)
FULL = replace(TRL_DEFAULTS, gradient_accumulation_steps=2)
FOUR = replace(CARD, topology=Topology(devices=4))
FSDP2 = replace(FULL, processes=4, sharding="fsdp2")
TWO_MACHINES = replace(CARD, topology=Topology(nodes=2, devices=4))
HSDP = replace(FULL, processes=8, sharding="hsdp", dp_replicate_size=2, fsdp_offload_params=True)
OF_METHOD: dict[str, dict[str, Any]] = {
    "grpo": {"max_length": None, "max_completion_length": 512, "num_generations": 8},
    "rloo": {"max_length": None, "max_completion_length": 512, "num_generations": 2},
    "ppo": {"max_length": None, "response_length": 53, "local_rollout_forward_batch_size": 4},
}
TARGETS = {"lora_target_modules": ["q_proj", "v_proj"], "output_dir": "run"}
RESERVED = reserved(18 * GIB, slack_bytes=GIB)
MEMORY = replace(
    PLAN.estimate.memory,
    peak_allocated_bytes=17 * GIB,
    owners_at_peak={},
    reserved=ReservedByMode(native=RESERVED, expandable_segments=RESERVED),
)


def job(method: str = "sft", **changes: Any) -> Job:
    """With LoRA's targets spelled out, as the command does it; ``arguments`` come beside them."""
    arguments = {**TARGETS, **changes.pop("arguments", {})}
    return replace(Job(method=method, model="Qwen/Qwen3-8B", dataset="org/data", arguments=arguments), **changes)


def plan(made_for: Job, knobs: Knobs = QLORA, card: Hardware = CARD) -> Plan:
    """Not found by a search: what it says is all there."""
    asked = {name: tuple(each) if isinstance(each, list) else each for name, each in made_for.arguments.items()}
    given = {each.name: asked[each.name] for each in fields(Knobs) if each.name in asked}
    rate = {"learning_rate": made_for.method_facts.defaults["learning_rate"]}
    own = replace(knobs, **{**rate, **OF_METHOD.get(made_for.method, {}), **given})
    estimate = Estimate(
        knobs=own, hardware=card, memory=MEMORY, budget_bytes=card.budget_bytes(), time=StepTime(tokens=0.0)
    )
    level = "LoRA on a 4-bit base" if own.use_peft else "lossless"
    return replace(PLAN, job=made_for, level=level, estimate=estimate, data=None, row_tokens=256)
