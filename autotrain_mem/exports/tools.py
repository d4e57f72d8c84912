"""The tools whose files can be written, by the names of ``--export``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.methods_table import METHODS

if TYPE_CHECKING:  # every command reads the tools' names
    from autotrain_mem.methods.interface import Method
    from autotrain_mem.types import Job, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """Writes one tool's file."""

    write: str
    """Names the function of a plan and its job that returns the text, ``module:function``: each is imported when it is
    asked for, since the names of the tools stand in every help."""
    lacks: str
    """What is said of a method that it has not."""
    trains: Callable[[str], bool] = METHODS.__contains__
    """Tells whether the tool can train a method."""

    @property
    def methods(self) -> Sequence[str]:
        """Those that the tool can train."""
        return [name for name in METHODS if self.trains(name)]


def _method(name: str) -> Method:
    from autotrain_mem.methods.interface import method_of

    return method_of(name)


EXPORTERS = {
    "trl": Exporter(write="autotrain_mem.exports.trl:trl", lacks=""),
    "accelerate": Exporter(
        trains=lambda name: METHODS[name].has_trl_command,
        write="autotrain_mem.exports.accelerate:accelerate",
        lacks="accelerate launches TRL's scripts, and TRL has none for",
    ),
    "axolotl": Exporter(
        trains=lambda name: _method(name).axolotl is not None,
        write="autotrain_mem.exports.axolotl:axolotl",
        lacks="No file for Axolotl is written yet for",
    ),
    "llamafactory": Exporter(
        trains=lambda name: _method(name).llamafactory is not None,
        write="autotrain_mem.exports.llamafactory:llamafactory",
        lacks="No file for LLaMA-Factory is written yet for",
    ),
    "slurm": Exporter(write="autotrain_mem.exports.machines:slurm", lacks=""),
    "kubernetes": Exporter(write="autotrain_mem.exports.machines:kubernetes", lacks=""),
    "skypilot": Exporter(write="autotrain_mem.exports.machines:skypilot", lacks=""),
    "commands": Exporter(write="autotrain_mem.exports.machines:commands", lacks=""),
}

OF_MACHINES = ("slurm", "kubernetes", "skypilot", "commands")
"""Say what each machine runs, in flags of ours."""


def check_method(name: str, method: str) -> None:
    """Ask before minutes of planning, not after.

    Args:
        name: One of :data:`EXPORTERS`.

    Raises:
        UsageError: the tool has no such method.
    """
    exporter = EXPORTERS[name]
    if method in exporter.methods:
        return
    raise UsageError(
        f"{exporter.lacks} {method.upper()}.",
        hint=f"--export {name} writes {', '.join(exporter.methods)}; --export trl writes {method} in TRL's own keys.",
    )


_WITHOUT_ZERO = ("accelerate", "axolotl", "llamafactory")
"""Say how a model is shared in keys of their own, and not yet in DeepSpeed's."""


_WITHOUT_SHARED_TOKENS = ("axolotl", "llamafactory")
"""Have a ring attention of their own, if any, of which nothing was rehearsed."""


def check_sharding(name: str, *, is_zero: bool, token_shards: int = 1) -> None:
    """Ask as :func:`check_method` does, of a plan with DeepSpeed's ZeRO or with rows that several processes share.

    Raises:
        UsageError: the file would train without it.
    """
    if is_zero and name in _WITHOUT_ZERO:
        raise UsageError(
            f"--export {name} does not write DeepSpeed's ZeRO yet.",
            hint=f"--export trl writes DeepSpeed's config with the rest; --sharding fsdp2 is written for {name}.",
        )
    if token_shards > 1 and name in _WITHOUT_SHARED_TOKENS:
        raise UsageError(
            f"--export {name} does not write that {token_shards} GPUs share the tokens of a row.",
            hint="--export trl does; --cp_size 1 and --sp_size 1 plan without.",
        )


def check_adapter(name: str, peft_config: object) -> None:
    """Ask as :func:`check_method` does, of a plan with a config of PEFT's own.

    Raises:
        UsageError: the file would train another adapter.
    """
    if peft_config and name not in OF_MACHINES:
        raise UsageError(
            f"--export {name} has no key for a config of PEFT's own (--peft_config).",
            hint="--export commands writes autofit's own command, with the config in it; what TRL's flags say of LoRA "
            f"(--use_peft, --lora_r, --use_dora) is written for {name}.",
        )


def export(name: str, plan: Plan, job: Job) -> str:
    """The text of the file for a tool.

    Example: ``export("axolotl", plan, job)`` begins with ``# Made by autofit for Axolotl: sft of Qwen/Qwen3-8B.``

    Args:
        name: One of :data:`EXPORTERS`.
        plan: Of the job.

    Raises:
        UsageError: the tool has no such method, or cannot be told how the model is shared or adapted.
    """
    check_method(name, job.method)
    check_sharding(name, is_zero=plan.knobs.zero_stage > 0, token_shards=plan.knobs.token_shards)
    check_adapter(name, plan.knobs.peft_config)
    return str(resolve_name(EXPORTERS[name].write)(plan, job))
