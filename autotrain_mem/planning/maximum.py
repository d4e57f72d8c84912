"""Finds the values to try for an argument given as ``max``, such as ``--max_length max``.

``--per_device_train_batch_size max`` tries the divisors of a given effective batch; otherwise the effective batch
follows from the rows. With ``--num_generations max`` alone, a step has TRL's default number of prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import gcd, lcm

from autotrain_mem.methods.interface import method_of
from autotrain_mem.planning.rehearsals import PROMPT_UNKNOWN, Subject
from autotrain_mem.search.division import GROUP, SMALLEST_GROUP, divisors
from autotrain_mem.search.largest import Question
from autotrain_mem.search.space import Space, check_prompt, lengths_below
from autotrain_mem.settings.knobs import ROWS, STEPS
from autotrain_mem.settings.words import MAX_LENGTH, MAXIMIZED, MOST
from autotrain_mem.types import Job, Knobs

MOST_ROWS = 16_384
"""Upper bound of rows in a micro-batch, and of completions per prompt."""
MOST_TOKENS, MOST_RANK = 1 << 20, 4096
"""Upper bounds of a row's tokens and of the rank if neither the model's config nor the data give one."""

_Asked = tuple[Sequence[int], str]
"""Candidate values, smallest first, and the reason why there is no larger one."""


def question_of(subject: Subject) -> Question | None:
    """Returns the question for a ``max``, or None. If no value works, raises as :meth:`Subject.space` does."""
    if (name := subject.job.maximized) is None:
        return None

    @cache
    def space(value: int) -> Space:
        return replace(subject, job=with_value(subject.job, subject.defaults, name, value)).space()

    values, stopped_by = _VALUES[name](subject)
    space(values[0])  # raises the errors that every value would raise
    return Question(name=name, values=values, space=space, stopped_by=stopped_by)


def with_value(job: Job, defaults: Knobs, name: str, value: int) -> Job:
    """Returns the job with this value of the argument, and with the settings that follow from it."""
    arguments = {**job.arguments, name: value} | ({"use_peft": True} if name == "lora_r" else {})
    grows = name == GROUP and not _says_batches(job)
    rows = value * _prompts(defaults) if grows else job.effective_batch_size
    return replace(job, arguments=arguments, effective_batch_size=rows)


def settled(job: Job, knobs: Knobs) -> Job:
    """Returns the job with the values that a plan found for ``max``, and with the smaller images that it chose."""
    arguments = {name: getattr(knobs, name) if each == MOST else each for name, each in job.arguments.items()}
    if knobs.max_pixels is not None:
        arguments["max_pixels"] = knobs.max_pixels
    rows = job.effective_batch_size if job.maximized is None else knobs.effective_batch_size
    return replace(job, arguments=arguments, effective_batch_size=rows)


def _lengths(subject: Subject) -> _Asked:
    facts, lengths = subject.facts, subject.lengths
    packs = bool(subject.job.arguments.get("packing"))
    longest = None if packs or lengths.profile is None else lengths.longest
    ends = {facts.context_length: "the model's context", longest: "no row of the data is longer"}
    end = min((end for end in ends if end is not None), default=MOST_TOKENS)
    least = 0 if lengths.profile is None else lengths.profile.least_length
    return (*lengths_below(end, least), end), ends.get(end, "the model's context length is unknown")


def _completions(subject: Subject) -> _Asked:
    prompt, context_length = subject.lengths.longest or PROMPT_UNKNOWN, subject.facts.context_length
    if context_length is None:
        return (*lengths_below(MOST_TOKENS, 0), MOST_TOKENS), "the model's context length is unknown"
    check_prompt(prompt, context_length)
    room = context_length - prompt
    return (*lengths_below(room, 0), room), f"the model's context, less a prompt of {prompt} tokens"


def _rows(subject: Subject) -> _Asked:
    job, defaults, given = subject.job, subject.defaults, subject.job.arguments
    least = method_of(job.method).least_rows(given)
    if job.effective_batch_size is not None:
        without = {name: each for name, each in given.items() if name != ROWS}
        plain = replace(subject, job=replace(job, arguments=without)).space()
        steps = given.get(STEPS)
        allowed = plain.rows_allowed or tuple(divisors(plain.share))
        fixed = [plain.share // steps] if isinstance(steps, int) else sorted(allowed)
        return [rows for rows in fixed if rows >= least] or fixed, "the effective batch size"
    # An effective batch has whole groups, and whole mini-batches.
    every = given.get(STEPS) or defaults.gradient_accumulation_steps
    if (whole := method_of(job.method).mini_batches(given)) is None:
        every, whole = every * defaults.processes, given.get(GROUP) or defaults.num_generations or 1
    unit = whole // gcd(whole, every)
    counted = None if job.is_online else subject.lengths.profile
    end = MOST_ROWS if counted is None else max(unit, least, counted.rows // defaults.processes)
    values = [rows for rows in range(unit, end + 1, unit) if rows >= least]
    return values or [unit], "the data have no more rows" if end < MOST_ROWS else f"at most {end:,} rows are tried"


def _groups(subject: Subject) -> _Asked:
    job, defaults, given = subject.job, subject.defaults, subject.job.arguments
    if _says_batches(job):
        rows = given.get(ROWS) or defaults.per_device_train_batch_size
        steps = given.get(STEPS) or defaults.gradient_accumulation_steps
        effective = job.effective_batch_size or rows * steps * defaults.processes
        size = given.get("generation_batch_size") or effective
        sizes = [each for each in divisors(size) if each >= SMALLEST_GROUP]
        return sizes or [SMALLEST_GROUP], "the completions of a generation"
    unit = defaults.processes // gcd(defaults.processes, _prompts(defaults))
    first = lcm(unit, SMALLEST_GROUP) if unit > 1 else SMALLEST_GROUP
    return range(first, MOST_ROWS + 1, unit), f"at most {MOST_ROWS:,} completions are tried"


def _says_batches(job: Job) -> bool:
    names = (ROWS, STEPS, "generation_batch_size", "steps_per_generation")
    return job.effective_batch_size is not None or any(job.arguments.get(name) is not None for name in names)


def _prompts(defaults: Knobs) -> int:
    return max(1, defaults.effective_batch_size // (defaults.num_generations or 1))


def _ranks(subject: Subject) -> _Asked:
    end = subject.facts.hidden_size or MOST_RANK
    fine, coarse = (1, 2, 4, *range(8, min(64, end), 8)), (*range(64, min(256, end), 16), *range(256, end, 64))
    stop = "the width of the model's layers" if subject.facts.hidden_size else f"no more than {end} is tried"
    return sorted({*(rank for rank in (*fine, *coarse) if rank < end), end}), stop


_VALUES: dict[str, Callable[[Subject], _Asked]] = {
    MAX_LENGTH: _lengths,
    ROWS: _rows,
    "lora_r": _ranks,
    GROUP: _groups,
    "max_completion_length": _completions,
}
assert {*_VALUES} == {*MAXIMIZED}
