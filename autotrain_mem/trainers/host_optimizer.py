"""Adds an optimizer on the host, so that the device holds only weights and gradients.

On one GPU, TRL and transformers offer this only with DeepSpeed, whose optimizer (``deepspeed/ops/adam/cpu_adam.py:
DeepSpeedCPUAdam``) compiles C++ on the user's machine. Here torch's own optimizer steps on host tensors, with the
trainer's parameter groups. A run can be resumed from its checkpoints with or without the offload.

Weights in half precision have a float32 copy on the host, which the optimizer updates, so rounding loses no update; the
device gets the rounded copy. Each trained parameter takes pinned host memory for its gradient, and for its copy if that
is sent as it is. torch rounds each pinned tensor up to a power of two (``aten/src/ATen/core/CachingHostAllocator.h:
allocate``). Qwen2.5-0.5B in bfloat16 with AdamW: 494 M parameters x 2 bytes pinned, and x (4 + 4 + 8) for the copies,
their gradients and the moments: 8.3 GiB.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from autotrain_mem.settings.optimizer_verdicts import OF_TORCH, optimizer_of
from autotrain_mem.support.errors import UsageError

MASTERS = "masters"
"""Key of the float32 copies in a saved state, in the order of the parameters. Other optimizers ignore it."""


def on_host(work: Callable[[], None]) -> None:
    """Runs the optimizer's work on the host. A rehearsal replaces this function, so that the work is not recorded."""
    work()


def offload_to_host(trainer: Any) -> None:
    """Makes a transformers Trainer step on the host. Must be called before ``train()``. Raises UsageError if the
    optimizer or the sharding does not allow it."""
    if (name := optimizer_of(trainer.args)) not in OF_TORCH:
        raise UsageError(
            f"--optimizer_offload does not work with --optim {name}, which cannot run on the host.",
            hint=f"Use one of --optim {', '.join(OF_TORCH)}; or leave the optimizer on the device.",
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UsageError(
            "--optimizer_offload needs whole weights on each GPU, but FSDP and DeepSpeed shard them.",
            hint="Use their own offload: fsdp_offload_params, or offload_optimizer in DeepSpeed's configuration.",
        )
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        raise UsageError(
            "--optimizer_offload creates the optimizer that --optim names, but this trainer was given one.",
            hint="Remove optimizers= and optimizer_cls_and_kwargs=, or leave the optimizer on the device.",
        )
    kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    trainer.optimizer_cls_and_kwargs = (HostOptimizer, {"inner": kind, **options})


class _HostParameter:
    """Holds a parameter on the device, its copy on the host, and a host buffer in the device's precision."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.device, self.buffer = parameter, _room_on_host(parameter)
        self.is_rounded = master_bytes(parameter) > 0
        self.host = torch.empty_like(self.buffer, dtype=torch.float32) if self.is_rounded else _room_on_host(parameter)
        self._version = -1
        """The value of ``device._version`` when both copies were last equal. Each write to ``device`` increases it."""

    def fetch(self) -> None:
        """Starts copying the gradient to the host, and also the parameter if it changed."""
        if self.device._version != self._version:
            # With a cast, only a blocking copy takes no memory on the device (``aten/src/ATen/native/cuda/Copy.cu``).
            self.host.copy_(self.device, non_blocking=not self.is_rounded)
        if self.device.grad is not None:
            self.buffer.copy_(self.device.grad, non_blocking=True)

    def adopt(self, master: torch.Tensor) -> None:
        """Takes a saved float32 copy if the parameter is that copy, rounded."""
        if torch.equal(self.buffer.copy_(master), self.device.detach().cpu()):
            self.host.copy_(master)
            self._version = self.device._version

    def send(self) -> None:
        """Starts copying the parameter to the device."""
        if self.host.grad is not None:
            rounded = self.buffer.copy_(self.host) if self.is_rounded else self.host
            self.device.copy_(rounded, non_blocking=True)
            self.host.grad = None
        self._version = self.device._version


def master_bytes(parameter: torch.Tensor) -> int:
    """Returns the bytes of a parameter's float32 copy on the host; 0 if it is not in half precision and needs none."""
    is_half = parameter.dtype in (torch.bfloat16, torch.float16)
    return parameter.numel() * torch.float32.itemsize if is_half else 0


def _room_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a host buffer for a tensor, pinned if the tensor is on a device. It has the same layout: other copies
    need a temporary on the device (``aten/src/ATen/native/cuda/Copy.cu: copy_requires_temporaries``)."""
    pinned = tensor.device.type != "cpu"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)


class HostOptimizer(Optimizer):  # type: ignore[misc]  # torch is untyped to mypy here
    """Runs torch's optimizer ``inner`` on host copies of the parameters. Trainer and scheduler use it as any optimizer.

    It reads the options of its groups at every step. Its own ``state`` is empty, so that no state moves to the device.
    The scaler of fp16 unscales the device's gradients before ``step``; a fused ``inner`` does it itself.

    Args:
        params: The parameters, or groups of parameters.
        inner: A class of torch's optimizers.
        options: Further arguments of ``inner``.
    """

    def __init__(self, params: Any, inner: type[Optimizer], **options: Any) -> None:
        self._make_inner: Callable[[Any], Any] = lambda groups: inner(groups, **options)
        self._inner: Optimizer | None = None
        self._twins: list[_HostParameter] = []
        super().__init__(params, self._make_inner([torch.empty(0)]).defaults)
        self._step_supports_amp_scaling = bool(self.defaults.get("fused"))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Copies gradients to the host, steps there, and copies parameters back to the device."""
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
        # Waits for all copies to the host. The previous step's copies to the device are then also complete.
        for device in {twin.device.device for twin in self._twins}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        for twin in self._twins:
            twin.host.grad = None if twin.device.grad is None else twin.buffer.to(twin.host.dtype)
        for name in ("grad_scale", "found_inf"):  # as torch/amp/grad_scaler.py: GradScaler.step sets for a fused one
            figure = getattr(self, name, None)
            setattr(inner, name, None if figure is None else figure.cpu())
        inner.step()
        for twin in self._twins:
            twin.send()

    def _ready(self) -> Optimizer:
        """Returns the inner optimizer with the current options. It is created at first use: accelerate would copy an
        initial state such as Adagrad's to the device and back (``accelerate/optimizer.py: AcceleratedOptimizer``)."""
        if self._inner is None:
            self._twins = [_HostParameter(parameter) for group in self.param_groups for parameter in group["params"]]
            hosts = iter(self._twins)
            groups = [{**group, "params": [next(hosts).host for _ in group["params"]]} for group in self.param_groups]
            self._inner = self._make_inner(groups)
        for ours, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs.update({name: value for name, value in ours.items() if name != "params"})
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters. Raises RuntimeError after the first step, when the inner optimizer exists."""
        if self._inner is not None:
            raise RuntimeError("A HostOptimizer takes no new parameters after its first step.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that ``inner`` would have on the device, so that a run can resume without the offload, and
        the float32 copies of parameters in half precision."""
        state: dict[str, Any] = super().state_dict()
        if self._inner is not None:
            state["state"] = self._inner.state_dict()["state"]
            state[MASTERS] = [twin.host if twin.is_rounded else None for twin in self._twins]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the groups' options here, and the state into the inner optimizer on the host. A float32 copy is loaded
        if the parameter on the device is the one that it was saved with."""
        super().load_state_dict({**state_dict, "state": {}})
        if state_dict["state"]:
            on_host(lambda: self._load(state_dict))

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._ready().load_state_dict(state_dict)
        for twin, master in zip(self._twins, state_dict.get(MASTERS, ()), strict=False):
            if twin.is_rounded and master is not None:
                twin.adopt(master)
