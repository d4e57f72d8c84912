"""The HTML of a report, as text: what is in it, and what cannot be."""

import html
import itertools
import re

import page_examples

from autotrain_mem.report.page.figures import MOST_ROWS
from autotrain_mem.report.page.render import MARKER, page_html


def test_the_policy_allows_what_is_in_the_file_and_nothing_else() -> None:
    hostile = page_html(page_examples.hostile_page())
    assert MARKER in hostile[:200]
    (policy,) = re.findall(r'http-equiv="[\w-]+" content="(.*?)"', html.unescape(hostile))
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
