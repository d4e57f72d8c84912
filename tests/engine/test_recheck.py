"""A plan followed: as it is where nothing that it rests on has changed, else rehearsed once, or refused with why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from nouns import TRL_DEFAULTS
from test_cards import ADA, LARGE, SMALL, FakeWorker

from autotrain_mem import api
from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.engine.reuse import follow_plan
from autotrain_mem.errors import DoesNotFitError, UsageError
from autotrain_mem.machine.catalog import named
from autotrain_mem.spec import Candidate, DataProfile, Hardware, Job, Plan
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.spec.python_call import Handed
from autotrain_mem.units import GIB
from autotrain_mem.versions import versions_key

JOB = Job(method="sft", model="here/m", dataset=None, arguments={"max_length": 512, "lora_r": 16})
DIGESTS = {"here/m": "one", "elsewhere/m": "one", "another": "two"}


@dataclass
class Counting(FakeWorker):
    """Knows its models apart, and how long the rows of its data are."""

    longest: int = 300
    digests: Mapping[str, str] | None = None

    def describe(self, job: Job, compute_capability: tuple[int, int]) -> ModelFacts:
        facts = super().describe(job, compute_capability)
        return replace(facts, digest=(self.digests or DIGESTS)[job.model])

    def fingerprint(self, job: Job) -> str:
        return str(self.longest)

    def profile(self, job: Job, hear: Any) -> DataProfile:
        return DataProfile(rows_by_length={100: 9, self.longest: 1})


def rehearsals(worker: FakeWorker, job: Job = JOB, card: Hardware = LARGE, **more: Any) -> Rehearsals:
    workers = api.Workers.holding(worker)  # type: ignore[arg-type]
    return Rehearsals(workers=workers, job=job, defaults=TRL_DEFAULTS, hardware=card, **more)


def made(job: Job = JOB, card: Hardware = LARGE, **more: Any) -> Plan:
    return api.plan(rehearsals(Counting(), job, card, **more))


def asking(**arguments: Any) -> Job:
    return replace(JOB, arguments={**JOB.arguments, **arguments})


def followed(plan: Plan, job: Job = JOB, card: Hardware = LARGE, worker: Counting | None = None, **more: Any) -> Plan:
    return api.follow(rehearsals(worker or Counting(), job, card, **more), plan, again="autofit plan ...")


def reason(plan: Plan, job: Job = JOB, card: Hardware = LARGE, **more: Any) -> str:
    """Why it was rehearsed once, whole; empty where it was not."""
    worker = more.pop("worker", None) or Counting()
    warnings = followed(plan, job, card, worker, **more).warnings
    assert len(worker.asked) == len(warnings)
    return warnings[0].partition("changed: ")[2].rstrip(".") if warnings else ""


def test_where_nothing_has_changed_nothing_is_rehearsed_and_the_plan_is_the_same() -> None:
    plan, worker = made(), Counting()
    assert plan.alternatives
    assert followed(plan, worker=worker) == plan
    assert not worker.asked


def test_what_no_rehearsal_depends_on_may_change() -> None:
    job = asking(learning_rate=1e-5, output_dir="elsewhere", max_steps=7, seed=1)
    plan = made()
    assert reason(plan, job) == ""
    again = followed(plan, job)
    assert (again.job, again.optimizer_steps, again.knobs) == (job, 7, plan.knobs)


def test_other_versions_are_named_and_the_settings_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, worker, heard = made(), Counting(), list[Candidate]()
    monkeypatch.setattr(follow_plan, "versions_key", lambda: {**versions_key(), "trl": "99.0", "vllm": "1.0"})
    again = api.follow(rehearsals(worker), plan, heard.append)
    assert [knobs for knobs, _ in worker.asked] == [plan.knobs]
    assert [attempt.knobs for attempt in heard] == [plan.knobs]
    assert again.warnings == (
        "The plan was made before and rehearsed once more, since this has changed: "
        f"trl {versions_key()['trl']} -> 99.0, vllm not installed -> 1.0.",
    )
    assert again.knobs == plan.knobs
    assert again.estimate.memory.rehearsed_layers is None


def test_digests_are_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made()
    monkeypatch.setattr(follow_plan, "versions_key", lambda: {**versions_key(), "trl files": "1", "autotrain_mem": "2"})
    assert reason(plan) == "autofit's own code, trl's files"
    monkeypatch.setattr(follow_plan, "versions_key", lambda: {**versions_key(), "trl files": "1", "trl": "99.0"})
    assert reason(plan) == f"trl {versions_key()['trl']} -> 99.0"


def test_a_build_of_the_same_version_for_another_device_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made()
    public = str(versions_key()["torch"]).partition("+")[0]
    monkeypatch.setattr(follow_plan, "versions_key", lambda: {**versions_key(), "torch": f"{public}+cu130"})
    assert reason(plan) == ""


def test_another_card_is_judged_by_what_it_has() -> None:
    plan = made()
    larger = replace(LARGE, name="larger", total_bytes=40 * GIB, free_bytes=40 * GIB)
    assert reason(plan, card=larger) == "card large -> larger"
    again = followed(plan, card=larger)
    assert again.estimate.hardware == larger
    assert again.estimate.budget_bytes == larger.budget_bytes()
    assert again.alternatives == (), "they were those of the other card"


def test_what_no_longer_fits_is_refused_with_the_sums_and_the_way_out() -> None:
    with pytest.raises(DoesNotFitError) as raised:
        followed(made(), card=SMALL)
    said = raised.value.message
    assert said.startswith("here/m with the settings of its plan does not fit small.\n  needs   ")
    assert "  budget  11.5 GiB (12.0 GiB total, 491.5 MiB headroom)" in said
    assert "on large; since then: card large -> small" in said
    assert raised.value.hint == "Plan again: autofit plan ..."


def test_less_free_memory_counts_only_where_the_plan_needs_it() -> None:
    plan = made()
    spare = plan.estimate.budget_bytes - plan.estimate.required_bytes
    enough = replace(LARGE, free_bytes=LARGE.free_bytes - spare)
    assert reason(plan, card=enough) == ""
    assert followed(plan, card=enough).estimate.hardware == enough
    with pytest.raises(DoesNotFitError, match=r"since then: budget 23\.0 GiB -> "):
        followed(plan, card=replace(enough, free_bytes=enough.free_bytes - 1))


def test_the_headroom_of_the_plan_is_kept_on_its_card_unless_another_is_given() -> None:
    plan = made(headroom_bytes=2 * GIB)
    assert followed(plan).estimate.budget_bytes == LARGE.total_bytes - 2 * GIB
    assert followed(plan, headroom_bytes=GIB).estimate.budget_bytes == LARGE.total_bytes - GIB


def test_a_card_of_the_catalog_is_the_card_that_nvml_calls_otherwise() -> None:
    plan = made(card=named("rtx4090"))
    here = replace(named("rtx4090"), name="NVIDIA GeForce RTX 4090", origin="detected", uuid="GPU-1")
    assert reason(plan, card=here) == ""


def test_a_length_that_was_given_may_be_given_anew() -> None:
    plan, worker = made(), Counting()
    again = followed(plan, asking(max_length=1024), worker=worker)
    assert [knobs for knobs, _ in worker.asked] == [replace(plan.knobs, max_length=1024)]
    assert (again.knobs.max_length, again.row_tokens) == (1024, 1024)
    assert again.warnings[0].endswith("max_length 512 -> 1024, longest row 512 -> 1024 tokens.")


def test_every_other_word_that_a_rehearsal_depends_on_is_named() -> None:
    changed = replace(asking(lora_r=32, weight_decay=0.1), environment={"TOKENIZERS_PARALLELISM": "false"})
    assert (
        reason(made(), changed) == "lora_r 16 -> 32, weight_decay not given -> 0.1, the variable TOKENIZERS_PARALLELISM"
    )


def test_an_allocator_that_is_set_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert reason(plan) == "PYTORCH_ALLOC_CONF not set -> max_split_size_mb:64"


def test_data_whose_rows_have_grown_are_rehearsed_and_shorter_ones_are_not() -> None:
    job = replace(asking(max_length="auto"), dataset="d")
    plan = made(job)
    assert plan.row_tokens == 300
    assert reason(plan, job, worker=Counting(longest=299)) == ""
    job = replace(JOB, dataset="d")
    plan = made(job)
    assert reason(plan, job, worker=Counting(longest=301)) == "longest row 300 -> 301 tokens"


def test_other_data_are_named() -> None:
    plan = made(replace(JOB, dataset="d"))
    assert reason(plan, replace(JOB, dataset="e")) == "dataset d -> e"


def test_the_same_model_in_another_folder_is_followed() -> None:
    plan = made()
    assert reason(plan, replace(JOB, model="elsewhere/m")) == ""


def test_a_config_that_was_edited_is_named() -> None:
    plan = made()
    assert reason(plan, worker=Counting(digests={"here/m": "edited"})) == "the config of here/m"


def test_another_model_is_refused_before_anything_is_rehearsed() -> None:
    worker = Counting()
    with pytest.raises(UsageError, match=r"The plan is for here/m, not for another\.") as raised:
        followed(made(), replace(JOB, model="another"), worker=worker)
    assert raised.value.hint == "Train here/m with sft to follow it, or plan again: autofit plan ..."
    assert not worker.asked


def test_another_method_is_refused() -> None:
    with pytest.raises(UsageError, match=r"The plan is for sft, not for dpo\."):
        followed(made(), replace(JOB, method="dpo"))


CONTRADICTIONS: dict[str, tuple[Job, str]] = {
    "batch": (asking(per_device_train_batch_size=3), "per_device_train_batch_size is 3, and 2 in the plan"),
    "checkpointing": (asking(gradient_checkpointing=True), "gradient_checkpointing is True, and False in the plan"),
    "lora": (asking(use_peft=True), "use_peft is True, and False in the plan"),
    "wish": (asking(max_length="p99"), "max_length is p99, and 512 in the plan"),
    "effective": (replace(JOB, effective_batch_size=12), "effective_batch_size is 12, and 8 in the plan"),
    "forbid": (
        replace(JOB, forbid=frozenset({"lora", "optimizer_offload"})),
        "forbid has optimizer_offload, and the plan needs it",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_the_plan_is_refused_with_both_ways_out(name: str) -> None:
    plan = made(card=SMALL)
    job, said = CONTRADICTIONS[name]
    worker = Counting()
    with pytest.raises(UsageError, match="The plan decides otherwise: ") as raised:
        followed(plan, job, SMALL, worker)
    assert said in raised.value.message, (raised.value.message, plan.knobs)
    assert raised.value.hint == "Leave that away to train with the plan, or plan again: autofit plan ..."
    assert not worker.asked


def test_what_the_plan_meets_anyhow_may_be_asked_of_it() -> None:
    plan = made()
    assert [lever.name for lever in plan.levers] == ["gradient_checkpointing"], "let go, which no forbid is about"
    stricter = replace(JOB, fit="lossless", forbid=frozenset({"lora", "gradient_checkpointing"}), max_slowdown=2.0)
    assert reason(plan, stricter) == ""
    assert followed(plan, stricter).job == stricter
    offloading = made(card=SMALL)
    assert offloading.level == "lossless, offloading"
    assert reason(offloading, replace(JOB, fit="lossless"), SMALL) == ""


def test_how_far_to_go_is_compared_with_how_far_the_plan_went() -> None:
    card = replace(SMALL, total_bytes=8 * GIB, free_bytes=8 * GIB)
    plan = made(card=card)
    assert reason(plan, replace(JOB, fit="rounding"), card) == ""
    with pytest.raises(UsageError, match="fit is lossless, and the plan is of the level rounding"):
        followed(plan, replace(JOB, fit="lossless"), card)


def test_a_lever_that_there_is_not_is_told_beside_a_plan_too() -> None:
    with pytest.raises(UsageError, match="knows no lever named lara"):
        followed(made(), replace(JOB, forbid=frozenset({"lara"})))


def test_a_length_that_the_plan_found_may_not_be_given_anew() -> None:
    plan = made(replace(asking(max_length="auto"), dataset="d"))
    with pytest.raises(UsageError, match="max_length is 200, and 300 in the plan"):
        followed(plan, replace(asking(max_length=200), dataset="d"))


def test_the_plans_own_settings_may_be_said_again() -> None:
    plan = made()
    same = {"per_device_train_batch_size": plan.knobs.per_device_train_batch_size, "use_peft": plan.knobs.use_peft}
    assert reason(plan, asking(**same)) == ""


def test_what_a_script_hands_over_is_told_by_its_digest() -> None:
    def handing(digest: str) -> Job:
        return replace(JOB, handed=Handed(path="call", holds_model=False, holds_rows=True, digest=digest))

    plan = made(handing("a"))
    assert plan.objects == "a"
    assert plan.job.handed is None
    assert reason(plan, handing("a")) == ""
    assert reason(plan, handing("b")) == "what the script hands over"
    assert reason(made(handing("")), handing("")) == "what the script hands over"
    assert reason(plan, JOB).endswith("what the script hands over")


def test_a_card_without_bfloat16_is_followed_in_float16() -> None:
    turing = replace(LARGE, name="turing", compute_capability=(7, 5))
    again = followed(made(), card=turing)
    assert again.knobs.fp16
    assert again.levers[0].name == "fp16"
    assert followed(again, card=replace(LARGE, compute_capability=ADA)).knobs.fp16, "what the plan says is kept"
