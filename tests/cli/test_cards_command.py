"""``autofit plan --gpu all``, or a list: the table and its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autotrain_mem.machine import choose
from autotrain_mem.machine.catalog import catalog
from tests.place import Autofit, Ran

TINY = ("plan", "sft", "--model", "tiny", "--max_length", "16")


def cards_of(ran: Ran) -> dict[str, dict[str, Any]]:
    assert ran.code == 0, ran.err
    written = json.loads(ran.out)
    assert written["schema"] == "autofit.cards/1"
    return {card["gpu"]: card for card in written["cards"]}


def test_a_list_of_cards_is_a_table_smallest_first(autofit: Autofit) -> None:
    ran = autofit(*TINY, "--gpu", "rtx4090,rtx3060")
    assert (ran.code, ran.err) == (0, "")  # no progress in a pipe
    small, large = ran.out.splitlines()[3:5]
    assert small.startswith(">  rtx3060")
    assert large.strip().startswith("rtx4090")


def test_all_cards_are_those_of_the_catalog(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    some = catalog()[::10]
    monkeypatch.setattr(choose, "catalog", lambda: some)
    ran = autofit(*TINY, "--gpu", "all", "--json")
    cards = cards_of(ran)
    assert set(cards) == {card.name for card in some}
    sizes = [card["total_bytes"] for card in cards.values()]
    assert sizes == sorted(sizes)
    assert json.loads(ran.out)["smallest_lossless"] in cards
    for card in cards.values():
        assert card["level"] == "lossless"
        assert card["required_bytes"] <= card["budget_bytes"] < card["total_bytes"]
        assert card["knobs"]["max_length"] == 16


def test_a_card_of_the_table_has_the_settings_that_its_own_plan_has(autofit: Autofit) -> None:
    cards = cards_of(autofit(*TINY, "--gpu", "300MiB,rtx3060", "--json"))
    alone = json.loads(autofit(*TINY, "--gpu", "300MiB", "--json").out)
    assert cards["300MiB"]["level"] == alone["level"]
    assert cards["300MiB"]["knobs"] == alone["estimate"]["knobs"]
    assert cards["300MiB"]["required_bytes"] == alone["estimate"]["required_bytes"]


def test_a_card_on_which_nothing_fits_is_said_to_be_one(autofit: Autofit) -> None:
    line = (*TINY, "--gpu", "2MiB,rtx3060", "--fit", "lossless")
    card = cards_of(autofit(*line, "--json"))["2MiB"]
    assert (card["refusal"], card["level"], card["knobs"], card["tokens_per_second"]) == ("nothing fits", *[None] * 3)
    assert "nothing fits" in autofit(*line).out
