"""Defines a training request before TRL's parser reads it, so that making one needs no worker."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from autotrain_mem.planning.output_dir import default_dir
from autotrain_mem.settings.declaration import PLAN, TRAIN, Group, setting
from autotrain_mem.settings.old_names import spellings
from autotrain_mem.settings.words import RESTARTS
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import AutoFit, Job, PythonCall

if TYPE_CHECKING:
    from autotrain_mem.parallel.place import Place
    from autotrain_mem.types import Plan


_OF_JOB: dict[str, Any] = {"kind": str, "group": Group.JOB, "before": "peft_config"}
_OF_RUN: dict[str, Any] = {"group": Group.OUTPUT, "commands": (TRAIN, PLAN)}
_OF_MACHINES: dict[str, Any] = {"kind": int, "commands": (TRAIN,), "group": Group.DEVICE, "before": "link"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Holds a training request, whose arguments TRL's parser has not read yet.

    :meth:`job` makes a :class:`Job` of it, with exactly the arguments that TRL's parser accepted.
    """

    method: str
    """One of ``methods_table.METHODS``."""
    model: str | None = setting(
        None, **_OF_JOB, metavar="MODEL", help="a hub id or a folder (short for --model_name_or_path)"
    )
    """A hub id or a folder; None if one of TRL's arguments names the model."""
    dataset: str | None = setting(
        None, **_OF_JOB, metavar="DATA", help="a hub id, a folder, or a .json, .jsonl, .parquet or .csv file"
    )
    autofit: AutoFit = field(default_factory=AutoFit)
    argv: tuple[str, ...] = ()
    """Flags for TRL's parser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for TRL's parser, as JSON values by name: YAML keys, or keywords of Python. Flags win over them."""
    config_notes: tuple[str, ...] = ()
    """What to say about a YAML file of another tool."""
    config_names: Mapping[str, str] = field(default_factory=dict)
    """Name of a key of ``config`` -> what the YAML file calls it, for errors: ``micro_batch_size in run.yaml``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the processes that load the model."""
    also_known: tuple[str, ...] = ()
    """Names of our own flags, which the hint for an unknown flag may suggest."""
    accelerate: Mapping[str, Any] | None = None
    """The content of the user's config of ``accelerate launch``."""
    pins: Mapping[str, Any] = field(default_factory=dict)
    """Knobs that the request pins in addition to ``autofit.pins``."""
    simulate: bool = setting(
        False, group=Group.DEVICE, before="headroom", help="train on the CPU, which simulates the card that --gpu names"
    )
    plan_only: bool = setting(False, group=Group.OUTPUT, before="plan", help="plan and stop")
    overwrite_output_dir: bool = setting(
        False, **_OF_RUN, help="rename another run in --output_dir to NAME.previous-1; nothing is deleted"
    )
    max_restarts: int = setting(
        RESTARTS,
        **_OF_RUN,
        kind=int,
        help=f"resume up to N times in a row when the training process dies (default {RESTARTS}), 0 for never",
    )
    probe: bool = setting(
        True, **_OF_RUN, help="train without the probe (two real steps on the longest rows in a separate process)"
    )
    machine_rank: int | None = setting(
        **_OF_MACHINES,
        help="which of --nodes machines this one is, from 0 (default: from Slurm, torchrun or SkyPilot)",
    )
    main_process_ip: str | None = setting(
        None, **_OF_MACHINES | {"kind": str}, metavar="HOST", help="address of machine 0, which plans and leads"
    )
    main_process_port: int | None = setting(
        **_OF_MACHINES, help="port on which machine 0 listens for the others (default 29500)"
    )
    min_nodes: int | None = setting(
        **_OF_MACHINES,
        help="continue with N machines or more when one is lost and does not come back (default: all)",
    )
    place: Place | None = None
    """This machine's place among several; None if there is only one."""
    command: tuple[str, ...] = field(default=(), compare=False)
    """The part of the command line that is the same on all machines."""
    plan: Plan | None = None
    """The plan to follow; None to make one."""

    @property
    def own(self) -> dict[str, Any]:
        """Returns autofit's settings that may contradict TRL's arguments, or each other."""
        autofit, names = self.autofit, ("nodes", "effective_batch_size", "prompt_length", "image_sizes")
        ways = {"simulate": self.simulate, "plan_only": self.plan_only, "forbid": sorted(autofit.forbid)}
        # A plan may spell the card in another way, and names its number, too.
        ways |= {"gpu": autofit.gpu and "named", "gpus": None if autofit.gpus == 1 else autofit.gpus}
        return {name: getattr(autofit, name) for name in names} | ways

    @property
    def folder(self) -> str | None:
        """Returns the output folder, or the default for the model; None if flags and keys name neither."""
        model = self.model or self.argument("model_name_or_path")
        return str(self.argument("output_dir") or (default_dir(self.method, str(model)) if model else "")) or None

    @property
    def flags(self) -> dict[str, str]:
        """Returns the flags by name with their values, joined by blanks; a flag without a value is ``true``."""
        values: dict[str, list[str]] = {}
        name = ""
        for token in self.argv:
            if token.startswith("--"):
                flag, equals, text = token[2:].partition("=")
                name = flag.replace("-", "_")
                values[name] = [text] if equals else []
            elif name:
                values[name].append(token)
        return {name: " ".join(words) if words else "true" for name, words in values.items()}

    def argument(self, name: str) -> object:
        """Returns the value of one of TRL's arguments in flags or keys; None if not given, or if the flag is false."""
        flags, names = self.flags, spellings(name)
        if (value := next((flags[each] for each in names if each in flags), None)) is None:
            return next((self.config[each] for each in names if each in self.config), None)
        return None if value.lower() == "false" else value

    def names(self, *names: str) -> bool:
        """Returns whether one of these is given, as a field, a flag or a key."""
        is_field = any(getattr(self, name, None) is not None for name in names)
        return is_field or not {*self.flags, *self.config}.isdisjoint(names)

    def job(self, arguments: Mapping[str, Any], python_call: PythonCall | None = None) -> Job:
        """Returns the job with the arguments that TRL's parser read, and the objects of a script's call."""
        autofit = self.autofit
        return Job(
            method=self.method,
            model=str(self.model),
            dataset=self.dataset,
            arguments=arguments,
            environment=self.environment,
            unrecorded=None if self.plan is None else self.plan.job.unrecorded,
            effective_batch_size=autofit.effective_batch_size,
            prompt_length=autofit.prompt_length,
            images=tuple((autofit.image_sizes or "").split(",")) if autofit.image_sizes else (),
            fit=autofit.fit,
            forbid=frozenset(autofit.forbid),
            max_slowdown=autofit.max_slowdown,
            within_seconds=autofit.within_seconds,
            budget=autofit.budget,
            tokens=autofit.tokens,
            accelerate=self.accelerate,
            python_call=python_call,
        )


_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables that launchers set (``accelerate/utils/environment.py: get_cpu_distributed_information``)."""

_SHARDS = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"),
    "ACCELERATE_USE_PARALLELISM_CONFIG",
)
"""Variables that accelerate sets for the processes that it starts (``accelerate/utils/launch.py``)."""


def check_launch(*, is_placed: bool = False) -> None:
    """Raises UsageError if torchrun, accelerate or MPI started this process, or their variables are set.

    Each process would begin its own run, whose training waits for the others. ``LOCAL_RANK`` alone makes accelerate
    wait (``accelerate/state.py: PartialState.__init__``). With ``is_placed``, a launcher may have started one process
    on each of several machines.
    """
    sizes = [os.environ.get(name, "") for name in _WORLD_SIZES]
    is_one_of_several = any(size.isdigit() and int(size) > 1 for size in sizes) and not is_placed
    if "LOCAL_RANK" in os.environ or is_one_of_several:
        raise UsageError(
            "autofit was started by torchrun, accelerate launch or mpirun, but starts a process for each GPU itself.",
            hint="Start it without them, with --gpus N and --sharding or with --accelerate_config FILE.\n"
            "They can launch a script with a trainer of autotrain_mem: from autotrain_mem import SFTTrainer.",
        )
    if on := [name for name in _SHARDS if os.environ.get(name, "").lower() == "true"]:
        raise UsageError(
            f"{on[0]} is set in this shell: every process would shard, whatever the plan is.",
            hint=f"unset {on[0]}; --sharding, or --accelerate_config FILE, sets how processes share the model.",
        )


def no_model(words: Iterable[str]) -> UsageError:
    """Returns the error for a request that names no model; it names a likely typo among the words."""
    others = [word.partition("=")[0] for word in words if not word.startswith("--model")]
    typo = next((f" Did you mean --model by {word}?" for word in get_close_matches("--model", others, cutoff=0.75)), "")
    hint = "Give --model MODEL, a hub id such as Qwen/Qwen2.5-0.5B or a folder."
    return UsageError(f"No model is given.{typo}", hint=hint)
