"""Single facts in words, the lines that methods differ in, and what was tried."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from nouns import TRL_DEFAULTS
from report_examples import (
    ASSUMED_TIME,
    CHOSEN,
    DPO_PLAN,
    GRPO_KNOBS,
    GRPO_PLAN,
    LONG_SEARCH,
    PASSED_OVER,
    PLAN,
    PPO_KNOBS,
    PPO_PLAN,
    REWARD_PLAN,
    WHOLE,
    sampling,
)
from test_console import rendered, shown_sums

from autotrain_mem.planner.levels import levels
from autotrain_mem.planner.space import Space, make_space
from autotrain_mem.report import formatting
from autotrain_mem.report.console import attempts_view, estimate_view, plan_view
from autotrain_mem.spec import Harm, Job, Knobs, Owner, Phase, Plan
from autotrain_mem.spec.model import ModelFacts


def plan_text(plan: Plan) -> str:
    return rendered(plan_view(plan))


def test_durations_carry_over_where_they_round_up() -> None:
    said = [formatting.duration(seconds) for seconds in (0, 41.27, 59.94, 59.96, 200.4, 3599.6, 7512)]
    assert said == ["0.0 s", "41.3 s", "59.9 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min"]


def test_a_share_that_is_there_never_reads_as_zero() -> None:
    assert [formatting.percent(share) for share in (0.0, 0.0001, 0.0321, 1.0)] == [
        "0.0 %",
        "less than 0.1 %",
        "3.2 %",
        "100.0 %",
    ]


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

    knobs = replace(CHOSEN, max_length=max_length, gradient_checkpointing=False)
    flags = " ".join(line.removesuffix("\\") for line in formatting.flag_lines("sft", knobs)).split()
    parsed = make_parser(prog="trl sft").parse_args([*flags, "--model_name_or_path", "any", "--output_dir", "any"])
    assert replace(Knobs.from_json(vars(parsed)), per_device_eval_batch_size=None) == knobs


def test_what_trl_does_not_know_is_no_flag_of_trl() -> None:
    knobs = replace(CHOSEN, optimizer_offload=True, expandable_segments=True)
    assert not re.search("offload|expandable", " ".join(formatting.flag_lines("sft", knobs)))
    assert formatting.own_flags(knobs) == "--optimizer_offload --expandable_segments"
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
    assert "completions of up to 53; no prompt is truncated" in plan_text(PPO_PLAN)
    assert "103,022 prompts: p50 88, p95 163, p99 214, p99.9 290, max 311 tokens" in plan_text(PPO_PLAN)


@pytest.mark.parametrize(("plan", "word"), [(PLAN, "truncated"), (DPO_PLAN, "truncated"), (REWARD_PLAN, "dropped")])
def test_data_that_were_not_read_are_not_called_whole(plan: Plan, word: str) -> None:
    unread = replace(plan, data=None)
    assert f"not read: how much of it is {word} is not known" in plan_text(unread)


def test_a_pair_that_is_not_truncated_is_no_row() -> None:
    assert "no pair is truncated" in plan_text(replace(DPO_PLAN, data=WHOLE))


def test_the_padding_of_prompts_is_not_told_since_completions_pad_more() -> None:
    assert "padding" not in plan_text(PPO_PLAN)


def test_packed_rows_have_no_padding() -> None:
    packed = replace(PLAN, proposals=(), estimate=replace(PLAN.estimate, knobs=replace(CHOSEN, packing=True)))
    assert "padding" not in plan_text(packed).replace("padding token", "")
    assert re.search(r"^ +packed\n +max_length 768 truncates", plan_text(packed), re.MULTILINE)


# Speed.


def test_speed_has_as_many_digits_as_a_prediction_is_good_for() -> None:
    assert [formatting.rate(rate) for rate in (0.0, 3.17, 9.99, 10.4, 1240.0, 98765.4)] == [
        *("0.0", "3.2", "10.0", "10", "1,240", "98,765"),
    ]
    assert [formatting.brief(seconds) for seconds in (0.0042, 0.066, 0.9994, 0.9996, 6.6)] == [
        *("4 ms", "66 ms", "999 ms", "1.0 s", "6.6 s"),
    ]


def test_a_plan_says_how_long_the_run_will_take() -> None:
    assert "1,240 tokens/s, 6.6 s a step; 935 steps in about 1 h 42 min" in plan_text(PLAN)
    assert "1,240 tokens/s, 6.6 s a step\n" in plan_text(replace(PLAN, optimizer_steps=None))


def test_seconds_by_another_cards_rates_are_not_told() -> None:
    text = plan_text(replace(PLAN, estimate=replace(PLAN.estimate, time=ASSUMED_TIME)))
    assert "not known: rates of a100-80gb stand in for this device's, to rank plans only" in text
    assert not re.search("tokens/s| a step;", text)


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


def test_a_level_that_does_not_fit_says_where_it_would() -> None:
    row = re.search(r"rounding +17.3 GiB +does not fit; would on rtx4090 \(23.5 GiB\)\n", plan_text(PLAN))
    assert row is not None


def test_a_gentler_level_that_is_too_slow_names_the_flag_that_takes_it() -> None:
    text = plan_text(PASSED_OVER)
    assert "lossless fits, but takes 5.3 times as long: --max_slowdown 6 takes it" in text
    assert "8-bit base fits" not in text


def test_a_level_of_more_harm_has_its_speed_and_no_flag() -> None:
    assert re.search(
        r"LoRA on an 8-bit base +6.41 GiB +fits, 0.8 x the speed: 4 x 16, 8-bit LoRA, length 768\n",
        plan_text(PASSED_OVER),
    )


def test_warnings_come_before_the_settings() -> None:
    assert "warning  The tokenizer has no padding token" in plan_text(PLAN).split("\nsettings\n")[0]


# What is loud.


def test_a_quantized_base_is_said_before_any_table() -> None:
    assert "rounds the frozen base model to 4 bits" in plan_text(LONG_SEARCH).split("settings")[0]


def test_every_lever_that_changes_what_is_trained_is_loud() -> None:
    from autotrain_mem.planner.ladder import LADDER

    assert set(formatting.LOUD) == {row.knobs[0] for row in LADDER if row.harm is Harm.WHAT_IS_TRAINED}


# What was tried.


@pytest.mark.parametrize("plan", [LONG_SEARCH, PPO_PLAN], ids=lambda plan: str(plan.method))
def test_no_attempt_takes_two_lines_at_80_columns(plan: Plan) -> None:
    table = rendered(attempts_view(plan), 80).split("\n>   ")[0]
    assert len(table.splitlines()) == 2 + len(plan.attempts)


def test_the_same_point_of_few_layers_and_of_all_is_told_apart() -> None:
    text = rendered(attempts_view(PLAN), 80)
    assert re.search(r"\n 4  4 x 16    LoRA, bfloat16 +8.51 +1,240\n>5  4 x 16 w  LoRA, bfloat16 +8.51 +1,240\n", text)
    assert "w             rehearsed on the whole model, the others on copies of 4 layers" in text


def test_where_every_attempt_was_whole_none_is_marked() -> None:
    whole = tuple(replace(attempt, rehearsed_layers=None) for attempt in PLAN.attempts)
    assert not re.search(" w |whole model", rendered(attempts_view(replace(PLAN, attempts=whole))))


def test_what_does_not_fit_has_no_speed() -> None:
    text = rendered(attempts_view(PLAN))
    assert "1,301" not in text
    assert text.count("too much") == sum(not attempt.fits for attempt in PLAN.attempts)


def test_an_attempt_without_checkpointing_has_a_star() -> None:
    text = rendered(attempts_view(LONG_SEARCH))
    assert len(re.findall(r"1 x 128 \*", text)) == 1
    assert "*             without gradient checkpointing" in text
    assert "*" not in rendered(attempts_view(PLAN))


def test_attempts_with_other_settings_read_otherwise() -> None:
    tried = [attempt.knobs for attempt in LONG_SEARCH.attempts if attempt.knobs.gradient_checkpointing]
    said = [formatting.difference(knobs, tried[0]) for knobs in tried]
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
    assert re.search(r"vLLM +takes 3.49 GiB of the card", plan_text(GRPO_PLAN))
    assert "vLLM" not in plan_text(PPO_PLAN)


def test_settings_name_completions_by_the_methods_own_flag() -> None:
    assert "4 x 16 completions, max_completion_length 512" in formatting.settings(GRPO_KNOBS)
    assert "response_length 53" in formatting.settings(PPO_KNOBS)
    assert "generated 16 at a time" in formatting.settings(PPO_KNOBS)


def test_settings_name_every_switch_that_is_on() -> None:
    switches = ("packing", "load_in_4bit", "activation_offloading", "optimizer_offload", "expandable_segments")
    for name in switches:
        assert formatting.settings(replace(TRL_DEFAULTS, **{name: True})) != formatting.settings(TRL_DEFAULTS)
