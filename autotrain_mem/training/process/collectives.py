"""Reads from torch's flight recorder which collective this process has come to, for whoever asks why nothing moves.

Every process group notes what is asked of it in a ring of the last 2,000 collectives, gloo's too
(``torch/csrc/distributed/c10d/FlightRecorder.hpp``; ``TORCH_FR_BUFFER_SIZE=0`` turns it off); a thread may read it
while another waits. NCCL's is a ring of its own (``torch/csrc/distributed/c10d/init.cpp: _dump_nccl_trace``).
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any

Collectives = dict[str, tuple[int, str]]
"""Name of a group -> the number of the last collective that was asked of it, and its name while it is waited for."""

_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def last_collectives() -> Collectives:
    """Returns them for all groups of this process; none where nothing is recorded, or torch has changed."""
    found: Collectives = {}
    with contextlib.suppress(Exception):  # a private function of torch's, and a word that is only good to have
        from torch._C import _distributed_c10d

        for name in _DUMPS:
            if (dump := getattr(_distributed_c10d, name, None)) is not None:
                found |= read(pickle.loads(dump(True, False, True)))
    return found


def read(dump: Mapping[str, Any]) -> Collectives:
    """Reads one dump, of the form that ``torch/distributed/flight_recorder`` analyses."""
    waited = {
        (entry["process_group"][0], entry["collective_seq_id"]): str(entry["profiling_name"]).rpartition(":")[2]
        for entry in dump.get("entries", ())
        if not entry["retired"] and not entry["is_p2p"]
    }
    last = {group: int(status["last_enqueued_collective"]) for group, status in dump.get("pg_status", {}).items()}
    return {group: (number, waited.get((group, number), "")) for group, number in last.items() if number >= 0}
