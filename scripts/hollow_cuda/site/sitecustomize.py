"""Python imports this first, where its folder is on PYTHONPATH, so that torch's kernels compute once torch is imported.

Only where HOLLOW_VALUES is set, and not in workers, which hide the device and plan as they would anywhere.

With HOLLOW_FAULT (``PHASE:N:refuse:COUNT`` or ``PHASE:N:fill:MIB``) the device is full at a phase of a training: when
the run enters that phase for the Nth time, its cache is emptied, and the next COUNT requests to the device are refused
(torch makes two for one allocation, the second after it gave its cache back); or another process takes so many MiB of
the card, and keeps them. Either comes once for a folder of HOLLOW_LEDGER. The error is torch's own.
"""

from __future__ import annotations

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
    """Calls a function with a module, once that is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as ever; None for every other one."""
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
    """Have torch's kernels replaced when this process first opens the device."""
    from hollow_cuda import values_kernels

    # Through cuDNN, which is a stand-in, torch would choose kernels by what it says of itself: nothing.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._lazy_call(values_kernels.install)


def compute_quantized(backend: ModuleType) -> None:
    from hollow_cuda import values_kernels

    values_kernels.install("bitsandbytes")


def fail(build: Any) -> None:
    """Have the device full at a phase of the training that the module ``training.process.build`` measures."""
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
