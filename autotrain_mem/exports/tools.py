"""Lists the tools whose files ``--export`` can write, by name."""

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
    """Describes how one tool's file is written."""

    module: str
    """A module of ``exports``. Its function with the tool's name makes the text from a plan and its job. The module is
    imported on use, since every help lists the tools."""
    lacks: str = ""
    """The message for a method that the tool lacks."""
    trains: Callable[[str], bool] = METHODS.__contains__
    """Returns whether the tool can train a method."""

    @property
    def methods(self) -> Sequence[str]:
        """Returns the methods that the tool can train."""
        return [name for name in METHODS if self.trains(name)]


def _method(name: str) -> Method:
    from autotrain_mem.methods.interface import method_of

    return method_of(name)


EXPORTERS = {
    "trl": Exporter(module="trl"),
    "accelerate": Exporter(
        module="accelerate",
        trains=lambda name: METHODS[name].has_trl_command,
        lacks="accelerate launches TRL's scripts, and TRL has none for",
    ),
    "axolotl": Exporter(
        module="axolotl",
        trains=lambda name: _method(name).axolotl is not None,
        lacks="No file for Axolotl is written yet for",
    ),
    "llamafactory": Exporter(
        module="llamafactory",
        trains=lambda name: _method(name).llamafactory is not None,
        lacks="No file for LLaMA-Factory is written yet for",
    ),
    **{name: Exporter(module="machines") for name in ("slurm", "kubernetes", "skypilot", "commands")},
}

OF_MACHINES = ("slurm", "kubernetes", "skypilot", "commands")
"""Tools whose files hold one autofit command, with our flags, for each machine."""

_WITHOUT_ZERO = ("accelerate", "axolotl", "llamafactory")
"""Tools with their own keys for sharding. Their files do not support DeepSpeed's ZeRO yet."""
_WITHOUT_SHARED_TOKENS = ("axolotl", "llamafactory")
"""Tools whose ring attention, if any, is their own and is not rehearsed."""


def check(name: str, method: str, *, is_zero: bool, token_shards: int, peft_config: object) -> None:
    """Raises UsageError if the tool lacks the method, or cannot express how the model is sharded or adapted. It is also
    called before planning, which takes minutes.

    Args:
        name: One of :data:`EXPORTERS`.
        is_zero: Whether DeepSpeed's ZeRO shards the model.
        token_shards: Number of GPUs that share the tokens of a row.
        peft_config: PEFT's own config; None or empty if TRL's flags describe the adapter.
    """
    exporter = EXPORTERS[name]
    if method not in exporter.methods:
        known = ", ".join(exporter.methods)
        raise UsageError(
            f"{exporter.lacks} {method.upper()}.",
            hint=f"--export {name} writes {known}; --export trl writes {method} in TRL's own keys.",
        )
    if is_zero and name in _WITHOUT_ZERO:
        raise UsageError(
            f"--export {name} does not write DeepSpeed's ZeRO yet.",
            hint=f"--export trl writes DeepSpeed's config with the rest; --sharding fsdp2 is written for {name}.",
        )
    if token_shards > 1 and name in _WITHOUT_SHARED_TOKENS:
        raise UsageError(
            f"--export {name} cannot express yet that each row's tokens are divided among {token_shards} GPUs.",
            hint="--export trl can; --cp_size 1 and --sp_size 1 keep rows whole.",
        )
    if peft_config and name not in OF_MACHINES:
        raise UsageError(
            f"--export {name} has no key for a config of PEFT's own (--peft_config).",
            hint="--export commands writes autofit's own command, with the config in it; LoRA set by TRL's flags "
            f"(--use_peft, --lora_r, --use_dora) is written for {name}.",
        )


def export(name: str, plan: Plan, job: Job) -> str:
    """Returns the text of a tool's file. Raises UsageError as :func:`check` does.

    Example: ``export("axolotl", plan, job)`` begins with ``# Made by autofit for Axolotl: sft of Qwen/Qwen3-8B.``
    """
    knobs = plan.knobs
    check(
        name,
        job.method,
        is_zero=knobs.zero_stage > 0,
        token_shards=knobs.token_shards,
        peft_config=knobs.peft_config,
    )
    return str(resolve_name(f"autotrain_mem.exports.{EXPORTERS[name].module}:{name}")(plan, job))
