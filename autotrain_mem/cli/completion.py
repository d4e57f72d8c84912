"""Runs ``autofit completion``: completes commands and flags in a shell, with argcomplete.

The shell runs it at each press of the tab key, so nothing here imports TRL. TRL's flags come from a table that a worker
has cached; until there is one, only our own flags are completed.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence

import argcomplete
from argcomplete.shell_integration import shellcode

from autotrain_mem.cli import flags
from autotrain_mem.settings.trl_parser import kept_flags, kept_names
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.support.yaml_files import recipes
from autotrain_mem.types.methods_table import METHODS

HELP = """\
usage: autofit completion bash|zsh|fish

Prints the script with which a shell completes commands, flags, cards, recipes and values:

  bash   echo 'eval "$(autofit completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(autofit completion zsh)"' >> ~/.zshrc      (below compinit)
  fish   autofit completion fish > ~/.config/fish/completions/autofit.fish
"""

SHELLS = ("bash", "zsh", "fish")
Run = Callable[[Sequence[str]], int]


def completion(argv: Sequence[str]) -> int:
    """Prints the shell's completion script."""
    if not argv or argv[0] in ("--help", "-h"):
        sys.stdout.write(HELP)
    elif len(argv) == 1 and argv[0] in SHELLS:
        sys.stdout.write(shellcode(["autofit"], shell=argv[0]))
    else:
        raise UsageError(f"autofit completion takes no {' '.join(argv)}.", hint="It takes bash, zsh or fish.")
    return 0


def answer_shell(others: Sequence[str], run: Run) -> None:
    """Answers a shell's request for completions (argcomplete: ``_ARGCOMPLETE``, ``COMP_LINE``), and ends the process.
    ``others``: commands that take no method. ``run``: runs a command line, to read the flags in its help."""
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    argcomplete.autocomplete(parser_for(words[1:], others, run), always_complete_options="long")


def parser_for(words: Sequence[str], others: Sequence[str], run: Run) -> argparse.ArgumentParser:
    """Returns a parser of all commands; only the command that ``words`` begin with has its flags."""
    parser = argparse.ArgumentParser(prog="autofit")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    for name in METHODS:
        _add_method(commands, name, "autofit", name in words[:1])
    for name in ("plan", "estimate"):
        methods = commands.add_parser(name).add_subparsers()
        for method in METHODS:
            _add_method(methods, method, f"autofit {name}", words[:2] == [name, method])
    commands.add_parser("help", add_help=False)
    for name in others:
        other = commands.add_parser(name, add_help=False)
        if name in ("completion", "recipes"):
            other.add_argument("name", choices=SHELLS if name == "completion" else [each.name for each in recipes()])
        if name in words[:1]:  # its flags are read from its help
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
                run([name, "--help"])
            for flag in dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][\w-]*", text.getvalue())):
                other.add_argument(flag)
    return parser


def _add_method(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, prog: str, full: bool
) -> None:
    own = [flags.make_parser(f"{prog} {name}")] if full else []
    parser = commands.add_parser(name, parents=own, add_help=False)
    if not full:
        return
    from autotrain_mem import api

    completers = {
        "gpu": lambda **_: [*(card.name for card in api.catalog()), "all"],
        "forbid": lambda **_: [*api.LEVERS],
        "recipe": lambda **_: [each.name for each in recipes() if each.name.startswith(name)],
    }
    for action in parser._actions:
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    store = Store(cache_folder())
    table = kept_flags(store, name)  # TRL's flags
    choices = {} if table is None else {flag.dest: flag.choices for flag in table.flags}
    for flag in (kept_names(store) or {}).get(name, ()):
        with contextlib.suppress(argparse.ArgumentError):  # we have a flag of that name
            parser.add_argument(f"--{flag}", choices=[*map(str, choices.get(flag) or ())] or None)
