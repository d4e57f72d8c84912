"""An output folder: the plan of a run that goes on, a run that makes room for another, and what is read."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem import api
from autotrain_mem.cli import flags
from autotrain_mem.planning import output_dir
from autotrain_mem.support.errors import OutputFolderError, UsageError
from autotrain_mem.training import run_folder
from autotrain_mem.types import Job
from tests.report.report_examples import PLAN


def test_the_runs_own_plan_is_found_by_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.save("survived")
    for argv, plan in (
        ("--output_dir=survived --resume_from_checkpoint=true", "survived"),
        ("--resume_from_checkpoint survived/checkpoint-4 --output_dir survived", "survived"),
        ("--output_dir survived", None),
        ("--output_dir nowhere --resume_from_checkpoint", None),
        ("--output_dir survived --resume_from_checkpoint --plan finished", "finished"),
    ):
        request, _ = flags.read("autofit sft", shlex.split(argv))
        assert api.resumed(request, print).autofit.plan == plan, argv


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


def test_a_folder_without_a_run_worked_in_or_read_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run_folder.move_aside(str(tmp_path)) is None
    assert run_folder.move_aside(str(tmp_path / "nowhere")) is None
    folder = _held(tmp_path / "run")
    (folder / "rows.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"would move .*rows\.jsonl away, which the training reads"):
        output_dir.check_output(replace(_job(folder), dataset=str(folder / "rows.jsonl")), overwrite=True)
    with pytest.raises(UsageError, match="--resume_from_checkpoint"):
        output_dir.check_output(_job(folder, resume_from_checkpoint=True), overwrite=True)
    with pytest.raises(OutputFolderError, match="has control characters"):
        output_dir.check_output(_job(tmp_path / "r\x1b[2Jun"), overwrite=False)
    monkeypatch.chdir(folder)
    with pytest.raises(OutputFolderError, match="is the working directory or contains it"):
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
