"""Provides the catalog of GPUs, one row each in ``gpus.csv``, so that planning needs no GPU.

**Total memory** is ``torch.cuda.get_device_properties(i).total_memory`` on Linux. Driver and firmware reserve the rest,
newer drivers more: public logs show an RTX 3060 with 12045 MiB under torch 1.13 and with 11910 MiB under torch 2.10.
The catalog has the lowest figure found, so that plans err towards fitting; a real card has up to 3 % more, on Windows
up to 6 %. The last field of a row is the source of its figure:

- ``seen: torch 2.10 log``: a public Linux log with the card and the figure, such as
  ``CUDA:0 (NVIDIA GeForce RTX 3060, 11910MiB)`` or ``_CudaDeviceProperties(name='NVIDIA B200', ...,
  total_memory=182631MB``. Both print the property's MiB. Search for the string to find the log.
- ``seen: 79.18 GiB, OOM log``: "GPU 0 has a total capacity of 79.18 GiB", less the half digit lost in rounding.
- ``derived: as KEY``: not measured, or measured higher under an older driver; the lowest figure of a sibling with the
  same memory size and generation.
- ``derived: N - R, KEY``: not measured; nvidia-smi's total of N MiB less the driver's R MiB on a sibling.

**Speeds** are peaks from data sheets: bytes per second with 1 GB = 10**9, and dense FLOP/s without sparsity. **bf16**
is for tensor cores; it is empty for cards before Ampere. **fp16** is given only for those cards: on others it equals
bf16. **fp32** is for CUDA cores, since torch leaves TF32 off (``torch.backends.cuda.matmul.allow_tf32``):
multiprocessors x 256 FLOP per clock at boost from GA102 on. A laptop with a lower power limit is slower.

**The link** between several cards (``links.csv``) is NVLink if the card is sold on such boards, else PCI Express,
without peer access for GeForce cards. ``--link`` overrides it. **The host link** is PCI Express; a card of generation 5
in an older board is slower.
"""

import csv
import difflib
import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotrain_mem.machine.overhead import COMMUNICATOR_BYTES, overhead
from autotrain_mem.support.errors import UnknownGpuError
from autotrain_mem.support.units import MIB, parse_bytes
from autotrain_mem.types.hardware import Hardware

_ROWS = Path(__file__).with_name("gpus.csv")

_SPEED_SOURCES = {
    "geforce": "NVIDIA product page; bf16 at 512 FLOP per clock and SM at boost, accumulating in fp32 (GA102, Ada, "
    "Blackwell)",
    "sheet": "NVIDIA data sheet, bf16 halved where the sheet counts sparsity",
    "turing-geforce": "NVIDIA product page; fp16 at 512 FLOP per clock and SM at boost, accumulating in fp32 (NVIDIA "
    "Turing whitepaper, appendix A: GeForce does half of T4's)",
    "laptop": "NVIDIA's page that compares laptop GPUs, at the top of the range of boost clocks; bf16 as GeForce",
    "laptop-tops": "NVIDIA's page that compares laptop GPUs; bf16 as GeForce, a 16th of the AI TOPS (FP4, sparse)",
    "tops": "NVIDIA data sheet: an 8th of the AI TOPS (FP4 with sparsity)",
    "turing": "NVIDIA T4 data sheet; Turing has no bf16 tensor cores",
    "volta": "NVIDIA V100 data sheet; Volta has no bf16 tensor cores",
    "aws": "AWS's page on G5 instances; 70 TFLOP/s fp16 tensor",
}

_LANE_BYTES_PER_SECOND = {3: 985 * 10**6, 4: 1969 * 10**6, 5: 3938 * 10**6}
"""Bytes per second and lane, one way, by generation of PCI Express, after 128b/130b coding (PCI-SIG's FAQ)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Card:
    hardware: Hardware
    marketed_gib: int
    link: str
    """The usual link between several cards of this kind (``links.csv``); empty if unknown."""
    lanes: int
    """Lanes of PCI Express."""
    other_names: tuple[str, ...]
    """Names besides its key, with or without the memory size."""


@functools.cache
def _cards() -> tuple[_Card, ...]:
    with open(_ROWS, encoding="utf-8", newline="") as file:
        return tuple(map(_card, csv.DictReader(file, strict=True)))


def _card(row: dict[str, str]) -> _Card:
    bf16, fp16 = row["bf16_tflops"], row["fp16_tflops"] or row["bf16_tflops"]
    total_bytes = int(row["total_mib"]) * MIB
    major, _, minor = row["compute_capability"].partition(".")
    capability = (int(major), int(minor))
    if (non_torch_bytes := overhead(int(row["multiprocessors"]), capability)) is None:
        raise AssertionError(f"{row['key']}: no row for compute capability {capability}")
    hardware = Hardware(
        name=row["key"],
        origin="named",
        total_bytes=total_bytes,
        free_bytes=total_bytes,
        non_torch_bytes=non_torch_bytes,
        compute_capability=capability,
        bandwidth_bytes_per_second=round(float(row["gb_per_second"]) * 10**9),
        bf16_flops_per_second=round(float(bf16) * 10**12) if bf16 else None,
        fp16_flops_per_second=round(float(fp16) * 10**12),
        fp32_flops_per_second=round(float(row["fp32_tflops"]) * 10**12),
        communicator_bytes=COMMUNICATOR_BYTES,
        host_link_bytes_per_second=_LANE_BYTES_PER_SECOND[int(row["pcie_generation"])] * int(row["pcie_lanes"]),
        source=f"memory {row['memory_source']}; speed: {_SPEED_SOURCES[row['speed_source']]}",
    )
    return _Card(
        hardware=hardware,
        marketed_gib=int(row["marketed_gib"]),
        link=row["link"],
        lanes=int(row["pcie_lanes"]),
        other_names=tuple(row["other_names"].split()),
    )


_SOLDERED = re.compile(r"-laptop|-max-q$")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)\s*", re.IGNORECASE)
MOST_BYTES = 1 << 44
"""More than any GPU has: 16 TiB."""
_UNIT_SPELLING = {"b": "B", "kib": "KiB", "mib": "MiB", "gib": "GiB"}
_LIST_COMMAND = "autofit gpus lists the known NVIDIA cards; --gpu also takes a size such as 12GiB."


@functools.cache
def catalog(*, laptops: bool = True) -> tuple[Hardware, ...]:
    """Returns all cards, sorted by name; ``laptops=False`` omits laptop cards, which cannot be rented."""
    cards = (card.hardware for card in _cards() if laptops or not _SOLDERED.search(card.hardware.name))
    return tuple(sorted(cards, key=lambda card: card.name))


def named(name: str) -> Hardware:
    """Returns the card of that name (``"GeForce RTX 4090"``, ``"a100 80gb"``), or one of that size (``"6GiB"``).

    Ignores case, spaces, hyphens, underscores and "NVIDIA", "GeForce", "Tesla", "Quadro". Rejects ambiguous names:
    A100 has 40 or 80 GB. A row's key is never ambiguous: ``rtx3080`` is the card with 10 GB. Raises UnknownGpuError
    if no card or several cards have this name.
    """
    if _SIZE.fullmatch(name):
        return _imagined(name)
    cards: tuple[_Card, ...] = ()
    for text in (_normal(name), "rtx" + _normal(name)):  # "4090" is tried as "rtx4090" last
        cards = cards or tuple(card for card in _cards() if text == _normal(card.hardware.name))
        cards = cards or tuple(card for card in _cards() if text in _spellings(card))
    if not cards:
        if size := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*g?\s*", name, re.IGNORECASE):  # without its unit
            near = [f"--gpu {size[1]}GiB"]
        else:
            keys = {_normal(card.hardware.name): card.hardware.name for card in _cards()}
            near = [keys[text] for text in difflib.get_close_matches(_normal(name), keys, n=3, cutoff=0.6)]
        guess = f"Did you mean {' or '.join(near)}? " if near else ""
        raise UnknownGpuError(f"No GPU is called {name!r}.", hint=guess + _LIST_COMMAND)
    if len(cards) > 1:
        choices = " or ".join(f"--gpu {card.hardware.name}" for card in cards)
        raise UnknownGpuError(f"{len(cards)} different cards are called {name!r}.", hint=f"Give {choices}.")
    return cards[0].hardware


def recognise(name: str, total_bytes: int) -> Hardware | None:
    """Returns the row for NVML's name of a card, or None. Memory distinguishes cards with the same name.

    The tolerance of 8 % covers driver, ECC (6 % on an RTX A5000) and Windows; the two RTX 3080 differ by 17 %.
    """
    text = _normal(name)
    for card in _cards():
        called = text == _normal(card.hardware.name) or text in _spellings(card)
        if called and abs(card.hardware.total_bytes - total_bytes) <= 0.08 * total_bytes:
            return card.hardware
    return None


def rates_of(known: Hardware | None) -> dict[str, Any]:
    """Returns the rates of a card by the fields of ``Hardware``; all None if the catalog lacks the card."""
    names = ("bandwidth", "bf16_flops", "fp16_flops", "fp32_flops", "host_link")
    fields = [f"{name}{'' if name.endswith('flops') else '_bytes'}_per_second" for name in names]
    return {field: None if known is None else getattr(known, field) for field in fields}


def link_of(card: Hardware) -> tuple[str, int] | None:
    """Returns the usual link between cards of this kind (``machine.links``) and their PCIe lanes; None if unknown."""
    known = recognise(card.name, card.total_bytes)
    return next(((row.link, row.lanes) for row in _cards() if row.hardware is known and row.link), None)


def _imagined(text: str) -> Hardware:
    """Returns a card with only a size: all of it free, speeds unknown, outside torch the most of any card of up to this
    size. A size below all cards', which only a simulated one has, holds no CUDA context."""
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise UnknownGpuError(f"No GPU is called {text!r}.", hint=f"If this is a size: {error}.") from error
    if not 0 < size_bytes <= MOST_BYTES:
        raise UnknownGpuError(f"No GPU has {text}.", hint=_LIST_COMMAND)
    number, unit = re.findall(r"[\d.]+|[a-z]+", text.lower())
    card = Hardware(
        name=f"{number}{_UNIT_SPELLING[unit]}",
        origin="imagined",
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        non_torch_bytes=0,
        source="imagined by its size",
    )
    if not (smaller := [each for each in catalog() if each.total_bytes <= size_bytes]):
        return card
    like = max(smaller, key=lambda each: each.non_torch_bytes)
    held = {name: getattr(like, name) for name in ("non_torch_bytes", "communicator_bytes")}
    return replace(card, source=f"{card.source}; a CUDA context is assumed, as on {like.name}", **held)


def _normal(name: str) -> str:
    """Maps ``"NVIDIA GeForce RTX 4060 Ti"`` and ``"rtx4060ti"`` to the same text."""
    return re.sub(r"[^a-z0-9]", "", re.sub("nvidia|geforce|tesla|quadro", "", name.lower()))


@functools.cache
def _spellings(card: _Card) -> frozenset[str]:
    """Returns the other names, the key without its memory size, and that text with the marketed size appended."""
    bare = re.sub(r"-\d+gb$", "", card.hardware.name)
    return frozenset(map(_normal, (*card.other_names, bare, f"{bare}-{card.marketed_gib}gb")))
