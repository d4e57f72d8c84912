"""Mixed precision in float16 on CPU tensors, as it is on a card: autocast to float16, and a scaler of the loss.

On a CPU accelerate takes ``mixed_precision="fp16"`` and drops it without a word (``accelerate/accelerator.py:
Accelerator.__init__``, which asks for a device other than ``cpu``). Here it is kept, so that attention's kernels are
those that the card picks for float16, and weights and layers in float16 meet activations in float16: rehearsed as
bfloat16 they would be cast at every product.

Under a fake mode the scaler is one that is switched off: whether gradients are finite is a value, and its own tensors
are a few scalars.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch._guards import detect_fake_mode


@contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """Inside, an accelerator made for fp16 has its autocast and its scaler on the CPU too."""
    build = Accelerator.__init__

    def keeping(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
        build(accelerator, *args, **kwargs)
        if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", enabled=detect_fake_mode() is None)

    with patch.object(Accelerator, "__init__", keeping):
        yield
