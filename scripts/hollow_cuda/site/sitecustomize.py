"""Python imports this first, where its folder is on PYTHONPATH, so that torch's kernels compute once torch is imported.

Only where HOLLOW_VALUES is set, and not in workers, which hide the device and plan as they would anywhere.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

WORKER = "autotrain_mem.worker.server"


class AfterTorch(importlib.abc.MetaPathFinder):
    """Has torch's kernels replaced when a process first opens the device."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            from hollow_cuda import values_kernels

            # Through cuDNN, which is a stand-in, torch would choose kernels by what it says of itself: nothing.
            module.backends.cuda.enable_cudnn_sdp(False)
            module.cuda._lazy_call(values_kernels.install)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("HOLLOW_VALUES") and WORKER not in sys.orig_argv:
    sys.meta_path.insert(0, AfterTorch())
