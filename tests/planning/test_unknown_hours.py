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


@pytest.mark.parametrize(
    ("worker", "dataset", "words", "reasons"),
    [
        (FakeWorker, None, {}, ["nothing says how long they are; give --dataset"]),
        (Unreadable, "rows.jsonl", {}, ["the data could not be read: There is no file rows.jsonl"]),
        (FakeWorker, "rows.jsonl", {}, ["the steps of this rehearsal cannot be replayed"]),
        *((FakeWorker, data, {"packing": True}, []) for data in ("rows.jsonl", None)),
        (FakeWorker, "rows.jsonl", {"padding_free": True}, []),
    ],
)
def test_the_reason_is_told_unless_all_batches_are_alike(
    worker: type[FakeWorker], dataset: str | None, words: dict[str, Any], reasons: list[str]
) -> None:
    job = Job(method="sft", model="m", dataset=dataset, arguments={"max_length": 512, **words})
    memory = api.estimate(rehearsals(worker(), job, CARD)).memory
    assert memory.mixed_lengths is None
    told = [each.removeprefix(HOURS) for each in memory.not_counted if each.startswith(HOURS)]
    assert [each[: len(reason)] for each, reason in zip(told, reasons, strict=True)] == reasons
