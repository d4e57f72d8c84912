"""Single facts in words, the lines that methods differ in, and what was tried."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import report_examples as examples
from nouns import TRL_DEFAULTS
from test_console import rendered

from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.space import Space, make_space
from autotrain_mem.report import formatting
from autotrain_mem.report.plan import plan_view
from autotrain_mem.spec import Harm, Job, Knobs, Owner, Phase, Plan
from autotrain_mem.spec.model import ModelFacts


def plan_text(plan: Plan) -> str:
    return rendered(plan_view(plan))


def test_durations_carry_over_and_rates_and_shares_have_the_digits_that_they_are_good_for() -> None:
    said = [formatting.duration(seconds) for seconds in (0, 41.27, 59.94, 59.96, 200.4, 3599.6, 7512)]
    assert said == ["0.0 s", "41.3 s", "59.9 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"]
    brief = [formatting.brief(seconds) for seconds in (0.0042, 0.066, 0.9994, 0.9996, 6.6)]
    assert brief == ["4 ms", "66 ms", "999 ms", "1.0 s", "6.6 s"]
    rates = [formatting.rate(rate) for rate in (0.0, 3.17, 9.99, 10.4, 98765.4)]
    assert rates == ["0.0", "3.2", "10.0", "10", "98,765"]
    shares = [formatting.percent(share) for share in (0.0, 0.0001, 0.0321, 1.0)]
    assert shares == ["0.0 %", "less than 0.1 %", "3.2 %", "100.0 %"]


def test_every_harm_owner_and_phase_has_its_word() -> None:
    assert set(formatting.OWNERS) == set(Owner)
    assert set(formatting.PHASES) == set(Phase)
    harms = list(formatting.HARMS)
    assert all(less < more for less, more in pairwise(harms))


# Flags.


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [768, None])
def test_trl_reads_the_flags_back_as_the_same_settings(max_length: int | None) -> None:
    from trl.scripts.sft import make_parser

    knobs = replace(examples.CHOSEN, max_length=max_length, gradient_checkpointing=False)
    flags = " ".join(line.removesuffix("\\") for line in formatting.flag_lines("sft", knobs)).split()
    parsed = make_parser(prog="trl sft").parse_args([*flags, "--model_name_or_path", "any", "--output_dir", "any"])
    read = {each.name: getattr(parsed, each.name) for each in fields(Knobs) if hasattr(parsed, each.name)}
    assert replace(Knobs(**read), per_device_eval_batch_size=None) == knobs


def test_what_trl_does_not_know_is_no_flag_of_trl() -> None:
    knobs = replace(examples.CHOSEN, optimizer_offload=True, expandable_segments=True)
    assert not re.search("offload|expandable", " ".join(formatting.flag_lines("sft", knobs)))
    assert "and only autofit has --optimizer_offload" in plan_text(examples.DPO_PLAN)


# What methods say of their data.


@pytest.mark.parametrize(
    ("plan", "word"),
    [(examples.PLAN, "truncated"), (examples.DPO_PLAN, "truncated"), (examples.REWARD_PLAN, "dropped")],
)
def test_data_that_were_not_read_are_not_called_whole(plan: Plan, word: str) -> None:
    unread = replace(plan, data=None)
    assert f"not read: how much of it is {word} is not known" in plan_text(unread)


# What else there was.


def _space(forbid: frozenset[str]) -> Space:
    job = Job(method="sft", model="m", dataset=None, arguments={}, forbid=forbid)
    return make_space(TRL_DEFAULTS, job, ModelFacts(context_length=None, is_quantized=False), longest=None)


def test_levels_are_told_by_their_planners_names_least_harm_first() -> None:
    limits = (set(), {"4bit_base"}, {"4bit_base", "8bit_base"})
    every = [[level.name for level in levels(_space(frozenset(forbid)))] for forbid in limits]
    told = list(formatting.LEVELS)
    assert all([name for name in told if name in names] == names for names in every)
    assert {"as given"}.union(*every) == set(told)


def test_every_lever_that_changes_what_is_trained_is_loud() -> None:
    from autotrain_mem.planner.levers import LADDER

    assert all(bool(row.warning) is (row.harm is Harm.WHAT_IS_TRAINED) for row in LADDER)


# Estimates.
