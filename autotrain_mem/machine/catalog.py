"""GPUs that a plan can be made for without having them.

**Total memory** is what ``torch.cuda.get_device_properties(i).total_memory`` says on Linux. It is less than the size
on the box, because driver and firmware keep a part, and newer drivers keep more: public logs show an RTX 3060 with
12045 MiB under torch 1.13 and with 11910 MiB under torch 2.10. The lowest figure found is used, so that a plan errs
towards fitting; a real card may have up to 3 % more, and on Windows up to 6 %. A row's last field says where its figure
is from:

- ``seen: torch 2.10 log``: a public Linux log that names the card and this figure, in the form
  ``CUDA:0 (NVIDIA GeForce RTX 3060, 11910MiB)`` or ``_CudaDeviceProperties(name='NVIDIA B200', ...,
  total_memory=182631MB``. Both forms print the property's MiB. Searching for the string finds the log.
- ``seen: 79.18 GiB, OOM log``: from "GPU 0 has a total capacity of 79.18 GiB", less the half digit lost in rounding.
- ``derived: as KEY``: not measured, or measured higher under an older driver; the lowest figure of a sibling with the
  same memory size and generation.
- ``derived: N - R, KEY``: not measured; nvidia-smi's total of N MiB less the R MiB that the driver keeps on a sibling.

**Speeds** are peaks from data sheets: bytes per second with 1 GB = 10**9, and dense bf16 tensor FLOP/s, no sparsity.
Those of other dtypes and of the host link are in ``rates``.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass

from autotrain_mem.errors import UnknownGpuError
from autotrain_mem.machine.overhead import MI300X_BYTES, overhead
from autotrain_mem.machine.rates import RATES
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.units import MIB, parse_bytes

_GEFORCE = (
    "NVIDIA product page; bf16 at 512 FLOP per clock and SM at boost, accumulating in fp32 (GA102, Ada, Blackwell)"
)
_SHEET = "NVIDIA data sheet, bf16 halved where the sheet counts sparsity"
_TURING = "NVIDIA T4 data sheet; Turing has no bf16 tensor cores"
_VOLTA = "NVIDIA V100 data sheet; Volta has no bf16 tensor cores"
_AWS = "AWS's page on G5 instances; 70 TFLOP/s fp16 tensor"
_AMD = "AMD Instinct MI300X data sheet"


@dataclass(frozen=True, slots=True)
class _Card:
    key: str
    marketed_gib: int
    total_mib: int
    multiprocessors: int
    """SMs, or compute units on AMD. They size the context: see ``overhead``."""
    gigabytes_per_second: float
    bf16_teraflops: float | None
    compute_capability: tuple[int, int] | None
    speed_source: str
    memory_source: str


_CARDS = (
    _Card("a10", 24, 22587, 72, 600, 125, (8, 6), _SHEET, "derived: as a10g"),
    _Card("a100-40gb", 40, 40326, 108, 1555, 312, (8, 0), _SHEET, "seen: torch 1.9 log; 40441 under torch 2.11"),
    _Card("a100-80gb", 80, 81038, 108, 2039, 312, (8, 0), _SHEET, "seen: torch 2.3 log; 81153 under torch 2.7"),
    _Card("a100-80gb-pcie", 80, 81038, 108, 1935, 312, (8, 0), _SHEET, "derived: as a100-80gb; 81154 under torch 2.6"),
    _Card("a10g", 24, 22587, 80, 600, 70, (8, 6), _AWS, "seen: torch 2.15 nightly log"),
    _Card("b200", 180, 182631, 148, 8000, 2250, (10, 0), _SHEET, "seen: device properties log"),
    _Card("h100-80gb", 80, 81075, 132, 3350, 989.4, (9, 0), _SHEET, "seen: 79.18 GiB, OOM log; 81089 under torch 2.7"),
    _Card("h100-nvl", 94, 95320, 132, 3900, 835.5, (9, 0), _SHEET, "seen: torch 2.13 log"),
    _Card("h100-pcie", 80, 81008, 114, 2000, 756, (9, 0), _SHEET, "seen: device properties log"),
    _Card("h200", 141, 143068, 132, 4800, 989.4, (9, 0), _SHEET, "seen: 139.72 GiB, OOM log; 143156 under torch 2.11"),
    _Card("l4", 24, 22563, 58, 300, 121, (8, 9), _SHEET, "seen: torch 2.11 log"),
    _Card("l40s", 48, 45450, 142, 864, 362, (8, 9), _SHEET, "seen: 44.39 GiB, OOM log; 45495 under torch 2.2"),
    _Card("mi300x", 192, 196285, 304, 5300, 1307.4, None, _AMD, "seen: 191.69 GiB, OOM log; 196592 in ROCm/ROCm#4203"),
    _Card("rtx-6000-ada", 48, 48497, 142, 960, 364.2, (8, 9), _SHEET, "seen: torch 2.7 log; 48509 in unsloth-zoo#1053"),
    _Card("rtx-a4000", 16, 15926, 48, 448, 76.7, (8, 6), _SHEET, "derived: 16376 - 450, rtx-a5000"),
    _Card("rtx-a5000", 24, 24114, 64, 768, 111.1, (8, 6), _SHEET, "seen: device properties log, ECC off"),
    _Card("rtx-a6000", 48, 48497, 84, 768, 154.8, (8, 6), _SHEET, "derived: as rtx-6000-ada"),
    _Card("rtx-pro-6000-blackwell", 96, 97244, 188, 1792, 503.8, (12, 0), _SHEET, "seen: 94.97 GiB, antirez/ds4#431"),
    _Card("rtx3060", 12, 11910, 28, 360, 25.5, (8, 6), _GEFORCE, "seen: torch 2.10 log"),
    _Card("rtx3060ti", 8, 7753, 38, 448, 32.4, (8, 6), _GEFORCE, "derived: as rtx3070; 7833 under torch 2.11"),
    _Card("rtx3070", 8, 7753, 46, 448, 40.6, (8, 6), _GEFORCE, "seen: torch 2.6 log"),
    _Card("rtx3080", 10, 10002, 68, 760, 59.5, (8, 6), _GEFORCE, "seen: torch 2.6 log"),
    _Card("rtx3080-12gb", 12, 11910, 70, 912, 61.3, (8, 6), _GEFORCE, "derived: as rtx3080ti"),
    _Card("rtx3080ti", 12, 11910, 80, 912, 68.2, (8, 6), _GEFORCE, "seen: training log, 2026"),
    _Card("rtx3090", 24, 24124, 82, 936, 71.2, (8, 6), _GEFORCE, "seen: torch 2.13 log"),
    _Card("rtx3090ti", 24, 24112, 84, 1008, 80.0, (8, 6), _GEFORCE, "derived: 24564 - 452, rtx3090"),
    _Card("rtx4060", 8, 7806, 24, 272, 30.2, (8, 9), _GEFORCE, "derived: as rtx4060ti-8gb; 7807 under torch 2.5"),
    _Card("rtx4060ti-16gb", 16, 15934, 34, 288, 44.1, (8, 9), _GEFORCE, "derived: as rtx4070tisuper"),
    _Card("rtx4060ti-8gb", 8, 7806, 34, 288, 44.1, (8, 9), _GEFORCE, "seen: torch 2.12 log"),
    _Card("rtx4070", 12, 11994, 46, 504, 58.3, (8, 9), _GEFORCE, "seen: torch 1.13 log"),
    _Card("rtx4070super", 12, 11994, 56, 504, 71.0, (8, 9), _GEFORCE, "derived: as rtx4070"),
    _Card("rtx4070ti", 12, 11994, 60, 504, 80.2, (8, 9), _GEFORCE, "derived: as rtx4070; 12007 under torch 2.1"),
    _Card("rtx4070tisuper", 16, 15934, 66, 672, 88.2, (8, 9), _GEFORCE, "seen: device properties log"),
    _Card("rtx4080", 16, 15934, 76, 716.8, 97.5, (8, 9), _GEFORCE, "derived: as rtx4070tisuper; 16049 seen"),
    _Card("rtx4080super", 16, 15934, 80, 736, 104.4, (8, 9), _GEFORCE, "derived: as rtx4070tisuper"),
    _Card("rtx4090", 24, 24081, 128, 1008, 165.2, (8, 9), _GEFORCE, "seen: torch 2.5 log"),
    _Card("rtx5060ti-16gb", 16, 15816, 36, 448, 47.4, (12, 0), _GEFORCE, "seen: Luce-Org/lucebox#407, driver 595"),
    _Card("rtx5060ti-8gb", 8, 7656, 36, 448, 47.4, (12, 0), _GEFORCE, "derived: 8151 - 495, rtx5060ti-16gb"),
    _Card("rtx5070", 12, 11732, 48, 672, 61.7, (12, 0), _GEFORCE, "derived: 12227 - 495, rtx5060ti-16gb"),
    _Card("rtx5070ti", 16, 15808, 70, 896, 87.9, (12, 0), _GEFORCE, "derived: 16303 - 495, rtx5060ti-16gb"),
    _Card("rtx5080", 16, 15808, 84, 960, 112.6, (12, 0), _GEFORCE, "derived: 16303 - 495, rtx5060ti-16gb"),
    _Card("rtx5090", 32, 32087, 170, 1792, 209.5, (12, 0), _GEFORCE, "seen: 31.34 GiB, OOM log; 32102 in torch 2.12"),
    _Card("t4", 16, 14912, 40, 320, None, (7, 5), _TURING, "seen: torch 2.2 log; 15095 under torch 2.9"),
    _Card("v100-16gb", 16, 16110, 80, 900, None, (7, 0), _VOLTA, "derived: 16384 - 274, v100-32gb; 16130 in torch 1.7"),
    _Card("v100-32gb", 32, 32494, 80, 900, None, (7, 0), _VOLTA, "seen: torch 2.6 log"),
)
"""key, marketed GiB, torch's MiB, SMs, GB/s, dense bf16 TFLOP/s, compute capability, source of speeds, of memory."""

_OTHER_NAMES = {
    "a100-40gb": ("a100-sxm4-40gb", "a100-pcie-40gb"),
    "a100-80gb": ("a100-sxm4-80gb", "a100-sxm"),
    "a100-80gb-pcie": ("a100",),
    "h100-80gb": ("h100-80gb-hbm3", "h100-sxm", "h100-sxm5"),
    "h100-nvl": ("h100",),
    "h100-pcie": ("h100",),
    "rtx-6000-ada": ("rtx-6000-ada-generation",),
    "rtx-pro-6000-blackwell": (
        "rtx-pro-6000",
        "rtx-pro-6000-blackwell-workstation-edition",
        "rtx-pro-6000-blackwell-server-edition",
        "rtx-pro-6000-blackwell-max-q-workstation-edition",
    ),
    "rtx3080": ("rtx3080-10gb",),
    "v100-16gb": ("v100-sxm2-16gb", "v100-pcie-16gb"),
    "v100-32gb": ("v100-sxm2-32gb", "v100-pcie-32gb"),
}
"""What NVML and people call a card when it is neither its key nor its key without the memory size."""

_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|quadro")
_MEMORY_SUFFIX = re.compile(r"-\d+gb$")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)\s*", re.IGNORECASE)
_UNIT_SPELLING = {"b": "B", "kib": "KiB", "mib": "MiB", "gib": "GiB"}
_LIST_COMMAND = "autofit gpus lists the cards; --gpu also takes a size such as 12GiB."


@functools.cache
def catalog() -> tuple[Hardware, ...]:
    """Every card, by name."""
    return tuple(_hardware(card) for card in sorted(_CARDS, key=lambda card: card.key))


def named(name: str) -> Hardware:
    """The card of that name (``"GeForce RTX 4090"``, ``"a100 80gb"``), or an imagined one of that size (``"6GiB"``).

    Capitals, spaces, hyphens, underscores and the maker's names do not matter. A name that stands for several cards is
    refused, not guessed: A100 is 40 or 80 GB, and a plan for one is wrong for the other. Only a name that is itself a
    row's key picks that row: ``rtx3080`` is the card of 10 GB.

    Raises:
        UnknownGpuError: no card has this name, or several have it.
    """
    if _SIZE.fullmatch(name):
        return _imagined(name)
    found = _cards_called(name)
    if not found:
        raise UnknownGpuError(f"No GPU called {name!r} is known.", hint=_nearest(name))
    if len(found) > 1:
        choices = " or ".join(f"--gpu {card.key}" for card in found)
        raise UnknownGpuError(f"{name!r} is the name of {len(found)} different cards.", hint=f"Say which: {choices}.")
    return _hardware(found[0])


def recognise(name: str, total_bytes: int) -> Hardware | None:
    """The row for a card that NVML found, or None. Cards that share a name are told apart by their memory.

    8 % either way spans what driver, ECC (6 % on an RTX A5000) and Windows change, and is less than the step between
    two sizes of one card (17 % between the two RTX 3080).
    """
    text = _normal(name)
    for card in _CARDS:
        called = text == _normal(card.key) or text in _spellings(card)
        if called and abs(card.total_mib * MIB - total_bytes) <= 0.08 * total_bytes:
            return _hardware(card)
    return None


def _hardware(card: _Card) -> Hardware:
    total_bytes = card.total_mib * MIB
    flops, rates = card.bf16_teraflops, RATES[card.key]
    return Hardware(
        name=card.key,
        origin="named",
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        non_torch_bytes=_non_torch_bytes(card),
        compute_capability=card.compute_capability,
        bandwidth_bytes_per_second=round(card.gigabytes_per_second * 10**9),
        bf16_flops_per_second=None if flops is None else round(flops * 10**12),
        fp16_flops_per_second=round((rates.fp16_teraflops or flops or 0) * 10**12) or None,
        fp32_flops_per_second=round(rates.fp32_teraflops * 10**12),
        host_link_bytes_per_second=rates.link_bytes_per_second,
        source=f"memory {card.memory_source}; speed: {card.speed_source}",
    )


def _non_torch_bytes(card: _Card) -> int:
    if card.compute_capability is None:
        return MI300X_BYTES
    ruled = overhead(card.multiprocessors, card.compute_capability)
    if ruled is None:
        raise AssertionError(f"{card.key}: no row for compute capability {card.compute_capability}")
    return ruled.total_bytes


def _imagined(text: str) -> Hardware:
    """A card of a given size and nothing else: all of it free, no context, speeds unknown."""
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise UnknownGpuError(f"No GPU called {text!r} is known.", hint=f"If a size is meant: {error}.") from error
    if size_bytes <= 0:
        raise UnknownGpuError("A GPU of 0 bytes holds nothing.", hint=_LIST_COMMAND)
    number, unit = re.findall(r"[\d.]+|[a-z]+", text.lower())
    return Hardware(
        name=f"{number}{_UNIT_SPELLING[unit]}",
        origin="imagined",
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        non_torch_bytes=0,
        source="imagined by its size",
    )


def _normal(name: str) -> str:
    """``"NVIDIA GeForce RTX 4060 Ti"`` and ``"rtx4060ti"`` become the same."""
    return re.sub(r"[^a-z0-9]", "", _MAKERS.sub("", name.lower()))


def _cards_called(name: str) -> tuple[_Card, ...]:
    """The card whose key it is, else every card that answers to it; ``"4090"`` is tried as ``"rtx4090"`` last."""
    for text in (_normal(name), "rtx" + _normal(name)):
        by_key = tuple(card for card in _CARDS if text == _normal(card.key))
        found = by_key or tuple(card for card in _CARDS if text in _spellings(card))
        if found:
            return found
    return ()


@functools.cache
def _spellings(card: _Card) -> frozenset[str]:
    """Other names, the key without its memory size, and the bare key with the marketed size (``rtx3090 24gb``)."""
    bare = _MEMORY_SUFFIX.sub("", card.key)
    return frozenset(map(_normal, (*_OTHER_NAMES.get(card.key, ()), bare, f"{bare}-{card.marketed_gib}gb")))


def _nearest(name: str) -> str:
    keys = {_normal(card.key): card.key for card in _CARDS}
    near = difflib.get_close_matches(_normal(name), keys, n=3, cutoff=0.6)
    guess = f"Did you mean {' or '.join(keys[text] for text in near)}? " if near else ""
    return guess + _LIST_COMMAND
