"""Judges the facts of a machine: what works, what is missing, and what mends it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from autotrain_mem.allocator.settings import NEWER_VARIABLE, OLDER_VARIABLE, variable_that_counts
from autotrain_mem.machine.health_facts import Facts, Library
from autotrain_mem.machine.usable import OLDEST_DRIVERS, install_torch
from autotrain_mem.support.units import GIB, MIB, format_bytes
from autotrain_mem.support.versions import TESTED, version_of
from autotrain_mem.types import Hardware
from autotrain_mem.types.findings import Condition, Health, Soundness
from autotrain_mem.types.hardware import TURING, lacks_bf16

LEAST_SHARED_BYTES = 1 * GIB
"""Of /dev/shm: data loader workers pass batches through it, and NCCL needs 33 MB a GPU at least (NCCL User Guide,
"Troubleshooting", "Shared memory"). Docker gives 64 MiB."""
LEAST_FREE_BYTES = 20 * GIB
"""On a disk that models are downloaded to: the weights of an 8B in bfloat16 are 16 GB."""
LEAST_OWN_BYTES = 200 * MIB
WRITTEN = {
    "HF_HOME": ("models and datasets: ", LEAST_FREE_BYTES),
    "AUTOFIT_CACHE": ("kept rehearsals: ", LEAST_OWN_BYTES),
    "this folder": ("runs: ", LEAST_FREE_BYTES),
    "TMPDIR": ("temporary files: ", LEAST_OWN_BYTES),
}
"""Folders -> what is written there, and how much should be free."""
LEAST_OPEN_FILES = 1024
OPTIONAL = {
    "flash-attn": "faster attention; without it torch's own is used",
    "liger-kernel": "fused kernels, --use_liger_kernel",
    "vllm": "faster generation for online methods, --use_vllm",
    "triton": "",
    "deepspeed": "",
}
"""Packages that may be missing -> what they are for; nothing is said of one that is missing and has no such text."""
_NO_GPU = "Planning needs no GPU: --gpu NAME; and --simulate trains on the CPU under a simulated card."
Check = Callable[[Facts], Iterator[Condition]]


def health_of(facts: Facts) -> Health:
    """Returns every finding, in the order in which they are read."""
    findings = tuple(finding for check in CHECKS for finding in check(facts))
    torch = _torch(facts)
    return Health(findings=findings, has_gpu=bool(facts.cards) and not (torch.error or torch.problem))


def _driver(facts: Facts) -> Iterator[Condition]:
    if facts.unplanned:
        text = f"torch is built for {facts.unplanned}: not planned for, since their allocator is not CUDA's. {_NO_GPU}"
        yield _note("GPU", "driver", text)
    elif facts.driver:
        cuda = "" if facts.driver_cuda is None else f", up to CUDA {facts.driver_cuda}"
        yield _ok("GPU", "driver", f"{facts.driver}{cuda}")
    elif facts.is_wsl and not facts.has_device_files:
        fix = "Install NVIDIA's driver on Windows, not in WSL, and run: wsl --update"
        yield _broken("GPU", "driver", "WSL shows no GPU", fix)
    elif facts.in_container and not facts.has_device_files:
        fix = "docker run --gpus all IMAGE  gives a container the GPUs of its machine"
        yield _note("GPU", "driver", f"this container has no GPU. {_NO_GPU}", fix)
    elif facts.has_device_files:
        fix = "Reboot where the driver was updated; else install NVIDIA's driver again. nvidia-smi shows the same."
        yield _broken("GPU", "driver", f"a GPU is here, and the driver does not answer: {facts.nvml_error}", fix)
    else:
        yield _note("GPU", "driver", f"no NVIDIA driver here ({facts.nvml_error}). {_NO_GPU}")


def _cards(facts: Facts) -> Iterator[Condition]:
    if facts.driver and not facts.cards:
        shown = facts.variables.get("CUDA_VISIBLE_DEVICES")
        if shown is not None:
            text = f"CUDA_VISIBLE_DEVICES={shown!r} hides every card"
            yield _broken("GPU", "cards", text, "unset CUDA_VISIBLE_DEVICES")
        else:
            yield _broken("GPU", "cards", "the driver lists no card that a process can open", "nvidia-smi -L")
    for card in facts.cards:
        yield _card(facts, card)


def _card(facts: Facts, card: Hardware) -> Condition:
    capability = card.compute_capability
    parts = [f"{format_bytes(card.total_bytes)}, {format_bytes(card.free_bytes)} free"]
    if capability is not None:
        parts.append(f"compute capability {capability[0]}.{capability[1]}")
        if lacks_bf16(capability):
            parts.append("float16, not bfloat16")
    if others := facts.others_bytes.get(card.uuid or "", 0):
        parts.append(f"{format_bytes(others)} held by other processes")
    text = "; ".join(parts)
    if card.name in facts.unknown_cards:
        text += "; not in the catalog: its memory counts, its speed is not known"
        return _note("GPU", card.name, text, "autofit gpus lists the cards that are known")
    return _ok("GPU", card.name, text)


def _torch_build(facts: Facts) -> Iterator[Condition]:
    torch = _torch(facts)
    if torch.version is None:
        yield _broken("torch", "torch", "not installed", "pip install torch")
        return
    cuda = torch.details.get("cuda", "")
    if torch.error:
        yield _broken("torch", "torch", f"{torch.version}: {torch.error}", "pip install --force-reinstall torch")
    elif torch.problem and facts.driver:
        yield _broken("torch", "torch", f"{torch.version}: {torch.problem}", _torch_cure(facts))
    elif not cuda and facts.driver:
        text = f"{torch.version} is built without CUDA, and a GPU is here"
        yield _broken("torch", "torch", text, install_torch(facts.driver_cuda or max(OLDEST_DRIVERS)))
    elif not cuda:
        yield _ok("torch", "torch", f"{torch.version}, for the CPU: enough to plan and to simulate")
    else:
        waits = "" if facts.driver else ", which waits for a GPU: enough to plan and to simulate"
        yield _ok("torch", "torch", f"{torch.version}, for CUDA {cuda}{waits}")
    yield from _kernels(facts, torch)
    if nccl := torch.details.get("nccl"):
        yield _ok("torch", "NCCL", nccl)


def _torch_cure(facts: Facts) -> str:
    cuda = _torch(facts).details.get("cuda", "")
    built_for = int(cuda.partition(".")[0]) if cuda else None
    if built_for is not None and facts.driver_cuda is not None and facts.driver_cuda < built_for:
        oldest = OLDEST_DRIVERS.get(built_for, "a newer one")
        return f"It needs driver {oldest} or newer: update the driver, or {install_torch(facts.driver_cuda)}"
    return "python -c 'import torch; torch.ones(1, device=0)'  shows the same; after a driver update, reboot"


def _kernels(facts: Facts, torch: Library) -> Iterator[Condition]:
    """Reports cards for which the build has no kernels; a newer card of one generation runs an older one's."""
    archs = [int(each) for each in re.findall(r"sm_(\d+)", torch.details.get("archs", ""))]
    if not archs:
        return
    for card in facts.cards:
        if card.compute_capability is None:
            continue
        major, minor = card.compute_capability
        if any(arch // 10 == major and arch % 10 <= minor for arch in archs):
            continue
        fix = "pip install --upgrade torch" if (major, minor) >= TURING else install_torch(min(OLDEST_DRIVERS) + 1)
        text = f"this torch has no kernels for compute capability {major}.{minor} ({card.name})"
        yield _broken("torch", "kernels", text, fix)


def _packages(facts: Facts) -> Iterator[Condition]:
    for name, (least, newest) in TESTED.items():
        library = facts.libraries.get(name, Library())
        if name == "torch":
            continue
        wanted = ".".join(map(str, least))
        if library.version is None:
            yield _broken("packages", name, "not installed", f"pip install '{name}>={wanted}'")
        elif problem := library.error or library.problem:
            fix = f"pip install --force-reinstall '{name}>={wanted}'"
            yield _broken("packages", name, f"{library.version}: {problem}", fix)
        elif version_of(library.version) < least:
            text = f"{library.version} is older than {wanted}, the oldest that was tested"
            yield _broken("packages", name, text, f"pip install --upgrade '{name}>={wanted}'")
        elif version_of(library.version)[:2] > newest:
            text = f"{library.version} is newer than {'.'.join(map(str, newest))}, the newest that was tested"
            yield _note("packages", name, text, f"pip install '{name}<{newest[0]}.{newest[1] + 1}'")
        else:
            works = "; 4-bit quantization runs on the GPU" if library.details.get("works") else ""
            yield _ok("packages", name, f"{library.version}{works}")
    for name, why in OPTIONAL.items():
        library = facts.libraries.get(name, Library())
        if library.error:
            fix = f"pip install --force-reinstall {name}, or pip uninstall {name}"
            yield _broken("packages", name, f"{library.version}: {library.error}", fix)
        elif library.version is not None:
            yield _ok("packages", name, library.version)
        elif why:
            yield _note("packages", name, f"not installed: {why}")


def _compiler(facts: Facts) -> Iterator[Condition]:
    """Triton compiles a launcher in C for each kernel (triton/runtime/build.py), with Python's headers."""
    if not facts.cards:
        return
    if not facts.compiler:
        fix = "apt install gcc, or your system's equivalent"
        yield _note("system", "compiler", "no C compiler: torch.compile, Triton and Liger kernels need one", fix)
    elif not facts.has_python_headers:
        fix = "apt install python3-dev, or your system's equivalent"
        yield _note("system", "compiler", "Python.h is missing: torch.compile, Triton and Liger kernels need it", fix)
    else:
        yield _ok("system", "compiler", facts.compiler)


def _host_optimizer(facts: Facts) -> Iterator[Condition]:
    """Finds what ``--offload_optimizer_device cpu`` lacks; nothing is said where DeepSpeed is not installed."""
    if not facts.cards or facts.libraries.get("deepspeed", Library()).version is None:
        return
    for what, fix in facts.host_optimizer:
        yield _note("system", "DeepSpeed", f"{what}: --offload_optimizer_device compiles with it", fix)
    if not facts.host_optimizer:
        yield _ok("system", "DeepSpeed", "its optimizer for the host can be compiled, or was")


def _hub(facts: Facts) -> Iterator[Condition]:
    hub = facts.hub
    if not hub.asked:
        names = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if name in facts.variables]
        yield _note("hub", "Hugging Face Hub", f"not asked: {' and '.join(names) or 'the environment'} forbids it")
        return
    if hub.error:
        text = f"cannot be reached ({hub.error}): models and data must be on this disk"
        yield _note("hub", "Hugging Face Hub", text, "Check network and proxy (HTTPS_PROXY), or set HF_HUB_OFFLINE=1")
        return
    if hub.token_error:
        yield _broken("hub", "token", f"the hub refuses it ({hub.token_error})", "hf auth login")
    elif hub.has_token:
        yield _ok("hub", "Hugging Face Hub", "reached, and the token is valid")
    else:
        text = "reached, without a token: gated models such as Llama cannot be read"
        yield _note("hub", "Hugging Face Hub", text, "hf auth login")


def _disk(facts: Facts) -> Iterator[Condition]:
    for folder in facts.folders:
        what, needed = WRITTEN.get(folder.purpose, ("", LEAST_OWN_BYTES))
        where = f"{what}{folder.path}"
        if not folder.writable:
            fix = f"export {folder.purpose}=FOLDER" if folder.purpose.isupper() else "Change to a folder of your own."
            yield _broken("disk", folder.purpose, f"{where} may not be written to", fix)
        elif folder.free_bytes is None:
            yield _note("disk", folder.purpose, f"{where}: free space is not known")
        elif folder.free_bytes < needed:
            text = f"{where}: {format_bytes(folder.free_bytes)} free, which may be too little"
            yield _note("disk", folder.purpose, text, "hf cache ls  shows what the hub's cache holds")
        else:
            yield _ok("disk", folder.purpose, f"{where}: {format_bytes(folder.free_bytes)} free")


def _system(facts: Facts) -> Iterator[Condition]:
    limited = ", the limit of this container" if facts.host_is_limited else ""
    memory = f"{format_bytes(facts.host_total_bytes)}, {format_bytes(facts.host_available_bytes)} available{limited}"
    yield _ok("system", "host memory", memory)
    shared = facts.shared_memory_bytes
    if shared is not None and shared < LEAST_SHARED_BYTES:
        text = f"{format_bytes(shared)}: data loader workers and NCCL run out of it"
        yield _note("system", "/dev/shm", text, "docker run --shm-size 8g ..., or --ipc host")
    if facts.encoding.lower().replace("-", "") not in ("utf8", "utf8mb4"):
        text = f"text is {facts.encoding}, not UTF-8: data with other letters may not be read"
        yield _broken("system", "locale", text, "export LANG=C.UTF-8 PYTHONUTF8=1")
    if facts.open_files is not None and facts.open_files < LEAST_OPEN_FILES:
        yield _note("system", "open files", f"{facts.open_files} at most", "ulimit -n 65536")
    if facts.is_wsl:
        text = "WSL: it gets half of the host's memory, and some GPUs refuse expandable segments and pinned memory"
        yield _note("system", "WSL", text, "memory=24GB under [wsl2] in %UserProfile%\\.wslconfig raises it")
    if facts.system == "Windows":
        yield _note("system", "Windows", "never run there: WSL 2 is what we would try")


def _variables(facts: Facts) -> Iterator[Condition]:
    both = {NEWER_VARIABLE, OLDER_VARIABLE}
    if both <= facts.variables.keys():
        read = variable_that_counts(facts.variables)
        (idle,) = both - {read}
        yield _note("system", "allocator", f"{read} and {idle} are both set: torch reads {read} alone", f"unset {idle}")
    if facts.variables.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        text = "PYTORCH_NO_CUDA_MEMORY_CACHING turns torch's cache off: training is many times slower"
        yield _broken("system", "allocator", text, "unset PYTORCH_NO_CUDA_MEMORY_CACHING")
    if facts.variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        yield _note("system", "CUDA", "CUDA_LAUNCH_BLOCKING=1 makes every step slower", "unset CUDA_LAUNCH_BLOCKING")
    if "cuda" in facts.variables.get("LD_LIBRARY_PATH", "") and facts.cards:
        text = "LD_LIBRARY_PATH names a CUDA of its own, which may be loaded in place of torch's"
        yield _note("system", "CUDA", text, "unset LD_LIBRARY_PATH where a library does not load")


CHECKS: tuple[Check, ...] = (
    _driver,
    _cards,
    _torch_build,
    _packages,
    _hub,
    _disk,
    _compiler,
    _host_optimizer,
    _system,
    _variables,
)
"""In the order in which they are read."""


def _torch(facts: Facts) -> Library:
    return facts.libraries.get("torch", Library())


def _ok(area: str, name: str, text: str) -> Condition:
    return Condition(area=area, name=name, state=Soundness.OK, text=text)


def _note(area: str, name: str, text: str, fix: str = "") -> Condition:
    return Condition(area=area, name=name, state=Soundness.NOTE, text=text, fix=fix)


def _broken(area: str, name: str, text: str, fix: str) -> Condition:
    return Condition(area=area, name=name, state=Soundness.BROKEN, text=text, fix=fix)
