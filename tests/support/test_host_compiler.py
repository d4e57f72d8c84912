"""What DeepSpeed needs to compile its optimizer for the host is looked for, and what mends it is said."""

from __future__ import annotations

import pathlib
import sys
from importlib.machinery import ModuleSpec

import pytest

from autotrain_mem.support import host_compiler
from autotrain_mem.support.host_compiler import NVME, OPTIMIZER, missing_to_compile


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """One with a PATH of its own, Python's headers and a DeepSpeed without compiled operators."""
    for name in ("bin/ninja", "bin/c++", "bin/clang++", "include/Python.h", "deepspeed/__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        file.chmod(0o755)
    spec = ModuleSpec("deepspeed", None, origin=str(tmp_path / "deepspeed/__init__.py"))
    monkeypatch.setattr(host_compiler, "find_spec", lambda name: spec)
    monkeypatch.setattr(host_compiler.sysconfig, "get_path", lambda name: str(tmp_path / "include"))
    return tmp_path


def missing(machine: pathlib.Path, **more: str) -> dict[str, str]:
    return dict(missing_to_compile({"PATH": str(machine / "bin"), "HOME": str(machine), **more}))


def test_a_machine_that_has_all_lacks_nothing(machine: pathlib.Path) -> None:
    assert not missing(machine)


def test_each_that_is_missing_is_named_with_its_cure(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "bin/ninja").unlink()
    (machine / "bin/c++").unlink()
    found = missing(machine)
    assert "apt install g++" in found["there is no C++ compiler (c++)"]
    assert not missing(machine, CXX="clang++ -O2").keys() - {"ninja is not found in PATH"}
    monkeypatch.setattr(sys, "executable", str(machine / "venv/python"))
    assert "pip install ninja" in missing(machine)["ninja is not found in PATH"]
    (machine / "venv").mkdir()
    (machine / "venv/ninja").write_text("")
    assert f'export PATH="{machine}/venv:$PATH"' in missing(machine)["ninja is not found in PATH"]
    (machine / "include/Python.h").unlink()
    assert "python3-dev" in missing(machine, CXX="clang++")["Python.h is missing"]


def test_what_was_compiled_before_needs_no_compiler_but_ninja(machine: pathlib.Path) -> None:
    (machine / "bin/c++").unlink()
    (machine / "bin/ninja").unlink()
    built = machine / ".cache/torch_extensions/py311_cu128/cpu_adam/cpu_adam.so"
    built.parent.mkdir(parents=True)
    built.write_text("")
    assert missing(machine).keys() == {"ninja is not found in PATH"}


def test_nvme_needs_libaio_too_unless_flags_say_where_it_is(
    machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_compiler, "_LIBAIO", (str(machine / "libaio.h"),))
    environment = {"PATH": str(machine / "bin"), "HOME": str(machine)}
    ((what, cure),) = missing_to_compile(environment, (*OPTIMIZER, *NVME))
    assert (what, "libaio-dev" in cure) == ("libaio.h is missing", True)
    assert not [*missing_to_compile(environment | {"CFLAGS": "-I/opt"}, NVME)]
    (machine / "libaio.h").write_text("")
    assert not [*missing_to_compile(environment, NVME)]


@pytest.mark.parametrize(("accelerator", "is_enough"), [("cuda", True), ("cpu", False)])
def test_an_operator_that_came_with_deepspeed_needs_neither(
    accelerator: str, is_enough: bool, machine: pathlib.Path
) -> None:
    (machine / "bin/ninja").unlink()
    (machine / "deepspeed/git_version_info_installed.py").write_text(
        f"version='0.19'\ninstalled_ops={{'cpu_adam': True}}\naccelerator_name='{accelerator}'\n"
    )
    assert bool(missing(machine)) != is_enough
