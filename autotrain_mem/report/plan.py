"""A plan, as a person reads it: the decision, what it changes and at what price, and what was tried on the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import wording
from autotrain_mem.report.estimate import verdict
from autotrain_mem.report.layout import BAD, GOOD, LOUD, QUIET, Block, add, hanging, table, title
from autotrain_mem.spec import Attempt, Harm, Knobs, Lever, Plan
from autotrain_mem.spec.job import ONLINE_METHODS, ROW_NOUNS
from autotrain_mem.spec.knobs import OWN_KNOBS, knob_names
from autotrain_mem.units import format_bytes

_ROWS = "per_device_train_batch_size"
_STEPS = "gradient_accumulation_steps"
_SEGMENTS = "expandable_segments"


def plan_view(plan: Plan, *, defaults: Knobs | None) -> RenderableType:
    """The decision and everything a user needs to agree with it, or to take it elsewhere.

    Args:
        defaults: TRL's own values, which the table marks changes against; None leaves the comparison out.
    """
    parts: list[RenderableType] = [_decision(plan), *_loud_lines(plan), Text(_batch_line(plan)), _data_line(plan)]
    parts += _vllm_line(plan)
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
    """One line for each point that the search rehearsed, with what it has that the first had not."""
    if not plan.attempts:
        return Text("nothing else was tried")
    first, marks = plan.attempts[0].knobs, _marks(plan)
    made = table("", "batch", "settings", "needs", "fits", right=(0, 3))
    for number, attempt in enumerate(plan.attempts, start=1):
        settings, needed = wording.difference(attempt.knobs, first), format_bytes(attempt.required_bytes)
        marked = [sign for name, (sign, marks_on, _) in marks.items() if getattr(attempt.knobs, name) is marks_on]
        batch = " ".join([wording.batch(attempt.knobs), *marked])
        add(made, str(number), batch, settings, needed, _outcome(attempt, plan))
    heading = title(f"tried against a budget of {format_bytes(plan.estimate.budget_bytes)}")
    notes = [hanging(f"as asked for  {wording.settings(first, _asked_for(marks))}")]
    notes += [Text(f"{sign:14}{meaning}") for sign, _, meaning in marks.values()]
    return Block(Group(heading, Block(made, 2), *notes))


def _marks(plan: Plan) -> dict[str, tuple[str, bool, str]]:
    """Switches that are marked beside the batch, since attempts differ in them: by knob, (sign, when, meaning)."""
    marks: dict[str, tuple[str, bool, str]] = {}
    if len({attempt.knobs.gradient_checkpointing for attempt in plan.attempts}) > 1:
        marks["gradient_checkpointing"] = ("*", False, "without gradient checkpointing")
    expanded = {attempt.knobs.expandable_segments for attempt in plan.attempts}
    if len(expanded) > 1 or any(lever.name == _SEGMENTS for lever in plan.levers):  # else every one is as the user said
        marks[_SEGMENTS] = ("+", True, f"with {wording.segments(expandable=True)}")
    return marks


def _asked_for(marked: Iterable[str]) -> list[str]:
    """What all attempts that are as asked for share: neither the batches, nor what a mark tells."""
    varying = {_ROWS, _STEPS, "per_device_eval_batch_size", "local_rollout_forward_batch_size", *marked}
    return [field.name for field in fields(Knobs) if field.name not in varying]


def _decision(plan: Plan) -> Text:
    changed = wording.counted(len(plan.levers), "change")
    return verdict(plan.estimate, f" with {changed}" if plan.levers else " as asked for")


def _loud_lines(plan: Plan) -> list[RenderableType]:
    """What a user must not overlook: the plan trains something else than was asked for."""
    return [Text(loud, style=LOUD) for lever in plan.levers if (loud := _loud(lever))]


def _loud(lever: Lever) -> str:
    return wording.LOUD.get(lever.name, "") if lever.after is True else ""


def _batch_line(plan: Plan) -> str:
    device = "CPU" if plan.estimate.hardware.origin == "cpu" else "GPU"
    parts = f"your batch {plan.knobs.effective_batch_size} = {wording.batch(plan.knobs)} x 1 {device}"
    return f"{parts}  ({ROW_NOUNS.get(plan.method, 'rows')} at once x accumulation x devices)"


def _vllm_line(plan: Plan) -> list[RenderableType]:
    share = plan.estimate.vllm_share_bytes
    said = f"vLLM takes {format_bytes(share)} of the card for itself: --vllm_gpu_memory_utilization says how much"
    return [Text(said)] if share else []


def _data_line(plan: Plan) -> Text:
    """What becomes of the data: how long their rows are, and what is cut of them."""
    rows, tokens = plan.truncated_rows_fraction, plan.truncated_tokens_fraction
    was_read = rows is not None and tokens is not None
    if plan.method in ONLINE_METHODS:
        lengths = f"prompts of up to {plan.prompt_length} tokens and completions of {plan.knobs.completion_length}"
        return Text(f"{lengths}: no prompt is truncated" if was_read else f"{lengths} are assumed: no data were read")
    if rows is None or tokens is None:
        lost = "dropped" if plan.method == "reward" else "truncated"
        return Text(f"the dataset was not read: how much of it is {lost} is not known")
    if plan.method == "reward":
        return _dropped(plan, rows)
    noun = ROW_NOUNS.get(plan.method, "rows")
    if not rows:
        return Text(f"no {noun.removesuffix('s')} is truncated")
    cuts = any(lever.harm is Harm.DATA for lever in plan.levers)
    said = f"truncates {wording.percent(rows)} of the {noun}, which cuts {wording.percent(tokens)} of the tokens"
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
            known = "TRL has none of its own" if name in OWN_KNOBS else f"TRL's default is {wording.value(default)}"
            add(made, f"* {name}", Text(wording.value(chosen), style="bold"), Text(known, style=QUIET))
    return made


def _lever_lines(lever: Lever) -> list[RenderableType]:
    moved = f"{lever.name}  {wording.value(lever.before)} -> {wording.value(lever.after)}"
    style = LOUD if lever.harm >= Harm.WHAT_IS_TRAINED else QUIET
    lines: list[RenderableType] = [Text.assemble((moved, "bold"), "  ", (wording.HARMS[lever.harm], style))]
    if loud := _loud(lever):
        lines.append(Block(Text(loud, style=style), 2))
    return [*lines, Block(Text(lever.why), 2)]


def _outcome(attempt: Attempt, plan: Plan) -> Text:
    if not attempt.fits:
        return Text("no", style=BAD)
    chosen = attempt.knobs == plan.knobs
    return Text("chosen" if chosen else "yes", style=f"bold {GOOD}" if chosen else "")
