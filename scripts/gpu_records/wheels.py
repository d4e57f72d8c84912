"""Packages from a folder of wheels, for a machine without a network."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NEEDED = (
    *("trl", "peft", "accelerate", "datasets", "bitsandbytes", "nvidia-ml-py"),
    *("pyarrow", "pandas", "dill", "multiprocess", "xxhash", "requests", "psutil", "platformdirs"),
)
"""All that the recording needs beyond torch and transformers, and what these bring along."""
NEVER_REPLACED = ("torch", "triton")


def missing_wheels(folder: Path) -> list[Path]:
    """Wheels of packages that are not installed in that version. torch itself is never taken from there."""
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_here(*_name_and_version(wheel))]


def install(folder: Path, target: Path) -> Path:
    """Put what is missing into ``target``, for PYTHONPATH."""
    wheels = missing_wheels(folder)
    marker = target / ".installed"
    names = "\n".join(wheel.name for wheel in wheels)
    if wheels and not (marker.is_file() and marker.read_text(encoding="utf-8") == names):
        options = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(target)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
        marker.write_text(names, encoding="utf-8")
    target.mkdir(parents=True, exist_ok=True)
    return target


def not_importable(packages: Path | None, names: Iterable[str] = NEEDED) -> list[str]:
    """Those of the needed packages that are neither installed nor in ``packages``."""
    places = [*([str(packages)] if packages else []), *sys.path]
    found = {_plain(one.metadata["Name"]) for one in importlib.metadata.distributions(path=places)}
    return [name for name in names if _plain(name) not in found]


def _is_here(name: str, version: str) -> bool:
    if name in NEVER_REPLACED:
        return True
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _name_and_version(wheel: Path) -> tuple[str, str]:
    name, version = wheel.name.split("-")[:2]
    return _plain(name), version


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
