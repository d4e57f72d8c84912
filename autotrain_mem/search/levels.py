"""Makes the levels of harm for one job, with the settings of each. The search takes the first that fits.

A level is finer than ``Harm``: adapters on a bfloat16, an 8-bit and a 4-bit base are three levels.

Forbidding a lever forbids its direction only: ``--forbid gradient_checkpointing`` plans without recomputation, and
``--forbid micro_batch`` never shrinks the micro-batch. A knob that the user gave is pinned: no lever moves it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from itertools import combinations, product
from typing import Any, Self

from autotrain_mem.search import space as spaces
from autotrain_mem.search.adapter import SMALLEST_RANK
from autotrain_mem.search.shardings import least_shared, shardings, shared
from autotrain_mem.search.space import Space, loses_updates, with_rows
from autotrain_mem.settings import levers
from autotrain_mem.settings.declaration import LeverRow
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import METHODS, Fit, Harm, Knobs

FURTHEST: dict[Fit, Harm] = {"lossless": Harm.TIME, "rounding": Harm.ROUNDING, "all": Harm.DATA}
"""The last level of harm that each ``--fit`` allows."""


def lever_name(row: LeverRow) -> str:
    """Returns a lever's name in plans: its knob, or its own name if it moves several (``micro_batch``)."""
    return row.name if row.name == levers.MICRO_BATCH else row.knobs[0]


def harm_of(row: LeverRow, space: Space) -> Harm:
    """Returns a lever's harm in this job: none if frozen weights keep the checkpoint's precision."""
    if row.name == levers.HALF_WEIGHTS and spaces.loses_nothing(space.base, space.checkpoint_dtype):
        return Harm.NONE
    return row.harm


def check_forbid(names: Iterable[str]) -> frozenset[str]:
    """Returns the names if each is a lever; otherwise raises UsageError with suggestions for all."""
    names = frozenset(names)
    if not (unknown := sorted(names - levers.LEVERS.keys())):
        return names
    meant = {  # the lever that moves the knob of this name, or else the one with the most similar name
        name: [row.name for row in levers.LADDER if name in row.knobs]
        or get_close_matches(name, levers.LEVERS, n=1, cutoff=0.5)
        for name in unknown
    }
    guesses = [f"--forbid {guesses[0]} instead of {name}" for name, guesses in meant.items() if guesses]
    did_you_mean = f"did you mean {', '.join(guesses)}?\n" if guesses else ""
    raise UsageError(
        f"--forbid: no lever is named {', '.join(unknown)}",
        hint=f"{did_you_mean}the levers are {', '.join(levers.LEVERS)}",
    )


def allowed(row: LeverRow, space: Space) -> bool:
    """Returns whether this job's method, pins and limits allow the lever."""
    possible = {name: (getattr(space.base, name),) for name in row.needs} | {levers.SHARDING: shardings(space)}
    return (
        row.suits(METHODS[space.method])
        and all(not {*possible[name]}.isdisjoint(values) for name, values in row.needs.items())
        and all(
            _pull(other, space.base, space) == space.base or allowed(other, space)
            for other in (levers.LEVERS[name] for name in row.along)
            if other.harm == row.harm
        )
        and row.name not in space.forbid
        and not (space.is_quantized and row.quantizes)
        and harm_of(row, space) <= FURTHEST[space.fit]
        and space.pinned.isdisjoint(row.knobs)
    )


def pull_all(space: Space, names: Iterable[str]) -> Knobs:
    """Returns the requested knobs with these levers pulled, and with the allowed ones that come with them."""
    knobs = space.base
    for row in (levers.LEVERS[name] for name in names):
        for name in row.along:
            if allowed(levers.LEVERS[name], space):
                knobs = _pull(levers.LEVERS[name], knobs, space)
        knobs = _pull(row, knobs, space)
    return knobs


def moves(name: str, space: Space) -> bool:
    """Returns whether a lever may be pulled and would change anything."""
    return allowed(levers.LEVERS[name], space) and _pull(levers.LEVERS[name], space.base, space) != space.base


def _pull(row: LeverRow, knobs: Knobs, space: Space) -> Knobs:
    to: Any = spaces.half_of(knobs) if row.name == levers.HALF_WEIGHTS else row.to
    if not (moved := {name: to for name in row.knobs if getattr(knobs, name) in row.moves_from}):
        return knobs
    kept = space.pinned.union(*(levers.LEVERS[name].knobs for name in space.forbid))
    also = {name: value for name, value in row.also.items() if name not in kept}
    if row.turns_on_adapter and space.adapter is not None:
        also |= space.adapter.settings(space.pinned)
    return replace(knobs, **also, **moved)


@dataclass(frozen=True, slots=True)
class _Step:
    """Describes a level: each setting pulls at least one lever of ``own`` and one of ``offloads``, if there are any."""

    name: str
    own: tuple[str, ...]
    offloads: tuple[str, ...] = ()


OFFLOADING_ADAPTERS = tuple(name for name in levers.OFFLOADING if levers.LEVERS[name].pays_for_adapters)

LEVELS = (
    _Step("lossless", ()),
    _Step("lossless, precomputed reference", (levers.PRECOMPUTING,)),
    _Step("lossless, offloading", (), levers.OFFLOADING),
    _Step("rounding", levers.ROUNDING),
    _Step("rounding, offloading", levers.ROUNDING, levers.OFFLOADING),
    _Step("LoRA", ("lora",)),
    _Step("LoRA on an 8-bit base", ("8bit_base",)),
    _Step("QLoRA", ("4bit_base",)),
    _Step("QLoRA, offloading", ("4bit_base",), OFFLOADING_ADAPTERS),
)
"""Batches, sharding and checkpointing may change on each level.

Liger's kernels are tried on each level: they save memory, but its loss is slow for few tokens and a large vocabulary.
A precomputed reference saves a forward pass in each step, but costs one of all rows before the first.
Offloading costs only time, but it depends on the host's memory and link, which a card's data sheet does not give, so
plans without it come first. An adapter's optimizer state is too small to be worth offloading, and a quantized base is
faster than offloaded activations. No level has a setting that loses updates which the requested job keeps.
"""
SHORTER_ROWS = "shorter rows"
SMALLER_IMAGES_LEVEL = "smaller images"
"""Names the level of a plan with shrunk images, in place of the level that the search chose (``planning.plan``)."""

Line = tuple[Knobs, ...]
"""One setting, with or without checkpointing, at every allowed micro-batch, smallest first.

Memory grows along the line except at its end, where the whole batch is one micro-batch and no gradients accumulate.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Holds the settings of one level of harm. ``lengths`` is empty except on the level that cuts rows.

    Example, for TRL's defaults: ``rounding`` has three settings: bfloat16 weights, an 8-bit optimizer, and both.
    """

    name: str
    space: Space
    harm: Harm
    settings: tuple[Knobs, ...]
    """The requested knobs with the level's levers, gentlest first; batches, checkpointing and sharding stay free."""
    lengths: tuple[int, ...] = ()
    offloads: bool = False
    """Whether each of its settings needs the host's memory."""
    ranks: tuple[int, ...] = ()
    """Smaller ranks of the level's adapter, the largest first, to try if its own does not fit."""

    def of_rank(self, rank: int) -> Self:
        """Returns the level with an adapter of a smaller rank."""
        settings = tuple(replace(setting, lora_r=rank) for setting in self.settings)
        return replace(self, settings=settings, ranks=tuple(each for each in self.ranks if each < rank))

    def on_layers(self) -> Self | None:
        """Returns the level with an adapter on layers alone; None if it adapts no experts."""
        adapter = self.space.adapter
        moved = [] if adapter is None else [adapter.on_layers(setting) for setting in self.settings]
        settings = tuple(setting for setting in moved if setting is not None)
        return replace(self, settings=settings, ranks=_ranks(self.space, settings[0])) if settings else None

    @property
    def lines(self) -> tuple[Line, ...]:
        """Returns every line, those with the fewest levers that cost time first."""
        ways = [way for setting in self.settings for way in shared(self.space, setting)]
        choices = checkpointing_choices(self.space)
        return tuple(line(self.space, way, checkpointing=each) for way in ways for each in choices)

    @property
    def most(self) -> Knobs:
        """Returns the point with the fewest levers, the most rows and the sharding that needs least."""
        gentlest = least_shared(self.space, self.settings[0])
        return line(self.space, gentlest, checkpointing=checkpointing_choices(self.space)[0])[-1]

    @property
    def least(self) -> Knobs:
        """Returns the point that needs the least memory, except perhaps for :attr:`at_once`."""
        return self._shortest(self._least_line[0])

    @property
    def at_once(self) -> Knobs:
        """Returns :attr:`least` in one micro-batch: more activations, and no gradients before the backward pass."""
        return self._shortest(self._least_line[-1])

    @property
    def floors(self) -> tuple[Knobs, Knobs]:
        """Returns the two candidates for the level's least memory."""
        return self.least, self.at_once

    @property
    def at_every_length(self) -> tuple[Line, Line]:
        """Returns both floors at every length, the requested length last."""
        lengths = (*self.lengths, self.settings[-1].max_length)
        least, at_once = (tuple(replace(floor, max_length=each) for each in lengths) for floor in self.floors)
        return least, at_once

    @property
    def _least_line(self) -> Line:
        strongest = least_shared(self.space, self.settings[-1])
        return line(self.space, strongest, checkpointing=checkpointing_choices(self.space)[-1])

    def _shortest(self, knobs: Knobs) -> Knobs:
        return replace(knobs, max_length=self.lengths[0]) if self.lengths else knobs


@lru_cache(maxsize=64)
def levels(space: Space) -> tuple[Level, ...]:
    """Returns a job's levels, least harm first; the first holds the job as given."""
    check_forbid(space.forbid)
    climbed: list[Level] = []
    seen: set[Knobs] = set()
    steps: tuple[_Step, ...] = LEVELS
    trained = [name for name in levers.TRAINED if moves(name, space)]
    # Offloading comes after the adapters where there is no 4-bit base.
    if trained and trained[-1] != levers.TRAINED[-1]:
        last = next(step for step in LEVELS if step.own == (trained[-1],))
        steps = (*LEVELS, _Step(f"{last.name}, offloading", last.own, OFFLOADING_ADAPTERS))
    for step in steps:
        settings = tuple(dict.fromkeys(setting for setting in _settings(space, step) if setting not in seen))
        seen.update(settings)
        if settings:
            harm = max((levers.LEVERS[name].harm for name in step.own), default=Harm.TIME)
            ranks, offloads = _ranks(space, settings[0]), bool(step.offloads)
            climbed.append(
                Level(name=step.name, space=space, harm=harm, settings=settings, offloads=offloads, ranks=ranks)
            )
    may_cut = allowed(levers.LEVERS[MAX_LENGTH], space)
    if may_cut and (lengths := spaces.lengths_below(space.row_tokens(space.base), space.least_length)):
        least = (_least(space),)
        climbed.append(Level(name=SHORTER_ROWS, space=space, harm=Harm.DATA, settings=least, lengths=lengths))
    return tuple(climbed)


def strongest(climbed: Sequence[Level]) -> Level:
    """Returns the level that needs the least memory: the last one with an adapter, or else the last of all."""
    return max(reversed(climbed), key=lambda level: level.settings[-1].use_peft)


def _settings(space: Space, step: _Step) -> Iterator[Knobs]:
    """Yields every set of the level's levers with every set of offloading levers, fewest offloading levers first; then
    the same with Liger's kernels."""
    free = [name for name in levers.ROUNDING if harm_of(levers.LEVERS[name], space) is Harm.NONE and moves(name, space)]
    own = tuple(name for name in step.own if name not in free)
    if space.base.processes == 1 and step not in LEVELS[:2] and not {*levers.TRAINED}.intersection(own):
        free += filter(partial(moves, space=space), [levers.PRECOMPUTING])
    pulled = [chosen for chosen in _sets(own, space) if chosen or not step.own]
    if free:  # levers that cost nothing are always pulled, except in the job as requested
        pulled = [*([()] if step == LEVELS[0] else []), *((*free, *chosen) for chosen in pulled)]
    offloads = [chosen for chosen in _sets(step.offloads, space) if chosen or not step.offloads]
    offloads.sort(key=lambda chosen: levers.OFFLOADED_SHARDS in chosen)  # the last setting must need least
    for kernels, offloaded, chosen in product(_sets((levers.LIGER,), space), offloads, pulled):
        replaced = {name for lever in offloaded for name in levers.LEVERS[lever].instead_of}
        setting = pull_all(space, (*kernels, *chosen, *offloaded))
        is_allowed = setting == space.base or spaces.can_scale(setting)
        is_allowed &= loses_updates(setting) <= loses_updates(space.base)
        # A frozen base has no updates, and those of an adapter in float32 lose nothing.
        is_allowed &= not (setting.use_peft and setting.sums_up_rounding) or space.base.sums_up_rounding
        if replaced.isdisjoint(chosen) and is_allowed and shared(space, setting):
            yield setting


def _sets(names: tuple[str, ...], space: Space) -> list[tuple[str, ...]]:
    moving = [name for name in names if moves(name, space)]
    return [chosen for size in range(len(moving) + 1) for chosen in combinations(moving, size)]


def _least(space: Space) -> Knobs:
    """Returns the settings that need the least memory, over all levels."""
    trained = [name for name in levers.TRAINED if moves(name, space)][-1:]
    most = (*trained, *OFFLOADING_ADAPTERS) if trained else (levers.PRECOMPUTING, *levers.OFFLOADING, *levers.ROUNDING)
    names = [name for name in (levers.LIGER, *most) if moves(name, space)]
    replaced = {other for each in names for other in levers.LEVERS[each].instead_of}
    moving: list[str] = []
    for name in (each for each in names if each not in replaced):
        setting = pull_all(space, (*moving, name))
        is_kept = shared(space, setting) and loses_updates(setting) <= loses_updates(space.base)
        if is_kept and least_shared(space, setting).sharding == least_shared(space, space.base).sharding:
            moving.append(name)
    least = pull_all(space, moving)
    least = (space.adapter and space.adapter.on_layers(least)) or least
    return replace(least, lora_r=min(_ranks(space, least), default=least.lora_r))


def _ranks(space: Space, setting: Knobs) -> tuple[int, ...]:
    """Lists the smaller ranks of a level's adapter: 32, 16 and 8 for 64; none if the user chose the rank."""
    if space.adapter is None or not setting.use_peft or "lora_r" in space.pinned:
        return ()
    halves = (setting.lora_r >> shift for shift in range(1, setting.lora_r.bit_length()))
    return tuple(rank for rank in halves if rank >= SMALLEST_RANK)


def checkpointing_choices(space: Space) -> tuple[bool, ...]:
    """Returns the allowed values of gradient_checkpointing, the fastest first. Turning it off is never forbidden."""
    lever = levers.LEVERS["gradient_checkpointing"]
    if space.pinned.intersection(lever.knobs) or not lever.suits(METHODS[space.method]):
        return (space.base.gradient_checkpointing,)
    return (False,) if lever.name in space.forbid else (False, True)


@lru_cache(maxsize=256)
def line(space: Space, setting: Knobs, *, checkpointing: bool) -> Line:
    """Returns one setting at every allowed micro-batch."""
    lever = levers.LEVERS["micro_batch"]
    fixed = lever.name in space.forbid or not lever.suits(METHODS[space.method])
    smallest = space.base.per_device_train_batch_size if fixed else 1
    chosen = replace(setting, gradient_checkpointing=checkpointing)

    def at_rows(rows: int) -> Knobs:
        """Returns the setting with this number of rows; other batches follow the micro-batch if allowed."""
        batches = ("eval_batch", *(["rollout_batch"] if rows < space.share else []))
        following = [name for lever in batches for name in _following(space, lever)]
        return replace(with_rows(chosen, rows), **{name: min(getattr(space.base, name), rows) for name in following})

    return tuple(at_rows(rows) for rows in spaces.micro_batches(space)[::-1] if rows >= smallest)


def _following(space: Space, lever: str) -> tuple[str, ...]:
    row = levers.LEVERS[lever]
    return tuple(name for name in row.knobs if allowed(row, space) and getattr(space.base, name) is not None)


def eased(space: Space, point: Knobs) -> tuple[Knobs, ...]:
    """Returns the point, then copies that generate 2, 4, ... times as many rows at once, up to the requested number.

    Example: from 2 rows at once, with 16 rows in a rollout and TRL's default of 64: 2, 4, 8, and 64 (all 16 at once).
    """
    points = [point]
    for name in _following(space, "rollout_batch"):
        asked, rows = getattr(space.base, name), getattr(point, name)
        while rows < asked:
            rows = 2 * rows if 2 * rows < min(asked, space.share) else asked
            points.append(replace(point, **{name: rows}))
    return tuple(points)
