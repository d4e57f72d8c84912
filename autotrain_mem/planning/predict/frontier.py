"""``--frontier max_length``: how much of one thing fits at each level of harm, and how fast that is."""

from __future__ import annotations

from collections.abc import Callable

from autotrain_mem.planning.predict.most import question_of
from autotrain_mem.planning.predict.predictions import Predictions
from autotrain_mem.planning.rehearsals import Lengths, Rehearsals
from autotrain_mem.search.most import Border, Question, answering, find_border
from autotrain_mem.search.search import make_memo
from autotrain_mem.types import Candidate
from autotrain_mem.types.estimate import candidate
from autotrain_mem.types.model import ModelFacts
from autotrain_mem.types.most import Frontier, Reach


def frontier_of(
    rehearsals: Rehearsals,
    facts: ModelFacts,
    lengths: Lengths,
    name: str,
    on_attempt: Callable[[Candidate], None] = lambda attempt: None,
) -> Frontier:
    """Finds the border of every level; of few layers where these tell what the whole model does.

    Raises:
        ContextLengthError, BatchSplitError: no value of it makes a job (``question_of``).
    """
    question = question_of(rehearsals, facts, lengths, name)
    predictions = Predictions(rehearsals, facts, lengths, confirms=False)
    memo = make_memo(question.space(question.values[0]), predictions, on_attempt)
    borders = [(level.name, find_border(question, level.name, memo, whole=False)) for level in answering(question)]
    return Frontier(
        name=name,
        gpu=rehearsals.hardware.name,
        budget_bytes=rehearsals.budget_bytes,
        reaches=tuple(_reach(question, level, border) for level, border in borders),
    )


def _reach(question: Question, level: str, border: Border | None) -> Reach:
    if border is None:
        return Reach(level=level)
    return Reach(level=level, most=border.most(question), point=candidate(border.estimate, level=level))
