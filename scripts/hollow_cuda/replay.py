"""Replays events through torch's caching allocator on the stand-in device: ``python -m hollow_cuda.replay``.

Each line on stdin is one play, ``{"capacity_bytes": ..., "total_bytes": ..., "events": [...]}``: the bytes that
cudaMalloc can give, the card's bytes, and the events. Each play has its own allocator, with the settings in
PYTORCH_ALLOC_CONF. The output is one line for each play, with an answer to each event:

    malloc ID BYTES STREAM       {"region": 3, "offset": 512, ...} or {"oom": "CUDA out of memory. ...", ...}
    free ID
    record_stream ID STREAM
    complete_events              all CUDA events recorded so far become ready
    empty_cache
    fraction PERCENT             torch.cuda.set_per_process_memory_fraction
    snapshot                     {"segments": [...], ...}, as torch.cuda.memory._snapshot() has them

Every answer has ``numbers``, torch.cuda.memory_stats() after the event. A region is one cudaMalloc or one reservation
of addresses.
"""

import ctypes
import json
import os
import sys
from typing import Any

import torch

STREAM_HANDLE = 16
"""The handle of stream 1; those of other streams are multiples. Stream 0 is the default; handles are never read."""


def main() -> None:
    for line in sys.stdin:
        play = json.loads(line)
        child = os.fork()  # the child has all modules imported, and a new allocator
        if child == 0:
            print(json.dumps(answers(play["capacity_bytes"], play["total_bytes"], play["events"])), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit("error: a process that replays events failed")


def answers(capacity_bytes: int, total_bytes: int, events: list[str]) -> list[dict[str, Any]]:
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.standin_hold_events()
    runtime.standin_set_device_memory(0, ctypes.c_size_t(capacity_bytes), ctypes.c_size_t(total_bytes))
    runtime.standin_region_base.restype = ctypes.c_ulonglong
    live: dict[str, torch.Tensor] = {}

    def place(address: int) -> dict[str, int]:
        region = runtime.standin_region(ctypes.c_void_p(address))
        return {"region": region, "offset": address - runtime.standin_region_base(region)}

    def stream(number: str) -> Any:
        return torch.cuda.ExternalStream(STREAM_HANDLE * int(number)) if int(number) else torch.cuda.default_stream()

    def play(event: str) -> dict[str, Any]:
        match event.split():
            case "malloc", name, size, on:
                try:
                    with torch.cuda.stream(stream(on)):
                        live[name] = torch.empty(int(size), dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError as error:
                    return {"oom": str(error)}
                return place(live[name].data_ptr())
            case "free", name:  # a refused allocation has no tensor to free or use
                live.pop(name, None)
            case "record_stream", name, on:
                if name in live:
                    live[name].record_stream(stream(on))
            case ("complete_events",):
                runtime.standin_complete_events()
            case ("empty_cache",):
                torch.cuda.empty_cache()
            case "fraction", percent:
                torch.cuda.set_per_process_memory_fraction(int(percent) / 100)
            case ("snapshot",):
                segments = torch.cuda.memory._snapshot()["segments"]
                for segment in segments:
                    segment |= place(segment["address"])
                    segment["stream"] //= STREAM_HANDLE
                    segment["blocks"] = [
                        {name: block[name] for name in ("size", "requested_size", "state")}
                        for block in segment["blocks"]
                    ]
                return {"segments": segments}
        return {}

    return [{**play(event), "numbers": torch.cuda.memory_stats()} for event in events]


if __name__ == "__main__":
    main()
