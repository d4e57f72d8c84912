"""Single facts in words, the lines that methods differ in, and what was tried."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from nouns import TRL_DEFAULTS
from report_examples import (
    CHOSEN,
    DPO_PLAN,
    GRPO_KNOBS,
    GRPO_PLAN,
    LONG_SEARCH,
    PLAN,
    PPO_KNOBS,
    PPO_PLAN,
    REWARD_PLAN,
    sampling,
)
from test_console import rendered, shown_sums

from autotrain_mem.report import wording
from autotrain_mem.report.console import attempts_view, estimate_view, plan_view
from autotrain_mem.spec import Harm, Knobs, Owner, Phase, Plan


def plan_text(plan: Plan) -> str:
    return rendered(plan_view(plan, defaults=None))


def test_durations_carry_over_where_they_round_up() -> None:
    said = [wording.duration(seconds) for seconds in (0, 41.27, 59.94, 59.96, 200.4, 3599.6, 7512)]
    assert said == ["0.0 s", "41.3 s", "59.9 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"]


def test_a_share_that_is_there_never_reads_as_zero() -> None:
    assert [wording.percent(share) for share in (0.0, 0.0001, 0.0321, 1.0)] == [
        "0.0 %",
        "less than 0.1 %",
        "3.2 %",
        "100.0 %",
    ]


def test_every_harm_owner_and_phase_has_its_word() -> None:
    assert set(wording.OWNERS) == set(Owner)
    assert set(wording.PHASES) == set(Phase)
    harms = list(wording.HARMS)
    assert all(less < more for less, more in pairwise(harms))


# Flags.


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [768, None])
def test_trl_reads_the_flags_back_as_the_same_settings(max_length: int | None) -> None:
    from trl.scripts.sft import make_parser

    knobs = replace(CHOSEN, max_length=max_length, gradient_checkpointing=False)
    flags = " ".join(line.removesuffix("\\") for line in wording.flag_lines("sft", knobs)).split()
    parsed = make_parser(prog="trl sft").parse_args([*flags, "--model_name_or_path", "any", "--output_dir", "any"])
    assert replace(Knobs.from_json(vars(parsed)), per_device_eval_batch_size=None) == knobs


def test_what_trl_does_not_know_is_no_flag_of_trl() -> None:
    knobs = replace(CHOSEN, optimizer_offload=True, expandable_segments=True)
    assert not re.search("offload|expandable", " ".join(wording.flag_lines("sft", knobs)))
    assert wording.own_flags(knobs) == "--optimizer_offload --expandable_segments"
    assert "and only autofit has --optimizer_offload" in plan_text(DPO_PLAN)


def test_ppo_is_a_command_of_ours_alone() -> None:
    assert "flags of autofit ppo" in plan_text(PPO_PLAN)
    assert "flags of trl grpo" in plan_text(GRPO_PLAN)


# What methods say of their data.


def test_a_batch_counts_what_the_method_trains_on() -> None:
    counted = {plan.method: plan_text(plan) for plan in (PLAN, DPO_PLAN, REWARD_PLAN, GRPO_PLAN, PPO_PLAN)}
    nouns = {method: re.findall(r"\((\w+) at once x", text) for method, text in counted.items()}
    assert nouns == {
        "sft": ["rows"],
        "dpo": ["pairs"],
        "reward": ["pairs"],
        "grpo": ["completions"],
        "ppo": ["completions"],
    }


def test_prompts_that_were_not_read_are_said_to_be_assumed() -> None:
    text = plan_text(GRPO_PLAN)
    assert "prompts of up to 512 tokens and completions of 512 are assumed: no data were read" in text
    assert "truncated" not in text


def test_prompts_that_were_read_are_never_truncated() -> None:
    assert "prompts of up to 311 tokens and completions of 53: no prompt is truncated" in plan_text(PPO_PLAN)


@pytest.mark.parametrize(("plan", "word"), [(PLAN, "truncated"), (DPO_PLAN, "truncated"), (REWARD_PLAN, "dropped")])
def test_data_that_were_not_read_are_not_called_whole(plan: Plan, word: str) -> None:
    unread = replace(plan, truncated_rows_fraction=None, truncated_tokens_fraction=None)
    assert f"the dataset was not read: how much of it is {word} is not known" in plan_text(unread)


def test_a_pair_that_is_not_truncated_is_no_row() -> None:
    whole = replace(DPO_PLAN, truncated_rows_fraction=0.0, truncated_tokens_fraction=0.0)
    assert "no pair is truncated" in plan_text(whole)


# What is loud.


def test_a_quantized_base_is_said_before_any_table() -> None:
    assert "rounds the frozen base model to 4 bits" in plan_text(LONG_SEARCH).split("settings")[0]


def test_every_lever_that_changes_what_is_trained_is_loud() -> None:
    from autotrain_mem.planner.ladder import LADDER

    assert set(wording.LOUD) == {row.knobs[0] for row in LADDER if row.harm is Harm.WHAT_IS_TRAINED}


# What was tried.


@pytest.mark.parametrize("plan", [LONG_SEARCH, PPO_PLAN], ids=lambda plan: str(plan.method))
def test_no_attempt_takes_two_lines_at_80_columns(plan: Plan) -> None:
    table = rendered(attempts_view(plan), 80).split("\nas asked for  ")[0]
    assert len(table.splitlines()) == 2 + len(plan.attempts)


def test_an_attempt_without_checkpointing_has_a_star() -> None:
    text = rendered(attempts_view(LONG_SEARCH))
    assert len(re.findall(r"1 x 128 \*", text)) == 1
    assert "*             without gradient checkpointing" in text
    assert "*" not in rendered(attempts_view(PLAN))


def test_attempts_with_other_settings_read_otherwise() -> None:
    tried = [attempt.knobs for attempt in LONG_SEARCH.attempts if attempt.knobs.gradient_checkpointing]
    said = [wording.difference(knobs, tried[0]) for knobs in tried]
    assert said[0] == "as asked for"
    assert len(said) == len(set(said))


# Estimates.


def test_an_owner_of_nothing_has_no_line() -> None:
    figures, _ = shown_sums(rendered(estimate_view(sampling(GRPO_KNOBS))))
    assert "KV cache" in figures
    assert not {"gradients", "optimizer state", "activations", "vLLM's share"} & figures.keys()


def test_vllms_share_is_a_line_of_the_sum_and_of_the_plan() -> None:
    figures, _ = shown_sums(rendered(estimate_view(GRPO_PLAN.estimate)))
    assert figures["vLLM's share"] == 349
    assert "vLLM takes 3.49 GiB of the card for itself" in plan_text(GRPO_PLAN)
    assert "vLLM" not in plan_text(PPO_PLAN)


def test_settings_name_completions_by_the_methods_own_flag() -> None:
    assert "4 x 16 completions, max_completion_length 512" in wording.settings(GRPO_KNOBS)
    assert "response_length 53" in wording.settings(PPO_KNOBS)
    assert "generated 16 at a time" in wording.settings(PPO_KNOBS)


def test_settings_name_every_switch_that_is_on() -> None:
    switches = ("packing", "load_in_4bit", "activation_offloading", "optimizer_offload", "expandable_segments")
    for name in switches:
        assert wording.settings(replace(TRL_DEFAULTS, **{name: True})) != wording.settings(TRL_DEFAULTS)
