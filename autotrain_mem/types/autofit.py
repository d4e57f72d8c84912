"""Defines AutoFit: our own settings, which the command, the drop-in trainers and the Python verbs share."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotrain_mem import types as nouns
from autotrain_mem.settings import words
from autotrain_mem.settings.adapter_config import PEFT_CONFIG, arguments_of
from autotrain_mem.settings.declaration import PLAN, TRAIN, Group, one_of, setting, settings_of, that, up_to
from autotrain_mem.settings.own import OWN, OwnSettings
from autotrain_mem.support.errors import Problem, UsageError
from autotrain_mem.support.units import format_bytes

_HEADROOM = "a size such as 500MiB or a share such as 8%, less than the device has."


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoFit(OwnSettings):
    """Holds the settings for planning. Every field is optional.

    ``SFTTrainer(..., autofit=AutoFit(effective_batch_size=64, fit="lossless"))`` keeps 64 rows per optimizer step and
    allows only changes that affect nothing but speed. ``plan("sft", model, autofit=...)`` takes the same object.

    >>> from autotrain_mem import AutoFit
    >>> AutoFit(gpu="rtx4090", headroom="8%", fit="rounding").headroom_bytes(24 * 2**30)
    2061584302

    Raises:
        UsageError: some values are invalid. One message lists all of them.
    """

    gpu: str | None = setting(
        takes="a text such as 'rtx4090'",
        group=Group.DEVICE,
        metavar="NAME",
        help="a card by its name (see autofit gpus), or by a memory size such as 6GiB",
    )
    """The card to plan for, by name (``rtx4090``) or memory size (``6GiB``). None: the device that the trainer uses."""
    gpus: int | Collection[int] | None = setting(
        takes="a whole number, or several to compare",
        check=up_to(1_024, "GPUs"),
        group=Group.DEVICE,
        read=words.read_counts,
        help="number of cards that train together (default: all cards here, or 1 if --gpu names a card); "
        "--gpu all --gpus 1,2,4 compares these numbers",
    )
    """The number of cards per machine that train together. Several numbers, such as ``(1, 2, 4)``, are compared."""
    nodes: int | None = setting(
        check=up_to(16_384, "machines"),
        group=Group.DEVICE,
        help="number of machines, each with --gpus cards; start the same command on each machine",
    )
    """The number of machines to plan for, each with ``gpus`` cards. None: one machine."""
    link: str | None = setting(
        takes="a text such as 'nvlink4'",
        group=Group.DEVICE,
        metavar="NAME",
        help="link between cards, and after a comma between machines: nvlink4, pcie4, nvlink4,ndr "
        "(default: the link found here, or the card's usual one)",
    )
    """The link between the cards of a machine (``nvlink4``), and after a comma between machines (``nvlink4,ndr``)."""
    accelerate_config: str | Path | Mapping[str, Any] | None = setting(
        takes="the path of a file, or its keys",
        group=Group.DEVICE,
        metavar="FILE",
        help="a config file of accelerate launch, which sets processes, machines and sharding",
    )
    """A config of ``accelerate launch``, by path or content, which sets processes, machines and sharding."""
    headroom: str | None = setting(
        takes="a text such as '500MiB' or '8%'",
        check=that(
            lambda text: words.size_or_share(text, 1) is not None, "{value!r} is neither a size nor a share", _HEADROOM
        ),
        group=Group.DEVICE,
        metavar="SIZE",
        help="memory to leave free: 500MiB or 8%% (default 4%%, and at least 400 MiB unless --gpu is a size)",
    )
    """The device memory to leave free (``8%``). None: 4 % of the card, at least 400 MiB unless ``gpu`` is a size."""
    effective_batch_size: int | None = setting(help="rows per optimizer step, kept constant")
    """The rows per optimizer step over all processes. None: batch size x gradient accumulation x processes."""
    prompt_length: int | None = setting(
        group=Group.JOB,
        help="GRPO, RLOO, distillation, online DPO, PPO: plan for prompts of N tokens",
    )
    """Online methods: the longest prompt to plan for, in tokens. None: the prompts of the data are counted."""
    image_sizes: str | None = setting(
        takes="a text such as '1024x768,640x480'",
        check=that(
            lambda text: all(map(words.is_image_size, text.split(","))),
            "{value!r} is not a list of image sizes",
            "the sizes of a row's images: 1024x768 for one, 1024x768,640x480 for two.",
        ),
        group=Group.JOB,
        metavar="WxH,...",
        help="plan for rows with images of these sizes: 1024x768",
    )
    """The image sizes of each row, ``1024x768,640x480`` (width x height in pixels), to plan for if no data are read."""
    fit: words.Fit = setting(
        "all",
        choices=words.FITS,
        check=one_of(words.FITS, prefix=""),
        help="stop before changes of rounding (lossless), or before LoRA (rounding)",
    )
    """What a plan may change: only speed (``lossless``), also rounding (``rounding``), or anything (``all``)."""
    forbid: Collection[str] = setting(
        frozenset(), metavar="LIST", help="levers that no plan may use, such as lora,bf16_weights"
    )
    """The names of levers that a plan must not use, in any iterable."""
    max_slowdown: float = setting(
        words.MAX_SLOWDOWN,
        check=that(
            lambda factor: factor >= 1,
            "{value:g} is not a factor by which a plan may be slower",
            "1 or more: 4 skips a plan that takes more than four times as long per token.",
        ),
        metavar="X",
        help="go to the next level of harm if its best plan is more than X times faster (default 4)",
    )
    """A plan is skipped if it is this many times slower than the best plan of the next level of harm."""
    within: str | None = setting(
        takes="a text such as '8h' or '90min'",
        check=that(
            lambda text: words.read_seconds(text) is not None,
            "{value!r} is not a time",
            "a time such as 8h, 90min or 2d.",
        ),
        metavar="TIME",
        commands=(TRAIN, PLAN),
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --within 8h finds a plan for that time."),
        help="find the least harmful plan that trains within TIME (8h, 90min, 2d); if none does, suggest changes",
    )
    """The longest predicted duration of the whole training: ``8h``, ``90min`` or ``2d``; None for no limit."""
    budget: float | None = setting(
        check=that(
            lambda amount: 0 < amount < math.inf,
            "{value:g} is not an amount to spend",
            "an amount in the currency of the prices: 20 for 20 USD.",
        ),
        metavar="AMOUNT",
        commands=(TRAIN, PLAN),
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --budget 20 finds a plan for that cost."),
        help="find the least harmful plan that costs at most AMOUNT at the rental price; if none does, suggest changes",
    )
    """The highest cost of the whole training, in the currency of the prices; None for no limit."""
    tokens: int | None = setting(
        check=up_to(10**18, "tokens"),
        read=words.read_tokens,
        commands=(PLAN,),
        elsewhere=("it predicts no training.", "autofit plan METHOD ... --tokens 20M predicts time and cost."),
        help="predict the time and cost of training on N tokens in all, such as 20M, in place of the data's",
    )
    """The tokens to train on in all, to predict time and cost. None: those of the data, or of ``max_steps``."""
    prices: str | Path | None = setting(
        takes="the path of a file",
        metavar="FILE",
        commands=(TRAIN, PLAN),
        elsewhere=("it shows no costs.", "autofit plan METHOD ... --gpu all --prices FILE does."),
        help="a CSV file of rental prices (gpu,per_hour,currency,...) instead of the built-in table",
    )
    """A CSV file of rental prices that replaces the built-in table."""
    plan: str | Path | nouns.Plan | None = setting(
        takes="a Plan or the path of its file",
        group=Group.OUTPUT,
        metavar="FILE",
        commands=(TRAIN, PLAN),
        elsewhere=(
            "it estimates the given flags, and a plan holds settings that were found to fit.",
            "autofit explain FILE shows the plan's estimate; autofit METHOD --plan FILE trains with it.",
        ),
        help="follow this plan instead of searching",
    )
    """A plan, or its file, to follow instead of searching. It is rehearsed again if card, versions or rows differ."""
    pin: Collection[str] = setting(frozenset())
    """Drop-in trainers: the names of settings that keep the config's value even if it equals TRL's default."""
    tune: Collection[str] = setting(frozenset())
    """Drop-in trainers: settings that may change although the config sets them. ``max_length`` becomes ``auto``."""
    guard: bool = setting(True)
    """Whether to run the longest rows first and survive out-of-memory errors. If False, training is exactly TRL's."""
    show: bool = setting(True)
    """Whether to show the progress of planning. Drop-in trainers also print the plan, on stderr."""

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
            if flags:  # only Python shows notes, the command does not (``PythonErrors``)
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
            yield f"pin and tune both name {', '.join(sorted(both))}", "Name a setting in one of them only."

    def headroom_bytes(self, total_bytes: int) -> int | None:
        """Returns the headroom on a device of this size, in bytes; None for the default. Raises UsageError if it takes
        the whole device."""
        if self.headroom is None:
            return None
        size_bytes = words.size_or_share(self.headroom, total_bytes)
        if size_bytes is None or not 0 <= size_bytes < total_bytes:
            device = f"a device of {format_bytes(total_bytes)}"
            raise UsageError(
                f"A headroom of {self.headroom} leaves nothing of {device}.", hint=f"--headroom takes {_HEADROOM}"
            )
        return size_bytes

    @property
    def within_seconds(self) -> float | None:
        """Returns ``within`` in seconds; None if it is not set."""
        return None if self.within is None else words.read_seconds(self.within)

    def over(self, plan: nouns.Plan, *, here: bool) -> AutoFit:
        """Returns a copy that takes unset fields from an existing plan. ``here``: whether to plan for this machine's
        device; otherwise for the card of the plan or of ``gpu``."""
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
            max_slowdown=job.max_slowdown if self.max_slowdown == words.MAX_SLOWDOWN else self.max_slowdown,
            **{name: getattr(self, name) or job.arguments.get(name) or each.default for name, each in OWN.items()},
        )

    @property
    def pins(self) -> dict[str, Any]:
        """Returns the values given here for knobs that TRL's configs do not have, by name."""
        given = {name: value for name in OWN if (value := getattr(self, name)) not in (None, False)}
        config = str(given.pop(PEFT_CONFIG, ""))  # JSON after ``planning.read_request`` has read the file
        return given | (arguments_of(config) if config.startswith("{") else {})

    @property
    def gpu_counts(self) -> tuple[int, ...]:
        """Returns the numbers of cards to plan for. Several are compared; empty if unset."""
        return () if self.gpus is None else (self.gpus,) if isinstance(self.gpus, int) else tuple(self.gpus)


SETTINGS = {name: each for name, each in settings_of(AutoFit).items() if name not in OWN} | OWN
"""The settings of AutoFit by name, in the order of the help."""


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
    from autotrain_mem.types.planned import Plan  # imported late: the command's flags do not need it

    return isinstance(value, Plan)
