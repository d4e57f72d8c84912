"""Loads a trained model if memory suffices, chats with it, or merges an adapter into its base model."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TextStreamer,
)

from autotrain_mem.cli.trained_run import TrainedRun
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.host import free_disk_bytes, host_memory
from autotrain_mem.support.units import format_bytes, printable

ROOM = 1.15
"""Memory to load and run a model, as a multiple of its weights' bytes. It includes a layer's copy while a file is read
(``transformers/core_model_loading.py``) and a short KV cache."""
CARD_NAME = "README.md"


def _model_class(run: TrainedRun) -> Any:
    return AutoModelForSequenceClassification if run.method.has_score_head else AutoModelForCausalLM


def _options(run: TrainedRun) -> dict[str, Any]:
    of_base = {"revision": run.revision} if run.is_adapter and run.revision else {}
    return {**of_base, "trust_remote_code": run.trust_remote_code}


def read_config(run: TrainedRun) -> Any:
    """Reads the config of the whole model or of the base.

    Raises ModelNotFoundError if it is missing or cannot be reached, UsageError if the base is a quantized checkpoint.
    """
    try:
        labels = {"num_labels": 1} if run.method.has_score_head and run.is_adapter else {}
        config = AutoConfig.from_pretrained(run.weights_from, **labels, **_options(run))
    except (OSError, ValueError) as error:
        raise _missing(run, error) from error
    if run.is_adapter and getattr(config, "quantization_config", None):
        raise UsageError(
            f"The base model {run.base} is a quantized checkpoint, which does not hold the full weights.",
            hint="Give --base the model that it was quantized from.",
        )
    return config


def _missing(run: TrainedRun, error: Exception) -> ModelNotFoundError:
    reason = " ".join(str(error).split())[:300]
    if not run.is_adapter:
        return ModelNotFoundError(f"The model in {run.folder} cannot be loaded: {reason}")
    return ModelNotFoundError(
        f"The adapter in {run.folder} belongs to the model {run.base}, which cannot be loaded: {reason}",
        hint="Give --base the folder or the hub id where that model is now.",
    )


def weight_bytes(run: TrainedRun, config: Any) -> int:
    """Returns the bytes of the weights in the checkpoint's dtype, computed on the meta device."""
    with torch.device("meta"):
        model = _model_class(run).from_config(config, trust_remote_code=run.trust_remote_code)
    dtype = getattr(config, "dtype", None) or torch.float32
    return int(sum(weight.numel() for weight in model.parameters()) * dtype.itemsize)


def check_memory(needed_bytes: int, what: str) -> None:
    """Raises HostMemoryError if the host has too little memory; otherwise the process would be killed."""
    available_bytes = host_memory().available_bytes
    if needed_bytes > available_bytes:
        raise HostMemoryError(
            f"{what} takes {format_bytes(needed_bytes)} of host memory, and {format_bytes(available_bytes)} are "
            "available.",
            hint="Close other programs, or take a machine with more memory.",
        )


def load_model(run: TrainedRun, config: Any) -> Any:
    """Loads the weights into host memory in the checkpoint's dtype, and adds the adapter, if any."""
    try:
        model = _model_class(run).from_pretrained(run.weights_from, config=config, dtype="auto", **_options(run))
    except (OSError, ValueError) as error:
        raise _missing(run, error) from error
    if not run.is_adapter:
        return model
    from peft import PeftModel

    tokens = len(load_tokenizer(run))
    if tokens > model.get_input_embeddings().weight.shape[0]:  # the training added some
        model.resize_token_embeddings(tokens)
    return PeftModel.from_pretrained(model, run.folder)


def load_tokenizer(run: TrainedRun) -> Any:
    """Loads the run's tokenizer, which the trainer saved beside the weights."""
    return AutoTokenizer.from_pretrained(run.folder, trust_remote_code=run.trust_remote_code)


class Chat:
    """Holds a loaded model that answers, on the GPU if it fits there."""

    def __init__(self, run: TrainedRun, *, max_new_tokens: int, plain: bool = False, use_cpu: bool = False) -> None:
        config = read_config(run)
        needed_bytes, self.device = int(ROOM * weight_bytes(run, config)), "cpu"
        if not use_cpu and torch.cuda.is_available() and needed_bytes <= torch.cuda.mem_get_info()[0]:
            self.device = "cuda"
        check_memory(needed_bytes, "The model")
        self._model, self._tokenizer = load_model(run, config).to(self.device).eval(), load_tokenizer(run)
        self._has_template = bool(self._tokenizer.chat_template) and not plain
        self._max_new_tokens = max_new_tokens

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def answer(self, messages: list[dict[str, str]], write: Callable[[str], object]) -> str:
        """Generates the next turn of a conversation, or the continuation of its last text, and writes it token by
        token."""
        inputs = self._inputs(messages, to_answer=True)
        streamer = TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: write(printable(text))
        end, pad = self._tokenizer.eos_token_id, self._tokenizer.pad_token_id
        generated = self._model.generate(
            **inputs, max_new_tokens=self._max_new_tokens, streamer=streamer, pad_token_id=end if pad is None else pad
        )
        new_tokens = generated[0, inputs["input_ids"].shape[1] :]
        return str(self._tokenizer.decode(new_tokens, skip_special_tokens=True))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def score(self, messages: list[dict[str, str]]) -> float:
        """Returns a reward model's score of a text or a conversation."""
        return float(self._model(**self._inputs(messages, to_answer=False)).logits.float().reshape(-1)[0])

    def _inputs(self, messages: list[dict[str, str]], *, to_answer: bool) -> Any:
        if self._has_template:
            options = {"add_generation_prompt": to_answer, "return_tensors": "pt", "return_dict": True}
            return self._tokenizer.apply_chat_template(messages, **options).to(self.device)
        inputs = self._tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        inputs.pop("token_type_ids", None)  # which decoders do not take
        return inputs.to(self.device)


def merge(run: TrainedRun, target: Path, note: Callable[[str], None]) -> str:
    """Merges on the host, in the base's dtype, and returns size and dtype. The folder appears complete or not at all.

    Raises:
        HostMemoryError, OutputFolderError: memory or disk space does not suffice, or the folder exists by now.
        ModelNotFoundError, UsageError: see :func:`read_config` and :func:`check_merges`.
    """
    config = read_config(run)
    written_bytes = weight_bytes(run, config)
    check_memory(int(ROOM * written_bytes), "Merging")
    folder = target.absolute().parent
    if written_bytes > (free_bytes := free_disk_bytes(folder)):
        raise OutputFolderError(
            f"The merged model takes {format_bytes(written_bytes)}, and the disk of {folder} has "
            f"{format_bytes(free_bytes)} free.",
            hint="Give --out a folder on another disk.",
        )
    note(f"loading {run.base} ({format_bytes(written_bytes)}) and its adapter")
    model = load_model(run, config)
    check_merges(model)
    note("merging")
    merged = model.merge_and_unload(safe_merge=True)  # raises for weights that are NaN
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        merged.save_pretrained(unfinished)
        load_tokenizer(run).save_pretrained(unfinished)
        card = run.folder / CARD_NAME
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace").replace("library_name: peft\n", "")
            (unfinished / CARD_NAME).write_text(text, encoding="utf-8")
        if target.exists():  # created meanwhile
            message = f"{target} exists by now, and is not written over."
            raise OutputFolderError(message, hint="Give --out a new folder.")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return f"{format_bytes(written_bytes)} in {str(merged.dtype).split('.')[-1]}"


def check_merges(model: Any) -> None:
    """Raises UsageError for an adapter that does not change weights, such as prompt tuning.

    ``peft/peft_model.py: PeftModel.__getattr__`` passes the attribute on to the base model, which has no merge method.
    """
    if not hasattr(model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise UsageError(
            f"An adapter of the kind {kind} is not merged: it adds tokens or states, and changes no weight.",
            hint="Use it beside its base model, as autofit chat does.",
        )
