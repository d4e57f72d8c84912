"""Training end to end on a simulated card; one run in processes of its own, as a user starts them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from safetensors.numpy import load_file

from autotrain_mem.support import codec, processes
from autotrain_mem.support.units import format_bytes
from autotrain_mem.training.run_folder import LOCK_NAME, WEIGHTS, WRITTEN
from autotrain_mem.types import RUN_NAME, Plan
from autotrain_mem.worker.client import Worker
from tests.place import Autofit, Ran

pytestmark = pytest.mark.slow

TRAIN = shlex.split(
    "sft --model tiny --dataset splits --gpu 300MiB --simulate --no_probe --max_length 32 "
    "--per_device_train_batch_size 8 --gradient_checkpointing false --learning_rate 3e-3 --logging_steps 5 "
    "--fit lossless --forbid activation_offloading,optimizer_offload"
)


def _command(*argv: str) -> list[str]:
    """On one core, where it starts one worker: the suite has the others. Ctrl-C is heard in a suite that does not."""
    one_core = "import os, signal, sys; os.sched_setaffinity(0, [max(os.sched_getaffinity(0))]); "
    one_core += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    start = "from autotrain_mem.cli.main import main; main()"
    return [sys.executable, "-c", one_core + start, *argv]


@pytest.fixture(scope="module", autouse=True)
def started(files: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A run in processes of its own, and what it prints: it starts while another run is looked at."""
    log = files / "stopped.txt"
    saves = ("--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2")
    argv = _command(*TRAIN, *saves, "--max_steps", "5000", "--output_dir", "stopped")
    with open(log, "w") as output:
        process = subprocess.Popen(argv, cwd=files, stdout=output, stderr=output, start_new_session=True)
    yield process, log
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def stopped(started: tuple[subprocess.Popen[bytes], Path]) -> tuple[Path, list[psutil.Process]]:
    """Its folder and child processes after Ctrl-C, as from a terminal: the whole process group gets the signal."""
    process, log = started
    _wait_until(lambda: "step 1/" in log.read_text() or process.poll() is not None, 100)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children, log.read_text()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    return log.parent / "stopped", children


@pytest.fixture(scope="module")
def tried(autofit_once: Autofit, files: Path) -> Ran:
    """A training of one step whose plan is tried first."""
    for file in (*(files / "tiny").iterdir(), *(files / "splits").iterdir()):
        os.utime(file, (1.0, 1.0))  # no answer is kept about files that have just changed
    probing = [word for word in TRAIN if word != "--no_probe"]
    once = ("--max_steps", "1", "--save_strategy", "no", "--output_dir", "tried")
    return autofit_once(*probing, *once, "--json", "--out", "tried.json")


def test_a_plan_is_tried_once_before_it_trains(tried: Ran, autofit_once: Autofit, files: Path) -> None:
    assert tried.code == 0, tried.err
    (probe,) = json.loads(tried.out)["plan"]["experience"]["probes"]
    assert (probe["fits"], probe["row_tokens"], probe["refused"]) == (True, 32, "")
    predicted = json.loads(tried.out)["plan"]["estimate"]["required_bytes"]
    assert probe["measured"]["peak_reserved_bytes"] == pytest.approx(predicted, rel=0.05)
    assert "probe: 8 x 1 rows of 32 tokens: needs " in tried.err
    assert not (files / "tried" / ".probe").exists()
    assert not [*(files / "tried").glob("checkpoint-*")]
    assert Plan.load(files / "tried.json") == Plan.load(files / "tried"), "what was measured is kept there too"
    with patch.object(Worker, "_ask", side_effect=AssertionError):  # the first run's answers count for its plan
        again = autofit_once("sft", "--plan", "tried.json", "--simulate", "--output_dir", "again", "--json")
    assert again.code == 0, again.err
    assert not [word for word in ("rehearsing", "probing") if word in again.err]  # it was searched for and confirmed
    told, before = (json.loads(ran.out)["plan"] for ran in (again, tried))
    assert told["job"]["arguments"] == before["job"]["arguments"] | {"output_dir": "again"}
    same = ("knobs", "estimate", "versions", "model_digest", "warnings")
    assert {name: told[name] for name in same} == {name: before[name] for name in same}


@pytest.mark.usefixtures("tried")
def test_no_name_that_a_run_writes_is_one_under_which_a_users_file_would_be_lost(files: Path) -> None:
    known = (*WRITTEN.split(), *WEIGHTS, RUN_NAME, LOCK_NAME, "runs")
    assert [path.name for path in (files / "tried").iterdir() if not any(map(path.match, known))] == []


@pytest.mark.usefixtures("tried")
def test_a_training_leaves_a_report_with_its_step_and_what_it_measured(autofit_once: Autofit, files: Path) -> None:
    assert (files / "tried" / "report.html").read_text().count("<html") == 1
    told = autofit_once("report", "tried", "--json")
    assert told.code == 0, told.err
    page, plan = json.loads(told.out), Plan.load(files / "tried")
    timeline, *others = page["sections"]
    assert timeline["figure"]["x_title"] == "events of the rehearsal"
    assert f": {format_bytes(plan.estimate.memory.peak_allocated_bytes)} (" in timeline["note"]
    assert {"memory-of-the-run", "lengths", "phases", "attempts"} <= {section["key"] for section in others}
    assert page["not_shown"] == []


@pytest.mark.usefixtures("tried")
def test_a_report_is_written_over_a_report_and_over_nothing_else(autofit_once: Autofit, files: Path) -> None:
    first, again = (autofit_once("report", "tried.json", "--out", "mine.html") for _ in range(2))
    assert (first.code, again.code) == (0, 0), again.err
    assert "mine.html" in again.out
    (files / "notes.html").write_text("<p>mine</p>")
    refused = autofit_once("report", "tried.json", "--out", "notes.html")
    assert refused.code != 0
    assert (files / "notes.html").read_text() == "<p>mine</p>"
    assert autofit_once("report", "nothing-here").code != 0
    assert autofit_once("report").code == 2


def test_ctrl_c_ends_after_the_step_and_leaves_no_process_behind(stopped: tuple[Path, list[psutil.Process]]) -> None:
    folder, children = stopped
    _wait_until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children), 20)
    assert "Traceback" not in folder.with_suffix(".txt").read_text()
    record = json.loads((folder / "run.json").read_text())
    assert record["started_at"] < record["ended_at"]
    assert {"torch", "transformers", "trl", "autotrain_mem"} <= record["versions"].keys()
    newest = folder / f"checkpoint-{record['steps']}"
    assert max(folder.glob("checkpoint-*"), key=os.path.getmtime) == newest
    assert len(load_file(newest / "model.safetensors")) > 10, "it was not cut short"


def test_it_goes_on_by_its_own_plan_and_comes_to_its_end_though_its_process_is_killed(
    stopped: tuple[Path, list[psutil.Process]], autofit_once: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of its second checkpoint, and with no room for what the trainer prints."""

    def opened(path: str, flags: int) -> int:
        return os.open("/dev/full" if str(path).endswith("train.log") else path, flags)

    monkeypatch.setattr(processes, "open_own", opened)
    monkeypatch.setenv("AUTOFIT_MISHAPS", "kill:save:2")
    folder, before = stopped[0], Plan.load(stopped[0])
    killed_at = json.loads((folder / "run.json").read_text())["steps"] // 2 * 2 + 4
    going_on = f"sft --output_dir stopped --simulate --no_probe --max_steps {killed_at + 1} --json"
    ran = autofit_once(*shlex.split(going_on), "--resume_from_checkpoint")
    assert ran.code == 0, ran.err
    assert not [words for words in ("rehearsing", "trains    ") if words in ran.err], "its plan is known"
    assert f"after {killed_at} steps (killed: signal 9, often because host memory ran out" in ran.err
    assert ran.err.count("the log cannot be written (No space left on device)") == 1
    told = json.loads(ran.out)
    (restart,) = told["plan"]["experience"]["restarts"]
    assert (restart["step"], restart["resumed_at"], restart["cause"]) == (killed_at, killed_at - 2, "killed")
    assert (told["run"]["steps"], told["run"]["restarts"]) == (killed_at + 1, 1)
    assert json.loads((folder / "run.json").read_text())["experience"]["restarts"] == [restart]
    assert told["plan"]["knobs"] == codec.to_json(before.knobs)
    assert "evaluate" in {phase["phase"] for phase in told["plan"]["estimate"]["phases"]}
    assert "resume_from_checkpoint" not in told["plan"]["job"]["arguments"]
    last = folder / f"checkpoint-{killed_at + 1}"
    manifest = json.loads((last / "autofit.checkpoint.json").read_text())
    assert (manifest["order"]["--seed"], manifest["order"]["--dataset"][:3]) == ("42", "of ")
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    evaluated = [entry["step"] for entry in history if "eval_loss" in entry]
    assert evaluated == [*range(2, killed_at + 1, 2), killed_at + 1]


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
