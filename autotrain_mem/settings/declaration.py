"""What is said of a setting, once, beside its name and type; flags, YAML keys, checks and levers are views of it.

A setting is a field of a dataclass: of those that a plan may decide (``settings.own``), of what else is asked of a plan
(``types.autofit``), of a run (``planning.read_request``) or of a command (``cli.flags``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

Problem = tuple[str, str]
"""What is wrong with a value, and what to do about it."""
Check = Callable[[str, Any], Iterable[Problem]]
"""Finds what is wrong with a setting's value, by its name and its value."""


class Harm(IntEnum):
    """Ranks what a lever costs the training it is pulled on; the ladder is climbed in this order."""

    NONE = 0
    TIME = 1
    ROUNDING = 2
    WHAT_IS_TRAINED = 3
    DATA = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """Holds what a lever is taken to save before anything is known of it, roughly: it says where a search begins."""

    kept: float = 1.0
    """Share of what a micro-batch holds beside weights, gradients and optimizer state: left on the device."""
    taken: float = 0.0
    """Share of the optimizer state: taken off it."""
    slower: float = 1.0
    """How much longer a step takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeverRow:
    """Describes one lever. ``moves_from`` and ``to`` are values of its knob; both stay empty where it moves over a
    range."""

    name: str = ""
    """Left out in a setting's declaration, as are ``knobs`` and, of an on/off setting, ``moves_from`` and ``to``."""
    harm: Harm
    knobs: tuple[str, ...] = ()
    moves_from: tuple[Any, ...] = ()
    to: Any = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that only matter once this one has moved, and what they are set to where the user did not say."""
    along: tuple[str, ...] = ()
    """Levers pulled with this one: those of less harm where they are allowed, those of the same harm always."""
    instead_of: tuple[str, ...] = ()
    """Levers that this one makes pointless or impossible."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that other knobs must have."""
    suits: Callable[[Any], bool] = lambda method: True
    """Tells by a method's facts (``types.methods_table``) whether it has this lever."""
    quantizes: bool = False
    """Quantizes the checkpoint's weights, which works once."""
    offloads: bool = False
    """Takes the host's memory and its link, which no card's data sheet tells."""
    pays_for_adapters: bool = False
    """Offloads what is large with an adapter too; an adapter's own optimizer state is not."""
    steps_on_host: bool = False
    """The optimizer's step holds nothing on the device."""
    usual: Savings = Savings()
    at_best: Savings = Savings()
    """No more is saved than this: what is not rehearsed is ruled out by it. Logits and one layer stay whatever is
    recomputed or offloaded."""
    reason: str
    """One line for the user."""
    turns_on_adapter: bool = False
    """The adapter's own settings come with it (``search.adapter``)."""
    without: str = ""
    """What the least demanding point without the lever stands for, in the reason of one that is pulled."""
    let_go: str = ""
    """The reason of one that may also be let go: fewer rows become more, or a switch that was on is off."""
    words: str = ""
    """The words for it in a line of settings; empty where the knob is shown otherwise."""
    not_sharded: tuple[str, ...] = ()
    """Why it does not go with shards of the model (FSDP), and what does; empty where it does."""
    warning: str = ""
    """What a user must not overlook, of a lever that changes what is trained."""
    not_counted: tuple[str, ...] = ()
    """What it adds to a run that an estimate leaves out, in sentences. Sources stand where each is imitated
    (``rehearsal.cuda``)."""


class TakenBy(Enum):
    """Names the consumer of a knob that is no argument of TRL's."""

    OWN = "autofit applies it itself"
    LAUNCH = "how processes are launched says it (``parallel``)"


class Group(Enum):
    """Names the groups of flags in a help, in its order."""

    JOB = "what to train"
    DEVICE = "where it must fit"
    SEARCH = "what may be changed to make it fit"
    OUTPUT = "what to do and print"


TRAIN, PLAN, ESTIMATE = "train", "plan", "estimate"
"""Commands: ``autofit METHOD``, ``autofit plan METHOD`` and ``autofit estimate METHOD``."""
EVERYWHERE = (TRAIN, PLAN, ESTIMATE)

_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}
"""Maps a kind to its Python types, and to its name in messages."""
_IN_PYTHON: Mapping[str, tuple[type, ...]] = {"Path": (Path,), "Mapping": (Mapping,), "Collection": (tuple, list)}
"""What else an annotation may name, as types that are taken in Python alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Declares one setting. One with a ``help`` is a flag, and a key of a YAML file."""

    name: str = ""
    default: Any = None
    kind: type | None = None
    """The type of its value, as its field is annotated; None where its checks decide, or nothing else sets it."""
    also: tuple[type, ...] = ()
    """Types that are taken in Python alone."""
    takes: str = ""
    """How its type is told; empty for the usual words."""
    check: Check | None = None
    where: TakenBy | None = None
    """Who takes it; None for TRL, and for what is no knob of a plan."""
    lever: LeverRow | None = None
    accelerate: str = ""
    """The setting's key in the config of ``accelerate launch``, where it has one of its own."""
    of_deepspeed: bool = False
    """DeepSpeed's config has it."""

    help: str = ""
    group: Group = Group.SEARCH
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    read: Callable[[str], Any] | None = None
    """Reads a flag's text, where the kind alone does not."""
    short: str = ""
    commands: tuple[str, ...] = EVERYWHERE
    elsewhere: Problem | None = None
    """Why a command does not take it, and what to type instead."""
    in_files: bool = True
    """A YAML file may have the key."""
    before: str = ""
    """The flag that it stands before in a help; empty for the last place of its group."""

    @property
    def flag(self) -> str:
        """Returns the flag's name: what is on by default is turned off by it."""
        return f"no_{self.name}" if self.default is True else self.name

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def types(self) -> tuple[type, ...]:
        return () if self.kind is None else (*_KINDS[self.kind][0], *self.also)

    @property
    def told_type(self) -> str:
        return self.takes or ("" if self.kind is None else _KINDS[self.kind][1])

    def options(self) -> dict[str, Any]:
        """Returns what ``argparse`` is told of the flag."""
        if self.is_switch:
            return {"action": "store_true", "help": self.help}
        reads = self.read or (self.kind if self.kind in (int, float) else None)
        options = {"type": reads, "choices": self.choices, "metavar": self.metavar}
        return {name: value for name, value in options.items() if value is not None} | {"help": self.help}


def setting(default: Any, **said: Any) -> Any:
    """Declares a setting: the field of a dataclass with this default, and what :class:`Setting` says of it."""
    return field(default=default, metadata={"setting": Setting(default=default, **said)})


@functools.cache
def settings_of(declared: type) -> dict[str, Setting]:
    """Lists the settings of a dataclass by name, each with its types and its lever's name filled in.

    The annotation ``str | Path | None`` is of a text, in Python also of a path.
    """
    found = {}
    for each in fields(declared):
        said = each.metadata.get("setting", Setting(default=None if each.default is MISSING else each.default))
        if "setting" in each.metadata:
            first, *others = [part.partition("[")[0] for part in str(each.type).split(" | ")]
            kind = said.kind or next((kind for kind in _KINDS if kind.__name__ == first), None)
            said = replace(said, kind=kind, also=tuple(also for part in others for also in _IN_PYTHON.get(part, ())))
        lever = said.lever
        if lever is not None:
            moved: dict[str, Any] = {"moves_from": (False,), "to": True} if said.is_switch else {}
            lever = replace(lever, name=each.name, knobs=lever.knobs or (each.name,), **moved)
        found[each.name] = replace(said, name=each.name, lever=lever)
    return found


# -- checks that several settings have -----------------------------------------------------------------------------


def at_least_one(noun: str) -> Check:
    """Makes the check of a number, or of several, of something countable: ``at_least_one("GPUs")``."""

    def check(name: str, value: Any) -> Iterable[Problem]:
        for count in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(count, int) or count < 1:
                yield f"--{name} {count} is no number of {noun}", f"--{name} takes 1 or more."

    return check


def one_of(known: tuple[str, ...], told: tuple[str, ...] | None = None, prefix: str = "--") -> Check:
    """Makes the check of a word.

    Args:
        told: The words that a cure names, where it does not name all that are taken.
    """

    def check(name: str, value: Any) -> Iterable[Problem]:
        if value not in known:
            yield f"{prefix}{name} takes no {value!r}", f"{prefix}{name} takes {', '.join(told or known)}."

    return check


def that(holds: Callable[[Any], bool], problem: str, cure: str) -> Check:
    """Makes the check that something holds of a value, which ``problem`` may name: ``"{value!r} is no time"``."""

    def check(name: str, value: Any) -> Iterable[Problem]:
        if not holds(value):
            yield f"--{name} {problem.format(value=value)}", f"--{name} takes {cure}"

    return check
