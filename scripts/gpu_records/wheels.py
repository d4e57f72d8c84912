"""Installs packages from a folder of wheels, for a machine without a network."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

NEEDED = (
    *("trl", "peft", "accelerate", "datasets", "bitsandbytes", "nvidia-ml-py"),
    *("pyarrow", "pandas", "dill", "multiprocess", "xxhash", "requests", "psutil", "platformdirs"),
)
"""The packages that recording needs besides torch, transformers and their dependencies."""
NEVER_REPLACED = ("torch", "triton")


def install(folder: Path, target: Path) -> Path:
    """Installs into ``target`` the wheels whose version is not installed; ``target`` is for PYTHONPATH."""
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_here(wheel)]
    marker = target / ".installed"
    names = "\n".join(wheel.name for wheel in wheels)
    if wheels and not (marker.is_file() and marker.read_text(encoding="utf-8") == names):
        options = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(target)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
        marker.write_text(names, encoding="utf-8")
    target.mkdir(parents=True, exist_ok=True)
    return target


def not_importable(packages: Path | None) -> list[str]:
    """Returns the needed packages that are neither installed nor in ``packages``."""
    places = [*([str(packages)] if packages else []), *sys.path]
    found = {_plain(one.metadata["Name"]) for one in importlib.metadata.distributions(path=places)}
    return [name for name in NEEDED if _plain(name) not in found]


def _is_here(wheel: Path) -> bool:
    name, version = wheel.name.split("-")[:2]
    if _plain(name) in NEVER_REPLACED:
        return True
    try:
        return importlib.metadata.version(_plain(name)) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
