"""Single facts in words, the lines that methods differ in, what was tried, and what ``explain`` tells of a plan."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import report_examples as examples
from nouns import TRL_DEFAULTS, divided
from probe_examples import probe
from report_examples import CHOSEN, PLAN
from test_console import CARDS, NO_FLASH, SHORTER, TEN, rendered
from test_contract import SLOW_TO_IMPORT, loaded_by

from autotrain_mem.report import formatting
from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.estimate_view import estimate_view
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.report.first_screen import COLUMNS, LINES, estimate_screen, first_screen
from autotrain_mem.report.plan_view import decision
from autotrain_mem.report.run_history import event_line
from autotrain_mem.search.levels import SMALLER_IMAGES_LEVEL, levels
from autotrain_mem.search.memo import candidate
from autotrain_mem.search.space import make_space
from autotrain_mem.support import codec
from autotrain_mem.support.files import write_json
from autotrain_mem.support.units import GIB, MIB, duration, percent
from autotrain_mem.types import METHODS, PLAN_NAME, Harm, Job, Knobs, Lever, ModelFacts, Plan, Proposal
from autotrain_mem.types.experience import OtherProcess
from autotrain_mem.types.gpu_comparison import NOTHING_FITS, Cards


def test_figures_carry_over_and_one_of_anything_is_singular() -> None:
    for write, value, text in (
        *((duration, *each) for each in ((0, "0.0 s"), (59.96, "1 min 00 s"), (3599.6, "1 h 00 min"))),
        *((percent, *each) for each in ((0.0, "0.0 %"), (0.0001, "less than 0.1 %"), (1.0, "100.0 %"))),
        *((METHODS["dpo"].rows, *each) for each in ((1, "1 pair"), (1200, "1,200 pairs"))),
        (formatting.rows, CHOSEN, "4 x 16 rows"),
        (formatting.rows, divided(CHOSEN, 1, 1), "1 x 1 row"),
    ):
        assert write(value) == text, value


def text_of(plan: Plan, width: int = 120) -> str:
    return rendered(explain_view(plan), width)


def test_what_is_trained_is_named_by_its_layers() -> None:
    for targets, words in ((("all-linear",), "on all linear layers"), (("q_proj", "o_proj"), "on q_proj o_proj")):
        assert formatting.trains(replace(CHOSEN, lora_target_modules=targets), None).endswith(words)
    assert formatting.trains(TRL_DEFAULTS, None) == "the whole model"


def test_a_plan_that_did_not_read_the_data_says_why() -> None:
    unread = replace(PLAN, data=None)
    for plan, why in (
        (replace(unread, job=replace(PLAN.job, dataset=None)), "since no --dataset is given"),
        (replace(unread, warnings=("The dataset could not be looked at.",)), "for the reason in the warnings"),
        (replace(unread, objects=""), "since a stream's rows are not known before they are trained on"),
    ):
        assert f"not counted, {why}: the truncated" in text_of(plan, 160)


def test_hours_are_shown_for_the_order_that_trains_and_targets_as_in_the_file() -> None:
    needed = replace(PLAN.estimate.memory, mixed_lengths=examples.MIXED)
    known = replace(PLAN, estimate=replace(PLAN.estimate, memory=needed))
    line = "up to 8.60 GiB are reserved in 1,000 steps (rows of every length, longest first)\n"
    assert line in text_of(known, 160)
    expanded = replace(known, estimate=replace(known.estimate, knobs=examples.EXPANDED))
    assert line.replace("8.60", "7.70") in text_of(expanded, 160)
    assert "1,000 steps" not in text_of(PLAN)
    change = examples.lever("lora_target_modules", None, ("all-linear",), Harm.WHAT_IS_TRAINED, "why")
    for each in (change, codec.from_json(Lever, codec.to_json(change))):
        assert "lora_target_modules  none -> all-linear" in text_of(replace(PLAN, levers=(each,)))


def test_an_estimate_shows_what_stays_unquantized_and_what_is_on_the_host() -> None:
    shown = examples.estimate()
    assert "pinned" not in rendered(estimate_view(shown))
    offloaded = replace(shown, memory=replace(shown.memory, unquantized_bytes=54 * GIB, pinned_host_bytes=3 * GIB))
    assert "host      3.00 GiB of pinned host memory" in rendered(estimate_view(offloaded))
    assert offloaded.unquantized == ""
    for bits, dtype, end in ((4, "bfloat16", "stays in bfloat16"), (8, "float32", "(--dtype bfloat16 halves it)")):
        knobs = replace(CHOSEN, dtype=dtype, **{f"load_in_{bits}bit": True})
        quantized = replace(offloaded, knobs=knobs)
        assert quantized.unquantized.startswith(f"54.0 GiB of the base are not quantized to {bits} bits")
        assert quantized.unquantized.endswith(end)
        assert f"base      {quantized.unquantized[:40]}" in rendered(estimate_view(quantized))
    assert replace(quantized, memory=shown.memory).unquantized == ""


@pytest.mark.slow
@pytest.mark.parametrize("max_length", [768, None])
def test_trl_reads_the_flags_back_as_the_same_settings(max_length: int | None) -> None:
    from trl.scripts.sft import make_parser

    knobs = replace(examples.CHOSEN, max_length=max_length, gradient_checkpointing=False)
    flags = " ".join(line.removesuffix("\\") for line in formatting.flag_lines("sft", knobs)).split()
    parsed = make_parser(prog="trl sft").parse_args([*flags, "--model_name_or_path", "any", "--output_dir", "any"])
    read = {each.name: getattr(parsed, each.name) for each in fields(Knobs) if hasattr(parsed, each.name)}
    assert replace(Knobs(**read), per_device_eval_batch_size=None, use_liger_kernel=None) == knobs


def test_levels_are_told_by_their_planners_names_least_harm_first() -> None:
    every: list[list[str]] = []
    for forbid in (set(), {"4bit_base"}, {"4bit_base", "8bit_base"}):
        job = Job(method="sft", model="m", dataset=None, forbid=frozenset(forbid))
        defaults = replace(TRL_DEFAULTS, precompute_ref_log_probs=False)
        space = make_space(defaults, job, ModelFacts(context_length=None, is_quantized=False), longest=None)
        every.append([level.name for level in levels(space)])
    assert all([name for name in formatting.LEVELS if name in names] == names for names in every)
    assert {"as given", SMALLER_IMAGES_LEVEL}.union(*every) == set(formatting.LEVELS)


def test_every_lever_that_changes_what_is_trained_is_loud_and_so_is_half_precision_that_loses_updates() -> None:
    from autotrain_mem.settings.levers import LADDER

    trained = {row.name for row in LADDER if row.harm is Harm.WHAT_IS_TRAINED}
    assert {row.name for row in LADDER if row.warning} == trained
    half = replace(TRL_DEFAULTS, dtype="bfloat16", learning_rate=2e-5)
    lost = replace(PLAN, levers=(), estimate=replace(PLAN.estimate, knobs=half))
    assert [text.plain for text in decision(lost)][1:] == [
        "loses most updates, which are smaller than bfloat16 can add to a weight: see the advice"
    ]


OTHERS = (
    OtherProcess(pid=42, name="python", used_bytes=2 * GIB),
    OtherProcess(pid=7, name="", used_bytes=GIB),
    OtherProcess(pid=0, name="", used_bytes=64 * MIB),
)
BEFORE = divided(CHOSEN, 8, 8, gradient_checkpointing=False)
PROBED = codec.to_json(replace(probe(1), others=OTHERS))
BESIDE = {"event": "probe", "probe": PROBED, "predicted_bytes": 1, "budget_bytes": 1}


def replanned(before: Knobs, **changes: object) -> dict[str, object]:
    """The plan as it was, and as these changes make it."""
    now = replace(PLAN, estimate=replace(PLAN.estimate, knobs=replace(before, **changes)))
    return {"event": "replanned", "before": codec.to_json(before), "plan": codec.to_json(now)}


def test_an_event_is_told_in_a_line() -> None:
    for event, said in (
        ({"event": "step", "step": 1}, ""),
        ({"event": "probing", "knobs": codec.to_json(CHOSEN)}, "probing 4 x 16: "),
        (BESIDE, "beside this run: python (42) 2.00 GiB, process (7) 1.00 GiB, others 64.0 MiB"),
        ({"event": "room", "before_bytes": 8 * GIB, "now_bytes": 6 * GIB}, "2.00 GiB of the card were taken"),
        ({"event": "room", "before_bytes": 6 * GIB, "now_bytes": 8 * GIB}, "2.00 GiB of the card were given back"),
        (
            {"event": "replanned", "before": codec.to_json(BEFORE), "plan": codec.to_json(PLAN)},
            "the plan changes to 4 x 16 rows, checkpointing on (from 8 x 8 rows, checkpointing off): needs 8.51 GiB",
        ),
        (replanned(CHOSEN, expandable_segments=True), "the plan now uses expandable segments: needs 7.70 GiB"),
        (
            replanned(examples.EXPANDED, expandable_segments=False),
            "the plan no longer uses expandable segments: needs 8.51 GiB",
        ),
    ):
        line = event_line(event)
        assert said in line
        assert bool(line) == bool(said), event


def test_shares_of_a_step_sum_to_the_whole() -> None:
    title = "peak allocated by phase, and the phase's share of a step's time"
    block = text_of(PLAN).split(f"{title}\n")[1].split("\n\n")[0]
    assert sum(map(float, re.findall(r"([\d.]+) %", block))) == pytest.approx(100, abs=0.2)  # each has one digit
    assumed = text_of(replace(PLAN, estimate=replace(PLAN.estimate, time=examples.ASSUMED_TIME)))
    shares = assumed.split(f"{title}, by the rates of a100-80gb\n")[1].split("\n\n")[0]
    assert "%" in shares
    assert not re.search(r"\d m?s ", shares)


def test_what_was_asked_to_be_as_much_as_fits_stands_beside_each_attempt() -> None:
    first, *others = examples.GRPO_PLAN.attempts or (candidate(examples.GRPO_PLAN.estimate),)
    more = replace(first.knobs, max_completion_length=4096, num_generations=64)
    plan = replace(examples.GRPO_PLAN, attempts=(first, *others, replace(first, knobs=more)))
    words = "max_completion_length 4096, LoRA, bfloat16, groups of 64"  # the plan's adapter was not asked for
    assert words in " ".join(text_of(plan).split("tried; needs")[1].split())
    adapted = replace(first.knobs, use_peft=True, lora_r=256)
    ranks = [replace(first, knobs=replace(adapted, lora_r=rank)) for rank in (8, 256)]
    assert "rank 256" in text_of(replace(examples.GRPO_PLAN, attempts=tuple(ranks))).split("tried; needs")[1]


def test_a_plan_is_explained_without_any_library_that_is_slow_to_import(tmp_path: Path) -> None:
    """Nothing but the standard library and rich, so that it answers at once."""
    write_json(tmp_path / PLAN_NAME, codec.to_json(PLAN))
    loaded, said = loaded_by(f"from autotrain_mem.cli import main\nassert main.run(['explain', '{tmp_path}']) == 0")
    assert said.startswith("autofit sft --model Qwen/Qwen2.5-1.5B\nfits rtx3060")
    assert not loaded & (SLOW_TO_IMPORT | {"yaml", "pynvml", "psutil"})


# A plan fits a terminal as it opens, and so do the cards on which it fits.

COMMAND = "autofit sft --model meta-llama/Llama-3.1-8B --dataset DATA --max_length 2048"
PLANS = {name: each for name, each in vars(examples).items() if isinstance(each, Plan)}
CROWDED = replace(
    PLAN,
    levers=tuple(replace(lever, why=lever.why * 3) for lever in examples.LEVERS * 4),
    warnings=tuple(f"warning {number} of a dataset that has {number} odd rows" * 3 for number in range(6)),
    questions=(Proposal(flags="--fit rounding", why="rounding would be 3.0 x as fast" * 4),) * 3,
    advice=(Proposal(flags="--lora_r 64", why="the data have more tokens" * 5),) * 3,
)


def lines(plan: Plan, columns: int = COLUMNS) -> list[str]:
    return rendered(first_screen(plan, COMMAND), columns, height=LINES).splitlines()


@pytest.mark.parametrize("plan", [*PLANS.values(), CROWDED], ids=[*PLANS, "CROWDED"])
def test_a_plan_takes_a_screen_and_says_all_that_must_not_be_overlooked(plan: Plan) -> None:
    shown = lines(plan)
    assert len(shown) <= LINES
    assert all(len(line) <= COLUMNS for line in shown)
    text = " ".join(" ".join(shown).split())
    assert shown[0].startswith("fits " if plan.estimate.fits else "does not fit ")
    assert COMMAND in text
    assert "-v" in shown[-1]
    for lever in plan.levers if plan is not CROWDED else ():
        assert lever.harm < Harm.WHAT_IS_TRAINED or f"{lever.name} " in text


def test_the_questions_stay_a_wide_terminal_shows_more_and_a_narrow_one_wraps_nothing_that_it_cuts() -> None:
    text = "\n".join(lines(CROWDED))
    assert text.count("option: ") == 3
    assert "warning 0" in text
    assert sum("…" in line for line in lines(PLAN, 200)) <= sum("…" in line for line in lines(PLAN))
    assert all(len(line) <= 40 for line in lines(PLAN, 40))


def test_only_a_small_window_cuts_a_line() -> None:
    assert any("…" in line for line in lines(CROWDED))
    for height in (None, 200):
        assert "…" not in rendered(first_screen(CROWDED, COMMAND), COLUMNS, height=height)


def test_an_estimate_takes_a_screen_too() -> None:
    for estimate in (examples.estimate(), examples.crowded(), PLAN.estimate, examples.GRPO_PLAN.estimate):
        text = rendered(estimate_screen(estimate), COLUMNS, height=LINES)
        assert len(text.splitlines()) <= LINES
        assert "needed" in text


def test_a_plan_shows_itself_with_its_names_escaped_and_is_a_line_where_it_is_printed() -> None:
    hostile: Plan = replace(PLAN, warnings=("<script>alert(1)</script>",))
    html = hostile._repr_html_()
    assert html.startswith("<pre")
    assert "fits" in html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert PLAN.estimate._repr_html_().count("<pre") == 1
    assert repr(PLAN).startswith(
        f"<Plan of {PLAN.method}, {PLAN.model}: fits rtx3060, 8.51 GiB of 11.2 GiB (fixed-size "
    )
    assert "\n" not in repr(PLAN)


def table(cards: Cards, width: int) -> list[str]:
    """The lines of the cards, without heading and legend."""
    _, lines, *_ = re.split(r"\n\n", rendered(cards_view(cards), width))
    return lines.splitlines()[1:]


@pytest.mark.parametrize("name", ["ten", "shorter_rows", "sets"])
def test_each_card_has_one_line_at_80_columns_and_in_a_pipe_and_every_sign_is_explained_and_no_other(name: str) -> None:
    cards, shown = CARDS[name], table(CARDS[name], 80)
    names = [re.split(r"  +", line.strip("> "))[0].rpartition(" ")[2] for line in shown]
    assert names == [verdict.hardware.name for verdict in cards.verdicts if verdict.refusal != NOTHING_FITS]
    assert table(cards, 4000) == shown
    used = set("".join(re.findall(r"\d+ x \d+ ([*hs+]+)", "\n".join(shown))))
    legend = rendered(cards_view(cards), 80).partition("\n\n")[2].partition("\n\n")[2]
    assert set(re.findall(r"^([*hs+])  ", legend, re.MULTILINE)) == used


def test_no_card_is_marked_where_none_is_lossless_and_a_long_reason_stands_below_the_table_once() -> None:
    assert not [line for line in table(SHORTER, 80) if line.startswith(">")]
    assert "No card here can run the training as requested." in rendered(cards_view(SHORTER), 80)
    twice = replace(TEN, verdicts=(*TEN.verdicts, replace(TEN.verdicts[3], hardware=TEN.verdicts[0].hardware)))
    text = rendered(cards_view(twice), 4000)
    assert text.count("refused [1]") == 2
    assert "nothing fits on rtx3050: at least 5.60 GiB are needed" in text
    assert text.count(NO_FLASH) == 1
    assert "[2]" not in text
