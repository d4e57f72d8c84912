"""Runs the worker process: imports TRL, reads flags, counts tokens and rehearses for the parent.

``python -m autotrain_mem.worker.server`` answers requests, one JSON object per line, until its stdin closes. CUDA is
hidden from it (see ``client``), so the results are the same on every machine.
"""

import contextlib
import gc
import os
import pathlib
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any, get_type_hints
from unittest import mock

from autotrain_mem.methods.row_lengths import OnProgress
from autotrain_mem.settings.trl_parser import TrlFlags, keep_all_flags, kept_names
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.processes import Channel
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.trainers.template_limits import limit_templates
from autotrain_mem.types import Capability, Job, Knobs, ModelFacts, Preflight, Trace
from autotrain_mem.worker.client import HIDDEN_CUDA, PREFIX, SCRATCH
from autotrain_mem.worker.user_errors import failure, passed_on


def flags() -> dict[str, TrlFlags]:
    """Returns TRL's flags and help texts, and stores them on disk."""
    from autotrain_mem.checks.arguments import flag_tables

    tables = flag_tables()
    keep_all_flags(Store(cache_folder()), tables)
    return tables


def describe(job: Job, compute_capability: Capability) -> ModelFacts:
    """Reads the model's config, and refuses settings that do not work with it."""
    from autotrain_mem.checks import table
    from autotrain_mem.checks.adapters import fused_experts
    from autotrain_mem.checks.compatibility import flash_attention, takes_liger
    from autotrain_mem.checks.model_files import ModelOnCard, config_digest, model_without_weights, read_config
    from autotrain_mem.checks.sharding import other_layers
    from autotrain_mem.methods.configs import default_targets, has_experts, planned_targets
    from autotrain_mem.methods.parameter_count import adapter_width, checkpoint_dtype, kv_cache, parameters
    from autotrain_mem.rehearsal.truncated_depth import pattern_of
    from autotrain_mem.trainers.model_support import checkpoint_quantization
    from autotrain_mem.trainers.pretrained import FAMILIES, pixel_steps
    from autotrain_mem.types.findings import refuse

    config = read_config(job)
    refuse(table.MODEL, ModelOnCard(job=job, config=config, compute_capability=compute_capability))
    targets, kept = default_targets(config), kv_cache(config.get_text_config().to_dict())
    steps, enlarges = pixel_steps(job) if config.model_type in FAMILIES else ((), False)
    counts_modules = config.model_type in FAMILIES and not checkpoint_quantization(config) and job.python_call is None
    return ModelFacts(
        context_length=getattr(config.get_text_config(), "max_position_embeddings", None),
        is_quantized=bool(checkpoint_quantization(config)),
        digest=config_digest(job, config),
        shares_tokens=not other_layers(config),
        takes_liger=takes_liger(job, config, compute_capability),
        flash_attention=flash_attention(job, config, compute_capability),
        pattern=pattern_of(job, config),
        model_type=config.model_type,
        hidden_size=getattr(config.get_text_config(), "hidden_size", None),
        lora_targets=targets if isinstance(targets, str) else tuple(targets),
        adapted=planned_targets(config),
        experts=fused_experts(model_without_weights(job)) if has_experts(config) and job.python_call is None else (),
        active_experts=getattr(config.get_text_config(), "num_experts_per_tok", None) or 1,
        adapter_width=adapter_width(config),
        parameters=model_without_weights(job).num_parameters() if counts_modules else parameters(config.to_dict()),
        checkpoint_dtype=checkpoint_dtype(config),
        reads_images=config.model_type in FAMILIES,
        pixel_steps=steps,
        enlarges_images=enlarges,
        kv_heads=None if kept is None else kept[0],
        kv_head_elements=None if kept is None else kept[1],
    )


def layers_to_name(job: Job) -> tuple[str, ...]:
    """Returns the layer classes that FSDP wraps; empty if the model has all classes of its ``_no_split_modules``."""
    from autotrain_mem.checks.model_files import model_without_weights
    from autotrain_mem.trainers.finish import layers_to_shard

    model = model_without_weights(job)
    found = layers_to_shard(model)
    return () if {*found} == {*(model._no_split_modules or ())} else found


def preflight(
    job: Job, compute_capability: Capability, to_train: bool, on_cpu: bool, reads_data: bool, scratch: str
) -> Preflight:
    """Finds a job's problems without a rehearsal, and counts the parameters in its weight files."""
    from autotrain_mem.checks import table
    from autotrain_mem.checks.model_files import download, item_bytes, parameters_on_disk, read_config
    from autotrain_mem.checks.preflight_checks import UNFORESEEN, setup_of
    from autotrain_mem.types.findings import collect

    config = read_config(job)
    facts = {"to_train": to_train, "on_cpu": on_cpu, "reads_data": reads_data}
    setup = setup_of(job, config, scratch, compute_capability=compute_capability, **facts)
    findings = collect(table.PREFLIGHT, setup, UNFORESEEN)
    revision = job.arguments.get("model_revision")
    parameters, missing = parameters_on_disk(job.model, config, revision), None
    if to_train and parameters is None and job.python_call is None:
        missing = download(job.model, config, revision)
        is_plain = getattr(config, "quantization_config", None) is None
        parameters = missing.size_bytes // item_bytes(config) if missing and is_plain else None
    rows = None if setup.rows is None or isinstance(setup.rows, AutofitError) else len(setup.rows)
    return Preflight(findings=findings, parameters=parameters, rows=rows, download=missing)


def rehearse(
    job: Job,
    knobs: Knobs,
    length: int,
    compute_capability: Capability,
    layers: int | None,
    chunks: int | None,
    scratch: str,
) -> Trace:
    """Rehearses one configuration."""
    from autotrain_mem.checks.model_files import read_config
    from autotrain_mem.rehearsal.rehearse import rehearse as rehearse_trainer

    read_config(job)
    gc.collect()  # frees the previous trainer, which has many reference cycles
    gc.freeze()  # imported objects need not be examined again
    return rehearse_trainer(job, knobs, length, scratch, compute_capability, layers, chunks)


OPERATIONS: dict[str, tuple[str, Callable[..., Any] | str]] = {
    "parse": ("Reading the flags", "autotrain_mem.checks.arguments:parse"),
    "flags": ("Reading TRL's flags", flags),
    "describe": ("Reading the model's config", describe),
    "layers_to_name": ("Looking for the model's layers", layers_to_name),
    "preflight": ("Checking model, tokenizer and data", preflight),
    "fingerprint": ("Looking at the data", "autotrain_mem.data.fingerprint:fingerprint"),
    "profile": ("Counting the tokens of the data", "autotrain_mem.data.token_lengths:profile"),
    "rehearse": ("Rehearsing the trainer", rehearse),
}
"""Operation -> its name in errors, and its function, imported on first use. The function's type hints determine how a
request is read (``support.codec``); it may also take ``scratch``, a folder, and ``on_progress``."""


def answer(request: dict[str, Any], on_progress: OnProgress = lambda counting: None) -> dict[str, Any]:
    """Runs a request and returns its result, or its error, as JSON. The variables of its job's ``env:`` block are set
    meanwhile, in every worker, except those that hide the GPUs."""
    step, operation = OPERATIONS[request["operation"]]
    block = request.get("environment") or (request.get("job") or {}).get("environment", {})
    variables = {name: text for name, text in block.items() if name not in HIDDEN_CUDA}
    try:
        with (
            mock.patch.dict(os.environ, variables),
            tempfile.TemporaryDirectory(prefix=PREFIX) as scratch,  # one per request: the process can die at any time
        ):
            function = resolve_name(operation) if isinstance(operation, str) else operation
            kinds = get_type_hints(function)
            read = {name: codec.from_json(kinds[name], value) for name, value in request.items() if name in kinds}
            beside = {"scratch": scratch, "on_progress": on_progress}
            return {"ok": codec.to_json(function(**read, **{name: beside[name] for name in beside if name in kinds}))}
    except AutofitError as error:
        return {**error.to_json(), "traceback": traceback.format_exc()}
    except Exception as error:  # raised by an installed library or the user's code
        from_python = request.get("job", {}).get("python_call") is not None
        refused = failure(step, error, from_python=from_python).to_json()
        return {**refused, "raised": passed_on(error), "traceback": traceback.format_exc()}


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Within the block, ``torch.compile`` returns functions as they are.

    bitsandbytes compiles its optimizers on import (``backends/default/ops.py: _try_torch_compile``). This makes
    torch import its inductor, which takes a sixth of the time of importing TRL. No rehearsal calls these functions.
    """
    import torch

    def as_it_is(function: Any = None, **options: Any) -> Any:
        return function or as_it_is

    with mock.patch.object(torch, "compile", as_it_is):
        yield


_OF_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BEGIN_OF_GROUP = (
    *("GROUP_", "ROLE_", "TORCHELASTIC_", "PMI_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"),
    *("ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_CONFIG_DS_", "FSDP_"),
    "PARALLELISM_CONFIG_",
)
"""Prefixes of variables that describe a process group (torchrun:
``torch/distributed/elastic/agent/server/local_elastic_agent.py: _start_workers``; MPI: ``accelerate/state.py:
_prepare_backend``) or accelerate's sharding. A rehearsal for several processes sets its own variables."""


def leave_group() -> None:
    """Removes a process group's variables: with them, a rehearsal would be a second rank 0 and wait forever."""
    for name in [name for name in os.environ if name in _OF_GROUP or name.startswith(_BEGIN_OF_GROUP)]:
        del os.environ[name]


def remove_scratch() -> None:
    """Removes the folder that a killed parent gave to this worker, with the files of a script's calls in it."""
    own = pathlib.Path(os.environ[SCRATCH])
    # Renamed first, so that a process that still writes there finds no folder.
    shutil.rmtree(own.rename(f"{own}-over"), ignore_errors=True)


def main() -> None:
    """Serves until the parent ends."""
    gc.set_threshold(700, 10, 1000)  # a rehearsal has millions of objects, whose full collections took a tenth of it
    channel = Channel(ignore_interrupt=True, on_close=remove_scratch)
    leave_group()
    warnings.filterwarnings("ignore")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # they would fill the end of the log
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # else DeepSpeed prints what it found
    import torch

    torch.set_num_threads(1)  # fake tensors compute nothing
    # Nearly every request needs these imports. If a library is broken, the first such request reports it.
    with contextlib.suppress(Exception), uncompiled():
        from trl import SFTTrainer  # noqa: F401

        from autotrain_mem.rehearsal import fake_run, rehearse  # noqa: F401

        limit_templates(memory=True)
    if not channel.is_asked:
        with contextlib.suppress(Exception):  # once per installation, while another worker has the first request
            if kept_names(Store(cache_folder())) is None:
                flags()
    while True:
        channel.send(answer(channel.receive(), lambda counting: channel.send({"progress": codec.to_json(counting)})))


if __name__ == "__main__":
    main()
