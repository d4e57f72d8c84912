"""A phase says where in a run something happens."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Says where in the run an event happened.

    >>> from autotrain_mem import Phase
    >>> Phase("backward") is Phase.BACKWARD
    True
    """

    LOAD = "load"
    GENERATE = "generate"
    """Completions are sampled: the KV cache and the logits of each step."""
    SCORE = "score"
    """Completions are judged, without gradients: rewards, values, old and reference log-probabilities."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATE = "evaluate"
    SAVE = "save"
