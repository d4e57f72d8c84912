"""Reads users' YAML files, which are not trusted, and the headers of built-in recipes (``--recipe NAME``)."""

import difflib
import functools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import KIB, format_bytes

LARGEST_CONFIG_BYTES = 256 * KIB
"""The largest YAML file that is read: PyYAML reads some 100 KiB a second."""
MOST_VALUES = 100_000
"""The most values of a YAML file, with a copy for each alias: nested aliases can stand for billions."""

_SMALL_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE]-\d+$")
"""2e-4 is a number in YAML 1.2, and a text in PyYAML's YAML 1.1. 2e4 stays a text, as a commit's hash may look so."""


def read_yaml(path: str, flag: str) -> dict[str, Any]:
    """Reads a mapping with JSON values from the file that ``flag`` names. Raises UsageError if it cannot."""
    import yaml

    hint = f"Write key: value in {path}, one a line."
    try:
        # A shell's <(command) is a pipe. One that nobody writes to is empty, and opening it does not block.
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            os.set_blocking(file.fileno(), True)
            content = file.read(LARGEST_CONFIG_BYTES + 1)
        if len(content) > LARGEST_CONFIG_BYTES:
            message = f"The config {path} is larger than {format_bytes(LARGEST_CONFIG_BYTES)}."
            raise UsageError(message, hint=f"Check {flag}; data go to --dataset.")
        loader = yaml.SafeLoader(content.decode("utf-8"))
        also = {None: [("tag:yaml.org,2002:float", _SMALL_NUMBER)]}
        loader.yaml_implicit_resolvers = {**loader.yaml_implicit_resolvers, **also}
        if (node := loader.get_single_node()) is not None and _count(node, {}) > MOST_VALUES:
            message = f"The config {path} holds more than {MOST_VALUES:,} values."
            raise UsageError(message, hint="Write out the values of aliases (*name) that refer to other aliases.")
        config = None if node is None else loader.construct_document(node)
        plain: Any = json.loads(json.dumps(config, default=str))  # a date becomes the text that it was
    except OSError as error:
        raise UsageError(f"Cannot read the config {path}: {error.strerror}.", hint=f"Check {flag}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The config {path} is not UTF-8 text.", hint=f"Check {flag}.") from error
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)  # such as: expected ',' or ']'
        where = f" at line {mark.line + 1}, column {mark.column + 1} ({problem})" if mark is not None else ""
        raise UsageError(f"The config {path} is not YAML{where}.", hint=hint) from error
    except RecursionError as error:
        raise UsageError(f"The config {path} is nested too deeply.", hint=hint) from error
    except (TypeError, ValueError) as error:  # a month 13, a key that is a date
        raise UsageError(f"The config {path} holds an invalid value: {error}.", hint=hint) from error
    if not isinstance(plain, dict):
        raise UsageError(f"The config {path} holds no keys.", hint=hint)
    return plain


def _count(node: Any, counted: dict[int, float]) -> float:
    """Counts a YAML node and the values below it, with a copy for each alias; infinite if one contains itself."""
    if id(node) not in counted:
        counted[id(node)] = math.inf
        parts = node.value if isinstance(node.value, list) else []
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
        counted[id(node)] = 1 + sum(_count(each, counted) for pair in pairs for each in pair)
    return counted[id(node)]


_PLACES = tuple(Path(__file__).parents[up] / "recipes" for up in (1, 2))
"""Folders of the recipes in an installed package and in a checkout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Describes a file that trains one model in one way."""

    name: str
    """The file's name, without ``.yaml``: ``reward-gemma3-1b-lora-8k``."""
    card: str
    """The catalog's name of the card in its header. A plan is made for the card at hand."""
    gpus: int
    """Number of these cards."""
    what: str
    """What it does, in one line."""
    path: Path

    @property
    def method(self) -> str:
        """Returns the recipe's method, the beginning of its name."""
        return self.name.partition("-")[0]


@functools.cache
def recipes() -> tuple[Recipe, ...]:
    """Returns all recipes, sorted by name; none if there is no folder of recipes."""
    folder = next(filter(Path.is_dir, _PLACES), None)
    return () if folder is None else tuple(map(read_recipe, sorted(folder.glob("*.yaml"))))


def read_recipe(path: Path) -> Recipe:
    """Reads the header of a recipe. Raises ValueError if it has none."""
    text = path.read_text(encoding="utf-8")
    card = re.search(r"^# card +(\S+)$", text, re.MULTILINE)
    if not text.startswith("# ") or card is None:
        raise ValueError(f"{path} does not begin with a description and a card")
    gpus = re.search(r"^# gpus +(\d+)$", text, re.MULTILINE)
    count = 1 if gpus is None else int(gpus[1])
    return Recipe(name=path.stem, card=card[1], gpus=count, what=text.splitlines()[0].removeprefix("# "), path=path)


def recipe(name: str) -> Recipe:
    """Returns the recipe of that name. Raises UsageError, with the nearest names, if there is none."""
    known = {each.name: each for each in recipes()}
    if name in known:
        return known[name]
    asked = name.removesuffix(".yaml")  # near names contain it, resemble it, or begin like it: sft-lama
    holding = [each for each in known if asked in each]
    alike = [each for each in known if difflib.get_close_matches(asked, [each[: len(asked)]])]
    near = (holding or difflib.get_close_matches(asked, known, n=2) or alike)[:2]
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"No recipe is called {name!r}.",
        hint=f"{meant}autofit recipes lists them; a file of your own is --config FILE.",
    )
