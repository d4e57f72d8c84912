"""Lists the tools whose files ``--export`` can write, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from autotrain_mem.support.errors import UsageError
from autotrain_mem.types.methods_table import METHODS

if TYPE_CHECKING:  # every command reads the tools' names
    from autotrain_mem.types import Job, Plan

OF_MACHINES = ("slurm", "kubernetes", "skypilot", "commands")
"""Tools whose files hold one autofit command, with our flags, for each machine."""
EXPORTERS: Mapping[str, str] = {
    **{name: name for name in ("trl", "accelerate", "axolotl", "llamafactory")},
    **dict.fromkeys(OF_MACHINES, "machines"),
}
"""Tool -> a module of ``exports``, imported on use. Its function with the tool's name makes the text from a plan and
its job."""


def methods_of(name: str) -> list[str]:
    """Returns the methods for which a tool's file can be written."""
    from autotrain_mem.methods.interface import method_of

    if name == "accelerate":  # it launches TRL's scripts
        return [method for method, facts in METHODS.items() if facts.has_trl_command]
    return [method for method in METHODS if getattr(method_of(method), name, "") is not None]


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
    if method not in (methods := methods_of(name)):
        raise UsageError(
            f"--export {name} does not write {method.upper()} yet.",
            hint=f"It writes {', '.join(methods)}; --export trl writes {method} in TRL's own keys.",
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
    return str(resolve_name(f"autotrain_mem.exports.{EXPORTERS[name]}:{name}")(plan, job))
