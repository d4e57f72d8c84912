"""DeepSpeed's Adam for the host without its compiled step, which each machine compiles for itself at the first use."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


class HostAdamBuilder:
    """Stands for ``deepspeed/ops/op_builder/cpu/cpu_adam.py: CPUAdamBuilder``."""

    def load(self) -> Any:
        """Return what is called in the compiled module's place."""
        return _HostAdam()


class _HostAdam:
    """The functions of ``csrc/adam/cpu_adam_impl.cpp``; what they compute lies on the host, and takes no room."""

    def create_adam(self, *_: Any) -> int:
        return 0

    def destroy_adam(self, *_: Any) -> int:
        return 0

    def adam_update(
        self,
        number: int,
        step: int,
        rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        average: torch.Tensor,
        square: torch.Tensor,
    ) -> int:
        """Make a step of AdamW on real tensors, in place; nothing on fake ones.

        torch's own kernel rounds otherwise in the last places.
        """
        if isinstance(parameter, FakeTensor):
            return 0
        settings = {"lr": rate, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            steps = [torch.tensor(float(step))]
            torch._fused_adamw_(
                *([parameter], [gradient], [average], [square], [], steps),
                **settings,
                amsgrad=False,
                maximize=False,
            )
        return 0
