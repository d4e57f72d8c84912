"""Installs torch's CUDA build into a separate folder, once, and builds the stand-ins that it links to.

The folder comes first on PYTHONPATH, so its torch is imported. All other packages, such as transformers, TRL, PEFT and
bitsandbytes, are those of the present environment, which rehearsals use too.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT

from hollow_cuda.stubs import RUNTIME, Imports, imports_of, rest_of_runtime, write_stubs

HERE = Path(__file__).parent
TORCH = "2.13.0"
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
"""CUDA 13.0, with which this torch is built: the layout of cudaDeviceProp depends on the version."""
CACHE = Path(sys.prefix) / "cuda_build"
"""The scripts' default folder for downloads and builds."""
LINKED = ("torch", "torch_cpu", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_global_deps", "torch_nvshmem")
OTHERS_LINKED = ("libc10_cuda.so", "libcaffe2_nvrtc.so", "libshm.so")
BITSANDBYTES = "libbitsandbytes_cuda130.so"
NVML = "libnvidia-ml.so.1"
NOT_REWRITTEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES")
VERSIONS = f"{RUNTIME} {{ global: cuda*; __cuda*; standin_*; local: *; }};"
"""A linker version script: symbols of libcudart carry its SONAME as version, and the loader requires that."""


def fetch(cache: Path) -> Path:
    """Returns torch's wheel, which pip downloads once (530 MB). CUDA's headers are unpacked beside it.

    It is the wheel that ``pip install torch`` installs on Linux. The version is requested with ``===``, so that pip
    never takes a CPU wheel of the same version (``2.13.0+cpu``), whatever its index.
    """
    downloads = cache / "downloads"
    if not (downloads / ".fetched").exists():
        print(f"Fetching torch {TORCH} for CUDA (530 MB) and headers into {downloads} ...", flush=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        wanted = (f"torch==={TORCH}", *HEADERS)
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", str(downloads), *wanted], check=True)
        for path in downloads.glob("nvidia_cuda_*.whl"):
            shutil.unpack_archive(path, cache / "headers", "zip")
        (downloads / ".fetched").touch()
    (wheel,) = downloads.glob("torch-*.whl")
    return wheel


@dataclass(frozen=True, slots=True)
class Hollow:
    """The folder of a finished build."""

    cache: Path

    @property
    def packages(self) -> Path:
        return self.cache / "packages"

    @property
    def libraries(self) -> Path:
        return self.cache / "libraries"

    @property
    def libraries_with_values(self) -> Path:
        """The runtime and NVML of the device that computes; they come before ``libraries`` on the search path."""
        return self.cache / "libraries-with-values"

    def environment(self, capacity_bytes: int, allocator: str) -> dict[str, str]:
        """Returns the environment of a process that imports this torch and has a device of ``capacity_bytes``."""
        rest = {name: value for name, value in os.environ.items() if name not in NOT_REWRITTEN}
        return rest | {
            "PYTHONPATH": os.pathsep.join(map(str, (self.packages, ROOT / "scripts", ROOT))),
            "LD_LIBRARY_PATH": str(self.libraries),
            "HOLLOW_CAPACITY": str(capacity_bytes),
            "PYTORCH_ALLOC_CONF": allocator,
        }

    def environment_with_values(self, ledger: Path) -> dict[str, str]:
        """Returns variables for a command whose processes share cards that compute; nvml.c lists further variables.
        ``ledger``: the folder in which the processes record the memory that they hold."""
        packages = (HERE / "site", self.packages, ROOT / "scripts", ROOT)
        return {
            "PYTHONPATH": os.pathsep.join(map(str, packages)),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, (self.libraries_with_values, self.libraries))),
            "HOLLOW_LEDGER": str(ledger),
            "HOLLOW_VALUES": "1",
            "HOLLOW_CARD": "a100",  # for an H100, plans use cuDNN's attention; its stand-in cannot size its workspaces
            "TORCH_SYMBOLIZE_MODE": "dladdr",
        }


def build(cache: Path) -> Hollow:
    """Builds what is missing, and rebuilds the libraries if their sources are newer."""
    hollow = Hollow(cache)
    if not (hollow.packages / ".installed").exists():
        wheel = fetch(cache)
        shutil.rmtree(hollow.packages, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*pip, "--target", str(hollow.packages), str(wheel)], check=True)
        (hollow.packages / ".installed").touch()
    runtime = hollow.libraries_with_values / RUNTIME
    sources = [*HERE.glob("*.[ch]"), HERE / "stubs.py", Path(__file__)]
    if not runtime.exists() or runtime.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        print(f"Compiling stand-ins for NVIDIA's libraries into {hollow.libraries} ...", flush=True)
        torch = hollow.packages / "torch" / "lib"
        linked = [torch / name for name in (*(f"lib{name}.so" for name in LINKED), *OTHERS_LINKED)]
        bitsandbytes = importlib.util.find_spec("bitsandbytes")
        if bitsandbytes is not None and bitsandbytes.submodule_search_locations:
            linked.append(Path(bitsandbytes.submodule_search_locations[0]) / BITSANDBYTES)
        imports = imports_of(path for path in linked if path.exists())
        _compile_runtime(cache, imports, hollow.libraries)
        write_stubs(imports, hollow.libraries)
        _compile_runtime(cache, imports, hollow.libraries_with_values, HERE / "values_memory.c")
    return hollow


def _compile_runtime(cache: Path, imports: Imports, folder: Path, *more: Path) -> None:
    """Compiles NVML and the runtime into a folder. ``imports``: the symbols that the libraries using them import.
    ``more``: further sources of the runtime."""
    folder.mkdir(parents=True, exist_ok=True)
    options = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Werror",
        "-fPIC",
        f"-I{cache}/headers/nvidia/cu13/include",
    ]

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        subprocess.run(["gcc", "-c", *options, str(source), "-o", str(out)], check=True)
        return out

    def link(name: str, objects: Iterable[Path], *options: str) -> None:
        shared = ["gcc", "-shared", *map(str, objects), f"-Wl,-soname,{name}", *options]
        subprocess.run([*shared, "-o", str(folder / name)], check=True)

    link(NVML, [compiled(HERE / "nvml.c")])
    objects = [compiled(path) for path in (HERE / "cudart_memory.c", HERE / "cudart_device.c", *more)]
    rest, versions = folder / "cudart_rest.c", folder / "libcudart.map"
    rest.write_text(rest_of_runtime(imports, objects), encoding="utf-8")
    versions.write_text(VERSIONS, encoding="utf-8")
    options.append("-fno-builtin")
    link(RUNTIME, [*objects, compiled(rest)], f"-Wl,--version-script={versions}")
