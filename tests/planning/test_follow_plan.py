"""A plan followed: as it is where nothing has changed, else rehearsed once, or refused with why; on other GPUs too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem import api
from autotrain_mem.machine.catalog import named
from autotrain_mem.planning import follow_plan, for_processes
from autotrain_mem.planning.kept_answers import NOWHERE, job_key
from autotrain_mem.planning.plan import NOT_MODELLED, machine_warnings
from autotrain_mem.planning.read_request import with_plan
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.run.report_material import material_of
from autotrain_mem.support.errors import AutofitError, DoesNotFitError, UsageError
from autotrain_mem.support.store import Store
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import AutoFit, Candidate, Experience, Hardware, Job, Knobs, Plan, PythonCall, Topology
from tests import fake_worker, probe_examples
from tests.fake_worker import FakeWorker
from tests.planning.test_compare_gpus import ADA, LARGE, SMALL

JOB = Job(method="sft", model="here/m", dataset=None, arguments={"max_length": 512, "lora_r": 16})
DIGESTS = {"here/m": "one", "elsewhere/m": "one", "another": "two"}
AGAIN = "autofit plan ..."


def counting(longest: int = 300, digests: Any = DIGESTS) -> FakeWorker:
    return FakeWorker(longest=longest, digests=digests)


def rehearsals(worker: FakeWorker, job: Job = JOB, card: Hardware = LARGE, **more: Any) -> Rehearsals:
    return fake_worker.rehearsals(worker, job, card, **more)


def made(job: Job = JOB, card: Hardware = LARGE, **more: Any) -> Plan:
    return api.plan(rehearsals(counting(), job, card, **more))


def asking(**arguments: Any) -> Job:
    return replace(JOB, arguments={**JOB.arguments, **arguments})


def handing(digest: str) -> Job:
    return replace(JOB, python_call=PythonCall(path="call", holds_model=False, holds_rows=True, digest=digest))


def followed(plan: Plan, job: Job = JOB, card: Hardware = LARGE, worker: FakeWorker | None = None, **more: Any) -> Plan:
    return api.plan(rehearsals(worker or counting(), job, card, **more), earlier=plan, again=AGAIN)


def reason(plan: Plan, job: Job = JOB, card: Hardware = LARGE, worker: FakeWorker | None = None) -> str:
    """Why it was rehearsed once, whole; empty where it was not."""
    worker = worker or counting()
    warnings = followed(plan, job, card, worker).warnings
    assert len(worker.asked) == len(warnings)
    return warnings[0].partition("changed: ")[2].rstrip(".") if warnings else ""


def test_where_nothing_has_changed_nothing_is_rehearsed_and_the_plan_is_the_same() -> None:
    plan, worker = made(), counting()
    assert plan.alternatives == (), "the next level is no faster with these workers"
    assert followed(plan, worker=worker) == plan
    assert not worker.asked
    job = asking(learning_rate=1e-5, output_dir="elsewhere", max_steps=7, seed=1)  # no rehearsal depends on these
    assert reason(plan, job) == ""
    again = followed(plan, job)
    assert (again.job, again.optimizer_steps, again.knobs) == (job, 7, replace(plan.knobs, learning_rate=1e-5))
    same = {"per_device_train_batch_size": plan.knobs.per_device_train_batch_size, "use_peft": plan.knobs.use_peft}
    assert reason(plan, asking(**same)) == ""


def test_versions_are_compared_in_words_and_others_are_rehearsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, why in (
        ({"trl": "99.0", "vllm": "1.0"}, f"trl {versions_key()['trl']} -> 99.0, vllm not installed -> 1.0"),
        ({"trl files": "1", "autotrain_mem": "2"}, "autofit's own code, trl's files"),
        ({"trl files": "1", "trl": "99.0"}, f"trl {versions_key()['trl']} -> 99.0"),
        ({"torch": f"{str(versions_key()['torch']).partition('+')[0]}+cu130"}, ""),
    ):
        plan, worker, attempts = made(), counting(), list[Candidate]()
        monkeypatch.setattr(follow_plan, "versions_key", lambda changed=changed: {**versions_key(), **changed})
        assert reason(plan) == why
        again = api.plan(rehearsals(worker), attempts.append, earlier=plan)
        assert [each.knobs for each in worker.asked] == [each.knobs for each in attempts] == [plan.knobs] * bool(why)
        assert again.knobs == plan.knobs
        assert again.estimate.memory.rehearsed_layers is None


def test_a_word_counts_where_a_rehearsal_depends_on_it() -> None:
    plan = made()
    assert [lever.name for lever in plan.levers] == ["gradient_checkpointing"], "let go, which no forbid is about"
    for job, why in (
        (replace(JOB, model="elsewhere/m"), ""),
        (replace(JOB, fit="lossless", forbid=frozenset({"lora", "gradient_checkpointing"}), max_slowdown=2.0), ""),
        (asking(max_length=1024), "max_length 512 -> 1024, longest row 512 -> 1024 tokens"),
        (
            replace(asking(lora_r=32, weight_decay=0.1), environment={"TOKENIZERS_PARALLELISM": "false"}),
            "lora_r 16 -> 32, weight_decay not given -> 0.1, the variable TOKENIZERS_PARALLELISM",
        ),
    ):
        assert reason(plan, job) == why
        assert followed(plan, job).job == job


def test_the_environment_the_models_config_and_data_that_grew_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    automatic, job = replace(asking(max_length="auto"), dataset="d"), replace(JOB, dataset="d")
    assert made(automatic).row_tokens == 300
    assert reason(made(automatic), automatic, worker=counting(longest=299)) == ""
    plan = made(job)
    assert reason(plan, job, worker=counting(longest=301)) == "longest row 300 -> 301 tokens"
    assert reason(plan, replace(JOB, dataset="e")) == "dataset d -> e"
    assert reason(plan, job, worker=counting(digests={"here/m": "edited"})) == "the config of here/m"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert reason(plan, job) == "PYTORCH_ALLOC_CONF not set -> max_split_size_mb:64"


def test_what_a_script_hands_over_is_told_by_its_digest() -> None:
    plan, why = made(handing("a")), "the script's objects"
    assert (plan.objects, plan.job.python_call) == ("a", None)
    assert [reason(plan, handing(digest)) for digest in "ab"] == ["", why]
    assert reason(made(handing("")), handing("")) == why
    assert reason(plan, JOB).endswith(why)


def test_another_card_is_judged_by_what_it_has_and_one_without_bfloat16_in_float16() -> None:
    plan = made()
    larger = replace(LARGE, name="larger", total_bytes=40 * GIB, free_bytes=40 * GIB)
    assert reason(plan, card=larger) == "card large -> larger"
    again = followed(plan, card=larger)
    assert (again.estimate.hardware, again.estimate.budget_bytes) == (larger, larger.budget_bytes())
    assert again.alternatives == (), "they were those of the other card"
    nvml = replace(named("rtx4090"), name="NVIDIA GeForce RTX 4090", origin="detected", uuid="GPU-1")
    assert reason(made(card=named("rtx4090")), card=nvml) == "", "a card of the catalog by NVML's name"
    again = followed(plan, card=replace(LARGE, name="turing", compute_capability=(7, 5)))
    assert (again.knobs.fp16, again.levers[0].name, "7.5" in again.levers[0].why) == (True, "fp16", True)
    assert followed(again, card=replace(LARGE, compute_capability=ADA)).knobs.fp16, "what the plan says is kept"


def test_less_memory_counts_only_where_the_plan_needs_it_and_what_no_longer_fits_is_refused_with_the_sums() -> None:
    with pytest.raises(DoesNotFitError, match=r"does not fit small\.\n  needs   [^\n]*\n  budget  11\.5 GiB") as raised:
        followed(made(), card=SMALL)
    assert raised.value.message.endswith("on large; since then: card large -> small")
    assert raised.value.hint == f"Plan again: {AGAIN}"
    plan = made(headroom_bytes=2 * GIB)
    assert followed(plan).estimate.budget_bytes == LARGE.total_bytes - 2 * GIB
    assert followed(plan, headroom_bytes=GIB).estimate.budget_bytes == LARGE.total_bytes - GIB
    plan = made()
    spare = plan.estimate.budget_bytes - plan.estimate.required_bytes
    enough = replace(LARGE, free_bytes=LARGE.free_bytes - spare)
    assert reason(plan, card=enough) == ""
    assert followed(plan, card=enough).estimate.hardware == enough
    with pytest.raises(DoesNotFitError, match=r"since then: budget 23\.0 GiB -> "):
        followed(plan, card=replace(enough, free_bytes=enough.free_bytes - 1))


def test_a_plan_that_a_probe_confirmed_keeps_its_figure_outside_torch_and_any_other_is_told_what_has_changed() -> None:
    """As where the context cannot be measured this time, so that the table's figure counts."""
    plan = made()
    spare = plan.estimate.budget_bytes - plan.estimate.required_bytes
    unmeasured = replace(LARGE, non_torch_bytes=LARGE.non_torch_bytes + spare + 500 * MIB)
    with pytest.raises(DoesNotFitError, match="since then: memory outside torch ") as refusal:
        followed(plan, card=unmeasured)
    assert "budget 23.0 GiB ->" not in refusal.value.message
    measured = replace(probe_examples.probe(60), knobs=plan.knobs)
    probed = replace(plan, experience=Experience(probes=(measured,)))
    again = followed(probed, card=unmeasured)
    assert (again.warnings, again.estimate.required_bytes) == ((), plan.estimate.required_bytes)
    assert again.experience == probed.experience
    refuted = replace(plan, experience=Experience(probes=(replace(measured, fits=False),)))
    with pytest.raises(DoesNotFitError, match="memory outside torch"):
        followed(refuted, card=unmeasured)


def test_what_contradicts_the_plan_is_refused_before_anything_is_rehearsed() -> None:
    plan, worker = made(card=SMALL), counting()
    for job, said in (
        (asking(per_device_train_batch_size=3), "per_device_train_batch_size is 3, and 2 in the plan"),
        (asking(gradient_checkpointing=True), "gradient_checkpointing is True, and False in the plan"),
        (asking(max_length="p99"), "max_length is p99, and 512 in the plan"),
        (replace(JOB, effective_batch_size=12), "effective_batch_size is 12, and 8 in the plan"),
        (replace(JOB, forbid=frozenset({"lora", "optimizer_offload"})), "forbid has optimizer_offload, and the plan"),
        (replace(JOB, model="another"), r"The plan is for here/m, not for another\."),
        (replace(JOB, method="dpo"), r"The plan is for sft, not for dpo\."),
        (replace(JOB, forbid=frozenset({"lara"})), "no lever is named lara"),
    ):
        with pytest.raises(UsageError, match=said) as raised:
            followed(plan, job, SMALL, worker)
        assert not worker.asked
        assert "no lever" in said or f"plan again: {AGAIN}" in raised.value.hint


def test_how_far_to_go_is_compared_with_how_far_the_plan_went_and_a_length_it_found_is_kept() -> None:
    offloading = made(card=SMALL)
    assert offloading.level == "lossless, offloading"
    assert reason(offloading, replace(JOB, fit="lossless"), SMALL) == ""
    card = replace(SMALL, total_bytes=8 * GIB, free_bytes=8 * GIB)
    no_lora = replace(JOB, forbid=frozenset({"lora"}))
    for job, level in ((asking(learning_rate=1e-4), "rounding"), (no_lora, "rounding, offloading")):
        plan = made(job, card=card)
        assert plan.level == level
        assert reason(plan, replace(job, fit="rounding"), card) == ""
        with pytest.raises(UsageError, match=f"fit is lossless, and the plan's level is {level}"):
            followed(plan, replace(job, fit="lossless"), card)
    plan = made(replace(asking(max_length="auto"), dataset="d"))
    with pytest.raises(UsageError, match="max_length is 200, and 300 in the plan"):
        followed(plan, replace(asking(max_length=200), dataset="d"))


def test_only_what_moves_bytes_is_part_of_a_kept_rehearsals_key(tmp_path: Path) -> None:
    assert job_key(asking(learning_rate=3e-3, output_dir="elsewhere", num_train_epochs=7)) == job_key(JOB)
    assert job_key(asking(weight_decay=0.1)) != job_key(JOB), "some optimizers hold decayed gradients"
    kept = rehearsals(counting(), store=Store(tmp_path))
    assert kept.footprint_store is kept.store
    assert replace(kept, job=asking(trust_remote_code=True)).footprint_store is NOWHERE, "its code may change unseen"


def test_a_report_draws_the_step_of_every_plan_new_cached_followed_or_for_a_like_card(tmp_path: Path) -> None:
    store, file = Store(tmp_path / "cache"), tmp_path / "plan.json"
    first, like = made(store=store), replace(LARGE, name="like", total_bytes=LARGE.total_bytes + GIB)
    with_data = followed(first, replace(JOB, dataset="d"), worker=counting(200), store=store)
    for plan in (first, made(store=store), made(card=like, store=store), with_data):
        plan.save(file)
        found = material_of(file, store)
        assert (found.timeline is not None, found.profile is not None, found.not_shown) == (True, bool(plan.data), ())
        rows = " and the row lengths" if plan.data else ""
        assert (
            f"not shown: the memory timeline of the rehearsed step{rows}. " in material_of(file, NOWHERE).not_shown[0]
        )


SPLIT = {"max_length": 512, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
SPLIT_JOB = Job(method="sft", model="here/m", dataset=None, arguments=SPLIT)
HINTS: Any = api.PlanHints(other_method="", objects="")


def on_cards(job: Job, gpus: int) -> api.Rehearsals:
    card = replace(LARGE, topology=Topology(devices=gpus))
    return fake_worker.rehearsals(FakeWorker(longest=300), job, card).on(card)


def made_on(gpus: int = 2, **more: Any) -> Plan:
    return api.plan(on_cards(replace(SPLIT_JOB, **more), gpus))


def followed_on(plan: Plan, asked: AutoFit, gpus: int) -> Plan:
    """As ``request.with_plan`` and ``rehearsals_for`` make the job."""
    request = with_plan(api.RunRequest(method="sft", autofit=asked), HINTS, print, to_train=False)
    job = request.job({**request.config, **request.autofit.pins})
    return api.plan(on_cards(job, gpus), earlier=plan, again="autofit plan ...")


def split(knobs: Knobs) -> tuple[int, int, int]:
    return knobs.per_device_train_batch_size, knobs.gradient_accumulation_steps, knobs.processes


def test_the_effective_batch_stays() -> None:
    for begun, gpus, sharding, wanted in (
        (2, 4, None, (4, 1, 4)),
        (2, 1, None, (4, 4, 1)),
        (4, 2, "fsdp2", (4, 4, 2)),
        (2, 8, None, (2, 1, 8)),  # four at once are no longer in the batch of 16
        (1, 2, "zero2", (4, 1, 2)),
    ):
        plan = made_on(begun)
        now = followed_on(plan, AutoFit(plan=plan, gpus=gpus, sharding=sharding), gpus)
        assert split(now.knobs) == wanted
        assert now.knobs.effective_batch_size == plan.knobs.effective_batch_size
        assert now.optimizer_steps == plan.optimizer_steps
        assert now.knobs.sharding == (sharding or (plan.knobs.sharding or "ddp" if gpus > 1 else None))
        (warning,) = [each for each in now.warnings if "has changed" in each]
        assert f"GPUs {begun} -> {gpus}" in warning


def test_the_sharding_alone_may_be_another_and_the_same_processes_change_nothing() -> None:
    plan = made_on(2)
    now = followed_on(plan, AutoFit(plan=plan, sharding="zero1"), 2)
    assert now.knobs == replace(plan.knobs, sharding="zero1")
    again = followed_on(now, AutoFit(plan=now, gpus=4), 4)
    assert (again.knobs.sharding, split(again.knobs)) == ("zero1", (4, 1, 4))
    for asked in (AutoFit(plan=plan), AutoFit(plan=plan, gpus=2), AutoFit(plan=plan, sharding=plan.knobs.sharding)):
        assert not for_processes.is_shared_otherwise(asked, plan)
        assert followed_on(plan, asked, 2).knobs == plan.knobs


def test_what_the_plan_cannot_be_shared_by_is_refused() -> None:
    for begun, arguments, asked, message in (
        (2, {}, {"gpus": 3}, "3 GPUs do not divide the effective batch size 16"),
        (2, {}, {"gpus": 4, "effective_batch_size": 32}, "effective_batch_size is 32, and 16 in the plan"),
        (1, {"optim": "adamw_bnb_8bit"}, {"gpus": 2, "sharding": "fsdp2"}, "optim, which does not work with"),
        (4, {"cp_size": 2}, {"gpus": 3}, "--cp_size 2 does not divide 3 GPUs"),
    ):
        plan = made_on(begun, arguments={**SPLIT, **arguments})
        with pytest.raises(AutofitError, match=message):
            followed_on(plan, AutoFit(plan=plan, **asked), asked["gpus"])


def test_as_many_gpus_share_a_row_as_before_unless_asked_otherwise() -> None:
    plan = made_on(4, arguments={**SPLIT_JOB.arguments, "cp_size": 2})
    wider = followed_on(plan, AutoFit(plan=plan, gpus=8), 8).knobs
    assert (wider.cp_size, split(wider), wider.effective_batch_size) == (2, (4, 1, 8), 16)
    asked = AutoFit(plan=plan, cp_size=1)
    assert for_processes.is_shared_otherwise(asked, plan)
    alone = followed_on(plan, asked, 4).knobs
    assert (alone.cp_size, split(alone), alone.effective_batch_size) == (1, (4, 1, 4), 16)


def test_an_effective_batch_that_nobody_asked_for_is_told_with_what_it_comes_from_on_several_machines_alone() -> None:
    job, many = Job(method="dpo", model="toy-1B", dataset=None), Topology(nodes=128, devices=8)
    knobs = replace(TRL_DEFAULTS, processes=1024)
    assert [*machine_warnings(job, replace(knobs, processes=8), Topology(devices=8))] == []
    modelled, batch = machine_warnings(job, knobs, many)
    assert modelled == NOT_MODELLED
    assert batch.startswith("8,192 pairs in each optimizer step: no --effective_batch_size is given")
    assert batch.endswith("--effective_batch_size takes multiples of 1024")
    for asked in (replace(job, effective_batch_size=2048), replace(job, arguments={"gradient_accumulation_steps": 2})):
        assert [*machine_warnings(asked, knobs, many)] == [NOT_MODELLED]
