"""The trainings that are recorded: a fixed set, the most useful ones first."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from autotrain_mem.support.codec import Form
from autotrain_mem.types import METHODS, Job, Knobs

SEED = 0
COMPLETION = 64
"""Tokens of a sampled completion. Few suffice: each costs a forward pass and shows nothing new about memory."""
LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["all-linear"]}
WEIGHTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True},
    "4bit": {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True},
}
OF_METHOD: dict[str, dict[str, Any]] = {
    "grpo": {"max_completion_length": COMPLETION, "num_generations": 4},
    "rloo": {"max_completion_length": COMPLETION, "num_generations": 4},
    "ppo": {"response_length": COMPLETION, "local_rollout_forward_batch_size": 8},
}
BASE = Knobs(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
    use_peft=False,
    dtype="bfloat16",
    optim="adamw_torch_fused",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuCase:
    """One training of two optimizer steps on its worst batch. A knob that an old record lacks has its default."""

    json_form: ClassVar = Form(optional=("images",))

    name: str
    """The case's name, and the stem of its record's file name."""
    method: str
    model: str
    """A key of ``models.MODELS``."""
    length: int
    """Tokens of every row, or of the prompt alone in online methods."""
    knobs: Knobs
    arguments: Mapping[str, Any]
    core: bool
    """Whether it is recorded without ``--all``."""
    images: tuple[str, ...] = ()
    """Sizes of the images in every row, such as ``"1024x768"``."""

    @property
    def allocator(self) -> str:
        """The value of PYTORCH_ALLOC_CONF."""
        return "expandable_segments:True" if self.knobs.expandable_segments else ""

    def job(self, folder: Path) -> Job:
        """Returns the job that trains the model in this folder."""
        models = {"reward_model_path": str(folder)} if self.method == "ppo" else {}
        arguments = {**self.arguments, **models}
        return Job(method=self.method, model=str(folder), dataset=None, arguments=arguments, images=self.images)


def make(
    method: str,
    weights: str,
    length: int,
    checkpointing: bool,
    *,
    model: str = "qwen2-0.5b",
    core: bool = False,
    also: str = "",
    arguments: Mapping[str, Any] | None = None,
    **knobs: Any,
) -> GpuCase:
    lora = LORA if weights != "full" else {}
    # Completions have their full length, as in a rehearsal.
    full_length = {"generation_kwargs": {"min_new_tokens": COMPLETION}} if method in ("grpo", "rloo") else {}
    limits = OF_METHOD.get(method) or {"max_length": length}
    chosen = replace(BASE, gradient_checkpointing=checkpointing, **{**limits, **WEIGHTS[weights], **knobs})
    parts = (method, weights, also, str(length), "checkpointing" if checkpointing else "")
    mode = "expandable" if chosen.expandable_segments else ""
    return GpuCase(
        name="-".join(filter(None, (*parts, mode))),
        method=method,
        model=model,
        length=length,
        knobs=chosen,
        arguments={"bf16": True, "seed": SEED, **lora, **full_length, **(arguments or {})},
        core=core,
    )


def core_cases() -> Iterator[GpuCase]:
    """Yields about 20 cases of 10 to 15 seconds each: many trainers, all kinds of weights, both allocator modes."""
    lengths = itertools.product((False, True), (512, 2048))
    for (checkpointing, length), weights in itertools.product(lengths, WEIGHTS):
        # Each kind of weights, each length, and checkpointing on and off occur in both allocator modes.
        expandable = (weights, length, checkpointing) in _EXPANDABLE
        yield make("sft", weights, length, checkpointing, core=True, expandable_segments=expandable)
    yield make("grpo", "lora", 256, True, core=True, per_device_train_batch_size=8)
    yield make("dpo", "lora", 512, True, core=True, expandable_segments=True)
    yield make("reward", "lora", 512, False, core=True)
    yield make("kto", "lora", 512, True, core=True)
    yield make("ppo", "full", 256, False, core=True)
    yield make("rloo", "lora", 256, True, core=True, per_device_train_batch_size=8, expandable_segments=True)
    yield make("grpo", "4bit", 256, True, core=True, per_device_train_batch_size=8)
    # TRL's default: float32 weights under bfloat16 autocast.
    yield make("sft", "full", 512, True, core=True, also="float32", dtype="float32")
    yield make("sft", "lora", 2048, True, core=True, also="llama", model="llama-1b", expandable_segments=True)


_EXPANDABLE = {("full", 512, True), ("full", 2048, False), ("lora", 2048, False), ("4bit", 512, False)}


def more_cases() -> Iterator[GpuCase]:
    """Yields every trainer with all kinds of weights, both allocator modes, and with or without checkpointing; then
    single levers with SFT and GRPO."""
    for method, weights, checkpointing, expandable in itertools.product(METHODS, WEIGHTS, (True, False), (False, True)):
        length = 256 if method in OF_METHOD else 1024
        yield make(method, weights, length, checkpointing, expandable_segments=expandable)
    for optimizer in ("adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor"):
        yield make("sft", "full", 1024, True, also=optimizer, optim=optimizer)
    yield make("sft", "full", 1024, False, also="foreach-float32", optim="adamw_torch", dtype="float32")
    yield make("sft", "lora", 1024, False, also="offloading", activation_offloading=True)
    yield make("sft", "lora", 1024, False, also="packing", packing=True)
    yield make("sft", "full", 1024, True, also="nll", arguments={"loss_type": "nll"})
    yield make("sft", "full", 1024, True, also="evaluated", arguments={"eval_strategy": "steps"})
    yield make("grpo", "full", 256, True, also="reference", arguments={"beta": 0.04})


def cases() -> tuple[GpuCase, ...]:
    """Returns all cases, the core set first. If both sets have a case of the same name, the core set's is used."""
    chosen: dict[str, GpuCase] = {}
    for case in (*core_cases(), *more_cases()):
        chosen.setdefault(case.name, case)
    return tuple(chosen.values())


SMALL_LENGTH = 40


def small(case: GpuCase) -> GpuCase:
    """Returns the same case with a tiny model and short rows, for a CPU."""
    limits: dict[str, Any] = {
        name: value for name, value in _SMALL_LIMITS.items() if getattr(case.knobs, name) is not None
    }
    kwargs = {"generation_kwargs": {"min_new_tokens": 8}} if "generation_kwargs" in case.arguments else {}
    return replace(
        case,
        model="tiny",
        length=SMALL_LENGTH,
        knobs=replace(case.knobs, **limits),
        arguments={**case.arguments, **kwargs},
    )


_SMALL_LIMITS = {"max_length": SMALL_LENGTH, "max_completion_length": 8, "response_length": 8}
