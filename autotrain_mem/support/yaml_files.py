"""Reads a user's YAML file, which is not trusted."""

from __future__ import annotations

import json
import math
from typing import Any

from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import KIB, format_bytes

LARGEST_CONFIG_BYTES = 256 * KIB
"""Of a YAML file: PyYAML reads some 100 KiB a second."""
MOST_VALUES = 100_000
"""Of a YAML file, where each alias counts as a copy: a few lines of aliases of aliases stand for billions."""


def read_yaml(path: str, flag: str) -> dict[str, Any]:
    """Reads a file of keys, with values as JSON has them.

    Args:
        flag: What named the file: ``--config``.

    Raises:
        UsageError: it cannot be read, is not YAML, is too large or no mapping.
    """
    import yaml

    hint = f"Write key: value in {path}, one a line."
    try:
        with open(path, "rb") as file:
            content = file.read(LARGEST_CONFIG_BYTES + 1)
        if len(content) > LARGEST_CONFIG_BYTES:
            message = f"The config {path} is larger than {format_bytes(LARGEST_CONFIG_BYTES)}."
            raise UsageError(message, hint=f"Check {flag}; data go to --dataset.")
        loader = yaml.SafeLoader(content.decode("utf-8"))
        node = loader.get_single_node()
        if node is not None and _count(node, {}) > MOST_VALUES:
            message = f"The config {path} holds more than {MOST_VALUES:,} values."
            raise UsageError(message, hint="Write values out in place of aliases (*name) of aliases.")
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
        raise UsageError(f"The config {path} holds a value that is none: {error}.", hint=hint) from error
    if not isinstance(plain, dict):
        raise UsageError(f"The config {path} holds no keys.", hint=hint)
    return plain


def _count(node: Any, counted: dict[int, float]) -> float:
    """Counts the values below a node of YAML's, itself included, with a copy for each alias; endless where one holds
    itself."""
    if id(node) not in counted:
        counted[id(node)] = math.inf
        parts = node.value if isinstance(node.value, list) else []
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
        counted[id(node)] = 1 + sum(_count(each, counted) for pair in pairs for each in pair)
    return counted[id(node)]
