"""Lets a training go on where the disk has no room for what it logs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autotrain_mem.training.process.checkpointing import is_full_disk
from autotrain_mem.training.request import SendEvent

_TRACKERS = "transformers.integrations."
"""The modules of the callbacks that ``report_to`` names, TensorBoard's files among them."""


def drop_logs_without_room(trainer: Any, send: SendEvent) -> None:
    """Have a full disk cost what a trainer and its trackers log, and not the run; a ``note`` says so once.

    A trainer writes at its logs, too: GRPO's writes its completions (``trl/trainer/grpo_trainer.py: log``).
    """
    notes: list[str] = []

    def lossy(method: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                if not is_full_disk(error, trainer.args.output_dir):
                    raise
                if what not in notes:
                    notes.append(what)
                    reason = " ".join(str(error).split())
                    send({"event": "note", "message": f"{what} could not be written, training continues: {reason}"})
                return None

        return run

    trainer.log = lossy(trainer.log, "what the trainer logs")
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        if kind.__module__.startswith(_TRACKERS):
            for name in [name for name in dir(kind) if name.startswith("on_")]:
                setattr(callback, name, lossy(getattr(callback, name), f"what {kind.__name__} logs"))
