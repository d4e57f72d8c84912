"""A run that is gone on with, after it died and by hand; and one that makes room for another."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem import api
from autotrain_mem.cli import flags
from autotrain_mem.planning import output_dir
from autotrain_mem.support import processes
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.training import run_folder
from autotrain_mem.types import Job
from tests.place import Autofit, Ran

TRAIN = shlex.split(
    "sft --model tiny --dataset splits --gpu 300MiB --simulate --no_probe --max_length 32 --fit lossless "
    "--per_device_train_batch_size 4 --gradient_checkpointing false --logging_steps 1 --save_steps 2 "
    "--eval_strategy steps --eval_steps 2 --forbid activation_offloading,optimizer_offload"
)


@pytest.fixture(scope="module")
def survived(autofit_once: Autofit, files: Path) -> Ran:
    """Killed in the middle of its second checkpoint, and with no room for what the trainer prints."""

    def opened(path: str, flags: int) -> int:
        return os.open("/dev/full" if str(path).endswith("train.log") else path, flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "open_own", opened)
        patch.setenv("AUTOFIT_MISHAPS", "kill:save:2")
        return autofit_once(*TRAIN, "--max_steps", "5", "--output_dir", "survived", "--json")


@pytest.mark.slow
def test_a_run_whose_process_is_killed_comes_to_its_end(survived: Ran, files: Path) -> None:
    assert survived.code == 0, survived.err
    told = json.loads(survived.out)
    (restart,) = told["plan"]["experience"]["restarts"]
    assert (restart["step"], restart["resumed_at"], restart["cause"]) == (4, 2, "killed")
    assert (told["run"]["steps"], told["run"]["restarts"]) == (5, 1)
    assert json.loads((files / "survived/run.json").read_text())["experience"]["restarts"] == [restart]
    assert "after 4 steps (killed: signal 9)" in survived.err
    manifest = json.loads((files / "survived/checkpoint-5/autofit.checkpoint.json").read_text())
    assert (manifest["order"]["--seed"], manifest["order"]["--dataset"][:3]) == ("42", "of ")
    assert survived.err.count("the log cannot be written (No space left on device)") == 1


@pytest.mark.slow
def test_a_run_that_is_gone_on_with_by_hand_follows_its_own_plan(
    survived: Ran, autofit_once: Autofit, files: Path
) -> None:
    assert survived.code == 0, survived.err
    argv = shlex.split("sft --output_dir survived --simulate --no_probe --max_steps 7 --resume_from_checkpoint --json")
    resumed = autofit_once(*argv)
    assert resumed.code == 0, resumed.err
    assert "rehearsing" not in resumed.err
    told, before = json.loads(resumed.out), json.loads(survived.out)
    assert told["plan"]["knobs"] == before["plan"]["knobs"]
    assert told["plan"]["experience"] == before["plan"]["experience"]
    assert told["run"]["steps"] == 7
    assert "evaluate" in {phase["phase"] for phase in told["plan"]["estimate"]["phases"]}
    state = json.loads((files / "survived/checkpoint-7/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [2, 4, 5, 6, 7]
    assert "resume_from_checkpoint" not in told["plan"]["job"]["arguments"]


@pytest.mark.parametrize(
    ("argv", "plan"),
    [
        ("--output_dir=survived --resume_from_checkpoint=true", "survived"),
        ("--resume_from_checkpoint survived/checkpoint-4 --output_dir survived", "survived"),
        ("--output_dir survived", None),
        ("--output_dir nowhere --resume_from_checkpoint", None),
        ("--output_dir survived --resume_from_checkpoint --plan finished", "finished"),
    ],
)
def test_the_runs_own_plan_is_found_by_its_flags(
    survived: Ran, files: Path, monkeypatch: pytest.MonkeyPatch, argv: str, plan: str | None
) -> None:
    monkeypatch.chdir(files)
    request, _ = flags.read("autofit sft", shlex.split(argv))
    assert api.resumed(request, print).autofit.plan == plan


def _held(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


def _job(folder: Path, **arguments: object) -> Job:
    return Job(method="sft", model="tiny", dataset=None, arguments={"output_dir": str(folder), **arguments})


def test_another_run_is_refused_or_moved_to_the_next_free_number_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in (1, 2):
        _held(folder)
        with pytest.raises(OutputFolderError, match="--overwrite_output_dir"):
            run_folder.check_folder(str(folder), resuming=False)
        run_folder.check_folder(str(folder), resuming=False, overwrite=True)
        output_dir.check_output(_job(folder), overwrite=True)
        assert run_folder.move_aside(str(folder)) == tmp_path / f"run.previous-{number}"
        assert (tmp_path / f"run.previous-{number}/run.json").is_file()
        assert not folder.exists()


def test_a_folder_that_holds_no_run_that_one_works_in_or_that_is_read_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run_folder.move_aside(str(tmp_path)) is None
    assert run_folder.move_aside(str(tmp_path / "nowhere")) is None
    folder = _held(tmp_path / "run")
    (folder / "rows.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"would move .*rows\.jsonl away, which the training reads"):
        output_dir.check_output(replace(_job(folder), dataset=str(folder / "rows.jsonl")), overwrite=True)
    with pytest.raises(UsageError, match="--resume_from_checkpoint"):
        output_dir.check_output(_job(folder, resume_from_checkpoint=True), overwrite=True)
    monkeypatch.chdir(folder)
    with pytest.raises(OutputFolderError, match="is the working directory"):
        run_folder.move_aside(".")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("folder", "relation"),
    [("base", "is"), ("base/out", "lies in"), (".", "holds"), ("link", "is"), ("link/out", "lies in")],
)
@pytest.mark.parametrize("read", ["model", "dataset", "reward_model_path"])
def test_an_output_folder_that_meets_what_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, relation: str, read: str, overwrite: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("link").symlink_to("base")
    job = _job(Path(folder))
    is_argument = read == "reward_model_path"
    job = replace(job, arguments={**job.arguments, read: "base"}) if is_argument else replace(job, **{read: "base"})
    with pytest.raises(OutputFolderError, match=f"The output folder {folder} {relation} the .*'s folder, base,"):
        output_dir.check_output(job, overwrite=overwrite)


def test_an_output_folder_beside_what_is_read_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path("rows.jsonl").write_text("")
    for folder in ("base-SFT", "runs/base"):
        output_dir.check_output(replace(_job(Path(folder)), model="base", dataset="rows.jsonl"), overwrite=False)
    output_dir.check_output(replace(_job(Path()), model="hub/id", dataset="rows.jsonl"), overwrite=False)
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    (cache / "models--hub--id").mkdir(parents=True)
    with pytest.raises(OutputFolderError, match="is in the cache of the Hugging Face Hub"):
        output_dir.check_output(_job(cache / "models--hub--id/run"), overwrite=False)
