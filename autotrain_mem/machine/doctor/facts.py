"""Holds what is observed of a machine; nothing here judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    """``cuda``, ``hip``, ``archs``, ``nccl`` of torch; what the child found beside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """Holds a folder that something is written to."""

    purpose: str
    """The variable that names it, such as ``HF_HOME``; ``this folder`` for the one that the command runs in."""
    path: str
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Holds what the Hugging Face Hub answered."""

    asked: bool
    """False where the environment forbids it."""
    error: str = ""
    """Why it cannot be reached; empty where it answered."""
    has_token: bool = False
    token_error: str = ""
    """Why the token is not taken; empty where there is none, or it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Holds everything that was observed."""

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
    amdsmi_error: str = ""
    """Why amdsmi cannot be asked of AMD's cards; empty where it can, or there are none."""
    unplanned: str = ""
    """Names Apple's and Intel's GPUs."""
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
