"""The table of a sweep and its CSV; their golden texts are test_console.py's."""

import csv
import io
import re

import pytest
from sweep_examples import CARDS, CUBE, LIST, MATRIX, WIDE
from test_console import rendered

from autotrain_mem.report.layout import scale_for
from autotrain_mem.report.sweep_view import FIGURES, sweep_csv, sweep_view
from autotrain_mem.types.gpu_comparison import Sweep, SweepPoint

SWEEPS = {"list": LIST, "matrix": MATRIX, "wide": WIDE, "cube": CUBE, "cards": CARDS}


def cell(point: SweepPoint, sweep: Sweep) -> str | None:
    """What the table must show of a point that was not refused."""
    if point.estimate is None:
        return None
    scale = scale_for(max(each.required_bytes for each in sweep.estimates))
    number = scale.size(point.estimate.required_bytes)
    return f"* {number}" if point.estimate.fits else number


@pytest.mark.parametrize("name", ["matrix", "wide"])
@pytest.mark.parametrize("width", [40, 80, 4000])
def test_a_matrix_shows_every_point_once_at_any_width(name: str, width: int) -> None:
    sweep = SWEEPS[name]
    _, _, table = rendered(sweep_view(sweep), width).partition("(across)")
    table = re.split(r"refused|\* fits;", table)[0]
    shown = re.findall(r"\* \d+\.\d\d|\d+\.\d\d|\[\d\]", table)
    assert sorted(filter(lambda each: "[" not in each, shown)) == sorted(
        filter(None, (cell(p, sweep) for p in sweep.points))
    )
    assert len(shown) == len(sweep.points)


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
        assert bool(named["refused"]) is (point.estimate is None)
        if point.estimate is None:
            assert not any(named[name] for name in FIGURES)
            continue
        assert int(named["required_bytes"]) == point.estimate.required_bytes
        assert (named["fits"], named["peak_phase"]) == (str(point.estimate.fits).lower(), "backward")
