"""``max``: what is tried of each argument, and what a training gets; and images made as small as they must be."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.planning.maximum import question_of, settled
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.report.plan_view import most_sentence
from autotrain_mem.settings.words import MAX_LENGTH, MOST
from autotrain_mem.support.errors import BatchSplitError, ContextLengthError, DoesNotFitError, UsageError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Fingerprint, ImageProfile, Job, Knobs, ModelFacts, Plan
from tests.fake_worker import FakeWorker, rehearsals, toy

GRPO = replace(TRL_DEFAULTS, max_length=None, max_completion_length=256, num_generations=8)


def sizes(job: Job, knobs: Knobs) -> list[int]:
    """Two GiB, and 1 MiB for each token of a micro-batch, for each rank, and for each completion of a group."""
    tokens = knobs.per_device_train_batch_size * (knobs.max_length or knobs.max_completion_length or 0)
    ranks = knobs.lora_r if knobs.use_peft else 0
    return [2 * GIB, (tokens + ranks + (knobs.num_generations or 0)) * 2**20]


def asked(name: str, method: str = "sft", defaults: Knobs = TRL_DEFAULTS, **words: Any) -> api.Rehearsals:
    of_job = {each: words.pop(each) for each in ("effective_batch_size", "prompt_length", "fit") if each in words}
    job = Job(method=method, model="m", dataset=None, arguments={**words, name: MOST}, **of_job)
    return rehearsals(FakeWorker(sizes, context_length=8192), job, toy(6), defaults)


def values(
    name: str, method: str = "sft", defaults: Knobs = TRL_DEFAULTS, profile: DataProfile | None = None, **words: Any
) -> tuple[list[int], str]:
    longest = 100 if profile is None else profile.longest
    facts = ModelFacts(context_length=8192, is_quantized=False, hidden_size=896)
    subject = asked(name, method, defaults, **words).subject(facts, Lengths(longest=longest, profile=profile))
    found = question_of(subject)
    assert found is not None
    return list(found.values), found.stopped_by


ROWS, GROUP = "per_device_train_batch_size", "num_generations"
DATA = DataProfile(rows_by_length={100: 9, 700: 1})
CONTEXT, DIVISORS = "the model's context", "the effective batch size"


def test_what_is_tried_begins_and_ends_as_the_job_allows() -> None:
    for name, words, first, last, stopped_by in (
        ("max_length", {}, [64, 80], 8192, CONTEXT),
        ("max_length", {"profile": DATA}, [64, 80], 700, "no row of the data is longer"),
        ("max_length", {"profile": DATA, "packing": True}, [64, 80], 8192, CONTEXT),
        # Rows divide an effective batch that is given, and make one that is not.
        (ROWS, {"max_length": 64, "effective_batch_size": 12}, [1, 2, 3, 4, 6, 12], 12, DIVISORS),
        (ROWS, {"max_length": 64, "effective_batch_size": 12, "gradient_accumulation_steps": 4}, [3], 3, DIVISORS),
        (ROWS, {"max_length": 64}, [1, 2, 3], 16_384, "at most 16,384 rows"),
        (ROWS, {"method": "kto", "max_length": 64}, [2, 3], 16_384, "at most 16,384 rows"),
        (ROWS, {"method": "grpo", "defaults": GRPO}, [8, 16], 16_384, "at most 16,384 rows"),  # whole groups
        (ROWS, {"profile": DATA, "max_length": 64}, [*range(1, 11)], 10, "the data have no more rows"),
        # So do groups.
        (GROUP, {"effective_batch_size": 12}, [2, 3, 4, 6, 12], 12, "the completions of a generation"),
        (GROUP, {}, [2, 3, 4], 16_384, "at most 16,384 completions"),
        (GROUP, {"per_device_train_batch_size": 4}, [2, 4], 4, "the completions of a generation"),
        ("max_completion_length", {}, [64, 80], 8092, f"{CONTEXT}, less a prompt of 100 tokens"),
        ("lora_r", {"max_length": 64}, [1, 2, 4, 8, 16], 896, "the width of the model's layers"),
    ):
        online = {"method": "grpo", "defaults": GRPO} if name in (GROUP, "max_completion_length") else {}
        tried, why = values(name, **{**online, **words})
        assert (tried[: len(first)], tried[-1], why[: len(stopped_by)]) == (first, last, stopped_by), (name, words)


def test_the_plan_has_as_much_as_fits_and_tells_the_neighbour_that_does_not() -> None:
    for name, words in (
        ("max_length", {}),
        ("per_device_train_batch_size", {"max_length": 256}),
        ("lora_r", {"max_length": 3000, "per_device_train_batch_size": 1}),
        ("num_generations", {"method": "grpo", "defaults": GRPO, "prompt_length": 64}),
        ("max_completion_length", {"method": "grpo", "defaults": GRPO, "prompt_length": 64}),
    ):
        wished = asked(name, fit="lossless", **words)
        chosen = api.plan(wished)
        most = chosen.most
        assert most is not None, name
        assert getattr(chosen.knobs, name) == most.value, name
        assert chosen.estimate.fits, name
        assert (most.next_value or 0) > most.value, name
        budget = chosen.estimate.budget_bytes
        assert (most.next_required_bytes or 0) > budget, name
        assert f"{name} {most.value}" in most_sentence(most, budget, chosen.level), name
        assert chosen.job.arguments[name] == MOST, "the user's own words"
        trained = settled(wished.job, chosen.knobs)
        assert (trained.arguments[name], trained.maximized) == (most.value, None), name
        followed = api.plan(wished, earlier=chosen)
        assert (followed.knobs, followed.most, followed.warnings) == (chosen.knobs, most, chosen.warnings), name


def test_an_estimate_is_of_a_number_and_what_is_wrong_with_every_value_is_said() -> None:
    with pytest.raises(UsageError, match="--max_length max searches for the largest value"):
        api.estimate(asked("max_length"))
    with pytest.raises(BatchSplitError):
        values("num_generations", "grpo", GRPO, effective_batch_size=7, per_device_train_batch_size=2)
    with pytest.raises(ContextLengthError, match="The longest prompt has 8192"):
        values("max_completion_length", "grpo", GRPO, profile=DataProfile(rows_by_length={8192: 1}))


AREA = 1024 * 768
STEPS = tuple(2**20 >> halving for halving in range(9))
TEXT_TOKENS = 100


def image_tokens(max_pixels: int | None) -> int:
    return min(AREA, max_pixels or AREA) // 28**2


def pictures(job: Job, knobs: Knobs) -> Sequence[int]:
    """A small model and, for each row at once, a MiB for every token of its text and its images."""
    tokens = min(knobs.max_length or 10**9, image_tokens(knobs.max_pixels) + TEXT_TOKENS)
    return [GIB // 8, tokens * MIB * knobs.per_device_train_batch_size]


@dataclass
class Pictured(FakeWorker):
    """Has rows of one large image each."""

    steps: tuple[int, ...] = STEPS

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        facts = super().describe(job, compute_capability)
        return replace(facts, reads_images=True, pixel_steps=self.steps)

    def fingerprint(self, job: Job) -> Fingerprint:
        return Fingerprint(digest=f"{job.arguments.get('max_pixels')}", names_files=False)

    def profile(self, job: Job, on_counting: object) -> DataProfile:
        tokens = image_tokens(job.arguments.get("max_pixels"))
        images = ImageProfile(
            rows_by_images={1: 10}, rows_by_image_tokens={tokens: 10}, rows_by_end={tokens: 10}, worst=("1024x768",)
        )
        return DataProfile(rows_by_length={tokens + TEXT_TOKENS: 10}, images=images)


def planned(gib: float, worker: FakeWorker | None = None, earlier: Plan | None = None, **job: Any) -> Plan:
    given = {"method": "sft", "model": "m", "dataset": "rows.jsonl", "arguments": {}}
    asked = rehearsals(worker or Pictured(sizes=pictures), Job(**{**given, **job}), toy(gib))
    return api.plan(replace(asked, headroom_bytes=0), earlier=earlier)


def gib_for(max_pixels: int | None) -> float:
    """What a row with images of that size takes, and hardly more."""
    return 0.2 + (image_tokens(max_pixels) + TEXT_TOKENS) / 1024


SAID = {"arguments": {"max_pixels": 2**19}, "forbid": frozenset({MAX_LENGTH})}


@pytest.mark.parametrize("max_pixels", [2**19, 2**16])
def test_images_are_made_as_much_smaller_as_it_takes(max_pixels: int) -> None:
    plan = planned(gib_for(max_pixels))
    assert (plan.knobs.max_pixels, plan.level) == (max_pixels, "smaller images")
    (lever,) = [lever for lever in plan.levers if lever.name == "max_pixels"]
    tokens = image_tokens(max_pixels)
    assert f"a row has at most {tokens} image tokens, in place of {image_tokens(None)}" in lever.why
    assert plan.data is not None
    assert plan.data.longest == tokens + TEXT_TOKENS


def test_they_stay_as_they_are_where_that_fits_and_text_is_cut_where_they_cannot_be_smaller() -> None:
    assert planned(gib_for(None)).knobs.max_pixels is None
    short = planned(gib_for(None) - 120 / 1024)
    assert (short.knobs.max_pixels, short.data and short.data.truncated_rows_fraction) == (2**19, 0.0)
    cut = planned(gib_for(None) - 120 / 1024, Pictured(sizes=pictures, steps=()))  # which cannot be smaller
    assert cut.level == "shorter rows"
    assert cut.knobs.max_length is not None
    assert image_tokens(None) <= cut.knobs.max_length < image_tokens(None) + TEXT_TOKENS


@pytest.mark.parametrize(
    "words",
    [{"forbid": frozenset({"max_pixels", MAX_LENGTH})}, {"fit": "rounding"}, SAID],
    ids=["forbidden", "rounding", "said"],
)
def test_they_are_not_where_the_user_said_otherwise(words: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFitError):
        planned(gib_for(2**18), **words)


def test_a_plan_that_is_followed_has_its_images_as_small_as_it_made_them() -> None:
    plan = planned(gib_for(2**18))
    worker = Pictured(sizes=pictures)
    followed = planned(gib_for(2**18), worker, earlier=plan)
    assert (followed.knobs, followed.row_tokens, followed.warnings) == (plan.knobs, plan.row_tokens, plan.warnings)
    assert worker.asked == [], "nothing has changed that a rehearsal depends on"
