"""The recipes that come along, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autotrain_mem.recipe_files import Recipe
from autotrain_mem.report.layout import QUIET, Block, add, table

_NOTE = """\
autofit METHOD --recipe NAME plans for the GPU that is here and trains; flags win over what a recipe says.
The card is the one that its header speaks of: --gpu CARD --plan_only shows that plan without it."""


def recipes_view(recipes: Sequence[Recipe]) -> RenderableType:
    """A line for each, by name."""
    made = table("name", "method", "card", "what it is")
    for recipe in recipes:
        add(made, recipe.name, recipe.method, recipe.card, recipe.what)
    return Block(Group(made, Text(), Text(_NOTE, style=QUIET)))
