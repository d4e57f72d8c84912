"""The child process that knows TRL: it reads flags, counts tokens and rehearses, for a parent that imports none of it.

``python -m autotrain_mem.worker.server`` answers one JSON object a line, many times, until its stdin closes.
CUDA is hidden from it (see ``client``), so the result is the same on every machine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.errors import AutofitError
from autotrain_mem.methods.row_lengths import OnProgress
from autotrain_mem.processes import Channel
from autotrain_mem.rehearsal.python_call.user_errors import failure, passed_on
from autotrain_mem.spec import Job, Knobs, codec
from autotrain_mem.spec.model import ModelFacts
from autotrain_mem.spec.preflight import Preflight
from autotrain_mem.worker.scratch_folders import ScratchFolders


def parse(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Flags and YAML keys -> what was given, and TRL's defaults for the knobs."""
    from autotrain_mem.checks import arguments

    os.environ.update(request["environment"])
    parsed = arguments.parse(
        request["method"],
        request["argv"],
        request["config"],
        request["also_known"],
        request["switches"],
        request["own"],
    )
    return {"given": dict(parsed.given), "defaults": codec.to_json(parsed.defaults)}


def accept(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """Arguments of a config that a script made -> TRL's defaults for the knobs; refuses what contradicts itself."""
    from autotrain_mem.checks import arguments

    return {"defaults": codec.to_json(arguments.accept(request["method"], request["given"], request["own"]))}


def read_value(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """One flag -> its value by itself."""
    from autotrain_mem.checks import arguments

    return {"value": arguments.read_value(request["method"], request["name"], request["argv"], request["also_known"])}


def help_text(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """TRL's own help text."""
    from autotrain_mem.checks import arguments

    return {"help": arguments.help_text(request["method"])}


def describe(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job and a card -> what its model's config says; refuses what cannot go together."""
    from autotrain_mem.checks import table
    from autotrain_mem.checks.collect import refuse
    from autotrain_mem.checks.compatibility import ModelOnCard, why_no_flash_attention
    from autotrain_mem.checks.model import config_digest, read_config
    from autotrain_mem.methods.configs import default_targets
    from autotrain_mem.rehearsal.model.quantized import checkpoint_quantization
    from autotrain_mem.rehearsal.model.truncated_depth import pattern_of

    job = codec.from_json(Job, request["job"])
    config = read_config(job, **request["options"])
    capability = tuple(request["compute_capability"])
    refuse(table.MODEL, ModelOnCard(job=job, config=config, compute_capability=capability))
    targets = default_targets(config)
    facts = ModelFacts(
        context_length=getattr(config.get_text_config(), "max_position_embeddings", None),
        is_quantized=bool(checkpoint_quantization(config)),
        digest=config_digest(job, config),
        flash_attention=why_no_flash_attention(job, config, capability),
        pattern=pattern_of(job, config),
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
    )
    return codec.to_json(facts)


def check(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job -> nothing, when it has all that training needs beside a device, weights and data."""
    from autotrain_mem.checks import table
    from autotrain_mem.checks.collect import refuse
    from autotrain_mem.checks.flags import Flags

    refuse(table.TRAINING, Flags(method=request["job"]["method"], given=request["job"]["arguments"]))
    return {}


def preflight(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job -> what can be known to go wrong with it, and how many parameters its weights' files hold."""
    from autotrain_mem.checks import table
    from autotrain_mem.checks.collect import collect
    from autotrain_mem.checks.model import parameters_on_disk, read_config
    from autotrain_mem.checks.preflight import UNFORESEEN, setup_of

    job = codec.from_json(Job, request["job"])
    config = read_config(job, **request["options"])
    facts = {name: request[name] for name in ("to_train", "on_cpu", "reads_data")}
    setup = setup_of(job, config, scratch, compute_capability=tuple(request["compute_capability"]), **facts)
    findings = tuple(collect(table.PREFLIGHT, setup, UNFORESEEN))
    parameters = parameters_on_disk(job.model, config, revision=job.arguments.get("model_revision"))
    return codec.to_json(Preflight(findings=findings, parameters=parameters))


def fingerprint(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job -> what its data, its tokenizer and their formatting are known by."""
    from autotrain_mem.data.fingerprint import fingerprint as fingerprint_dataset

    return {"fingerprint": fingerprint_dataset(codec.from_json(Job, request["job"]), scratch)}


def profile(request: dict[str, Any], scratch: str, on_progress: OnProgress = lambda counting: None) -> dict[str, Any]:
    """A job -> how many rows have how many tokens; told on the way how far the counting is."""
    from autotrain_mem.data.token_lengths import profile as profile_dataset

    return codec.to_json(profile_dataset(codec.from_json(Job, request["job"]), scratch, on_progress))


def rehearse(request: dict[str, Any], scratch: str) -> dict[str, Any]:
    """A job and its knobs -> the trace of a rehearsed run."""
    from autotrain_mem.checks.model import read_config
    from autotrain_mem.rehearsal.rehearse import rehearse as rehearse_trainer

    job, knobs = codec.from_json(Job, request["job"]), codec.from_json(Knobs, request["knobs"])
    read_config(job, **request["options"])
    capability = tuple(request["compute_capability"])
    gc.collect()  # a trainer is full of reference cycles: this one starts without the last one's
    gc.freeze()  # what is imported stays, and need not be looked at again
    trace = rehearse_trainer(job, knobs, request["length"], scratch, capability, request["layers"], request["chunks"])
    return {"trace": codec.to_json(trace)}


OPERATIONS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "parse": ("Reading the flags", parse),
    "accept": ("Reading the config", accept),
    "read_value": ("Reading a flag", read_value),
    "help": ("Reading TRL's help", help_text),
    "describe": ("Reading the model's config", describe),
    "check": ("Checking the job", check),
    "preflight": ("Checking model, tokenizer and data", preflight),
    "fingerprint": ("Looking at the data", fingerprint),
    "profile": ("Counting the tokens of the data", profile),
    "rehearse": ("Rehearsing the trainer", rehearse),
}
"""How an error calls each operation, and what answers it."""


def answer(request: dict[str, Any], on_progress: OnProgress = lambda counting: None) -> dict[str, Any]:
    """Do what is asked; whatever goes wrong is an answer too.

    Args:
        on_progress: Is told how far an answer is that takes minutes.
    """
    step, operate = OPERATIONS[request["operation"]]
    more = (on_progress,) if operate is profile else ()
    try:
        with tempfile.TemporaryDirectory(prefix="autofit-") as scratch:  # each its own: the process ends without notice
            return {"ok": operate(request, scratch, *more)}
    except AutofitError as error:
        return {**error.to_json(), "traceback": traceback.format_exc()}
    except Exception as error:  # the user's own TRL raised: the message is the cause, and the worker lives on
        refused = failure(step, error, from_python=_from_python(request)).to_json()
        return {**refused, "raised": passed_on(error), "traceback": traceback.format_exc()}


def _from_python(request: Mapping[str, Any]) -> bool:
    """Whether a script's trainer asks."""
    return request.get("job", {}).get("python_call") is not None


def import_ahead() -> None:
    """Imports what nearly every question needs before one is asked: of two workers only one is asked for flags.

    Whatever is wrong with the installed libraries is told by the first question that needs them.
    """
    with contextlib.suppress(Exception):
        from trl import SFTTrainer  # noqa: F401

        from autotrain_mem.rehearsal import fake_run, rehearse  # noqa: F401


_OF_GROUP = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
)
"""What torchrun tells a process of its group
(``torch/distributed/elastic/agent/server/local_elastic_agent.py: _start_workers``)."""
_OF_GROUP_TOO = ("TORCHELASTIC_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
"""How the names of the rest begin, and those of MPI (``accelerate/state.py: _prepare_backend``)."""


def leave_group() -> None:
    """A rehearsal trains alone: as a second rank 0 it would wait for the parent's group for ever."""
    for name in [name for name in os.environ if name in _OF_GROUP or name.startswith(_OF_GROUP_TOO)]:
        del os.environ[name]


def main() -> None:
    """Serve until the parent goes away."""
    scratch_folders = ScratchFolders()
    channel = Channel(ignore_interrupt=True, on_message=scratch_folders.note, on_close=scratch_folders.remove)
    leave_group()
    warnings.filterwarnings("ignore")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # nobody watches; they would fill the log's last lines
    import torch

    torch.set_num_threads(1)  # fake tensors compute nothing; threads would only get in each other's way
    import_ahead()
    while True:
        channel.send(answer(channel.receive(), lambda counting: channel.send({"progress": codec.to_json(counting)})))


if __name__ == "__main__":
    main()
