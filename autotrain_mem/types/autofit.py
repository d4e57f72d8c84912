"""Defines AutoFit, our own flags, which the command, the drop-in trainers and the Python verbs all use."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotrain_mem import types as nouns
from autotrain_mem.settings.adapter_config import PEFT_CONFIG, arguments_of
from autotrain_mem.settings.declaration import (
    PLAN,
    TRAIN,
    Group,
    Problem,
    one_of,
    setting,
    settings_of,
    that,
    up_to,
)
from autotrain_mem.settings.own import OWN, OwnSettings
from autotrain_mem.settings.words import (
    FITS,
    MAX_SLOWDOWN,
    Fit,
    is_image_size,
    read_counts,
    read_seconds,
    size_or_share,
)
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import format_bytes

_HEADROOM = "a size such as 500MiB or a share such as 8%, less than the device has."


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoFit(OwnSettings):
    """Describes how to plan. Every field is optional.

    ``SFTTrainer(..., autofit=AutoFit(effective_batch_size=64, fit="lossless"))`` keeps 64 rows per optimizer step and
    changes nothing but speed; so does ``plan("sft", model, autofit=...)``.

    >>> from autotrain_mem import AutoFit
    >>> AutoFit(gpu="rtx4090", headroom="8%", fit="rounding").headroom_bytes(24 * 2**30)
    2061584302

    Raises:
        UsageError: a value that no plan can be made with; all of them in one message.
    """

    gpu: str | None = setting(
        None,
        takes="a text such as 'rtx4090'",
        group=Group.DEVICE,
        metavar="NAME",
        help="a card by name (autofit gpus), or a size such as 6GiB",
    )
    """The card to plan for, by name (``rtx4090``) or size (``6GiB``); None: the device that the trainer runs on."""
    gpus: int | Collection[int] | None = setting(
        None,
        takes="a whole number, or several to compare",
        check=up_to(1_024, "GPUs"),
        group=Group.DEVICE,
        metavar="N",
        read=read_counts,
        help="how many of them train together (default: all of this machine, or one named card); "
        "--gpu all --gpus 1,2,4 compares",
    )
    """Number of these cards that train together; several numbers, such as ``(1, 2, 4)``, are compared."""
    nodes: int | None = setting(
        None,
        check=up_to(16_384, "machines"),
        group=Group.DEVICE,
        metavar="N",
        help="number of machines, each with that many GPUs; start the same command on all of them",
    )
    """Number of machines to plan for, each with ``gpus`` cards; None: one."""
    link: str | None = setting(
        None,
        takes="a text such as 'nvlink4'",
        group=Group.DEVICE,
        metavar="NAME",
        help="link between GPUs, and between machines: nvlink4, pcie4, nvlink4,ndr "
        "(default: the one found here, or the card's usual one)",
    )
    """The link between the cards of a machine (``nvlink4``), and between machines (``nvlink4,ndr``)."""
    accelerate_config: str | Path | Mapping[str, Any] | None = setting(
        None,
        takes="the path of a file, or its keys",
        group=Group.DEVICE,
        metavar="FILE",
        help="a config of accelerate launch, which sets processes, machines and sharding",
    )
    """A config of ``accelerate launch``, by path or content, which sets processes, machines and sharding."""
    headroom: str | None = setting(
        None,
        takes="a text such as '500MiB' or '8%'",
        check=that(
            lambda text: size_or_share(text, 1) is not None, "{value!r} is neither a size nor a share", _HEADROOM
        ),
        group=Group.DEVICE,
        metavar="SIZE",
        help="memory to leave free: 500MiB or 8%% (default 4%%, at least 400 MiB)",
    )
    """Device memory to leave free: ``500MiB`` or ``8%``; None: 4 %, at least 400 MiB."""
    effective_batch_size: int | None = setting(None, metavar="N", help="rows per optimizer step, kept constant")
    """Rows per optimizer step over all processes; None: batch size x gradient accumulation x processes."""
    prompt_length: int | None = setting(
        None,
        group=Group.JOB,
        metavar="N",
        help="GRPO, RLOO, distillation, online DPO, PPO: plan for prompts of N tokens",
    )
    """Online methods: tokens of the longest prompt, instead of counting the data's prompts."""
    image_sizes: str | None = setting(
        None,
        takes="a text such as '1024x768,640x480'",
        check=that(
            lambda text: all(map(is_image_size, text.split(","))),
            "{value!r} is not a list of image sizes",
            "the sizes of a row's images: 1024x768 for one, 1024x768,640x480 for two.",
        ),
        group=Group.JOB,
        metavar="WxH,...",
        help="plan for rows with images of these sizes: 1024x768",
    )
    """Image sizes of every row, ``1024x768,640x480`` (width x height), to plan for if no data are read."""
    fit: Fit = setting(
        "all",
        choices=FITS,
        check=one_of(FITS, prefix=""),
        help="stop before rounding changes (lossless), before LoRA (rounding)",
    )
    """How far to go: ``lossless`` changes nothing but speed, ``rounding`` stops before LoRA."""
    forbid: Collection[str] = setting(
        frozenset(), metavar="LIST", help="levers never to pull, such as lora,bf16_weights"
    )
    """Names of levers that a plan must not pull, as any iterable."""
    max_slowdown: float = setting(
        MAX_SLOWDOWN,
        check=that(
            lambda factor: factor >= 1,
            "{value:g} is not a factor by which a plan may be slower",
            "1 or more: 4 skips a plan that takes more than four times as long per token.",
        ),
        metavar="X",
        help="use the next level if a plan is more than X times slower than its best (default 4)",
    )
    """A plan is skipped if it is this many times slower than the best plan of the next level of harm."""
    within: str | None = setting(
        None,
        takes="a text such as '8h' or '90min'",
        check=that(
            lambda text: read_seconds(text) is not None, "{value!r} is no time", "a time such as 8h, 90min or 2d."
        ),
        metavar="TIME",
        commands=(TRAIN, PLAN),
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --within 8h finds the gentlest that keeps it."),
        help="the gentlest plan that finishes the training in TIME: 8h, 90min, 2d; or what it would take",
    )
    """The longest predicted duration of the whole training: ``8h``, ``90min`` or ``2d``; None for no limit."""
    budget: float | None = setting(
        None,
        check=that(
            lambda amount: 0 < amount < math.inf,
            "{value:g} is not an amount to spend",
            "an amount in the currency of the prices: 20 for 20 USD.",
        ),
        metavar="AMOUNT",
        commands=(TRAIN, PLAN),
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --budget 20 finds the gentlest that keeps it."),
        help="the gentlest plan that costs AMOUNT or less at the card's rental price; or what it would take",
    )
    """The highest cost of the whole training, in the currency of the prices; None for no limit."""
    prices: str | Path | None = setting(
        None,
        takes="the path of a file",
        metavar="FILE",
        commands=(TRAIN, PLAN),
        elsewhere=("it tells no costs.", "autofit plan METHOD ... --gpu all --prices FILE does."),
        help="a CSV file of rental prices (gpu,per_hour,currency,...) instead of the built-in table",
    )
    """A CSV file of rental prices that replaces the built-in table."""
    plan: str | Path | nouns.Plan | None = setting(
        None,
        takes="a Plan or the path of its file",
        group=Group.OUTPUT,
        metavar="FILE",
        commands=(TRAIN, PLAN),
        elsewhere=(
            "it says what flags need, and a plan holds settings that were found to fit.",
            "autofit explain FILE shows what they need; autofit METHOD --plan FILE trains with them.",
        ),
        help="follow this plan instead of searching",
    )
    """A plan or its file to follow instead of searching. It is rehearsed again if anything differs."""
    pin: Collection[str] = setting(frozenset())
    """Drop-in trainers: settings that keep the config's value even if it is TRL's default."""
    tune: Collection[str] = setting(frozenset())
    """Drop-in trainers: settings that may change even if the config sets them; ``max_length`` to the longest row."""
    guard: bool = setting(True)
    """Whether to run the longest rows first and to survive OOM; otherwise training is exactly TRL's."""
    show: bool = setting(True)
    """Drop-in trainers: whether to print the search and the plan on stderr."""

    def __post_init__(self) -> None:
        for name in ("forbid", "pin", "tune"):
            names = getattr(self, name)
            is_text = isinstance(names, str)
            if is_text or not isinstance(names, Iterable) or not all(isinstance(each, str) for each in names):
                taken, example = ("one text", names) if is_text else (repr(names), "NAME")
                message = f"AutoFit: {name} takes names, not {taken}."
                raise UsageError(message, hint=f'Write {name}=["{example}"].')
            object.__setattr__(self, name, frozenset(names))
        if isinstance(self.gpus, list):
            object.__setattr__(self, "gpus", tuple(self.gpus))
        problems = [*self._kinds()] or [*self._problems()]
        if problems:
            error = UsageError.of(problems)
            named = (name for name, each in SETTINGS.items() if each.kind and f"--{name} " in error.message)
            flags = [f"--{name} is {in_python(name)}" for name in named]
            if flags:  # the command shows no notes (``python_errors``)
                error.add_note(f"In Python {', '.join(flags)}")
            raise error

    def _kinds(self) -> Iterable[Problem]:
        for name, each in SETTINGS.items():
            value, is_truth = getattr(self, name), isinstance(getattr(self, name), bool)
            if each.kind is None or value == each.default or (name == "plan" and _is_plan(value)):
                continue
            if (is_truth and not each.is_switch) or not isinstance(value, each.types):
                wanted = each.told_type
                yield f"{name} takes {wanted}, not {value!r}", f"Write {name}=... with {wanted}, or remove it."

    def _problems(self) -> Iterable[Problem]:
        for name, each in SETTINGS.items():
            if each.check is not None and (value := getattr(self, name)) is not None:
                yield from each.check(name, value)
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
            raise UsageError(
                f"A headroom of {self.headroom} leaves nothing of {device}.", hint=f"--headroom takes {_HEADROOM}"
            )
        return size_bytes

    @property
    def within_seconds(self) -> float | None:
        """Returns ``within`` in seconds; None if it is not set."""
        return None if self.within is None else read_seconds(self.within)

    def over(self, plan: nouns.Plan, *, here: bool) -> AutoFit:
        """Returns a copy that takes unset fields from an existing plan.

        Args:
            here: Whether to plan for this machine's device; otherwise for the card of the plan or of ``gpu``.
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
            **{name: getattr(self, name) or job.arguments.get(name) or each.default for name, each in OWN.items()},
        )

    @property
    def pins(self) -> dict[str, Any]:
        """Returns the knobs set here that TRL does not have."""
        given = {name: value for name in OWN if (value := getattr(self, name)) not in (None, False)}
        config = str(given.pop(PEFT_CONFIG, ""))  # JSON, once it is read (``planning.read_request``)
        return given | (arguments_of(config) if config.startswith("{") else {})

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Lists the numbers of cards to plan for: several are compared; empty if unset."""
        return () if self.gpus is None else (self.gpus,) if isinstance(self.gpus, int) else tuple(self.gpus)


SETTINGS = {name: each for name, each in settings_of(AutoFit).items() if name not in OWN} | OWN
"""The settings of AutoFit, in the order of the help."""


def in_python(field_name: str) -> str:
    """Returns a field of AutoFit, such as ``gpu``, as a script writes it: ``AutoFit(gpu=...)``."""
    return f"AutoFit({field_name}=...)"


def as_autofit(given: Any) -> AutoFit:
    """Returns the AutoFit, or the default one for None. Raises UsageError for any other type."""
    if given is None:
        return AutoFit()
    if isinstance(given, AutoFit):
        return given
    meant = "autofit=AutoFit(plan=...)" if _is_plan(given) else 'autofit=AutoFit(gpu="rtx4090")'
    raise UsageError(f"autofit takes an AutoFit, not {reprlib.repr(given)}.", hint=f"Write {meant}.")


def _is_plan(value: Any) -> bool:
    if isinstance(value, str | Path):
        return False
    from autotrain_mem.types.planned import Plan  # a third of the import time of flags, which hold none

    return isinstance(value, Plan)
