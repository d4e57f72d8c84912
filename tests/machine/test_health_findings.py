"""Every bad machine is told what is wrong with it, with the command that mends it; a good one is left in peace."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem import api
from autotrain_mem.allocator.settings import AllocatorSettings, settings_of
from autotrain_mem.cli import main
from autotrain_mem.machine import health_facts as gathering
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.health_facts import Facts, Folder, Hub, Library
from autotrain_mem.machine.health_findings import health_of
from autotrain_mem.report.machine_view import private_free, summary
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.support.versions import TESTED, untested, version_of
from autotrain_mem.types.findings import Condition, Soundness

ROOT = Path(__file__).parent.parent.parent
CARD = replace(named("rtx4090"), origin="detected", uuid="GPU-1")
TORCH = Library(version="2.13.0+cu130", details={"cuda": "13.0", "archs": "sm_75 sm_80 sm_86 sm_90", "nccl": "2.28"})
LIBRARIES = {name: Library(version=".".join(map(str, least))) for name, (least, _) in TESTED.items()} | {"torch": TORCH}
GOOD = Facts(
    has_device_files=True,
    driver="580.65.06",
    driver_cuda=13,
    cards=(CARD,),
    libraries=LIBRARIES,
    hub=Hub(asked=True, has_token=True),
    folders=(Folder(purpose="HF_HOME", path="/data", free_bytes=500 * GIB, writable=True),),
    shared_memory_bytes=8 * GIB,
    host_total_bytes=64 * GIB,
    host_available_bytes=60 * GIB,
    compiler="/usr/bin/gcc",
    has_python_headers=True,
    open_files=65536,
)


def with_library(name: str, library: Library) -> dict[str, object]:
    return {"libraries": LIBRARIES | {name: library}}


def only(facts: Facts) -> list[Condition]:
    return [finding for finding in health_of(facts).findings if finding.state is not Soundness.OK]


def test_a_good_machine_has_nothing_broken() -> None:
    health = health_of(GOOD)
    assert health.trains
    assert {finding.name for finding in only(GOOD)} == {"flash-attn", "liger-kernel", "vllm"}
    assert summary(health).startswith("Everything works")


def test_a_torch_that_is_built_for_others_gpus_is_named_as_one_that_nothing_is_planned_for() -> None:
    health = health_of(replace(GOOD, driver="", cards=(), unplanned="AMD's GPUs (ROCm)"))
    finding = next(each for each in health.findings if each.name == "driver")
    assert finding.text.startswith("torch is built for AMD's GPUs (ROCm): not planned for")
    assert (finding.state, health.trains) == (Soundness.NOTE, False)


@pytest.mark.parametrize(
    ("changes", "name", "says", "fix"),
    [
        ({"driver": "", "cards": (), "nvml_error": "driver mismatch"}, "driver", "driver mismatch", "Reboot"),
        ({"driver": "", "cards": (), "is_wsl": True, "has_device_files": False}, "driver", "WSL", "wsl --update"),
        ({"cards": (), "variables": {"CUDA_VISIBLE_DEVICES": ""}}, "cards", "hides", "unset CUDA_VISIBLE_DEVICES"),
        ({"cards": ()}, "cards", "lists no card", "nvidia-smi"),
        (with_library("torch", Library(version="2.13.0+cpu")), "torch", "without CUDA", "pip install"),
        (with_library("torch", Library()), "torch", "not installed", "pip install torch"),
        (with_library("torch", replace(TORCH, error="no libcudart")), "torch", "no libcudart", "--force-reinstall"),
        (
            {**with_library("torch", replace(TORCH, problem="no kernel image")), "driver_cuda": 12},
            "torch",
            "no kernel image",
            "driver 580",
        ),
        (
            with_library("torch", replace(TORCH, details=TORCH.details | {"archs": "sm_100"})),
            "kernels",
            "8.9",
            "pip install --upgrade torch",
        ),
        (
            with_library("bitsandbytes", Library(version="0.50.2", error="signal 11")),
            "bitsandbytes",
            "signal 11",
            "pip",
        ),
        (with_library("trl", Library(version="1.9.2")), "trl", "older than 1.12", "trl>=1.12"),
        (with_library("flash-attn", Library(version="2.8", error="undefined symbol")), "flash-attn", "symbol", "pip"),
        ({"hub": Hub(asked=True, has_token=True, token_error="status 401")}, "token", "401", "hf auth login"),
        (
            {"folders": (Folder(purpose="HF_HOME", path="/ro", free_bytes=1, writable=False),)},
            "HF_HOME",
            "may not be written",
            "export HF_HOME",
        ),
        ({"encoding": "ANSI_X3.4-1968"}, "locale", "not UTF-8", "LANG=C.UTF-8"),
        ({"variables": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}, "allocator", "many times slower", "unset"),
    ],
)
def test_what_is_broken_is_said_with_its_cure(changes: dict[str, object], name: str, says: str, fix: str) -> None:
    health = health_of(replace(GOOD, **changes))  # type: ignore[arg-type]
    (broken,) = (finding for finding in health.findings if finding.state is Soundness.BROKEN)
    assert (broken.name, says in broken.text, fix in broken.fix) == (name, True, True), broken
    assert not health.trains
    assert "1 thing does not work" in summary(health)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hub": Hub(asked=True)}, "Hugging Face Hub"),
        ({"hub": Hub(asked=True, error="ConnectTimeout")}, "Hugging Face Hub"),
        ({"hub": Hub(asked=False), "variables": {"HF_HUB_OFFLINE": "1"}}, "Hugging Face Hub"),
        ({"shared_memory_bytes": 64 * MIB}, "/dev/shm"),
        ({"is_wsl": True}, "WSL"),
        ({"compiler": ""}, "compiler"),
        ({"has_python_headers": False}, "compiler"),
        (
            {"host_optimizer": (("no ninja", "pip install ninja"),)}
            | with_library("deepspeed", Library(version="0.19.8")),
            "DeepSpeed",
        ),
        ({"open_files": 256}, "open files"),
        ({"unknown_cards": ("rtx4090",)}, "rtx4090"),
        ({"variables": {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}}, "allocator"),
        ({"variables": {"LD_LIBRARY_PATH": "/usr/local/cuda-12.4/lib64"}}, "CUDA"),
        ({"folders": (Folder(purpose="HF_HOME", path="/d", free_bytes=1 * GIB, writable=True),)}, "HF_HOME"),
        ({"system": "Windows"}, "Windows"),
    ],
)
def test_what_is_odd_is_noted_and_breaks_nothing(changes: dict[str, object], name: str) -> None:
    facts = replace(GOOD, **changes)  # type: ignore[arg-type]
    assert name in {finding.name for finding in only(facts)}
    assert health_of(facts).trains


def test_a_machine_without_a_gpu_is_told_what_works_there() -> None:
    libraries = LIBRARIES | {"torch": replace(TORCH, problem="Found no NVIDIA driver")}
    bare = replace(GOOD, driver="", driver_cuda=None, cards=(), has_device_files=False, libraries=libraries)
    health = health_of(replace(bare, in_container=True))
    assert (health.broken, health.trains) == (0, False)
    assert "--simulate" in summary(health)


def test_what_was_tested_is_what_the_project_declares_and_its_suite_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = (re.match(r"([\w-]+)>=([\d.]+),<([\d.]+)", line) for line in project["dependencies"])
    declared = {match[1]: (version_of(match[2]), version_of(match[3])) for match in bounds if match}
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    newest_trl = (ROOT / "scripts" / "newest-trl.txt").read_text(encoding="utf-8").split("==")[1]
    for name, (oldest, newest) in TESTED.items():
        assert declared[name][0] == oldest
        assert newest < declared[name][1]
        assert oldest <= version_of(pinned[name])[:2] <= newest
    assert version_of(newest_trl)[:2] == TESTED["trl"][1]


def test_other_versions_than_the_tested_are_said_and_missing_ones_are_not() -> None:
    assert untested({name: ".".join(map(str, newest)) for name, (_, newest) in TESTED.items()}) == []
    (newer,) = untested({"torch": "3.0.1+cu140", "trl": None})
    assert newer.startswith("torch 3.0.1+cu140 is newer than ")
    (older,) = untested({"trl": "1.9.2"})
    assert "--upgrade 'trl>=1.12'" in older
    facts = replace(GOOD, libraries=LIBRARIES | {"peft": Library(version="9.0")})
    assert any("newer than" in finding.text for finding in only(facts))


@pytest.mark.parametrize(
    ("module", "says"), [("dies", "signal 11"), ("sleeps", "did not end"), ("fails", "ValueError")]
)
def test_an_import_that_crashes_or_never_ends_is_reported(
    module: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = {
        "dies": "import os; os.kill(os.getpid(), 11)",
        "sleeps": "import time; time.sleep(60)",
        "fails": "raise ValueError(3)",
    }
    (tmp_path / f"{module}.py").write_text(programs[module])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setitem(gathering.IMPORTED, "torch", module)
    monkeypatch.setattr(gathering, "IMPORT_SECONDS", 1.0 if module == "sleeps" else 20.0)
    assert says in gathering._library("torch", "2.13").error


def test_the_command_ends_with_1_where_something_is_broken_and_a_paste_holds_no_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = Folder(purpose="HF_HOME", path=f"{tmp_path}/cache", free_bytes=500 * GIB, writable=True)
    for facts, code in ((replace(GOOD, folders=(folder,)), 0), (replace(GOOD, encoding="latin-1"), 1)):
        monkeypatch.setattr(api, "gather", lambda say, facts=facts: facts)
        assert main.run(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["broken"] == code
        assert main.run(["doctor"]) == code
        assert "rtx4090" in capsys.readouterr().out
    monkeypatch.setattr(api, "gather", lambda say: replace(GOOD, folders=(folder,)))
    assert main.run(["doctor", "--issue"]) == 0
    shown = capsys.readouterr().out
    assert "~/cache" in shown
    assert str(tmp_path) not in shown
    assert private_free(f"{tmp_path}/x") == "~/x"


def test_of_both_names_of_the_allocators_variable_the_one_that_torch_does_not_read_is_to_be_unset() -> None:
    newer = "expandable_segments:True"
    for older, read, idle in (
        ("max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ):
        variables = {"PYTORCH_ALLOC_CONF": newer, "PYTORCH_CUDA_ALLOC_CONF": older}
        (finding,) = (each for each in only(replace(GOOD, variables=variables)) if each.name == "allocator")
        assert finding.text == f"{read} and {idle} are both set: torch reads {read} alone"
        assert finding.fix == f"unset {idle}"
        counts = AllocatorSettings(max_split_bytes=64 * MIB) if older else AllocatorSettings(grows=True)
        assert settings_of(variables) == counts
