"""Finds the flags that TRL takes and does nothing with: a plan is made, and says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from autotrain_mem.checks.preflight_checks import Setup
from autotrain_mem.methods.configs import Configs
from autotrain_mem.settings.flag_verdicts import FlagGroup, Verdict, group_of
from autotrain_mem.settings.optimizer_verdicts import is_projecting
from autotrain_mem.types.findings import Finding, Problems


def idle(setup: Setup) -> Problems:
    """Names each with the reason, one warning for those of one reason; and those that nobody has looked at yet."""
    job = setup.job
    unknown = [name for name in _asked(job.arguments, setup.filled) if group_of(job.method, name) is None]
    if unknown:
        yield Finding(
            kind="warning",
            message=f"{', '.join(f'--{name}' for name in unknown)}: newer than this autofit, which does not know "
            "whether it moves memory. TRL's trainer gets it in a rehearsal.",
            cure="",
        )
    found: dict[FlagGroup, list[str]] = {}
    for name in _asked(job.arguments, setup.filled):
        if group := _idle_group(setup, name):
            found.setdefault(group, []).append(name)
    for group, names in found.items():
        yield _warning(names, job.method, group.why)
    for names, needed in _without_its_switch(setup):
        yield _warning(names, job.method, f"--{needed} is not given")
    if job.arguments.get(_TARGETS) and not is_projecting(str(job.arguments.get("optim") or "")):
        yield _warning([_TARGETS], job.method, "only optimizers of GaLore and APOLLO read it, and --optim names none")


_TARGETS = "optim_target_modules"


def _idle_group(setup: Setup, name: str) -> FlagGroup | None:
    group = group_of(setup.job.method, name)
    if group is None or group.verdict is not Verdict.IDLE or (group.in_commands and setup.job.python_call is not None):
        return None
    return group


def _warning(names: list[str], method: str, why: str) -> Finding:
    flags = ", ".join(f"--{name}" for name in names)
    return Finding(
        kind="warning",
        message=f"{flags} {'does' if len(names) == 1 else 'do'} nothing with {method}: {why}.",
        cure=f"Remove {'it' if len(names) == 1 else 'them'}, or train on knowing that.",
    )


_SWITCHES = {
    "vllm_": "use_vllm",
    "ref_model_": "sync_ref_model",
    "liger_kernel_config": "use_liger_kernel",
    "eval_steps": "eval_strategy",
    "packing_strategy": "packing",
    "entropy_coef_": "use_adaptive_entropy",
}
"""How a flag begins -> the flag without which TRL never reads it, and which no plan turns on by itself."""


def _without_its_switch(setup: Setup) -> Iterator[tuple[list[str], str]]:
    for start, switch in _SWITCHES.items():
        value = setup.job.arguments.get(switch)
        if value and str(getattr(value, "value", value)) != "no":
            continue
        asked = [name for name in _asked(setup.job.arguments, setup.filled) if name.startswith(start)]
        if names := [name for name in asked if not _idle_group(setup, name)]:
            yield names, switch


def _asked(given: Mapping[str, Any], filled: Configs) -> Iterator[str]:
    """Yields the names of arguments that ask for something other than TRL's own default."""
    parts = (filled.script, filled.training, filled.model, filled.dataset)
    fields = {field.name: field for part in parts for field in dataclasses.fields(part)}
    for name, value in given.items():
        if value in (None, False, "") or name not in fields:
            continue
        factory = fields[name].default_factory
        default = fields[name].default if factory is dataclasses.MISSING else factory()
        if value != getattr(default, "value", default):
            yield name
