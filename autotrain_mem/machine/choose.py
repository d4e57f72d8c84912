"""Which device a run is planned for."""

from __future__ import annotations

import os

from autotrain_mem.errors import NoGpuError
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.detect import detect, host
from autotrain_mem.machine.measure import measured
from autotrain_mem.spec.hardware import Hardware

_WITHOUT_A_GPU = """\
--gpu NAME --plan_only  plans for that card and trains nothing (autofit gpus lists the cards)
--gpu NAME --simulate   trains on the CPU and runs out of memory where that card would
--use_cpu               trains on the CPU, within this machine's own memory"""


def choose(name: str | None, *, use_cpu: bool) -> Hardware:
    """The host if asked for, else the named card, else the first GPU that CUDA would show.

    On a GPU that is here it is measured, once, what a process holds of it outside torch; a named card is never touched.

    Raises:
        NoGpuError: nothing was asked for and no GPU is here; the hint holds the three ways on.
        UnknownGpuError: the name is not in the catalog, or stands for several cards.
    """
    if use_cpu:
        return host()
    if name is not None:
        return named(name)
    detected = detect()
    if not detected:
        raise NoGpuError(_nothing_found(), hint=_WITHOUT_A_GPU)
    return measured(detected[0])


def _nothing_found() -> str:
    """Says so when CUDA_VISIBLE_DEVICES may be the reason."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return "No NVIDIA GPU was found on this machine."
    return f"No NVIDIA GPU was found on this machine with CUDA_VISIBLE_DEVICES={wanted!r}."
