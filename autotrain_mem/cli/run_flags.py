"""Reads the flags of the commands that take no method."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from autotrain_mem.support.errors import UsageError

_BASE = "where the base model of an adapter is now: a folder or a hub id (default: where it was trained from)"
_REMOTE = "let the model's own code run, where it has some"


def run_parser(command: str, about: str) -> argparse.ArgumentParser:
    """Makes a parser of the flags that all of them have."""
    parser = flag_parser(command, about)
    parser.add_argument("run", metavar="RUN", nargs="?", help="the output folder of a training")
    return parser


def model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what a command needs that loads the model."""
    parser.add_argument("--base", metavar="MODEL", help=_BASE)
    parser.add_argument("--trust_remote_code", action="store_true", help=_REMOTE)


def flag_parser(command: str, about: str) -> argparse.ArgumentParser:
    """Makes a parser whose errors are ours."""
    parser = argparse.ArgumentParser(
        prog=f"autofit {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{parser.prog}: {message}.", hint=_usage(parser))

    parser.error = refuse  # type: ignore[method-assign]
    parser.add_argument("--debug", action="store_true", help="a traceback with an error")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace | None:
    """Reads a command line; None where it asked for help, which is then printed.

    Raises UsageError: an unknown flag, a missing value, or no run.
    """
    if {"--help", "-h"} & set(argv):
        sys.stdout.write(parser.format_help())
        return None
    options = parser.parse_args([underscored(word) for word in argv])
    if getattr(options, "run", "") is None:
        raise UsageError(f"{parser.prog} needs the output folder of a training.", hint=_usage(parser))
    return options


def underscored(word: str) -> str:
    """``--max-new-tokens=5`` as ``--max_new_tokens=5``: both are taken, in all commands."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def _usage(parser: argparse.ArgumentParser) -> str:
    return " ".join(parser.format_usage().removeprefix("usage: ").split())
