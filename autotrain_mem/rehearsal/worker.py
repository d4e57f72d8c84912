"""The child process that knows TRL: it reads flags, counts tokens and rehearses, for a parent that imports none of it.

``python -m autotrain_mem.rehearsal.worker`` answers one JSON object a line, many times, until its stdin closes.
CUDA is hidden from it (see ``client``), so the result is the same on every machine.
"""

from __future__ import annotations

import gc
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from autotrain_mem.errors import AutofitError, RehearsalError
from autotrain_mem.processes import Channel
from autotrain_mem.spec import Job, Knobs


def parse(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Flags and YAML keys -> what was given, and TRL's defaults for the knobs."""
    from autotrain_mem.rehearsal import arguments

    os.environ.update(request["environment"])
    parsed = arguments.parse(
        request["method"], request["argv"], request["config"], request["also_known"], request["switches"]
    )
    return {"given": dict(parsed.given), "defaults": parsed.defaults.to_json()}


def help_text(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """TRL's own help text."""
    from autotrain_mem.rehearsal import arguments

    return {"help": arguments.help_text(request["method"])}


def describe(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job and a card -> what its model's config says; refuses what cannot go together."""
    from autotrain_mem.rehearsal.compatible import check_compatible
    from autotrain_mem.rehearsal.model_config import read_config
    from autotrain_mem.rehearsal.quantized import checkpoint_quantization

    job = Job.from_json(request["job"])
    config = read_config(job, **request["options"])
    check_compatible(job, config, tuple(request["compute_capability"]))
    return {
        "context_length": getattr(config.get_text_config(), "max_position_embeddings", None),
        "is_quantized": bool(checkpoint_quantization(config)),
    }


def check(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job -> nothing, when it has all that training needs beside a device, weights and data."""
    from autotrain_mem.rehearsal.arguments import undivided
    from autotrain_mem.rehearsal.compatible import check_installed
    from autotrain_mem.rehearsal.configs import on_cpu
    from autotrain_mem.rehearsal.methods.method import method_of

    method, given = method_of(request["job"]["method"]), undivided(request["job"]["arguments"])
    method.check(method.configs({**on_cpu(given), "report_to": "none"}), to_train=True)
    check_installed(given)
    return {}


def profile(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job -> how many rows have how many tokens."""
    from autotrain_mem.rehearsal.profile import profile as profile_dataset

    found = profile_dataset(Job.from_json(request["job"]), scratch)
    return {"rows_by_length": list(found.rows_by_length.items()), "longest_evaluated": found.longest_evaluated}


def rehearse(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job and its knobs -> the trace of a rehearsed run."""
    from autotrain_mem.rehearsal.model_config import read_config
    from autotrain_mem.rehearsal.rehearse import rehearse as rehearse_trainer

    job, knobs = Job.from_json(request["job"]), Knobs.from_json(request["knobs"])
    read_config(job, **request["options"])
    capability = tuple(request["compute_capability"])
    gc.collect()  # a trainer is full of reference cycles: this one starts without the last one's
    gc.freeze()  # what is imported stays, and need not be looked at again
    return {"trace": rehearse_trainer(job, knobs, request["length"], scratch, capability).to_json()}


OPERATIONS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "parse": parse,
    "help": help_text,
    "describe": describe,
    "check": check,
    "profile": profile,
    "rehearse": rehearse,
}


STEPS = {
    "parse": "Reading the flags",
    "help": "Reading TRL's help",
    "describe": "Reading the model's config",
    "check": "Checking the job",
    "profile": "Counting the tokens of the data",
    "rehearse": "Rehearsing the trainer",
}
"""How an error calls each operation."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; whatever goes wrong is an answer too."""
    try:
        with tempfile.TemporaryDirectory(prefix="autofit-") as scratch:  # each its own: the process ends without notice
            return {"ok": OPERATIONS[request["operation"]](request, scratch)}
    except AutofitError as error:
        return {**error.to_json(), "traceback": traceback.format_exc()}
    except Exception as error:  # the user's own TRL raised: the message is the cause, and the worker lives on
        return {**_failure(request["operation"], error).to_json(), "traceback": traceback.format_exc()}


def _failure(operation: str, error: Exception) -> RehearsalError:
    reason = " ".join(str(error).split())
    message = f"{STEPS[operation]} failed in the installed libraries: {type(error).__name__}: {reason}"
    if isinstance(error, ImportError):
        return RehearsalError(message, hint="Install what it names, or leave away the flag that asks for it.")
    return RehearsalError(message, hint="Change the flag that it names, if it names one. --debug shows the traceback.")


def main() -> None:
    """Serve until the parent goes away."""
    channel = Channel(ignore_interrupt=True)
    warnings.filterwarnings("ignore")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # nobody watches; they would fill the log's last lines
    import torch

    torch.set_num_threads(1)  # fake tensors compute nothing; threads would only get in each other's way
    while True:
        channel.send(answer(channel.receive()))


if __name__ == "__main__":
    main()
