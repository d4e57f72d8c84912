"""Where a run that does not fit would fit, and what an estimate does not count."""

from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.support.errors import DatasetNotFoundError, DoesNotFitError
from autotrain_mem.support.units import GIB
from autotrain_mem.types import DataProfile, Job, Knobs
from tests.fake_worker import FakeWorker, rehearsals, toy

CARD = toy(8, "toy8", origin="named")


@pytest.mark.parametrize(
    ("gib", "words", "more"),
    [
        (12, {}, "2 of these (--gpus 2), 6.00 GiB each"),
        (40, {}, "8 of these (--gpus 8), 5.00 GiB each"),
        (90, {}, ""),  # 11.3 each
        (12, {"optim": "adamw_8bit"}, ""),  # whose kernels know no shards
        (12, {"per_device_train_batch_size": 1}, ""),  # one row is for one process
    ],
)
def test_more_of_the_card_are_named_where_shards_fit_them_as_rehearsed(
    gib: int, words: dict[str, Any], more: str
) -> None:
    def sizes(job: Job, knobs: Knobs) -> list[int]:
        return [gib * GIB // knobs.shards, 0]

    arguments = {"max_length": 64, "use_peft": False, "dtype": "float32", "optim": "adamw_torch"} | words
    job = Job(method="sft", model="m", dataset=None, arguments=arguments, forbid=frozenset({"optimizer_offload"}))
    worker = FakeWorker(sizes)
    with pytest.raises(DoesNotFitError) as raised:
        api.plan(rehearsals(worker, job, CARD))
    hint = raised.value.hint
    assert (more in hint, " of these" in hint) == (True, bool(more))
    assert {each.knobs.processes for each in worker.asked} == ({1, int(more[0])} if more else {1})
    assert {each.knobs.effective_batch_size for each in worker.asked} == {words.get("per_device_train_batch_size", 8)}


def test_a_plan_does_not_wait_for_a_rehearsal_of_more_cards() -> None:
    """Weights of 12 GiB, and a fourth of that in 4 bits: all levels but the last need more than the card."""

    def sizes(job: Job, knobs: Knobs) -> list[int]:
        return [(4 if knobs.load_in_4bit else 12 if knobs.dtype == "float32" else 10) * GIB // knobs.shards, 0]

    worker = FakeWorker(sizes)
    job = Job(method="sft", model="m", dataset=None, arguments={"max_length": 64})
    plan = api.plan(rehearsals(worker, job, CARD, TRL_DEFAULTS))
    more = [way for each in plan.alternatives for way in each.would_fit if "of these" in way]
    assert {*more} == {f"2 of these (--gpus 2), about {size}.00 GiB each" for size in (5, 6)}
    assert {each.knobs.processes for each in worker.asked} == {1}


LARGE = toy(40, "toy", origin="named", compute_capability=(8, 9))
HOURS = "memory reserved over hours with rows of every length: "


class Unreadable(FakeWorker):
    def profile(self, job: Job, on_counting: object) -> DataProfile:
        raise DatasetNotFoundError("There is no file rows.jsonl.")


def test_the_reason_is_told_unless_all_batches_are_alike() -> None:
    for worker, dataset, words, reasons in (
        (FakeWorker, None, {}, ["their lengths are unknown; give --dataset"]),
        (Unreadable, "rows.jsonl", {}, ["the data could not be read: There is no file rows.jsonl"]),
        (FakeWorker, "rows.jsonl", {}, ["the steps of this rehearsal cannot be replayed"]),
        *((FakeWorker, data, {"packing": True}, []) for data in ("rows.jsonl", None)),
        (FakeWorker, "rows.jsonl", {"padding_free": True}, []),
    ):
        job = Job(method="sft", model="m", dataset=dataset, arguments={"max_length": 512, **words})
        memory = api.estimate(rehearsals(worker(), job, LARGE)).memory
        assert memory.mixed_lengths is None
        told = [each.removeprefix(HOURS) for each in memory.not_counted if each.startswith(HOURS)]
        assert [each[: len(reason)] for each, reason in zip(told, reasons, strict=True)] == reasons, (dataset, words)
