"""Tests that a worker removes a killed parent's folders, and compiles nothing on import."""

import pathlib

import pytest
import torch

from autotrain_mem.worker.client import SCRATCH
from autotrain_mem.worker.server import ScratchFolders, deferred_compile


def folder_with_a_file(path: pathlib.Path) -> pathlib.Path:
    path.mkdir()
    (path / "call").write_text("rows", encoding="utf-8")
    return path


def test_a_worker_removes_the_folder_that_it_was_given_and_those_of_scripts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("autofit-own", "autofit-handed", "data", "autofit-everyones")
    own, handed, kept, everyones = (folder_with_a_file(tmp_path / name) for name in names)
    monkeypatch.setenv(SCRATCH, str(own))
    first, second = ScratchFolders(), ScratchFolders()
    for scratch_folders in (first, second):  # two workers of one parent
        scratch_folders.note({"operation": "parse"})
        scratch_folders.note({"operation": "describe", "job": {"python_call": None}})
        scratch_folders.note({"operation": "describe", "job": {"python_call": {"path": str(handed / "call")}}})
        scratch_folders.note({"operation": "describe", "job": {"python_call": {"path": str(kept / "call")}}})
    monkeypatch.delenv(SCRATCH)
    monkeypatch.setenv("TMPDIR", str(everyones))
    for scratch_folders in (first, second, ScratchFolders()):
        scratch_folders.remove()
    assert {*tmp_path.iterdir()} == {kept, everyones}


def test_a_function_is_compiled_at_its_first_call_and_a_module_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_now(model: object, **options: object) -> object:
        compiled.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_now)

    def double(number: int) -> int:
        """Twice as much."""
        return 2 * number

    module = torch.nn.Identity()
    with deferred_compile():
        plain, with_options, whole = torch.compile(double), torch.compile(dynamic=False)(double), torch.compile(module)
    assert torch.compile is compile_now
    assert compiled == [(module, {})]
    assert whole is module
    assert plain.__doc__ == "Twice as much."
    assert [plain(2), plain(3), with_options(4)] == [4, 6, 8]
    assert compiled == [(module, {}), (double, {}), (double, {"dynamic": False})]
