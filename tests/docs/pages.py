"""The pages as they are written: their blocks of code and their links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))

_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. Its mark is the comment before it: ``run`` has the tutorial's test run it, ``run: FILE`` names
    another test that does, ``transcript: NAME`` is what a command printed. One without is only parsed."""

    page: Path
    mark: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0] if self.text else ''}"


def blocks(*pages: Path) -> Iterator[Block]:
    for page in pages or PAGES:
        for mark, language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            yield Block(page, mark, language, text)


def commands(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if command := line.partition(" #")[0].strip():
            yield command


def links(page: Path) -> Iterator[str]:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for plain, image in _LINK.findall(text):
        yield plain or image


def anchors(page: Path) -> set[str]:
    """What a link into the page may name, as GitHub and mkdocs make it of a heading."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
