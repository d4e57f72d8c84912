"""Imports one package and says what it found: in a process of its own, since an import may crash or never end."""

from __future__ import annotations

import importlib
from typing import Any

from autotrain_mem.support.processes import Channel


def examine(package: str) -> dict[str, Any]:
    """Imports the package, and runs what shows that it works."""
    return {"torch": _torch, "bitsandbytes": _bitsandbytes}.get(package, _plain)(package)


def _plain(package: str) -> dict[str, Any]:
    importlib.import_module(package)
    return {}


def _torch(package: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda or "", "hip": getattr(torch.version, "hip", None) or ""}
    found["archs"] = " ".join(torch.cuda.get_arch_list()) if torch.version.cuda else ""
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without NCCL has no such function
        found["nccl"] = ""
    if torch.version.cuda or found["hip"]:
        try:
            torch.ones(1, device="cuda").add_(1).item()
            found["works"] = "yes"
        except Exception as error:
            found["problem"] = " ".join(str(error).split())[:300]
    return found


def _bitsandbytes(package: str) -> dict[str, Any]:
    import bitsandbytes
    import torch

    if not torch.cuda.is_available():
        return {}
    try:
        bitsandbytes.functional.quantize_4bit(torch.ones(64, 64, device="cuda", dtype=torch.float16))
        return {"works": "yes"}
    except Exception as error:
        return {"problem": " ".join(str(error).split())[:300]}


def main() -> None:
    """Receives the name of a package, and answers what became of its import."""
    channel = Channel(ignore_interrupt=True)
    try:
        found = examine(str((channel.receive() or {})["package"]))
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    channel.send(found)


if __name__ == "__main__":
    main()
