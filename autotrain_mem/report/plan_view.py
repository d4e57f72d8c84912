"""What a plan decides, as a person reads it: the facts, what it changes and at what price, and what else there was."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autotrain_mem.report import formatting
from autotrain_mem.report.estimate_view import caches, verdict
from autotrain_mem.report.layout import BAD, LOUD, QUIET, Indented, add, section, table
from autotrain_mem.search.changes import against
from autotrain_mem.settings.knobs import APPLIED, NOT_TRLS, knob_names
from autotrain_mem.settings.levers import WARNINGS
from autotrain_mem.settings.own import OF_DEEPSPEED, SHARE_TOKENS, flag_words
from autotrain_mem.support.units import amount, counted, duration, format_bytes, money, percent
from autotrain_mem.types import Candidate, DataSummary, Estimate, Harm, Lever, Plan
from autotrain_mem.types.data import PERCENTILES
from autotrain_mem.types.estimate import STEPS
from autotrain_mem.types.gpu_comparison import LargestValue
from autotrain_mem.types.hardware import Price
from autotrain_mem.types.methods_table import METHODS


def searched(plan: Plan) -> str:
    """``6 rehearsals in 41.3 s``."""
    return f"{counted(len(plan.attempts), 'rehearsal')} in {duration(plan.seconds)}"


def plan_verdict(plan: Plan) -> Text:
    """Returns whether it fits, and with how many changes."""
    return verdict(plan.estimate, f" with {counted(len(plan.levers), 'change')}" if plan.levers else " as asked for")


def decision(plan: Plan) -> list[Text]:
    """The verdict, and what a user must not overlook: that it trains something else; questions come last."""
    sentences = [Text(sentence, style=LOUD) for sentence in filter(None, map(loud, plan.levers))]
    asked = [Text(f"a question: {each.why}; {each.flags} takes it", style=LOUD) for each in plan.questions]
    return [plan_verdict(plan), *sentences, *asked]


def loud(lever: Lever) -> str:
    """Returns the warning of a pulled lever that changes what is trained; empty if it has none."""
    return WARNINGS.get(lever.name, "") if lever.harm is Harm.WHAT_IS_TRAINED else ""


# -- facts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to know of a plan, which a screen cuts to a line, or shows whole where there is room."""

    label: str
    """Empty for a line that goes on."""
    text: Text
    gravity: int = 0
    """The gravest are the first to be shown whole, and the last to be left out; 0 stands on no first screen."""


NOTES = ("advice", "warning")
"""Labels of what stands out."""


def facts(plan: Plan) -> Iterator[Fact]:
    """Yields what to know before the details: harm, speed, batch, data, and what was found wrong."""
    estimate, knobs = plan.estimate, plan.knobs
    yield Fact("level", Text(f"{plan.level}: {formatting.LEVELS.get(plan.level, 'not known here')}"), 50)
    if plan.most is not None:
        yield Fact("most", Text(most_sentence(plan.most, estimate.budget_bytes, plan.level)), 70)
    parameters = plan.job.arguments.get("lora_target_parameters")
    yield Fact("trains", Text(formatting.trains(knobs, estimate.memory.trained, parameters)), 60)
    if estimate.routed:
        yield Fact("experts", Text(estimate.routed), 50)
    rows = plan.job.method_facts.rows(knobs.effective_batch_size)
    steps, tokens = plan.optimizer_steps, estimate.time.tokens
    learned = formatting.schedule(knobs, plan.schedule, steps=steps, step_rows=rows, step_tokens=tokens)
    yield Fact("schedule", Text(learned))
    yield Fact("speed", speed(plan), 60)
    if hours := over_hours(estimate):
        yield Fact("hours", Text(hours))
    if plan.price is not None and plan.cost is not None:
        yield Fact("cost", Text(cost(plan.cost, plan.price)), 50)
    device = "CPU" if estimate.hardware.origin == "cpu" else "GPU"
    count = f"{device}s" if knobs.processes > 1 else f"x 1 {device}"
    count = f"groups of {knobs.token_shards} {device}s" if knobs.token_shards > 1 else count
    batch = f"{knobs.effective_batch_size} = {formatting.batch(knobs)} {count}"
    yield Fact("batch", Text(f"{batch}  ({plan.job.method_facts.row_noun} at once x accumulation x devices)"), 40)
    if knobs.processes > 1:
        yield Fact("GPUs", Text(formatting.devices(knobs)), 40)
    for number, line in enumerate(data(plan).split("\n")):
        yield Fact("" if number else "data", line, 60 - number)
    for number, sentence in enumerate(vllm_share(estimate) or vllm_server(plan)):
        yield Fact("" if number else "vLLM", Text(sentence), 60 if plan.vllm_server is not None else 40)
    variables = [f"{name}={value}" for name, value in plan.job.environment.items()]
    if variables := [*variables, *(f"{name}=..." for name in plan.job.unrecorded or ())]:
        yield Fact("env", Text(" ".join(variables)))
    for warning in plan.warnings:
        yield Fact("warning", Text(warning), 75)
    for each in plan.advice:
        yield Fact("advice", Text(f"{each.flags}: {each.why}"), 30)


def vllm_share(estimate: Estimate) -> tuple[str, ...]:
    """Describes what an engine on the cards that train takes of each, and when; nothing without one."""
    sleep = estimate.vllm_sleep
    if sleep is None:
        share_bytes = estimate.vllm_share_bytes
        flag = "--vllm_gpu_memory_utilization says how much"
        return (f"takes {format_bytes(share_bytes)} of the card: {flag}",) if share_bytes else ()
    awake, beside = format_bytes(sleep.awake_bytes), format_bytes(sleep.reserved_awake_bytes)
    asleep, trains = format_bytes(sleep.asleep_bytes), format_bytes(sleep.reserved_asleep_bytes)
    return (
        f"takes {awake} of the card while it generates, beside {beside} of the trainer's",
        f"keeps up to {asleep} while it sleeps, beside {trains}",
    )


def vllm_server(plan: Plan) -> tuple[str, ...]:
    """Describes what generates on GPUs of its own, and the command that starts it; nothing without a server."""
    server = plan.vllm_server
    if server is None:
        return ()
    where = "another machine" if server.first_gpu is None else f"GPU{'s' * (server.gpus > 1)} {server.devices}"
    beside = "" if server.first_gpu is None else f", while 0 to {server.first_gpu - 1} train"
    beside = ", while 0 trains" if server.first_gpu == 1 else beside
    weights = "" if server.weights_bytes is None else f"; {format_bytes(server.weights_bytes)} of weights each"
    at_once = "" if server.at_once is None else f", about {server.at_once} of {server.completions} completions at once"
    return f"a server on {where}{beside}{weights}{at_once}", f"start it first: {server.command}"


def over_hours(estimate: Estimate) -> str:
    """Describes what rows of every length make the allocator reserve; empty where that is not known.

    Example: ``rows of every length reserve up to 11.6 GiB in 1,000 steps, the longest first; 15.6 GiB in any order,
    which is TRL's own``.
    """
    mixed = estimate.mixed
    if mixed is None or not caches(estimate.hardware):
        return ""
    first, any_order = (format_bytes(order.last_bytes) for order in (mixed.longest_first, mixed.any_order))
    otherwise = "" if first == any_order else f"; {any_order} in any order, which is TRL's own"
    return f"rows of every length reserve up to {first} in {STEPS[-1]:,} steps, the longest first{otherwise}"


def speed(plan: Plan) -> Text:
    """``1,330 tokens/s, 12.3 s a step; 1,403 steps in about 4 h 47 min``; or why that is not known."""
    time, steps = plan.estimate.time, plan.optimizer_steps
    sentence = formatting.speed(time)
    if not formatting.has_speed(time):
        return Text(sentence, style=QUIET)
    if steps is None or plan.run_seconds is None:
        return Text(sentence)
    return Text(f"{sentence}; {counted(steps, 'step')} in about {duration(plan.run_seconds)}")


def most_sentence(most: LargestValue, budget_bytes: int, level: str) -> str:
    """``max_length 8128 fits at this level, and 8192 does not: it needs 11.9 GiB of 11.2 GiB``."""
    if most.next_value is None or most.next_required_bytes is None:
        return f"{most.name} {most.value}, as much as there can be: {most.stopped_by}"
    needs = against(most.next_required_bytes, budget_bytes)
    return f"{most.name} {most.value}, at the level {level}; {most.next_value} does not fit: it needs {needs}"


def cost(cost: float, price: Price) -> str:
    """``4.14 USD, at 0.34 an hour for a card (RunPod Community, seen 2026-03-10)``."""
    seen = ", ".join(filter(None, [price.provider, f"seen {price.seen}" if price.seen else ""]))
    at = f"{money(cost, price.currency)}, at {amount(price.per_hour)} an hour for a card"
    return f"{at} ({seen})" if seen else at


def data(plan: Plan) -> Text:
    """Shows how long the rows are, how much of the computing is padding, and what is cut."""
    if plan.data is None:
        return Text(_not_read(plan))
    count = plan.data.rows
    rows = counted(count, "prompt") if plan.job.is_online else plan.job.method_facts.rows(count)
    lines = [Text(f"{rows}: {_percentiles(plan.data.percentiles)}, max {plan.data.longest} tokens")]
    if (images := plan.data.images) is not None:
        without = f", {images.rows_without:,} rows without" if images.rows_without else ""
        tokens = f"{_percentiles(images.percentiles)}, max {images.most}"
        worst = f"most pixels: {' and '.join(images.worst)}" if images.worst else ""
        lines.append(Text(f"{counted(images.images, 'image')}{without}; their tokens in a row: {tokens}; {worst}"))
    if plan.job.is_online:
        completions, limit = plan.knobs.completion_length, plan.knobs.max_length
        is_cut = limit is not None and plan.data.longest + completions > limit
        cut = f"what is longer than max_length {limit} with them is cut" if is_cut else "no prompt is truncated"
        lines.append(Text(f"completions of up to {completions}; {cut}", style=LOUD if is_cut else ""))
    else:
        padding = f"{percent(plan.data.padding_fraction)} of a batch is padding" if plan.knobs.pads_rows else "packed"
        lines += [Text(padding), _cut(plan, plan.data)]
    return Text("\n").join(lines)


def _percentiles(tokens: Sequence[int]) -> str:
    named = zip(PERCENTILES, tokens, strict=True)
    return ", ".join(f"p{round(100 * share, 1):g} {each}" for share, each in named)


def _not_read(plan: Plan) -> str:
    """Explains why the data were not read, and what is planned for in their place."""
    why = ", as a warning here says" if plan.warnings else ""
    if plan.objects is not None:
        why = ", since a stream's rows are not known before they are trained on"
    elif not plan.job.names_data:
        why = ", since no --dataset is given"
    if not plan.job.is_online:
        return f"not read{why}: how much of it is {_lost(plan)} is not known"
    completions = f"completions of {plan.knobs.completion_length}"
    return f"not read{why}: prompts of up to {plan.prompt_length} tokens and {completions} are assumed"


def _cut(plan: Plan, data: DataSummary) -> Text:
    """Reward training filters pairs by max_length; all others truncate their rows."""
    facts, length = plan.job.method_facts, plan.knobs.max_length
    if not data.truncated_rows_fraction:
        return Text(f"no {facts.noun(1)} is {_lost(plan)}")
    rows, tokens = map(percent, (data.truncated_rows_fraction, data.truncated_tokens_fraction))
    if facts.long_rows == "dropped":
        longer = f"those with a side longer than {length}"
        return Text(f"drops {rows} of {facts.row_noun}, with {tokens} of tokens: {longer}", style=LOUD)
    sentence = f"max_length {length} truncates {rows} of {facts.row_noun}, which cuts {tokens} of tokens"
    return Text(sentence, style=LOUD if any(lever.harm is Harm.DATA for lever in plan.levers) else "")


def _lost(plan: Plan) -> str:
    return "dropped" if plan.job.method_facts.long_rows == "dropped" else "truncated"


# -- blocks --------------------------------------------------------------------------------------------------------


def changes(plan: Plan) -> list[RenderableType]:
    """Shows what differs from what was asked for, and why; nothing where nothing does."""
    if not plan.levers:
        return []
    lines: list[RenderableType] = []
    for lever in sorted(plan.levers, key=lambda each: each.harm):
        moved = f"{lever.name}  {formatting.value(lever.before)} -> {formatting.value(lever.after)}"
        style = LOUD if lever.harm >= Harm.WHAT_IS_TRAINED else QUIET
        lines.append(Text.assemble((moved, "bold"), "  ", (formatting.HARMS[lever.harm], style)))
        if sentence := loud(lever):
            lines.append(Indented(Text(sentence, style=style), 2))
        lines.append(Indented(Text(lever.why), 2))
    return section("changed, least harm first", *lines)


def proposed(plan: Plan) -> list[RenderableType]:
    """Lists what would be faster and changes the batches, which is the user's to decide."""
    if not plan.proposals:
        return []
    lines: list[RenderableType] = []
    for each in plan.proposals:
        lines += [Text(each.flags, style="bold"), Indented(Text(each.why), 2)]
    return section("optional speedups (they change the batches)", *lines)


def elsewhere(plan: Plan) -> list[RenderableType]:
    """Shows what the levels around have to offer, on this card or on another."""
    if not plan.alternatives:
        return []
    budget = format_bytes(plan.estimate.budget_bytes)
    notes = gentler_levels(plan)
    return section(f"other levels of harm, against a budget of {budget}", levels_table(plan), *notes)


def levels_table(plan: Plan) -> Table:
    """A line for each level of harm but the plan's."""
    grid = table("level", "needs", "", right=(1,))
    for each in plan.alternatives:
        if each.fits:
            speed = ""
            if each.ratio is not None:  # a second digit where one would read as nothing
                speed = f", {each.ratio:.{1 if each.ratio >= 0.095 else 2}f} x the speed"
            # settings are those that are not TRL's
            batch, others = formatting.batch(each.knobs), formatting.difference(each.knobs, plan.defaults)
            outcome = Text(f"fits{speed}: {batch}, {others}")
        else:
            *cards, last = each.would_fit or ("",)
            where = f"; would on {' or '.join(filter(None, [', '.join(cards), last]))}" if last else ""
            outcome = Text.assemble(("does not fit", BAD), where)
        add(grid, each.level, format_bytes(each.required_bytes), outcome)
    return grid


def gentler_levels(plan: Plan) -> list[str]:
    """Explains why each level of less harm that fits was not taken."""
    return [sentence for each in gentler(plan) if (sentence := passed_over(each, plan))]


def gentler(plan: Plan) -> list[Candidate]:
    """The alternatives of less harm than the plan, least harm first."""
    order = list(formatting.LEVELS)
    if plan.level not in order:
        return []
    before = order[: order.index(plan.level)]
    return [each for each in plan.alternatives if each.level in before]


def passed_over(each: Candidate, plan: Plan) -> str:
    """Why a level of less harm was not taken though it fits, and how to have it all the same; empty where it does not.

    Example: ``lossless fits, but takes 5.2 times as long: --max_slowdown 6 takes it``. Where one of the user's limits
    is broken, that is named.
    """
    if not each.fits or not each.ratio:
        return ""
    slower = 1 / each.ratio
    within_seconds, budget, seconds = plan.job.within_seconds, plan.job.budget, plan.run_seconds
    if within_seconds is not None and seconds is not None and slower * seconds > within_seconds:
        return f"{each.level} fits, but takes {duration(slower * seconds)}"
    if budget is not None and plan.cost is not None and plan.price is not None and slower * plan.cost > budget:
        return f"{each.level} fits, but costs {money(slower * plan.cost, plan.price.currency)}"
    return f"{each.level} fits, but takes {slower:.1f} times as long: --max_slowdown {math.ceil(slower)} takes it"


def settings_table(plan: Plan) -> Table:
    """A star marks what differs from TRL's default, so that it shows without colour too."""
    grid = table("", "", "", show_header=False)
    grid.columns[0].no_wrap = True  # a star on a line of its own would be nobody's
    for name in knob_names(METHODS[plan.method].knobs, plan.knobs):
        chosen, default = getattr(plan.knobs, name), getattr(plan.defaults, name)
        if chosen == default:
            add(grid, f"  {name}", formatting.value(chosen))
        else:
            known = "TRL has none of its own" if name in NOT_TRLS else f"TRL's default is {formatting.value(default)}"
            add(grid, f"* {name}", formatting.value(chosen), Text(known, style=f"not bold {QUIET}"), style="bold")
    return grid


def flags(plan: Plan) -> list[RenderableType]:
    """The settings as flags of TRL's command; of ours, which takes the same, where TRL has none."""
    knobs, topology = plan.knobs, plan.estimate.hardware.topology
    command = "trl" if plan.job.method_facts.has_trl_command else "autofit"
    lines = map(Text, formatting.flag_lines(plan.method, knobs))
    ours = {name: value for name in APPLIED if (value := getattr(knobs, name))}
    own = [shlex.quote(word) for word in flag_words(ours)]
    if knobs.has_group:  # how several processes are launched
        own.append(f"--gpus {topology.devices}")
        own += [f"--nodes {topology.nodes}"] if topology.nodes > 1 else []
        own.append(f"--sharding {knobs.sharding}")
        own += [f"--{name} {size}" for name in SHARE_TOKENS if (size := getattr(knobs, name)) > 1]
        own += ["--fsdp_offload_params"] if knobs.fsdp_offload_params else []
        own += [f"--{name} cpu" for name in OF_DEEPSPEED if getattr(knobs, name) == "cpu"]  # NVMe has no flag
    more = [Text(f"and only autofit has {' '.join(own)}")] if own else []
    return section(f"the same settings as flags of {command} {plan.method}", *lines, *more)
