"""From a user's words to one job on one device: the one way in, for the command and for the verbs of Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.engine.rehearsals import Rehearsals
from autotrain_mem.errors import UsageError
from autotrain_mem.machine.cache import cache_folder
from autotrain_mem.machine.choose import choose
from autotrain_mem.spec.autofit import AutoFit
from autotrain_mem.store import Store
from autotrain_mem.worker.pool import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What a user said, before TRL's parser has looked at it."""

    method: str
    """One of ``methods.table.METHODS``."""
    model: str | None
    """A hub id or a folder; None where one of TRL's arguments names it."""
    dataset: str | None
    autofit: AutoFit
    argv: tuple[str, ...] = ()
    """Flags for TRL's parser."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name for TRL's parser, as JSON has them: YAML keys, or keywords of Python. Flags win over them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For the processes that load the model."""
    also_known: tuple[str, ...] = ()
    """Names of our own, for did-you-mean."""
    simulate: bool = False
    plan_only: bool = False

    @property
    def own(self) -> dict[str, Any]:
        """Those of ours that may contradict one of TRL's, or each other."""
        same = {name: getattr(self.autofit, name) for name in ("gpu", "effective_batch_size", "prompt_length")}
        ways = {"simulate": self.simulate, "plan_only": self.plan_only}
        return {**same, **ways, "forbid": sorted(self.autofit.forbid)}


def kept_between_runs(told: Callable[[str], None]) -> Store:
    """The cache on disk of rehearsals and token counts.

    Args:
        told: Hears when it was damaged or cannot be written; neither ends anything.
    """
    return Store(cache_folder(), told=told)


def rehearsals_for(
    workers: Workers,
    words: Words,
    headroom_bytes: Callable[[int], int | None],
    warn: Callable[[str], None],
) -> Rehearsals:
    """The job that is asked for, on its device.

    Args:
        headroom_bytes: What is to be left free of a device of so many bytes; None for the default.
        warn: Hears when the cache on disk was damaged or cannot be written.

    Raises:
        UsageError: an argument that TRL does not know (with the nearest) or refuses; all that contradicts itself.
        NoGpuError, UnknownGpuError: there is no such device.
    """
    autofit = words.autofit
    given, defaults = workers.first.parse(
        words.method, words.argv, words.config, words.environment, words.also_known, autofit.switches, words.own
    )
    model = words.model or given.get("model_name_or_path")
    if not model:
        raise UsageError(
            "No model is given.", hint="Give --model MODEL, a hub id such as Qwen/Qwen2.5-0.5B or a folder."
        )
    job = autofit.job(words.method, str(model), dataset=words.dataset, arguments=given, environment=words.environment)
    store = kept_between_runs(warn)
    hardware = choose(autofit.gpu, use_cpu=bool(given.get("use_cpu")), store=store)
    return Rehearsals(
        workers=workers,
        job=job,
        defaults=defaults,
        hardware=hardware,
        headroom_bytes=headroom_bytes(hardware.total_bytes),
        store=store,
    )
