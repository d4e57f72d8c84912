"""What a plan for several machines says beside what it says for one."""

from dataclasses import replace

from nouns import TRL_DEFAULTS

from autotrain_mem.planning.plan import NOT_MODELLED, machine_warnings
from autotrain_mem.types import Job, Topology

JOB = Job(method="dpo", model="toy-1B", dataset=None)
MANY = Topology(nodes=128, devices=8)
KNOBS = replace(TRL_DEFAULTS, per_device_train_batch_size=8, gradient_accumulation_steps=1, processes=1024)


def test_one_machine_has_nothing_to_be_warned_of() -> None:
    assert [*machine_warnings(JOB, replace(KNOBS, processes=8), Topology(devices=8))] == []


def test_an_effective_batch_that_nobody_asked_for_is_told_with_what_it_comes_from() -> None:
    modelled, batch = machine_warnings(JOB, KNOBS, MANY)
    assert modelled == NOT_MODELLED
    assert batch.startswith("8,192 pairs in each optimizer step: with no --effective_batch_size given")
    assert batch.endswith("--effective_batch_size takes multiples of 1024")


def test_a_batch_that_was_asked_for_is_not_questioned() -> None:
    for asked in (replace(JOB, effective_batch_size=2048), replace(JOB, arguments={"gradient_accumulation_steps": 2})):
        assert [*machine_warnings(asked, KNOBS, MANY)] == [NOT_MODELLED]
