"""``autofit recipes``, and what ``--recipe NAME`` reads in place of ``--config FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.support import codec, yaml_files
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.yaml_files import recipe

ABOUT = """\
The recipes that come along: name, method, the card that its header speaks of, and what it is. With a NAME, the text of
that recipe: a file for --config.

  autofit sft --recipe NAME                             plans for the GPU that is here, and trains
  autofit plan sft --recipe NAME --gpu CARD             the plan for a card that is not here
"""


def recipes(argv: Sequence[str]) -> int:
    """``autofit recipes``, or the text of one. Raises UsageError for an unknown name or flag."""
    parser = CommandParser("recipes", ABOUT)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("name", metavar="NAME", nargs="?", help="print this one")
    either.add_argument("--json", action="store_true", help="list them, with where the files lie")
    options = parser.read(argv)
    if options.name is not None:
        sys.stdout.write(recipe(options.name).path.read_text(encoding="utf-8"))
    elif options.json:
        listed = [{**codec.to_json(each), "method": each.method} for each in yaml_files.recipes()]
        sys.stdout.write(json.dumps({"schema": "autofit.recipes/1", "recipes": listed}, indent=2) + "\n")
    else:
        # rich takes a tenth of a second, and every command reads recipes
        from autotrain_mem.report.machine_view import recipes_view
        from autotrain_mem.report.terminal import whole_lines

        whole_lines().print(recipes_view(yaml_files.recipes()))
    return 0


def config_file(prog: str, flags: dict[str, Any]) -> str:
    """Removes ``--recipe`` from the flags and returns the YAML file of that name.

    Args:
        prog: The command, whose last word is the method: ``"autofit plan sft"``.

    Raises:
        UsageError: both are given; no such recipe; a recipe of another method, with the command that takes it.
    """
    name: str = flags.pop("recipe")
    if "config" in flags:
        raise UsageError(
            "--recipe and --config exclude each other.",
            hint=f"To change a recipe, add flags, which win over it; or copy {recipe(name).path} and give --config.",
        )
    chosen, method = recipe(name), prog.split()[-1]
    if chosen.method != method:
        raise UsageError(
            f"The recipe {name} is for {chosen.method}, not {method}.",
            hint=f"{prog.removesuffix(method)}{chosen.method} --recipe {name}",
        )
    return str(chosen.path)
