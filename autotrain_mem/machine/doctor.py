"""Examines this machine for ``autofit doctor``, with a fix for each problem."""

import contextlib
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

from autotrain_mem.allocator.settings import NEWER_VARIABLE, OLDER_VARIABLE, variable_that_counts
from autotrain_mem.machine.catalog import recognise
from autotrain_mem.machine.choose import unplanned_gpus
from autotrain_mem.machine.detect import VISIBLE, detect
from autotrain_mem.machine.nvml import nvidia_driver, others_on
from autotrain_mem.machine.usable import GpuPackage, NoAnswer, examine_package
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.host import existing, host_memory, missing_to_compile
from autotrain_mem.support.store import cache_folder
from autotrain_mem.support.units import GIB, MIB, format_bytes
from autotrain_mem.support.versions import TESTED, installed_versions, untested, version_of
from autotrain_mem.types import Condition, Hardware, Health, Soundness
from autotrain_mem.types.hardware import lacks_bf16

LEAST_SHARED_BYTES = 1 * GIB
"""The smallest sufficient /dev/shm: data loader workers pass batches through it, and NCCL needs at least 33 MB for each
GPU (NCCL User Guide, "Troubleshooting", "Shared memory"). Docker gives 64 MiB."""
LEAST_FREE_BYTES = 20 * GIB
"""Free space for downloaded models: the weights of an 8B model in bfloat16 take 16 GB."""
LEAST_OWN_BYTES = 200 * MIB
IMPORTED = ("torch", "bitsandbytes", "flash-attn", "liger-kernel")
"""Packages with GPU code, which are imported; only the versions of the others are checked."""
OPTIONAL = {
    "flash-attn": "faster attention than torch's own",
    "liger-kernel": "fused kernels, --use_liger_kernel",
    "vllm": "faster generation for online methods, --use_vllm",
    "deepspeed": "ZeRO and offloading, --sharding zero3",
}
"""Maps optional packages to their use."""
_NO_GPU = "Plan without a GPU: --gpu NAME; --simulate trains on the CPU with a simulated card."

OK, NOTE, BROKEN = Soundness.OK, Soundness.NOTE, Soundness.BROKEN
Row = tuple[Soundness, str, str, str]
"""The fields of a ``Condition`` except its area: state, name, text and fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Holds the facts that several checks need."""

    driver: str
    """The driver's version; empty without one."""
    nvml_error: str
    cards: tuple[Hardware, ...]
    versions: Mapping[str, str | None]
    packages: Mapping[str, GpuPackage]
    """The packages of ``IMPORTED`` that can be imported."""
    failed: Mapping[str, str]
    """Why each of the others cannot be imported."""


def examine_machine(on_progress: Callable[[str], None] = lambda what: None) -> Health:
    """Runs all checks; calls ``on_progress`` with the current step."""
    on_progress("importing torch and packages with GPU code")
    facts = _facts()
    findings = tuple(
        Condition(area=area, state=state, name=name, text=text, fix=fix)
        for area, check in CHECKS.items()
        for state, name, text, fix in check(facts)
    )
    torch = facts.packages.get("torch")
    return Health(findings=findings, has_gpu=bool(facts.cards) and torch is not None and not torch.problem)


def _facts() -> Facts:
    versions = installed_versions({*IMPORTED, *TESTED, *OPTIONAL})
    packages: dict[str, GpuPackage] = {}
    failed: dict[str, str] = {}
    with ThreadPoolExecutor() as threads:
        names = [name for name in IMPORTED if versions[name] is not None]
        answers = {name: threads.submit(examine_package, name.replace("-", "_"), {}) for name in names}
        driver, _, nvml_error = nvidia_driver()
        cards: tuple[Hardware, ...] = ()
        with contextlib.suppress(AutofitError):
            cards = detect()
        for name, answer in answers.items():
            try:
                packages[name] = answer.result()
            except NoAnswer as reason:
                failed[name] = str(reason)
    return Facts(driver=driver, nvml_error=nvml_error, cards=cards, versions=versions, packages=packages, failed=failed)


def _gpu(facts: Facts) -> Iterator[Row]:
    if other := unplanned_gpus():
        text = f"torch is built for {other}, which autofit does not plan for. {_NO_GPU}"
        yield NOTE, "driver", text, ""
    elif facts.driver:
        yield OK, "driver", facts.driver, ""
    elif os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg"):
        fix = "Reboot after an update of the driver; else reinstall it. nvidia-smi shows the same error."
        yield BROKEN, "driver", f"a GPU is here, but the driver does not respond: {facts.nvml_error}", fix
    else:
        fix = "Start a container with docker run --gpus all; WSL needs NVIDIA's driver on Windows."
        yield NOTE, "driver", f"no NVIDIA driver here ({facts.nvml_error}). {_NO_GPU}", fix
    if facts.driver and not facts.cards:
        shown = os.environ.get(VISIBLE)
        hidden = "" if shown is None else f", with {VISIBLE}={shown!r}"
        fix = "nvidia-smi -L" if shown is None else f"unset {VISIBLE}"
        yield BROKEN, "cards", f"the driver lists no card that a process can open{hidden}", fix
    for card in facts.cards:
        parts = [f"{format_bytes(card.total_bytes)}, {format_bytes(card.free_bytes)} free"]
        if lacks_bf16(card.capability):
            parts.append("float16, not bfloat16")
        if others := sum(each.used_bytes for each in others_on(card)):
            parts.append(f"{format_bytes(others)} held by other processes")
        if recognise(card.name, card.total_bytes) is None:
            parts.append("not in the catalog: its speed is unknown")
            yield NOTE, card.name, "; ".join(parts), "autofit gpus lists the known cards"
        else:
            yield OK, card.name, "; ".join(parts), ""


def _packages(facts: Facts) -> Iterator[Row]:
    for name in (*TESTED, *OPTIONAL):
        version, package = facts.versions[name], facts.packages.get(name, GpuPackage())
        wanted = f"'{name}>={'.'.join(map(str, TESTED[name][0]))}'" if name in TESTED else name
        problem = facts.failed.get(name) or (package.problem if facts.driver else "")
        if version is None and name in OPTIONAL:
            yield NOTE, name, f"not installed: {OPTIONAL[name]}", ""
        elif version is None:
            yield BROKEN, name, "not installed", f"pip install {wanted}"
        elif problem:
            yield BROKEN, name, f"{version}: {problem}", package.fix or f"pip install --force-reinstall {wanted}"
        elif sentences := untested({name: version}):
            text, _, fix = sentences[0].partition(": ")
            yield BROKEN if version_of(version) < TESTED[name][0] else NOTE, name, text, fix
        else:
            built_for = f", for CUDA {package.cuda}, NCCL {package.nccl or 'none'}" if package.cuda else ""
            yield OK, name, f"{version}{built_for}", ""


def _hub(facts: Facts) -> Iterator[Row]:
    import requests
    from huggingface_hub import constants, get_token

    name, token = "Hugging Face Hub", get_token()
    if constants.HF_HUB_OFFLINE:
        yield NOTE, name, "not checked: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", ""
        return
    path = "whoami-v2" if token else "models?limit=1"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        status = requests.get(f"{constants.ENDPOINT}/api/{path}", headers=headers, timeout=3.0).status_code
    except requests.RequestException as failure:
        status, error = 0, type(failure).__name__
    else:
        error = "" if status < 400 else f"status {status}"
    if token and status in (401, 403):
        yield BROKEN, "token", f"the hub refuses it ({error})", "hf auth login"
    elif error:
        text = f"cannot be reached ({error}): models and data must be on this disk"
        yield NOTE, name, text, "Check network and proxy (HTTPS_PROXY), or set HF_HUB_OFFLINE=1"
    elif token:
        yield OK, name, "reachable, and the token is valid", ""
    else:
        yield NOTE, name, "reachable without a token: gated models such as Llama cannot be read", "hf auth login"


def _disk(facts: Facts) -> Iterator[Row]:
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
        nearest = existing(pathlib.Path(folder))
        free_bytes = shutil.disk_usage(nearest).free
        text = f"{what}: {folder}, {format_bytes(free_bytes)} free"
        if not os.access(nearest, os.W_OK | os.X_OK):
            fix = f"export {name}=FOLDER" if name.isupper() else "Change to a folder of your own."
            yield BROKEN, name, f"{what}: {folder} is not writable", fix
        elif free_bytes < needed:
            yield NOTE, name, f"{text}, which may be too little", "hf cache ls  shows what the hub's cache holds"
        else:
            yield OK, name, text, ""


def _system(facts: Facts) -> Iterator[Row]:
    if facts.cards:
        # Triton compiles a launcher in C for each kernel (triton/runtime/build.py), with Python's headers.
        compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if compiler and os.path.exists(header):
            yield OK, "compiler", compiler, ""
        else:
            text = "no C compiler, or no Python.h: torch.compile, Triton and Liger kernels need both"
            yield NOTE, "compiler", text, "apt install gcc python3-dev, or your system's equivalent"
        if facts.versions["deepspeed"] and (missing := missing_to_compile(os.environ)):
            text = f"PATH lacks {' and '.join(missing)}: --offload_optimizer_device cannot compile its optimizer"
            yield NOTE, "DeepSpeed", text, "pip install ninja; apt install g++"
    memory = host_memory()
    source = memory.source.removeprefix("memory: ")
    text = f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available ({source})"
    yield OK, "host memory", text, ""
    with contextlib.suppress(OSError):  # there is none
        if (shared_bytes := shutil.disk_usage("/dev/shm").total) < LEAST_SHARED_BYTES:
            text = f"{format_bytes(shared_bytes)}: data loader workers and NCCL may need more"
            yield NOTE, "/dev/shm", text, "docker run --shm-size 8g ..., or --ipc host"
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") not in ("utf8", "utf8mb4"):
        text = f"the encoding is {encoding}, not UTF-8: data with non-ASCII letters may be unreadable"
        yield BROKEN, "locale", text, "export LANG=C.UTF-8 PYTHONUTF8=1"
    if sys.platform == "win32":
        yield NOTE, "Windows", "autofit is not tested on Windows: try WSL 2", ""
    if "microsoft" in platform.release().lower():
        text = "WSL has half of the host's memory, and some GPUs refuse expandable segments and pinned memory"
        yield NOTE, "WSL", text, "memory=24GB under [wsl2] in %UserProfile%\\.wslconfig gives WSL more"
    if (both := {NEWER_VARIABLE, OLDER_VARIABLE}) <= os.environ.keys():
        read = variable_that_counts(os.environ)
        (idle,) = both - {read}
        yield NOTE, "allocator", f"{read} and {idle} are both set: torch reads only {read}", f"unset {idle}"
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        text = "PYTORCH_NO_CUDA_MEMORY_CACHING turns torch's cache off: training is many times slower"
        yield BROKEN, "allocator", text, "unset PYTORCH_NO_CUDA_MEMORY_CACHING"


CHECKS: Mapping[str, Callable[[Facts], Iterator[Row]]] = {
    "GPU": _gpu,
    "packages": _packages,
    "hub": _hub,
    "disk": _disk,
    "system": _system,
}
