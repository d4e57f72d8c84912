"""What scripts/survival trains, when its faults fall, how it judges what came of them, its machines."""

import itertools
import json
import pathlib
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from script_runner import Script
from survival_cases import against, attack, command, faults, full_disk, material, nodes, ranks, resume, runs
from survival_cases.command import Ended
from survival_cases.faults import Undisturbed

from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.fault_injection import MARKS_NAME, parse_mishaps
from autotrain_mem.parallel.place import Place
from autotrain_mem.training.machines.lead import JOIN_VARIABLE, Machines
from autotrain_mem.training.run_folder import lock_folder
from tests.forked import Forge

PHASES = ("forward", "optimizer_step", "evaluate", "generate")
QUIET = {
    method: Undisturbed(
        card="65536KiB",
        losses={1: 2.0, 2: 1.0},
        counts={"all": 9000, "checkpoints": 3, "backward": 3000} | dict.fromkeys(PHASES, 500),
    )
    for method in faults.BATCHES
}


def ended(folder: pathlib.Path, *, losses: dict[int, float], code: int = 0, **changes: Any) -> Ended:
    """A run of two steps of 40 rows, and its checkpoint."""
    (folder / "checkpoint-2").mkdir(parents=True)
    history = [{"step": step, "loss": loss, "num_tokens": 9 * step} for step, loss in losses.items()]
    state = {"global_step": 2, "epoch": 1.0, "log_history": history}
    (folder / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    knobs = {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 4, "processes": 1}
    plan = {
        "knobs": knobs | changes,
        "optimizer_steps": 2,
        "estimate": {"required_bytes": 90, "budget_bytes": 100},
        "experience": {"incidents": [{"remedy": "split into 5 + 5 rows"}], "restarts": [], "probes": []},
    }
    told = {"plan": plan, "run": {"steps": 2, "prediction_error": 0.0}} if code == 0 else None
    error = "" if code == 0 else "error: The card is full.\n  Take a larger one."
    return Ended(code=code, seconds=1.0, told=told, error=error, folder=folder, first_step_seconds=0.5)


def test_each_fault_falls_on_twenty_moments_of_the_undisturbed_run_the_same_each_time() -> None:
    cases = faults.cases(QUIET)
    assert Counter(case.fault for case in cases) == dict.fromkeys(faults.FAULTS, faults.MOMENTS)
    assert cases == faults.cases(QUIET)
    assert all(parse_mishaps(case.mishap) for case in cases if case.fault not in faults.FROM_OUTSIDE)
    rotten = Counter(case.mishap.rpartition(":")[2] for case in cases if case.fault == "rot:save")
    assert set(rotten) == set(faults.ROTTEN_FILES)
    backward = {case.mishap for case in cases if case.fault == "oom:backward"}
    assert len(backward) > 15
    assert all(1 <= int(mishap.rpartition(":")[2]) <= 3000 for mishap in backward)


def test_a_run_with_another_batch_and_one_that_died_are_missed(tmp_path: pathlib.Path) -> None:
    ways = {"finished": {}, "changed": {"gradient_accumulation_steps": 3}, "died": {"code": 61}}
    for outcome, way in ways.items():
        row = runs.judged(runs.cases()[0], ended(tmp_path / outcome, losses={}, **way))
        assert row["outcome"] == outcome
        assert runs.missed({"one": row}) is (outcome != "finished")
        assert outcome != "finished" or (row["fill"], row["incidents"]) == (0.9, 1)


@pytest.mark.slow
def test_survival(
    script: Callable[..., Script], tmp_path: pathlib.Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of 8 rows in plain TRL, on a card that is too small."""
    monkeypatch.setattr(material, "rows", partial(material.rows, count=16))
    monkeypatch.setattr(against, "MICRO_BATCH", 4)
    only = ("--only", "sft, from the start, TRL", "--processes", 1)
    with forge.commands(command, against):
        ran = script("survival").run("--against", "--work", tmp_path, *only)
    assert ran.code == 0, ran.out
    (row,) = json.loads((tmp_path / "against.json").read_text()).values()
    assert row["outcome"].startswith("OutOfMemoryError")


SECTIONS = {
    "runs": ("sft full 1.0", "finished"),
    "faults": ("kill 00", "survived"),
    "ranks": ("SIGTERM 00", "never came"),
    "nodes": ("node 00", "survived"),
    "resume": ("full ddp 2 > fsdp2 2", "the same"),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_judges_and_shows_what_its_commands_left(
    section: str, script: Callable[..., Script], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only, outcome), numbers = SECTIONS[section], itertools.count()

    def autofit(*_: Any, **options: Any) -> Ended:
        done = ended(tmp_path / f"run{next(numbers)}", losses={1: 2.0, 2: 1.0})
        (done.folder / MARKS_NAME).write_text("".join(f"{name} 5 allocations\n" for name in ("all", *PHASES)))
        return done

    for module in (faults, resume, runs):
        monkeypatch.setattr(module, "autofit", autofit)
    for module in (faults, nodes):
        monkeypatch.setattr(module, "filled_card", lambda *_: "64MiB")
    monkeypatch.setattr(resume, "STEPS", 2)
    monkeypatch.setattr(material, "write", lambda place: None)
    monkeypatch.setattr(ranks, "FAULTS", ("SIGTERM",))
    monkeypatch.setattr(faults, "FAULTS", {"kill": ("sft",), "oom:evaluate": ()})
    monkeypatch.setattr(nodes, "_run", lambda *_: (autofit(), "", True))
    monkeypatch.setattr(nodes, "can_be_made", lambda: False)
    monkeypatch.setattr(resume, "cut_short", lambda *_: autofit().folder)
    survival = script("survival", filled_card=lambda *_: "64MiB")
    ran = survival.run(f"--{section}", "--work", tmp_path / "work", "--only", only, "--processes", 1)
    (row,) = json.loads((tmp_path / "work" / f"{section}.json").read_text()).values()
    assert (ran.code, row["outcome"]) == (0, outcome), ran.out


def test_a_run_survived_with_the_losses_of_the_undisturbed_one_is_reported_with_an_error_of_ours_and_else_lost(
    tmp_path: pathlib.Path,
) -> None:
    outcomes = {1.00001: "survived", 1.01: "losses differ", float("nan"): "losses differ", None: "steps differ"}
    for last, outcome in outcomes.items():
        losses = {1: 2.0} if last is None else {1: 2.0, 2: last}
        judged = faults.judged(ended(tmp_path / str(last), losses=losses), came=True, losses=QUIET["sft"].losses)
        assert judged["outcome"] == outcome
        assert faults.missed({"kill 00 sft": judged}) is (outcome != "survived")
    reported = ended(tmp_path, losses={}, code=61)
    assert faults.judged(reported, came=True, losses={})["outcome"] == "reported"
    for other in ({"error": "error: Unforeseen: no\n"}, {"error": "error: The trainer raised K"}, {"code": 42}):
        assert faults.judged(replace(reported, **other), came=True, losses={})["outcome"] == "lost"
    row = faults.judged(replace(reported, code=-9, error=""), came=True, losses={})
    assert row["outcome"] == "lost"
    assert faults.table({"kill 00 sft": row})[-1] == "| kill | 1 | 0 | 0 | 1 lost | 0 | 0 | 0e+00 |"


def test_the_supervisors_disk_is_full_from_the_mark_to_the_end_of_the_training(tmp_path: pathlib.Path) -> None:
    marks, said = tmp_path / MARKS_NAME, []
    for line in ("kill:7\n", "disk:save:1\n", "disk:9\n", "disk:9 is over\n"):
        with marks.open("a") as file:
            file.write(line)
        said.append(full_disk.is_full(marks))
    assert said == [False, False, True, False]
    assert not full_disk.is_full(tmp_path / "nowhere")


def test_each_rank_suffers_under_each_sharding_and_a_process_that_is_left_is_a_miss(tmp_path: pathlib.Path) -> None:
    quiet = dict.fromkeys(ranks.SHARDINGS, QUIET["sft"])
    cases = ranks.cases(quiet)
    assert Counter(case.fault for case in cases) == dict.fromkeys(ranks.FAULTS, ranks.MOMENTS)
    assert Counter(case.kind for case in cases) == dict.fromkeys(ranks.SHARDINGS, 25)
    for rank in (0, 1):
        own = [case for case in cases if case.fault == "stop" and parse_mishaps(case.mishap, rank)]
        assert {case.kind for case in own} == set(ranks.SHARDINGS)
    assert not ranks.is_left_over(tmp_path)
    with lock_folder(str(tmp_path)):
        assert ranks.is_left_over(tmp_path)


@pytest.mark.parametrize("kind", attack.ATTACKS)
def test_an_attack_on_a_first_machine_does_it_no_harm(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOIN_VARIABLE, "0")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    place = Place(rank=0, machines=2, address="127.0.0.1", port=port)
    with Machines(place, ("--nodes", "2"), tmp_path, min_nodes=1, say=lambda line: None) as machines:
        for _ in range(2):
            assert machines.gather(named("rtx3060")).topology.nodes == 1
            held = attack.attack(kind, place.address, port, tmp_path, ["--nodes", "2", "--machine_rank", "1"])
        for each in held:
            each.close()
    assert Counter(case.fault for case in nodes.cases()) == dict.fromkeys(nodes.FAULTS, nodes.RUNS)


def test_a_machine_that_is_unplugged_is_not_reached() -> None:
    if not nodes.can_be_made():
        pytest.skip("network namespaces take root, and ip")
    ping = "import socket; socket.create_connection(('10.77.0.1', 5000), timeout=0.5)"
    serve = ("-m", "http.server", "5000", "--bind", "10.77.0.1")
    with nodes.two_hosts(apart=True) as two:

        def is_reached() -> bool:
            return subprocess.run([*two.on(1), sys.executable, "-c", ping], capture_output=True).returncode == 0

        with subprocess.Popen([*two.on(0), sys.executable, *serve], stderr=subprocess.DEVNULL) as first:
            try:
                assert any(is_reached() for _ in range(100))
                two.unplug(0)
                assert not is_reached()
                two.plug(0)
                assert any(is_reached() for _ in range(10))  # a link takes a moment to come up
            finally:
                first.kill()
