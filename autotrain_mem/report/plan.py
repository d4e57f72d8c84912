"""A plan, as a person reads it: the decision, what it changes and at what price, and what else there was."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.decision import changes, decision, elsewhere, facts, proposed
from autotrain_mem.report.layout import QUIET, Block, add, table, title
from autotrain_mem.spec import Plan
from autotrain_mem.spec.knobs import OWN_KNOBS, knob_names


def plan_view(plan: Plan) -> RenderableType:
    """The decision and everything a user needs to agree with it, or to take it elsewhere."""
    parts: list[RenderableType] = [*decision(plan), Block(facts(plan), 2)]
    parts += [Text(), title("settings"), Block(_settings_table(plan), 2)]
    parts += [*changes(plan), *proposed(plan), *elsewhere(plan), *_flags(plan)]
    searched = f"{formatting.counted(len(plan.attempts), 'rehearsal')} in {formatting.duration(plan.seconds)}"
    return Block(Group(*parts, Text(), Text(searched, style=QUIET)))


def _settings_table(plan: Plan) -> Table:
    """A star marks what differs from TRL's default, so that it shows without colour too."""
    made = table("", "", "", show_header=False)
    for name in knob_names(plan.method, plan.knobs):
        chosen, default = getattr(plan.knobs, name), getattr(plan.defaults, name)
        if chosen == default:
            add(made, f"  {name}", formatting.value(chosen))
        else:
            known = "TRL has none of its own" if name in OWN_KNOBS else f"TRL's default is {formatting.value(default)}"
            add(made, f"* {name}", Text(formatting.value(chosen), style="bold"), Text(known, style=QUIET))
    return made


def _flags(plan: Plan) -> list[RenderableType]:
    """PPO has no command of TRL's; ours takes the same flags."""
    command = "autofit" if plan.method == "ppo" else "trl"
    flags = [Block(Text(line), 2) for line in formatting.flag_lines(plan.method, plan.knobs)]
    own = formatting.own_flags(plan.knobs)
    more = [Block(Text(f"and only autofit has {own}"), 2)] if own else []
    return [Text(), title(f"the same settings as flags of {command} {plan.method}"), *flags, *more]
