"""Asks torch about one card in a child (``usable.main``), since a CUDA context takes memory and cannot be closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.support.errors import from_json
from autotrain_mem.support.processes import Child, ChildDied, ChildTimeout

CHILD_MODULE = "autotrain_mem.machine.usable"
TIME_LIMIT_SECONDS = 120.0
"""Importing torch takes most of it: 5 s from a warm disk, a minute from a network's."""


class NoAnswer(Exception):
    """Raised when the child does not answer; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchDevice:
    total_bytes: int
    free_bytes: int
    """Free memory once the child has a context."""
    is_integrated: bool
    """True if its memory is the host's (``cudaDeviceProp.integrated``)."""


def torch_device(uuid: str, environment: Mapping[str, str], module: str = CHILD_MODULE) -> TorchDevice:
    """Returns what torch sees of one card, from a child that sees this card alone.

    Args:
        environment: Variables of the training process, over this one's.

    Raises:
        UnreadableGpuError: torch cannot use the card; the hint says how to fix it.
        NoAnswer: the child died, hung or failed.
    """
    return TorchDevice(**ask_child(module, {**environment, "CUDA_VISIBLE_DEVICES": uuid})["device"])


def ask_child(
    module: str,
    environment: Mapping[str, str],
    question: Mapping[str, Any] | None = None,
    limit_seconds: float = TIME_LIMIT_SECONDS,
) -> dict[str, Any]:
    """Starts a child, sends it a question, if any, and returns its answer. Raises as :func:`torch_device`."""
    child = Child(module, environment)
    try:
        if question is not None:
            child.send(question)
        answer = child.receive(limit_seconds)
    except ChildTimeout as timeout:
        raise NoAnswer(f"no answer within {limit_seconds:.0f} s") from timeout
    except ChildDied as death:
        raise NoAnswer(f"the process ended with status {death.code}") from death
    finally:
        child.kill()  # it holds nothing that needs saving
        child.stop()
    if "unusable" in answer:
        raise from_json(answer["unusable"])
    if "error" in answer:
        raise NoAnswer(str(answer["error"]))
    return answer
