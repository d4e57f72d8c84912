"""Holds what distillation and GKD share: a teacher beside the student, named by an argument and loaded as that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.missing import missing_teacher
from autotrain_mem.support.errors import UsageError

_LOADED_BY = frozenset({"dtype", "attn_implementation", "revision", "trust_remote_code"})
"""Keys of ``teacher_model_init_kwargs`` that a rehearsal follows: where and how a model is placed is not among them."""


def check(filled: Configs) -> None:
    """Refuse to go without a teacher, and one that is loaded in a way that cannot be followed.

    Raises:
        UsageError: no teacher is given, or it is placed or quantized in a way of its own.
    """
    if not filled.training.teacher_model_name_or_path:
        raise missing_teacher()
    given: Mapping[str, Any] = filled.training.teacher_model_init_kwargs or {}
    if others := sorted(given.keys() - _LOADED_BY):
        raise UsageError(
            f"--teacher_model_init_kwargs with {', '.join(others)} is not supported yet: where the teacher lies is not "
            "known.",
            hint=f"It takes {', '.join(sorted(_LOADED_BY))}. --load_in_4bit quantizes student and teacher.",
        )
