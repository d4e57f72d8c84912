"""Every bad machine is told what is wrong with it, with the command that mends it; a good one is left in peace."""

import json
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import requests

from autotrain_mem.allocator.settings import AllocatorSettings, environment_settings
from autotrain_mem.cli import main
from autotrain_mem.machine import doctor
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.doctor import Library
from autotrain_mem.report.machine_view import private_free, summary
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.support.versions import TESTED, untested, version_of
from autotrain_mem.types import Hardware
from autotrain_mem.types.findings import Condition, Health, Soundness

ROOT = Path(__file__).parent.parent.parent
CARD = replace(named("rtx4090"), origin="detected", uuid="GPU-1")
TORCH = Library(version="2.13.0+cu130", cuda="13.0", nccl="2.28")
LIBRARIES = {
    **{name: Library() for name in (*doctor.IMPORTED, *doctor.OPTIONAL)},
    **{name: Library(version=".".join(map(str, least))) for name, (least, _) in TESTED.items()},
    "torch": TORCH,
}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LD_LIBRARY_PATH")


@dataclass
class Machine:
    """What the doctor sees; a good machine until a test changes something."""

    driver: tuple[str, int | None, str] = ("580.65.06", 13, "")
    cards: tuple[Hardware, ...] = (CARD,)
    libraries: dict[str, Library] = field(default_factory=lambda: dict(LIBRARIES))
    unplanned: str = ""
    release: str = "6.8.0"
    paths: tuple[str, ...] = ("/dev/nvidia0", "Python.h")
    encoding: str = "utf-8"
    compiler: str | None = "/usr/bin/gcc"
    missing: tuple[tuple[str, str], ...] = ()
    disk_bytes: int = 500 * GIB
    shared_bytes: int = 8 * GIB
    writable: bool = True
    token: str | None = "hf_x"
    hub_status: int | None = 200

    def get(self, *args: object, **keywords: object) -> SimpleNamespace:
        if self.hub_status is None:
            raise requests.ConnectTimeout
        return SimpleNamespace(ok=self.hub_status < 400, status_code=self.hub_status)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    it = Machine()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    here = "autotrain_mem.machine.doctor"
    for target, stub in {
        f"{here}.nvidia_driver": lambda: it.driver,
        f"{here}.detect": lambda: it.cards,
        f"{here}.others_on": lambda card: (),
        f"{here}.unplanned_gpus": lambda: it.unplanned,
        f"{here}.missing_to_compile": lambda environment: it.missing,
        f"{here}.installed_versions": lambda names: {name: it.libraries[name].version for name in names},
        f"{here}._library": lambda name, version: it.libraries[name],
        "locale.getpreferredencoding": lambda convert=True: it.encoding,
        "platform.release": lambda: it.release,
        "shutil.which": lambda name: it.compiler,
        "shutil.disk_usage": lambda path: SimpleNamespace(free=it.disk_bytes, total=it.shared_bytes),
        "os.path.exists": lambda path: any(str(path).endswith(each) for each in it.paths),
        "os.access": lambda path, mode: it.writable,
        "requests.get": it.get,
        "huggingface_hub.get_token": lambda: it.token,
        "huggingface_hub.constants.HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(target, stub)
    return it


def changed(machine: Machine, changes: dict[str, object], library: dict[str, Library] | None = None) -> Health:
    for name, value in changes.items():
        setattr(machine, name, value)
    machine.libraries |= library or {}
    return doctor.examine_machine()


def only(health: Health) -> list[Condition]:
    return [finding for finding in health.findings if finding.state is not Soundness.OK]


def test_a_good_machine_has_nothing_broken(machine: Machine) -> None:
    health = doctor.examine_machine()
    assert health.trains
    assert {finding.name for finding in only(health)} == {"flash-attn", "liger-kernel", "vllm"}
    assert summary(health).startswith("Everything works")


def test_a_torch_that_is_built_for_others_gpus_is_named_as_one_that_nothing_is_planned_for(machine: Machine) -> None:
    health = changed(machine, {"driver": ("", None, ""), "cards": (), "unplanned": "AMD's GPUs (ROCm)"})
    finding = next(each for each in health.findings if each.name == "driver")
    assert finding.text.startswith("torch is built for AMD's GPUs (ROCm): not planned for")
    assert (finding.state, health.trains) == (Soundness.NOTE, False)


NO_DRIVER = {"driver": ("", None, "driver mismatch"), "cards": ()}


@pytest.mark.parametrize(
    ("changes", "library", "name", "says", "fix"),
    [
        (NO_DRIVER, {}, "driver", "driver mismatch", "Reboot"),
        (NO_DRIVER | {"release": "5.15-microsoft", "paths": ()}, {}, "driver", "WSL", "wsl --update"),
        ({"cards": ()}, {}, "cards", "lists no card", "nvidia-smi"),
        ({}, {"torch": Library()}, "torch", "not installed", "pip install torch"),
        ({}, {"torch": replace(TORCH, error="no libcudart")}, "torch", "no libcudart", "--force-reinstall"),
        ({}, {"torch": replace(TORCH, problem="no kernel", fix="whl/cu126")}, "torch", "no kernel", "whl/cu126"),
        ({}, {"bitsandbytes": Library(version="0.50.2", error="signal 11")}, "bitsandbytes", "signal 11", "pip"),
        ({}, {"trl": Library(version="1.9.2")}, "trl", "older than 1.12", "trl>=1.12"),
        ({}, {"flash-attn": Library(version="2.8", error="undefined symbol")}, "flash-attn", "symbol", "pip"),
        ({"hub_status": 401}, {}, "token", "401", "hf auth login"),
        ({"encoding": "ANSI_X3.4-1968"}, {}, "locale", "not UTF-8", "LANG=C.UTF-8"),
    ],
)
def test_what_is_broken_is_said_with_its_cure(
    machine: Machine, changes: dict[str, object], library: dict[str, Library], name: str, says: str, fix: str
) -> None:
    health = changed(machine, changes, library)
    (broken,) = (finding for finding in health.findings if finding.state is Soundness.BROKEN)
    assert (broken.name, says in broken.text, fix in broken.fix) == (name, True, True), broken
    assert not health.trains
    assert "1 thing does not work" in summary(health)


def test_hidden_cards_a_cache_that_is_switched_off_and_folders_that_nobody_may_write_are_broken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    monkeypatch.setenv("AUTOFIT_CACHE", "/kept")
    health = changed(machine, {"cards": (), "writable": False})
    fixes = {each.name: each.fix for each in health.findings if each.state is Soundness.BROKEN}
    assert fixes == {
        "cards": "unset CUDA_VISIBLE_DEVICES",
        "allocator": "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        **{name: f"export {name}=FOLDER" for name in ("HF_HOME", "AUTOFIT_CACHE", "TMPDIR")},
        "this folder": "Change to a folder of your own.",
    }


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"token": None}, "Hugging Face Hub"),
        ({"hub_status": None}, "Hugging Face Hub"),
        ({"hub_status": 503}, "Hugging Face Hub"),
        ({"shared_bytes": 64 * MIB}, "/dev/shm"),
        ({"release": "5.15-microsoft"}, "WSL"),
        ({"compiler": None}, "compiler"),
        ({"paths": ("/dev/nvidia0",)}, "compiler"),
        ({"missing": (("no ninja", "pip install ninja"),)}, "DeepSpeed"),
        ({"cards": (replace(CARD, name="rtx9090"),)}, "rtx9090"),
        ({"disk_bytes": 1 * GIB}, "HF_HOME"),
    ],
)
def test_what_is_odd_is_noted_and_breaks_nothing(machine: Machine, changes: dict[str, object], name: str) -> None:
    health = changed(machine, changes, {"deepspeed": Library(version="0.19.8")})
    assert name in {finding.name for finding in only(health)}
    assert health.trains


def test_variables_that_slow_or_confuse_torch_and_a_hub_that_may_not_be_asked_are_noted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda-12.4/lib64")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    health = doctor.examine_machine()
    noted = [(each.name, each.text.split()[0]) for each in only(health) if each.area in ("hub", "system")]
    assert noted == [
        ("Hugging Face Hub", "not"),
        ("CUDA", "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA", "LD_LIBRARY_PATH"),
    ]
    assert health.trains


def test_a_machine_without_a_gpu_is_told_what_works_there(machine: Machine) -> None:
    torch = {"torch": replace(TORCH, problem="Found no NVIDIA driver")}
    health = changed(machine, NO_DRIVER | {"paths": ("/.dockerenv",)}, torch)
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


def test_other_versions_than_the_tested_are_said_and_missing_ones_are_not(machine: Machine) -> None:
    assert untested({name: ".".join(map(str, newest)) for name, (_, newest) in TESTED.items()}) == []
    (newer,) = untested({"torch": "3.0.1+cu140", "trl": None})
    assert newer.startswith("torch 3.0.1+cu140 is newer than ")
    (older,) = untested({"trl": "1.9.2"})
    assert "--upgrade 'trl>=1.12'" in older
    health = changed(machine, {}, {"peft": Library(version="9.0")})
    assert any("newer than" in finding.text for finding in only(health))


@pytest.mark.parametrize(
    ("module", "says"), [("dies", "status -11"), ("sleeps", "no answer within 1 s"), ("fails", "ValueError")]
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
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 1.0 if module == "sleeps" else 20.0)
    assert says in doctor._library(module, "2.13").error


def test_the_command_ends_with_1_where_something_is_broken_and_a_paste_holds_no_names(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AUTOFIT_CACHE", f"{tmp_path}/cache")
    for encoding, code in (("utf-8", 0), ("latin-1", 1)):
        machine.encoding = encoding
        assert main.run(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["broken"] == code
        assert main.run(["doctor"]) == code
        assert "rtx4090" in capsys.readouterr().out
    machine.encoding = "utf-8"
    assert main.run(["doctor", "--issue"]) == 0
    shown = capsys.readouterr().out
    assert "~/cache" in shown
    assert str(tmp_path) not in shown
    assert private_free(f"{tmp_path}/x") == "~/x"


@pytest.mark.parametrize(
    ("older", "read", "idle"),
    [
        ("max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_of_both_names_of_the_allocators_variable_the_one_that_torch_does_not_read_is_to_be_unset(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, older: str, read: str, idle: str
) -> None:
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": older}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = (each for each in only(doctor.examine_machine()) if each.name == "allocator")
    assert finding.text == f"{read} and {idle} are both set: torch reads {read} alone"
    assert finding.fix == f"unset {idle}"
    counts = AllocatorSettings(max_split_bytes=64 * MIB) if older else AllocatorSettings(grows=True)
    assert environment_settings({}) == counts
