"""Adds an optimizer that lives on the host: the device holds only weights and gradients.

On one GPU neither TRL nor transformers offers this without DeepSpeed, whose optimizer (``deepspeed/ops/adam/
cpu_adam.py: DeepSpeedCPUAdam``) compiles C++ on the user's machine; torchao's (``torchao/optim/cpu_offload.py:
CPUOffloadOptimizer``) shows the trainer one group per parameter and saves a state of its own shape. Here torch's own
optimizer steps on host tensors, in the trainer's groups, and its checkpoint is the one that the same optimizer would
write on the device: a run may resume with or without the offload.

Host memory, in bytes per trained parameter: the weight twice (a copy of it, and its gradient, both pinned; torch's
pinned allocator rounds each tensor up to a power of two, ``aten/src/ATen/core/CachingHostAllocator.h: allocate``), and
the optimizer's state, which is never moved and not pinned. Qwen2.5-0.5B in bfloat16 with AdamW: 494 M parameters x
(2 + 2 + 4) = 3.7 GiB, with rounding at most 5.5 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autotrain_mem.settings.optimizer_verdicts import optimizer_of
from autotrain_mem.support.errors import UsageError

SUPPORTED = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Names of ``--optim`` whose optimizer is torch's own, and so runs on host tensors as it does on the device's."""


def on_host(work: Callable[[], None]) -> None:
    """Runs all that the optimizer makes and computes on the host.

    The one place where host is told from device: a rehearsal, whose tensors are all of the CPU, puts here what keeps
    the work out of its record.
    """
    work()


def offload_to_host(trainer: Any) -> None:
    """Makes this transformers Trainer step on the host, with the optimizer that its ``--optim`` names.

    Call it between building the trainer and ``train()``.

    Raises:
        UsageError: the optimizer, the precision or the sharding does not go with it.
    """
    name = optimizer_of(trainer.args)
    if name not in SUPPORTED:
        raise UsageError(
            f"--optimizer_offload does not work with --optim {name}, which has no form that runs on the host.",
            hint=f"Use one of --optim {', '.join(SUPPORTED)}; or leave the optimizer on the device.",
        )
    if trainer.args.fp16:
        raise UsageError(
            "--optimizer_offload does not work with --fp16: the loss scaler unscales gradients where the optimizer is.",
            hint="Use --bf16, or leave the optimizer on the device.",
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UsageError(
            "--optimizer_offload is for weights that are whole on each GPU, and FSDP and DeepSpeed shard them.",
            hint="Use their own offload: fsdp_offload_params, or offload_optimizer in DeepSpeed's configuration.",
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UsageError(
            "--optimizer_offload makes the optimizer that --optim names, and this trainer was given one.",
            hint="Leave out optimizers= and optimizer_cls_and_kwargs=, or leave the optimizer on the device.",
        )
    kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    trainer.optimizer_cls_and_kwargs = (HostOptimizer, {"inner": kind, **options})


class _HostParameter:
    """A parameter on the device, its copy on the host, and room on the host for its gradient."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.device = parameter
        self.host, self._gradient = _room_on_host(parameter), _room_on_host(parameter)
        self._version = -1
        """``device._version`` when the two were last alike: whoever writes the parameter, as loading weights does,
        counts it up."""

    def fetch(self) -> None:
        """Brings over what the step needs; done when the device's stream is."""
        if self.device._version != self._version:
            self.host.copy_(self.device, non_blocking=True)
        self.host.grad = None
        if self.device.grad is not None:
            self.host.grad = self._gradient.copy_(self.device.grad, non_blocking=True)

    def send(self) -> None:
        """Copies the parameter to the device. Whatever the device's stream does next comes after."""
        if self.host.grad is not None:
            self.device.copy_(self.host, non_blocking=True)
        self._version = self.device._version


def _room_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Makes room that is laid out like ``tensor``: a copy between layouts would need a temporary on the device
    (``aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries``). To a pinned target it runs beside the others."""
    pinned = tensor.device.type != "cpu"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)


class HostOptimizer(Optimizer):  # type: ignore[misc]  # torch is untyped to mypy here
    """Steps on the host, with ``inner`` on copies of the parameters. To trainer and scheduler it is one like any other.

    Parameter groups are its own, and their options count at every step. State is the inner optimizer's alone: nothing
    that looks at ``.state`` finds bytes to move to the device.

    Args:
        params: Parameters, or groups of them.
        inner: One of torch's optimizers.
        options: What ``inner`` takes beside the parameters.
    """

    def __init__(self, params: Any, inner: type[Optimizer], **options: Any) -> None:
        self._make_inner: Callable[[Any], Any] = lambda groups: inner(groups, **options)
        self._inner: Optimizer | None = None
        self._twins: list[_HostParameter] = []
        super().__init__(params, self._make_inner([torch.empty(0)]).defaults)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Brings gradients to the host, makes one step there, and brings parameters back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_host(self._step)
        return loss

    def _step(self) -> None:
        inner = self._ready()
        for twin in self._twins:
            twin.fetch()
        # Until every copy to the host is there; then those of the step before, to the device, are done too.
        for device in {twin.device.device for twin in self._twins}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        inner.step()
        for twin in self._twins:
            twin.send()

    def _ready(self) -> Optimizer:
        """Returns the inner optimizer with the options of now.

        It is made when first needed: an optimizer that starts with state (Adagrad) would have it carried to the device
        and back by ``accelerate/optimizer.py: AcceleratedOptimizer``, which loads what it has just read.
        """
        if self._inner is None:
            self._twins = [_HostParameter(parameter) for group in self.param_groups for parameter in group["params"]]
            hosts = iter(self._twins)
            groups = [{**group, "params": [next(hosts).host for _ in group["params"]]} for group in self.param_groups]
            self._inner = self._make_inner(groups)
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises once steps were made: their state does not know the newcomers."""
        if self._inner is not None:
            raise RuntimeError("A HostOptimizer takes no new parameters after its first step.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that ``inner`` on the device would have: one can load the other's."""
        state: dict[str, Any] = super().state_dict()
        if self._inner is not None:
            state["state"] = self._inner.state_dict()["state"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options are taken over at once, state goes to the host."""
        super().load_state_dict({**state_dict, "state": {}})
        if state_dict["state"]:
            on_host(lambda: self._ready().load_state_dict(state_dict))
