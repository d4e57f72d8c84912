"""What a process holds outside torch: the rule against every public figure that was found."""

from __future__ import annotations

import csv
import pathlib
import statistics
from dataclasses import dataclass

import pytest

from autotrain_mem.machine import overhead as module
from autotrain_mem.machine.overhead import CENTRAL_KERNELS_BYTES, KERNELS_BYTES, Overhead, nccl_bytes, overhead
from autotrain_mem.units import GIB, MIB

ROUNDING_BYTES = 16 * MIB
"""Three sizes of an OOM message, each rounded to 0.01 GiB."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One public figure."""

    doing: str
    found_bytes: int
    """Outside torch. Messages round to 0.01 GiB, so this may be off by 10 MiB, or 15 with all three in GiB."""
    predicted: Overhead


def read(row: dict[str, str]) -> Figure:
    major, minor = map(int, row["compute_capability"].split("."))
    predicted = overhead(int(row["multiprocessors"]), (major, minor))
    assert predicted is not None
    outside_gib = float(row["in_use_gib"]) - float(row["allocated_gib"])
    found_bytes = round(outside_gib * GIB - float(row["unallocated_mib"]) * MIB)
    return Figure(doing=row["doing"], found_bytes=found_bytes, predicted=predicted)


ROWS = pathlib.Path(module.__file__).with_name("overhead_figures.csv").read_text(encoding="utf-8").splitlines()
FIGURES = [read(row) for row in csv.DictReader(ROWS, strict=True)]


def errors_with(kernels_bytes: int) -> list[int]:
    """Predicted less found, of every figure."""
    return [figure.predicted.context_bytes + kernels_bytes - figure.found_bytes for figure in FIGURES]


def test_no_public_figure_is_above_the_rule_and_none_far_below() -> None:
    for figure in FIGURES:
        # 240 MiB: an idle context, which the kernels' 160 MiB are not meant for; the default headroom starts at 400 MiB
        assert 0 <= figure.predicted.total_bytes - figure.found_bytes < 240 * MIB, figure
    idle = [figure for figure in FIGURES if figure.doing == "idle"]
    assert len(idle) == 3
    assert all(figure.found_bytes <= figure.predicted.context_bytes for figure in idle)


def test_the_central_estimate_is_as_near_as_its_text_says() -> None:
    errors = errors_with(CENTRAL_KERNELS_BYTES)
    assert len(errors) == 56
    shares = [abs(error) / figure.found_bytes for error, figure in zip(errors, FIGURES, strict=True)]
    assert statistics.median(shares) == pytest.approx(0.076, abs=0.0005)
    assert (round(min(errors) / MIB), round(max(errors) / MIB)) == (-112, 123)


def test_what_is_planned_is_as_far_above_as_its_text_says() -> None:
    errors = errors_with(KERNELS_BYTES)
    shares = [error / figure.found_bytes for error, figure in zip(errors, FIGURES, strict=True)]
    assert min(errors) < ROUNDING_BYTES  # the most found is what is planned for
    assert statistics.median(shares) == pytest.approx(0.35, abs=0.005)
    assert round(max(errors) / MIB) == 235


def test_the_rows_add_up_to_the_total_and_an_unknown_architecture_has_none() -> None:
    ruled = overhead(108, (8, 0))
    assert ruled is not None
    assert ruled.total_bytes == ruled.context_bytes + ruled.kernels_bytes + ruled.nccl_bytes == 646 * MIB
    assert overhead(100, (99, 0)) is None


def test_one_process_has_no_nccl_buffers_and_two_have_them_on_every_channel() -> None:
    assert nccl_bytes(1, channels=24, connections=2) == 0
    assert nccl_bytes(2, channels=24, connections=2) == 24 * 2 * (4 * MIB + 512 * 1024 + 4_915_200)
