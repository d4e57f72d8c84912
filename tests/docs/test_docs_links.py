"""README is short, and every link of it and of the pages leads somewhere."""

import re

import pytest

from tests.docs.pages import DOCS, PAGES, README, ROOT, anchors, links

KILOBYTES_8 = 8_192


def test_the_readme_is_at_most_8_kilobytes() -> None:
    assert README.stat().st_size <= KILOBYTES_8


def test_the_readme_names_the_two_commands_that_set_a_fresh_machine_up_the_second_as_ci_runs_it() -> None:
    (run_by_ci,) = re.findall(r"exec .*/(scripts/\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    for command in ("scripts/quickstart", run_by_ci):
        assert f"| `{command}` |" in README.read_text(encoding="utf-8")
        assert "/environment" in (ROOT / command).read_text(encoding="utf-8"), "it installs what is missing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("../contributing/"):  # the pages at the root, taken in as they are built
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_readme_leads_to_every_how_to() -> None:
    assert {str(page.relative_to(ROOT)) for page in (DOCS / "howto").glob("*.md")} <= set(links(README))
