"""Images are made smaller where nothing else fits, as little as helps, and never where the user said otherwise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import DataProfile, Fingerprint, Job, Knobs, Plan
from autotrain_mem.types.data import ImageProfile
from autotrain_mem.types.model import ModelFacts
from tests.fake_worker import FakeWorker, rehearsals, toy

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
    assert f"a row has {tokens} tokens of images at most, in place of {image_tokens(None)}" in lever.why
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
