"""Takes our own flags and YAML keys out of the command line; TRL's parser reads the rest."""

from __future__ import annotations  # ``settings_of`` reads annotations as text

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from autotrain_mem.exports.tool_keys import read_tool_file
from autotrain_mem.exports.tools import EXPORTERS
from autotrain_mem.planning.accelerate_config import with_accelerate
from autotrain_mem.planning.read_request import with_peft_config
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.run.several_machines import without_flags
from autotrain_mem.settings.declaration import ESTIMATE, PLAN, TRAIN, Group, Setting, setting, settings_of
from autotrain_mem.settings.old_names import old_value
from autotrain_mem.settings.own import OWN
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.yaml_files import read_yaml, recipe
from autotrain_mem.types.autofit import SETTINGS, AutoFit


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Holds which files a command reads and writes, and how it prints."""

    typed: tuple[str, ...] = field(default=(), compare=False)
    """All arguments after the method."""
    config: str | None = setting(
        group=Group.JOB,
        before="peft_config",
        in_files=False,
        metavar="FILE",
        help="a YAML file with TRL's keys and ours; flags override it",
    )
    recipe: str | None = setting(
        group=Group.JOB,
        before="peft_config",
        in_files=False,
        metavar="NAME",
        help="a built-in recipe instead of --config (autofit recipes lists them)",
    )
    out: str | None = setting(
        group=Group.OUTPUT,
        before="overwrite_output_dir",
        commands=(TRAIN, PLAN),
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --out FILE writes one; --json prints an estimate."),
        metavar="FILE",
        help="write the plan to this file; an existing plan is overwritten",
    )
    dry_run: bool = setting(
        False,
        group=Group.OUTPUT,
        commands=(TRAIN, PLAN),
        in_files=False,
        elsewhere=(
            "it trains nothing.",
            "autofit METHOD ... --dry_run shows what would run, with the plan's settings.",
        ),
        help="plan, print TRL's config, the command and the environment that would run, and stop",
    )
    export: str | None = setting(
        group=Group.OUTPUT,
        commands=(TRAIN, PLAN),
        in_files=False,
        elsewhere=("it makes no plan.", "autofit plan METHOD ... --export TOOL writes one in another tool's keys."),
        choices=tuple(EXPORTERS),
        help="plan, print the settings in another tool's own keys, and stop: --export axolotl > axolotl.yaml",
    )
    """The tool to write a file for, by its name in ``exports.tools``."""
    snapshot: str | None = setting(
        group=Group.OUTPUT,
        commands=(ESTIMATE,),
        elsewhere=(
            "a history is predicted for one configuration only.",
            "autofit estimate METHOD ... --snapshot FILE writes it, with the flags that a plan shows.",
        ),
        metavar="FILE",
        help="write the predicted history of the allocator, for https://pytorch.org/memory_viz: what "
        "torch.cuda.memory._dump_snapshot would write at the end of two steps; a file of that name is overwritten",
    )
    """The file for the allocator's predicted history."""
    verbose: bool = setting(False, group=Group.OUTPUT, short="-v", help="show everything, not only the first screen")
    json: bool = setting(False, group=Group.OUTPUT, help="one JSON object on stdout and nothing else there")
    debug: bool = setting(False, group=Group.OUTPUT, help="a traceback with an error")
    help: bool = setting(False, group=Group.OUTPUT, short="-h", in_files=False, help="this text and TRL's own flags")

    @property
    def stops(self) -> bool:
        """Returns whether a file is printed and nothing is trained."""
        return self.dry_run or self.export is not None


def flags_of(prog: str) -> list[Setting]:
    """Lists the flags that a command takes, in the order of its help. A flag without commands is never listed."""
    words = prog.split()
    command = words[1] if len(words) > 1 and words[1] in (PLAN, ESTIMATE) else TRAIN
    return [each for each in _FLAGS if command in each.commands]


def _all_flags() -> list[Setting]:
    flags = [each for name, each in SETTINGS.items() if each.help and name not in OWN]
    for each in (*OWN.values(), *settings_of(RunRequest).values(), *settings_of(Output).values()):
        if each.help:
            place = [other.flag for other in flags].index(each.before) if each.before else len(flags)
            flags.insert(place, each)
    return sorted(flags, key=lambda each: list(Group).index(each.group))


_FLAGS = _all_flags()
_YAML_NAMES = tuple(each.flag for each in _FLAGS if TRAIN in each.commands and each.in_files)
"""Our flags that may also be keys of a YAML file."""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of our own flags."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        """Raises argparse's message as a UsageError, in our wording."""
        reason, choose, choices = message.removeprefix("argument ").partition(" (choose from ")
        hint = f"It takes {choices.rstrip(')').replace(chr(39), '')}." if choose else f"See {prog} --help."
        hint += old_value(reason.partition("'")[2].rstrip("'"))
        raise UsageError(f"{reason[0].upper()}{reason[1:]}.", hint=hint)

    parser.error = refuse  # type: ignore[method-assign]
    estimates = prog.startswith("autofit estimate")  # an estimate changes no settings
    titles = {each: each.value for each in Group}
    titles |= {Group.SEARCH: "what a plan may change to make it fit"} if estimates else {}
    groups = {each: parser.add_argument_group(title) for each, title in titles.items()}
    for flag in flags_of(prog):
        groups[flag.group].add_argument(f"--{flag.flag}", *filter(None, [flag.short]), **flag.options())
    return parser


def own_names() -> tuple[str, ...]:
    """Returns the names of our own flags, for did-you-mean hints."""
    return tuple(each.flag for each in flags_of("autofit"))


_BLOCKS = (_AUTOFIT, _ENV) = ("autofit", "env")
"""Keys of a YAML file whose values are mappings."""


def read(prog: str, argv: Sequence[str]) -> tuple[RunRequest, Output]:
    """Reads our flags, and the YAML file that ``--config`` or ``--recipe`` names. ``prog``: the command, whose last
    word is the method: ``"autofit plan sft"``. Raises UsageError if a value is invalid, or the YAML file cannot be
    read or is not a mapping."""
    namespace, rest = make_parser(prog).parse_known_args([underscored(token) for token in argv])
    not_here = {f"--{each.flag}": each.elsewhere for each in _FLAGS if each.elsewhere is not None}
    for flag in (token.partition("=")[0] for token in rest):
        if flag in not_here:
            why, instead = not_here[flag]
            raise UsageError(f"{prog} takes no {flag}: {why}", hint=instead)
    flags = _given(namespace)
    file: str | None = _recipe_file(prog, flags) if "recipe" in flags else flags.pop("config", None)
    config: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    names: dict[str, str] = {}
    if file is not None:
        given = {*flags, *(token[2:].partition("=")[0] for token in rest if token.startswith("--"))}
        keys = {name.replace("-", "_"): each for name, each in read_yaml(file, "--config").items()}
        config, notes, names = read_tool_file(keys, file, prog, given=given, own=(*_YAML_NAMES, *_BLOCKS))
    environment = {str(name): str(value) for name, value in _block(config, _ENV).items()}
    settings = {underscored(f"--{name}")[2:]: value for name, value in _block(config, _AUTOFIT).items()}
    # Blocks are not flags, so TRL's parser cannot suggest the block that was meant.
    meant = {name: near[0] for name in config if (near := difflib.get_close_matches(name, _BLOCKS, n=1, cutoff=0.8))}
    if meant:
        hint = "\n".join(f"{name}: did you mean {block}?" for name, block in meant.items())
        raise UsageError(f"Unknown key{'s' * (len(meant) > 1)}: {', '.join(meant)}.", hint=hint)
    for name in _YAML_NAMES:
        if name in config:
            settings.setdefault(name, config.pop(name))
    ours = _own_settings(prog, settings) | flags
    forbid = (name.strip().replace("-", "_") for name in ours.get("forbid", "").split(","))
    ours |= {"forbid": frozenset(filter(None, forbid)), "probe": "no_probe" not in ours}
    if ours.get("max_restarts", 0) < 0:
        raise UsageError(f"--max_restarts {ours['max_restarts']} is negative.", hint="It takes 0 or more.")
    of_request = _fields_of(RunRequest, ours)
    of_request.pop("plan", None)  # AutoFit holds the plan's file
    request = RunRequest(
        **of_request,
        method=prog.split()[-1],
        autofit=AutoFit(**_fields_of(AutoFit, ours)),
        argv=tuple(rest),
        config=config,
        config_notes=notes,
        config_names=names,
        environment=environment,
        command=without_flags(argv),
        also_known=own_names(),
    )
    return with_accelerate(with_peft_config(request)), Output(**_fields_of(Output, ours), typed=tuple(argv))


def _recipe_file(prog: str, flags: dict[str, Any]) -> str:
    """Removes ``--recipe`` from the flags and returns the YAML file of that name. Raises UsageError if ``--config``
    is given too, the recipe does not exist, or it is for another method."""
    name: str = flags.pop("recipe")
    if "config" in flags:
        raise UsageError(
            "--recipe and --config exclude each other.",
            hint=f"To change a recipe, add flags, which override it; or copy {recipe(name).path} and give --config.",
        )
    chosen, method = recipe(name), prog.split()[-1]
    if chosen.method != method:
        raise UsageError(
            f"The recipe {name} is for {chosen.method}, not {method}.",
            hint=f"{prog.removesuffix(method)}{chosen.method} --recipe {name}",
        )
    return str(chosen.path)


def _fields_of(kind: type[AutoFit | RunRequest | Output], ours: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: ours[each.name] for each in fields(kind) if each.name in ours}


def _given(namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns the flags that the user gave. Compares by identity, since 0 is a value although it equals False."""
    return {name: value for name, value in vars(namespace).items() if value is not None and value is not False}


def _own_settings(prog: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Reads our keys of a YAML file with the parser that checks the flags."""
    if unknown := [name for name in settings if name not in _YAML_NAMES]:
        near = {name: difflib.get_close_matches(name, _YAML_NAMES, n=1) for name in unknown}
        meant = [f"{name}: did you mean {guess[0]}?\n" for name, guess in near.items() if guess]
        raise UsageError(
            f"Unknown key{'s' * (len(unknown) > 1)} in the autofit: block: {', '.join(unknown)}.",
            hint=f"{''.join(meant)}It takes {', '.join(_YAML_NAMES)}; TRL's keys go at the top level.",
        )
    argv: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            argv += [f"--{name}"] if value else []
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            argv.append(f"--{name}={text}")
    return _given(make_parser(prog).parse_args(argv))


def _block(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Removes a block of keys from the config and returns it; {} if it is missing or empty."""
    if (block := config.pop(name, None)) is None:
        return {}
    if not isinstance(block, dict):
        raise UsageError(
            f"The {name}: block of the config is not a mapping.", hint=f"Write {name}: and indented keys below."
        )
    return block


class CommandParser(argparse.ArgumentParser):
    """Parses the flags of one command. Errors raise UsageError, ``--help`` raises SystemExit."""

    def __init__(self, command: str, about: str) -> None:
        form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(prog=f"autofit {command}", description=about, add_help=False, **form)
        self.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        self.add_argument("--debug", action="store_true", help="a traceback with an error")

    def error(self, message: str) -> NoReturn:
        """Raises UsageError, with the command's flags as the hint."""
        raise UsageError(f"{self.prog}: {message}.", hint=" ".join(self.format_usage().removeprefix("usage: ").split()))

    def add_run(self) -> None:
        """Adds the argument RUN: the output folder of a training run."""
        self.add_argument("run", metavar="RUN", help="the output folder of a training run")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Reads a command line. Raises UsageError for an unknown flag, a missing value or a missing run."""
        return self.parse_args([underscored(word) for word in argv])


def underscored(word: str) -> str:
    """Returns ``--max-new-tokens=5`` as ``--max_new_tokens=5``: all commands take both."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"
