"""What fits on each card at 80 columns and in a pipe, and how much fits at each level; golden texts are elsewhere."""

import re
from dataclasses import replace

import pytest
from card_examples import NO_FLASH, NONE, SETS, SHORTER, TEN
from report_examples import CHOSEN, RTX3060, estimate
from test_console import rendered

from autotrain_mem.report.comparison_view import BAR_WIDTH, cards_view, frontier_view
from autotrain_mem.search.memo import candidate
from autotrain_mem.types.gpu_comparison import Cards, Frontier, Most, Reach


def table(cards: Cards, width: int) -> list[str]:
    """The lines of the cards, without heading and legend."""
    _, lines, *_ = re.split(r"\n\n", rendered(cards_view(cards), width))
    return lines.splitlines()[1:]


@pytest.mark.parametrize("cards", [TEN, SHORTER, NONE], ids=["ten", "shorter", "none"])
def test_each_card_has_one_line_at_80_columns_and_in_a_pipe(cards: Cards) -> None:
    names = [re.split(r" +", line.strip("> "))[0] for line in table(cards, 80)]
    assert names == [verdict.hardware.name for verdict in cards.verdicts]
    assert table(cards, 4000) == table(cards, 80)


def test_the_smallest_lossless_card_alone_is_marked() -> None:
    marked = [line for line in table(TEN, 80) if line.startswith(">")]
    assert [line.split()[1] for line in marked] == ["a100-40gb"]
    assert not [line for line in table(SHORTER, 80) if line.startswith(">")]
    assert "No card here trains what was asked for, unchanged." in rendered(cards_view(SHORTER), 80)


def test_sets_of_a_card_say_how_many_and_the_smallest_set_is_marked() -> None:
    lines = [re.split(r"  +", line.strip("> ")) for line in table(SETS, 80)]
    assert [line[0] for line in lines] == ["rtx4090", "2 x rtx4090", "4 x rtx4090", "2 x 4 x rtx4090"]
    (marked,) = [line for line in table(SETS, 80) if line.startswith(">")]
    assert marked.startswith(">  4 x rtx4090")
    assert "the smallest set of cards that" in rendered(cards_view(SETS), 80)


def test_a_reason_too_long_for_a_line_stands_below_the_table_once() -> None:
    twice = replace(TEN, verdicts=(*TEN.verdicts, replace(TEN.verdicts[3], hardware=TEN.verdicts[0].hardware)))
    text = rendered(cards_view(twice), 4000)
    assert text.count("refused [1]") == 2
    assert text.count(NO_FLASH) == 1
    assert "[2]" not in text


def test_every_sign_in_the_table_is_explained_and_no_other() -> None:
    for cards in (TEN, SHORTER, NONE, SETS):
        used = set("".join(re.findall(r"\d+ x \d+ ([*hs+]+)", "\n".join(table(cards, 80)))))
        legend = rendered(cards_view(cards), 80).partition("\n\n")[2].partition("\n\n")[2]
        assert set(re.findall(r"^([*hs+])  ", legend, re.MULTILINE)) == used


FULL = estimate(RTX3060, knobs=replace(CHOSEN, use_peft=False, max_length=1024))
LORA = estimate(RTX3060, knobs=replace(CHOSEN, max_length=4096))

FRONTIER = Frontier(
    name="max_length",
    gpu="rtx3060",
    budget_bytes=FULL.budget_bytes,
    reaches=(
        Reach(
            level="lossless",
            most=Most(name="max_length", value=1024, next_value=1088, next_required_bytes=FULL.budget_bytes + 1),
            point=candidate(FULL, level="lossless"),
        ),
        Reach(level="rounding"),
        Reach(
            level="LoRA",
            most=Most(name="max_length", value=4096, next_value=None, stopped_by="the model's context"),
            point=candidate(LORA, level="LoRA"),
        ),
    ),
)


def test_each_level_has_a_line_with_its_most_the_neighbour_and_its_speed() -> None:
    text = rendered(frontier_view(FRONTIER), 80)
    assert all(len(line) <= 80 for line in text.splitlines()[:14])
    line = next(line for line in text.splitlines() if line.startswith("lossless "))
    assert re.split(r" {2,}", line.strip())[1:3] == ["1,024", "1,088"]
    assert "nothing fits" in next(line for line in text.splitlines() if line.startswith("rounding"))
    last = next(line for line in text.splitlines() if line.startswith("LoRA "))
    assert re.split(r" {2,}", line.strip())[0] == "lossless"
    assert "=" in last
    assert "=  the model's context" in text
    assert "lower bound: a plan for the same max_length may be faster" in rendered(frontier_view(FRONTIER), 120)


def test_bars_are_as_long_as_what_fits() -> None:
    text = rendered(frontier_view(FRONTIER), 80)
    bars = [len(found) for line in text.splitlines() if (found := "".join(re.findall(r"[━#]+", line)))]
    assert bars == [BAR_WIDTH // 4, BAR_WIDTH]
