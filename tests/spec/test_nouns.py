"""What crosses a process border comes back as it went, and what a script reads has the promised keys."""

from __future__ import annotations

import dataclasses
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import TRL_DEFAULTS

from autotrain_mem.methods.table import METHODS, methods_where
from autotrain_mem.spec import (
    Block,
    Candidate,
    DataSummary,
    Estimate,
    Hardware,
    Harm,
    Job,
    Knobs,
    Lever,
    MemoryEstimate,
    Owner,
    Phase,
    Plan,
    Proposal,
    Report,
    ReservedByMode,
    ReservedEstimate,
    StepTime,
    Trace,
    codec,
)
from autotrain_mem.spec.knobs import knob_names
from autotrain_mem.spec.report import MemoryReading
from autotrain_mem.units import GIB, MIB


def over_the_wire(fields: dict[str, Any]) -> dict[str, Any]:
    received: dict[str, Any] = json.loads(json.dumps(fields))
    return received


KNOBS = dataclasses.replace(TRL_DEFAULTS, per_device_train_batch_size=2, gradient_accumulation_steps=4)
HARDWARE = Hardware(
    name="rtx4090",
    origin="named",
    total_bytes=24 * GIB,
    free_bytes=24 * GIB,
    non_torch_bytes=500 * MIB,
    compute_capability=(8, 9),
    source="the card's data sheet",
)
MEMORY = MemoryEstimate(
    peak_allocated_bytes=3 * GIB,
    peak_phase=Phase.BACKWARD,
    phases={Phase.LOAD: GIB, Phase.BACKWARD: 3 * GIB},
    owners_at_peak={**dict.fromkeys(Owner, 0), Owner.WEIGHTS: GIB, Owner.ACTIVATIONS: 2 * GIB},
    modules_at_peak=(("lm_head", GIB),),
    reserved=ReservedByMode(
        native=ReservedEstimate(
            peak_allocated_bytes=3 * GIB,
            peak_reserved_bytes=4 * GIB,
            peak_limited_bytes=4 * GIB,
            slack_bytes=2 * GIB,
            num_alloc_retries=0,
            largest_refused_bytes=None,
        ),
        expandable_segments=ReservedEstimate(
            peak_allocated_bytes=3 * GIB,
            peak_reserved_bytes=3 * GIB + MIB,
            peak_limited_bytes=3 * GIB + MIB,
            slack_bytes=GIB,
            num_alloc_retries=0,
            largest_refused_bytes=None,
        ),
    ),
    not_counted=("the workspace of cuBLAS",),
    rehearsal_seconds=1.235,
)
TIME = StepTime(tokens=300.0, phases={Phase.FORWARD: 0.25, Phase.BACKWARD: 0.5})
ESTIMATE = Estimate(knobs=KNOBS, hardware=HARDWARE, memory=MEMORY, budget_bytes=23 * GIB, time=TIME)

json_values = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)


@given(
    st.builds(
        Job,
        method=st.sampled_from(list(METHODS)),
        model=st.text(min_size=1),
        dataset=st.none() | st.text(),
        arguments=st.dictionaries(st.text(), json_values | st.lists(json_values)),
        environment=st.dictionaries(st.text(), st.text()),
        effective_batch_size=st.none() | st.integers(1),
        prompt_length=st.none() | st.integers(1),
        fit=st.sampled_from(["all", "rounding", "lossless"]),
        forbid=st.frozensets(st.text()),
    )
)
def test_a_job_comes_back_as_it_went(job: Job) -> None:
    assert codec.from_json(Job, over_the_wire(codec.to_json(job))) == job


@given(
    st.builds(
        Knobs,
        per_device_train_batch_size=st.integers(1),
        gradient_accumulation_steps=st.integers(1),
        max_length=st.none() | st.integers(1),
        gradient_checkpointing=st.booleans(),
        packing=st.booleans(),
        fp16=st.booleans(),
        use_peft=st.booleans(),
        dtype=st.sampled_from(["float32", "bfloat16", "float16", "auto"]),
        optim=st.text(),
        load_in_4bit=st.booleans(),
        load_in_8bit=st.booleans(),
        use_bnb_nested_quant=st.booleans(),
        activation_offloading=st.booleans(),
        optimizer_offload=st.booleans(),
        expandable_segments=st.booleans(),
        max_completion_length=st.none() | st.integers(1),
        response_length=st.none() | st.integers(1),
        num_generations=st.none() | st.integers(1),
        local_rollout_forward_batch_size=st.none() | st.integers(1),
        per_device_eval_batch_size=st.none() | st.integers(1),
    )
)
def test_knobs_come_back_as_they_went(knobs: Knobs) -> None:
    assert codec.from_json(Knobs, over_the_wire(codec.to_json(knobs))) == knobs


def test_every_knob_is_drawn_above() -> None:
    """A knob that is added without a line there would go untested."""
    assert {field.name for field in dataclasses.fields(Knobs)} == set(codec.to_json(KNOBS)) | {
        *("max_completion_length", "response_length", "num_generations"),
        *("local_rollout_forward_batch_size", "per_device_eval_batch_size"),
    }


def test_a_knob_that_does_not_apply_overlays_nothing() -> None:
    """TRL's configs would take the null for a value; a max_length of null is one."""
    unlimited = dataclasses.replace(KNOBS, max_length=None)
    assert [name for name, value in codec.to_json(unlimited).items() if value is None] == ["max_length"]


@pytest.mark.parametrize("method", METHODS)
def test_the_knobs_told_are_the_methods_own_and_what_is_on(method: str) -> None:
    told = knob_names(method, KNOBS)
    assert len(told) == len(set(told))
    assert "per_device_eval_batch_size" not in told
    switched = dataclasses.replace(KNOBS, load_in_4bit=True, optimizer_offload=True, per_device_eval_batch_size=1)
    assert set(knob_names(method, switched)) - set(told) == {
        *("load_in_4bit", "optimizer_offload", "per_device_eval_batch_size")
    }


@given(
    st.builds(
        Hardware,
        name=st.text(),
        origin=st.sampled_from(["detected", "named", "imagined", "cpu"]),
        total_bytes=st.integers(0),
        free_bytes=st.integers(0),
        non_torch_bytes=st.integers(0),
        compute_capability=st.none() | st.tuples(st.integers(0), st.integers(0)),
        bandwidth_bytes_per_second=st.none() | st.integers(1),
        bf16_flops_per_second=st.none() | st.integers(1),
        fp16_flops_per_second=st.none() | st.integers(1),
        fp32_flops_per_second=st.none() | st.integers(1),
        host_link_bytes_per_second=st.none() | st.integers(1),
        index=st.none() | st.integers(0),
        uuid=st.none() | st.text(),
        source=st.text(),
    )
)
def test_hardware_comes_back_as_it_went(hardware: Hardware) -> None:
    assert codec.from_json(Hardware, over_the_wire(codec.to_json(hardware))) == hardware


@given(st.lists(st.tuples(st.integers(1, 1 << 45), st.sampled_from(list(Owner)), st.text(max_size=9)), max_size=9))
def test_a_trace_comes_back_as_it_went(parts: list[tuple[int, Owner, str]]) -> None:
    births = range(1, len(parts) + 1)
    trace = Trace(
        blocks=tuple(Block(size_bytes=size, owner=owner, module=module) for size, owner, module in parts),
        events=array("q", [*births, *(-number for number in reversed(births))]),
        phase_starts=((0, Phase.LOAD), (len(parts), Phase.OPTIMIZER_STEP)),
        operators=7,
        seconds=0.1,
        not_counted=("a", "b"),
    )
    received = codec.from_json(Trace, over_the_wire(codec.to_json(trace)))
    assert received == trace
    assert isinstance(received.events, array)


def test_a_long_trace_stays_small_on_the_wire() -> None:
    """The docstring promises a few hundred kB for 100,000 events."""
    count = 50_000
    trace = Trace(
        blocks=tuple(
            Block(size_bytes=4096 * (index % 97 + 1), owner=Owner.TEMPORARY, module=f"model.layers.{index % 32}")
            for index in range(count)
        ),
        events=array("q", [event for number in range(1, count + 1) for event in (number, -number)]),
        phase_starts=((0, Phase.LOAD),),
        operators=count,
        seconds=1.0,
    )
    assert len(json.dumps(codec.to_json(trace))) < 500_000


@pytest.mark.parametrize("noun", [KNOBS, HARDWARE, MEMORY, ESTIMATE], ids=lambda noun: type(noun).__name__)
def test_a_noun_is_frozen(noun: Any) -> None:
    first = dataclasses.fields(noun)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, first, None)


# -- what scripts read ---------------------------------------------------------------------------------------------


def test_an_estimate_has_the_promised_keys() -> None:
    written = over_the_wire(codec.to_json(ESTIMATE))
    promised = {
        "schema",
        "knobs",
        "gpu",
        "peak_allocated_bytes",
        "peak_reserved_bytes",
        "reserved",
        "non_torch_bytes",
        "vllm_share_bytes",
        "budget_bytes",
        "fits",
        "peak_phase",
        "phases",
        "owners_at_peak",
        "not_counted",
        "rehearsal_seconds",
        "rehearsed_layers",
        "step_seconds",
        "tokens_per_second",
        "time",
    }
    assert sorted(promised - set(written)) == []


def test_an_estimate_says_what_it_knows_and_null_where_it_does_not() -> None:
    written = over_the_wire(codec.to_json(ESTIMATE))
    assert written["schema"] == "autofit.estimate/1"
    assert written["peak_reserved_bytes"] == 4 * GIB
    assert written["reserved"]["native"] == {
        "peak_allocated_bytes": 3 * GIB,
        "peak_reserved_bytes": 4 * GIB,
        "peak_limited_bytes": 4 * GIB,
        "slack_bytes": 2 * GIB,
        "num_alloc_retries": 0,
        "largest_refused_bytes": None,
    }
    assert written["reserved"]["expandable_segments"]["peak_reserved_bytes"] == 3 * GIB + MIB
    assert written["gpu"] == "rtx4090"
    assert written["knobs"] == codec.to_json(KNOBS)
    assert written["peak_phase"] == "backward"
    assert written["phases"] == [{"phase": "load", "peak_bytes": GIB}, {"phase": "backward", "peak_bytes": 3 * GIB}]
    assert set(written["owners_at_peak"]) == {owner.value for owner in Owner}
    assert sum(written["owners_at_peak"].values()) == written["peak_allocated_bytes"]
    assert written["modules_at_peak"] == [{"module": "lm_head", "bytes": GIB}]
    assert written["not_counted"] == ["the workspace of cuBLAS"]


def test_sizes_are_whole_bytes() -> None:
    written = over_the_wire(codec.to_json(ESTIMATE))
    sizes = {name: value for name, value in written.items() if name.endswith("_bytes") and value is not None}
    assert sizes
    assert all(type(value) is int for value in sizes.values())


def test_what_is_required_is_allocated_plus_cached_plus_what_lies_outside_torch() -> None:
    assert ESTIMATE.required_bytes == 3 * GIB + GIB + 500 * MIB
    assert ESTIMATE.required_bytes == MEMORY.peak_allocated_bytes + ESTIMATE.cached_bytes + ESTIMATE.outside_bytes
    assert codec.to_json(ESTIMATE)["required_bytes"] == ESTIMATE.required_bytes


def test_expandable_segments_are_counted_where_the_knobs_have_them() -> None:
    expanded = ESTIMATE.with_expandable_segments()
    assert expanded == dataclasses.replace(ESTIMATE, knobs=dataclasses.replace(KNOBS, expandable_segments=True))
    assert (expanded.reserved, ESTIMATE.reserved) == (MEMORY.reserved.expandable_segments, MEMORY.reserved.native)
    assert expanded.required_bytes == 3 * GIB + MIB + 500 * MIB
    assert codec.to_json(expanded)["peak_reserved_bytes"] == 3 * GIB + MIB


@pytest.mark.parametrize("trouble", [{"num_alloc_retries": 1}, {"largest_refused_bytes": 512}])
def test_a_run_that_stumbles_over_the_allocator_does_not_fit_whatever_it_requires(trouble: dict[str, int]) -> None:
    native = dataclasses.replace(MEMORY.reserved.native, **trouble)
    assert MEMORY.reserved.native.fits
    assert not native.fits
    assert ESTIMATE.fits
    stumbling = dataclasses.replace(
        ESTIMATE, memory=dataclasses.replace(MEMORY, reserved=dataclasses.replace(MEMORY.reserved, native=native))
    )
    assert not stumbling.fits
    assert stumbling.with_expandable_segments().fits


def test_what_a_vllm_takes_is_required_too() -> None:
    shared = dataclasses.replace(ESTIMATE, vllm_share_bytes=7 * GIB)
    assert shared.required_bytes == ESTIMATE.required_bytes + 7 * GIB
    assert codec.to_json(shared)["vllm_share_bytes"] == 7 * GIB


def test_exactly_the_budget_fits_and_one_byte_more_does_not() -> None:
    required = ESTIMATE.required_bytes
    for budget, fits in ((required, True), (required - 1, False)):
        assert dataclasses.replace(ESTIMATE, budget_bytes=budget).fits is fits
        assert Candidate(knobs=KNOBS, required_bytes=required, budget_bytes=budget).fits is fits


LEVER = Lever(name="gradient_checkpointing", before=False, after=True, harm=Harm.TIME, why="recomputes")
MINIMAL_PLAN = Plan(
    job=Job(method="grpo", model="tiny", dataset=None),
    level="lossless",
    estimate=ESTIMATE,
    defaults=TRL_DEFAULTS,
    levers=(),
    attempts=(),
    seconds=1.235,
    row_tokens=77,
    versions={"python": "3.11.7", "autotrain_mem": "5eab", "torch": "2.13.0", "transformers": "5", "trl": "1.12.0"},
    model_digest="0f1e",
)
FULL_PLAN = dataclasses.replace(
    MINIMAL_PLAN,
    levers=(LEVER, dataclasses.replace(LEVER, name="micro_batch", before="8 x 1", after="2 x 4")),
    attempts=(
        Candidate(knobs=KNOBS, required_bytes=5, budget_bytes=4),
        Candidate(knobs=KNOBS, required_bytes=3, budget_bytes=4, tokens_per_second=10.5, rehearsed_layers=2),
    ),
    alternatives=(
        Candidate(
            level="rounding",
            knobs=KNOBS,
            required_bytes=5,
            budget_bytes=4,
            tokens_per_second=None,
            ratio=None,
            would_fit=("rtx4090 (23.5 GiB)",),
        ),
    ),
    data=DataSummary(
        rows=9,
        tokens=90,
        longest=20,
        percentiles=(8, 9, 19, 20),
        padding_fraction=0.25,
        truncated_rows_fraction=0.125,
        truncated_tokens_fraction=0.5,
    ),
    proposals=(Proposal(flags="--packing", why="padding"),),
    warnings=("no padding token",),
    optimizer_steps=40,
    allocator="max_split_size_mb:512",
    objects="",
)


def test_a_plan_holds_its_estimate_its_levers_and_its_attempts() -> None:
    written = over_the_wire(codec.to_json(FULL_PLAN))
    assert written["schema"] == "autofit.plan/5"
    assert (written["method"], written["model"], written["level"]) == ("grpo", "tiny", "lossless")
    assert (written["prompt_length"], written["effective_batch_size"]) == (77, 8)
    assert written["estimate"] == over_the_wire(codec.to_json(ESTIMATE))
    assert written["levers"][0] == {
        **{"name": "gradient_checkpointing", "before": False, "after": True, "harm": 1, "why": "recomputes"}
    }
    assert written["attempts"][0] == {
        **{"knobs": codec.to_json(KNOBS), "required_bytes": 5, "budget_bytes": 4, "fits": False},
        **{"tokens_per_second": None, "rehearsed_layers": None, "level": "", "ratio": None, "would_fit": []},
    }
    assert written["data"]["truncated_rows_fraction"] == 0.125


def test_a_plan_says_how_fast_it_is_and_how_long_the_run_takes() -> None:
    written = over_the_wire(codec.to_json(FULL_PLAN))
    assert (written["step_seconds"], written["tokens_per_second"]) == (0.75, 400.0)
    assert (written["optimizer_steps"], written["run_seconds"]) == (40, 30.0)
    assert over_the_wire(codec.to_json(MINIMAL_PLAN))["run_seconds"] is None


def test_seconds_by_another_cards_rates_are_null() -> None:
    assumed = dataclasses.replace(ESTIMATE, time=dataclasses.replace(TIME, assumed="a100-80gb"))
    written = over_the_wire(codec.to_json(dataclasses.replace(FULL_PLAN, estimate=assumed)))
    assert (written["step_seconds"], written["tokens_per_second"], written["run_seconds"]) == (None, None, None)
    assert written["estimate"]["time"]["assumed"] == "a100-80gb"


PLANS = {
    "minimal": MINIMAL_PLAN,
    "full": FULL_PLAN,
    "by other rates": dataclasses.replace(
        FULL_PLAN, estimate=dataclasses.replace(ESTIMATE, time=dataclasses.replace(TIME, assumed="a100-80gb"))
    ),
    "of few layers": dataclasses.replace(
        FULL_PLAN,
        estimate=dataclasses.replace(
            ESTIMATE, vllm_share_bytes=GIB, memory=dataclasses.replace(MEMORY, rehearsed_layers=4)
        ),
    ),
    "of an unknown card": dataclasses.replace(
        FULL_PLAN,
        estimate=dataclasses.replace(ESTIMATE, hardware=dataclasses.replace(HARDWARE, compute_capability=None)),
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_comes_back_as_it_went(plan: Plan) -> None:
    assert codec.from_json(Plan, over_the_wire(codec.to_json(plan))) == plan


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


DERIVED = {"effective_batch_size", "step_seconds", "tokens_per_second", "run_seconds", "knobs"} | {
    *("method", "model", "prompt_length")
}
"""Written for readers, and made of the rest."""


@pytest.mark.parametrize("name", sorted(set(codec.to_json(FULL_PLAN)) - DERIVED))
def test_a_plan_without_one_of_its_keys_is_refused(name: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        codec.from_json(Plan, without(over_the_wire(codec.to_json(FULL_PLAN)), name))


def test_a_plan_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match=r"autofit\.plan/1"):
        codec.from_json(Plan, {**over_the_wire(codec.to_json(FULL_PLAN)), "schema": "autofit.plan/1"})


@pytest.mark.parametrize("part", ["attempts", "alternatives", "proposals", "levers"])
def test_a_part_of_a_plan_with_an_unknown_key_is_refused(part: str) -> None:
    written = over_the_wire(codec.to_json(FULL_PLAN))
    written[part][0]["colour"] = "red"
    with pytest.raises(codec.CodecError, match=rf"{part}\[0\]\.colour is unknown"):
        codec.from_json(Plan, written)


READING = MemoryReading(
    allocated_bytes=40, peak_allocated_bytes=100, reserved_bytes=90, peak_reserved_bytes=200, num_alloc_retries=3
)
REPORT = Report(
    output_dir="run",
    steps=3,
    first_loss=2.0,
    last_loss=1.0,
    predicted_peak_bytes=110,
    predicted_peak_reserved_bytes=190,
    measured=READING,
    seconds=1.0,
)


@pytest.mark.parametrize(("measured", "error"), [(100, 0.1), (None, None), (0, None), (220, -0.5)])
def test_the_prediction_error_is_relative_to_what_was_measured(measured: int | None, error: float | None) -> None:
    reading = None if measured is None else dataclasses.replace(READING, peak_allocated_bytes=measured)
    report = dataclasses.replace(REPORT, measured=reading)
    assert report.prediction_error == (None if error is None else pytest.approx(error))
    assert over_the_wire(codec.to_json(report))["prediction_error"] == report.prediction_error


@pytest.mark.parametrize(("measured", "error"), [(200, -0.05), (None, None), (0, None), (95, 1.0)])
def test_so_is_that_of_what_is_reserved(measured: int | None, error: float | None) -> None:
    reading = None if measured is None else dataclasses.replace(READING, peak_reserved_bytes=measured)
    report = dataclasses.replace(REPORT, measured=reading)
    assert report.reserved_prediction_error == (None if error is None else pytest.approx(error))
    assert over_the_wire(codec.to_json(report))["reserved_prediction_error"] == report.reserved_prediction_error


def test_a_reading_comes_back_as_it_went() -> None:
    assert codec.from_json(MemoryReading, over_the_wire(codec.to_json(REPORT)["measured"])) == READING


def test_a_reading_takes_torchs_own_statistics() -> None:
    stats = {
        "allocated_bytes.all.current": 40,
        "allocated_bytes.all.peak": 100,
        "reserved_bytes.all.current": 90,
        "reserved_bytes.all.peak": 200,
        "num_alloc_retries": 3,
        "num_ooms": 9,
    }
    assert MemoryReading.from_stats(stats) == READING
    assert MemoryReading.from_stats({}).peak_reserved_bytes == 0  # before a context is opened


# -- the budget ----------------------------------------------------------------------------------------------------


def hardware(origin: Any, total_bytes: int, free_bytes: int) -> Hardware:
    return dataclasses.replace(HARDWARE, origin=origin, total_bytes=total_bytes, free_bytes=free_bytes)


def test_the_headroom_is_4_percent_but_at_least_400_mib_on_a_real_card() -> None:
    assert hardware("detected", 80 * GIB, 80 * GIB).default_headroom_bytes() == int(80 * GIB * 0.04)
    assert hardware("named", 4 * GIB, 4 * GIB).default_headroom_bytes() == 400 * MIB
    assert hardware("imagined", 100 * MIB, 100 * MIB).default_headroom_bytes() == 4 * MIB


def test_the_budget_is_what_is_free_less_the_headroom() -> None:
    assert hardware("detected", 24 * GIB, 20 * GIB).budget_bytes() == 20 * GIB - int(24 * GIB * 0.04)
    assert hardware("detected", 24 * GIB, 20 * GIB).budget_bytes(GIB) == 19 * GIB
    assert hardware("detected", 24 * GIB, 20 * GIB).budget_bytes(0) == 20 * GIB


def test_a_budget_is_never_negative() -> None:
    assert hardware("detected", 24 * GIB, 100 * MIB).budget_bytes() == 0


@pytest.mark.parametrize(("given", "pinned"), [({}, False), ({"max_length": "auto"}, False), ({"max_length": 9}, True)])
def test_a_length_is_pinned_by_a_number_only(given: dict[str, Any], pinned: bool) -> None:
    assert Job(method="sft", model="m", dataset=None, arguments=given).pins_length is pinned


@pytest.mark.parametrize("method", sorted(methods_where(lambda method: method.is_online)))
def test_a_prompts_length_is_pinned_by_its_own_flag(method: str) -> None:
    job = Job(method=method, model="m", dataset=None, arguments={"max_length": 9})
    assert not job.pins_length
    assert dataclasses.replace(job, prompt_length=9).pins_length


@pytest.mark.parametrize(("strategy", "evaluated"), [({}, False), ("no", False), ("steps", True), ("epoch", True)])
def test_a_job_is_evaluated_where_a_strategy_says_when(strategy: object, evaluated: bool) -> None:
    arguments = {"eval_strategy": strategy} if strategy else {}
    assert Job(method="sft", model="m", dataset=None, arguments=arguments).is_evaluated is evaluated
