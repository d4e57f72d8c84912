"""Reads flags and YAML keys with a parser: TRL's own in a worker, or one that is rebuilt from its stored flags."""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from autotrain_mem.settings.old_names import add_old_names, by_todays_names, old_names
from autotrain_mem.settings.words import MAX_LENGTH, MAXIMIZED, MOST, read_length
from autotrain_mem.support import codec
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.store import Store
from autotrain_mem.support.versions import versions_key

MethodsWith = Callable[[str], Sequence[str]]
"""A function that returns the methods that have a flag."""


def read_given(
    parser: argparse.ArgumentParser,
    method: str,
    argv: Sequence[str],
    config: Mapping[str, Any],
    also_known: Sequence[str],
    methods_with: MethodsWith,
) -> dict[str, Any]:
    """Returns exactly the arguments that the user gave, by the parser's names. Modifies ``parser``. Raises UsageError
    for an unknown flag or key (with the nearest), or a value that the parser refuses.

    Args:
        argv: Flags except our own.
        config: Keys of a YAML file; a flag overrides its key.
        also_known: Our own names, for did-you-mean.
    """
    parser.allow_abbrev = False
    parser.error = functools.partial(_refuse, method)  # type: ignore[method-assign]
    actions = actions_of(parser)
    known = [*actions, *also_known]
    unknown = [name for name in config if name not in actions and old_names("same").get(name) not in actions]
    if unknown:
        raise unknown_names(method, unknown, known, "key", "", methods_with)
    _forget_defaults(parser)
    add_old_names(parser, actions)
    spoken: list[str] = []  # ["--lora_r=8", "--lora_target_modules", "q_proj"]: checked like flags
    silent: dict[str, Any] = {}  # what no flag can express: {"max_length": None}
    actions = actions_of(parser)
    for name, value in config.items():
        flat = isinstance(value, list) and value and all(isinstance(item, (str, int, float)) for item in value)
        is_list, kind = actions[name].nargs in ("+", "*"), _kind(actions[name])
        may_be_other = value is None or is_list or kind == "str" or (isinstance(value, dict) and kind == _OR_NONE)
        if flat and is_list:
            spoken += [f"--{name}", *map(_text, value)]
        elif isinstance(value, (str, int, float)) or not may_be_other:  # a bool is an int
            spoken.append(f"--{name}={_text(value)}")
        else:
            silent[name] = value
    keys, _ = parser.parse_known_args(spoken)
    flags, extra = parser.parse_known_args(argv)
    if extra:
        if flags_of_nobody := [token for token in extra if re.match(r"--?[A-Za-z]", token)]:
            raise unknown_names(method, flags_of_nobody, known, "flag", "--", methods_with)
        raise UsageError(f"Unexpected arguments: {' '.join(extra)}.", hint="Put a value with spaces in quotes.")
    given = by_todays_names({**silent, **vars(keys)}) | by_todays_names(vars(flags))
    check_finite(given)
    if len(asked := [name for name in MAXIMIZED if given.get(name) == MOST]) > 1:
        raise UsageError(
            f"{' and '.join(f'--{name} {MOST}' for name in asked)}: the maximum of one depends on the other.",
            hint=f"Give a number for all but one of them, or search for one after the other: --{asked[0]} {MOST}.",
        )
    return given


_CEILINGS = (
    *("max_grad_norm", "epsilon_high", "delta", "off_policy_mask_threshold"),
    *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
)
"""Arguments for which infinity means that nothing is clipped (``trl/trainer/grpo_trainer.py: _compute_loss``)."""


def check_finite(given: Mapping[str, Any]) -> None:
    """Raises UsageError for an argument that is nan, or infinite although it is no upper limit."""
    for name, value in given.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            is_number = isinstance(each, float) and not math.isnan(each)
            if isinstance(each, float) and not (
                is_number and (math.isfinite(each) or (each > 0 and name in _CEILINGS))
            ):
                raise UsageError(
                    f"--{name} is {each}, with which nothing can be computed.", hint="Give a finite number."
                )


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns the first action of each name: the flag itself. A later action of that name is its --no_ form."""
    return {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}


def unknown_names(
    method: str, unknown: Sequence[str], known: Sequence[str], kind: str, prefix: str, methods_with: MethodsWith
) -> UsageError:
    """Returns one error for all unknown names, each with the nearest names that exist."""
    likely = {old: today.split() for kind in ("same", "like") for old, today in old_names(kind).items()}
    lines, by_letters = [], {item.replace("_", ""): item for item in sorted({*known, *likely})}
    for token in unknown:
        name = token.lstrip("-").split("=")[0].replace("-", "_")
        if name.startswith("no_") and name[3:] in known:
            lines.append(f"--{name[3:]} has no opposite: give it a value, --{name[3:]} false")
            continue
        # At most two similar names; underscores are ignored, as in ``batchsize``.
        similar = difflib.get_close_matches(name.replace("_", ""), by_letters, n=3, cutoff=0.7)
        names = [by_letters[letters] for letters in similar]
        meant = [each for item in names for each in ((item,) if item in known else likely[item])]
        near = [item for item in likely.get(name) or dict.fromkeys(meant) if item in known][:2]
        others = methods_with(name)
        facts = [f"a flag of {', '.join(others)}"] if others else []
        if answer := old_names("write").get(name):
            facts.append(answer)
        elif near:
            facts.append(f"did you mean {' or '.join(prefix + item for item in near)}?")
        if facts:
            lines.append(f"{token}: {'; '.join(facts)}")
    plural = "s" if len(unknown) > 1 else ""
    hint = "\n".join(lines) or f"See {_help(method)} for all that exist."
    return UsageError(f"Unknown {kind}{plural}: {', '.join(unknown)}.", hint=hint)


_SWITCH, _CHOOSES, _OR_NONE = "string_to_bool", "make_choice_type_function", "_accept_none.<locals>.parse"
"""The names of three functions in ``trl/scripts/_hf_argparser.py``. The first parses the value of a switch. The second
makes a parser of a flag with choices, the third one of a flag that takes None, too."""

_AS_SWITCH = {"true": True, "false": False}
_TYPES: Mapping[str, Any] = {"int": int, "float": float, _SWITCH: lambda text: _AS_SWITCH.get(text.lower(), text)}
"""The types that a rebuilt parser converts values to. It leaves all other values as text, for TRL's parser."""


def table_of(parser: argparse.ArgumentParser) -> TrlFlags:
    """Returns a parser's flags in the form that :func:`parser_of` takes, and its help."""
    flags = tuple(
        TrlFlag(
            names=tuple(action.option_strings),
            dest=action.dest,
            nargs=action.nargs,
            kind=_kind(action),
            choices=None if action.choices is None else tuple(map(_text, action.choices)),
        )
        for action in parser._actions
        if action.dest != "help"
    )
    return TrlFlags(flags=flags, help=parser.format_help())


def parser_of(flags: Sequence[TrlFlag]) -> argparse.ArgumentParser:
    """Makes a parser that rejects unknown names and malformed values; TRL's own parser reads them later."""
    parser = argparse.ArgumentParser(add_help=False)
    for flag in flags:
        if flag.nargs == 0:
            parser.add_argument(*flag.names, dest=flag.dest, action="store_false")
            continue
        options: dict[str, Any] = {"type": _TYPES.get(flag.kind, str), "choices": flag.choices, "nargs": flag.nargs}
        options |= {"nargs": "?", "const": True} if flag.kind == _SWITCH else {}
        parser.add_argument(*flag.names, dest=flag.dest, **options)
    return parser


def _kind(action: argparse.Action) -> str:
    name = getattr(action.type, "__qualname__", "")
    return "str" if name.startswith(_CHOOSES) else name


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():  # TRL's parser may have made it of an integer
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _forget_defaults(parser: argparse.ArgumentParser) -> None:
    """Removes the parser's defaults, and makes it accept values that TRL documents but its parser rejects."""
    for action in parser._actions:
        if action.dest == "help":
            continue
        action.default = argparse.SUPPRESS
        action.required = False
        if _kind(action) == _SWITCH and action.nargs is None:  # TRL's parser requires a value if the default is None
            action.nargs, action.const = "?", True
        if action.dest == MAX_LENGTH:
            action.type = _length_or_wish
        elif action.dest in MAXIMIZED:
            action.type = _number_or_most
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const, action.type = "?", True, _checkpoint


def _length_or_wish(text: str) -> int | str | None:
    try:
        return read_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _number_or_most(text: str) -> int | str:
    """Parses a whole number, as in TRL's configs, or ``max``."""
    if text.strip().lower() == MOST:
        return MOST
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {MOST} (the maximum)") from None


def _checkpoint(text: str) -> str | bool:
    """Parses ``true`` (the last checkpoint of the output folder), ``false`` (none), or a folder."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; true means the last checkpoint of --output_dir")
    return text


_ARGPARSE = re.compile(r"argument (--\w+)(?:/--[\w-]+)*: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


def _refuse(method: str, message: str) -> NoReturn:
    """Raises argparse's message as a UsageError in our wording."""
    if (match := _ARGPARSE.fullmatch(message)) is None:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", hint=f"See {_help(method)} for each flag's values.")
    flag, reason = match[1], match[2].rstrip(".")
    if (choice := _CHOICE.fullmatch(reason)) is None:
        raise UsageError(f"{flag}: {reason}.", hint=f"See {_help(method)} for the values that {flag} takes.")
    choices = choice[2].replace("'", "").split(", ")
    near = difflib.get_close_matches(choice[1], choices, n=2)
    meant = f"Did you mean {' or '.join(near)}?\n" if near else ""
    raise UsageError(f"{flag} does not take {choice[1]!r}.", hint=f"{meant}{flag} takes {', '.join(choices)}.")


def _help(method: str) -> str:
    return f"autofit {method} --help"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlFlag:
    """Holds one flag of the installed TRL, from argparse."""

    names: tuple[str, ...]
    """Its spellings: ``("--max_length", "--max-length")``."""
    dest: str
    nargs: int | str | None
    """argparse's ``nargs``; 0 for a switch."""
    kind: str
    """The name of the type of its values; only TRL can import most types."""
    choices: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlFlags:
    """Holds all flags of one method."""

    flags: tuple[TrlFlag, ...]
    help: str
    """TRL's help text, at the terminal's width."""


_KIND, _NAMES = "flags", "flag_names"


def kept_flags(store: Store, method: str) -> TrlFlags | None:
    """Returns the stored flags of a method; None if there are none, or if the installed TRL lacks the method."""
    return None if (kept := store.get(_KIND, _key(method))) is None else codec.from_json(TrlFlags, kept)


def kept_names(store: Store) -> Mapping[str, list[str]] | None:
    """Returns the stored names of every method's flags in the installed TRL, by method; None if none are stored."""
    return store.get(_NAMES, _key())


def keep_flags(store: Store, method: str, table: TrlFlags) -> None:
    """Stores the flags of a method."""
    store.put(_KIND, _key(method), codec.to_json(table))


def keep_all_flags(store: Store, tables: Mapping[str, TrlFlags]) -> None:
    """Stores the flags of every method, and a table of their names."""
    for method, table in tables.items():
        keep_flags(store, method, table)
    store.put(_NAMES, _key(), {method: [flag.dest for flag in table.flags] for method, table in tables.items()})


def read_kept(
    store: Store, method: str, argv: Sequence[str], config: Mapping[str, Any], also_known: Sequence[str]
) -> dict[str, Any] | None:
    """Returns the arguments that the user gave, as the stored flags show them: of some, TRL's parser reads the text.
    None if no flags are stored. Raises as :func:`read_given` does."""
    if (kept := kept_flags(store, method)) is None:
        return None

    def methods_with(name: str) -> list[str]:
        return [each for each, names in (kept_names(store) or {}).items() if name in names]

    return read_given(parser_of(kept.flags), method, argv, config, also_known, methods_with)


def _key(*method: str) -> dict[str, Any]:
    """Returns the key of the stored flags; help texts depend on ``COLUMNS`` (``shutil.get_terminal_size``)."""
    return {"installed": versions_key(), "columns": os.environ.get("COLUMNS"), "method": method}
