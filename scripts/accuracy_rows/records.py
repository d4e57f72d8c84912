"""Compares records of ``scripts/record_gpu`` with rehearsals of the same cases, and replays their histories."""

import tempfile
from pathlib import Path

from gpu_records.record import Record, read_failures, read_records
from gpu_records.replay import replay
from gpu_records.sequences import births_of_history, births_of_trace, differences, summary

from accuracy_rows.public import predict
from autotrain_mem import api
from autotrain_mem.machine.overhead import overhead
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import METHODS, Hardware, Trace

MOST_LINES = 12


def check(folder: Path, worker: api.Worker, text: str, *, differing: bool) -> bool:
    """Prints a line for each record and for each failed case; returns whether all histories replay to the byte.
    ``text``: selects the records whose case name contains it. ``differing``: also print where the rehearsal's
    allocations differ from the recorded ones."""
    records = [record for record in read_records(folder) if text in record.case.name]
    print(f"\n{len(records)} records of {folder}, GiB; non-torch in MiB; replay: the history through the simulator")
    print(f"{'case':48} {'allocated':>24} {'reserved':>24} {'non-torch':>14}  replay")
    exact = [_check_one(record, worker, differing=differing) for record in records]
    for name, error in read_failures(folder).items():
        print(f"{name}: not recorded, {error.strip().splitlines()[-1]}")
    print(f"{sum(exact)} of {len(exact)} histories replay to the byte")
    return all(exact)


def _check_one(record: Record, worker: api.Worker, *, differing: bool) -> bool:
    played = replay(record.history, record.allocator)
    exact = not played.divergence and played.simulated_peak_bytes == record.trained.peak_reserved_bytes
    verdict = f"exact, {played.segments} changes" if exact else f"DIFFERS: {played.divergence or 'in its peak'}"
    with tempfile.TemporaryDirectory(prefix="record-") as scratch:
        model = Path(scratch)
        for name, text in record.model_files.items():
            (model / name).write_text(text, encoding="utf-8")
        try:
            line, trace = _rehearsed(record, worker, model)
        except AutofitError as error:
            print(f"{record.case.name:48} cannot be rehearsed: {error.message}; {verdict}", flush=True)
            return exact
    print(f"{line}  {verdict}", flush=True)
    if differing:
        _print_differences(record, trace)
    return exact


def _rehearsed(record: Record, worker: api.Worker, model: Path) -> tuple[str, Trace]:
    """Returns the line of a record without the verdict on its replay, and the rehearsal's trace."""
    case, card = record.case, record.card
    rule = overhead(card.multiprocessors, card.compute_capability)
    hardware = Hardware(  # as for a plan before any run: memory outside torch is the rule's figure
        name=card.name,
        origin="named",
        total_bytes=card.total_bytes,
        free_bytes=card.total_bytes,
        non_torch_bytes=rule if rule is not None and card.is_real else 0,
        compute_capability=card.compute_capability,
    )
    predicted, trace = predict(worker, case.job(model), case.knobs, case.length, hardware)
    allocated = _beside(record.trained.peak_allocated_bytes, predicted.reserved.peak_allocated_bytes)
    reserved = _beside(record.trained.peak_reserved_bytes, predicted.reserved.peak_reserved_bytes)
    outside = record.outside.non_torch_bytes
    measured = "-" if outside is None else f"{outside / MIB:.0f}"
    beside = f"{measured} / {predicted.outside_bytes / MIB:.0f}"
    return f"{case.name[:48]:48} {allocated:>24} {reserved:>24} {beside:>14}", trace


def _beside(measured_bytes: int, predicted_bytes: int) -> str:
    error = predicted_bytes / measured_bytes - 1
    return f"{measured_bytes / GIB:.3f} {predicted_bytes / GIB:.3f} {error:+7.2%}"


def _print_differences(record: Record, trace: Trace) -> None:
    # A rehearsal loads no weights, and omits the middle of a generation: these phases cannot be compared one by one.
    apart = ("load", "generate", "evaluate") if METHODS[record.case.method].is_online else ("load",)
    rehearsed = births_of_trace(trace, apart)
    recorded = births_of_history(record.history, apart)
    found = differences(recorded, rehearsed)
    counts = f"recorded {len(recorded)}, rehearsed {len(rehearsed)} allocations"
    print(f"    {counts} from 1 MiB on, {len(found)} differences")
    for line in summary(found, ("recorded", "rehearsed"), MOST_LINES):
        print(f"    {line}")
