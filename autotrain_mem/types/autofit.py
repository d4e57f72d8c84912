"""AutoFit holds what our own flags say: the command, the drop-in trainers and the verbs of Python take it alike.

Errors tell a reader who writes Python what their cures' flags are called there.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from autotrain_mem import types as nouns
from autotrain_mem.settings.adapter_config import PEFT_CONFIG, arguments_of
from autotrain_mem.settings.knobs import (
    BASE_BITS,
    OWN_SWITCHES,
    SHARDINGS,
    TOKEN_KNOBS,
    ZERO_KNOBS,
    OffloadDevice,
    Sharding,
)
from autotrain_mem.settings.words import FITS, MAX_SLOWDOWN, Fit, is_image_size
from autotrain_mem.support.errors import AutofitError, RehearsalError, TrainingError, UsageError
from autotrain_mem.support.units import format_bytes, parse_bytes

_PLAN = "a Plan or the path of its file"
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "gpu": ((str,), "a text such as 'rtx4090'"),
    "gpus": ((int, tuple, list), "a whole number, or several to compare"),
    "nodes": ((int,), "a whole number"),
    "link": ((str,), "a text such as 'nvlink4'"),
    "headroom": ((str,), "a text such as '500MiB' or '8%'"),
    "effective_batch_size": ((int,), "a whole number"),
    "prompt_length": ((int,), "a whole number"),
    "image_sizes": ((str,), "a text such as '1024x768,640x480'"),
    "max_slowdown": ((int, float), "a number"),
    "within": ((str,), "a text such as '8h' or '90min'"),
    "budget": ((int, float), "a number"),
    "prices": ((str, Path), "the path of a file"),
    "optimizer_offload": ((bool,), "True or False"),
    "expandable_segments": ((bool,), "True or False"),
    "cp_size": ((int,), "a whole number"),
    "sp_size": ((int,), "a whole number"),
    "max_pixels": ((int,), "a whole number"),
    "fsdp_offload_params": ((bool,), "True or False"),
    "offload_optimizer_device": ((str,), "'cpu'"),
    "offload_param_device": ((str,), "'cpu'"),
    "accelerate_config": ((str, Path, Mapping), "the path of a file, or its keys"),
    "peft_config": ((str, Path, Mapping), "the path of a file, or its keys"),
    "plan": ((str, Path), _PLAN),
    "guard": ((bool,), "True or False"),
    "show": ((bool,), "True or False"),
}
"""Field -> what its value may be beside the default, and how that is told."""

_COUNTED = {"gpus": "GPUs", "nodes": "machines"}
_HEADROOM = "--headroom takes a size such as 500MiB or a share such as 8%, less than the device has."
_WITHIN = "--within takes a time such as 8h, 90min or 2d."
_IMAGE_SIZES = "--image_sizes takes the sizes of a row's images: 1024x768 for one, 1024x768,640x480 for two."
_BUDGET = "--budget takes an amount in the currency of the prices: 20 for 20 USD."
_SLOWDOWN = "--max_slowdown takes 1 or more: 4 passes a plan over that takes more than four times as long per token."


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoFit:
    """Says how to plan. Every field may be left out.

    ``SFTTrainer(..., autofit=AutoFit(effective_batch_size=64, fit="lossless"))`` keeps 64 rows per optimizer step and
    changes nothing but speed; so does ``plan("sft", model, autofit=...)``.

    >>> from autotrain_mem import AutoFit
    >>> AutoFit(gpu="rtx4090", headroom="8%", fit="rounding").headroom_bytes(24 * 2**30)
    2061584302

    Raises:
        UsageError: a value that no plan can be made with; all of them in one message.
    """

    gpu: str | None = None
    """A card by name (``rtx4090``) or a size (``6GiB``) to plan for; None: the device that the trainer runs on."""
    gpus: int | Collection[int] | None = None
    """How many of these cards train together; several numbers, such as ``(1, 2, 4)``, are compared. None: all that are
    here, or one of a card by name."""
    nodes: int | None = None
    """Machines with so many cards each, to plan for; None: one."""
    link: str | None = None
    """What joins the cards of a machine (``nvlink4``), and machines (``nvlink4,ndr``); None: as found here, or as usual
    for a card by name."""
    headroom: str | None = None
    """Left free: ``500MiB`` or ``8%``; None: 4 %, at least 400 MiB."""
    effective_batch_size: int | None = None
    """Rows per optimizer step, of all processes; None: as the batch size, the accumulation and the processes say."""
    prompt_length: int | None = None
    """GRPO, RLOO, PPO: tokens of the longest prompt, instead of counting the data's."""
    image_sizes: str | None = None
    """Sizes of the images of every row, ``1024x768,640x480`` (width x height), to plan for where no data are read."""
    fit: Fit = "all"
    """How far to go: ``lossless`` changes nothing but speed, ``rounding`` stops before LoRA."""
    forbid: Collection[str] = frozenset()
    """Levers that may not be pulled, by name; any iterable of names is taken."""
    max_slowdown: float = MAX_SLOWDOWN
    """A plan slower than so many times the best of the next level of harm is passed over."""
    within: str | None = None
    """The whole training is to be done in ``8h``, ``90min`` or ``2d``, as predicted; None: whenever it is."""
    budget: float | None = None
    """What the whole training may cost, in the currency of the prices; None: whatever it costs."""
    prices: str | Path | None = None
    """A CSV file of what cards are rented for, in the place of the table that comes along."""
    optimizer_offload: bool = False
    """Optimizer state and step on the host."""
    expandable_segments: bool = False
    """Segments that grow page by page; a plan turns them on by itself where they make it fit."""
    sharding: Sharding | None = None
    """How processes divide the model: ``ddp`` not at all, ``fsdp2`` into shards; None: as fits and is fastest."""
    cp_size: int | None = None
    """So many GPUs share the tokens of each row (context parallelism, with FSDP2); None: as many as a length needs."""
    sp_size: int | None = None
    """The same in DeepSpeed's way (sequence parallelism, with ZeRO)."""
    max_pixels: int | None = None
    """Pixels to which a larger image is made smaller before it becomes tokens; None: as the model's processor has it,
    or fewer where nothing else fits."""
    fsdp_offload_params: bool = False
    """Shards of parameters, gradients and optimizer state wait in host memory (FSDP)."""
    offload_optimizer_device: OffloadDevice | None = None
    """``cpu``: the optimizer's state lies in host memory, where it steps too (ZeRO)."""
    offload_param_device: OffloadDevice | None = None
    """``cpu``: shards of weights wait in host memory (ZeRO-3)."""
    accelerate_config: str | Path | Mapping[str, Any] | None = None
    """A config of ``accelerate launch``, by path or content: processes, machines and sharding are as it says."""
    peft_config: str | Path | Mapping[str, Any] | None = None
    """A config of PEFT's own, by path (``adapter_config.json``, or its folder) or content: what is trained is as it
    says. A drop-in trainer takes the object itself, as TRL's does."""
    plan: nouns.Plan | str | Path | None = None
    """A plan to follow, or its file, instead of searching: it is rehearsed again where it was made for another card,
    other versions or other words."""
    pin: Collection[str] = frozenset()
    """Drop-in trainers: settings that are kept as the config has them although they are TRL's defaults."""
    tune: Collection[str] = frozenset()
    """Drop-in trainers: settings that may be changed although the config gives them; ``max_length`` among them asks for
    the longest row."""
    guard: bool = True
    """Run the longest rows before the first step, and on a card that is full go on with less at once. Else trainers and
    ``fit`` train as TRL does by itself."""
    show: bool = True
    """Drop-in trainers: tell the search and the plan on stderr."""

    def __post_init__(self) -> None:
        for name in ("forbid", "pin", "tune"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if isinstance(self.gpus, list):
            object.__setattr__(self, "gpus", tuple(self.gpus))
        problems = [*self._kinds()] or [*self._problems()]
        if problems:
            reasons, cures = zip(*problems, strict=True)
            error = UsageError(f"{'; '.join(reasons)}.", hint="\n".join(dict.fromkeys(cures)))
            flags = [f"--{name} is {in_python(name)}" for name in _KINDS if f"--{name} " in error.message]
            if flags:  # the command shows no notes (``python_errors``)
                error.add_note(f"In Python {', '.join(flags)}")
            raise error

    def _kinds(self) -> Iterable[tuple[str, str]]:
        for name, (kinds, wanted) in _KINDS.items():
            value = getattr(self, name)
            is_other = isinstance(value, bool) and bool not in kinds
            if value == self.__dataclass_fields__[name].default or (name == "plan" and _is_plan(value)):
                continue
            if is_other or not isinstance(value, kinds):
                yield f"{name} takes {wanted}, not {value!r}", f"Write {name}=... with {wanted}, or remove it."

    def _problems(self) -> Iterable[tuple[str, str]]:
        for name, count in (*(("gpus", each) for each in self.gpu_counts), ("nodes", self.nodes)):
            if count is not None and (not isinstance(count, int) or count < 1):
                yield f"--{name} {count} is no number of {_COUNTED[name]}", f"--{name} takes 1 or more."
        if self.sharding is not None and self.sharding not in SHARDINGS:
            yield f"--sharding takes no {self.sharding!r}", f"--sharding takes {', '.join(SHARDINGS)}."
        for name in TOKEN_KNOBS:
            if (size := getattr(self, name)) is not None and size < 1:
                yield f"--{name} {size} is no number of GPUs", f"--{name} takes 1 or more."
        if self.max_pixels is not None and self.max_pixels < 1:
            yield f"--max_pixels {self.max_pixels} is no number of pixels", "--max_pixels takes 1 or more."
        for name in ZERO_KNOBS:
            if getattr(self, name) not in (None, "cpu", "nvme"):
                yield f"--{name} takes no {getattr(self, name)!r}", f"--{name} takes cpu."
        if self.image_sizes is not None and not all(map(is_image_size, self.image_sizes.split(","))):
            yield f"--image_sizes {self.image_sizes!r} is no list of sizes of images", _IMAGE_SIZES
        if self.fit not in FITS:
            yield f"fit takes no {self.fit!r}", f"fit takes {', '.join(FITS)}."
        if not self.max_slowdown >= 1:  # NaN is not either
            yield f"--max_slowdown {self.max_slowdown:g} is no factor by which a plan may be slower", _SLOWDOWN
        if self.within is not None and read_seconds(self.within) is None:
            yield f"--within {self.within!r} is no time", _WITHIN
        if self.budget is not None and not 0 < self.budget < math.inf:
            yield f"--budget {self.budget:g} is no amount to spend", _BUDGET
        if self.headroom is not None and size_or_share(self.headroom, 1) is None:
            yield f"--headroom {self.headroom!r} is neither a size nor a share", _HEADROOM
        if both := {*self.pin} & {*self.tune}:
            yield f"{', '.join(sorted(both))} in pin and in tune", "A setting is kept or may be changed, not both."

    def headroom_bytes(self, total_bytes: int) -> int | None:
        """Returns the headroom on a device of this size, in bytes; None for the default.

        Raises:
            UsageError: nothing would be left.
        """
        if self.headroom is None:
            return None
        size_bytes = size_or_share(self.headroom, total_bytes)
        if size_bytes is None or not 0 <= size_bytes < total_bytes:
            device = f"a device of {format_bytes(total_bytes)}"
            raise UsageError(f"A headroom of {self.headroom} leaves nothing of {device}.", hint=_HEADROOM)
        return size_bytes

    @property
    def within_seconds(self) -> float | None:
        """Returns ``within`` in seconds; None where it is not given."""
        return None if self.within is None else read_seconds(self.within)

    def over(self, plan: nouns.Plan, *, here: bool) -> AutoFit:
        """Fills what is left open here with what a plan was made with.

        Args:
            here: On the device that is here; else on the plan's card, unless ``gpu`` names another.
        """
        job, card = plan.job, plan.estimate.hardware
        has_name = card.origin in ("named", "imagined")
        return replace(
            self,
            gpu=self.gpu or (card.name if has_name and not here else None),
            gpus=self.gpus or (None if card.origin == "cpu" else card.topology.devices),
            nodes=self.nodes or (card.topology.nodes if card.topology.nodes > 1 else None),
            link=self.link or (card.topology.links if has_name and not here else None),
            effective_batch_size=self.effective_batch_size or job.effective_batch_size,
            prompt_length=self.prompt_length or job.prompt_length,
            image_sizes=self.image_sizes or ",".join(job.images) or None,
            fit=job.fit if self.fit == "all" else self.fit,
            forbid=self.forbid or job.forbid,
            max_slowdown=job.max_slowdown if self.max_slowdown == MAX_SLOWDOWN else self.max_slowdown,
            optimizer_offload=self.optimizer_offload or bool(job.arguments.get("optimizer_offload")),
            expandable_segments=self.expandable_segments or bool(job.arguments.get("expandable_segments")),
            sharding=self.sharding or job.arguments.get("sharding"),
            cp_size=self.cp_size or job.arguments.get("cp_size"),
            sp_size=self.sp_size or job.arguments.get("sp_size"),
            max_pixels=self.max_pixels or job.arguments.get("max_pixels"),
            fsdp_offload_params=self.fsdp_offload_params or bool(job.arguments.get("fsdp_offload_params")),
            offload_optimizer_device=self.offload_optimizer_device or job.arguments.get("offload_optimizer_device"),
            offload_param_device=self.offload_param_device or job.arguments.get("offload_param_device"),
            peft_config=self.peft_config or job.arguments.get(PEFT_CONFIG),
        )

    @property
    def pins(self) -> dict[str, Any]:
        """Returns the knobs that TRL does not have and that are given here."""
        given: dict[str, Any] = {name: True for name in OWN_SWITCHES if getattr(self, name)}
        named = {name: getattr(self, name) for name in ("sharding", "max_pixels", *TOKEN_KNOBS, *ZERO_KNOBS)}
        config = str(self.peft_config or "")  # JSON, once it is read (``planning.peft_config``)
        given |= arguments_of(config) if config.startswith("{") else {}
        return given | {name: value for name, value in named.items() if value is not None}

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Lists how many cards to plan for: several numbers are compared, none says nothing."""
        return () if self.gpus is None else (self.gpus,) if isinstance(self.gpus, int) else tuple(self.gpus)


def in_python(field_name: str) -> str:
    """Names a field of AutoFit, such as ``gpu``, as a script writes it: ``AutoFit(gpu=...)``."""
    return f"AutoFit({field_name}=...)"


def as_autofit(given: Any) -> AutoFit:
    """Returns the AutoFit, or the default one for None. Raises UsageError for a value of another kind."""
    if given is None:
        return AutoFit()
    if isinstance(given, AutoFit):
        return given
    meant = "autofit=AutoFit(plan=...)" if _is_plan(given) else 'autofit=AutoFit(gpu="rtx4090")'
    raise UsageError(f"autofit takes an AutoFit, not {reprlib.repr(given)}.", hint=f"Write {meant}.")


def _is_plan(value: Any) -> bool:
    if isinstance(value, str | Path):
        return False
    from autotrain_mem.types.plan import Plan  # no command line holds one, and it is a third of what flags import

    return isinstance(value, Plan)


def _names(field_name: str, names: Any) -> frozenset[str]:
    if isinstance(names, str):
        raise UsageError(f"AutoFit: {field_name} takes names, not one text.", hint=f'Write {field_name}=["{names}"].')
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"AutoFit: {field_name} takes names, not {names!r}.", hint=f'Write {field_name}=["NAME"].')
    return frozenset(names)


def size_or_share(text: str, total_bytes: int) -> int | None:
    """Reads ``"8%"`` of the device, or ``"500MiB"``, as bytes; None for what is neither."""
    try:
        if not text.endswith("%"):
            return parse_bytes(text)
        share = float(text[:-1]) / 100
    except ValueError:
        return None
    return int(total_bytes * share) if math.isfinite(share) else None


_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)\s*", re.IGNORECASE)
_UNIT_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def read_seconds(text: str) -> float | None:
    """Reads ``"8h"``, ``"90min"`` or ``"2d"`` as seconds; None for what is no time."""
    match = _TIME.fullmatch(text)
    seconds = 0.0 if match is None else float(match[1]) * _UNIT_SECONDS[match[2].lower()]
    return seconds or None


# -- what flags are called in Python ---------------------------------------------------------------------------------

_FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
_OURS = {each.name: in_python(each.name) for each in fields(AutoFit)}
_OF_VERBS = {"plan_only": "plan(...)", "simulate": "fit(..., simulate=True)", "out": "plan(...).save(path)"}
"""What is no keyword of a verb's."""
_OF_TRAINERS = {
    "use_peft": "peft_config=LoraConfig(...)",
    "lora_target_modules": "LoraConfig(target_modules=...)",
    **{name: f"quantization_config=BitsAndBytesConfig({name}=True)" for name in BASE_BITS},
    "dtype": 'model_init_kwargs={"dtype": ...}',
    "attn_implementation": 'model_init_kwargs={"attn_implementation": ...}',
    "model": "the first argument",
    "dataset": "train_dataset=...",
    "reward_funcs": "reward_funcs=...",
    "reward_model_path": "reward_model=...",
    "teacher_model_name_or_path": "teacher_model=...",
    "out": "trainer.plan.save(path)",
    "plan_only": "plan(...)",
}
"""What is no field of a trainer's config."""
_OF_THE_COMMAND = frozenset({"config", "csv", "debug", "frontier", "help", "json", "recipe", "snapshot", "sweep"})
"""Flags that Python has no need of, or not."""


@contextmanager
def python_errors(config: str = "") -> Iterator[None]:
    """Errors that leave the block say, in a note, what their flags are called in Python.

    Where message and hint say it all, the traceback of the worker that found out is left away; where the installed
    libraries raised it stays.

    Args:
        config: The class of a trainer's config, such as ``SFTConfig``; empty for the verbs, which take keywords.
    """
    try:
        yield
    except AutofitError as error:
        if not isinstance(error, RehearsalError | TrainingError):
            error.__cause__ = None  # and with it what was raised before it (PEP 415)
        if note := python_words(f"{error.message}\n{error.hint}", config):
            error.add_note(note)
        raise


def python_words(text: str, config: str = "") -> str:
    """Says what the flags of a text are in Python; empty where it has none.

    Example: of ``Give --max-length 512, or --gpu l4.`` it is ``In Python --max_length is max_length=..., --gpu is
    AutoFit(gpu=...)``.
    """
    names = dict.fromkeys(flag.replace("-", "_") for flag in _FLAG.findall(text))
    known = _OURS | (_OF_TRAINERS if config else _OF_VERBS)
    words = {name: known.get(name) or (f"{config}({name}=...)" if config else f"{name}=...") for name in names}
    phrases = [f"--{name} is {word}" for name, word in words.items() if name not in _OF_THE_COMMAND]
    return f"In Python {', '.join(phrases)}" if phrases else ""
