"""A plan, as a person reads it: the decision, what it changes and at what price, and what was tried on the way."""

from __future__ import annotations

from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import wording
from autotrain_mem.report.estimate import verdict
from autotrain_mem.report.layout import BAD, GOOD, LOUD, QUIET, Block, add, hanging, table, title
from autotrain_mem.spec import Attempt, Harm, Knobs, Lever, Plan
from autotrain_mem.spec.job import ONLINE_METHODS
from autotrain_mem.spec.knobs import knob_names
from autotrain_mem.units import format_bytes

_ROWS = "per_device_train_batch_size"
_STEPS = "gradient_accumulation_steps"


def plan_view(plan: Plan, *, defaults: Knobs | None) -> RenderableType:
    """The decision and everything a user needs to agree with it, or to take it elsewhere.

    Args:
        defaults: TRL's own values, which the table marks changes against; None leaves the comparison out.
    """
    parts: list[RenderableType] = [_decision(plan), *_loud_lines(plan), Text(_batch_line(plan)), _truncation(plan)]
    parts += [Text(), title("settings"), Block(_settings_table(plan, defaults), 2)]
    if plan.levers:
        parts += [Text(), title("changed, least harm first")]
        for lever in sorted(plan.levers, key=lambda lever: lever.harm):
            parts += [Block(line, 2) for line in _lever_lines(lever)]
    parts += _flags(plan)
    searched = f"{wording.counted(len(plan.attempts), 'rehearsal')} in {wording.duration(plan.seconds)}"
    return Block(Group(*parts, Text(), Text(searched, style=QUIET)))


def _flags(plan: Plan) -> list[RenderableType]:
    """PPO has no command of TRL's; ours takes the same flags."""
    command = "autofit" if plan.method == "ppo" else "trl"
    flags = [Block(Text(line), 2) for line in wording.flag_lines(plan.method, plan.knobs)]
    own = wording.own_flags(plan.knobs)
    more = [Block(Text(f"and only autofit has {own}"), 2)] if own else []
    return [Text(), title(f"the same settings as flags of {command} {plan.method}"), *flags, *more]


def attempts_view(plan: Plan) -> RenderableType:
    """One line for each point that the search rehearsed, with the settings in which they differ."""
    if not plan.attempts:
        return Text("nothing else was tried")
    tried = [attempt.knobs for attempt in plan.attempts]
    varying = [name for name in wording.differing(tried) if name not in (_ROWS, _STEPS)]
    made = table("", "batch", *varying, "needs", "", right=(0, 2 + len(varying)))
    for number, attempt in enumerate(plan.attempts, start=1):
        values = [wording.value(getattr(attempt.knobs, name)) for name in varying]
        needed = format_bytes(attempt.required_bytes)
        add(made, str(number), wording.batch(attempt.knobs), *values, needed, _outcome(attempt, plan))
    heading = title(f"tried against a budget of {format_bytes(plan.estimate.budget_bytes)}")
    return Block(Group(heading, Block(made, 2), _same_in_all(tried[0], varying)))


def _decision(plan: Plan) -> Text:
    changed = wording.counted(len(plan.levers), "change")
    return verdict(plan.estimate, f" with {changed}" if plan.levers else " as asked for")


def _loud_lines(plan: Plan) -> list[RenderableType]:
    """What a user must not overlook: the plan trains something else than was asked for."""
    adapter = any(_is_adapter(lever) for lever in plan.levers)
    return [Text(wording.ADAPTER_ONLY, style=LOUD)] if adapter else []


def _is_adapter(lever: Lever) -> bool:
    return lever.name == "use_peft" and bool(lever.after)


def _batch_line(plan: Plan) -> str:
    device = "CPU" if plan.estimate.hardware.origin == "cpu" else "GPU"
    parts = f"your batch {plan.knobs.effective_batch_size} = {wording.batch(plan.knobs)} x 1 {device}"
    return f"{parts}  (rows at once x accumulation x devices)"


def _truncation(plan: Plan) -> Text:
    rows, tokens = plan.truncated_rows_fraction, plan.truncated_tokens_fraction
    if rows is None or tokens is None:
        return Text("the dataset was not read: how much of it is truncated is not known")
    if plan.method in ONLINE_METHODS:
        return Text(f"completions of {plan.knobs.completion_length} tokens after the longest prompt; none is truncated")
    if plan.method == "reward":
        return _dropped(plan, rows)
    if not rows:
        return Text("no row is truncated")
    cuts = any(lever.harm is Harm.DATA for lever in plan.levers)
    said = f"truncates {wording.percent(rows)} of the rows, which cuts {wording.percent(tokens)} of the tokens"
    return Text(said, style=LOUD if cuts else "")


def _dropped(plan: Plan, rows: float) -> Text:
    """Reward training filters pairs by max_length instead of truncating them."""
    if not rows:
        return Text("no pair is dropped")
    said = f"drops {wording.percent(rows)} of the pairs: those with a side longer than {plan.knobs.max_length} tokens"
    return Text(said, style=LOUD)


def _settings_table(plan: Plan, defaults: Knobs | None) -> Table:
    """A star marks what differs from TRL's default, so that it shows without colour too."""
    made = table("", "", "", show_header=False)
    for name in knob_names(plan.method, plan.knobs):
        chosen = getattr(plan.knobs, name)
        default = chosen if defaults is None else getattr(defaults, name)
        if chosen == default:
            add(made, f"  {name}", wording.value(chosen))
        else:
            note = Text(f"TRL's default is {wording.value(default)}", style=QUIET)
            add(made, f"* {name}", Text(wording.value(chosen), style="bold"), note)
    return made


def _lever_lines(lever: Lever) -> list[RenderableType]:
    moved = f"{lever.name}  {wording.value(lever.before)} -> {wording.value(lever.after)}"
    style = LOUD if lever.harm >= Harm.WHAT_IS_TRAINED else QUIET
    lines: list[RenderableType] = [Text.assemble((moved, "bold"), "  ", (wording.HARMS[lever.harm], style))]
    if _is_adapter(lever):
        lines.append(Block(Text(wording.ADAPTER_ONLY, style=style), 2))
    return [*lines, Block(Text(lever.why), 2)]


def _outcome(attempt: Attempt, plan: Plan) -> Text:
    if not attempt.fits:
        return Text("does not fit", style=BAD)
    chosen = attempt.knobs == plan.knobs
    return Text("fits, chosen" if chosen else "fits", style=f"bold {GOOD}" if chosen else "")


def _same_in_all(knobs: Knobs, varying: list[str]) -> RenderableType:
    same = [field.name for field in fields(Knobs) if field.name not in (*varying, _ROWS, _STEPS)]
    if not same:
        return Text("nothing is the same in all")
    return hanging(f"the same in all  {wording.settings(knobs, same)}")
