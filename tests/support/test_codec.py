"""Every noun that crosses a process border or lies in a file comes back as it went, and what is changed is refused."""

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotrain_mem import types as nouns
from autotrain_mem.settings.knobs import Lever
from autotrain_mem.support import codec
from autotrain_mem.training.task import Request
from autotrain_mem.types import METHODS, DataProfile, Footprint, Hardware, Job, ModelFacts, Phase, Preflight, StepTime
from autotrain_mem.types.report import MemoryReading, Shortage

READ = (
    *(nouns.Counting, nouns.DataProfile, nouns.Estimate, nouns.Experience, nouns.Footprint, nouns.Hardware, nouns.Job),
    *(nouns.Knobs, nouns.Plan, nouns.Report, nouns.StepTime, nouns.Workload, ModelFacts, Preflight, Request, Shortage),
)
"""What a worker, a training process, the cache or a file holds, with all nouns that are parts of these."""

JSON = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
STEPS = st.lists(st.integers(), min_size=1, max_size=3).map(tuple)
WORDS = st.dictionaries(st.text(max_size=3), JSON, max_size=2)
for kind, strategy in {
    float: st.floats(-1e12, 1e12, allow_nan=False),
    Job: st.builds(Job, method=st.sampled_from(list(METHODS)), arguments=WORDS, accelerate=st.none() | WORDS),
    Lever: st.builds(Lever, before=JSON, after=JSON),
    nouns.MixedLengths: st.builds(nouns.MixedLengths, native=STEPS, expandable_segments=STEPS),
    nouns.VllmServer: st.builds(nouns.VllmServer, gpus=st.integers(0, 8)),  # its command names each
}.items():
    st.register_type_strategy(kind, strategy)


def over_the_wire(value: Any) -> Any:
    return json.loads(json.dumps(codec.to_json(value)))


@pytest.mark.parametrize("noun", READ, ids=lambda noun: noun.__name__)
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_a_noun_survives_the_round_trip(noun: Any, data: st.DataObject) -> None:
    sent = data.draw(st.from_type(noun))
    assert codec.from_json(noun, over_the_wire(sent)) == sent


TIME = over_the_wire(StepTime(tokens=300.0, phases={Phase.FORWARD: 0.25}))
CARD = over_the_wire(Hardware(name="a", origin="cpu", total_bytes=1, free_bytes=1, non_torch_bytes=0))
READING = over_the_wire(MemoryReading.from_stats({}))


def test_a_value_of_another_type_is_refused_by_its_path() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (MemoryReading, {}, "required field `allocated_bytes`"),
        (MemoryReading, {**READING, "reserved_bytes": True}, "`int`, got `bool` - at `$.reserved_bytes`"),
        (StepTime, {**TIME, "phases": {"backwards": 1.0}}, "'backwards' - at `key` in `$.phases`"),
        (DataProfile, {"rows_by_length": {"ten": 99}}, "`int`, got `str` - at `key` in `$.rows_by_length`"),
        (Hardware, {**CARD, "compute_capability": [8, "0"]}, "`int`, got `str` - at `$.compute_capability[1]`"),
        (Footprint, {"memory": {"phases": [7]}, "awake": None}, "phases, modules_at_peak, parts_at_peak should be"),
    ]
    for noun, values, problem in refused:
        with pytest.raises(codec.CodecError, match=re.escape(problem)):
            codec.from_json(noun, values)
