"""Defines the knobs: the settings that a plan decides, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

from autotrain_mem.settings.adapter_config import LORA, PEFT_CONFIG, kind_of
from autotrain_mem.settings.declaration import Harm, TakenBy, setting, settings_of
from autotrain_mem.settings.optimizer_verdicts import KEEPS_UPDATES
from autotrain_mem.settings.own import OWN, OwnSettings, Sharding
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.codec import Form

ZEROS: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")
"""DeepSpeed's shardings, by ZeRO stage. A single process can use them too, to offload."""


DROPOUT = 0.05
"""TRL's dropout before an adapter (``trl/trainer/model_config.py: lora_dropout``)."""
EXPERTS = ("lora_target_parameters", "lora_dropout")
"""Knobs that adapt fused experts."""


@dataclass(frozen=True, kw_only=True)
class TrainerKnobs:
    """Holds the settings that a plan decides, under TRL's names, and the number of processes.

    Fields without a default exist in every method. A method ignores any other field that its TRL config lacks.
    """

    per_device_train_batch_size: int
    """Rows of one micro-batch on one device: sequences (SFT, GKD), pairs (Reward, DPO, ORPO, CPO), completions (GRPO,
    RLOO, distillation, PPO) or prompts with two completions each (online DPO)."""
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    use_peft: bool
    """Whether LoRA is trained on the frozen base model."""
    dtype: str
    """The dtype of the loaded weights: ``float32`` (TRL's default), ``bfloat16``, ``float16`` or ``auto``."""
    optim: str
    """An optimizer name of transformers, such as ``adamw_torch_fused``."""
    max_length: int | None = None
    """The most tokens of a row. Longer rows are truncated, longer pairs (Reward) dropped; None for no limit."""
    packing: bool = False
    fp16: bool = False
    """Whether mixed precision uses float16 and a loss scaler, for cards without bfloat16."""
    load_in_4bit: bool = False
    """Whether the frozen base model's linear weights have 4 bits (bitsandbytes); this requires an adapter."""
    load_in_8bit: bool = False
    use_bnb_nested_quant: bool = False
    """Double quantization: whether the scales of 4-bit blocks are themselves held in 8 bits."""
    precompute_ref_log_probs: bool | None = None
    """Whether the reference scores all rows before training, and is not loaded for it; None where it cannot."""
    use_liger_kernel: bool | None = None
    """Whether Liger's fused layers and loss replace the model's own; None where no plan may choose them."""
    activation_offloading: bool = False
    """Whether activations for the backward pass are offloaded to the host."""
    lora_r: int = 16
    """The rank of the adapter's matrices. The ``lora_`` knobs have no effect without ``use_peft``."""
    lora_alpha: int = 32
    """The adapter's output is multiplied by ``lora_alpha / lora_r``."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers to adapt, by the ends of their names; None for PEFT's default for the architecture."""
    lora_target_parameters: tuple[str, ...] | None = None
    """Parameters to adapt beside layers, by the ends of their names, such as fused experts."""
    lora_dropout: float = DROPOUT
    """The dropout before the adapter. Adapted parameters cannot have one."""
    learning_rate: float | None = None
    """The schedule's peak; None before TRL's parser has set it."""
    max_completion_length: int | None = None
    """Tokens of a sampled completion (GRPO, RLOO, distillation)."""
    response_length: int | None = None
    """Tokens of a sampled completion (PPO)."""
    max_new_tokens: int | None = None
    """Tokens of a sampled completion (online DPO), or of a sampled answer to a row's prompt (GKD)."""
    lmbda: float | None = None
    """The probability that a micro-batch trains on the student's answers instead of its rows (GKD)."""
    num_generations: int | None = None
    """Completions of one prompt, which form a group (GRPO, RLOO); the effective batch holds whole groups."""
    local_rollout_forward_batch_size: int | None = None
    """Rows that PPO generates and scores at once."""
    per_device_eval_batch_size: int | None = None
    """Rows of an evaluation micro-batch; None if nothing is evaluated and the user set none."""
    processes: int = setting(1, where=TakenBy.LAUNCH)
    """Number of processes, each on its own GPU (``accelerate launch --num_processes``)."""
    dp_replicate_size: int | None = setting(where=TakenBy.LAUNCH)
    """Groups of processes that each hold a whole set of shards (HSDP); None for a single group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs(OwnSettings, TrainerKnobs):
    """Holds one point of the search. All else stays as the user or TRL set it.

    Batch sizes count rows, lengths tokens.

    >>> from autotrain_mem import Knobs
    >>> knobs = Knobs(
    ...     per_device_train_batch_size=4,
    ...     gradient_accumulation_steps=16,
    ...     gradient_checkpointing=True,
    ...     use_peft=False,
    ...     dtype="bfloat16",
    ...     optim="adamw_torch_fused",
    ... )
    >>> knobs.effective_batch_size
    64
    """

    json_form: ClassVar = Form(
        optional=[
            each.name
            for each in (*fields(TrainerKnobs), *fields(OwnSettings))
            if each.default in (None, DROPOUT) and each.name != MAX_LENGTH
        ]
    )
    """The JSON also overrides TRL's arguments, so it leaves out knobs that do not apply; TRL's values then stay."""

    cp_size: int = 1
    """Processes among which each row's tokens are divided, with ring attention (context parallelism, FSDP2)."""
    sp_size: int = 1
    """Like ``cp_size``, in DeepSpeed (sequence parallelism, ZeRO): attention divides heads, not tokens."""
    peft_config: str | None = None
    """A PEFT config of the adapter, as JSON; None if TRL's flags describe it."""

    @property
    def effective_batch_size(self) -> int:
        """Counts the rows per optimizer step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    def alone(self) -> Knobs:
        """Returns the same point for a single process."""
        return replace(self, processes=1, sharding=None, dp_replicate_size=None, cp_size=1, sp_size=1)

    def growing(self, grows: bool = True) -> Knobs:
        """Returns the same point with expandable allocator segments, or with fixed-size segments."""
        return self if self.expandable_segments is grows else replace(self, expandable_segments=grows)

    @property
    def segments(self) -> str:
        """Names the kind of segments of torch's caching allocator."""
        return "expandable segments" if self.expandable_segments else "fixed-size segments"

    def as_rehearsed(self) -> Knobs:
        """Returns the same point without the knobs that no rehearsal depends on."""
        return replace(self, learning_rate=None)

    @property
    def data_parallel_size(self) -> int:
        """Counts the processes with rows of their own (``transformers/trainer.py: get_total_train_batch_size``)."""
        return self.processes // self.token_shards

    @property
    def is_adam(self) -> bool:
        """Returns whether the optimizer is a variant of Adam."""
        return "adam" in self.optim

    @property
    def sums_up_rounding(self) -> bool:
        """Returns whether the optimizer keeps the part of its updates that rounding loses."""
        return self.optim == KEEPS_UPDATES

    @property
    def training(self) -> tuple[bool, int | None, str, str]:
        """Returns what is trained, in which precision, and with which optimizer, to tell points apart."""
        return self.use_peft, self.base_bits, self.dtype, self.optim

    @property
    def recomputes(self) -> bool:
        """Returns whether the backward pass recomputes the layers' activations."""
        return self.gradient_checkpointing

    @property
    def pads_rows(self) -> bool:
        """Returns whether rows are padded to the longest of their batch; packed blocks are always full."""
        return not self.packing

    @property
    def is_sharded(self) -> bool:
        """Returns whether each process holds only a part of the model."""
        return self.sharding is not None and self.sharding != "ddp"

    @property
    def zero_stage(self) -> int:
        """Returns the stage of DeepSpeed's ZeRO; 0 without ZeRO."""
        return ZEROS.index(self.sharding) + 1 if self.sharding in ZEROS else 0

    @property
    def has_group(self) -> bool:
        """Returns whether processes are launched as a group: several, or with DeepSpeed also a single one
        (``deepspeed/__init__.py: initialize`` always makes a group)."""
        return self.processes > 1 or self.zero_stage > 0

    @property
    def shards(self) -> int:
        """Counts the processes that hold one model together."""
        return self.processes // (self.dp_replicate_size or 1) if self.is_sharded else 1

    @property
    def communicators(self) -> int:
        """Counts the groups in which a process has an NCCL communicator.

        DDP and FSDP on a one-dimensional mesh use the default group (``torch/distributed/device_mesh.py:
        _init_one_process_group``). HSDP's mesh has one group for the shards and one for their copies, and accelerate
        gathers metrics in the default group. Context parallelism has one for the shards and one for the tokens, besides
        the default (``accelerate/parallelism_config.py: build_device_mesh``); so does sequence parallelism
        (``deepspeed/runtime/sequence_parallel/parallel_state_sp.py: initialize_sequence_parallel``).
        """
        return 0 if not self.has_group else 3 if self.sharding == "hsdp" or self.token_shards > 1 else 1

    @property
    def base_bits(self) -> int | None:
        """Returns the bits per weight of the quantized base model; None if it is not quantized."""
        return next((bits for name, bits in BASE_BITS.items() if getattr(self, name)), None)

    @property
    def completion_length(self) -> int:
        """Returns the tokens of a sampled completion; 0 if none is sampled, or if rows have answers too (GKD)."""
        return self.sampled_tokens if self.lmbda is None else 0

    @property
    def completion_knob(self) -> str:
        """Returns the knob that limits a completion; the first such knob if none is sampled."""
        return next((name for name in COMPLETION_KNOBS if getattr(self, name)), COMPLETION_KNOBS[0])

    @property
    def sampled_tokens(self) -> int:
        """Returns the tokens sampled for a row: those of a completion, or of an answer to the row's prompt."""
        return getattr(self, self.completion_knob) or 0


NOT_REHEARSED = "learning_rate"
"""The knob that no rehearsal depends on."""
ROWS = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
EVALUATED_ROWS = "per_device_eval_batch_size"

_EVERY = tuple(each.name for each in fields(TrainerKnobs) if each.default is MISSING)
BASE_BITS = {"load_in_4bit": 4, "load_in_8bit": 8}
"""Knob that quantizes the frozen base model -> its bits."""
COMPLETION_KNOBS = ("max_completion_length", "response_length", "max_new_tokens")
"""Knobs that limit a sampled completion, which TRL's configs name differently."""
KNOBS = settings_of(Knobs) | OWN
"""Every setting that a plan decides, by name."""
APPLIED = tuple(name for name, each in KNOBS.items() if each.where is TakenBy.OWN)
"""Knobs that TRL does not have; autofit applies them itself."""
LAUNCHED = tuple(name for name, each in KNOBS.items() if each.where is TakenBy.LAUNCH)
"""Knobs that are not arguments of TRL: they determine how processes are launched (``parallel``)."""
NOT_TRLS = frozenset({*APPLIED, *LAUNCHED})


def alone_too(sharding: Sharding | None, processes: int) -> Sharding | None:
    """Returns the sharding for this number of processes; None for a single one, except with DeepSpeed."""
    return sharding if processes > 1 or sharding in ZEROS else None


def knob_names(of_method: Sequence[str], knobs: Knobs) -> tuple[str, ...]:
    """Lists the knobs to show: those of every method, the method's own, and any other that is in use."""
    evaluated = () if knobs.per_device_eval_batch_size is None else ("per_device_eval_batch_size",)
    is_lora = knobs.use_peft and kind_of(knobs.peft_config) in ("", LORA)
    adapter = ("lora_r", "lora_alpha", "lora_target_modules") if is_lora else ()
    adapter = (*adapter, *EXPERTS) if knobs.lora_target_parameters else adapter
    adapter = (*adapter, PEFT_CONFIG) if knobs.peft_config else adapter
    rate = () if knobs.learning_rate is None else (NOT_REHEARSED,)
    told = (*_EVERY, *adapter, *rate, *of_method, *evaluated)
    on = [field.name for field in fields(Knobs) if getattr(knobs, field.name) is True and field.name not in told]
    images = () if knobs.max_pixels is None else ("max_pixels",)
    return (*told, *on, *images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """Describes one change that a plan makes to TRL's defaults."""

    name: str
    """The changed knob, or the lever's own name if it moves several (``micro_batch``)."""
    before: Any
    after: Any
    harm: Harm
    why: str
