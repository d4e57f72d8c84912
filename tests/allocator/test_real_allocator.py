"""Our simulator says, event by event, what torch's compiled CUDA allocator said.

The answers in ``recorded`` were written by ``scripts/allocator_parity --record tests/allocator/recorded``: a file for
each setting, on a card so full that allocations are refused or need cached memory. The script compares far more."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from real_allocator import Comparison, simulated

from autotrain_mem.allocator.settings import _READERS

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
RECORDINGS: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDED]


@pytest.mark.parametrize("recording", RECORDINGS, ids=[path.stem for path in RECORDED])
def test_every_event_is_answered_as_torch_answers_it(recording: dict[str, Any]) -> None:
    events = [event for event, _, _ in recording["answers"]]
    ours = list(simulated(recording["settings"], recording["capacity_bytes"], recording["total_bytes"], events))
    comparison = Comparison()
    for number, ((event, said, values), answer) in enumerate(zip(recording["answers"], ours, strict=True)):
        real = {**said, "numbers": dict(zip(recording["numbers"], values, strict=True))}
        assert comparison.differences(event, real, answer) == [], f"event {number}: {event}"
    told = {name for name, value in ours[-1]["numbers"].items() if value}
    assert told <= recording["at_the_end"].keys(), "a number under no name of torch's is compared with nothing"
    assert comparison.differences("the end", {"numbers": recording["at_the_end"]}, ours[-1]) == []


def test_the_recordings_cover_every_setting_and_every_ending() -> None:
    settings = [recording["settings"] for recording in RECORDINGS]
    assert "" in settings
    assert {name for text in settings for name in re.findall(r"[a-z]\w+(?=:)", text)} == _READERS.keys()
    counted = [recording["at_the_end"] for recording in RECORDINGS]
    assert sum(one["num_alloc_retries"] - one.get("num_ooms", 0) for one in counted) > 20  # rescued
    assert sum(one.get("num_ooms", 0) for one in counted) > 20
