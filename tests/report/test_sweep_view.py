"""The table of a sweep and its CSV; their golden texts are test_console.py's."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.console import Console
from sweep_examples import CARDS, CUBE, LIST, MATRIX, TOO_LONG, WIDE

from autotrain_mem.report.layout import scale_for
from autotrain_mem.report.sweep import FIGURES, SweepProgress, sweep_csv, sweep_view
from autotrain_mem.spec import codec
from autotrain_mem.spec.sweep import Sweep, SweepPoint

SWEEPS = {"list": LIST, "matrix": MATRIX, "wide": WIDE, "cube": CUBE, "cards": CARDS}


def rendered(sweep: Sweep, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(sweep_view(sweep))
    return file.getvalue()


def cell(point: SweepPoint, sweep: Sweep) -> str | None:
    """What the table must show of a point that was not refused."""
    if point.estimate is None:
        return None
    scale = scale_for(max(each.required_bytes for each in sweep.estimates))
    number = scale.write(scale.steps(point.estimate.required_bytes))
    return f"* {number}" if point.estimate.fits else number


@pytest.mark.parametrize("name", ["matrix", "wide"])
@pytest.mark.parametrize("width", [40, 80, 4000])
def test_a_matrix_shows_every_point_once_at_any_width(name: str, width: int) -> None:
    sweep = SWEEPS[name]
    _, _, table = rendered(sweep, width).partition("(across)")
    table = re.split(r"refused|\* fits;", table)[0]
    shown = re.findall(r"\* \d+\.\d\d|\d+\.\d\d|\[\d\]", table)
    assert sorted(filter(lambda each: "[" not in each, shown)) == sorted(
        filter(None, (cell(p, sweep) for p in sweep.points))
    )
    assert len(shown) == len(sweep.points)


def test_cards_of_different_budgets_are_not_called_by_one_name() -> None:
    assert rendered(CARDS, 80).startswith("1 of 2 points fit\n")


@pytest.mark.parametrize("name", SWEEPS)
def test_the_csv_has_a_whole_line_for_each_point(name: str) -> None:
    sweep = SWEEPS[name]
    text = sweep_csv(sweep)
    heading, *rows = csv.reader(io.StringIO(text))
    assert heading == [*(axis.name for axis in sweep.axes), *FIGURES, "refused"]
    assert len(text.splitlines()) == len(sweep.points) + 1
    for row, point in zip(rows, sweep.points, strict=True):
        named = dict(zip(heading, row, strict=True))
        assert row[: len(sweep.axes)] == [setting.text for setting in point.settings]
        if point.estimate is None:
            assert named["refused"]
            assert not any(named[name] for name in FIGURES)
            continue
        parts = ("peak_reserved_bytes", "non_torch_bytes", "vllm_share_bytes")
        assert int(named["required_bytes"]) == sum(int(named[part]) for part in parts) == point.estimate.required_bytes
        assert named["fits"] == str(point.estimate.fits).lower()
        assert named["peak_phase"] == "backward"
        assert not named["refused"]


def test_the_wire_form_says_of_every_point_what_was_swept_and_what_came_of_it() -> None:
    wire = codec.to_json(LIST)
    assert wire["axes"] == [{"name": "max_length", "values": [4, 32, 128, 512, 65536]}]
    first, *_, last = wire["points"]
    assert first == {"swept": {"max_length": 4}, "estimate": codec.to_json(LIST.estimates[0]), "refused": None}
    assert last == {"swept": {"max_length": 65536}, "estimate": None, "refused": codec.to_json(TOO_LONG)}


def progress_of(sweep: Sweep, *, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal)
    with SweepProgress(console, sweep.axes) as progress:
        for point in sweep.points:
            progress.done(point)
    return file.getvalue()


def test_progress_is_told_on_a_terminal_only() -> None:
    assert progress_of(LIST, terminal=False) == ""
    assert "5/5" in progress_of(LIST, terminal=True)
    assert "refused: max_length 65536" in progress_of(LIST, terminal=True)
