"""The user's flags and YAML keys, read by TRL's own parser, which also says what was given and what was not."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from autotrain_mem.errors import UsageError
from autotrain_mem.rehearsal.methods import sft
from autotrain_mem.spec import Knobs

_ALIASES = {"activation_checkpointing": "gradient_checkpointing"}
"""transformers 5.23 renames the flag; TRL's configs and this project still use the old name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What TRL's parser made of the user's words."""

    given: Mapping[str, Any]
    """Exactly the arguments that the user gave, under TRL's names."""
    defaults: Knobs
    """TRL's own values for what a plan decides."""


def parse(argv: Sequence[str], config: Mapping[str, Any], also_known: Iterable[str]) -> Parsed:
    """Parse the flags that are not ours, over the keys of a YAML config.

    Args:
        argv: Flags without our own.
        config: Top-level keys of the YAML file without our own; a flag wins over its key.
        also_known: Our own names, for did-you-mean.

    Raises:
        UsageError: an unknown flag or key (with the nearest), or a value that TRL refuses.
    """
    parser = sft.make_parser()
    parser.allow_abbrev = False
    parser.error = _refuse
    # The first action of a name is the flag itself; a later one is its --no_ form, with a default of its own.
    defaults = {action.dest: action.default for action in reversed(parser._actions)}
    names = [name for name in defaults if name != "help"]
    unknown = [name for name in config if name not in names]
    if unknown:
        raise _unknown_names(unknown, [*names, *also_known], "key", "")
    _forget_defaults(parser, config)
    namespace, extra = parser.parse_known_args(list(argv))
    flags = [token for token in extra if token.startswith("-")]
    if flags or extra:
        raise _unknown_names(flags or extra, [*names, *also_known], "flag", "--")
    given = {_ALIASES.get(name, name): value for name, value in vars(namespace).items()}
    _check(given)
    knobs = Knobs(**{field.name: defaults[field.name] for field in fields(Knobs)})
    return Parsed(given=given, defaults=knobs)


def help_text() -> str:
    """TRL's own help for the method's flags."""
    text: str = sft.make_parser().format_help()
    return text


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message[0].upper()}{message[1:]}.", hint="See autofit sft --help for the values it takes.")


def _forget_defaults(parser: argparse.ArgumentParser, config: Mapping[str, Any]) -> None:
    """Leave in the namespace only what is given; accept ``auto`` for max_length."""
    for action in parser._actions:
        if action.dest == "help":
            continue
        action.default = config.get(action.dest, argparse.SUPPRESS)
        action.required = False
        if action.dest == "max_length":
            action.type = _length_or_auto


def _length_or_auto(text: str) -> int | str | None:
    lowered = text.strip().lower()
    if lowered == "auto":
        return "auto"
    if lowered == "none":
        return None
    if not lowered.isdigit() or int(lowered) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor auto")
    return int(lowered)


def _unknown_names(unknown: Sequence[str], known: Iterable[str], kind: str, prefix: str) -> UsageError:
    """One error for all of them, each with the nearest names that exist."""
    lines = []
    candidates = sorted(set(known))
    for token in unknown:
        name = token.lstrip("-").split("=")[0].replace("-", "_")
        near = difflib.get_close_matches(name, candidates, n=2, cutoff=0.6)
        if near:
            lines.append(f"{token}: did you mean {' or '.join(prefix + item for item in near)}?")
    plural = "s" if len(unknown) > 1 else ""
    return UsageError(
        f"Unknown {kind}{plural}: {', '.join(unknown)}.",
        hint="\n".join(lines) or "See autofit sft --help for all of them.",
    )


def _check(given: Mapping[str, Any]) -> None:
    """Let TRL's dataclasses refuse what they would refuse later; what depends on a GPU is not asked here."""
    values = {name: value for name, value in given.items() if value != "auto"}
    try:
        sft.configs({**values, "use_cpu": True, "report_to": "none"})
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(f"TRL refuses these arguments: {error}", hint="See autofit sft --help.") from error
