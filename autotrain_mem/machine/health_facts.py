"""Observes a machine; nothing here judges. Packages are imported in children: ``python -m machine.health_facts``."""

from __future__ import annotations

import contextlib
import importlib
import locale
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.machine.catalog import recognise
from autotrain_mem.machine.choose import unplanned_gpus
from autotrain_mem.machine.detect import detect, nvidia_driver
from autotrain_mem.machine.measure import others_on
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.host import existing, host_memory, missing_to_compile
from autotrain_mem.support.processes import Channel, Child, ChildDied, ChildTimeout
from autotrain_mem.support.store import cache_folder
from autotrain_mem.support.versions import installed_versions
from autotrain_mem.types import Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """Holds what became of importing a package in a process of its own."""

    version: str | None = None
    """None where it is not installed."""
    error: str = ""
    """Why it cannot be imported, in one line; empty where it can."""
    problem: str = ""
    """Why it cannot use the GPU, in one line; empty where it can, or was not asked to."""
    details: Mapping[str, str] = field(default_factory=dict)
    """``cuda``, ``archs``, ``nccl`` of torch; what the child found beside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    purpose: str
    """The variable that names it, such as ``HF_HOME``; ``this folder`` for the one that the command runs in."""
    path: str
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    asked: bool
    """False where the environment forbids it."""
    error: str = ""
    """Why it cannot be reached; empty where it answered."""
    has_token: bool = False
    token_error: str = ""
    """Why the token is not taken; empty where there is none, or it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    system: str = "Linux"
    python: str = "3.11"
    is_wsl: bool = False
    in_container: bool = False
    has_device_files: bool = False
    """``/dev/nvidia0``, or ``/dev/dxg`` of WSL."""
    nvml_error: str = ""
    driver: str = ""
    driver_cuda: int | None = None
    """The newest major version of CUDA that the driver can do."""
    unplanned: str = ""
    """Names the GPUs that torch is built for, where they are not NVIDIA's."""
    cards: tuple[Hardware, ...] = ()
    others_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the card's UUID, what other processes hold of it."""
    unknown_cards: tuple[str, ...] = ()
    """Names of cards that the catalog does not have."""
    libraries: Mapping[str, Library] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    hub: Hub = field(default_factory=lambda: Hub(asked=False))
    folders: tuple[Folder, ...] = ()
    shared_memory_bytes: int | None = None
    """Size of ``/dev/shm``; None where there is none."""
    host_total_bytes: int = 0
    host_available_bytes: int = 0
    host_is_limited: bool = False
    """A container's limit is less than the machine's memory."""
    encoding: str = "utf-8"
    compiler: str = ""
    """Path of a C compiler; empty where none is found."""
    has_python_headers: bool = False
    host_optimizer: tuple[tuple[str, str], ...] = ()
    """What DeepSpeed lacks to compile its optimizer for the host, and how to get each."""
    open_files: int | None = None
    """How many files a process may have open."""


# -- gathered in parallel where that takes seconds, and never for longer than a limit ----------------------------------

CHILD_MODULE = "autotrain_mem.machine.health_facts"
IMPORT_SECONDS = 40.0
"""After which an import counts as one that never ends: torch takes 5 s from a warm disk."""
HUB_SECONDS = 3.0
IMPORTED = {
    "torch": "torch",
    "bitsandbytes": "bitsandbytes",
    "flash-attn": "flash_attn",
    "liger-kernel": "liger_kernel",
    "triton": "triton",
    "deepspeed": "deepspeed",
}
"""Packages with code of their own for a GPU -> what is imported of each."""
VERSIONED = ("transformers", "trl", "peft", "accelerate", "datasets", "vllm", "uplot-python")
"""Packages whose version is enough: plain Python, or too slow to import for this."""
VARIABLES = (
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING", "NVIDIA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
    *("HF_HUB_OFFLINE", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
)


_MARKS_OF_CONTAINERS = ("/.dockerenv", "/run/.containerenv")


def gather(on_progress: Callable[[str], None] = lambda what: None) -> Facts:
    """Observes this machine; ``on_progress`` hears what is being done."""
    on_progress("importing torch and what uses the GPU")
    installed = installed_versions((*IMPORTED, *VERSIONED))
    with ThreadPoolExecutor() as threads:
        imports = {name: threads.submit(_library, name, installed[name]) for name in IMPORTED}
        hub = threads.submit(_hub)
        driver, driver_cuda, nvml_error = nvidia_driver()
        cards: tuple[Hardware, ...] = ()
        with contextlib.suppress(AutofitError):
            cards = detect()
        memory = host_memory()
        libraries = {name: Library(version=installed[name]) for name in VERSIONED}
        libraries |= {name: future.result() for name, future in imports.items()}
        return Facts(
            system=platform.system(),
            python=platform.python_version(),
            is_wsl="microsoft" in platform.release().lower(),
            in_container=any(map(os.path.exists, _MARKS_OF_CONTAINERS)) or "KUBERNETES_SERVICE_HOST" in os.environ,
            has_device_files=any(map(os.path.exists, ("/dev/nvidia0", "/dev/dxg"))),
            nvml_error=nvml_error,
            driver=driver,
            driver_cuda=driver_cuda,
            cards=cards,
            unplanned=unplanned_gpus(),
            others_bytes={card.uuid or "": sum(each.used_bytes for each in others_on(card)) for card in cards},
            unknown_cards=tuple(card.name for card in cards if recognise(card.name, card.total_bytes) is None),
            libraries=libraries,
            variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
            hub=hub.result(),
            folders=tuple(_folders()),
            shared_memory_bytes=_shared_memory(),
            host_total_bytes=memory.total_bytes,
            host_available_bytes=memory.available_bytes,
            host_is_limited="container" in memory.source,
            encoding=locale.getpreferredencoding(False),
            compiler=shutil.which("gcc") or shutil.which("cc") or shutil.which("clang") or "",
            host_optimizer=tuple(missing_to_compile(os.environ)),
            has_python_headers=os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
            open_files=_open_files(),
        )


def _library(name: str, version: str | None) -> Library:
    if version is None:
        return Library()
    child = Child(CHILD_MODULE, {})
    try:
        child.send({"package": IMPORTED[name]})
        found = child.receive(IMPORT_SECONDS)
    except ChildTimeout:
        return Library(version=version, error=f"its import did not end within {IMPORT_SECONDS:.0f} s")
    except ChildDied as death:
        how = f"signal {-death.code}" if death.code is not None and death.code < 0 else f"status {death.code}"
        return Library(version=version, error=f"its import ended the process with {how}")
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()
    details = {key: str(value) for key, value in found.items() if key not in ("error", "problem")}
    return Library(version=version, error=found.get("error", ""), problem=found.get("problem", ""), details=details)


def _hub() -> Hub:
    """Asks the hub who the token's user is, or whether it is there at all, within :data:`HUB_SECONDS`."""
    from huggingface_hub import constants, get_token

    token = get_token()
    if constants.HF_HUB_OFFLINE:
        return Hub(asked=False, has_token=token is not None)
    import requests

    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    path = "whoami-v2" if token else "models?limit=1"
    try:
        answer = requests.get(f"{constants.ENDPOINT}/api/{path}", headers=headers, timeout=HUB_SECONDS)
    except requests.RequestException as error:
        return Hub(asked=True, error=type(error).__name__, has_token=token is not None)
    refused = f"status {answer.status_code}" if token and answer.status_code in (401, 403) else ""
    error_text = "" if refused or answer.ok else f"status {answer.status_code}"
    return Hub(asked=True, error=error_text, has_token=token is not None, token_error=refused)


def _folders() -> list[Folder]:
    from huggingface_hub import constants

    named: Mapping[str, str | None] = {
        "HF_HOME": constants.HF_HOME,
        "AUTOFIT_CACHE": None if (cache := cache_folder()) is None else str(cache),
        "this folder": os.getcwd(),
        "TMPDIR": tempfile.gettempdir(),
    }
    folders = []
    for purpose, path in named.items():
        if path:
            nearest = existing(pathlib.Path(path))
            try:
                free_bytes = shutil.disk_usage(nearest).free
            except OSError:
                free_bytes = None
            writable = os.access(nearest, os.W_OK | os.X_OK)
            folders.append(Folder(purpose=purpose, path=path, free_bytes=free_bytes, writable=writable))
    return folders


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# -- the child that imports one package, since an import may crash or never end ---------------------------------------


def examine(package: str) -> dict[str, Any]:
    """Imports the package, and runs what shows that it works."""
    importlib.import_module(package)
    return _torch() if package == "torch" else _bitsandbytes() if package == "bitsandbytes" else {}


def _torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cuda": torch.version.cuda or ""}
    found["archs"] = " ".join(torch.cuda.get_arch_list()) if torch.version.cuda else ""
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without NCCL has no such function
        found["nccl"] = ""
    if torch.version.cuda:
        try:
            torch.ones(1, device="cuda").add_(1).item()
            found["works"] = "yes"
        except Exception as error:
            found["problem"] = " ".join(str(error).split())[:300]
    return found


def _bitsandbytes() -> dict[str, Any]:
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
