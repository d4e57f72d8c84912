"""``autofit completion``: what a shell runs to complete the words of a command line.

A shell asks at each press of the tab key, so nothing here imports TRL: its flags are those that a worker has kept, and
until one has, ours are completed alone.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from autotrain_mem.cli import flags
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.support.yaml_files import recipes
from autotrain_mem.types.methods_table import METHODS

HELP = """\
usage: autofit completion bash|zsh|fish

Prints what makes a shell complete commands, flags, cards, recipes and values:

  bash   echo 'eval "$(autofit completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(autofit completion zsh)"' >> ~/.zshrc      (below compinit)
  fish   autofit completion fish > ~/.config/fish/completions/autofit.fish
"""

SCRIPTS = {
    "bash": """\
_autofit() {
    local IFS=$'\\n'
    COMPREPLY=($(autofit completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -o bashdefault -F _autofit autofit
""",
    "zsh": """\
_autofit() {
    local -a found
    found=("${(@f)$(autofit completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _autofit autofit
""",
    "fish": """\
complete -c autofit -a '(autofit completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
_PLANNED = ("plan", "estimate")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def completion(argv: Sequence[str]) -> int:
    """Prints a shell's script, or the words that may stand where the last of the given ones stands."""
    match argv:
        case [] | ["--help"] | ["-h"]:
            sys.stdout.write(HELP)
        case ["words", *words]:
            sys.stdout.write("".join(f"{each}\n" for each in completed(words)))
        case [shell] if shell in SCRIPTS:
            sys.stdout.write(SCRIPTS[shell])
        case _:
            raise UsageError(f"autofit completion takes no {' '.join(argv)}.", hint="It takes bash, zsh or fish.")
    return 0


def completed(words: Sequence[str]) -> list[str]:
    """Returns what the last word may become; nothing where the shell is to offer files.

    Args:
        words: All that stand behind ``autofit``, the last one as far as it is typed.
    """
    *before, current = words or [""]
    return sorted({each for each in _candidates(before, current) if each.startswith(current) and each != current})


def _candidates(before: Sequence[str], current: str) -> Iterable[str]:
    from autotrain_mem.cli.main import WITHOUT_METHOD

    if not before:
        return [*METHODS, *_PLANNED, *WITHOUT_METHOD, "help", "--help", "--version"]
    command, *rest = before
    if command in _PLANNED and not rest:
        return METHODS
    method = rest[0] if command in _PLANNED else command
    if method not in METHODS:
        return _of_command(command, current) if command in WITHOUT_METHOD else []
    prog = f"autofit {command} {method}" if command in _PLANNED else f"autofit {method}"
    if before[-1].startswith("--") and "=" not in before[-1]:
        values = list(_values(prog, method, before[-1][2:].replace("-", "_")))
        if values or not current.startswith("-"):
            return values
    if not current.startswith("-"):
        return []
    from autotrain_mem.settings.trl_flags import kept_names

    trls = (kept_names(Store(cache_folder())) or {}).get(method, ())
    return [f"--{name}" for name in (*flags.own_names(prog), *trls)]


def _of_command(command: str, current: str) -> list[str]:
    """Returns the flags that a command's help names; the names of recipes or shells where it takes those."""
    if command == "completion":
        return [*SCRIPTS]
    if command == "recipes" and not current.startswith("-"):
        return [each.name for each in recipes()]
    if not current.startswith("-"):
        return []
    from autotrain_mem.cli.main import run

    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(io.StringIO()):
        run([command, "--help"])
    return _FLAG.findall(text.getvalue())


def _values(prog: str, method: str, name: str) -> Iterator[str]:
    """Yields the values of a flag that are known; none where it takes anything."""
    from autotrain_mem.settings.trl_flags import kept_flags

    if name == "gpu":
        from autotrain_mem import api

        yield from (card.name for card in api.catalog())
        yield "all"
    elif name == "recipe":
        yield from (each.name for each in recipes() if each.name.startswith(method))
    elif name == "forbid":
        from autotrain_mem import api

        yield from api.LEVERS
    else:
        yield from flags.choices(prog, name)
        table = kept_flags(Store(cache_folder()), method)  # TRL's
        for flag in () if table is None else table.flags:
            if flag.dest == name:
                yield from map(str, flag.choices or ())
