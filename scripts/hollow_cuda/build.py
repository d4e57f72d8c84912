"""Builds, once, all that a run needs: torch's CUDA build in a folder of its own, and the stand-ins that it links to.

Everything else comes from the environment that builds: the folder goes before it on PYTHONPATH, so that its torch is
the one that is imported, and transformers, TRL, PEFT and bitsandbytes are those that rehearsals use.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hollow_cuda.stubs import RUNTIME, imports_of, write_stubs
from hollow_cuda.wheel import fetch, headers_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
REAL_ALLOCATOR = ROOT / "scripts" / "real_allocator"
LINKED = ("torch", "torch_cpu", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_global_deps", "torch_nvshmem")
OTHERS_LINKED = ("libc10_cuda.so", "libcaffe2_nvrtc.so", "libshm.so")
BITSANDBYTES = "libbitsandbytes_cuda130.so"
RENAMED = {"cudaGetDeviceProperties": "standin_properties", "cudaEventQuery": "standin_event_query"}
"""Functions of cudart_standin.c that are other ones here (cudart_device.c)."""
NOT_REWRITTEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Hollow:
    """A folder in which all of it is."""

    cache: Path

    @property
    def packages(self) -> Path:
        """torch's CUDA build."""
        return self.cache / "packages"

    @property
    def libraries(self) -> Path:
        """The stand-ins."""
        return self.cache / "libraries"

    @property
    def libraries_with_values(self) -> Path:
        """Those of the runtime and of NVML whose device holds values; they go before the others."""
        return self.cache / "libraries-with-values"

    def environment(self, capacity_bytes: int, allocator: str) -> dict[str, str]:
        """Of a process that imports that torch, and finds a device of so many bytes."""
        rest = {name: value for name, value in os.environ.items() if name not in NOT_REWRITTEN}
        return rest | {
            "PYTHONPATH": os.pathsep.join(map(str, (self.packages, ROOT / "scripts", ROOT))),
            "LD_LIBRARY_PATH": str(self.libraries),
            "HOLLOW_CAPACITY": str(capacity_bytes),
            "PYTORCH_ALLOC_CONF": allocator,
            "TORCH_SYMBOLIZE_MODE": "dladdr",  # names of C++ functions, which is all that the history is asked for
        }

    def environment_with_values(self, ledger: Path) -> dict[str, str]:
        """Over that of a command, whose processes then share cards that compute; values_nvml.c says how many and which.

        Args:
            ledger: A folder that says which process holds what.
        """
        packages = (HERE / "site", self.packages, ROOT / "scripts", ROOT)
        return {
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, (self.libraries_with_values, self.libraries))),
            "HOLLOW_LEDGER": str(ledger),
            "HOLLOW_VALUES": "1",
            "HOLLOW_CARD": "a100",  # on an H100 plans are for cuDNN's attention, whose stand-in cannot size its plans
            "TORCH_SYMBOLIZE_MODE": "dladdr",
        }


def build(cache: Path) -> Hollow:
    """What is missing is made, or made anew where its sources are newer."""
    hollow = Hollow(cache)
    if not (hollow.packages / ".installed").exists():
        _install(hollow)
    runtime = hollow.libraries_with_values / RUNTIME
    sources = [path for folder in (HERE, REAL_ALLOCATOR) for path in folder.glob("*.[ch]*")]
    sources += [HERE / "stubs.py", HERE / "libcudart.map", Path(__file__)]
    if not runtime.exists() or runtime.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        _compile(hollow)
    return hollow


def _install(hollow: Hollow) -> None:
    wheel = fetch(hollow.cache)
    shutil.rmtree(hollow.packages, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
    subprocess.run([*pip, "--target", str(hollow.packages), str(wheel)], check=True)
    (hollow.packages / ".installed").touch()


def _compile(hollow: Hollow) -> None:
    print(f"Compiling stand-ins for NVIDIA's libraries into {hollow.libraries} ...", flush=True)
    hollow.libraries.mkdir(parents=True, exist_ok=True)
    torch = hollow.packages / "torch" / "lib"
    linked = [torch / name for name in (*(f"lib{name}.so" for name in LINKED), *OTHERS_LINKED)]
    bitsandbytes = importlib.util.find_spec("bitsandbytes")
    if bitsandbytes is not None and bitsandbytes.submodule_search_locations:
        linked.append(Path(bitsandbytes.submodule_search_locations[0]) / BITSANDBYTES)
    write_stubs(imports_of(path for path in linked if path.exists()), hollow.libraries)

    _compile_nvml(REAL_ALLOCATOR / "nvml_standin.c", hollow.libraries)
    _compile_nvml(HERE / "values_nvml.c", hollow.libraries_with_values)
    runtime = [REAL_ALLOCATOR / "cudart_standin.c", HERE / "cudart_device.c", HERE / "cudart_nothing.c"]
    _compile_runtime(hollow, runtime, hollow.libraries)
    _compile_runtime(hollow, [*runtime, HERE / "values_memory.c"], hollow.libraries_with_values)


def _compile_nvml(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "libnvidia-ml.so.1"
    options = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *options, str(source), f"-Wl,-soname,{name}", "-o", str(folder / name)], check=True)


def _compile_runtime(hollow: Hollow, sources: list[Path], folder: Path) -> None:
    objects = [folder / f"{path.stem}.o" for path in sources]
    for path, compiled in zip(sources, objects, strict=True):
        renamed = [f"-D{old}={new}" for old, new in RENAMED.items()] if path.parent == REAL_ALLOCATOR else []
        include = f"-I{headers_of(hollow.cache)}"
        options = ["-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", include, *renamed]
        subprocess.run(["gcc", "-c", *options, str(path), "-o", str(compiled)], check=True)
    shared = ["gcc", "-shared", *map(str, objects), f"-Wl,-soname,{RUNTIME}"]
    version = f"-Wl,--version-script={HERE / 'libcudart.map'}"
    subprocess.run([*shared, version, "-o", str(folder / RUNTIME)], check=True)
