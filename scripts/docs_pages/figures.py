"""Figures in the page itself: an SVG that takes the page's colours, in light and dark."""

from __future__ import annotations

from pathlib import Path

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


def figure(name: str) -> str:
    """Returns the SVG as one block of HTML; its own ``<title>`` and ``<desc>`` are what a screen reader says."""
    lines = (FIGURES / f"{name}.svg").read_text(encoding="utf-8").splitlines()
    svg = "\n".join(line for line in lines if line.strip())  # an empty line would end the block
    return f'<figure class="drawn">\n{svg}\n</figure>'
