import json
import re
from statistics import median

import pytest

from autotrain_mem.cli import word_problems

NUMBER = re.compile(r"\d+")
SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.$", re.MULTILINE)
EVENTS = (
    (re.compile(r"brings|buys|finds"), "+"),
    (re.compile(r"gives|loses|sells"), "-"),
    (re.compile(r"swaps|replaced"), "*"),
    (re.compile(r"equal"), "/"),
)


def apply(symbol, left, right):
    whole, rest = divmod(left, right)
    assert symbol != "/" or rest == 0, f"{left} cannot be shared among {right}"
    return {"+": left + right, "-": left - right, "*": left * right, "/": whole}[symbol]


def answer_by_reading(question):
    """Work the problem out from its sentences alone, as a pupil would."""
    opening, *story, ask = re.split(r"(?<=[.?]) ", question)
    assert ask.startswith("How many ")
    total = int(NUMBER.search(opening)[0])
    for sentence in story:
        [symbol] = [symbol for pattern, symbol in EVENTS if pattern.search(sentence)]
        [amount] = NUMBER.findall(sentence)
        total = apply(symbol, total, int(amount))
        assert total > 0
    return total


def conversation(problem):
    user, assistant = problem["messages"]
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    return user["content"], assistant["content"]


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_follows_from_the_question_and_every_line_of_reasoning_from_the_last(seed):
    for problem in word_problems.problems(300, seed):
        question, solution = conversation(problem)
        opening, *reasoning, answer = solution.splitlines()
        assert answer == f"Answer: {answer_by_reading(question)}"
        total = int(NUMBER.search(opening)[0])
        for line in reasoning:
            left, symbol, right, result = SUM.search(line).groups()
            assert int(left) == total
            total = apply(symbol, total, int(right))
            assert int(result) == total
        assert answer == f"Answer: {total}"


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    assert list(word_problems.problems(150, seed=3)) == list(word_problems.problems(150, seed=3))
    assert list(word_problems.problems(150, seed=3)) != list(word_problems.problems(150, seed=4))
    conversations = [conversation(problem) for problem in word_problems.problems(600, seed=0)]
    assert len({question for question, _ in conversations}) >= 590
    assert all(sum(f" {symbol} " in solution for _, solution in conversations) >= 60 for symbol in "+-*/")


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_one_row_in_every_hundred_is_eight_times_the_median(count):
    rows = [len("".join(conversation(problem))) for problem in word_problems.problems(count, seed=count)]
    long_rows = [place for place, length in enumerate(rows) if length >= 8 * median(rows)]
    assert [place // 100 for place in long_rows] == list(range(-(-count // 100)))


def test_a_write_that_breaks_off_keeps_the_older_file(tmp_path):
    path = tmp_path / "on the way" / "problems.jsonl"
    word_problems.write_rows(path, word_problems.problems(10, seed=1))
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == list(word_problems.problems(10, seed=1))
    before = path.read_bytes()

    def one_problem_then_none():
        yield {"messages": []}
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        word_problems.write_rows(path, one_problem_then_none())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
