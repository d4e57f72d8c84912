"""Knobs are the settings that a plan decides, under TRL's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

from autotrain_mem.settings.adapter_config import LORA, PEFT_CONFIG, kind_of
from autotrain_mem.settings.declaration import Harm, TakenBy, setting, settings_of
from autotrain_mem.settings.optimizer_verdicts import KEEPS_UPDATES, OPTIMIZERS_OF_BITSANDBYTES
from autotrain_mem.settings.own import OWN, OwnSettings, Sharding
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.codec import Form

ZEROS: tuple[Sharding, ...] = ("zero1", "zero2", "zero3")
"""DeepSpeed's, by stage. They have something to offer to a process that is alone, too: what they offload."""


@dataclass(frozen=True, kw_only=True)
class TrainerKnobs:
    """Holds what a plan decides under TRL's names, and the processes that it is trained by.

    Fields without a default exist in every method. The others are left alone by methods whose TRL config lacks them.
    """

    per_device_train_batch_size: int
    """Rows of one micro-batch on one device: sequences (SFT, GKD), pairs (Reward, DPO, ORPO, CPO), completions (GRPO,
    RLOO, distillation, PPO) or prompts with two each (online DPO)."""
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    use_peft: bool
    """LoRA on the frozen base model."""
    dtype: str
    """The dtype that the weights are loaded in: ``float32`` (TRL's default), ``bfloat16``, ``float16`` or ``auto``."""
    optim: str
    """An optimizer name of transformers, such as ``adamw_torch_fused``."""
    max_length: int | None = None
    """Tokens that a row is truncated to (Reward: beyond which a pair is dropped); None: no limit."""
    packing: bool = False
    fp16: bool = False
    """Mixed precision in float16 with a scaler of the loss, for cards without bfloat16, in place of TRL's bfloat16."""
    load_in_4bit: bool = False
    """The frozen base model's linear weights in 4 bits (bitsandbytes); trains with LoRA only."""
    load_in_8bit: bool = False
    use_bnb_nested_quant: bool = False
    """Double quantization: the scales of 4-bit blocks are themselves held in 8 bits."""
    activation_offloading: bool = False
    """What the backward pass needs waits in host memory."""
    lora_r: int = 16
    """The rank of the adapter's matrices; without ``use_peft`` it has no effect, as the next two have none."""
    lora_alpha: int = 32
    """The adapter's output is multiplied by ``lora_alpha / lora_r``."""
    lora_target_modules: tuple[str, ...] | None = None
    """Layers that are adapted, by the ends of their names; None for those that PEFT names for the architecture."""
    learning_rate: float | None = None
    """The schedule's peak; None where TRL's parser has not been asked."""
    max_completion_length: int | None = None
    """Tokens of a sampled completion (GRPO, RLOO, distillation)."""
    response_length: int | None = None
    """Tokens of a sampled completion (PPO)."""
    max_new_tokens: int | None = None
    """Tokens of a sampled completion (online DPO), or of an answer that is sampled behind the prompt of a row (GKD)."""
    lmbda: float | None = None
    """The chance that a micro-batch trains on the student's answers in the place of its rows (GKD)."""
    num_generations: int | None = None
    """Completions of one prompt, which form a group (GRPO, RLOO): the effective batch holds whole groups."""
    local_rollout_forward_batch_size: int | None = None
    """Rows that PPO generates and scores at once."""
    per_device_eval_batch_size: int | None = None
    """Rows of a micro-batch of evaluation; None where nothing is evaluated and the user gave none."""
    processes: int = setting(1, where=TakenBy.LAUNCH)
    """How many train together, each on a GPU of its own (``accelerate launch --num_processes``)."""
    dp_replicate_size: int | None = setting(None, where=TakenBy.LAUNCH)
    """Groups of processes that hold a whole set of shards each (HSDP); None where there is one group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knobs(OwnSettings, TrainerKnobs):
    """Holds one point of the search. Everything not named here stays as the user or TRL set it.

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
            if each.default is None and each.name != MAX_LENGTH
        ]
    )
    """The JSON is also laid over TRL's arguments: what does not apply is left out, and so stays TRL's."""

    cp_size: int = 1
    """Processes that hold a share of each row's tokens each, and send keys and values around (context parallelism, with
    FSDP2); they train on the same rows."""
    sp_size: int = 1
    """The same in DeepSpeed's way (sequence parallelism, with ZeRO): for attention they exchange tokens for heads."""
    peft_config: str | None = None
    """A config of PEFT's own that says what the adapter is, as JSON; None where TRL's flags do."""

    @property
    def effective_batch_size(self) -> int:
        """Counts the rows per optimizer step, of all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    def alone(self) -> Knobs:
        """Returns the same point for one process, which shares nothing."""
        return replace(self, processes=1, sharding=None, dp_replicate_size=None, cp_size=1, sp_size=1)

    def growing(self, grows: bool = True) -> Knobs:
        """Returns the same point with segments of the allocator that grow, or with those of its default."""
        return self if self.expandable_segments is grows else replace(self, expandable_segments=grows)

    def as_rehearsed(self) -> Knobs:
        """Returns the same point without what no rehearsal depends on."""
        return replace(self, learning_rate=None)

    @property
    def data_parallel_size(self) -> int:
        """Counts the processes, or the groups that share rows, which train on rows of their own
        (``transformers/trainer.py: get_total_train_batch_size``)."""
        return self.processes // self.token_shards

    @property
    def is_adam(self) -> bool:
        """Returns whether the optimizer's steps are Adam's."""
        return "adam" in self.optim

    @property
    def sums_up_rounding(self) -> bool:
        """Returns whether the optimizer keeps what rounding takes of its updates."""
        return self.optim == KEEPS_UPDATES

    @property
    def steps_in_bitsandbytes(self) -> bool:
        """Returns whether the optimizer is one of bitsandbytes', which takes whole parameters."""
        return OPTIMIZERS_OF_BITSANDBYTES.search(self.optim) is not None

    @property
    def training(self) -> tuple[bool, int | None, str, str]:
        """Returns what tells points apart that train something else, in another precision or with another optimizer."""
        return self.use_peft, self.base_bits, self.dtype, self.optim

    @property
    def recomputes(self) -> bool:
        """Returns whether the layers' activations are computed again in the backward pass."""
        return self.gradient_checkpointing

    @property
    def pads_rows(self) -> bool:
        """Returns whether the rows of a batch are padded to the longest of them; packed blocks are always full."""
        return not self.packing

    @property
    def is_sharded(self) -> bool:
        """Returns whether a process holds a part of the model only."""
        return self.sharding is not None and self.sharding != "ddp"

    @property
    def zero_stage(self) -> int:
        """Returns the stage of DeepSpeed's ZeRO; 0 where the model is shared in another way."""
        return ZEROS.index(self.sharding) + 1 if self.sharding in ZEROS else 0

    @property
    def has_group(self) -> bool:
        """Returns whether a process is launched as one of a group: of several, and by DeepSpeed also where it is alone
        (``deepspeed/__init__.py: initialize`` makes a group of what there is)."""
        return self.processes > 1 or self.zero_stage > 0

    @property
    def shards(self) -> int:
        """Counts the processes that hold one model together."""
        return self.processes // (self.dp_replicate_size or 1) if self.is_sharded else 1

    @property
    def communicators(self) -> int:
        """Counts the groups that a process talks in through a communicator of NCCL's.

        DDP and FSDP on a mesh of one dimension take the default group (``torch/distributed/device_mesh.py:
        _init_one_process_group``). HSDP's mesh has one for the shards and one for their copies, and accelerate gathers
        metrics in the default group. Context parallelism has one for the shards and one for the tokens beside it
        (``accelerate/parallelism_config.py: build_device_mesh``); so has sequence parallelism
        (``deepspeed/runtime/sequence_parallel/parallel_state_sp.py: initialize_sequence_parallel``).
        """
        return 0 if not self.has_group else 3 if self.sharding == "hsdp" or self.token_shards > 1 else 1

    @property
    def base_bits(self) -> int | None:
        """Counts the bits of a weight of the quantized base model; None where it is not quantized."""
        return next((bits for name, bits in BASE_BITS.items() if getattr(self, name)), None)

    @property
    def completion_length(self) -> int:
        """Returns the tokens of a sampled completion; 0 where none is sampled, and where the data have rows without."""
        return self.sampled_tokens if self.lmbda is None else 0

    @property
    def completion_knob(self) -> str:
        """Names the knob that limits a completion; the first of them where none is sampled."""
        return next((name for name in COMPLETION_KNOBS if getattr(self, name)), COMPLETION_KNOBS[0])

    @property
    def sampled_tokens(self) -> int:
        """Returns the tokens that are sampled at once for a row: a completion, or an answer behind a row's prompt."""
        return getattr(self, self.completion_knob) or 0


NOT_REHEARSED = "learning_rate"
"""A knob that no rehearsal depends on."""
ROWS = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
EVALUATED_ROWS = "per_device_eval_batch_size"

_EVERY = tuple(each.name for each in fields(TrainerKnobs) if each.default is MISSING)
BASE_BITS = {"load_in_4bit": 4, "load_in_8bit": 8}
"""Knobs that quantize the frozen base model, and to how many bits."""
COMPLETION_KNOBS = ("max_completion_length", "response_length", "max_new_tokens")
"""Knobs that limit a sampled completion: TRL's configs call it differently."""
KNOBS = settings_of(Knobs) | OWN
"""Every setting that a plan decides, by name."""
APPLIED = tuple(name for name, each in KNOBS.items() if each.where is TakenBy.OWN)
"""Knobs that TRL does not have; autofit applies them itself."""
LAUNCHED = tuple(name for name, each in KNOBS.items() if each.where is TakenBy.LAUNCH)
"""Knobs that are no arguments of TRL's: how processes are launched says them (``parallel``)."""
NOT_TRLS = frozenset({*APPLIED, *LAUNCHED})


def alone_too(sharding: Sharding | None, processes: int) -> Sharding | None:
    """Returns how so many processes share a model that was shared in this way; None for one, unless by DeepSpeed."""
    return sharding if processes > 1 or sharding in ZEROS else None


def knob_names(of_method: Sequence[str], knobs: Knobs) -> tuple[str, ...]:
    """Names the knobs worth showing: those that every method has, the method's own, and whatever else is in use."""
    evaluated = () if knobs.per_device_eval_batch_size is None else ("per_device_eval_batch_size",)
    is_lora = knobs.use_peft and kind_of(knobs.peft_config) in ("", LORA)
    adapter = ("lora_r", "lora_alpha", "lora_target_modules") if is_lora else ()
    adapter = (*adapter, PEFT_CONFIG) if knobs.peft_config else adapter
    rate = () if knobs.learning_rate is None else (NOT_REHEARSED,)
    told = (*_EVERY, *adapter, *rate, *of_method, *evaluated)
    on = [field.name for field in fields(Knobs) if getattr(knobs, field.name) is True and field.name not in told]
    images = () if knobs.max_pixels is None else ("max_pixels",)
    return (*told, *on, *images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lever:
    """Describes one change of a plan against TRL's defaults."""

    name: str
    """The knob that was changed, or the lever's own name where it moves several (``micro_batch``)."""
    before: Any
    after: Any
    harm: Harm
    why: str
