"""Builds the documentation's tables, each from the declarations in the code."""

import argparse
import csv
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from autotrain_mem.cli.flags import make_parser
from autotrain_mem.cli.main import HELP
from autotrain_mem.search.levels import LEVELS, SHORTER_ROWS, SMALLER_IMAGES_LEVEL
from autotrain_mem.settings.flag_verdicts import GROUPS, REFUSED, REFUSED_WHEN_OFF, Verdict
from autotrain_mem.settings.levers import LADDER, LEVERS
from autotrain_mem.support import errors
from autotrain_mem.support.yaml_files import recipes
from autotrain_mem.types import Harm
from docs_pages.cures import CURES

MACHINE = Path(errors.__file__).parents[1] / "machine"

HARMS = {
    Harm.NONE: "none",
    Harm.TIME: "time",
    Harm.ROUNDING: "rounding",
    Harm.WHAT_IS_TRAINED: "what is trained",
    Harm.DATA: "the data",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_CODE = re.compile(r"[a-z]+[_.]\w|(transformers|torch|bitsandbytes)\b")
"""Matches a clause that begins with a name of code, such as ``max_length`` or ``config.json``."""


def sentence(text: str) -> str:
    """Returns a clause as a sentence: upper case first, except for a name of code, and a full stop last."""
    first = text[:1] if _CODE.match(text) else text[:1].upper()
    return f"{first}{text[1:]}{'' if text.endswith(('.', '?')) else '.'}" if text else ""


def levers() -> str:
    rows = []
    for row in LADDER:
        parts = [sentence(row.reason), f"**It {row.warning}.**" if row.warning else ""]
        if row.to is not None and row.harm is not Harm.NONE:
            parts.append(f"Sets `{row.knobs[0]}` to `{str(row.to).lower()}`.")
        if row.along:
            parts.append(f"Pulled together with {_listed(row.along)}.")
        if row.not_sharded:
            parts.append(f"Not with FSDP: {row.not_sharded[0]}.")
        rows.append((f"`{row.name}`", HARMS[row.harm], " ".join(filter(None, parts))))
    return table(("lever", "costs", "what it does"), rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def levels() -> str:
    rows = []
    for number, step in enumerate(LEVELS, 1):
        given = f"One or more of {_listed(step.own)}." if len(step.own) > 1 else "Nothing but time."
        if len(step.own) == 1:
            given = f"`{step.own[0]}`."
        more = f" With one or more of {_listed(step.offloads)}." if step.offloads else ""
        rows.append((str(number), step.name, f"{given}{more}"))
    rows.append((str(len(rows) + 1), SHORTER_ROWS, sentence(LEVERS["max_length"].reason)))
    rows.append((f"before {len(rows)}", SMALLER_IMAGES_LEVEL, sentence(LEVERS["max_pixels"].reason)))
    return table(("no.", "level", "what may be given up there"), rows)


def not_counted() -> str:
    rows = [(f"`{row.name}`", sentence(each)) for row in LADDER for each in row.not_counted]
    return table(("lever", "what an estimate leaves out"), rows)


def flags() -> str:
    """Returns tables of autofit's own flags, one for each group, with the commands that accept each flag."""
    groups: dict[str, dict[str, tuple[argparse.Action, list[str]]]] = {}
    for command, name in (("autofit sft", "train"), ("autofit plan sft", "plan"), ("autofit estimate sft", "estimate")):
        for group in make_parser(command)._action_groups:
            title = (group.title or "").replace("a plan may change", "may be changed")
            for action in group._group_actions:
                known = groups.setdefault(title, {}).setdefault(action.dest, (action, []))
                known[1].append(name)
    sections = []
    for title, taken in groups.items():
        rows = []
        for action, commands in taken.values():
            takes = action.metavar or (" or ".join(map(str, action.choices)) if action.choices else "")
            name = " ".join(filter(None, (action.option_strings[0], str(takes))))
            text = sentence((action.help or "").replace("%%", "%"))
            rows.append((f"`{name}`", "all" if len(commands) == 3 else ", ".join(commands), text))
        if rows:
            sections.append(f"## {sentence(title)[:-1]}\n\n{table(('flag', 'commands', 'meaning'), rows)}")
    return "\n\n".join(sections)


def refused_flags() -> str:
    """Returns the table of TRL's flags that are refused, with the alternative to each."""
    off = {f"{name} false": cure for name, cure in REFUSED_WHEN_OFF.items()}
    rows = [(f"`--{name}`", sentence(cure)) for name, cure in {**REFUSED, **off}.items()]
    return table(("flag", "instead"), rows)


def idle_flags() -> str:
    """Returns the table of TRL's flags that TRL accepts and ignores, grouped by reason."""
    groups = [group for group in GROUPS if group.verdict is Verdict.IDLE]
    rows = [
        (_listed(f"--{name}" for name in group.names), ", ".join(group.methods) or "all", sentence(group.why))
        for group in groups
    ]
    return table(("flags", "methods", "why"), rows)


def gpus() -> str:
    prices, cards = (
        [*csv.DictReader((MACHINE / name).read_text(encoding="utf-8").splitlines())]
        for name in ("prices.csv", "gpus.csv")
    )
    rents = {
        row["gpu"]: f"{row['per_hour']} {row['currency']} an hour ({row['provider']}, {row['seen']})" for row in prices
    }
    rows = [
        (
            f"`{row['key']}`",
            f"{int(row['total_mib']) / 1024:.1f} GiB",
            row["compute_capability"],
            row["gb_per_second"],
            row["bf16_tflops"] or "no bfloat16",
            row["link"],
            rents.get(row["key"], ""),
        )
        for row in cards
    ]
    return table(("card", "memory that torch sees", "compute capability", "GB/s", "bf16 TFLOPS", "link", "rent"), rows)


_ERROR = re.compile(r"(\w+) {2,}(\d+) {2,}(.+)$", re.MULTILINE)


def exit_codes() -> Iterator[tuple[str, int, str]]:
    """Yields class, exit code and meaning of each error, from the docstring of ``autotrain_mem.support.errors``."""
    for name, code, meaning in _ERROR.findall(errors.__doc__ or ""):
        yield name, int(code), meaning


def error_table() -> str:
    rows = [(str(code), f"`{name}`", sentence(meaning), CURES[name]) for name, code, meaning in exit_codes()]
    return table(("exit code", "class", "what happened", "what to do"), rows)


def recipe_table() -> str:
    rows = []
    for each in recipes():
        anchor = re.sub(r"[^\w-]", "", each.name.lower())
        card = f"{each.gpus} x {each.card}" if each.gpus > 1 else each.card
        rows.append((f"[`{each.name}`](#{anchor})", card, each.what))
    return table(("recipe", "card", "what"), rows)


def recipe_texts() -> str:
    return "\n\n".join(f"## {each.name}\n\n```yaml\n{each.path.read_text(encoding='utf-8')}```" for each in recipes())


TABLES: dict[str, Callable[[], str]] = {
    "command_help": lambda: f"```text\n{HELP}```",
    "levers": levers,
    "levels": levels,
    "not_counted": not_counted,
    "flags": flags,
    "refused_flags": refused_flags,
    "idle_flags": idle_flags,
    "gpus": gpus,
    "errors": error_table,
    "recipes": recipe_table,
    "recipe_texts": recipe_texts,
}
