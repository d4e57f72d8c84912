"""The recipes that come along: YAML files that ``--recipe NAME`` reads as ``--config FILE`` reads the user's own.

They lie in ``recipes/`` at the top of the repository; a wheel carries them inside the package. What a table of them
tells stands in the comments that each opens with, so that a person reads the same: its first line, and its ``card``.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from autotrain_mem.support.errors import UsageError

_PLACES = tuple(Path(__file__).parents[up] / "recipes" for up in (1, 2))
"""Of an installed package, and of a checkout (pyproject.toml: tool.hatch.build.targets.wheel.force-include)."""

_CARD = re.compile(r"^# card +(\S+)$", re.MULTILINE)
_GPUS = re.compile(r"^# gpus +(\d+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One file that trains one model one way."""

    name: str
    """Of the file, without ``.yaml``: ``reward-gemma3-1b-lora-8k``."""
    card: str
    """The card that its header speaks of, by its name in the catalog. It is planned for the one that is there."""
    gpus: int
    """How many of them."""
    what: str
    """In one line."""
    path: Path

    @property
    def method(self) -> str:
        """One of ``methods_table.METHODS``: every name begins with its own."""
        return self.name.partition("-")[0]


@functools.cache
def recipes() -> tuple[Recipe, ...]:
    """All of them, by name; none where neither place holds any."""
    folder = next(filter(Path.is_dir, _PLACES), None)
    return () if folder is None else tuple(map(read_recipe, sorted(folder.glob("*.yaml"))))


def read_recipe(path: Path) -> Recipe:
    """Raises ValueError for a file that does not open as a recipe does."""
    text = path.read_text(encoding="utf-8")
    card = _CARD.search(text)
    if not text.startswith("# ") or card is None:
        raise ValueError(f"{path} does not open with what it is and its card")
    gpus = _GPUS.search(text)
    count = 1 if gpus is None else int(gpus[1])
    return Recipe(name=path.stem, card=card[1], gpus=count, what=text.splitlines()[0].removeprefix("# "), path=path)


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UsageError: there is none, with the nearest name that there is.
    """
    known = {each.name: each for each in recipes()}
    if name in known:
        return known[name]
    near = _nearest(name.removesuffix(".yaml"))
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"No recipe is called {name!r}.",
        hint=f"{meant}autofit recipes lists them; a file of your own is --config FILE.",
    )


SIMILAR = 0.8
"""Of 1, how like the beginning of a name a part of one must be (``difflib.SequenceMatcher.ratio``)."""


def _nearest(name: str) -> list[str]:
    """At most two names that hold this one, that are like it, or that begin like it: ``sft-lama`` is part of one."""
    known = [each.name for each in recipes()]
    holding = [each for each in known if name in each]
    beginning = [each for each in known if difflib.SequenceMatcher(None, name, each[: len(name)]).ratio() >= SIMILAR]
    return (holding or difflib.get_close_matches(name, known, n=2) or beginning)[:2]
