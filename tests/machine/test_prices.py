"""What cards are rented for: the table that comes along, and files of users."""

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem.machine.catalog import catalog, named
from autotrain_mem.machine.prices import listed_prices, price_of, prices
from autotrain_mem.support.errors import UsageError


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "prices.csv").write_text(text, encoding="utf-8")
    return str(tmp_path / "prices.csv")


def test_each_listed_price_has_a_known_card_a_provider_a_date_and_a_source() -> None:
    table = listed_prices()
    assert len(table) > 10
    assert set(table) <= {card.name for card in catalog()}
    assert all(price.provider and price.source and price.currency == "USD" for price in table.values())
    assert all(datetime.date.fromisoformat(price.seen).year >= 2026 for price in table.values())
    assert all(0.1 < price.per_hour < 10 for price in table.values()), "of one card for one hour"


def test_a_detected_card_has_a_price_and_a_card_without_a_row_has_none() -> None:
    card = replace(named("rtx4090"), name="NVIDIA GeForce RTX 4090", origin="detected")
    assert price_of(card, listed_prices()) == listed_prices()["rtx4090"]
    assert price_of(named("rtx2060"), listed_prices()) is price_of(named("24GiB"), listed_prices()) is None


def test_a_file_replaces_the_table_and_the_lowest_price_counts(tmp_path: Path) -> None:
    file = written(
        tmp_path, "gpu,per_hour,currency,seen\nRTX 4090,0.5,EUR,2026-11-01\nrtx4090, 0.4 ,EUR,\n8GiB,1,EUR,\n"
    )
    table = prices(file)
    assert {name: price.per_hour for name, price in table.items()} == {"rtx4090": 0.4, "8GiB": 1.0}
    assert table["rtx4090"].currency == "EUR"
    assert prices(None) is listed_prices()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("card,price\nl4,1\n", "has no column gpu and per_hour"),
        ("gpu,per_hour,eur\nl4,1,2\n", "has unknown columns: eur"),
        ("gpu,per_hour\nl4,$1\n", "line 2: per_hour '$1' is not a price"),
        ("gpu,per_hour\nl4,-1\n", "line 2: per_hour '-1' is not a price"),
        ("gpu,per_hour\nl4,nan\nnone,1\n", "line 3: No GPU is called 'none'"),
        ("gpu,per_hour\na100,1\n", "3 different cards are called 'a100'"),
        ("gpu,per_hour,seen\nl4,1,May\n", "seen 'May' is not a date"),
        ("gpu,per_hour,currency\nl4,1,USD\nl40s,1,EUR\n", "prices in EUR and USD cannot be compared"),
        ("gpu,per_hour\nl4\n", "line 2: the number of fields differs"),
        ('gpu,per_hour\n"l4,1\n', "is not a CSV file"),
    ],
)
def test_an_invalid_file_of_prices_is_refused_with_the_format(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        prices(written(tmp_path, text))
    assert said in raised.value.message
    assert "gpu,per_hour" in raised.value.hint


def test_an_unreadable_file_of_prices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        prices(str(tmp_path / "none.csv"))
    with pytest.raises(UsageError, match="directory"):
        prices(str(tmp_path))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a CSV file in UTF-8"):
        prices(str(tmp_path / "bytes.csv"))
