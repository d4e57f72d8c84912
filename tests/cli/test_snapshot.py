"""``autofit estimate --snapshot``: the file that is written, what is said of it, and what is refused."""

from __future__ import annotations

import json
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from tests.place import Autofit

ESTIMATE = ("estimate", "sft", "--model", "tiny", "--gpu", "300MiB", "--max_length", "64", "--dtype", "bfloat16")


def read(path: Path) -> dict[str, Any]:
    snapshot: dict[str, Any] = pickle.loads(path.read_bytes())
    return snapshot


def peaks(snapshot: dict[str, Any]) -> tuple[int, int]:
    """(reserved, allocated bytes): the largest sums on the way, the latter in whole blocks of 512 bytes."""
    reserved = allocated = 0
    largest = (0, 0)
    for entry in snapshot["device_traces"][0]:
        blocks = -(-entry["size"] // 512) * 512
        reserved += {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}.get(
            entry["action"], 0
        ) * entry["size"]
        allocated += {"alloc": 1, "free_requested": -1}.get(entry["action"], 0) * blocks
        largest = (max(largest[0], reserved), max(largest[1], allocated))
    return largest


@pytest.mark.parametrize("mode", [(), ("--expandable_segments",)], ids=["native", "expandable"])
def test_the_history_has_the_peaks_of_the_estimate(autofit: Autofit, tmp_path: Path, mode: tuple[str, ...]) -> None:
    path = tmp_path / "run.pickle"
    ran = autofit(*ESTIMATE, *mode, "--json", "--snapshot", str(path))
    found = json.loads(ran.out)
    assert ran.code == 0
    snapshot = read(path)
    assert peaks(snapshot) == (found["peak_reserved_bytes"], found["peak_allocated_bytes"])
    settings = snapshot["allocator_settings"]
    assert settings["expandable_segments"] == bool(mode)
    assert settings["PYTORCH_CUDA_ALLOC_CONF"] == ("expandable_segments:True" if mode else "")
    names = {frame["name"] for entry in snapshot["device_traces"][0][:-1] for frame in entry["frames"]}
    assert names >= {"model.layers.1.self_attn.q_proj", "load", "forward", "backward", "optimizer_step"}


def test_torchs_tools_read_it_from_a_command_line(
    autofit: Autofit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = autofit(*ESTIMATE, "--snapshot", str(tmp_path / "run.pickle"))
    assert ran.out.startswith("fits 300MiB")
    assert f"Wrote the predicted history to {tmp_path / 'run.pickle'} (" in ran.err
    assert "https://pytorch.org/memory_viz" in ran.err
    assert "outside it are not in it" in ran.err
    snapshot = read(tmp_path / "run.pickle")
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    monkeypatch.chdir(tmp_path)
    for kind in ("stats", "trace", "trace_plot", "segment_plot"):
        monkeypatch.setattr(sys, "argv", ["_memory_viz", kind, "run.pickle"])
        runpy.run_path(str(_memory_viz.__file__), run_name="__main__")  # as python -m does, without importing torch
        told = capsys.readouterr().out
        if kind == "stats":
            assert f"total_reserved: {_memory_viz.Bytes(reserved)}\n" in told
    assert "Allocator State History" in (tmp_path / "output.html").read_text()


def test_a_run_that_does_not_fit_has_its_refusals_in_the_history(autofit: Autofit, tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    ran = autofit(*ESTIMATE, "--per_device_train_batch_size", "64", "--gpu", "20MiB", "--snapshot", str(path))
    assert ran.code == 0
    assert "The run does not fit: after each oom the history goes on" in ran.err
    assert "raise OutOfMemoryError" in _memory_viz.trace(read(path))


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("estimate sft --model not-there --snapshot tiny", 62, "--snapshot"),
        ("estimate sft --model tiny --max_length 64 --use_cpu --snapshot x", 2, "--gpu"),
        ("plan sft --model tiny --snapshot=run.pickle", 2, "autofit estimate METHOD ... --snapshot FILE"),
        ("gpus --snapshot=run.pickle", 2, "autofit estimate METHOD ... --snapshot FILE"),
    ],
)
def test_a_folder_a_cpu_and_another_command_are_refused(autofit: Autofit, line: str, code: int, said: str) -> None:
    ran = autofit(*line.split())
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
