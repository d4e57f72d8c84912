"""Checks that torch and other packages with GPU code can use a card, in this process or in a child process.

A child (``python -m autotrain_mem.machine.usable``) protects the parent from imports that crash or hang, and from a
CUDA context, which takes memory until its process exits.
"""

import contextlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.allocator.settings import environment_setting, variable_that_counts
from autotrain_mem.machine.nvml import nvidia_driver
from autotrain_mem.support.errors import UnreadableGpuError, described
from autotrain_mem.support.processes import Channel, Child, ChildDied, ChildTimeout
from autotrain_mem.types.hardware import TURING

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver for each major version of CUDA (NVIDIA CUDA Compatibility, "Minor Version Compatibility", table 1)."""
WHEELS = {12: "cu126", 13: "cu130"}
"""Builds at download.pytorch.org, by CUDA's major version (pytorch RELEASE.md, "PyTorch CUDA Support Matrix", from 2.9
on). cu126 alone has kernels for cards before Turing."""
_OTHERWISE = "--gpu NAME --plan_only  plans for a card that is not here\n--use_cpu               trains on the CPU"
_UNEXPLAINED = """\
An updated driver may need a reboot; a container needs --gpus all and
NVIDIA_DRIVER_CAPABILITIES=compute,utility; WSL needs /usr/lib/wsl/lib in LD_LIBRARY_PATH. To reproduce it:
python -c 'import torch; torch.ones(1, device=0)'"""
TIME_LIMIT_SECONDS = 120.0
"""Limit for a child's answer. Importing torch takes 5 s from a warm disk, a minute from a network disk."""


def check_usable(index: int, *, grows: bool = False) -> None:
    """Makes ``cuda:index`` this process's current device and runs one kernel on it. Raises UnreadableGpuError, with
    torch's message and the fix, if torch cannot use the device.

    Without ``set_device`` every rank would also open a context on GPU 0, hundreds of MiB that no plan counts.
    ``torch.cuda.init`` opens none (``aten/src/ATen/cuda/detail/CUDAHooks.cpp: CUDAHooks::init``). A full card passes.
    ``index``: the device's index among those that the process sees: the local rank. ``grows``: whether this process
    turned expandable segments on itself, without a variable of its environment."""
    import torch

    name = "the GPU"
    try:
        torch.cuda.init()
        name = torch.cuda.get_device_name(index)
        torch.cuda.set_device(index)
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except torch.OutOfMemoryError:
        return
    except (AssertionError, RuntimeError) as error:
        # Removes the advice on debugging (c10/cuda/CUDAMiscFunctions.cpp).
        words = " ".join(str(error).split()).partition(" CUDA kernel errors might be")[0]
        words = words.partition(" Compile with `TORCH_USE_CUDA_DSA`")[0]
        if torch.cuda.is_initialized() and (grows or "expandable_segments:True" in environment_setting({})):
            raise UnreadableGpuError(
                f"{name} refuses expandable segments, as virtual GPUs and some WSL do: {words}",
                hint=f"--forbid expandable_segments  plans without them; also remove expandable_segments:True from "
                f"{variable_that_counts(os.environ)}.",
            ) from error
        raise UnreadableGpuError(f"torch cannot use {name}: {words}", hint=f"{_cure(index)}\n{_OTHERWISE}") from error
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(index)


def _cure(index: int) -> str:
    import torch

    name, built_for = f"torch {torch.__version__}", torch.version.cuda
    driver, newest_cuda, _ = nvidia_driver()
    if built_for is None:
        install = install_torch(newest_cuda or max(WHEELS))
        return f"{name} is built without CUDA. Install a build for this driver:\n{install}"
    needed = int(built_for.partition(".")[0])
    if newest_cuda is not None and newest_cuda < needed:
        return (
            f"{name} is built for CUDA {built_for}: it needs driver {OLDEST_DRIVERS.get(needed, '')} or newer, and "
            f"{driver} is installed.\nUpdate the driver (https://www.nvidia.com/drivers), or install a torch for "
            f"the present driver:\n{install_torch(newest_cuda)}"
        )
    if torch.cuda.is_initialized() and torch.cuda.get_device_capability(index) < TURING and built_for != "12.6":
        install = install_torch(min(WHEELS))
        return f"{name} for CUDA {built_for} has no kernels for pre-Turing cards. The 12.6 build has them:\n{install}"
    return _UNEXPLAINED


def install_torch(cuda: int) -> str:
    """Returns the command that installs a build for a driver with this major version of CUDA."""
    if cuda < min(WHEELS):
        return f"(there is none for this driver: update it to {OLDEST_DRIVERS[min(WHEELS)]} or newer)"
    wheel = WHEELS[min(cuda, max(WHEELS))]
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}"


class NoAnswer(Exception):
    """Raised when a package cannot be imported, or its child dies or hangs; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPackage:
    """Describes an imported package with GPU code; the fields from ``cuda`` on are set only for torch."""

    problem: str = ""
    """Why it cannot use the GPU; empty if it can, or if it was not tried."""
    fix: str = ""
    cuda: str = ""
    """The version of CUDA that torch is built for."""
    nccl: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    """Free memory of the first card once the child has a context."""
    is_integrated: bool = False
    """True if the first card's memory is the host's (``cudaDeviceProp.integrated``)."""


def examine_package(
    package: str, environment: Mapping[str, str], limit_seconds: float = TIME_LIMIT_SECONDS
) -> GpuPackage:
    """Imports a package in a child; torch and bitsandbytes also run a kernel on the first visible card.
    ``environment``: variables of the child, which override this process's. Raises NoAnswer if the import failed, or
    the child died or hung."""
    child = Child("autotrain_mem.machine.usable", environment)
    try:
        child.send({"package": package})
        answer = child.receive(limit_seconds)
    except ChildTimeout as timeout:
        raise NoAnswer(f"no answer within {limit_seconds:.0f} s") from timeout
    except ChildDied as death:
        raise NoAnswer(f"the process ended with status {death.code}") from death
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()
    if "error" in answer:
        raise NoAnswer(answer["error"])
    return GpuPackage(**answer)


def main() -> None:
    """Imports the package that the parent names, and sends the fields of its ``GpuPackage`` or the error."""
    channel = Channel(ignore_interrupt=True)
    try:
        package = str(channel.receive()["package"])
        module, found = importlib.import_module(package), dict[str, Any]()
        try:
            if package == "torch":
                found["cuda"] = module.version.cuda or ""
                with contextlib.suppress(Exception):  # a build without NCCL has no such function
                    found["nccl"] = ".".join(map(str, module.cuda.nccl.version()))
                check_usable(0)
                found["free_bytes"], found["total_bytes"] = module.cuda.mem_get_info()
                found["is_integrated"] = bool(module.cuda.get_device_properties(0).is_integrated)
            elif package == "bitsandbytes":
                import torch

                if torch.cuda.is_available():
                    module.functional.quantize_4bit(torch.ones(64, 64, device="cuda", dtype=torch.float16))
        except UnreadableGpuError as error:
            found |= {"problem": error.message, "fix": error.hint}
        except Exception as error:
            found["problem"] = " ".join(str(error).split())[:300]
        channel.send(found)
    except BaseException as error:
        channel.send({"error": described(error)[:300]})


if __name__ == "__main__":
    main()
