"""Generates arithmetic word problems with checkable answers, for a first training run without a download.

Row lengths vary on purpose: most problems take one or two steps, but one row in every hundred takes 34 to 40, and has
over eight times the median length. As with real data, a batch of usual rows fits, and one with the rare row does not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from autotrain_mem.support.files import replace_file

ROWS_PER_LONG_ROW = 100
_SHORT_STEPS = (1,) * 7 + (2,) * 7 + (3,) * 3 + (4, 5, 7)
"""Numbers of steps of an ordinary problem, drawn evenly; the median is 2."""
_LONG_STEPS = range(34, 41)
"""Numbers of steps of the rare long problem. 40 steps are about 1,200 tokens of the quickstart's tokenizer."""
_LARGEST_TOTAL = 400

_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Freya", "Goran", "Hana", "Imani", "Jonas", "Kavya", "Luis")
_THINGS = ("apples", "beads", "bricks", "buttons", "candles", "coins", "eggs", "marbles", "pencils", "seeds", "stamps")
_OPENINGS = (
    "{name} has {amount} {things}.",
    "{name} starts the week with {amount} {things}.",
    "There are {amount} {things} on the table of {name}.",
)
_SENTENCES = {
    "+": (
        "Then {name} buys {amount} more.",
        "After lunch {name} finds {amount} more in a drawer.",
        "A neighbour brings {name} {amount} more.",
    ),
    "-": (
        "Then {name} gives {amount} to a friend.",
        "On the way home {name} loses {amount}.",
        "At the market {name} sells {amount}.",
    ),
    "*": ("A trader swaps each one for {amount} new ones.", "Each one is replaced by {amount} others."),
    "/": (
        "Then {name} sorts them into {amount} equal piles and keeps one pile.",
        "They are shared equally among {amount} people, and {name} keeps one share.",
    ),
}
_REASONS = {
    "+": "More come in",
    "-": "Some go away",
    "*": "Each one becomes {amount}",
    "/": "One of {amount} equal parts stays",
}


def problems(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields ``count`` problems in TRL's conversational format; the same ``count`` and ``seed`` give the same rows.

    Each hundred rows, and an incomplete hundred at the end, hold one long problem at a random place.
    """
    random = Random(seed)
    long_row = 0
    for row in range(count):
        if row % ROWS_PER_LONG_ROW == 0:
            long_row = row + random.randrange(min(ROWS_PER_LONG_ROW, count - row))
        yield _problem(random, random.choice(_LONG_STEPS if row == long_row else _SHORT_STEPS))


def texts(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yields the text of every message, in order, to train a tokenizer."""
    for row in rows:
        for message in row["messages"]:
            yield message["content"]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines. The file appears complete or not at all; an older one is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _problem(random: Random, step_count: int) -> dict[str, Any]:
    name, things = random.choice(_NAMES), random.choice(_THINGS)
    start = total = random.randrange(5, 61)
    solution = [f"We start with {start}."]  # the running total, one line per step: ``More come in: 14 + 6 = 20.``
    steps = []
    for _ in range(step_count):
        # Draws an operation and an amount whose result is a whole number from 2 to ``_LARGEST_TOTAL``.
        additions = range(2, min(40, _LARGEST_TOTAL - total) + 1)
        subtractions = range(2, min(40, total - 2) + 1)
        factors = range(2, min(5, _LARGEST_TOTAL // total) + 1)
        divisors = [parts for parts in range(2, 10) if total % parts == 0 and total // parts >= 2]
        choices = {"+": additions, "-": subtractions, "*": factors, "/": divisors}
        symbol = random.choice([symbol for symbol, amounts in choices.items() if amounts])
        amount = random.choice(choices[symbol])
        after = {"+": total + amount, "-": total - amount, "*": total * amount, "/": total // amount}[symbol]
        reason = _REASONS[symbol].format(amount=amount)
        solution.append(f"{reason}: {total} {symbol} {amount} = {after}.")
        steps.append((symbol, amount))
        total = after
    story = [random.choice(_OPENINGS).format(name=name, amount=start, things=things)]
    story += [random.choice(_SENTENCES[symbol]).format(name=name, amount=amount) for symbol, amount in steps]
    question = " ".join([*story, f"How many {things} does {name} have now?"])
    answer = "\n".join([*solution, f"Answer: {total}"])
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
