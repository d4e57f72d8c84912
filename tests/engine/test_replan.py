"""Another plan for a run under way: less memory, and the same training."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from test_follow_plan import JOB, Counting, made, rehearsals

from autotrain_mem.engine.recover.replan import MOVABLE, flags_of, with_less_on_device, with_less_on_host
from autotrain_mem.engine.recover.supervised import SupervisedRun, as_begun
from autotrain_mem.errors import OutputFolderError, TrainingError
from autotrain_mem.spec import Incident, Job, Knobs, Learned, Phase, Plan, codec
from autotrain_mem.spec.experience import Restart
from autotrain_mem.training.exit_causes import Ending

PLAN = made(replace(JOB, effective_batch_size=16))
RESTART = Restart(step=7, resumed_at=5, cause="killed", why="signal 9", change="")
INCIDENT = Incident(step=7, phase=Phase.BACKWARD, remedy="split into 4 + 4 rows", message="")


def _less(peak_reserved_bytes: int | None = None, plan: Plan = PLAN, **arguments: Any) -> Plan | None:
    job = replace(plan.job, arguments={**plan.job.arguments, **arguments})
    return with_less_on_device(rehearsals(Counting(), job), plan, peak_reserved_bytes)


def _moved(before: Knobs, after: Knobs) -> set[str]:
    return {each.name for each in fields(Knobs) if getattr(before, each.name) != getattr(after, each.name)}


def test_a_plan_that_ran_out_of_memory_is_followed_by_the_same_training_in_clearly_less() -> None:
    less, much_less = _less(), _less(peak_reserved_bytes=2 * PLAN.estimate.required_bytes)
    assert less is not None
    assert less.estimate.required_bytes <= 0.9 * PLAN.estimate.required_bytes
    assert less.estimate.budget_bytes == PLAN.estimate.budget_bytes
    assert less.knobs.effective_batch_size == PLAN.knobs.effective_batch_size
    assert _moved(PLAN.knobs, less.knobs) <= MOVABLE
    assert much_less is None or much_less.estimate.required_bytes < less.estimate.required_bytes


def test_what_the_user_gave_is_not_moved() -> None:
    rows = {
        "per_device_train_batch_size": PLAN.knobs.per_device_train_batch_size,
        "gradient_accumulation_steps": PLAN.knobs.gradient_accumulation_steps,
        "gradient_checkpointing": PLAN.knobs.gradient_checkpointing,
    }
    plan = replace(PLAN, job=replace(PLAN.job, forbid=frozenset({"activation_offloading", "optimizer_offload"})))
    less = _less(plan=plan, **rows)
    assert less is None or _moved(plan.knobs, less.knobs) == {"expandable_segments"}


def test_where_rows_are_dropped_they_stay_divided_as_they_were() -> None:
    """100 rows in eights are 12 steps; in fours, of which two make a step, 13."""
    less = _less()
    assert less is not None
    assert "per_device_train_batch_size" in _moved(PLAN.knobs, less.knobs)
    less = _less(dataloader_drop_last=True)
    assert less is None or "per_device_train_batch_size" not in _moved(PLAN.knobs, less.knobs)


def test_what_the_plan_moved_to_the_host_comes_back() -> None:
    plan = replace(PLAN, estimate=replace(PLAN.estimate, knobs=replace(PLAN.knobs, activation_offloading=True)))
    back = with_less_on_host(rehearsals(Counting(), plan.job), plan)
    assert back is not None
    assert not back.knobs.activation_offloading
    assert with_less_on_host(rehearsals(Counting(), PLAN.job), PLAN) is None, "it moved nothing"


def test_the_change_is_told_as_it_would_be_typed() -> None:
    after = replace(PLAN.knobs, gradient_checkpointing=True, optimizer_offload=True)
    before = replace(PLAN.knobs, gradient_checkpointing=False)
    assert flags_of(before, after) == "--gradient_checkpointing true --optimizer_offload"


# -- the run's own records -----------------------------------------------------------------------------------------


def _run(folder: Path, job: Job = JOB) -> Any:
    events: list[Any] = []
    device = PLAN.estimate.hardware
    work = rehearsals(Counting(), job)
    run: Any = SupervisedRun(
        rehearsals=work, plan=PLAN, device=device, folder=folder, simulate=True, guarded=True, on_event=events.append
    )
    run.events = events
    return run


def _checkpoint(folder: Path, step: int) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    for name in ("pytorch_model.bin", "optimizer.pt", "scheduler.pt"):
        (made / name).write_bytes(b"older than zip")
    return made


def _resuming(wish: object) -> Job:
    return replace(JOB, arguments={**JOB.arguments, "resume_from_checkpoint": wish})


def test_what_befalls_a_run_is_in_its_plan_file_at_once(tmp_path: Path) -> None:
    run, learned = _run(tmp_path), Learned(train_tokens=512)
    run.record({"event": "incident", "incident": codec.to_json(INCIDENT), "learned": codec.to_json(learned)})
    run.record({"event": "restart", "restart": codec.to_json(RESTART)})
    kept = Plan.load(tmp_path).experience
    assert (kept.incidents, kept.restarts, kept.learned) == ((INCIDENT,), (RESTART,), learned)
    assert [event["event"] for event in run.events] == ["incident", "restart"]


def test_a_run_is_resumed_at_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(OutputFolderError, match="holds no whole checkpoint"):
        _run(tmp_path, _resuming(True)).first_checkpoint()
    with pytest.raises(OutputFolderError, match=r"trainer_state\.json is missing"):
        _run(tmp_path, _resuming(str(tmp_path / "torn-checkpoint-10"))).first_checkpoint()
    _checkpoint(tmp_path, 5)
    (tmp_path / "checkpoint-12").mkdir()
    run = _run(tmp_path, _resuming(True))
    assert run.first_checkpoint().step == 5
    assert [event["event"] for event in run.events] == ["torn"]


def test_checkpoints_beyond_the_one_that_was_named_are_another_runs_until_written_anew(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        _checkpoint(tmp_path, step)
    run = _run(tmp_path, _resuming(str(tmp_path / "checkpoint-5")))
    assert run.first_checkpoint().step == 5
    ending = Ending(error=TrainingError("It ended."), code=-9, step=12)
    assert run.newest(ending).step == 5
    run.record({"event": "checkpoint", "step": 10, "path": str(tmp_path / "checkpoint-10")})
    assert run.newest(ending).step == 10


def test_a_checkpoint_of_another_folder_counts_before_whatever_is_in_this_one(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    folder.mkdir()
    named, _ = _checkpoint(elsewhere, 10), _checkpoint(folder, 5)
    run = _run(folder, _resuming(str(named)))
    assert run.first_checkpoint().step == 10
    ending = Ending(error=TrainingError("It ended."), code=-9, step=12)
    assert run.newest(ending).path == named


def test_a_checkpoint_that_was_being_written_is_removed(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 5)
    unfinished = tmp_path / "checkpoint-10"
    unfinished.mkdir()
    ending = Ending(error=TrainingError("It ended."), code=-9, step=10, saving=str(unfinished))
    assert _run(tmp_path).newest(ending).step == 5
    assert not unfinished.exists()


def test_a_run_that_begins_takes_over_what_was_learned_and_not_what_befell() -> None:
    befallen = replace(PLAN.experience, learned=Learned(train_tokens=512), restarts=(RESTART,))
    plan = replace(PLAN, experience=befallen)
    assert as_begun(plan).experience == replace(befallen, restarts=())
    resuming = replace(plan, job=_resuming(True))
    assert as_begun(resuming).experience == befallen
    assert as_begun(resuming).job == JOB
