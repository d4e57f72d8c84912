"""A predicted history is what torch's own tools take for a measured one, and it adds up to the estimate."""

import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz
from traces import block, trace, traces

from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.estimator.snapshot import Snapshot, make_snapshot
from autotrain_mem.support.units import MIB
from autotrain_mem.types import CACHE_EMPTIED, Owner, Phase, StreamUse, Trace

ROOMY = DeviceCapacity(capacity_bytes=1 << 40, total_bytes=1 << 40)
BOTH_MODES = pytest.mark.parametrize("expandable", [False, True], ids=["native", "expandable"])

# The keys of a file that the CUDA build of torch 2.13.0 wrote with torch.cuda.memory._dump_snapshot after
# _record_memory_history(), over a stand-in for the CUDA runtime.
ENTRY = {"action", "addr", "compile_context", "frames", "pool_id", "size", "stream", "time_us", "user_metadata"}
OOM = ENTRY - {"addr"} | {"device_free"}
END = ENTRY - {"frames"}
FRAME = {"filename", "line", "name"}
SEGMENT = {
    *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type"),
    *("segment_pool_id", "is_expandable", "frames", "blocks"),
}
BLOCK = {"address", "size", "requested_size", "state", "frames"}
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "graph_capture_record_stream_reuse": False,
    "max_round_threshold": -1,
    "max_cached_size": -1,
    "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
}
# What the page can read (torch/utils/viz/MemoryViz.js: unpickle).
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "DICT", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "BINFLOAT", "LONG1"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2", "NEWTRUE", "NEWFALSE"),
    *("SHORT_BINUNICODE", "BINUNICODE"),
}

LAYER = "model.layers.0.self_attn.q_proj"


def a_step() -> Trace:
    """A weight stays; an activation goes from forward to backward; a temporary is born and dies in backward."""
    weight, kept = block(3 * MIB + 1, Owner.WEIGHTS, f"{LAYER}.weight"), block(30 * MIB, Owner.ACTIVATIONS, LAYER)
    starts = [(0, Phase.LOAD), (1, Phase.FORWARD), (2, Phase.BACKWARD), (5, Phase.OPTIMIZER_STEP)]
    return trace([weight, kept, block(700)], [1, 2, 3, -3, -2, CACHE_EMPTIED], starts)


def entries(snapshot: Snapshot, *actions: str) -> list[dict[str, Any]]:
    (trace,) = snapshot["device_traces"]
    return [entry for entry in trace if entry["action"] in actions]


def lines(entry: dict[str, Any]) -> list[str]:
    return [f"{frame['filename']}: {frame['name']}" for frame in entry["frames"]]


@BOTH_MODES
def test_every_part_has_the_keys_of_a_real_dump(expandable: bool) -> None:
    tight = DeviceCapacity(capacity_bytes=24 * MIB, total_bytes=24 * MIB)
    snapshot = make_snapshot(a_step(), tight, grows=expandable)
    assert snapshot.keys() == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    *trace, end = snapshot["device_traces"][0]
    assert {entry["action"] for entry in trace} > {"alloc", "free_requested", "free_completed", "oom"}
    (refused,) = entries(snapshot, "oom")
    assert (refused["size"], refused["device_free"]) == (30 * MIB, 4 * MIB)
    assert lines(refused)[0] == f"activations: {LAYER}"
    assert [entry["size"] for entry in entries(snapshot, "alloc")] == [3 * MIB + 1, 30 * MIB, 700]
    for entry in trace:
        assert entry.keys() == (OOM if entry["action"] == "oom" else ENTRY)
        assert all(frame.keys() == FRAME for frame in entry["frames"])
    assert [entry["time_us"] for entry in (*trace, end)] == list(range(len(trace) + 1))  # the order of the entries
    assert end["action"] == "snapshot"
    assert end.keys() == END
    assert all(segment.keys() == SEGMENT for segment in snapshot["segments"])
    assert all(each.keys() == BLOCK for segment in snapshot["segments"] for each in segment["blocks"])


def test_settings_are_as_torch_writes_them_and_the_page_can_read_the_pickle() -> None:
    snapshot = make_snapshot(a_step(), ROOMY, grows=False)
    assert snapshot["allocator_settings"] == SETTINGS
    assert {opcode.name for opcode, _, _ in pickletools.genops(pickle.dumps(snapshot, 4))} <= OPCODES
    text = "max_split_size_mb:64,garbage_collection_threshold:0.5,expandable_segments:True"
    room = DeviceCapacity(capacity_bytes=1 << 40, settings=parse_settings(text))
    changed = {"max_split_size": 64 * MIB, "garbage_collection_threshold": 0.5, "expandable_segments": True}
    written = make_snapshot(a_step(), room, grows=True, setting=text)["allocator_settings"]
    assert written == SETTINGS | changed | {"PYTORCH_CUDA_ALLOC_CONF": text}


def test_frames_lead_from_the_module_outwards_to_the_phase() -> None:
    snapshot = make_snapshot(a_step(), ROOMY, grows=False)
    weight, activation, temporary = entries(snapshot, "alloc")
    around = [f"module: model{end}" for end in (".layers.0.self_attn", ".layers.0", ".layers", "")]
    assert lines(weight) == [f"weights: {LAYER}.weight", f"module: {LAYER}", *around, "phase: load"]
    assert lines(activation) == [f"activations: {LAYER}", *around, "phase: forward"]
    assert lines(temporary) == ["temporary: (no module)", "phase: backward"]
    for action in ("free_requested", "free_completed"):  # a free says whose block it was, and when it died
        freed, released = entries(snapshot, action)
        assert lines(freed) == lines(temporary)
        assert (lines(released)[0], lines(released)[-1]) == (f"activations: {LAYER}", "phase: backward")
    asked = [lines(entry)[0] for entry in entries(snapshot, "segment_alloc")]
    assert asked == [f"weights: {LAYER}.weight", f"activations: {LAYER}", "temporary: (no module)"]
    emptied = {tuple(lines(entry)) for entry in entries(snapshot, "segment_free")}
    assert emptied == {("torch: cuda.empty_cache", "phase: optimizer_step")}
    blocks = [each for segment in snapshot["segments"] for each in segment["blocks"]]
    alive = [(each["requested_size"], lines(each)[0]) for each in blocks if each["state"] == "active_allocated"]
    assert alive == [(3 * MIB + 1, f"weights: {LAYER}.weight")]
    assert all(each["frames"] == [] for each in blocks if each["state"] == "inactive")


def test_a_block_that_another_stream_was_using_is_its_own_when_it_is_free_at_last() -> None:
    run = trace(
        [block(3 * MIB, Owner.ACTIVATIONS, "used"), block(5 * MIB, Owner.TEMPORARY, "asked")],
        [1, -1, 2],
        [(0, Phase.FORWARD), (2, Phase.BACKWARD)],
    )
    used = replace(run, stream_uses=(StreamUse(event=1, block=1, stream=1),))
    *listed, _ = make_snapshot(used, ROOMY, grows=False)["device_traces"][0]
    told = [(entry["action"], entry["frames"][0]["name"], entry["frames"][-1]["name"]) for entry in listed]
    assert told == [
        ("segment_alloc", "used", "forward"),
        ("alloc", "used", "forward"),
        ("free_requested", "used", "forward"),
        ("free_completed", "used", "backward"),
        ("alloc", "asked", "backward"),
    ]


def undone(snapshot: Snapshot) -> Iterator[tuple[int, int]]:
    """(reserved, requested bytes) before each entry, from the last to the first, as the page finds them.

    ``MemoryViz.js: simulate_memory`` starts at the segments and takes entry after entry back; it stops with an error at
    a block or a segment that is not there.
    """
    segments = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    blocks = {
        each["address"]: each["requested_size"]
        for segment in snapshot["segments"]
        for each in segment["blocks"]
        if each["state"] != "inactive"
    }
    for entry in reversed(snapshot["device_traces"][0]):
        address, size = entry.get("addr", 0), entry["size"]
        match entry["action"]:
            case "alloc":
                assert any(start <= address and address + size <= start + n for start, n in segments.items())
                assert blocks.pop(address) == size
            case "free_requested":
                assert blocks[address] == size
            case "free_completed":
                assert address not in blocks
                blocks[address] = size
            case "segment_alloc":
                assert segments.pop(address) == size
            case "segment_map":
                ((start, n),) = [(s, n) for s, n in segments.items() if s <= address and address + size <= s + n]
                del segments[start]
                rests = {start: address - start, address + size: start + n - address - size}
                segments |= {at: rest for at, rest in rests.items() if rest}
            case "segment_free" | "segment_unmap":
                if entry["action"] == "segment_unmap":
                    before = [start for start, n in segments.items() if start + n == address]
                    size += segments.pop(address + size, 0)
                    address, size = (before[0], size + segments.pop(before[0])) if before else (address, size)
                segments[address] = size
        yield sum(segments.values()), sum(blocks.values())
    assert not segments
    assert not blocks


@BOTH_MODES
@settings(deadline=None, max_examples=40)
@given(run=traces(largest=64 * MIB, empties=True), capacity=st.just(1 << 20) | st.integers(2, 80))
def test_the_history_undone_from_its_end_passes_the_peak_to_none(run: Trace, capacity: int, expandable: bool) -> None:
    room = DeviceCapacity(capacity_bytes=capacity * MIB, total_bytes=capacity * MIB)
    snapshot = make_snapshot(run, room, grows=expandable)
    reserved = [sum(segment["total_size"] for segment in snapshot["segments"]), *(held for held, _ in undone(snapshot))]
    mode = estimate_memory(run, room).reserved.modes[expandable]
    assert bool(entries(snapshot, "oom")) == (mode.largest_refused_bytes is not None)
    assert min(reserved) >= 0
    if not mode.fits:
        return
    assert max(reserved) == mode.peak_reserved_bytes
    walked = [(phase, sign, each) for phase, sign, each in run.walk() if each.size_bytes]
    for sign, action in ((1, "alloc"), (-1, "free_requested"), (-1, "free_completed")):
        expected = [(each.size_bytes, each.owner.value, phase.value) for phase, way, each in walked if way == sign]
        listed = entries(snapshot, action)
        assert expected == [(one["size"], one["frames"][0]["filename"], one["frames"][-1]["name"]) for one in listed]


@pytest.mark.parametrize(("expandable", "segments", "reserved_mib"), [(False, 2, 50), (True, 1, 60)])
def test_torchs_tables_and_flame_graphs_say_the_same(expandable: bool, segments: int, reserved_mib: int) -> None:
    """A weight and an activation are alive at the end."""
    blocks = [block(3 * MIB, Owner.WEIGHTS, LAYER), block(30 * MIB, Owner.ACTIVATIONS, LAYER), block(9 * MIB)]
    snapshot = make_snapshot(trace(blocks, [1, 2, 3, -3]), ROOMY, grows=expandable)
    table = _memory_viz.segsum(snapshot)
    assert f"segments: {segments}\ntotal_reserved: {reserved_mib}.0MiB\ntotal_allocated: 33.0MiB\n" in table
    assert _memory_viz.trace(snapshot).count("# free completed for") == 1
    for graph in (_memory_viz.memory, _memory_viz.segments):
        stacks = [line.rpartition(" ") for line in graph(snapshot, format_flamegraph=str).splitlines()]
        assert sum(int(size) for _, _, size in stacks if size.isdigit()) == reserved_mib * MIB
        around = "module:0:model;module:0:model.layers;module:0:model.layers.0;module:0:model.layers.0.self_attn"
        assert any(stack.endswith(f"phase:0:load;{around};weights:0:{LAYER}") for stack, _, _ in stacks)
