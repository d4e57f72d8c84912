"""Saves and restores torch's random state, so that a repetition draws what the first try drew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RngState:
    """Holds the state of the CPU's generator, and of the current device's where CUDA is in use."""

    cpu: Any
    device: Any

    @classmethod
    def now(cls) -> RngState:
        import torch

        device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(cpu=torch.get_rng_state(), device=device)

    def restore(self) -> None:
        """Go back: what is drawn next is what was drawn from here on before."""
        import torch

        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)
