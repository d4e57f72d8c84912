"""The HTML of a report, as text: what is in it, and what cannot be."""

import html.parser
import itertools

import page_examples
import pytest

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
