"""A plan fits a terminal as it opens, 24 lines of 80 columns, and what must not be overlooked is among them; so do the
cards on which it fits."""

import re
from dataclasses import replace

import pytest
import report_examples as examples
from report_examples import PLAN
from test_console import CARDS, NO_FLASH, SHORTER, TEN, rendered

from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.report.first_screen import COLUMNS, LINES, estimate_screen, first_screen
from autotrain_mem.types import Harm, Plan, Proposal
from autotrain_mem.types.gpu_comparison import Cards

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


def test_the_questions_stay_a_wide_terminal_shows_more_and_a_narrow_one_wraps_nothing_that_it_cuts() -> None:
    text = "\n".join(lines(CROWDED))
    assert text.count("a question") == 3
    assert "warning 0" in text
    assert sum("…" in line for line in lines(PLAN, 200)) <= sum("…" in line for line in lines(PLAN))
    assert all(len(line) <= 40 for line in lines(PLAN, 40))


def test_an_estimate_takes_a_screen_too() -> None:
    for estimate in (examples.estimate(), examples.crowded(), PLAN.estimate, examples.GRPO_PLAN.estimate):
        text = rendered(estimate_screen(estimate), COLUMNS)
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
    assert repr(PLAN).startswith(f"<Plan of {PLAN.method}, {PLAN.model}: fits rtx3060, 8.51 GiB of 11.2 GiB, ")
    assert "\n" not in repr(PLAN)


def table(cards: Cards, width: int) -> list[str]:
    """The lines of the cards, without heading and legend."""
    _, lines, *_ = re.split(r"\n\n", rendered(cards_view(cards), width))
    return lines.splitlines()[1:]


@pytest.mark.parametrize("name", ["ten", "shorter_rows", "none"])
def test_each_card_has_one_line_at_80_columns_and_in_a_pipe(name: str) -> None:
    cards = CARDS[name]
    names = [re.split(r" +", line.strip("> "))[0] for line in table(cards, 80)]
    assert names == [verdict.hardware.name for verdict in cards.verdicts]
    assert table(cards, 4000) == table(cards, 80)


def test_no_card_is_marked_where_none_is_lossless_and_a_long_reason_stands_below_the_table_once() -> None:
    assert not [line for line in table(SHORTER, 80) if line.startswith(">")]
    assert "No card here runs the training as asked for." in rendered(cards_view(SHORTER), 80)
    twice = replace(TEN, verdicts=(*TEN.verdicts, replace(TEN.verdicts[3], hardware=TEN.verdicts[0].hardware)))
    text = rendered(cards_view(twice), 4000)
    assert text.count("refused [1]") == 2
    assert text.count(NO_FLASH) == 1
    assert "[2]" not in text


def test_every_sign_in_the_table_is_explained_and_no_other() -> None:
    for cards in CARDS.values():
        used = set("".join(re.findall(r"\d+ x \d+ ([*hs+]+)", "\n".join(table(cards, 80)))))
        legend = rendered(cards_view(cards), 80).partition("\n\n")[2].partition("\n\n")[2]
        assert set(re.findall(r"^([*hs+])  ", legend, re.MULTILINE)) == used
