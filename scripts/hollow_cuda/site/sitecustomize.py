"""Makes torch's CUDA kernels compute, and injects faults. Python imports this module at startup, from PYTHONPATH.

It acts only if HOLLOW_VALUES is set, and not in workers, which hide the device and plan as on any machine.

HOLLOW_FAULT (``PHASE:N:refuse:COUNT`` or ``PHASE:N:fill:MIB``) makes the device run out of memory. When the training
enters that phase for the Nth time, the allocator's cache is emptied. Then either the next COUNT requests to the device
are refused (torch makes two for one allocation, the second after it has released its cache), or MIB mebibytes are taken
as if by another process. A fault occurs once for a folder HOLLOW_LEDGER. The error is torch's own.
"""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

WORKER = "autotrain_mem.worker.server"


class After(importlib.abc.MetaPathFinder):
    """Calls a function with a module after the module is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's usual spec, with a loader that calls the function; None for other modules."""
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def compute(torch: ModuleType) -> None:
    """Replaces torch's kernels when this process first opens the device."""
    from hollow_cuda import values_kernels

    # The stand-in for cuDNN returns no properties by which torch could choose one of its attention kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._lazy_call(values_kernels.install)


def compute_quantized(backend: ModuleType) -> None:
    from hollow_cuda import values_kernels

    values_kernels.install("bitsandbytes")


def fail(build: Any) -> None:
    """Injects HOLLOW_FAULT when the training process (``training.process.build``) enters the phase."""
    phase_name, number, kind, amount = os.environ["HOLLOW_FAULT"].split(":")
    came = Path(os.environ["HOLLOW_LEDGER"]) / "fault"
    enter_phase, entered = build.PhasePeaks.enter_phase, 0

    def enter(peaks: Any, phase: Any) -> None:
        nonlocal entered
        is_new = phase is not peaks.phase and str(phase) == phase_name
        enter_phase(peaks, phase)
        entered += is_new
        if not is_new or entered != int(number) or came.exists():
            return
        import torch

        came.touch()
        runtime = ctypes.CDLL("libcudart.so.13")
        torch.cuda.empty_cache()
        if kind == "refuse":
            runtime.standin_refuse(int(amount))
        else:
            runtime.standin_fill_card(0, ctypes.c_ulonglong(int(amount) << 20))

    build.PhasePeaks.enter_phase = enter


if os.environ.get("HOLLOW_VALUES") and WORKER not in sys.orig_argv:
    sys.meta_path.insert(0, After("torch", compute))
    sys.meta_path.insert(0, After("bitsandbytes.backends.cuda.ops", compute_quantized))
    if os.environ.get("HOLLOW_FAULT"):
        sys.meta_path.insert(0, After("autotrain_mem.training.process.build", fail))
