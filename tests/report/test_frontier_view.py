"""How much fits at each level of harm, as a reader sees it and as JSON has it."""

import re
from dataclasses import replace

from fake_frontier import FRONTIER
from test_console import rendered

from autotrain_mem.report.comparison_view import BAR_WIDTH, frontier_view
from autotrain_mem.support import codec
from autotrain_mem.types.gpu_comparison import Frontier, Reach


def test_each_level_has_a_line_with_its_most_the_neighbour_and_its_speed() -> None:
    text = rendered(frontier_view(FRONTIER), 80)
    assert all(len(line) <= 80 for line in text.splitlines()[:14])
    line = next(line for line in text.splitlines() if line.startswith("lossless "))
    assert re.split(r" {2,}", line.strip())[1:3] == ["1,024", "1,088"]
    assert "nothing fits" in next(line for line in text.splitlines() if line.startswith("rounding"))
    last = next(line for line in text.splitlines() if line.startswith("LoRA "))
    assert re.split(r" {2,}", line.strip())[0] == "lossless"
    assert "=" in last
    assert "=  the model's context" in text
    assert "lower bound: a plan for the same max_length may be faster" in rendered(frontier_view(FRONTIER), 120)


def test_bars_are_as_long_as_what_fits() -> None:
    text = rendered(frontier_view(FRONTIER), 80)
    bars = [len(found) for line in text.splitlines() if (found := "".join(re.findall(r"[━#]+", line)))]
    assert bars == [BAR_WIDTH // 4, BAR_WIDTH]


def test_where_nothing_fits_there_is_no_figure() -> None:
    none = replace(FRONTIER, reaches=(Reach(level="lossless"),))
    assert "━" not in rendered(frontier_view(none), 80)


def test_it_is_written_and_read_as_json() -> None:
    written = codec.to_json(FRONTIER)
    assert written["schema"] == "autofit.frontier/1"
    assert codec.from_json(Frontier, written) == FRONTIER
