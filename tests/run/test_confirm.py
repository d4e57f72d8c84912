"""A probe confirms a plan, replaces it by a plan that fits, or ends with the measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from nouns import TRL_DEFAULTS, divided

from autotrain_mem import api
from autotrain_mem.machine.catalog import named
from autotrain_mem.planning.calibration import Correction, Line
from autotrain_mem.run import confirm
from autotrain_mem.run.confirm import MOST_PROBES, ProbeBackend, Replanned, confirmed, is_probed
from autotrain_mem.support import codec
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import Estimate, Hardware, Job, Knobs, Phase, Plan, Probe, PythonCall, Topology
from tests.fake_worker import FakeWorker, rehearsals, toy
from tests.probe_examples import BUDGET, CARD, ROW_TOKENS, predicted, probe
from tests.report.report_examples import UNCHANGED_PLAN

JOB = Job(method="sft", model="here/m", dataset=None, arguments={"max_length": 512})


def rows(count: int) -> Knobs:
    return divided(TRL_DEFAULTS, count, 8 // count)


def plan(estimate: Estimate) -> Plan:
    bare = replace(UNCHANGED_PLAN, job=JOB, defaults=TRL_DEFAULTS, attempts=(), data=None)
    return replace(bare, estimate=estimate, warnings=("the disk is nearly full",), row_tokens=ROW_TOKENS)


@dataclass
class FakeBackend:
    """A model of 20 MiB, whose rows are predicted at 10 MiB each and take the MiB of ``needed``."""

    needed: Callable[[int], int]
    cards: list[Hardware] = field(default_factory=list)
    """The device at each look; the last one stays."""
    row_tokens: int | None = ROW_TOKENS
    is_pressed: bool = False
    """The first probe releases its cache."""
    non_torch_bytes: int | None = 0
    corrections: list[Correction] = field(default_factory=list)
    planned_on: list[Hardware] = field(default_factory=list)
    probed: list[int] = field(default_factory=list)

    def look(self) -> Hardware:
        return (self.cards.pop(0) if len(self.cards) > 1 else self.cards[0]) if self.cards else CARD

    def budget_bytes(self, hardware: Hardware) -> int:
        return hardware.free_bytes - 4 * MIB

    def probe(self, made: Plan) -> Probe:
        count = made.knobs.per_device_train_batch_size
        self.probed.append(count)
        peak_mib = 20 + self.needed(count)
        if peak_mib > 104:
            return probe(104, load_mib=20, knobs=made.knobs, fits=False, refused_in=Phase.BACKWARD)
        retries = int(self.is_pressed and len(self.probed) == 1)
        tried = probe(peak_mib, load_mib=20, retries=retries, knobs=made.knobs, fits=not retries)
        return replace(tried, row_tokens=self.row_tokens, non_torch_bytes=self.non_torch_bytes)

    def planned(self, correction: Correction, hardware: Hardware) -> Replanned:
        self.corrections.append(correction)
        self.planned_on.append(hardware)
        for count in (8, 4, 2, 1):
            raw = replace(of(count), hardware=hardware, budget_bytes=self.budget_bytes(hardware))
            told = replace(raw, memory=correction.of(raw.memory, raw.knobs))
            if told.fits:
                return Replanned(plan=plan(told), predicted=raw)
        raise DoesNotFitError("here/m does not fit toy.", hint="--gpu larger")


def of(count: int) -> Estimate:
    return predicted(20 + 10 * count, load_mib=20, knobs=rows(count))


def as_predicted(count: int) -> int:
    return 10 * count


CHOSEN = plan(of(4))


def test_a_plan_that_fits_stays_and_is_not_probed_again_while_it_fits() -> None:
    backend, events = FakeBackend(as_predicted), list[Mapping[str, Any]]()
    made = confirmed(CHOSEN, backend, events.append)
    assert made == replace(CHOSEN, experience=made.experience)
    assert [(each.knobs, each.fits) for each in made.experience.probes] == [(rows(4), True)]
    assert [event["event"] for event in events] == ["probing", "probe"]
    assert (events[1]["predicted_bytes"], events[1]["budget_bytes"]) == (60 * MIB, BUDGET)
    assert not backend.corrections
    backend = FakeBackend(as_predicted)
    assert confirmed(made, backend) == made
    assert not backend.probed


def test_a_plan_moves_if_less_memory_is_free_than_when_it_was_made_or_probed() -> None:
    probed = confirmed(CHOSEN, FakeBackend(as_predicted))
    for before in (CHOSEN, probed):
        events = list[Mapping[str, Any]]()
        backend = FakeBackend(as_predicted, cards=[replace(CARD, free_bytes=50 * MIB)])
        made = confirmed(before, backend, events.append)
        assert events[0] == {"event": "room", "before_bytes": 104 * MIB, "now_bytes": 50 * MIB}
        assert (made.knobs, made.estimate.budget_bytes) == (rows(2), 46 * MIB)
        assert backend.probed == [2]
    with pytest.raises(DoesNotFitError, match=r"needs 60\.0 MiB .* but only 50\.0 MiB of toy are free now"):
        confirmed(CHOSEN, FakeBackend(as_predicted, cards=[replace(CARD, free_bytes=50 * MIB)]), may_move=False)


def test_a_probe_that_does_not_fit_corrects_the_prediction() -> None:
    """4 rows are predicted to need 60 MiB and need 108, so 2 rows are expected to need 64, and do."""
    events = list[Mapping[str, Any]]()
    made = confirmed(CHOSEN, FakeBackend(lambda count: 22 * count), events.append)
    assert [event["event"] for event in events] == ["probing", "probe", "replanned", "probing", "probe"]
    assert codec.from_json(Plan, events[2]["plan"]).knobs == made.knobs == rows(2)
    assert made.warnings == CHOSEN.warnings
    made = confirmed(CHOSEN, FakeBackend(lambda count: 90 if count == 4 else 5 * count))
    assert [each.fits for each in made.experience.probes] == [False, True]
    assert made.estimate.memory.peak_allocated_bytes == made.estimate.reserved.peak_reserved_bytes
    assert made.estimate.memory.peak_allocated_bytes == (20 + 5 * made.knobs.per_device_train_batch_size) * MIB


@pytest.mark.parametrize(
    ("needed", "start", "fits", "probed"),
    [
        pytest.param(lambda n: 20 * n + 2, 4, [False, True], [4, 2], id="more than the budget, less than the card"),
        pytest.param(lambda n: 5 * n, 2, [True, True], [2, 8], id="far less than predicted moves up once"),
        pytest.param(lambda n: 5 * n if n < 8 else 90, 2, [True, False], [2, 8], id="the first one stays"),
        pytest.param(lambda n: 8 * n, 2, [True], [2], id="a little less moves nothing"),
    ],
)
def test_probes_move_a_plan(needed: Callable[[int], int], start: int, fits: list[bool], probed: list[int]) -> None:
    backend = FakeBackend(needed)
    made = confirmed(plan(of(start)), backend)
    assert (backend.probed, [each.fits for each in made.experience.probes]) == (probed, fits)
    assert made.knobs == rows(probed[fits.index(True) if False in fits else -1])
    assert confirmed(plan(of(start)), FakeBackend(needed)) == made, "the same probes lead to the same plan"


def test_three_probes_are_made_at_most_and_the_error_says_what_they_measured() -> None:
    backend = FakeBackend(lambda count: 90)
    with pytest.raises(DoesNotFitError) as raised:
        confirmed(CHOSEN, backend)
    assert len(backend.probed) <= MOST_PROBES
    assert raised.value.message.count("probed") == len(backend.probed)
    assert "out of memory in the backward phase" in raised.value.message
    with pytest.raises(DoesNotFitError) as raised:
        confirmed(plan(of(1)), FakeBackend(lambda count: 90))
    assert raised.value.message.splitlines()[0] == "here/m does not fit toy."
    assert "probed 1 x 8 rows of 300 tokens: held 104.0 MiB of 100.0 MiB" in raised.value.message
    assert raised.value.hint == "--gpu larger"


def test_probes_of_shorter_rows_and_of_the_users_settings_move_nothing() -> None:
    backend = FakeBackend(lambda count: count, row_tokens=ROW_TOKENS - 1)
    assert confirmed(plan(of(2)), backend).knobs == rows(2)
    assert backend.probed == [2]
    assert confirmed(plan(of(2)), FakeBackend(lambda count: 1), may_move=False).knobs == rows(2)
    with pytest.raises(DoesNotFitError, match="each probe needed more than the budget") as raised:
        confirmed(CHOSEN, FakeBackend(lambda count: 90), may_move=False)
    assert "--no_probe" in raised.value.hint


def test_a_released_cache_does_not_fit_and_memory_outside_torch_is_planned_with() -> None:
    backend = FakeBackend(as_predicted, is_pressed=True)
    assert confirmed(CHOSEN, backend).knobs == rows(2)
    assert backend.probed == [4, 2]
    backend = FakeBackend(as_predicted, non_torch_bytes=50 * MIB)
    made = confirmed(CHOSEN, backend)
    assert [each.fits for each in made.experience.probes] == [False, True]
    assert [card.non_torch_bytes for card in backend.planned_on] == [50 * MIB]
    assert made.knobs == rows(2)


def test_memory_outside_torch_is_unknown_if_others_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, a probe measures the drop in free memory, in which a desktop's compositor counts."""
    card = replace(named("rtx3090"), origin="detected", topology=Topology(devices=2, uuids=("A", "B")))
    asked: Any = {"rehearsals": rehearsals(FakeWorker(), JOB, card), "device": card, "folder": tmp_path}
    probed = replace(probe(50, load_mib=20, knobs=CHOSEN.knobs), non_torch_bytes=3)
    monkeypatch.setattr(confirm, "run_probe", lambda *_: probed)
    for moved_mib, known_bytes in ((16, 3), (17, None), (-17, None)):
        free = iter([9000, 9000, 9000, 9000 + moved_mib])  # of A and B, before and after
        monkeypatch.setattr(confirm, "as_now", lambda card, free=free: replace(card, free_bytes=next(free) * MIB))
        backend = ProbeBackend(simulate=False, workers=Mock(), **asked)
        assert backend.probe(CHOSEN).non_torch_bytes == known_bytes


def test_only_a_trainers_own_process_on_a_gpu_without_vllm_is_probed() -> None:
    assert is_probed(JOB, CARD, vllm_share_bytes=0)
    assert not is_probed(JOB, replace(CARD, origin="cpu"), vllm_share_bytes=0)
    assert not is_probed(JOB, CARD, vllm_share_bytes=GIB)
    call = PythonCall(path="call", holds_model=False, holds_rows=True, digest="")
    assert not is_probed(replace(JOB, python_call=call), CARD, vllm_share_bytes=0), "a drop-in trainer"


def test_the_search_is_repeated_with_its_own_workers_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that needs 18 GiB more leads to another level; rehearsals are not repeated."""
    worker, card, ended = FakeWorker(longest=300), toy(32), list[bool]()
    workers: Any = api.Workers(started=[worker])
    monkeypatch.setattr(api.Workers, "__exit__", lambda *_: ended.append(True))
    asked_of = replace(rehearsals(worker, JOB, card), workers=workers)
    before = api.plan(asked_of, to_train=True)
    backend = ProbeBackend(rehearsals=asked_of, device=card, simulate=True, folder=tmp_path, workers=lambda: workers)
    peak = before.estimate.memory.phases[Phase.BACKWARD]
    line = Line(predicted_bytes=peak, measured_bytes=peak + 18 * GIB)
    moved = backend.planned(Correction(lines={Phase.BACKWARD: line}), card)
    assert ended == [True]
    assert (before.level, moved.plan.level) == ("lossless", "lossless, offloading")
    assert moved.plan.estimate.memory.peak_allocated_bytes == moved.predicted.memory.peak_allocated_bytes + 18 * GIB
    assert moved.plan.estimate.fits
    asked = len(worker.asked)
    assert backend.planned(Correction(lines={Phase.BACKWARD: line}), card).plan.knobs == moved.plan.knobs
    assert len(worker.asked) == asked
