"""What fits on each card at 80 columns and in a pipe; golden texts are elsewhere."""

import re
from dataclasses import replace

import pytest
from test_console import rendered
from view_examples import CARDS, NO_FLASH, SHORTER, TEN

from autotrain_mem.report.comparison_view import cards_view
from autotrain_mem.types.gpu_comparison import Cards


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


def test_where_no_card_is_lossless_none_is_marked() -> None:
    assert not [line for line in table(SHORTER, 80) if line.startswith(">")]
    assert "No card here runs the training as asked for." in rendered(cards_view(SHORTER), 80)


def test_a_reason_too_long_for_a_line_stands_below_the_table_once() -> None:
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
