"""Texts that are kept word for word: ``AUTOFIT_UPDATE_GOLDEN=1 scripts/test`` writes them all again."""

import os
from pathlib import Path


def kept(path: Path, text: str) -> str:
    """The text that a golden file holds; where golden files are written again, it holds ``text`` from now on."""
    if os.environ.get("AUTOFIT_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")
