"""Reads rental prices of cards from ``prices.csv`` or a user's file (``--prices FILE``) with the same columns.

``prices.csv`` has on-demand prices of one card for one hour, without storage and taxes, each with its date and source;
most sources are public copies of providers' lists. It has no spot prices; for a marketplace it has the lowest price.
"""

import contextlib
import csv
import datetime
import functools
import io
import math
from collections.abc import Mapping
from pathlib import Path

from autotrain_mem.machine.catalog import named, recognise
from autotrain_mem.support.errors import UnknownGpuError, UsageError
from autotrain_mem.support.files import read_start
from autotrain_mem.support.units import KIB, format_bytes
from autotrain_mem.types.hardware import Hardware, Price

_ROWS = Path(__file__).with_name("prices.csv")

_NEEDED = ("gpu", "per_hour")
LARGEST_FILE_BYTES = 256 * KIB
"""The largest file that is read: thousands of rows."""
_FORM = "The first line names the columns: gpu,per_hour and optionally currency,provider,seen,source."

Prices = Mapping[str, Price]
"""Prices by the catalog's key."""


@functools.cache
def listed_prices() -> Prices:
    """Returns the table of this package."""
    return _read(_ROWS.read_text(encoding="utf-8"), "prices.csv")


def prices(file: str | None) -> Prices:
    """Returns the lowest price of each card in a user's file, or in the table of this package. Raises UsageError if
    the file cannot be read, is not such a table, or has invalid prices, which the message lists."""
    if file is None:
        return listed_prices()
    try:
        content = read_start(Path(file), LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read --prices {file}: {error.strerror or error}.", hint="Check --prices.") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise UsageError(f"--prices {file} is larger than {format_bytes(LARGEST_FILE_BYTES)}.", hint=_FORM)
    try:
        return _read(content.decode("utf-8-sig"), file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"--prices {file} is not a CSV file in UTF-8.", hint=_FORM) from error


def price_of(card: Hardware, table: Prices) -> Price | None:
    """Returns the price of a card of the catalog or a detected one; None if the table has none."""
    known = recognise(card.name, card.total_bytes) if card.origin == "detected" else None
    return table.get(card.name if known is None else known.name)


def _read(text: str, name: str) -> Prices:
    rows = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    columns = rows.fieldnames or ()
    missing = [each for each in _NEEDED if each not in columns]
    unknown = [each for each in columns if each not in (*_NEEDED, "currency", "provider", "seen", "source")]
    if missing or unknown:
        problem = f"has no column {' and '.join(missing)}" if missing else f"has unknown columns: {', '.join(unknown)}"
        raise UsageError(f"--prices {name} {problem}.", hint=_FORM)
    table: dict[str, Price] = {}
    problems: list[str] = []
    for row in rows:
        try:
            price = _price(row)
        except ValueError as error:
            problems.append(f"line {rows.line_num}: {error}")
            continue
        if price.gpu not in table or price.per_hour < table[price.gpu].per_hour:
            table[price.gpu] = price
    if len(currencies := sorted({price.currency for price in table.values()})) > 1:
        problems.append(f"prices in {' and '.join(currencies)} cannot be compared: use one currency")
    if problems:
        raise UsageError(f"--prices {name} cannot be used: {'; '.join(problems)}.", hint=_FORM)
    return table


def _price(row: Mapping[str, str | None]) -> Price:
    """Parses a row. Raises ValueError with the problem in a few words."""
    if None in row or None in row.values():
        raise ValueError("the number of fields differs from the first line's")
    fields = {name: (value or "").strip() for name, value in row.items()}
    try:
        gpu = named(fields["gpu"]).name
    except UnknownGpuError as error:
        raise ValueError(f"{error.message.rstrip('.')} (autofit gpus lists the cards)") from error
    seen, amount = fields.get("seen", ""), math.nan
    with contextlib.suppress(ValueError):
        amount = float(fields["per_hour"])
    if not math.isfinite(amount) or amount <= 0:
        raise ValueError(f"per_hour {fields['per_hour']!r} is not a price: write 0.34, without a currency")
    try:
        datetime.date.fromisoformat(seen or "2026-03-10")
    except ValueError:
        raise ValueError(f"seen {seen!r} is not a date such as 2026-03-10") from None
    return Price(
        gpu=gpu,
        per_hour=amount,
        currency=fields.get("currency") or "USD",
        provider=fields.get("provider", ""),
        seen=seen,
        source=fields.get("source", ""),
    )
