"""Writes the predicted history of a run in the format of ``torch.cuda.memory._snapshot()``, for tools that read it.

The keys are those of torch 2.13 (``torch/csrc/cuda/Module.cpp: THCPModule_memorySnapshot``). Three values differ:

- ``segments`` hold the state after the last event: https://pytorch.org/memory_viz undoes the history from there.
- ``frames`` name the owner and module, the enclosing modules, then the phase, instead of Python's stack.
- ``time_us`` numbers the entries from 0, because a rehearsal has no clock.

The CUDA context, NCCL's buffers and a vLLM engine use no memory of this allocator and are missing.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from autotrain_mem.estimator.replay import DeviceCapacity, Replay
from autotrain_mem.types import Owner, Phase, Trace

Snapshot = dict[str, Any]
Frames = list[dict[str, Any]]

_DEFAULT_POOL = (0, 0)
"""The default pool, outside any ``torch.cuda.MemPool``; a pickle stores this one object once."""


def make_snapshot(trace: Trace, room: DeviceCapacity, *, grows: bool, setting: str = "") -> Snapshot:
    """Replays a run and records each action of the allocator: about two entries for each event of the trace. After an
    ``oom`` entry the replay continues as if memory sufficed. ``setting`` is PYTORCH_ALLOC_CONF."""
    history = History(trace)
    replay = Replay(trace, room, grows=grows, on_action=history.record)
    replay.run(history.events())
    allocator = replay.allocator
    settings = allocator.settings
    segments = allocator.segments()
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                block["frames"] = history.frames_at[block["address"]]
    end = {  # the entry that torch appends for the dump itself
        "action": "snapshot",
        "addr": 0,
        "size": allocator.allocated_bytes,
        "stream": 0,
        "time_us": len(history.entries),
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": _DEFAULT_POOL,
    }
    # The history comes first: pickle refers to early objects in fewer bytes.
    return {
        "device_traces": [[*history.entries, end]],
        "segments": segments,
        "allocator_settings": {  # torch's defaults for pinned memory, locks, graphs and rounding
            "PYTORCH_CUDA_ALLOC_CONF": setting,
            "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.grows,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "graph_capture_record_stream_reuse": False,
            "max_round_threshold": -1,
            "max_cached_size": -1,
            # AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals
            "roundup_power2_divisions": {str(1 << interval): 0 for interval in range(16)},
        },
        "external_annotations": [],
    }


class History:
    """Turns the allocator's actions into history entries, each with the module of the event that caused it."""

    def __init__(self, trace: Trace) -> None:
        self.entries: list[dict[str, Any]] = []
        self.frames_at: dict[int, Frames] = {}
        """Maps an address to the frames of its last allocation."""
        self._trace = trace
        self._event, self._phase = 0, Phase.LOAD
        self._block_at: dict[int, int] = {}
        self._frame: dict[tuple[str, str], dict[str, Any]] = {}
        self._frames: dict[tuple[Owner | None, str, Phase], Frames] = {}

    def events(self) -> Iterator[int]:
        for phase, event in zip(self._trace.phases(), self._trace.events, strict=True):
            self._phase, self._event = phase, event
            yield event

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Records an action of the allocator; for ``oom`` the address holds the free bytes of the device."""
        if action == "alloc":
            self._block_at[address] = self._event
            self.frames_at[address] = self._frames_of(self._event)
        # A block that another stream uses becomes free later, during another event.
        block = self._block_at[address] if action == "free_completed" else abs(self._event)
        self.entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": len(self.entries),
                "frames": self._frames_of(block),
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": _DEFAULT_POOL,
            }
        )

    def _frames_of(self, number: int) -> Frames:
        """Returns the frames of a block (0: an emptied cache); equal frames are one object, which is pickled once."""
        block = self._trace.blocks[number - 1] if number else None
        owner, module = (None, "") if block is None else (block.owner, block.module)
        key = (owner, module, self._phase)
        if key not in self._frames:
            what = ("torch", "cuda.empty_cache") if owner is None else (owner.value, module or "(no module)")
            around = reversed([*accumulate(module.split("."), "{}.{}".format)][:-1])
            named = [what, *(("module", name) for name in around), ("phase", self._phase.value)]
            self._frames[key] = [
                self._frame.setdefault((filename, name), {"filename": filename, "line": 0, "name": name})
                for filename, name in named
            ]
        return self._frames[key]
