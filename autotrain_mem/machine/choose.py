"""Which device a run is planned for."""

from __future__ import annotations

import os

from autotrain_mem.errors import NoGpuError, UsageError
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.detect import detect, host
from autotrain_mem.machine.measure import measured
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.store import Store, cache_folder

_WITHOUT_A_GPU = """\
--gpu NAME --plan_only  plans for that card and trains nothing (autofit gpus lists the cards)
--gpu NAME --simulate   trains on the CPU and runs out of memory where that card would
--use_cpu               trains on the CPU, within this machine's own memory"""

_ONE_CARD = "Only autofit plan METHOD compares cards; give --gpu one name here (autofit gpus lists them)."


def choose(name: str | None, *, use_cpu: bool, store: Store | None = None) -> Hardware:
    """The host if asked for, else the named card, else the first GPU that CUDA would show.

    On a GPU that is here it is measured, once, what a process holds of it outside torch; a named card is never touched.

    Args:
        store: Where a measurement is kept; None for the user's cache folder, without a word about its state.

    Raises:
        NoGpuError: nothing was asked for and no GPU is here; the hint holds the three ways on.
        UnknownGpuError: the name is not in the catalog, or stands for several cards.
        UsageError: a list of cards.
    """
    if use_cpu:
        return host()
    if name is not None:
        if several(name):
            raise UsageError(f"--gpu {name} names several cards.", hint=_ONE_CARD)
        return named(name)
    detected = detect()
    if not detected:
        hidden_by = os.environ.get("CUDA_VISIBLE_DEVICES")
        perhaps = "" if hidden_by is None else f" with CUDA_VISIBLE_DEVICES={hidden_by!r}"
        raise NoGpuError(f"No NVIDIA GPU was found on this machine{perhaps}.", hint=_WITHOUT_A_GPU)
    return measured(detected[0], store or Store(cache_folder()))


ALL = "all"


def several(names: str) -> tuple[Hardware, ...]:
    """The cards of ``"all"``, or of a list such as ``"rtx3060,rtx4090"``; empty where it names one card.

    Raises:
        UnknownGpuError: a name that is not in the catalog.
    """
    if names.strip().lower() == ALL:
        return catalog()
    listed = [name for name in names.split(",") if name.strip()]
    return tuple(map(named, listed)) if len(listed) > 1 else ()


def training_device(named: Hardware, *, simulate: bool) -> Hardware:
    """Returns the device to train on: the planned one itself, or a detected card that holds a plan for a named one."""
    if simulate or named.origin in ("cpu", "detected"):
        return named
    for card in detect():
        if card.total_bytes >= named.total_bytes:
            return card
    raise NoGpuError(
        f"The plan is for {named.name}, but no such GPU is here to train on.",
        hint="--plan_only     plan for that card and stop\n"
        "--simulate      train on the CPU while a simulated card of that name keeps account",
    )
