"""Chooses the device that a run is planned for."""

import contextlib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotrain_mem.machine.catalog import catalog, named, rates_of
from autotrain_mem.machine.detect import HIDES_ALL, VISIBLE, detect, host
from autotrain_mem.machine.links import named_links, topology
from autotrain_mem.machine.nvml import nvidia_driver
from autotrain_mem.support.errors import NoGpuError, UsageError
from autotrain_mem.support.units import counted, format_bytes
from autotrain_mem.types.hardware import Hardware

_WITHOUT_A_GPU = """\
--gpu NAME --plan_only  plans for that card and trains nothing (autofit gpus lists the cards)
--gpu NAME --simulate   trains on the CPU and runs out of memory where that card would
--use_cpu               trains on the CPU, within this machine's own memory"""
_WITHOUT_NVML = """\
The driver is here, but its library libnvidia-ml is not: a container gets it with --gpus all and
NVIDIA_DRIVER_CAPABILITIES=compute,utility; in WSL it is in /usr/lib/wsl/lib (LD_LIBRARY_PATH).
"""
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""Files of NVIDIA's driver on Linux and in WSL (``/dev/dxg``)."""
_NOTHING: Mapping[str, str] = {}

ALL = "all"
UNLIKE = 0.9
"""A GPU with less than this share of the largest free memory is reported, since it limits all others."""


def choose(
    name: str | None,
    *,
    use_cpu: bool,
    gpus: int | None = None,
    nodes: int = 1,
    spared: int = 0,
    link: str | None = None,
    environment: Mapping[str, str] = _NOTHING,
    warn: Callable[[str], None] = lambda message: None,
) -> Hardware:
    """Returns the host if asked for, else the named card, else the smallest of the GPUs that CUDA would expose.

    Args:
        gpus: The number of GPUs; None for all of this machine, or one of a named card.
        nodes: The number of machines.
        spared: The number of this machine's GPUs that vLLM's server takes; ignored with ``CUDA_VISIBLE_DEVICES``,
            which the server does not share.
        link: The value of ``--link``.
        environment: Variables of the training process, over this one's: they may select the card.
        warn: Receives warnings about GPUs that NVML cannot read, and about GPUs that differ.

    Raises:
        NoGpuError: this machine has no GPU, or fewer than requested; the hint lists the alternatives.
        UnknownGpuError: the name is not in the catalog, or is ambiguous.
        UnreadableGpuError: NVML cannot read any of the GPUs.
        UsageError: several cards are named, or the link is unknown.
    """
    named_links(link)
    if use_cpu:
        return host()
    if name is not None:
        if several(name):
            hint = "Only autofit plan METHOD compares cards; give --gpu one name here (autofit gpus lists them)."
            raise UsageError(f"--gpu {name} names several cards.", hint=hint)
        card = named(name)
        return replace(card, topology=topology(card, devices=gpus or 1, nodes=nodes, asked=link))
    used = _detected(gpus, environment, warn, spared=spared)
    smallest = min(used, key=lambda card: card.budget_bytes())
    others = [card for card in used if card.uuid != smallest.uuid]
    numbers = ",".join(str(card.uuid if card.index is None else card.index) for card in others)
    is_fuller = smallest.free_bytes < UNLIKE * max(card.free_bytes for card in used)
    if is_fuller or len({card.name for card in used}) > 1:
        warn(
            f"The GPUs differ: all are planned like {smallest.name} (GPU {smallest.index}), which has "
            f"{format_bytes(smallest.free_bytes)} free, and all wait for the slowest. {VISIBLE}={numbers} (with "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID) trains on the other GPUs only."
        )
    return _together(used, nodes=nodes, link=link)


def _detected(
    gpus: int | None, environment: Mapping[str, str], warn: Callable[[str], None], *, spared: int
) -> Sequence[Hardware]:
    """Returns the requested GPUs, at least one. Unless VISIBLE is set, vLLM's server takes the last ones."""
    if other := unplanned_gpus():
        raise NoGpuError(
            f"torch is built for {other} here. autofit does not plan for them: it simulates CUDA's allocator only.",
            hint=_WITHOUT_A_GPU,
        )
    detected = detect(environment, warn)
    shown = {**os.environ, **environment}.get(VISIBLE)
    if not detected:
        hidden = "" if shown is None else f" with {VISIBLE}={shown!r}"
        why = "" if shown is not None and shown.strip() in HIDES_ALL else nvidia_driver()[2]
        hint = _WITHOUT_NVML if why and any(pathlib.Path(path).exists() for path in _DRIVER_FILES) else ""
        message = f"No NVIDIA GPU was found on this machine{hidden}{why and f': {why}'}."
        raise NoGpuError(message, hint=hint + _WITHOUT_A_GPU)
    count = len(detected)
    left = count if shown else count - spared
    if left >= (gpus or 1):
        return detected[: gpus or left]
    here = f"{VISIBLE}={shown} shows" if shown else "this machine has"
    taken = f", and vLLM's server takes {spared} of them" if left < count else ""
    ways = [f"--gpus {left}"] * (left > 0) + ["--gpu NAME --plan_only  plans for cards that are not here"]
    ways += ["--vllm_mode colocate  generates on the GPUs that train"] * (left < count)
    message = f"--gpus {gpus or 1} is more than {here}: {counted(count, 'GPU')}{taken}."
    raise NoGpuError(message, hint="\n".join(ways))


def least(cards: Sequence[Hardware]) -> Hardware:
    """Returns a card with the smallest budget and lowest speeds of all: each step waits for the slowest card."""
    smallest = min(cards, key=lambda card: card.budget_bytes())
    known = [card.compute_capability for card in cards if card.compute_capability is not None]
    speeds = {name: [getattr(card, name) for card in cards] for name in rates_of(None)}
    slowest: dict[str, Any] = {name: None if None in each else min(each) for name, each in speeds.items()}
    return replace(smallest, compute_capability=min(known, default=None), **slowest)


def _together(cards: Sequence[Hardware], *, nodes: int, link: str | None) -> Hardware:
    card, uuids = least(cards), tuple(str(each.uuid) for each in cards)
    return replace(card, topology=topology(card, devices=len(cards), nodes=nodes, asked=link, uuids=uuids))


_BUILT_FOR = re.compile(r"^(hip|xpu)\b[^=\n]*= *'", re.MULTILINE)
"""Matches ``hip: Optional[str] = '6.4.43482'`` in ``torch/version.py``; other builds have None there."""


def unplanned_gpus() -> str:
    """Returns the kind of GPU, other than NVIDIA's, that the installed torch is built for, without importing torch."""
    if sys.platform == "darwin":
        return "Apple's GPUs (MPS)"
    spec = importlib.util.find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        with contextlib.suppress(OSError):
            if match := _BUILT_FOR.search(pathlib.Path(folder, "version.py").read_text(encoding="utf-8")):
                return "AMD's GPUs (ROCm)" if match[1] == "hip" else "Intel's GPUs (XPU)"
    return ""


def several(names: str, counts: Sequence[int] = (), *, nodes: int = 1, link: str | None = None) -> tuple[Hardware, ...]:
    """Returns the cards of a list such as ``"rtx3060,l4"``, or for ``"all"`` all except laptops'. Returns nothing
    for a single name with at most one item in ``counts``. Raises UnknownGpuError if a name is not in the catalog, and
    UsageError if several numbers are given without a name. ``counts``: numbers of GPUs; each card is returned once for
    each. ``nodes`` and ``link``: as for :func:`choose`."""
    if len(counts) > 1 and not names:
        numbers = ",".join(map(str, counts))
        raise UsageError(f"--gpus {numbers} needs the name of a card.", hint="Give --gpu NAME too, or --gpu all.")
    listed = [name for name in names.split(",") if name.strip()]
    is_all = names.strip().lower() == ALL
    if not is_all and len(listed) < 2 and len(counts) < 2:
        return ()
    cards = catalog(laptops=False) if is_all else tuple(map(named, listed))
    return tuple(
        replace(card, topology=topology(card, devices=count, nodes=nodes, asked=link))
        for card in cards
        for count in counts or (1,)
    )


def training_device(named: Hardware, *, simulate: bool, environment: Mapping[str, str] = _NOTHING) -> Hardware:
    """Returns the device to train on: the planned one, or for a named card, detected cards that are at least as large.
    Raises NoGpuError if there are not enough such cards."""
    if simulate or named.origin in ("cpu", "detected"):
        return named
    devices = named.topology.devices
    large = [card for card in detect(environment) if card.total_bytes >= named.total_bytes][:devices]
    if len(large) == devices:
        return _together(large, nodes=named.topology.nodes, link=named.topology.links)
    raise NoGpuError(
        f"The plan needs {devices} x {named.name}; this machine has {counted(len(large), 'GPU')} of that size.",
        hint="--plan_only     plan for that card and stop\n"
        "--simulate      train on the CPU with a simulated card of that name",
    )
