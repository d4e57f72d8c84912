"""A running training gets another plan and resumes from its own checkpoints; or the error names settings that fit."""

import errno
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from nouns import TRL_DEFAULTS

from autotrain_mem.planning.predictions import Predictions
from autotrain_mem.planning.rehearsals import Rehearsals
from autotrain_mem.run import replan, supervised
from autotrain_mem.run.supervised import SupervisedRun, as_begun
from autotrain_mem.support import codec, files
from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.support.units import GIB
from autotrain_mem.training.checkpoints import reach_disk, write_manifest
from autotrain_mem.training.exit_causes import Ending
from autotrain_mem.training.run_folder import LOCK_NAME, LastRun, RunFolder
from autotrain_mem.types import Incident, Job, Knobs, LearnedLimits, Phase, Plan, Restart, Shortage, Topology
from tests import fake_worker
from tests.fake_worker import FakeWorker, toy
from tests.planning.test_follow_plan import JOB, counting, made, rehearsals
from tests.training.test_checkpoints import checkpoint

PLAN = made(replace(JOB, effective_batch_size=16))
RESTART = Restart(step=7, resumed_at=5, cause="killed", why="signal 9", change="")
INCIDENT = Incident(step=7, phase=Phase.BACKWARD, remedy="split into 4 + 4 rows", message="")


def _less(peak_reserved_bytes: int | None = None, plan: Plan = PLAN, **arguments: Any) -> Plan | None:
    job = replace(plan.job, arguments={**plan.job.arguments, **arguments})
    return replan.with_less_on_device(rehearsals(counting(), job), plan, peak_reserved_bytes)


def _moved(before: Knobs, after: Knobs) -> set[str]:
    return {each.name for each in fields(Knobs) if getattr(before, each.name) != getattr(after, each.name)}


def test_a_plan_that_ran_out_of_memory_is_followed_by_the_same_training_in_clearly_less() -> None:
    less, much_less = _less(), _less(peak_reserved_bytes=2 * PLAN.estimate.required_bytes)
    assert less is not None
    assert less.estimate.required_bytes <= 0.9 * PLAN.estimate.required_bytes
    assert less.estimate.budget_bytes == PLAN.estimate.budget_bytes
    assert less.knobs.effective_batch_size == PLAN.knobs.effective_batch_size
    assert _moved(PLAN.knobs, less.knobs) <= replan.MOVABLE
    assert much_less is None or much_less.estimate.required_bytes < less.estimate.required_bytes
    # dataloader_drop_last: 100 rows in eights are 12 steps, in twice four rows 13
    assert "per_device_train_batch_size" in _moved(PLAN.knobs, less.knobs)
    whole = _less(dataloader_drop_last=True)
    assert whole is None or "per_device_train_batch_size" not in _moved(PLAN.knobs, whole.knobs)


def on_machines_of(nodes: int, devices: int = 2, **knobs: Any) -> tuple[Rehearsals, Plan]:
    """Replans 16 rows per step, planned for four such machines, on ``nodes`` machines."""
    before = replace(PLAN.knobs, processes=4 * devices, per_device_train_batch_size=1, **knobs)
    before = replace(before, gradient_accumulation_steps=16 // (4 * devices))
    plan = replace(PLAN, estimate=replace(PLAN.estimate, knobs=before))
    job = replace(plan.job, arguments=plan.job.arguments | {"sharding": before.sharding})
    asked = rehearsals(counting(), job)
    asked = replace(asked, hardware=replace(asked.hardware, topology=Topology(nodes=4, devices=devices)))
    return replan.on_machines(asked, plan, Topology(nodes=nodes, devices=devices))


HSDP = {"sharding": "hsdp", "dp_replicate_size": 4}


def test_on_fewer_machines_a_step_has_as_many_rows() -> None:
    for nodes, devices, before, after in (
        (2, 2, {"sharding": "fsdp2"}, ("fsdp2", None)),
        (2, 2, HSDP, ("hsdp", 2)),
        (1, 2, HSDP, ("fsdp2", None)),
        (1, 1, {"sharding": "fsdp2"}, (None, None)),
    ):
        asked, plan = on_machines_of(nodes, devices, **before)
        assert plan.knobs.processes == devices * nodes
        assert plan.knobs.effective_batch_size == 16
        assert (plan.knobs.sharding, plan.knobs.dp_replicate_size) == after
        assert asked.job.arguments.get("sharding") == after[0]
        assert asked.hardware.topology.nodes == nodes
    with pytest.raises(TrainingError, match="16 rows cannot be divided"):
        on_machines_of(3, 1, sharding="ddp")


def test_the_users_settings_do_not_change() -> None:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    rows = {name: getattr(PLAN.knobs, name) for name in names}
    plan = replace(PLAN, job=replace(PLAN.job, forbid=frozenset({"activation_offloading", "optimizer_offload"})))
    less = _less(plan=plan, **rows)
    assert less is None or _moved(plan.knobs, less.knobs) == {"expandable_segments"}


def test_offloading_that_the_plan_chose_is_undone() -> None:
    plan = replace(PLAN, estimate=replace(PLAN.estimate, knobs=replace(PLAN.knobs, activation_offloading=True)))
    back = replan.with_less_on_host(rehearsals(counting(), plan.job), plan)
    assert back is not None
    assert not back.knobs.activation_offloading
    assert replan.with_less_on_host(rehearsals(counting(), PLAN.job), PLAN) is None, "it offloads nothing"
    after = replace(PLAN.knobs, gradient_checkpointing=True, optimizer_offload=True)
    before = replace(PLAN.knobs, gradient_checkpointing=False)
    assert replan.flags_of(before, after) == "--gradient_checkpointing true --optimizer_offload"


def _run(folder: Path, job: Job = JOB) -> Any:
    events: list[Any] = []
    device = PLAN.estimate.hardware
    output = RunFolder(path=folder, lock=os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT))
    work = rehearsals(counting(), job)
    run: Any = SupervisedRun(
        rehearsals=work, plan=PLAN, device=device, output=output, simulate=True, guarded=True, on_event=events.append
    )
    run.events = events
    return run


def _resuming(request: object = True) -> Job:
    return replace(JOB, arguments={**JOB.arguments, "resume_from_checkpoint": request})


def test_experience_is_filed_at_once_and_a_full_disk_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    run, learned = _run(tmp_path), LearnedLimits(train_tokens=512)
    restart = {"event": "restart", "restart": codec.to_json(RESTART)}
    run.record({"event": "incident", "incident": codec.to_json(INCIDENT), "learned": codec.to_json(learned)})
    with monkeypatch.context() as patch:
        patch.setattr(files, "replace_file", full)
        run.record(restart)
        run.record(restart)
    kept = Plan.load(tmp_path).experience
    assert (kept.incidents, kept.restarts, kept.learned) == ((INCIDENT,), (), learned)
    assert [event["event"] for event in run.events] == ["incident", "note", "restart", "restart"]
    assert "plan.json: the disk is full. The run continues without it." in run.events[1]["message"]
    run.record(restart)
    (tmp_path / "plan.json").unlink()
    for step in (4, 8):
        run.record({"event": "checkpoint", "step": step, "path": ""})
    assert Plan.load(tmp_path).experience.restarts == (RESTART,) * 3
    (note,) = [event["message"] for event in run.events[5:] if event["event"] == "note"]
    assert "was removed or moved during the run: plan.json is written again" in note


def test_a_finished_run_that_is_resumed_keeps_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = {"event": "end", "interrupted": False, "seconds": 0.8, "memory": None, "steps": 9}
    monkeypatch.setattr(supervised, "supervise", lambda *_, **__: end)
    reports = []
    for start in (0, 9):
        run = _run(tmp_path)
        run.record({"event": "start", "step": start, "total_steps": 9})
        run.record({"event": "log", "step": 9, "logs": {"loss": 1.5}} if start == 0 else {"event": "other"})
        reports.append(run.finish(restarts=0))
    assert [report.has_trained for report in reports] == [True, False]
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["last_loss"], record["began_at"]) == (1.5, 0)
    assert record["versions"]["trl"]


def test_a_run_is_resumed_at_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    def refused(why: str, request: object = True) -> None:
        with pytest.raises(OutputFolderError, match=why):
            _run(tmp_path, _resuming(request)).first_checkpoint()

    (tmp_path / "checkpoint-10").mkdir()
    refused("holds no complete checkpoint")
    refused(r"trainer_state\.json is missing", tmp_path / "torn-checkpoint-10")
    checkpoint(tmp_path, 5)
    (tmp_path / "checkpoint-12").mkdir()
    rotten = checkpoint(tmp_path, 13)
    write_manifest(rotten, reach_disk(rotten) | {"optimizer.pt": 0})
    refused(r"Cannot resume from .*: optimizer\.pt differs from its checksum", rotten)
    run = _run(tmp_path, _resuming())
    assert run.first_checkpoint().step == 5
    assert [event["event"] for event in run.events] == ["torn", "torn"]


def test_a_run_resumes_only_from_its_own_checkpoints(tmp_path: Path) -> None:
    for step in (5, 10):
        checkpoint(tmp_path, step)
    write_manifest(checkpoint(tmp_path, 120), {}, "another run")
    run = _run(tmp_path, _resuming(str(tmp_path / "checkpoint-5")))
    assert run.first_checkpoint().step == 5
    ending = Ending(error=TrainingError("It ended."), code=-9, step=12)
    assert run.newest(ending).step == 5, "the one that was named"
    write_manifest(tmp_path / "checkpoint-10", {}, run._number)
    assert run.newest(ending).step == 10
    assert _run(tmp_path).newest(ending) is None


def test_the_last_run_of_the_folder_is_resumed(tmp_path: Path) -> None:
    first = _run(tmp_path)
    first.output.begin(LastRun(number=first._number, start=None))
    write_manifest(checkpoint(tmp_path, 120), {}, "another run")
    with pytest.raises(OutputFolderError, match="no complete checkpoint of its last run") as raised:
        _run(tmp_path, _resuming()).first_checkpoint()
    assert f"another run: --resume_from_checkpoint {tmp_path / 'checkpoint-120'}" in raised.value.hint
    write_manifest(checkpoint(tmp_path, 10), {}, first._number)
    again = _run(tmp_path, _resuming())
    assert (again.first_checkpoint().step, again._number) == (10, first._number)
    branch = _run(tmp_path, _resuming(str(tmp_path / "checkpoint-10")))
    branch.output.begin(LastRun(number=branch._number, start=branch.first_checkpoint().path))
    write_manifest(checkpoint(tmp_path, 15), {}, first._number)
    assert _run(tmp_path, _resuming()).first_checkpoint().step == 10, "where the branch began"


def test_a_checkpoint_of_another_folder_counts_and_an_unfinished_one_is_removed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    unfinished = folder / "checkpoint-10"
    for each in (elsewhere, folder, unfinished):
        each.mkdir()
    named = checkpoint(elsewhere, 10)
    run = _run(folder, _resuming(str(named)))
    assert run.first_checkpoint().step == 10
    ending = Ending(error=TrainingError("It ended."), code=-9, step=12, saving=str(unfinished))
    assert run.newest(ending).path == named
    assert not unfinished.exists()
    (named / "optimizer.pt").unlink()
    assert run.newest(ending) is None, "the first checkpoint may be gone by now"


def test_a_new_run_takes_over_what_was_learned_but_no_incidents() -> None:
    befallen = replace(PLAN.experience, learned=LearnedLimits(train_tokens=512), restarts=(RESTART,))
    plan = replace(PLAN, experience=befallen)
    assert as_begun(plan).experience == replace(befallen, restarts=())
    resuming = replace(plan, job=_resuming())
    assert as_begun(resuming).experience == befallen
    assert as_begun(resuming).job == JOB


CARD = toy(20)


def sizes(job: Job, knobs: Knobs) -> list[int]:
    """A row takes 1 GiB, with checkpointing a half; the weights take 8 GiB, with an adapter 2."""
    row = GIB // 2 if knobs.gradient_checkpointing else GIB
    return [2 * GIB if knobs.use_peft else 8 * GIB, row * knobs.per_device_train_batch_size]


def suggested(needed_gib: int, others_gib: int = 0, *, failing: frozenset[str] = frozenset(), **words: Any) -> Any:
    """The change after a run of 8 rows of 512 tokens that failed to allocate the last 2 GiB."""
    worker = FakeWorker(sizes, context_length=2048)
    job = Job(method="sft", model="m", dataset="d", arguments=words, prompt_length=None)
    asked = fake_worker.rehearsals(worker, job, CARD)
    (plan,) = Predictions(asked.subject()).rehearse([replace(TRL_DEFAULTS, max_length=512)], whole=True)
    worker.failing = failing
    held, free = (needed_gib - 2) * GIB, CARD.total_bytes - (needed_gib - 2 + others_gib) * GIB
    short = Shortage(
        phase=Phase.BACKWARD,
        step=1,
        requested_bytes=2 * GIB,
        segment_bytes=2 * GIB,
        total_bytes=CARD.total_bytes,
        free_bytes=free,
        allocated_bytes=held,
        reserved_bytes=held,
        outside_bytes=0,
        measured={},
    )
    return replan.smallest_change(asked, plan, short)


def test_the_smallest_change_is_that_of_least_harm_and_none_if_nothing_fits_or_the_search_fails() -> None:
    assert suggested(16) == "--per_device_train_batch_size 1 --gradient_accumulation_steps 8"
    pins = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_peft": False}
    assert "--use_peft" in suggested(13, others_gib=11, **pins)
    assert suggested(20, others_gib=19) is None
    assert suggested(16, failing=frozenset({"sft"})) is None
