"""Asks a process of its own what torch sees beside NVIDIA's cards: AMD's, Apple's and Intel's.

Only torch knows them for sure, and to ask costs its import, 5 seconds: so it is asked only where the installed build,
or the system, is one that can have them. The answer is kept for as long as this process lives.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotrain_mem.machine.torch_child import NoAnswer, next_answer
from autotrain_mem.support.processes import Child
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import codec

CHILD_MODULE = "autotrain_mem.machine.list_process"
HIP_VISIBLE = "HIP_VISIBLE_DEVICES"
"""By which a user says which of AMD's cards a process sees, of those that ROCR_VISIBLE_DEVICES leaves. HIP reads
CUDA_VISIBLE_DEVICES too, where this is not set (``torch.cuda._parse_visible_devices``; ROCm's documentation, "GPU
isolation techniques")."""
_CHOOSE = (HIP_VISIBLE, "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Whatever changes what is seen; the last is Intel's."""
_BUILT_FOR = re.compile(r"^(hip|xpu)\b[^=\n]*= *'", re.MULTILINE)
"""In ``torch/version.py``, whose value is None in any other build: ``hip: Optional[str] = '6.4.43482'``."""
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class HipDevice:
    """Describes an AMD card as torch sees it."""

    name: str
    gcn_arch_name: str
    """``gfx90a:sramecc+:xnack-``."""
    total_bytes: int
    free_bytes: int
    """Beside a process that opened it."""
    address: str
    """On PCI, as ``0000:c1:00.0``; empty where torch does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class XpuDevice:
    """Describes an Intel GPU as torch sees it."""

    name: str
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Holds what torch sees."""

    hip: tuple[HipDevice, ...] = ()
    mps_bytes: int | None = None
    """Of an Apple GPU, what Metal recommends to take at most of the memory that it shares with the host."""
    xpu: tuple[XpuDevice, ...] = ()

    @property
    def unplanned(self) -> str:
        """Names what is here and cannot be planned for; empty where there is nothing."""
        if self.mps_bytes is not None:
            return f"Apple's GPU (MPS), {format_bytes(self.mps_bytes)} of unified memory for it"
        return ", ".join(f"{each.name} (Intel XPU), {format_bytes(each.total_bytes)}" for each in self.xpu)


def torch_build() -> Literal["hip", "xpu", ""]:
    """Reads what the installed torch is built for beside CUDA and the CPU, without importing it."""
    spec = importlib.util.find_spec("torch")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        try:
            text = pathlib.Path(folder, "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        if match := _BUILT_FOR.search(text):
            return "hip" if match[1] == "hip" else "xpu"
    return ""


def seen(environment: Mapping[str, str] = _NOTHING) -> Seen:
    """Finds what a process started now would see, where there can be anything.

    Args:
        environment: What is set for that process, over this one's environment.

    Raises:
        NoAnswer: torch does not tell.
    """
    if not torch_build() and sys.platform != "darwin":
        return Seen()
    variables = {**os.environ, **environment}
    return _asked(tuple((name, variables[name]) for name in _CHOOSE if name in variables))


@functools.cache
def _asked(variables: tuple[tuple[str, str], ...]) -> Seen:
    child = Child(CHILD_MODULE, dict(variables))
    try:
        return codec.from_json(Seen, next_answer(child))
    except codec.CodecError as error:
        raise NoAnswer(str(error)) from error
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()
