"""A plan fits a terminal as it opens: 24 lines of 80 columns, and what must not be overlooked is among them."""

from dataclasses import replace

import pytest
import report_examples as examples
from report_examples import PLAN
from test_console import rendered

from autotrain_mem.report.first_screen import COLUMNS, LINES, estimate_screen, first_screen
from autotrain_mem.types import Harm, Plan, Proposal

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
    return rendered(first_screen(plan, COMMAND), columns).splitlines()


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


def test_what_is_left_out_is_counted_and_the_questions_stay() -> None:
    text = "\n".join(lines(CROWDED))
    assert text.count("a question") == 3
    assert "warning 0" in text


def test_a_wide_terminal_shows_more_and_a_narrow_one_wraps_nothing_that_it_cuts() -> None:
    assert sum("…" in line for line in lines(PLAN, 200)) <= sum("…" in line for line in lines(PLAN))
    assert all(len(line) <= 40 for line in lines(PLAN, 40))


def test_an_estimate_takes_a_screen_too() -> None:
    for estimate in (examples.estimate(), examples.crowded(), PLAN.estimate, examples.GRPO_PLAN.estimate):
        text = rendered(estimate_screen(estimate), COLUMNS)
        assert len(text.splitlines()) <= LINES
        assert "needed" in text


def test_a_plan_shows_itself_and_its_names_are_escaped() -> None:
    hostile: Plan = replace(PLAN, warnings=("<script>alert(1)</script>",))
    html = hostile._repr_html_()
    assert html.startswith("<pre")
    assert "fits" in html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert PLAN.estimate._repr_html_().count("<pre") == 1


def test_a_plan_is_a_line_where_it_is_printed() -> None:
    assert repr(PLAN).startswith(f"<Plan of {PLAN.method}, {PLAN.model}: fits rtx3060, 8.51 GiB of 11.2 GiB, ")
    assert "\n" not in repr(PLAN)
