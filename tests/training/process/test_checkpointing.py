"""Real trainers that save, lose a checkpoint, and go on: the losses are those of a run that nothing befell."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_trainers
from tiny import tiny_folder

from autotrain_mem.errors import OutputFolderError
from autotrain_mem.training.checkpoints import MANIFEST, newest_whole, why_torn
from autotrain_mem.training.process.checkpointing import follow_saving, save_trained
from autotrain_mem.training.process.train import NoStepAfterTheLast

STEPS = 7
"""Of 13 rows by 4: into the second pass over the data."""
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": STEPS, "per_device_train_batch_size": 4}


def _trainer(model: Path, folder: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    made = tiny_trainers.trainer("sft", model, folder, **SAVING | changes)
    told: list[dict[str, Any]] = []
    made.add_callback(NoStepAfterTheLast(made))
    follow_saving(made, lambda event: told.append(dict(event)))
    return made, told


@pytest.fixture(scope="module")
def calm(gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing befalls, with dropout: random numbers count."""
    made, made_told = _trainer(gpt2, tmp_path_factory.mktemp("calm"))
    made.train()
    made.told = made_told
    return made


def _gone_on_with(calm: Any, model: Path, folder: Path, step: int, **changes: Any) -> Any:
    shutil.copytree(Path(calm.args.output_dir) / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    made, _ = _trainer(model, folder, **changes)
    made.train(resume_from_checkpoint=str(newest_whole(folder).path))
    return made


def test_every_checkpoint_is_told_and_ends_with_its_manifest(calm: Any) -> None:
    steps = [2, 4, 6, STEPS]
    assert [(event["event"], event["step"]) for event in calm.told] == [
        (kind, step) for step in steps for kind in ("saving", "checkpoint")
    ]
    for event in calm.told[1::2]:
        assert why_torn(Path(event["path"])) == ""
        assert (Path(event["path"]) / MANIFEST).is_file()


@pytest.mark.parametrize("step", [2, 4, 6, STEPS])
def test_a_run_that_goes_on_is_the_same_to_the_bit(calm: Any, gpt2: Path, tmp_path: Path, step: int) -> None:
    """Within the first pass over the data, where the second begins, within that, and where only the model is missing:
    then it trains no step more."""
    made = _gone_on_with(calm, gpt2, tmp_path, step)
    assert made.state.global_step == STEPS
    logged, weights = tiny_trainers.outcome(made)
    expected, expected_weights = tiny_trainers.outcome(calm)
    assert [entry["loss"] for entry in logged[:STEPS]] == [entry["loss"] for entry in expected[:STEPS]]
    assert weights == expected_weights


def test_other_micro_batches_go_on_with_the_same_rows_steps_and_schedule(tmp_path: Path) -> None:
    """Two rows at once, twice, where it were four: no dropout here, whose masks are drawn for a batch."""
    model = tiny_folder(tmp_path / "model", "qwen2")
    calm, _ = _trainer(model, tmp_path / "calm")
    calm.train()
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    (tmp_path / "other").mkdir()
    made = _gone_on_with(calm, model, tmp_path / "other", 2, **split)
    ours, theirs = ([entry for entry in each.state.log_history if "loss" in entry] for each in (made, calm))
    assert [entry["learning_rate"] for entry in ours] == [entry["learning_rate"] for entry in theirs]
    assert [entry["loss"] for entry in ours] == pytest.approx([entry["loss"] for entry in theirs], rel=1e-5)
    assert made.state.max_steps == calm.state.max_steps == len(ours)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    made, told = _trainer(gpt2, tmp_path)
    save = made._save_optimizer_and_scheduler

    def full_at_first(folder: str) -> None:
        if folder.endswith("-2"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(folder)

    made._save_optimizer_and_scheduler = full_at_first
    made.train()
    assert [(event["event"], event["step"]) for event in told[:4]] == [
        ("saving", 2),
        ("save_failed", 2),
        ("saving", 4),
        ("checkpoint", 4),
    ]
    assert not (tmp_path / "checkpoint-2").exists()
    assert tiny_trainers.outcome(made)[1] == tiny_trainers.outcome(calm)[1]


def test_another_error_while_saving_is_not_swallowed(gpt2: Path, tmp_path: Path) -> None:
    made, told = _trainer(gpt2, tmp_path)

    def broken(folder: str) -> None:
        raise RuntimeError("not the disk")

    made._save_optimizer_and_scheduler = broken
    with pytest.raises(RuntimeError, match="not the disk"):
        made.train()
    assert told[-1]["event"] == "saving"
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize(
    ("step", "hint"),
    [
        (STEPS, "its weights are whole in .*checkpoint-7: that folder is the model"),
        (STEPS + 1, "with --resume_from_checkpoint again: it trains from step 7 of 8"),
    ],
)
def test_a_model_that_has_no_room_at_the_end_is_said_to_be_where_it_is(calm: Any, step: int, hint: str) -> None:
    def full(folder: str) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    unsaved = SimpleNamespace(state=SimpleNamespace(global_step=step), save_model=full)
    with pytest.raises(OutputFolderError, match=hint):
        save_trained(unsaved, calm.args.output_dir)
