"""Has the device full at a phase of a training, as HOLLOW_FAULT says: ``PHASE:N:refuse:COUNT`` or ``PHASE:N:fill:MIB``.

When the run enters that phase for the Nth time, its cache is emptied, and the next COUNT requests to the device are
refused (torch makes two for one allocation, the second after it gave its cache back); or another process takes so many
MiB of the card, and keeps them. Either comes once for a folder of HOLLOW_LEDGER. The error is torch's own.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

VARIABLE = "HOLLOW_FAULT"


def install(build: Any) -> None:
    """Watch the phases of the training that the module ``training.process.build`` measures."""
    phase_name, number, kind, amount = os.environ[VARIABLE].split(":")
    came = Path(os.environ["HOLLOW_LEDGER"]) / "fault"
    enter_phase, entered = build.PhasePeaks.enter_phase, 0

    def enter(peaks: Any, phase: Any) -> None:
        nonlocal entered
        is_new = phase is not peaks.phase
        enter_phase(peaks, phase)
        entered += is_new and str(phase) == phase_name
        if is_new and str(phase) == phase_name and entered == int(number) and not came.exists():
            came.touch()
            _befall(kind, int(amount))

    build.PhasePeaks.enter_phase = enter


def _befall(kind: str, amount: int) -> None:
    import torch

    runtime = ctypes.CDLL("libcudart.so.13")
    torch.cuda.empty_cache()
    if kind == "refuse":
        runtime.standin_refuse(amount)
    else:
        runtime.standin_fill_card(0, ctypes.c_ulonglong(amount << 20))
