"""Our own flags and YAML keys, taken out of the command line; the rest is TRL's and is read by TRL's parser."""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from autotrain_mem.exports.tools import EXPORTERS
from autotrain_mem.planning.accelerate_config import with_accelerate
from autotrain_mem.planning.machines import shared_words
from autotrain_mem.planning.peft_config import with_peft_config
from autotrain_mem.planning.wish import Wish
from autotrain_mem.settings.knobs import OWN_SWITCHES, SHARDINGS
from autotrain_mem.settings.words import FITS, MAXIMIZED, RESTARTS
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.yaml_files import read_yaml
from autotrain_mem.types.autofit import AutoFit


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Holds what a command prints and writes beside what the wish asks for."""

    typed: tuple[str, ...] = field(default=(), compare=False)
    """Every word after the method."""
    help: bool = False
    verbose: bool = False
    """Everything that is known, in place of a screen of it."""
    json: bool = False
    csv: bool = False
    snapshot: str | None = None
    """The file for the predicted history of the allocator."""
    sweep: tuple[str, ...] = ()
    """``NAME=VALUE,VALUE,...``, one for each axis."""
    out: str | None = None
    """The file to write the plan to."""
    dry_run: bool = False
    frontier: str | None = None
    """The setting of which each level of harm tells how much fits."""
    export: str | None = None
    """The tool whose file is written, by its name in ``exports.tools``."""

    @property
    def stops(self) -> bool:
        """Whether a file is asked for, after which nothing is trained."""
        return self.dry_run or self.export is not None


_SLOWDOWN = "take the next level where a plan is more than X times slower than its best (default 4)"
_WITHIN = "the gentlest plan by which the whole training is done in TIME: 8h, 90min, 2d; or what it would take"
_BUDGET = "the gentlest plan by which it costs AMOUNT or less at the card's rental price; or what it would take"
_PRICES = "a CSV file of rental prices (gpu,per_hour,currency,...) in place of the table that comes along"
_FRONTIER = f"in place of a plan: how much of this fits at each level of harm, and how fast ({', '.join(MAXIMIZED)})"
_SNAPSHOT = (
    "write the predicted history of the allocator, for https://pytorch.org/memory_viz: what "
    "torch.cuda.memory._dump_snapshot would write at the end of two steps; a file of that name is overwritten"
)
_SWEEP = "estimate with each of these values of a flag, TRL's or ours; again for another flag: all combinations"
_DRY_RUN = "plan, print TRL's config, the command and the environment that would run, and stop"
_OVERWRITE = "where --output_dir holds another run, rename that to NAME.previous-1; nothing is deleted"
_RESTARTS = f"go on N times in a row where the training process dies (default {RESTARTS}), 0 for never"
_GPUS = "how many of them train together (default all that are here, one of a name); --gpu all --gpus 1,2,4 compares"
_NODES = "machines with so many GPUs each; a training is started on all of them, by the same command"
_MACHINE_RANK = "which of --nodes machines this one is, from 0 (default: as Slurm, torchrun or SkyPilot says)"
_MAIN_IP = "address of machine 0, which plans and leads"
_MAIN_PORT = "where machine 0 listens for the others (default 29500)"
_MIN_NODES = "go on with N machines or more where one is lost and does not come back (default: all)"
_LINK = "what joins the GPUs, and machines: nvlink4, pcie4, nvlink4,ndr (default: found here, or usual for the card)"
_ACCELERATE = "a config of accelerate launch: processes, machines and sharding are as it says"
_PEFT_CONFIG = "an adapter_config.json of PEFT's, or its folder: what is trained is as it says (DoRA, VeRA, IA3, ...)"
_SHARDING = "how several GPUs share the model: not at all (ddp), or in shards; default: what fits and is fastest"
_CP_SIZE = "so many GPUs share the tokens of each row: long context (SFT, FSDP2); default: what a length needs"
_SP_SIZE = "the same in DeepSpeed's way (SFT, ZeRO): its heads are shared while a layer attends"
_FSDP_OFFLOAD = "shards wait in host memory, where the optimizer steps too (FSDP)"
_ZERO_OPTIMIZER = "the optimizer's state lies in host memory, where it steps too (ZeRO); NVMe: --deepspeed FILE"
_ZERO_PARAM = "shards of weights wait in host memory (ZeRO-3); NVMe: --deepspeed FILE"
_NO_PROBE = "train at once, without two real steps on the longest rows before, in a process of their own"
_EXPORT = "plan, print the settings in this tool's own keys, and stop: --export axolotl > axolotl.yaml"


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of our own flags."""
    parser = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.error = functools.partial(_refuse, prog)  # type: ignore[method-assign]
    _add_job(parser)
    _add_device(parser, prog)
    _add_search(parser, estimates=prog.startswith("autofit estimate"))
    _add_output(parser, prog)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("what to train")
    job.add_argument("--model", metavar="MODEL", help="a hub id or a folder (short for --model_name_or_path)")
    job.add_argument("--dataset", metavar="DATA", help="a hub id, a folder, or a .json, .jsonl, .parquet or .csv file")
    job.add_argument("--config", metavar="FILE", help="a YAML file with TRL's keys and ours; flags win over it")
    job.add_argument("--recipe", metavar="NAME", help="a file that comes along, in place of --config (autofit recipes)")
    job.add_argument("--peft_config", metavar="FILE", help=_PEFT_CONFIG)
    job.add_argument(
        "--prompt_length",
        type=int,
        metavar="N",
        help="GRPO, RLOO, distillation, online DPO, PPO: plan for prompts of N tokens",
    )
    job.add_argument("--image_sizes", metavar="WxH,...", help="plan for rows with images of these sizes: 1024x768")


def _add_device(parser: argparse.ArgumentParser, prog: str) -> None:
    device = parser.add_argument_group("where it must fit")
    device.add_argument("--gpu", metavar="NAME", help="a card by name (autofit gpus), or a size such as 6GiB")
    device.add_argument("--gpus", type=_counts, metavar="N", help=_GPUS)
    device.add_argument("--nodes", type=int, metavar="N", help=_NODES)
    if not prog.startswith(("autofit plan", "autofit estimate")):
        device.add_argument("--machine_rank", type=int, metavar="N", help=_MACHINE_RANK)
        device.add_argument("--main_process_ip", metavar="HOST", help=_MAIN_IP)
        device.add_argument("--main_process_port", type=int, metavar="N", help=_MAIN_PORT)
        device.add_argument("--min_nodes", type=int, metavar="N", help=_MIN_NODES)
    device.add_argument("--link", metavar="NAME", help=_LINK)
    device.add_argument("--accelerate_config", metavar="FILE", help=_ACCELERATE)
    device.add_argument("--simulate", action="store_true", help="train on the CPU, with a simulated card of that name")
    device.add_argument("--headroom", metavar="SIZE", help="left free: 500MiB or 8%% (default 4%%, at least 400 MiB)")


def _add_search(parser: argparse.ArgumentParser, *, estimates: bool) -> None:
    search = parser.add_argument_group(f"what {'a plan may change' if estimates else 'may be changed'} to make it fit")
    search.add_argument("--effective_batch_size", type=int, metavar="N", help="rows per optimizer step, kept constant")
    search.add_argument("--fit", choices=FITS, help="stop before rounding changes (lossless), before LoRA (rounding)")
    search.add_argument("--forbid", metavar="LIST", help="levers never to pull, such as lora,bf16_weights")
    search.add_argument("--max_slowdown", type=float, metavar="X", help=_SLOWDOWN)
    if not estimates:
        search.add_argument("--within", metavar="TIME", help=_WITHIN)
        search.add_argument("--budget", type=float, metavar="AMOUNT", help=_BUDGET)
        search.add_argument("--prices", metavar="FILE", help=_PRICES)
    search.add_argument("--max_pixels", type=int, metavar="N", help="make larger images smaller, to N pixels")
    search.add_argument("--optimizer_offload", action="store_true", help="optimizer state and step on the host")
    search.add_argument("--expandable_segments", action="store_true", help="PYTORCH_ALLOC_CONF for the training")
    search.add_argument("--sharding", choices=SHARDINGS, help=_SHARDING)
    search.add_argument("--cp_size", type=int, metavar="N", help=_CP_SIZE)
    search.add_argument("--sp_size", type=int, metavar="N", help=_SP_SIZE)
    search.add_argument("--fsdp_offload_params", action="store_true", help=_FSDP_OFFLOAD)
    search.add_argument("--offload_optimizer_device", choices=("cpu",), help=_ZERO_OPTIMIZER)
    search.add_argument("--offload_param_device", choices=("cpu",), help=_ZERO_PARAM)


def _add_output(parser: argparse.ArgumentParser, prog: str) -> None:
    estimates = prog.startswith("autofit estimate")
    output = parser.add_argument_group("what to do and print")
    output.add_argument("--plan_only", action="store_true", help="plan and stop")
    if not estimates:
        output.add_argument("--plan", metavar="FILE", help="follow this plan in place of a search")
        output.add_argument("--out", metavar="FILE", help="write the plan to this file, over one that is there")
        output.add_argument("--overwrite_output_dir", action="store_true", help=_OVERWRITE)
        output.add_argument("--max_restarts", type=int, metavar="N", help=_RESTARTS)
        output.add_argument("--no_probe", action="store_true", help=_NO_PROBE)
        output.add_argument("--dry_run", action="store_true", help=_DRY_RUN)
        output.add_argument("--export", choices=tuple(EXPORTERS), help=_EXPORT)
    if prog.startswith("autofit plan"):
        output.add_argument("--frontier", choices=MAXIMIZED, metavar="NAME", help=_FRONTIER)
    if estimates:
        output.add_argument("--snapshot", metavar="FILE", help=_SNAPSHOT)
        output.add_argument("--sweep", metavar="NAME=A,B,...", action="append", help=_SWEEP)
        output.add_argument(
            "--csv", action="store_true", help="a line for each point on stdout, and nothing else there"
        )
    output.add_argument("--verbose", "-v", action="store_true", help="everything that is known, not the first screen")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else there")
    output.add_argument("--debug", action="store_true", help="a traceback with an error")
    output.add_argument("--help", "-h", action="store_true", help="this text and TRL's own flags")


def _counts(text: str) -> int | tuple[int, ...]:
    """Reads ``8``, or ``1,2,4,8`` to compare."""
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; --gpu names a card") from None
    return counts[0] if len(counts) == 1 else tuple(counts)


def own_names(prog: str = "autofit") -> tuple[str, ...]:
    """Names of our own flags, for did-you-mean."""
    return tuple(action.dest for action in make_parser(prog)._actions)


def choices(prog: str, name: str) -> tuple[str, ...]:
    """The values that one of our own flags takes; empty where it takes anything."""
    found = next((action for action in make_parser(prog)._actions if action.dest == name), None)
    return tuple(map(str, found.choices)) if found is not None and found.choices else ()


def read_one(prog: str, name: str, text: str) -> Any:
    """The value of one of our own flags; a switch takes true or false. Raises UsageError."""
    if name in OWN_SWITCHES:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--{name} takes no {text!r}.", hint="It takes true or false.")
        return text.lower() == "true"
    value = getattr(make_parser(prog).parse_args([f"--{name}={text}"]), name)
    if name in ("headroom", "gpus", "nodes"):
        AutoFit(**{name: value})
    return value


_BLOCKS = (_AUTOFIT, _ENV) = ("autofit", "env")
"""Keys of a YAML file that hold keys."""


def read(prog: str, argv: Sequence[str]) -> tuple[Wish, Output]:
    """Read our flags, and the YAML file that ``--config`` names.

    Args:
        prog: The command, whose last word is the method: ``"autofit plan sft"``.

    Raises:
        UsageError: a value that we refuse, a YAML file that cannot be read or is not a mapping.
    """
    namespace, rest = make_parser(prog).parse_known_args([_underscored(token) for token in argv])
    for flag in (token.partition("=")[0] for token in rest):
        if flag in _NOT_HERE:
            why, instead = _NOT_HERE[flag]
            raise UsageError(f"{prog} takes no {flag}: {why}", hint=instead)
    flags = _given(namespace)
    file = _config_file(prog, flags)
    config = (
        {} if file is None else {name.replace("-", "_"): each for name, each in read_yaml(file, "--config").items()}
    )
    environment = {str(name): str(value) for name, value in _block(config, _ENV).items()}
    settings = {_underscored(f"--{name}")[2:]: value for name, value in _block(config, _AUTOFIT).items()}
    # Blocks are no flags, so that TRL's parser, which knows the names of all flags, cannot say which was meant.
    meant = {name: near[0] for name in config if (near := difflib.get_close_matches(name, _BLOCKS, n=1, cutoff=0.8))}
    if meant:
        hint = "\n".join(f"{name}: did you mean {block}?" for name, block in meant.items())
        raise UsageError(f"Unknown key{'s' * (len(meant) > 1)}: {', '.join(meant)}.", hint=hint)
    for name in _yaml_names():
        if name in config:
            settings.setdefault(name, config.pop(name))
    ours = _own_settings(prog, settings) | flags
    forbid = (name.strip().replace("-", "_") for name in ours.get("forbid", "").split(","))
    ours |= {"forbid": frozenset(filter(None, forbid)), "sweep": tuple(ours.get("sweep", ()))}
    if ours.get("max_restarts", 0) < 0:
        raise UsageError(f"--max_restarts {ours['max_restarts']} is less than never.", hint="It takes 0 or more.")
    autofit = AutoFit(**_fields_of(AutoFit, ours))
    of_wish = {name: value for name, value in _fields_of(Wish, ours).items() if name != "plan"}  # its file is AutoFit's
    wish = Wish(
        **of_wish,
        method=prog.split()[-1],
        autofit=autofit,
        argv=tuple(rest),
        config=config,
        environment=environment,
        command=shared_words(argv),
        also_known=own_names(),
        probe="no_probe" not in ours,
    )
    return with_accelerate(with_peft_config(wish)), Output(**_fields_of(Output, ours), typed=tuple(argv))


def _config_file(prog: str, flags: dict[str, Any]) -> str | None:
    if "recipe" not in flags:
        file: str | None = flags.pop("config", None)
        return file
    from autotrain_mem.cli.recipes import config_file  # few commands name one

    return config_file(prog, flags)


def _fields_of(kind: type[AutoFit | Wish | Output], ours: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in ours.items() if name in names}


_NOT_HERE = {
    "--snapshot": (
        "it is one configuration that has a history.",
        "autofit estimate METHOD ... --snapshot FILE writes it, with the flags that a plan shows.",
    ),
    "--sweep": (
        "it finds the values itself.",
        "autofit estimate METHOD ... --sweep max_length=512,1024 shows what each value needs.",
    ),
    "--frontier": (
        "it compares levels of harm, and trains nothing.",
        "autofit plan METHOD ... --frontier max_length shows them.",
    ),
    "--csv": (
        "a table of figures is what estimate prints.",
        "autofit estimate METHOD ... --sweep max_length=512,1024 --csv, or --json here.",
    ),
    "--plan": (
        "it says what flags need, and a plan holds settings that were found to fit.",
        "autofit explain FILE tells what they need; autofit METHOD --plan FILE trains with them.",
    ),
    "--dry_run": ("it trains nothing.", "autofit METHOD ... --dry_run tells what would run, with the plan's settings."),
    "--export": ("it makes no plan.", "autofit plan METHOD ... --export TOOL writes one in another tool's keys."),
    "--within": ("it makes no plan.", "autofit plan METHOD ... --within 8h finds the gentlest that keeps it."),
    "--budget": ("it makes no plan.", "autofit plan METHOD ... --budget 20 finds the gentlest that keeps it."),
    "--prices": ("it tells no costs.", "autofit plan METHOD ... --gpu all --prices FILE does."),
    "--out": ("it makes no plan.", "autofit plan METHOD ... --out FILE writes one; --json prints an estimate."),
}
"""Flags that only estimate has, or it alone has not: why a command does not take them, and what to type instead."""
_NOT_GIVEN = (None, False)


def _given(namespace: argparse.Namespace) -> dict[str, Any]:
    """Collects what the user said. By identity: 0 is an answer, though it equals False."""
    return {name: value for name, value in vars(namespace).items() if not any(value is each for each in _NOT_GIVEN)}


def _underscored(token: str) -> str:
    """``--max-length=5`` and ``--max_length=5`` are the same."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _yaml_names() -> tuple[str, ...]:
    """Our flags that may stand in a YAML file."""
    return tuple(name for name in own_names() if name not in ("config", "recipe", "dry_run", "export", "help"))


def _own_settings(prog: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Our keys of a YAML file, checked by the parser that checks the flags."""
    known = _yaml_names()
    if unknown := [name for name in settings if name not in known]:
        near = {name: difflib.get_close_matches(name, known, n=1) for name in unknown}
        meant = [f"{name}: did you mean {guess[0]}?\n" for name, guess in near.items() if guess]
        raise UsageError(
            f"Unknown key{'s' * (len(unknown) > 1)} in the autofit: block: {', '.join(unknown)}.",
            hint=f"{''.join(meant)}It takes {', '.join(known)}; TRL's keys stand at the top level.",
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
    """Take a block of keys out of the config; an empty one is none."""
    block = config.pop(name, None)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise UsageError(
            f"The {name}: block of the config holds no keys.", hint=f"Write {name}: and indented keys below."
        )
    return block


def _refuse(prog: str, message: str) -> NoReturn:
    """Raises what argparse would have printed, in our words."""
    reason, choose, choices = message.removeprefix("argument ").partition(" (choose from ")
    hint = f"It takes {choices.rstrip(')').replace(chr(39), '')}." if choose else f"See {prog} --help."
    raise UsageError(f"{reason[0].upper()}{reason[1:]}.", hint=hint)
