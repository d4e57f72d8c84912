"""Builds the tables of a page: what was changed, what was tried, the settings, the other levels, and the cards."""

from __future__ import annotations

from collections.abc import Iterator

from autotrain_mem.report import formatting
from autotrain_mem.report.content.material import CardOffer, Material
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Plan
from autotrain_mem.types.knobs import LAUNCH_KNOBS, OWN_KNOBS, knob_names
from autotrain_mem.types.page import Grid


def grids(material: Material) -> Iterator[Grid]:
    """Yields the tables in their order; one with no rows is left out."""
    plan = material.plan
    every = (
        _changes(plan),
        _attempts(plan),
        _levels(plan),
        _settings(plan),
        _at_the_peak(plan),
        _cards(material),
        _incidents(plan),
        _not_counted(plan),
    )
    yield from (grid for grid in every if grid.rows)


def _changes(plan: Plan) -> Grid:
    rows = [
        (
            lever.name,
            formatting.value(lever.before),
            formatting.value(lever.after),
            formatting.HARMS[lever.harm],
            lever.why,
        )
        for lever in sorted(plan.levers, key=lambda each: each.harm)
    ]
    note = "Least harm first; a setting that you gave is never changed."
    columns = ("setting", "from", "to", "what it costs", "why")
    return Grid(key="changes", title="What was changed", note=note, columns=columns, rows=tuple(rows))


def _attempts(plan: Plan) -> Grid:
    """Lists every configuration that the search rehearsed, in the order in which it was tried."""
    first = plan.attempts[0].knobs if plan.attempts else plan.knobs
    chosen = [at for at, each in enumerate(plan.attempts) if each.knobs == plan.knobs]
    rows = []
    for number, each in enumerate(plan.attempts, start=1):
        speed = formatting.rate(each.tokens_per_second) if each.fits and each.tokens_per_second else ""
        layers = "whole" if each.rehearsed_layers is None else formatting.counted(each.rehearsed_layers, "layer")
        checkpointing = "on" if each.knobs.gradient_checkpointing else "off"
        settings = formatting.difference(each.knobs, first)
        needs = format_bytes(each.required_bytes)
        fits = "fits" if each.fits else "does not fit"
        rows.append((str(number), formatting.batch(each.knobs), checkpointing, settings, layers, needs, fits, speed))
    return Grid(
        key="attempts",
        title="What was tried",
        note=f"Each was rehearsed and held against the budget of {format_bytes(plan.estimate.budget_bytes)}.",
        columns=("", "batch", "checkpointing", "settings", "model", "needs", "", "tokens/s"),
        rows=tuple(rows),
        right=(0, 5, 7),
        strong=tuple(chosen[-1:]),
    )


def _levels(plan: Plan) -> Grid:
    rows = []
    for each in plan.alternatives:
        speed = f"{each.ratio:.2f} x" if each.ratio is not None else ""
        where = (
            "fits"
            if each.fits
            else "does not fit" + (f"; would on {', '.join(each.would_fit)}" if each.would_fit else "")
        )
        settings = f"{formatting.batch(each.knobs)}, {formatting.difference(each.knobs, plan.defaults)}"
        rows.append((each.level, format_bytes(each.required_bytes), where, speed, settings))
    return Grid(
        key="levels",
        title="Other levels of harm",
        note=f"The plan is of the level {plan.level}; speeds are relative to it.",
        columns=("level", "needs", "", "speed", "settings"),
        rows=tuple(rows),
        right=(1, 3),
    )


def _settings(plan: Plan) -> Grid:
    rows: list[tuple[str, ...]] = []
    strong: list[int] = []
    for name in knob_names(plan.method, plan.knobs):
        chosen, default = getattr(plan.knobs, name), getattr(plan.defaults, name)
        is_ours = name in (*OWN_KNOBS, *LAUNCH_KNOBS)
        if chosen != default:
            strong.append(len(rows))
        rows.append((name, formatting.value(chosen), "none" if is_ours else formatting.value(default)))
    return Grid(
        key="settings",
        title="Settings",
        note="Rows that stand out differ from TRL's default.",
        columns=("setting", "value", "TRL's default"),
        rows=tuple(rows),
        strong=tuple(strong),
    )


def _at_the_peak(plan: Plan) -> Grid:
    """Lists where the bytes are at the peak: by owner, then the modules that hold most of what comes and goes."""
    memory = plan.estimate.memory
    rows = [
        (formatting.OWNERS[owner], "", format_bytes(size_bytes))
        for owner, size_bytes in memory.owners_at_peak.items()
        if size_bytes
    ]
    rows += [
        ("of which activations and temporary", module, format_bytes(size)) for module, size in memory.modules_at_peak
    ]
    estimate = plan.estimate
    rows += [("cached by the allocator", "", format_bytes(estimate.cached_bytes))]
    rows += [("outside torch", "", format_bytes(estimate.outside_bytes))]
    return Grid(
        key="peak",
        title=f"Where the bytes are at the peak, in the {formatting.PHASES[memory.peak_phase]} phase",
        note="",
        columns=("owner", "module", "bytes"),
        rows=tuple(rows),
        right=(2,),
    )


def _cards(material: Material) -> Grid:
    """Lists known cards with the same kernels: whether these settings fit, and what they are rented for."""
    plan = material.plan
    rows: list[tuple[str, ...]] = []
    strong: list[int] = []
    for offer in sorted(material.cards, key=lambda each: (not each.fits, each.hardware.total_bytes)):
        if offer.hardware.name == plan.estimate.hardware.name:
            strong.append(len(rows))
        rows.append(_card(offer, plan))
    return Grid(
        key="cards",
        title="These settings on other cards",
        note="Cards that run the same kernels; prices are dated listings and move.",
        columns=("card", "memory", "needs", "budget", "", "price an hour", "seen"),
        rows=tuple(rows),
        right=(1, 2, 3, 5),
        strong=tuple(strong),
    )


def _card(offer: CardOffer, plan: Plan) -> tuple[str, ...]:
    price, count = offer.price, plan.knobs.processes
    hourly = "" if price is None else formatting.money(price.per_hour * count, price.currency)
    return (
        offer.hardware.name if count == 1 else f"{count} x {offer.hardware.name}",
        format_bytes(offer.hardware.total_bytes),
        format_bytes(offer.required_bytes),
        format_bytes(offer.budget_bytes),
        "fits" if offer.fits else "does not fit",
        hourly,
        "" if price is None else ", ".join(filter(None, [price.provider, price.seen])),
    )


def _incidents(plan: Plan) -> Grid:
    """Lists how often the device was full, and where another process went on."""
    experience = plan.experience
    rows = [
        (str(each.step), "out of memory", each.phase.replace("_", " "), each.remedy) for each in experience.incidents
    ]
    rows += [
        (str(each.step), "restart", each.cause, each.change or "the same settings") for each in experience.restarts
    ]
    return Grid(
        key="incidents",
        title="What the run survived",
        note="",
        columns=("after step", "what", "where", "what was done"),
        rows=tuple(rows),
        right=(0,),
    )


def _not_counted(plan: Plan) -> Grid:
    rows = tuple((sentence,) for sentence in (*plan.warnings, *plan.estimate.memory.not_counted))
    title = "Warnings, and what the prediction does not count"
    return Grid(key="not-counted", title=title, note="", columns=("",), rows=rows)
