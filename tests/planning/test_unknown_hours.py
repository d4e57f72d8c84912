"""What an estimate says of rows of every length where it does not know what they make of it."""

from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.support.errors import DatasetNotFoundError
from autotrain_mem.types import DataProfile, Job
from tests.fake_worker import FakeWorker, rehearsals, toy

CARD = toy(40, "toy", origin="named", compute_capability=(8, 9))
HOURS = "what rows of every length make the allocator reserve over hours: "


class Unreadable(FakeWorker):
    def profile(self, job: Job, on_counting: object) -> DataProfile:
        raise DatasetNotFoundError("There is no file rows.jsonl.")


def unknown(worker: FakeWorker | None = None, *, dataset: str | None, **arguments: Any) -> list[str]:
    """What is not counted of rows of every length."""
    job = Job(method="sft", model="m", dataset=dataset, arguments={"max_length": 512, **arguments})
    memory = api.estimate(rehearsals(worker or FakeWorker(), job, CARD)).memory
    assert memory.mixed_lengths is None
    return [each.removeprefix(HOURS) for each in memory.not_counted if each.startswith(HOURS)]


def test_an_estimate_without_data_asks_for_them() -> None:
    assert unknown(dataset=None) == ["nothing says how long they are; give --dataset"]


def test_data_that_cannot_be_read_end_no_estimate_and_are_the_reason() -> None:
    assert unknown(Unreadable(), dataset="rows.jsonl") == ["the data could not be read: There is no file rows.jsonl"]


def test_a_rehearsal_of_no_two_steps_is_the_reason() -> None:
    (reason,) = unknown(dataset="rows.jsonl")
    assert reason.startswith("the steps of this rehearsal cannot be played again")


@pytest.mark.parametrize("alike", ["packing", "padding_free"])
def test_nothing_is_missing_where_all_batches_are_alike(alike: str) -> None:
    assert unknown(dataset="rows.jsonl", **{alike: True}) == unknown(dataset=None, **{alike: True}) == []
