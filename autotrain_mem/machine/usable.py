"""Checks in a process that will use a card that torch can: it may be built for other drivers, or for none.

``torch.cuda.init`` raises with torch's own words (``torch/cuda/__init__.py: _lazy_init``, which calls
``c10/cuda/CUDAFunctions.cpp``), and what a card or a virtual one refuses comes with the first allocation and the first
kernel. transformers says of all of it that the setup does not support bf16.
"""

from __future__ import annotations

import ctypes
import os
import sys

from autotrain_mem.allocator.settings import environment_setting, variable_that_counts
from autotrain_mem.machine.detect import ask_device, nvidia_driver
from autotrain_mem.support.errors import UnreadableGpuError
from autotrain_mem.support.processes import Channel
from autotrain_mem.types.hardware import TURING

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver for each major version of CUDA, which serves all its minor ones (NVIDIA CUDA Compatibility, "Minor
Version Compatibility", table 1)."""
WHEELS = {12: "cu126", 13: "cu130"}
"""Builds at download.pytorch.org, by CUDA's major version (pytorch RELEASE.md, "PyTorch CUDA Support Matrix", from 2.9
on). cu126 alone has kernels for cards before Turing."""
_OTHERWISE = "--gpu NAME --plan_only  plans for a card that is not here\n--use_cpu               trains on the CPU"


def check_usable(index: int, *, grows: bool = False) -> None:
    """Makes ``cuda:index`` this process's current device and runs one kernel on it.

    Without ``set_device`` every rank would open a context on GPU 0 first, hundreds of MiB each that no plan counts.
    ``torch.cuda.init`` opens none (``aten/src/ATen/cuda/detail/CUDAHooks.cpp: CUDAHooks::init``). A full card passes:
    what fills it may end before the memory is needed.

    Args:
        index: The device's index among those that the process sees: the local rank.
        grows: True if this process turned expandable segments on, whatever its environment says.

    Raises:
        UnreadableGpuError: torch cannot use it; holds torch's message and the fix.
    """
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        raise UnreadableGpuError(f"torch cannot use {_name(index)}: {_words(error)}", hint=_cure(index)) from error
    try:
        torch.cuda.set_device(index)
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        if grows or "expandable_segments:True" in environment_setting({}):
            raise UnreadableGpuError(
                f"{_name(index)} refuses expandable segments, as virtual GPUs and some WSL do: {_words(error)}",
                hint=f"--forbid expandable_segments  plans without them; set no expandable_segments:True in "
                f"{variable_that_counts(os.environ)} either.",
            ) from error
        raise UnreadableGpuError(f"torch cannot use {_name(index)}: {_words(error)}", hint=_cure(index)) from error
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(index)


def _words(error: Exception) -> str:
    """Returns a CUDA error without its advice on debugging (``c10/cuda/CUDAMiscFunctions.cpp``)."""
    text = " ".join(str(error).split())
    return text.partition(" CUDA kernel errors might be")[0].partition(" Compile with `TORCH_USE_CUDA_DSA`")[0]


def _cure(index: int) -> str:
    import torch

    name, built_for = f"torch {torch.__version__}", torch.version.cuda
    driver, newest_cuda, _ = nvidia_driver()
    if built_for is None:
        lines = [
            f"{name} is built without CUDA. Install a build for this driver:",
            install_torch(newest_cuda or max(WHEELS)),
        ]
    elif newest_cuda is not None and newest_cuda < (needed := int(built_for.partition(".")[0])):
        oldest = OLDEST_DRIVERS.get(needed, driver)
        lines = [
            f"{name} is built for CUDA {built_for}: it needs driver {oldest} or newer, and {driver} is installed.",
            "Update the driver (https://www.nvidia.com/drivers), or install a torch for the one that is here:",
            install_torch(newest_cuda),
        ]
    elif not _has_libcuda():
        lines = [
            "libcuda.so.1 is not found. In WSL: export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",
            "In a container: start it with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility.",
        ]
    elif (
        (capability := ask_device(index, "nvmlDeviceGetCudaComputeCapability"))
        and tuple(capability) < TURING
        and built_for != "12.6"
    ):
        kernels = f"{name} for CUDA {built_for} has no kernels for cards before Turing, which the build for 12.6 has:"
        lines = [kernels, install_torch(min(WHEELS))]
    else:
        lines = [
            "Where the driver was updated, a reboot may be due. This command shows the same:",
            "python -c 'import torch; torch.ones(1, device=0)'",
        ]
    return "\n".join((*lines, _OTHERWISE))


def install_torch(cuda: int) -> str:
    """Returns the command that installs a build for a driver with this major version of CUDA."""
    if cuda < min(WHEELS):
        return f"(there is none for a driver so old: update it to {OLDEST_DRIVERS[min(WHEELS)]} or newer)"
    wheel = WHEELS[min(cuda, max(WHEELS))]
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}"


def _name(index: int) -> str:
    return ask_device(index, "nvmlDeviceGetName") or "the GPU"


def _has_libcuda() -> bool:
    try:
        return sys.platform == "win32" or bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


def main() -> None:
    """Opens the one card that this process sees, and sends the fields of its ``torch_child.TorchDevice``."""
    channel = Channel(ignore_interrupt=True)
    try:
        import torch

        check_usable(0)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        is_integrated = bool(torch.cuda.get_device_properties(0).is_integrated)
        channel.send({"device": {"total_bytes": total_bytes, "free_bytes": free_bytes, "is_integrated": is_integrated}})
    except UnreadableGpuError as error:
        channel.send({"unusable": error.to_json()})
    except Exception as error:  # whatever stands in the way, the parent does without the figure and says why
        channel.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
    channel.receive()


if __name__ == "__main__":
    main()
