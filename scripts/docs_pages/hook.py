"""The hook that mkdocs.yml names: replaces ``{{ NAME }}`` by a table or figure, and adds the root's Markdown pages."""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from docs_pages.plan_schema import plan_schema  # noqa: E402  # needs the path from above
from docs_pages.tables import TABLES  # noqa: E402

PLACE = re.compile(r"^\{\{ (\w+)(?: ([\w-]+))? \}\}$", re.MULTILINE)
"""A placeholder on its own line: ``{{ levers }}``, ``{{ figure pipeline }}``, ``{{ transcript plan }}``."""

TAKEN_IN = {"contributing/architecture.md": "ARCHITECTURE.md", "contributing/contributing.md": "CONTRIBUTING.md"}
"""Page -> the file at the repository's root that it shows."""

LINKS = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md"}
"""Link targets in these files -> the pages that replace them."""


def filled(markdown: str) -> str:
    """Returns the page with its placeholders replaced. Raises KeyError for an unknown name."""
    return PLACE.sub(lambda place: _shown(place[1], place[2]), markdown)


def _shown(kind: str, name: str) -> str:
    if kind == "figure":  # as one block of HTML, in the page's colours
        lines = (ROOT / "docs" / "figures" / f"{name}.svg").read_text(encoding="utf-8").splitlines()
        svg = "\n".join(line for line in lines if line.strip())  # an empty line would end the block
        return f'<figure class="drawn">\n{svg}\n</figure>'
    if kind == "transcript":
        text = (ROOT / "docs" / "transcripts" / f"{name}.txt").read_text(encoding="utf-8")
        return f"```text\n{text}```"
    return TABLES[kind]()


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are outside ``docs/``, and the JSON schema of plan files."""
    from mkdocs.structure.files import File  # the tests of this module need no mkdocs

    for page, name in TAKEN_IN.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for root_name, link in LINKS.items():
            text = text.replace(f"]({root_name}", f"]({link}")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/plan.schema.json", content=json.dumps(plan_schema(), indent=2)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return filled(markdown)


LABELLED = 'data-md-component="search" role="dialog"'
"""The theme's search dialog, which has no label for screen readers."""


def on_post_page(output: str, **_: Any) -> str:
    return output.replace(LABELLED, f'{LABELLED} aria-label="Search"')
