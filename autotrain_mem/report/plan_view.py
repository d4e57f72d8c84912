"""Shows a plan: its facts, its changes and their costs, and the alternatives."""

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
from autotrain_mem.search.space import loses_updates
from autotrain_mem.settings.knobs import APPLIED, NOT_TRLS, knob_names
from autotrain_mem.settings.levers import WARNINGS
from autotrain_mem.settings.own import OF_DEEPSPEED, SHARE_TOKENS, flag_words
from autotrain_mem.support.units import amount, counted, duration, format_bytes, money, percent
from autotrain_mem.types import METHODS, Candidate, Estimate, Harm, LargestValue, Plan
from autotrain_mem.types.data import PERCENTILES
from autotrain_mem.types.estimate import STEPS
from autotrain_mem.types.hardware import SECONDS_PER_HOUR


def searched(plan: Plan) -> str:
    """Returns ``6 rehearsals on fake tensors in 41.3 s``."""
    return f"{counted(len(plan.attempts), 'rehearsal')} on fake tensors in {duration(plan.seconds)}"


def plan_verdict(plan: Plan) -> Text:
    """Returns whether the plan fits, and after how many changes."""
    return verdict(plan.estimate, f" with {counted(len(plan.levers), 'change')}" if plan.levers else " as asked for")


def decision(plan: Plan) -> list[Text]:
    """Returns the verdict, the time of a training of more than a day, the warnings about changes to what is trained,
    and the options that only the user can choose."""
    told = []
    if plan.run_seconds is not None and plan.run_seconds > 24 * SECONDS_PER_HOUR:
        faster = "".join(f"; {each.flags} takes less time" for each in plan.proposals)
        told.append(f"the training takes {formatting.run_time(plan)}: --gpu all names faster cards{faster}")
    told += [WARNINGS[each.name] for each in plan.levers if each.name in WARNINGS]
    if loses_updates(plan.knobs):  # as the user asked: no plan chooses this
        told.append("loses most updates, which are smaller than bfloat16 can add to a weight: see the advice")
    told += [f"option: {each.why}; {each.flags} selects it" for each in plan.questions]
    return [plan_verdict(plan), *(Text(sentence, style=LOUD) for sentence in told)]


@dataclass(frozen=True, slots=True)
class Fact:
    """Holds one fact of a plan, which a screen shows in full if lines are left, else cut to one line."""

    label: str
    """Empty for a continuation line."""
    text: Text
    gravity: int = 0
    """Facts of larger gravity are shown in full first and left out last; those of 0 are not on the first screen."""


NOTES = ("advice", "warning")
"""Labels that are highlighted."""


def facts(plan: Plan) -> Iterator[Fact]:
    """Yields what to know before the details: harm, speed, batch, data, warnings and advice."""
    estimate, knobs, facts = plan.estimate, plan.knobs, plan.job.method_facts
    yield Fact("level", Text(f"{plan.level}: {formatting.LEVELS.get(plan.level, 'unknown here')}"), 50)
    if plan.most is not None:
        yield Fact("most", Text(most_sentence(plan.most, estimate.budget_bytes, plan.level)), 70)
    yield Fact("trains", Text(formatting.trains(knobs, estimate.memory.trained)), 60)
    if estimate.routed:
        yield Fact("experts", Text(estimate.routed), 50)
    rows, steps = facts.rows(knobs.effective_batch_size), plan.optimizer_steps
    learned = formatting.schedule(knobs, plan.schedule, steps=steps, step_rows=rows, step_tokens=estimate.time.tokens)
    yield Fact("schedule", Text(learned))
    is_known, run = formatting.has_speed(estimate.time), formatting.run_time(plan)
    whole = f"; {counted(steps, 'step')} in {run}" if steps is not None and run else ""
    yield Fact("speed", Text(f"{formatting.speed(estimate.time)}{whole}", style="" if is_known else QUIET), 60)
    if (mixed := estimate.mixed) is not None and caches(estimate.hardware):
        most = format_bytes(mixed[-1])
        yield Fact(
            "hours", Text(f"up to {most} are reserved in {STEPS[-1]:,} steps (rows of every length, longest first)")
        )
    if (price := plan.price) is not None and plan.cost is not None:
        seen = ", ".join(filter(None, [price.provider, f"seen {price.seen}" if price.seen else ""]))
        hourly = f", at {amount(price.per_hour)} an hour for a card{f' ({seen})' if seen else ''}"
        yield Fact("cost", Text(f"{money(plan.cost, price.currency)}{hourly}"), 50)
    device = "CPU" if estimate.hardware.origin == "cpu" else "GPU"
    count = f"{device}s" if knobs.processes > 1 else f"x 1 {device}"
    count = f"groups of {knobs.token_shards} {device}s" if knobs.token_shards > 1 else count
    batch = f"{rows} = {formatting.batch(knobs)} {count}"
    yield Fact("batch", Text(f"{batch}  (micro-batch x gradient accumulation x {device}s)"), 40)
    if knobs.processes > 1:
        count = f"{counted(knobs.processes, 'GPU')} ({formatting.sharing(knobs)})"
        yield Fact("GPUs", Text(f"{count}, one process each: bytes are per process"), 40)
    if estimate.on_host:
        yield Fact("host", Text(estimate.on_host), 40)
    yield from (Fact("" if number else "data", line, 60 - number) for number, line in enumerate(_data(plan)))
    for number, sentence in enumerate(_vllm_share(estimate) or vllm_server(plan)):
        yield Fact("" if number else "vLLM", Text(sentence), 60 if plan.vllm_server is not None else 40)
    variables = [f"{name}={value}" for name, value in plan.job.environment.items()]
    if variables := [*variables, *(f"{name}=..." for name in plan.job.unrecorded or ())]:
        yield Fact("env", Text(" ".join(variables)))
    yield from (Fact("warning", Text(warning), 75) for warning in plan.warnings)
    yield from (Fact("advice", Text(f"{each.flags}: {each.why}"), 30) for each in plan.advice)


def most_sentence(most: LargestValue, budget_bytes: int, level: str) -> str:
    """Returns ``max_length 8128, at the level lossless; 8192 does not fit: it needs 11.9 GiB of 11.2 GiB``."""
    if most.next_value is None or most.next_required_bytes is None:
        return f"{most.name} {most.value}, the largest possible: {most.stopped_by}"
    needs = against(most.next_required_bytes, budget_bytes)
    return f"{most.name} {most.value}, at the level {level}; {most.next_value} does not fit: it needs {needs}"


def _vllm_share(estimate: Estimate) -> tuple[str, ...]:
    """Describes how much of each training card a vLLM engine takes, and when; nothing without one."""
    if (sleep := estimate.vllm_sleep) is None:
        share_bytes = estimate.vllm_share_bytes
        flag = "--vllm_gpu_memory_utilization sets the share"
        return (f"takes {format_bytes(share_bytes)} of the card: {flag}",) if share_bytes else ()
    awake, beside = format_bytes(sleep.awake_bytes), format_bytes(sleep.reserved_awake_bytes)
    asleep, trains = format_bytes(sleep.asleep_bytes), format_bytes(sleep.reserved_asleep_bytes)
    return (
        f"takes {awake} of the card while it generates, beside {beside} of the trainer's",
        f"keeps up to {asleep} while it sleeps, beside {trains}",
    )


def vllm_server(plan: Plan) -> tuple[str, ...]:
    """Describes the GPUs that only generate, and the command that starts their server; nothing without one."""
    if (server := plan.vllm_server) is None:
        return ()
    where = "another machine" if server.first_gpu is None else f"GPU{'s' * (server.gpus > 1)} {server.devices}"
    beside = "" if server.first_gpu is None else f", while 0 to {server.first_gpu - 1} train"
    beside = ", while 0 trains" if server.first_gpu == 1 else beside
    weights = "" if server.weights_bytes is None else f"; {format_bytes(server.weights_bytes)} of weights each"
    return f"a server on {where}{beside}{weights}", f"start it first: {server.command}"


def _data(plan: Plan) -> list[Text]:
    """Describes the lengths of rows, the share of padding, and what is cut or dropped."""
    data, facts, length = plan.data, plan.job.method_facts, plan.knobs.max_length
    lost = "dropped" if facts.long_rows == "dropped" else "truncated"
    if data is None:
        why = ", for the reason in the warnings" if plan.warnings else ""
        if plan.objects is not None:
            why = ", since a stream's rows are not known before they are trained on"
        elif not plan.job.names_data:
            why = ", since no --dataset is given"
        unknown = f"the {lost} share is unknown"
        if plan.job.is_online:
            completions = f"completions of {plan.knobs.completion_length}"
            unknown = f"prompts of up to {plan.prompt_length} tokens and {completions} are assumed"
        return [Text(f"not counted{why}: {unknown}")]
    rows = counted(data.rows, "prompt") if plan.job.is_online else facts.rows(data.rows)
    lines = [Text(f"{rows}: {_percentiles(data.percentiles)}, max {data.longest} tokens")]
    if (images := data.images) is not None:
        without = f", {images.rows_without:,} rows without" if images.rows_without else ""
        tokens = f"{_percentiles(images.percentiles)}, max {images.most}"
        worst = f"most pixels: {' and '.join(images.worst)}" if images.worst else ""
        lines.append(Text(f"{counted(images.images, 'image')}{without}; their tokens in a row: {tokens}; {worst}"))
    if plan.job.is_online:
        longest = plan.knobs.completion_length
        is_cut = length is not None and data.longest + longest > length
        cut = f"prompt and completion together are cut at max_length {length}" if is_cut else "no prompt is truncated"
        return [*lines, Text(f"completions of up to {longest}; {cut}", style=LOUD if is_cut else "")]
    lines.append(Text(f"{percent(data.padding_fraction)} of a batch is padding" if plan.knobs.pads_rows else "packed"))
    if not data.truncated_rows_fraction:
        return [*lines, Text(f"no {facts.noun(1)} is {lost}")]
    share, tokens = map(percent, (data.truncated_rows_fraction, data.truncated_tokens_fraction))
    if lost == "dropped":  # reward training filters pairs by max_length; all others truncate their rows
        longer = f"those with a side longer than {length}"
        return [*lines, Text(f"drops {share} of {facts.row_noun}, with {tokens} of tokens: {longer}", style=LOUD)]
    sentence = f"max_length {length} truncates {share} of {facts.row_noun}, which cuts {tokens} of tokens"
    return [*lines, Text(sentence, style=LOUD if any(lever.harm is Harm.DATA for lever in plan.levers) else "")]


def _percentiles(tokens: Sequence[int]) -> str:
    named = zip(PERCENTILES, tokens, strict=True)
    return ", ".join(f"p{round(100 * share, 1):g} {each}" for share, each in named)


def changes(plan: Plan) -> list[RenderableType]:
    """Shows the changes to the requested settings, with their reasons; nothing if there are none."""
    lines: list[RenderableType] = []
    for lever in sorted(plan.levers, key=lambda each: each.harm):
        moved = f"{lever.name}  {formatting.value(lever.before)} -> {formatting.value(lever.after)}"
        style = LOUD if lever.harm >= Harm.WHAT_IS_TRAINED else QUIET
        lines.append(Text.assemble((moved, "bold"), "  ", (formatting.HARMS[lever.harm], style)))
        if sentence := WARNINGS.get(lever.name):
            lines.append(Indented(Text(sentence, style=style), 2))
        lines.append(Indented(Text(lever.why), 2))
    return section("changed, least harm first", *lines) if lines else []


def proposed(plan: Plan) -> list[RenderableType]:
    """Lists optional speedups: they change the batches, so only the user may choose them."""
    lines: list[RenderableType] = []
    for each in plan.proposals:
        lines += [Text(each.flags, style="bold"), Indented(Text(each.why), 2)]
    return section("optional speedups (they change the batches)", *lines) if lines else []


def elsewhere(plan: Plan) -> list[RenderableType]:
    """Shows the other levels of harm, and the cards on which they would fit."""
    if not plan.alternatives:
        return []
    budget = format_bytes(plan.estimate.budget_bytes)
    return section(f"other levels of harm, against a budget of {budget}", levels_table(plan), *gentler_levels(plan))


def levels_table(plan: Plan) -> Table:
    """Returns a table of the other levels of harm."""
    grid, asked = table("level", "needs", "", right=(1,)), formatting.asked_for(plan.job, plan.defaults, plan.attempts)
    for each in plan.alternatives:
        if each.fits:
            speed = ""
            if each.ratio is not None:  # a second digit if one would show 0.0
                speed = f", {each.ratio:.{1 if each.ratio >= 0.095 else 2}f} x the speed"
            others = formatting.difference(each.knobs, asked)
            outcome = Text(f"fits{speed}: {formatting.batch(each.knobs)}, {others}")
        else:
            *cards, last = each.would_fit or ("",)
            where = f"; would fit on {' or '.join(filter(None, [', '.join(cards), last]))}" if last else ""
            grown = "" if each.knobs.segments == plan.knobs.segments else f" with {each.knobs.segments}"
            outcome = Text.assemble(("does not fit", BAD), grown, where)
        add(grid, each.level, format_bytes(each.required_bytes), outcome)
    return grid


def gentler_levels(plan: Plan) -> list[str]:
    """Explains why each level of less harm that fits was not taken."""
    order = list(formatting.LEVELS)
    before = order[: order.index(plan.level)] if plan.level in order else []
    sentences = (passed_over(each, plan) for each in plan.alternatives if each.level in before)
    return [sentence for sentence in sentences if sentence]


def passed_over(each: Candidate, plan: Plan) -> str:
    """Explains why a level of less harm that fits was not taken, and how to take it; empty if it does not fit.

    Example: ``lossless fits, but takes 5.2 times as long: --max_slowdown 6 selects it``. If
    the level exceeds the user's limit of time or cost, its time or cost is given instead.
    """
    if not each.fits or not each.ratio:
        return ""
    slower = 1 / each.ratio
    within_seconds, budget, seconds = plan.job.within_seconds, plan.job.budget, plan.run_seconds
    if within_seconds is not None and seconds is not None and slower * seconds > within_seconds:
        return f"{each.level} fits, but takes {duration(slower * seconds)}"
    if budget is not None and plan.cost is not None and plan.price is not None and slower * plan.cost > budget:
        return f"{each.level} fits, but costs {money(slower * plan.cost, plan.price.currency)}"
    if slower <= plan.job.max_slowdown:
        return f"{each.level} fits the card, but offloads more than host memory holds"
    return f"{each.level} fits, but takes {slower:.1f} times as long: --max_slowdown {math.ceil(slower)} selects it"


def settings_table(plan: Plan) -> Table:
    """Returns all settings; a star marks those that differ from TRL's default, even without colour."""
    grid = table("", "", "", show_header=False)
    grid.columns[0].no_wrap = True  # keeps a star on the line of its setting
    for name in knob_names(METHODS[plan.method].knobs, plan.knobs):
        chosen, default = getattr(plan.knobs, name), getattr(plan.defaults, name)
        if chosen == default:
            add(grid, f"  {name}", formatting.value(chosen))
        else:
            known = "TRL has no such setting" if name in NOT_TRLS else f"TRL's default is {formatting.value(default)}"
            add(grid, f"* {name}", formatting.value(chosen), Text(known, style=f"not bold {QUIET}"), style="bold")
    return grid


def flags(plan: Plan) -> list[RenderableType]:
    """Writes the settings as flags of TRL's command, or of ``autofit`` if TRL has no command for the method."""
    knobs, topology = plan.knobs, plan.estimate.hardware.topology
    command = "trl" if plan.job.method_facts.has_trl_command else "autofit"
    ours = {name: value for name in APPLIED if (value := getattr(knobs, name))}
    own = [shlex.quote(word) for word in flag_words(ours)]
    if knobs.has_group:  # how several processes are launched
        own.append(f"--gpus {topology.devices}")
        own += [f"--nodes {topology.nodes}"] if topology.nodes > 1 else []
        own.append(f"--sharding {knobs.sharding}")
        own += [f"--{name} {size}" for name in SHARE_TOKENS if (size := getattr(knobs, name)) > 1]
        own += ["--fsdp_offload_params"] if knobs.fsdp_offload_params else []
        own += [f"--{name} cpu" for name in OF_DEEPSPEED if getattr(knobs, name)]
    more = [Text(f"autofit's own flags: {' '.join(own)}")] if own else []
    lines = map(Text, formatting.flag_lines(plan.method, knobs))
    return section(f"the same settings as flags of {command} {plan.method}", *lines, *more)
