"""Our own flags and YAML keys, taken out of the command line; the rest is TRL's and is read by TRL's parser."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from autotrain_mem.errors import UsageError
from autotrain_mem.units import parse_bytes

FITS = ("all", "rounding", "lossless")


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What the user said to us, and what is left for TRL."""

    model: str | None = None
    dataset: str | None = None
    gpu: str | None = None
    simulate: bool = False
    fit: Any = "all"
    forbid: frozenset[str] = frozenset()
    headroom: str | None = None
    effective_batch_size: int | None = None
    json: bool = False
    plan_only: bool = False
    debug: bool = False
    help: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    """Flags for TRL's parser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """YAML keys for TRL's parser."""

    def headroom_bytes(self, total_bytes: int) -> int | None:
        """The headroom in bytes: a size, or a percentage of the card; None for the default."""
        if self.headroom is None:
            return None
        try:
            if self.headroom.endswith("%"):
                return int(total_bytes * float(self.headroom[:-1]) / 100)
            return parse_bytes(self.headroom)
        except ValueError as error:
            raise UsageError(
                f"--headroom {self.headroom} is neither a size nor a share.",
                hint="Write --headroom 500MiB or --headroom 8%.",
            ) from error


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of our own flags."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.error = _refuse  # type: ignore[method-assign]
    job = parser.add_argument_group("what to train")
    job.add_argument("--model", metavar="MODEL", help="a hub id or a folder (short for --model_name_or_path)")
    job.add_argument("--dataset", metavar="DATA", help="a hub id, a folder, or a .json, .jsonl, .parquet or .csv file")
    job.add_argument("--config", metavar="FILE", help="a YAML file with TRL's keys and ours; flags win over it")
    device = parser.add_argument_group("where it must fit")
    device.add_argument("--gpu", metavar="NAME", help="a card by name (autofit gpus), or a size such as 6GiB")
    device.add_argument("--simulate", action="store_true", help="train on the CPU, with a simulated card of that name")
    device.add_argument("--headroom", metavar="SIZE", help="left free: 500MiB or 8%% (default 4%%, at least 400 MiB)")
    search = parser.add_argument_group("what may be changed to make it fit")
    search.add_argument("--effective_batch_size", type=int, metavar="N", help="rows per optimizer step, kept constant")
    search.add_argument("--fit", choices=FITS, help="stop before rounding changes (lossless), before LoRA (rounding)")
    search.add_argument("--forbid", metavar="LIST", help="levers never to pull, such as lora,bf16_weights")
    output = parser.add_argument_group("what to do and print")
    output.add_argument("--plan_only", action="store_true", help="plan and stop")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    output.add_argument("--debug", action="store_true", help="a traceback with an error")
    output.add_argument("--help", "-h", action="store_true", help="this text and TRL's own flags")
    return parser


def own_names() -> tuple[str, ...]:
    """Names of our own flags, for did-you-mean."""
    return tuple(action.dest for action in make_parser("autofit")._actions)


def read(prog: str, argv: Sequence[str]) -> Own:
    """Read our flags, and the YAML file that ``--config`` names.

    Raises:
        UsageError: a value that we refuse, a YAML file that cannot be read or is not a mapping.
    """
    namespace, rest = make_parser(prog).parse_known_args([_underscored(token) for token in argv])
    flags = {name: value for name, value in vars(namespace).items() if value not in (None, False)}
    config = _read_yaml(flags.pop("config", None))
    environment = {str(name): str(value) for name, value in (config.pop("env", None) or {}).items()}
    settings = config.pop("autofit", None) or {}
    if not isinstance(settings, dict):
        raise UsageError("The autofit: block of the config is not a mapping.", hint="Write autofit: and keys below it.")
    for name in own_names():
        if name in config:
            settings.setdefault(name, config.pop(name))
    ours = _own_settings(settings) | flags
    return Own(
        **{**ours, "forbid": _names(ours.get("forbid", ()))},
        environment=environment,
        rest=tuple(rest),
        config=config,
    )


def _underscored(token: str) -> str:
    """``--max-length=5`` and ``--max_length=5`` are the same."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _own_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Our keys of a YAML file, checked by the parser that checks the flags."""
    argv: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            argv += [f"--{name}"] if value else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            argv += [f"--{name}", text]
    namespace, rest = make_parser("autofit").parse_known_args(argv)
    if rest:
        raise UsageError(
            f"Unknown key in the autofit: block: {', '.join(token.lstrip('-') for token in rest[::2])}.",
            hint=f"It takes {', '.join(own_names())}; TRL's keys stand at the top level.",
        )
    return {name: value for name, value in vars(namespace).items() if value not in (None, False)}


def _names(value: Any) -> frozenset[str]:
    names = value.split(",") if isinstance(value, str) else value
    return frozenset(name.strip().replace("-", "_") for name in names if name.strip())


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        config = yaml.safe_load(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read the config {path}: {error.strerror}.", hint="Check --config.") from error
    except yaml.YAMLError as error:
        raise UsageError(f"The config {path} is not YAML: {error}", hint="Write key: value, one a line.") from error
    if not isinstance(config, dict):
        raise UsageError(f"The config {path} holds no mapping.", hint="Write key: value, one a line.")
    return {str(name).replace("-", "_"): value for name, value in config.items()}


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"{message[0].upper()}{message[1:]}.", hint="See autofit --help.")
