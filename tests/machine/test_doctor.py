"""Tests that the doctor reports each problem with its fix, and nothing on a good machine."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from autotrain_mem.allocator.settings import AllocatorSettings, environment_settings
from autotrain_mem.cli import main
from autotrain_mem.machine import doctor
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.usable import GpuPackage, NoAnswer
from autotrain_mem.report.machine_view import private_free, summary
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.support.versions import TESTED, version_of
from autotrain_mem.types.findings import Condition, Health, Soundness

ROOT = Path(__file__).parent.parent.parent
CARD = replace(named("rtx4090"), origin="detected", uuid="GPU-1")
VERSIONS: dict[str, str | None] = {
    **dict.fromkeys((*doctor.IMPORTED, *doctor.OPTIONAL)),
    **{name: ".".join(map(str, least)) for name, (least, _) in TESTED.items()},
}
VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
GOOD: dict[str, Any] = {
    "driver": ("580.65.06", 13, ""),
    "answers": {},
    "cards": (CARD,),
    "unplanned": "",
    "release": "6.8.0",
    "paths": ("/dev/nvidia0", "Python.h"),
    "encoding": "utf-8",
    "compiler": "/usr/bin/gcc",
    "missing": (),
    "disk_bytes": 500 * GIB,
    "shared_bytes": 8 * GIB,
    "is_writable": True,
    "is_offline": False,
    "token": "hf_x",
    "hub": 200,
}
Examine = Callable[..., Health]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines a good machine with these changes: facts, variables in capitals, and packages by name."""

    def run(changes: Mapping[str, Any] = {}) -> Health:  # nobody writes to it
        facts = GOOD | {name: value for name, value in changes.items() if name in GOOD}
        versions = VERSIONS | {name: value for name, value in changes.items() if name in VERSIONS}

        def examined(package: str, environment: object) -> GpuPackage:
            answer = facts["answers"].get(package, GpuPackage(cuda="13.0" if package == "torch" else ""))
            if isinstance(answer, str):
                raise NoAnswer(answer)
            return answer

        def get(*args: object, **keywords: object) -> SimpleNamespace:
            if facts["hub"] is None:
                raise requests.ConnectTimeout
            return SimpleNamespace(status_code=facts["hub"])

        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name in filter(str.isupper, changes):
            monkeypatch.setenv(name, changes[name])
        here = "autotrain_mem.machine.doctor"
        for target, stub in {
            f"{here}.nvidia_driver": lambda: facts["driver"],
            f"{here}.detect": lambda: facts["cards"],
            f"{here}.others_on": lambda card: (),
            f"{here}.unplanned_gpus": lambda: facts["unplanned"],
            f"{here}.missing_to_compile": lambda environment: facts["missing"],
            f"{here}.installed_versions": lambda names: {name: versions[name] for name in names},
            f"{here}.examine_package": examined,
            "locale.getpreferredencoding": lambda convert=True: facts["encoding"],
            "platform.release": lambda: facts["release"],
            "shutil.which": lambda name: facts["compiler"],
            "shutil.disk_usage": lambda path: SimpleNamespace(free=facts["disk_bytes"], total=facts["shared_bytes"]),
            "os.path.exists": lambda path: any(str(path).endswith(each) for each in facts["paths"]),
            "os.access": lambda path, mode: facts["is_writable"],
            "requests.get": get,
            "huggingface_hub.get_token": lambda: facts["token"],
            "huggingface_hub.constants.HF_HUB_OFFLINE": facts["is_offline"],
        }.items():
            monkeypatch.setattr(target, stub)
        return doctor.examine_machine()

    return run


def only(health: Health) -> list[Condition]:
    return [finding for finding in health.findings if finding.state is not Soundness.OK]


def test_a_good_machine_has_nothing_broken_and_unwritable_folders_are(examine: Examine) -> None:
    health = examine()
    assert health.trains
    assert {finding.name for finding in only(health)} == {*doctor.OPTIONAL}
    assert summary(health).startswith("Everything works")
    health = examine({"is_writable": False, "AUTOFIT_CACHE": "/kept"})
    assert {each.name: each.fix for each in health.findings if each.state is Soundness.BROKEN} == {
        **{name: f"export {name}=FOLDER" for name in ("HF_HOME", "AUTOFIT_CACHE", "TMPDIR")},
        "this folder": "Change to a folder of your own.",
    }


NO_DRIVER: dict[str, Any] = {"driver": ("", None, "driver mismatch"), "cards": ()}
ODD: list[tuple[dict[str, Any], str, str]] = [
    ({"token": None}, "Hugging Face Hub", "without a token"),
    ({"hub": None}, "Hugging Face Hub", "ConnectTimeout"),
    ({"hub": 503}, "Hugging Face Hub", "status 503"),
    ({"is_offline": True}, "Hugging Face Hub", "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"),
    ({"shared_bytes": 64 * MIB}, "/dev/shm", "64.0 MiB"),
    ({"release": "5.15-microsoft"}, "WSL", "half of the host's memory"),
    ({"compiler": None}, "compiler", "no C compiler"),
    ({"paths": ("/dev/nvidia0",)}, "compiler", "Python.h"),
    ({"missing": ("ninja",)}, "DeepSpeed", "PATH lacks ninja"),
    ({"cards": (replace(CARD, name="rtx9090"),)}, "rtx9090", "not in the catalog"),
    ({"disk_bytes": 1 * GIB}, "HF_HOME", "too little"),
    ({"peft": "9.0"}, "peft", "newer than"),
]


@pytest.mark.parametrize(
    ("changes", "name", "says", "fix"),
    [
        (NO_DRIVER, "driver", "driver mismatch", "Reboot"),
        ({"cards": (), "CUDA_VISIBLE_DEVICES": ""}, "cards", "DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
        ({"cards": ()}, "cards", "lists no card", "nvidia-smi"),
        ({"torch": None}, "torch", "not installed", "pip install 'torch>=2.10'"),
        ({"answers": {"torch": "no libcudart"}}, "torch", "no libcudart", "--force-reinstall"),
        ({"answers": {"torch": GpuPackage(problem="no kernel", fix="whl/cu126")}}, "torch", "no kernel", "whl/cu126"),
        ({"answers": {"bitsandbytes": "status -11"}}, "bitsandbytes", "status -11", "pip"),
        ({"trl": "1.9.2"}, "trl", "older than 1.10", "trl>=1.10"),
        ({"flash-attn": "2.8", "answers": {"flash_attn": "undefined symbol"}}, "flash-attn", "symbol", "pip"),
        ({"hub": 401}, "token", "401", "hf auth login"),
        ({"encoding": "ANSI_X3.4-1968"}, "locale", "not UTF-8", "LANG=C.UTF-8"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "allocator", "many times slower", "unset"),
        *((changes, name, says, "") for changes, name, says in ODD),
    ],
)
def test_a_broken_thing_is_reported_with_its_fix_and_an_odd_thing_is_noted(
    examine: Examine, changes: dict[str, Any], name: str, says: str, fix: str
) -> None:
    health = examine({"deepspeed": "0.19.8", **changes})
    broken = [finding for finding in health.findings if finding.state is Soundness.BROKEN]
    (finding,) = broken or (finding for finding in only(health) if finding.name == name)
    assert (finding.name, says in finding.text, fix in finding.fix) == (name, True, True), finding
    assert (len(broken), health.trains) == (bool(fix), not fix)
    assert ("1 thing does not work" in summary(health)) == bool(fix)


def test_a_machine_without_a_gpu_is_not_broken(examine: Examine) -> None:
    for says, changes in {
        "no NVIDIA driver here": {"paths": (), "answers": {"torch": GpuPackage(problem="Found no NVIDIA driver")}},
        "torch is built for AMD's GPUs (ROCm), which": {"unplanned": "AMD's GPUs (ROCm)"},
    }.items():
        health = examine(NO_DRIVER | changes)
        (finding,) = (each for each in only(health) if each.name == "driver")
        assert finding.text.startswith(says)
        assert (health.broken, health.trains) == (0, False)
        assert "--simulate" in summary(health)


def test_tested_versions_equal_the_declared_and_installed_ones() -> None:
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


def test_the_command_exits_with_1_if_something_is_broken_and_an_issue_holds_no_names(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for encoding, code in (("latin-1", 1), ("utf-8", 0)):
        examine({"encoding": encoding, "AUTOFIT_CACHE": f"{tmp_path}/cache"})
        assert main.run(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["broken"] == code
        assert main.run(["doctor"]) == code
        assert "rtx4090" in capsys.readouterr().out
    assert main.run(["doctor", "--issue"]) == 0
    shown = capsys.readouterr().out
    assert "~/cache" in shown
    assert str(tmp_path) not in shown
    assert private_free(f"{tmp_path}/x") == "~/x"


@pytest.mark.parametrize(("older", "idle"), [("max_split_size_mb:64", "PYTORCH_ALLOC_CONF"), ("", VARIABLES[2])])
def test_the_allocators_variable_that_torch_ignores_is_to_be_unset(examine: Examine, older: str, idle: str) -> None:
    variables = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": older}
    (finding,) = (each for each in only(examine(variables)) if each.name == "allocator")
    assert finding.fix == f"unset {idle}"
    settings = AllocatorSettings(max_split_bytes=64 * MIB) if older else AllocatorSettings(grows=True)
    assert environment_settings({}) == settings
