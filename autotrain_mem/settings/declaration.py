"""Declares each setting once; flags, YAML keys, checks and levers are derived from the declaration.

A setting is a field of a dataclass. ``settings.own`` holds the settings that a plan can decide; ``types.autofit``,
``planning.run_request`` and ``cli.flags`` hold further options of a plan, a run and a command.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from autotrain_mem.settings.old_names import old_value
from autotrain_mem.support.errors import Problem

Check = Callable[[str, Any], Iterable[Problem]]
"""A function that takes a setting's name and value, and yields what is wrong."""


class Harm(IntEnum):
    """Ranks what a lever costs the training; a search tries less harmful levers first."""

    NONE = 0
    TIME = 1
    ROUNDING = 2
    WHAT_IS_TRAINED = 3
    DATA = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Savings:
    """Holds a rough guess of a lever's savings, which decides where a search begins."""

    kept: float = 1.0
    """Share of a micro-batch's memory that stays on the device; weights, gradients and optimizer state do not count."""
    taken: float = 0.0
    """Share of the optimizer state that leaves the device."""
    slower: float = 1.0
    """Factor by which a step takes longer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeverRow:
    """Describes one lever. ``moves_from`` and ``to`` are values of its knob; a lever over a range has neither."""

    name: str = ""
    """The lever's name. For a setting's lever, ``settings_of`` sets ``name`` and ``knobs``, and for a switch also
    ``moves_from`` and ``to``."""
    harm: Harm
    knobs: tuple[str, ...] = ()
    """What it sets; empty for the knob of its own name."""
    moves_from: tuple[Any, ...] = ()
    to: Any = None
    also: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that have an effect only after this lever is pulled -> their values, unless the user set them."""
    along: tuple[str, ...] = ()
    """Levers pulled along, if allowed. This one is allowed only if each of the same harm is, or changes nothing."""
    instead_of: tuple[str, ...] = ()
    """Levers that this one makes pointless or impossible."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Another knob -> those of its values with which this lever works."""
    suits: Callable[[Any], bool] = lambda method: True
    """Returns whether a method with these facts (``types.methods_table``) has this lever."""
    quantizes: bool = False
    """Whether it quantizes the checkpoint's weights, which works only once."""
    offloads: bool = False
    """Whether it uses host memory and the link to the host; no card's data sheet describes these."""
    pays_for_adapters: bool = False
    """Whether it offloads much with an adapter too, and not only the adapter's small optimizer state."""
    steps_on_host: bool = False
    """Whether the optimizer's step uses no memory on the device."""
    usual: Savings = Savings()
    at_best: Savings = Savings()
    """The most that it can save; a point that would not fit even then is ruled out without a rehearsal. Logits and one
    layer stay on the device, whatever is recomputed or offloaded."""
    reason: str
    """What the lever does and what it costs, in one line for the user."""
    turns_on_adapter: bool = False
    """Whether it also sets the adapter's targets, rank and learning rate (``search.adapter``)."""
    without: str = ""
    """The beginning of the sentence on the memory needed without this lever: ``without rounding it needs``."""
    if_reversed: str = ""
    """The reason shown if the lever is reversed: the micro-batch is larger, or a switch is turned off."""
    words: str = ""
    """Its name in a line of settings; empty if the knob is shown otherwise."""
    not_sharded: tuple[str, ...] = ()
    """Why it does not work with a sharded model (FSDP), and what does; empty if it works."""
    warning: str = ""
    """What a user must not overlook, if the lever changes what is trained."""
    not_counted: tuple[str, ...] = ()
    """Sentences on its costs that an estimate leaves out; ``rehearsal.cuda`` gives the sources."""


class TakenBy(Enum):
    """Names the consumer of a knob that is not an argument of TRL."""

    OWN = "autofit applies it itself"
    LAUNCH = "it determines how processes are launched (``parallel``)"


class Group(Enum):
    """Names the groups of flags in a help text, in their order."""

    JOB = "what to train"
    DEVICE = "where it must fit"
    SEARCH = "what may be changed to make it fit"
    OUTPUT = "what to do and print"


TRAIN, PLAN, ESTIMATE = "train", "plan", "estimate"
"""Commands: ``autofit METHOD``, ``autofit plan METHOD`` and ``autofit estimate METHOD``."""

_KINDS: Mapping[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
}
"""Kind -> its Python types, and its name in messages."""
_IN_PYTHON: Mapping[str, tuple[type, ...]] = {"Path": (Path,), "Mapping": (Mapping,), "Collection": (tuple, list)}
"""Another name in an annotation -> types that are accepted in Python only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Declares one setting. If it has a ``help``, it is a flag and a key of a YAML file."""

    name: str = ""
    default: Any = None
    kind: type | None = None
    """The type of its value, from its annotation; None if checks decide, or if users cannot set it."""
    also: tuple[type, ...] = ()
    """Types that are accepted in Python only."""
    takes: str = ""
    """The description of its type in messages; empty for the usual one."""
    check: Check | None = None
    where: TakenBy | None = None
    """What applies it; None if TRL does, or if it is not a knob of a plan."""
    lever: LeverRow | None = None
    accelerate: str = ""
    """Its key in the config of ``accelerate launch``, if it has one."""
    of_deepspeed: bool = False
    """Whether DeepSpeed's config has it."""

    help: str = ""
    group: Group = Group.SEARCH
    metavar: str | None = None
    """The name of its value in a help; None for ``N`` if it is a whole number."""
    choices: tuple[str, ...] | None = None
    read: Callable[[str], Any] | None = None
    """Parses the flag's text; None if the kind is enough to parse it."""
    short: str = ""
    commands: tuple[str, ...] = (TRAIN, PLAN, ESTIMATE)
    elsewhere: Problem | None = None
    """Why other commands do not take it, and what to type instead."""
    in_files: bool = True
    """Whether a YAML file may have the key."""
    before: str = ""
    """The flag before which a help lists it; empty for the end of its group."""

    @property
    def flag(self) -> str:
        """Returns the flag's name; if the default is True, the flag turns the setting off."""
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
        """Returns the flag's options for ``argparse``."""
        if self.is_switch:
            return {"action": "store_true", "help": self.help}
        reads = self.read or (self.kind if self.kind in (int, float) else None)
        options = {
            "type": reads,
            "choices": self.choices,
            "metavar": self.metavar or ("N" if self.kind is int else None),
        }
        return {name: value for name, value in options.items() if value is not None} | {"help": self.help}


def setting(default: Any = None, **said: Any) -> Any:
    """Declares a setting: a dataclass field with this default and these values of :class:`Setting`."""
    return field(default=default, metadata={"setting": Setting(default=default, **said)})


@functools.cache
def settings_of(declared: type) -> dict[str, Setting]:
    """Lists the settings of a dataclass by name, with their types and their levers' names filled in.

    Annotations must be strings (``from __future__ import annotations``). A ``Path`` is accepted in Python only.
    """
    found = {}
    for each in fields(declared):
        said = each.metadata.get("setting", Setting(default=None if each.default is MISSING else each.default))
        if "setting" in each.metadata:
            assert isinstance(each.type, str), "a module that declares settings imports annotations from __future__"
            first, *others = [part.partition("[")[0] for part in str(each.type).split(" | ")]
            kind = said.kind or next((kind for kind in _KINDS if kind.__name__ == first), None)
            said = replace(said, kind=kind, also=tuple(also for part in others for also in _IN_PYTHON.get(part, ())))
        if (lever := said.lever) is not None:
            moved: dict[str, Any] = {"moves_from": (False,), "to": True} if said.is_switch else {}
            lever = replace(lever, name=each.name, knobs=lever.knobs or (each.name,), **moved)
        found[each.name] = replace(said, name=each.name, lever=lever)
    return found


def up_to(most: int, noun: str) -> Check:
    """Makes the check that a number, or each of several, is from 1 to ``most``: ``up_to(1_024, "GPUs")``."""

    def check(name: str, value: Any) -> Iterable[Problem]:
        for count in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(count, int) or not 1 <= count <= most:
                yield f"--{name} {count} is not a possible number of {noun}", f"--{name} takes 1 to {most:,}."

    return check


def one_of(known: tuple[str, ...], prefix: str = "--") -> Check:
    """Makes the check that a value is in ``known``."""

    def check(name: str, value: Any) -> Iterable[Problem]:
        if value not in known:
            yield (
                f"{prefix}{name} does not take {value!r}",
                f"{prefix}{name} takes {', '.join(known)}.{old_value(str(value))}",
            )

    return check


def that(holds: Callable[[Any], bool], problem: str, cure: str) -> Check:
    """Makes the check of a condition; ``problem`` can contain the value: ``"{value!r} is not a time"``."""

    def check(name: str, value: Any) -> Iterable[Problem]:
        if not holds(value):
            yield f"--{name} {problem.format(value=value)}", f"--{name} takes {cure}"

    return check
