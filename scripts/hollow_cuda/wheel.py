"""The CUDA build of torch that is examined without a GPU, and the headers that it was built with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TORCH = "2.13.0"
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
"""CUDA 13.0, which this torch is built with: the layout of cudaDeviceProp depends on it."""
CACHE = Path(sys.prefix) / "cuda_build"
"""Where the scripts that examine it keep what they fetch and build, unless they are told otherwise."""


def fetch(cache: Path) -> Path:
    """The wheel, which pip fetches once (530 MB). The headers lie in ``headers_of(cache)`` then.

    It is the wheel that ``pip install torch`` takes on Linux. Its version is asked for with ``===``, which a wheel of
    the same version for the CPU does not meet (``2.13.0+cpu``), wherever pip is told to look.
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


def headers_of(cache: Path) -> Path:
    """The folder for the compiler's ``-I``."""
    return cache / "headers" / "nvidia" / "cu13" / "include"
