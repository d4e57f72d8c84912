"""The user's flags and YAML keys, read by TRL's own parser, which also says what was given and what was not."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from autotrain_mem.checks import table
from autotrain_mem.checks.collect import refuse
from autotrain_mem.checks.flags import Flags
from autotrain_mem.errors import MissingExtraError, UsageError
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.table import METHODS
from autotrain_mem.spec import Knobs
from autotrain_mem.spec.job import MAX_LENGTH, read_length

_ALIASES = {"activation_checkpointing": "gradient_checkpointing"}
"""transformers 5.23 renames the flag; TRL's configs and this project still use the old name."""

_ELSEWHERE = {
    "batch_size": "per_device_train_batch_size",
    "max_completion_length": "response_length",
    "max_new_tokens": "max_completion_length",
    "max_prompt_length": "prompt_length",
    "response_length": "max_completion_length",
    "reward_model": "reward_model_path",
    "reward_model_path": "reward_model_name_or_path",
    "reward_model_name_or_path": "reward_model_path",
    "epochs": "num_train_epochs",
    "lora": "use_peft",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "max_seq_len": "max_length",
    "max_seq_length": "max_length",
    "seq_len": "max_length",
    "steps": "max_steps",
}
"""What other trainers, and other methods, call it: names too far from TRL's for a comparison of letters."""

_WITH_A_VALUE = "--{} has no opposite: give it a value, --{} false"


def parse(
    method: str,
    argv: tuple[str, ...],
    config: Mapping[str, Any],
    also_known: tuple[str, ...],
    pins: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Knobs]:
    """Parses the flags that are not ours, over the keys of a YAML config.

    Returns exactly the arguments that the user gave, under TRL's names, and TRL's own values for what a plan decides.

    Args:
        argv: Flags without our own.
        config: Top-level keys of the YAML file without our own; a flag wins over its key.
        also_known: Our own names, for did-you-mean.
        pins: Knobs that are ours alone and that the user gave.
        own: Our other flags that the user gave, which may contradict TRL's.

    Raises:
        UsageError: an unknown flag or key (with the nearest), a value that TRL refuses; all that contradicts itself
            or cannot be rehearsed, at once.
    """
    parser = _parser(method)
    actions = _actions(parser)
    defaults = {name: action.default for name, action in actions.items()}
    known = [*actions, *also_known]
    unknown = [name for name in config if name not in actions]
    if unknown:
        raise _unknown_names(method, unknown, known, "key", "")
    spoken, silent = _as_flags(config, actions)
    _forget_defaults(parser, silent)
    namespace, extra = parser.parse_known_args([*spoken, *argv])
    if extra:
        raise _unknown_tokens(method, extra, known)
    given = {_ALIASES.get(name, name): value for name, value in vars(namespace).items()}
    given |= pins or {}
    flags = Flags(method=method, given=given, own=own or {})
    refuse(table.FLAGS, flags)
    refuse(table.TRL_ARGUMENTS, flags)
    return given, _knobs(defaults)


def accept(method: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> Knobs:
    """TRL's own values for what a plan decides, for a config that a script made, and TRL has accepted already.

    Raises:
        UsageError: all that contradicts itself or cannot be rehearsed, at once.
    """
    refuse(table.FLAGS, Flags(method=method, given=given, own=own))
    return _knobs({name: action.default for name, action in _actions(_parser(method)).items()})


def _knobs(defaults: Mapping[str, Any]) -> Knobs:
    return Knobs(**{field.name: defaults[field.name] for field in fields(Knobs) if field.name in defaults})


def read_value(method: str, name: str, argv: tuple[str, ...], also_known: tuple[str, ...]) -> Any:
    """The value of one flag by itself; whether it goes with the others is ``parse``'s to say.

    Example: ``read_value("sft", "load_in_4bit", ["--load_in_4bit=true"], ())`` is True, which ``parse`` refuses without
    LoRA.

    Raises:
        UsageError: an unknown flag (with the nearest), or a value of a wrong kind.
    """
    parser = _parser(method)
    actions = _actions(parser)
    if name not in actions:
        raise _unknown_names(method, [f"--{name}"], [*actions, *also_known], "flag", "--")
    _forget_defaults(parser, {})
    namespace, extra = parser.parse_known_args([*argv])
    if extra:
        raise _unknown_tokens(method, extra, list(actions))
    return getattr(namespace, name)


def help_text(method: str) -> str:
    """TRL's own help for the method's flags."""
    text: str = method_of(method).make_parser().format_help()
    return text


def _parser(method: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = method_of(method).make_parser()
    parser.allow_abbrev = False
    parser.error = functools.partial(_refuse, method)  # type: ignore[method-assign]
    return parser


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Finds actions by name: the first of a name is the flag itself, a later one its --no_ form with its default."""
    return {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}


def _as_flags(config: Mapping[str, Any], actions: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """(YAML keys as flags, keys with a value that no flag can say): so a wrong value is refused like a flag's.

    Example: ``{"lora_r": 8, "lora_target_modules": ["q_proj"], "max_length": None}`` gives
    ``(["--lora_r=8", "--lora_target_modules", "q_proj"], {"max_length": None})``.
    """
    spoken: list[str] = []
    silent: dict[str, Any] = {}
    for name, value in config.items():
        flat = isinstance(value, list) and value and all(isinstance(item, (str, int, float)) for item in value)
        if isinstance(value, (str, int, float)):  # a bool is an int
            spoken.append(f"--{name}={_text(value)}")
        elif flat and actions[name].nargs in ("+", "*"):
            spoken += [f"--{name}", *map(_text, value)]
        else:
            silent[name] = value
    return spoken, silent


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _forget_defaults(parser: argparse.ArgumentParser, silent: Mapping[str, Any]) -> None:
    """Leave in the namespace only what is given; accept what TRL's parser does not but its documentation means."""
    for action in parser._actions:
        if action.dest == "help":
            continue
        action.default = silent.get(action.dest, argparse.SUPPRESS)
        action.required = False
        if action.dest == MAX_LENGTH:
            action.type = _length_or_wish
        if action.dest == "resume_from_checkpoint":
            action.nargs, action.const, action.type = "?", True, _checkpoint


def _length_or_wish(text: str) -> int | str | None:
    try:
        return read_length(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _checkpoint(text: str) -> str | bool:
    """``true`` for the last one in the output folder, ``false`` for none, or a folder."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; true takes the last checkpoint of --output_dir")
    return text


_ARGPARSE = re.compile(r"argument (--\w+)(?:/--[\w-]+)*: (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)


def _refuse(method: str, message: str) -> NoReturn:
    """Raises what argparse would have printed, in our words."""
    match = _ARGPARSE.fullmatch(message)
    if match is None:
        raise UsageError(f"{message[0].upper()}{message[1:]}.", hint=f"See {_help(method)} for the values it takes.")
    flag, reason = match[1], match[2].rstrip(".")
    choice = _CHOICE.fullmatch(reason)
    if choice is None:
        raise UsageError(f"{flag}: {reason}.", hint=f"See {_help(method)} for the values that {flag} takes.")
    choices = choice[2].replace("'", "").split(", ")
    near = difflib.get_close_matches(choice[1], choices, n=2)
    meant = f"Did you mean {' or '.join(near)}?\n" if near else ""
    raise UsageError(f"{flag} takes no {choice[1]!r}.", hint=f"{meant}{flag} takes {', '.join(choices)}.")


def _help(method: str) -> str:
    return f"autofit {method} --help"


def _unknown_tokens(method: str, extra: Sequence[str], known: Sequence[str]) -> UsageError:
    """Flags that nobody knows, or else arguments that belong to no flag."""
    unknown = [token for token in extra if re.match(r"--?[A-Za-z]", token)]
    if unknown:
        return _unknown_names(method, unknown, known, "flag", "--")
    return UsageError(f"Unexpected arguments: {' '.join(extra)}.", hint="A value with spaces stands in quotes.")


def _unknown_names(method: str, unknown: Sequence[str], known: Sequence[str], kind: str, prefix: str) -> UsageError:
    """One error for all of them, each with the nearest names that exist."""
    lines = []
    for token in unknown:
        name = token.lstrip("-").split("=")[0].replace("-", "_")
        if name.startswith("no_") and name[3:] in known:
            lines.append(_WITH_A_VALUE.format(name[3:], name[3:]))
            continue
        near, others = _nearest(name, known), _methods_with(name)
        facts = [f"a flag of {', '.join(others)}"] if others else []
        if near:
            facts.append(f"did you mean {' or '.join(prefix + item for item in near)}?")
        if facts:
            lines.append(f"{token}: {'; '.join(facts)}")
    plural = "s" if len(unknown) > 1 else ""
    hint = "\n".join(lines) or f"See {_help(method)} for all of them."
    return UsageError(f"Unknown {kind}{plural}: {', '.join(unknown)}.", hint=hint)


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """At most two, by letters; underscores do not count, as in ``batchsize``."""
    by_letters = {item.replace("_", ""): item for item in sorted({*known, *_ELSEWHERE})}
    near = difflib.get_close_matches(name.replace("_", ""), by_letters, n=3, cutoff=0.7)
    names = [by_letters[letters] for letters in near]
    meant = [item if item in known else _ELSEWHERE[item] for item in names]
    return [item for item in dict.fromkeys(meant) if item in known][:2]


def _methods_with(name: str) -> list[str]:
    """The methods whose parser knows the name. Slow, and asked only where a command ends with it."""
    found = []
    for method in METHODS:
        with contextlib.suppress(MissingExtraError):
            if any(action.dest == name for action in method_of(method).make_parser()._actions):
                found.append(method)
    return found
