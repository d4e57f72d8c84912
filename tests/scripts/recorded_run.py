"""A record of one case as a card would leave it."""

from typing import Any

from gpu_records.cases import GpuCase
from gpu_records.history import History
from gpu_records.record import CardFacts, Levels, Outside, Record

MIB = 2**20


def entry(action: str, addr: int, size: int, label: str = "forward layer") -> dict[str, Any]:
    """One of torch's, with what a recording does not keep."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "user_metadata": label}


LARGE, SMALL, LARGER = 1 << 44, 2 << 44, 3 << 44
TRACE = [
    entry("segment_alloc", LARGE, 20 * MIB, "load"),
    entry("alloc", LARGE, 20_000_000, "load"),
    entry("segment_alloc", SMALL, 2 * MIB),
    entry("alloc", SMALL, 400),
    entry("free_requested", LARGE, 20_000_000),
    entry("free_completed", LARGE, 20_000_000),
    entry("segment_free", LARGE, 20 * MIB),
    entry("segment_alloc", LARGER, 32 * MIB),
    entry("alloc", LARGER, 31 * MIB),
]
"""20,000,000 bytes take a segment rounded up to 2 MiB, 400 bytes a small one of 2 MiB; the cache is emptied; 31 MiB
take 32. Reserved: 20, 22, 2, 34 MiB."""

CARD: dict[str, Any] = {"name": "a card", "compute_capability": (9, 0), "multiprocessors": 132, "total_bytes": 80 << 30}


def a_record(case: GpuCase) -> Record:
    levels = Levels(allocated_bytes=1, reserved_bytes=2, peak_allocated_bytes=3, peak_reserved_bytes=4)
    return Record(
        case=case,
        model_files={"config.json": "{}"},
        card=CardFacts(**CARD, driver="580.1", cuda="13.0", is_real=True),
        versions={"torch": "2.13.0", "bitsandbytes": None},
        date="2026-01-02T03:04:05+00:00",
        seed=0,
        allocator=case.allocator,
        loaded=levels,
        trained=levels,
        outside=Outside(non_torch_bytes=512 * MIB, source="NVML's figure for this process"),
        memory_stats={"allocation.all.current": 7},
        seconds={"load": 1.0, "train": 2.5},
        history=History.of_trace(TRACE),
    )
