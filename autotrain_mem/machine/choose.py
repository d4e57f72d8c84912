"""Which device a run is planned for."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping

from autotrain_mem.errors import NoGpuError, UsageError
from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.detect import VISIBLE, detect, host, why_no_nvml
from autotrain_mem.machine.measure import measured
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.store import Store, cache_folder

_WITHOUT_A_GPU = """\
--gpu NAME --plan_only  plans for that card and trains nothing (autofit gpus lists the cards)
--gpu NAME --simulate   trains on the CPU and runs out of memory where that card would
--use_cpu               trains on the CPU, within this machine's own memory"""

_WITHOUT_NVML = (
    "The driver is here, and its library libnvidia-ml is not: a container gets it with --gpus all and\n"
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility; in WSL it lies in /usr/lib/wsl/lib (LD_LIBRARY_PATH).\n"
)
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""One of which there is where NVIDIA's driver is: on Linux, and in WSL (``/dev/dxg``)."""
_HIDES_ALL = ("", "-1")
_NOTHING: Mapping[str, str] = {}

_ONE_CARD = "Only autofit plan METHOD compares cards; give --gpu one name here (autofit gpus lists them)."


def choose(
    name: str | None,
    *,
    use_cpu: bool,
    store: Store | None = None,
    environment: Mapping[str, str] = _NOTHING,
    warn: Callable[[str], None] = lambda message: None,
) -> Hardware:
    """The host if asked for, else the named card, else the first GPU that CUDA would show.

    On a GPU that is here it is measured, once, what a process holds of it outside torch; a named card is never touched.

    Args:
        store: Where a measurement is kept; None for the user's cache folder, without a word about its state.
        environment: What is set for the training process, over this one's environment: it may name the card.
        warn: Hears of GPUs that are passed over, since NVML does not answer for them.

    Raises:
        NoGpuError: nothing was asked for and no GPU is here; the hint holds the three ways on.
        UnknownGpuError: the name is not in the catalog, or stands for several cards.
        UnreadableGpuError: a GPU is here that does not answer, or that torch cannot use.
        UsageError: a list of cards.
    """
    if use_cpu:
        return host()
    if name is not None:
        if several(name):
            raise UsageError(f"--gpu {name} names several cards.", hint=_ONE_CARD)
        return named(name)
    detected = detect(environment, warn)
    if not detected:
        raise _no_gpu({**os.environ, **environment}.get(VISIBLE))
    return measured(detected[0], store or Store(cache_folder()), environment=environment)


def _no_gpu(hidden_by: str | None) -> NoGpuError:
    perhaps = "" if hidden_by is None else f" with {VISIBLE}={hidden_by!r}"
    why = "" if (hidden_by or "").strip() in _HIDES_ALL and hidden_by is not None else why_no_nvml()
    hint = _WITHOUT_NVML if why and any(pathlib.Path(path).exists() for path in _DRIVER_FILES) else ""
    message = f"No NVIDIA GPU was found on this machine{perhaps}{why and f': {why}'}."
    return NoGpuError(message, hint=hint + _WITHOUT_A_GPU)


ALL = "all"


def several(names: str) -> tuple[Hardware, ...]:
    """Give the cards of ``"all"``, without laptops', or of a list such as ``"rtx3060,l4"``; empty for the name of one.

    Raises:
        UnknownGpuError: a name that is not in the catalog.
    """
    if names.strip().lower() == ALL:
        return catalog(laptops=False)
    listed = [name for name in names.split(",") if name.strip()]
    return tuple(map(named, listed)) if len(listed) > 1 else ()


def training_device(named: Hardware, *, simulate: bool, environment: Mapping[str, str] = _NOTHING) -> Hardware:
    """Returns the device to train on: the planned one itself, or a detected card that holds a plan for a named one.

    Args:
        environment: As of :func:`choose`.
    """
    if simulate or named.origin in ("cpu", "detected"):
        return named
    for card in detect(environment):
        if card.total_bytes >= named.total_bytes:
            return card
    raise NoGpuError(
        f"The plan is for {named.name}, but no such GPU is here to train on.",
        hint="--plan_only     plan for that card and stop\n"
        "--simulate      train on the CPU while a simulated card of that name keeps account",
    )
