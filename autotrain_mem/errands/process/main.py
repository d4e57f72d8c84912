"""Does one job (``python -m autotrain_mem.errands.process.main``), and ends."""

from __future__ import annotations

import importlib
import traceback

from autotrain_mem.errands.errand import Errand
from autotrain_mem.support.errors import AutofitError, TrainingError
from autotrain_mem.support.processes import Channel
from autotrain_mem.types import codec


def main() -> None:
    """Receive the errand, do it, and answer with its last event or an error."""
    channel = Channel(ignore_interrupt=True)
    errand = codec.from_json(Errand, channel.receive())
    try:
        module = importlib.import_module(f"autotrain_mem.errands.process.{errand.task}")
        channel.send(getattr(module, errand.task)(errand, channel.send, channel.receive))
    except AutofitError as error:
        channel.send(error.to_json())
    except Exception as error:  # whatever a library raises is the user's to read, in one line
        traceback.print_exc()
        reason = " ".join(str(error).split())
        channel.send(TrainingError(f"{type(error).__name__}: {reason}").to_json())


if __name__ == "__main__":
    main()
