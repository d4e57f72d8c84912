"""The HTML of a report, as text: what is in it, and what cannot be."""

from __future__ import annotations

import html.parser
import itertools
import math
import pathlib
import re

import page_examples
import pytest

from autotrain_mem.report.page import render
from autotrain_mem.report.page.figures import MOST_ROWS
from autotrain_mem.report.page.render import MARKER, page_html


class Elements(html.parser.HTMLParser):
    """The names of a document's elements with their attributes, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def hostile() -> str:
    return page_html(page_examples.hostile_page())


def test_hostile_texts_make_no_element_and_are_shown_as_they_are(hostile: str) -> None:
    assert MARKER in hostile[:200]
    found = Elements(hostile)
    names = [name for name, _ in found.elements]
    assert "img" not in names
    assert names.count("script") == 2
    assert all(not key.startswith("on") for _, attributes in found.elements for key in attributes)
    assert page_examples.HOSTILE in found.texts


def test_the_policy_allows_what_is_in_the_file_and_nothing_else(hostile: str) -> None:
    (policy,) = (value["content"] for _, value in Elements(hostile).elements if value.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy


def test_a_large_rehearsal_takes_little_of_a_file() -> None:
    """As many points as a screen shows, each with other sizes than the last, which packs worst."""
    assert len(page_html(page_examples.page(page_examples.timeline(12_000))).encode()) < 500_000


def test_a_table_stands_in_the_place_of_each_figure() -> None:
    figures = [section for section in page_examples.page().sections if section.figure is not None]
    for figure in figures:
        assert 0 < len(figure.rows) <= MOST_ROWS + 20
        assert {len(row) for row in figure.rows} == {len(figure.columns)}
        assert figure.note.endswith(".")
    timeline = page_examples.timeline()
    *areas, reserved = (figures[0].figure or {})["lines"]
    columns = [(line["colour"], [*itertools.accumulate(line["changes"])]) for line in reversed(areas)]
    assert columns == [(str(owner), [*sizes]) for owner, sizes in timeline.owners.items() if any(sizes)]
    assert [*itertools.accumulate(reserved["changes"])] == [*timeline.reserved_bytes]
    assert f"{timeline.event[timeline.peak]:,}" in {row[1] for row in figures[0].rows}, "its peak is among the rows"


# -- colours -------------------------------------------------------------------------------------------------------

STYLE = pathlib.Path(render.__file__).with_name("static").joinpath("page.css").read_text(encoding="utf-8")
PAIRS = {name: pair for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)}
OWNERS = [owner.value for owner in page_examples.OWNERS]
SERIES = [name for name in PAIRS if name.startswith("series-")]
SIGHTS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
"""Machado, Oliveira and Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency (2009)."""


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    """As WCAG has it."""
    light, dark = sorted(
        (sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(each), strict=True)) for each in (one, other)),
        reverse=True,
    )
    return (light + 0.05) / (dark + 0.05)


def oklab(colour: str, sight: str) -> tuple[float, ...]:
    """Björn Ottosson's space, in which distances are about what an eye tells apart."""
    seen = [min(1.0, max(0.0, dot(row, linear(colour)))) for row in SIGHTS[sight]]
    to_cones = ((0.4122, 0.5363, 0.0514), (0.2119, 0.6807, 0.1074), (0.0883, 0.2817, 0.6300))
    to_lab = ((0.2105, 0.7936, -0.0041), (1.9780, -2.4286, 0.4506), (0.0259, 0.7828, -0.8087))
    cones = [dot(row, seen) ** (1 / 3) for row in to_cones]
    return tuple(dot(row, cones) for row in to_lab)


def dot(row: tuple[float, ...], column: list[float]) -> float:
    return sum(one * other for one, other in zip(row, column, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_of_figures_stand_out_from_the_ground_and_differ_for_every_eye(scheme: int) -> None:
    """0.07 is over three times what is just told apart side by side (0.02)."""
    for names in (OWNERS, SERIES):
        for name in names:
            assert contrast(PAIRS[name][scheme], PAIRS["ground"][scheme]) >= 3, name
        for sight, (one, other) in itertools.product(SIGHTS, itertools.combinations(names, 2)):
            seen = [oklab(PAIRS[name][scheme], sight) for name in (one, other)]
            assert math.dist(*seen) >= 0.07, (sight, one, other)
