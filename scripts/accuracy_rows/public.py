"""Rehearses public rows, prints a line for each and a table of families, and checks their limits."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import bench

from accuracy_rows.rows import FLOAT32, Case, framework, ran_older_trl
from autotrain_mem import api
from autotrain_mem.checks.model_files import read_config
from autotrain_mem.machine.catalog import named
from autotrain_mem.planning.predictions import judge_trace
from autotrain_mem.planning.rehearsals import Lengths
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Estimate, Hardware, Job, Knobs, ModelFacts, Phase, Trace

SMI_MODEL = "Mistral-7B"
"""The model whose nvidia-smi figures are those of one process on one card, with idle memory subtracted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    limit: float
    median: float
    reserved_limit: float
    reserved_median: float
    smi_median: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One row's relative errors; None for a figure that the row does not state."""

    case: Case
    counted: bool
    allocated: float
    reserved: float | None
    smi: float | None


HEADER = (
    f"{'id':12} {'family':78} {'size':>10} {'measured':>9} {'rehearsed':>9} {'error':>7} "
    f"{'reserved':>16} {'nvidia-smi':>16}  peak in"
)


def predict(worker: api.Worker, job: Job, knobs: Knobs, longest: int | None, card: Hardware) -> tuple[Estimate, Trace]:
    """Returns the estimate for the whole card without headroom, since a measured run kept none free, and the trace."""
    rehearsals = api.Rehearsals(
        workers=api.Workers(started=[worker]), job=job, defaults=knobs, hardware=card, headroom_bytes=0
    )
    asked = rehearsals.subject(ModelFacts(context_length=None, is_quantized=False), Lengths(longest=longest))
    trace = asked.rehearse(knobs)
    return judge_trace(asked, knobs, trace), trace


def taken_bytes(predicted: Estimate) -> int:
    """Returns what nvidia-smi would show. On a nearly full card the allocator has released its cache before that."""
    return predicted.reserved.peak_limited_bytes + predicted.outside_bytes


def counts(case: Case, predicted: Estimate) -> bool:
    """Returns whether the row and the rehearsal computed the same at the peak (the mark ``*`` of scripts/accuracy)."""
    if not case.whole_logits:
        return True
    config = read_config(case.job).get_text_config()
    copies = 2 * case.knobs.per_device_train_batch_size * int(case.row["seq_len"]) * int(config.vocab_size) * FLOAT32
    phases = predicted.memory.phases
    others = max(peak for phase, peak in phases.items() if phase is not Phase.OPTIMIZER_STEP)
    return phases.get(Phase.OPTIMIZER_STEP, 0) > others + copies


def run(case: Case, worker: api.Worker) -> Result:
    """Rehearses one case, and prints its line."""
    predicted, _ = predict(worker, case.job, case.knobs, case.longest, named(case.card))
    allocated = _error(case.row["alloc_gib"], predicted.reserved.peak_allocated_bytes)
    assert allocated is not None
    result = Result(
        case=case,
        counted=counts(case, predicted),
        allocated=allocated,
        reserved=_error(case.row["reserved_gib"], predicted.reserved.peak_reserved_bytes),
        smi=_error(case.row["nvidia_smi_gib"], taken_bytes(predicted)) if SMI_MODEL in case.row["model"] else None,
    )
    print(_line(result, predicted), flush=True)
    return result


def _error(measured_gib: str, predicted_bytes: int) -> float | None:
    return predicted_bytes / GIB / float(measured_gib) - 1 if measured_gib else None


def _line(result: Result, predicted: Estimate) -> str:
    case, row = result.case, result.case.row
    mark = "t" if ran_older_trl(row) else "*" if case.whole_logits else "f" if "foak" in framework(row) else " "
    label = f"{row['id'][:11]:11}{mark} {case.family[:78]:78} {row['batch'] + ' x ' + row['seq_len']:>10}"
    rehearsed = predicted.reserved.peak_allocated_bytes / GIB
    reserved = _with_error(predicted.reserved.peak_reserved_bytes, result.reserved)
    smi = _with_error(taken_bytes(predicted), result.smi)
    verdict = predicted.memory.peak_phase.value + ("" if result.counted else ", not counted")
    return (
        f"{label} {float(row['alloc_gib']):9.3f} {rehearsed:9.3f} {result.allocated:+7.2%} "
        f"{reserved:>16} {smi:>16}  {verdict}"
    )


def _with_error(predicted_bytes: int, error: float | None) -> str:
    return "" if error is None else f"{predicted_bytes / GIB:.3f} {error:+7.2%}"


def report(results: Iterable[Result], bars: Bars) -> bool:
    """Prints the families; returns whether all limits are kept."""
    families: dict[str, list[Result]] = defaultdict(list)
    kinds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result.counted:
            families[result.case.family].append(result)
            row = result.case.row
            kind = f"{row['task']} {row['method']}, {row['weights_dtype']}, mixed precision {row['mixed_precision']}"
            kinds[kind].append(result.allocated)
    if not families:
        print("\nno row counts")
        return True
    print("\nper family: number of rows, then the median of absolute errors and the worst error of allocated bytes, of")
    print("reserved bytes, of reserved plus non-torch bytes (nvidia-smi)")
    medians: dict[str, list[float]] = defaultdict(list)
    every: dict[str, list[float]] = defaultdict(list)
    for family, rows in families.items():
        shown = []
        for name in ("allocated", "reserved", "smi"):
            errors = [error for row in rows if (error := getattr(row, name)) is not None]
            if errors:
                every[name] += map(abs, errors)
                medians[name].append(statistics.median(map(abs, errors)))
            shown.append(f"{medians[name][-1]:6.2%} {max(errors, key=abs):+7.2%}" if errors else " " * 14)
        print(f"{len(rows):3d}  {'   '.join(shown)}   {family}")

    print("\nerrors of allocated bytes: rows, minimum, median, maximum, share of rows below the measured value")
    for kind, errors in sorted(kinds.items()):
        spread = " ".join(f"{error:+7.2%}" for error in (min(errors), statistics.median(errors), max(errors)))
        print(f"{len(errors):3d} {spread} {sum(error < 0 for error in errors) / len(errors):5.0%}  {kind}")

    middle, worst = statistics.median(medians["allocated"]), max(every["allocated"])
    print(f"allocated: median over families {middle:.2%} (limit {bars.median:.1%}), ", end="")
    print(f"worst row {worst:.2%} (limit {bars.limit:.1%})")
    kept = worst <= bars.limit and middle <= bars.median
    if every["reserved"]:
        kept &= bench.within("reserved", every["reserved"], bars.reserved_median, bars.reserved_limit)
    if medians["smi"]:
        middle = statistics.median(medians["smi"])
        print(f"reserved plus non-torch, against nvidia-smi: median over {len(medians['smi'])} families ", end="")
        print(f"{middle:.2%} (limit {bars.smi_median:.1%})")
        kept &= middle <= bars.smi_median
    return kept
