"""Examines this machine for ``autofit doctor``: what works, what does not, and how to fix it.

Packages with code for a GPU are imported in children, since an import may crash or never end:
``python -m autotrain_mem.machine.doctor``.
"""

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from autotrain_mem.allocator.settings import NEWER_VARIABLE, OLDER_VARIABLE, variable_that_counts
from autotrain_mem.machine.card_processes import others_on
from autotrain_mem.machine.catalog import recognise
from autotrain_mem.machine.choose import unplanned_gpus
from autotrain_mem.machine.detect import VISIBLE, detect, nvidia_driver
from autotrain_mem.machine.torch_child import NoAnswer, ask_child
from autotrain_mem.machine.usable import check_usable
from autotrain_mem.support.errors import AutofitError, UnreadableGpuError
from autotrain_mem.support.host import existing, host_memory, missing_to_compile
from autotrain_mem.support.processes import Channel
from autotrain_mem.support.store import cache_folder
from autotrain_mem.support.units import GIB, MIB, format_bytes
from autotrain_mem.support.versions import TESTED, installed_versions, untested, version_of
from autotrain_mem.types import Hardware
from autotrain_mem.types.findings import Condition, Health, Soundness
from autotrain_mem.types.hardware import lacks_bf16

CHILD_MODULE = "autotrain_mem.machine.doctor"
IMPORT_SECONDS = 40.0
"""The time after which an import counts as hung: torch takes 5 s from a warm disk."""
LEAST_SHARED_BYTES = 1 * GIB
"""The smallest sufficient /dev/shm: data loader workers pass batches through it, and NCCL needs at least 33 MB for each
GPU (NCCL User Guide, "Troubleshooting", "Shared memory"). Docker gives 64 MiB."""
LEAST_FREE_BYTES = 20 * GIB
"""Free space for downloaded models: the weights of an 8B model in bfloat16 take 16 GB."""
LEAST_OWN_BYTES = 200 * MIB
IMPORTED = ("torch", "bitsandbytes", "flash-attn", "liger-kernel", "triton", "deepspeed")
"""Packages with GPU code, which are imported; for the others the version is enough."""
OPTIONAL = {
    "flash-attn": "faster attention; without it torch's own is used",
    "liger-kernel": "fused kernels, --use_liger_kernel",
    "vllm": "faster generation for online methods, --use_vllm",
    "triton": "",
    "deepspeed": "",
}
"""Maps optional packages to their use; a missing one without a text is not reported."""
_NO_GPU = "Planning needs no GPU: --gpu NAME; and --simulate trains on the CPU under a simulated card."

OK, NOTE, BROKEN = Soundness.OK, Soundness.NOTE, Soundness.BROKEN
Row = tuple[Soundness, str, str, str]
"""The fields of a ``Condition`` except its area: state, name, text and fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The outcome of importing a package in a process of its own."""

    version: str | None = None
    """None if it is not installed."""
    error: str = ""
    """Why it cannot be imported; empty if it can."""
    problem: str = ""
    """Why it cannot use the GPU; empty if it can, or if it was not tried."""
    fix: str = ""
    works: bool = False
    """True if it ran something on the GPU."""
    cuda: str = ""
    nccl: str = ""
    """The version of NCCL that torch was built with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Holds the facts that several checks need."""

    driver: str = ""
    driver_cuda: int | None = None
    """The newest major version of CUDA that the driver supports."""
    nvml_error: str = ""
    cards: tuple[Hardware, ...] = ()
    libraries: Mapping[str, Library]


def examine_machine(on_progress: Callable[[str], None] = lambda what: None) -> Health:
    """Runs all checks; ``on_progress`` is called with what is being done."""
    on_progress("importing torch and what uses the GPU")
    installed = installed_versions({*IMPORTED, *TESTED, *OPTIONAL})
    with ThreadPoolExecutor() as threads:
        imports = {name: threads.submit(_library, name, installed[name]) for name in IMPORTED}
        hub = threads.submit(lambda: list(_hub()))
        driver, driver_cuda, nvml_error = nvidia_driver()
        cards: tuple[Hardware, ...] = ()
        with contextlib.suppress(AutofitError):
            cards = detect()
        libraries = {name: Library(version=version) for name, version in installed.items()}
        libraries |= {name: future.result() for name, future in imports.items()}
    facts = Facts(driver=driver, driver_cuda=driver_cuda, nvml_error=nvml_error, cards=cards, libraries=libraries)
    checks: Mapping[str, Iterator[Row] | list[Row]] = {
        "GPU": _gpu(facts),
        "packages": _packages(facts),
        "hub": hub.result(),
        "disk": _disk(),
        "system": _system(facts),
    }
    findings = tuple(
        Condition(area=area, state=state, name=name, text=text, fix=fix)
        for area, rows in checks.items()
        for state, name, text, fix in rows
    )
    torch = facts.libraries["torch"]
    return Health(findings=findings, has_gpu=bool(cards) and not (torch.error or torch.problem))


def _gpu(facts: Facts) -> Iterator[Row]:
    """Checks the driver and the cards that it shows."""
    has_device_files = _is_there("/dev/nvidia0", "/dev/dxg")
    if other := unplanned_gpus():
        text = f"torch is built for {other}: not planned for, since their allocator is not CUDA's. {_NO_GPU}"
        yield NOTE, "driver", text, ""
    elif facts.driver:
        cuda = "" if facts.driver_cuda is None else f", up to CUDA {facts.driver_cuda}"
        yield OK, "driver", f"{facts.driver}{cuda}", ""
    elif _is_wsl() and not has_device_files:
        fix = "Install NVIDIA's driver on Windows, not in WSL, and run: wsl --update"
        yield BROKEN, "driver", "WSL shows no GPU", fix
    elif has_device_files:
        fix = "Reboot where the driver was updated; else install NVIDIA's driver again. nvidia-smi shows the same."
        yield BROKEN, "driver", f"a GPU is here, and the driver does not answer: {facts.nvml_error}", fix
    elif _is_there("/.dockerenv", "/run/.containerenv") or "KUBERNETES_SERVICE_HOST" in os.environ:
        fix = "docker run --gpus all IMAGE  gives a container the GPUs of its machine"
        yield NOTE, "driver", f"this container has no GPU. {_NO_GPU}", fix
    else:
        yield NOTE, "driver", f"no NVIDIA driver here ({facts.nvml_error}). {_NO_GPU}", ""
    if facts.driver and not facts.cards:
        shown = os.environ.get(VISIBLE)
        if shown is not None:
            yield BROKEN, "cards", f"{VISIBLE}={shown!r} hides every card", f"unset {VISIBLE}"
        else:
            yield BROKEN, "cards", "the driver lists no card that a process can open", "nvidia-smi -L"
    for card in facts.cards:
        parts = [f"{format_bytes(card.total_bytes)}, {format_bytes(card.free_bytes)} free"]
        if (capability := card.compute_capability) is not None:
            parts.append(f"compute capability {capability[0]}.{capability[1]}")
            if lacks_bf16(capability):
                parts.append("float16, not bfloat16")
        if others := sum(each.used_bytes for each in others_on(card)):
            parts.append(f"{format_bytes(others)} held by other processes")
        if recognise(card.name, card.total_bytes) is None:
            parts.append("not in the catalog: its memory counts, its speed is not known")
            yield NOTE, card.name, "; ".join(parts), "autofit gpus lists the cards that are known"
        else:
            yield OK, card.name, "; ".join(parts), ""


def _is_there(*paths: str) -> bool:
    return any(map(os.path.exists, paths))


def _is_wsl() -> bool:
    return "microsoft" in platform.release().lower()


def _packages(facts: Facts) -> Iterator[Row]:
    """Checks torch's build, the packages that are required, and the optional ones."""
    torch = facts.libraries["torch"]
    if torch.version is None:
        yield BROKEN, "torch", "not installed", "pip install torch"
    elif torch.error:
        yield BROKEN, "torch", f"{torch.version}: {torch.error}", "pip install --force-reinstall torch"
    elif torch.problem and facts.driver:
        yield BROKEN, "torch", f"{torch.version}: {torch.problem}", torch.fix
    elif not torch.cuda:
        yield OK, "torch", f"{torch.version}, for the CPU: enough to plan and to simulate", ""
    else:
        waits = "" if facts.driver else ", which waits for a GPU: enough to plan and to simulate"
        yield OK, "torch", f"{torch.version}, for CUDA {torch.cuda}{waits}", ""
    if torch.nccl:
        yield OK, "NCCL", torch.nccl, ""
    for name, (least, _) in TESTED.items():
        library = facts.libraries[name]
        if name == "torch":
            continue
        wanted = f"'{name}>={'.'.join(map(str, least))}'"
        if library.version is None:
            yield BROKEN, name, "not installed", f"pip install {wanted}"
        elif problem := library.error or library.problem:
            yield BROKEN, name, f"{library.version}: {problem}", f"pip install --force-reinstall {wanted}"
        elif sentences := untested({name: library.version}):
            text, _, fix = sentences[0].partition(": ")
            yield BROKEN if version_of(library.version) < least else NOTE, name, text, fix
        else:
            works = "; 4-bit quantization runs on the GPU" if library.works else ""
            yield OK, name, f"{library.version}{works}", ""
    for name, why in OPTIONAL.items():
        library = facts.libraries[name]
        if library.error:
            fix = f"pip install --force-reinstall {name}, or pip uninstall {name}"
            yield BROKEN, name, f"{library.version}: {library.error}", fix
        elif library.version is not None:
            yield OK, name, library.version, ""
        elif why:
            yield NOTE, name, f"not installed: {why}", ""


def _hub() -> Iterator[Row]:
    """Checks whether the hub is reachable, and whose token is set."""
    import requests
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        names = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in os.environ]
        yield NOTE, "Hugging Face Hub", f"not asked: {' and '.join(names) or 'the environment'} forbids it", ""
        return
    token = get_token()
    path = "whoami-v2" if token else "models?limit=1"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = requests.get(f"{constants.ENDPOINT}/api/{path}", headers=headers, timeout=3.0)
        error = "" if answer.ok else f"status {answer.status_code}"
        is_refused = token is not None and answer.status_code in (401, 403)
    except requests.RequestException as failure:
        error, is_refused = type(failure).__name__, False
    if is_refused:
        yield BROKEN, "token", f"the hub refuses it ({error})", "hf auth login"
    elif error:
        text = f"cannot be reached ({error}): models and data must be on this disk"
        yield NOTE, "Hugging Face Hub", text, "Check network and proxy (HTTPS_PROXY), or set HF_HUB_OFFLINE=1"
    elif token:
        yield OK, "Hugging Face Hub", "reached, and the token is valid", ""
    else:
        text = "reached, without a token: gated models such as Llama cannot be read"
        yield NOTE, "Hugging Face Hub", text, "hf auth login"


def _disk() -> Iterator[Row]:
    from huggingface_hub import constants

    written = (
        ("HF_HOME", constants.HF_HOME, "models and datasets", LEAST_FREE_BYTES),
        ("AUTOFIT_CACHE", cache_folder(), "kept rehearsals", LEAST_OWN_BYTES),
        ("this folder", os.getcwd(), "runs", LEAST_FREE_BYTES),
        ("TMPDIR", tempfile.gettempdir(), "temporary files", LEAST_OWN_BYTES),
    )
    for name, folder, what, needed in written:
        if folder is None:
            continue
        where, nearest = f"{what}: {folder}", existing(pathlib.Path(folder))
        try:
            free_bytes = shutil.disk_usage(nearest).free
        except OSError:
            yield NOTE, name, f"{where}: free space is not known", ""
            continue
        if not os.access(nearest, os.W_OK | os.X_OK):
            fix = f"export {name}=FOLDER" if name.isupper() else "Change to a folder of your own."
            yield BROKEN, name, f"{where} may not be written to", fix
        elif free_bytes < needed:
            text = f"{where}: {format_bytes(free_bytes)} free, which may be too little"
            yield NOTE, name, text, "hf cache ls  shows what the hub's cache holds"
        else:
            yield OK, name, f"{where}: {format_bytes(free_bytes)} free", ""


def _compilers(has_deepspeed: bool) -> Iterator[Row]:
    """Triton compiles a launcher in C for each kernel (triton/runtime/build.py), with Python's headers; DeepSpeed
    compiles its optimizer for the host."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        fix = "apt install gcc, or your system's equivalent"
        yield NOTE, "compiler", "no C compiler: torch.compile, Triton and Liger kernels need one", fix
    elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        fix = "apt install python3-dev, or your system's equivalent"
        yield NOTE, "compiler", "Python.h is missing: torch.compile, Triton and Liger kernels need it", fix
    else:
        yield OK, "compiler", compiler, ""
    if not has_deepspeed:
        return
    missing = list(missing_to_compile(os.environ))
    for what, fix in missing:
        yield NOTE, "DeepSpeed", f"{what}: --offload_optimizer_device compiles with it", fix
    if not missing:
        yield OK, "DeepSpeed", "its optimizer for the host can be compiled, or was", ""


def _system(facts: Facts) -> Iterator[Row]:
    """Checks compilers, host memory, shared memory, the locale and environment variables."""
    if facts.cards:
        yield from _compilers(facts.libraries["deepspeed"].version is not None)
    memory = host_memory()
    limited = ", the limit of this container" if "container" in memory.source else ""
    available = f"{format_bytes(memory.available_bytes)} available{limited}"
    yield OK, "host memory", f"{format_bytes(memory.total_bytes)}, {available}", ""
    with contextlib.suppress(OSError):  # there is none
        shared_bytes = shutil.disk_usage("/dev/shm").total
        if shared_bytes < LEAST_SHARED_BYTES:
            text = f"{format_bytes(shared_bytes)}: data loader workers and NCCL run out of it"
            yield NOTE, "/dev/shm", text, "docker run --shm-size 8g ..., or --ipc host"
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") not in ("utf8", "utf8mb4"):
        text = f"text is {encoding}, not UTF-8: data with other letters may not be read"
        yield BROKEN, "locale", text, "export LANG=C.UTF-8 PYTHONUTF8=1"
    if sys.platform == "win32":
        yield NOTE, "Windows", "never run there: WSL 2 is what we would try", ""
    if _is_wsl():
        text = "WSL: it gets half of the host's memory, and some GPUs refuse expandable segments and pinned memory"
        yield NOTE, "WSL", text, "memory=24GB under [wsl2] in %UserProfile%\\.wslconfig raises it"
    both = {NEWER_VARIABLE, OLDER_VARIABLE}
    if both <= os.environ.keys():
        read = variable_that_counts(os.environ)
        (idle,) = both - {read}
        yield NOTE, "allocator", f"{read} and {idle} are both set: torch reads {read} alone", f"unset {idle}"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        text = "PYTORCH_NO_CUDA_MEMORY_CACHING turns torch's cache off: training is many times slower"
        yield BROKEN, "allocator", text, "unset PYTORCH_NO_CUDA_MEMORY_CACHING"


# -- an import in a child ---------------------------------------------------------------------------------------------


def _library(name: str, version: str | None) -> Library:
    if version is None:
        return Library()
    try:
        answer = ask_child(CHILD_MODULE, {}, {"package": name.replace("-", "_")}, IMPORT_SECONDS)
    except NoAnswer as reason:
        return Library(version=version, error=str(reason))
    return Library(version=version, **answer)


def main() -> None:
    """Imports the package that the parent names, and sends the fields of its ``Library``."""
    channel = Channel(ignore_interrupt=True)
    found: dict[str, Any] = {}
    try:
        package = str((channel.receive() or {})["package"])
        importlib.import_module(package)
        try:
            if package == "torch":
                import torch

                found["cuda"] = torch.version.cuda or ""
                with contextlib.suppress(Exception):  # a build without NCCL has no such function
                    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
                check_usable(0)
            elif package == "bitsandbytes":
                import bitsandbytes
                import torch

                if torch.cuda.is_available():
                    ones = torch.ones(64, 64, device="cuda", dtype=torch.float16)
                    bitsandbytes.functional.quantize_4bit(ones)
                    found["works"] = True
        except UnreadableGpuError as error:
            found |= {"problem": error.message, "fix": error.hint or ""}
        except Exception as error:
            found["problem"] = " ".join(str(error).split())[:300]
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    channel.send(found)


if __name__ == "__main__":
    main()
