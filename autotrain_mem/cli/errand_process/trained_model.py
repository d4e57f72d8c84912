"""Loads what a run trained, where there is room for it; chats with it, or merges an adapter into its base model."""

from __future__ import annotations

import secrets
import shutil
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

from autotrain_mem.cli.errands import Errand, Receive, Send
from autotrain_mem.support.errors import HostMemoryError, ModelNotFoundError, OutputFolderError, UsageError
from autotrain_mem.support.host import free_disk_bytes, host_memory
from autotrain_mem.support.units import format_bytes

ROOM = 1.15
"""Of the weights' bytes, for what loading and computing take beside them: a layer's copy while a file is read
(``transformers/core_model_loading.py``), a short cache of keys and values."""


def model_class(errand: Errand) -> Any:
    """Return transformers' class for what was trained."""
    return AutoModelForSequenceClassification if errand.gives_score else AutoModelForCausalLM


def read_config(errand: Errand) -> Any:
    """Read the config of the whole model or of the base.

    Raises ModelNotFoundError: there is none, or it cannot be reached; UsageError: the base is a quantized checkpoint.
    """
    name = errand.base or errand.folder
    try:
        labels = {"num_labels": 1} if errand.gives_score and errand.base else {}
        config = AutoConfig.from_pretrained(name, **labels, **_options(errand))
    except (OSError, ValueError) as error:
        raise missing(errand, error) from error
    if errand.base and getattr(config, "quantization_config", None):
        raise UsageError(
            f"The base model {name} is a quantized checkpoint, whose full weights are not in it.",
            hint="Give --base the model that it was quantized from.",
        )
    return config


def missing(errand: Errand, error: Exception) -> ModelNotFoundError:
    """The error of a base model, or of a run's own files, that cannot be loaded."""
    reason = " ".join(str(error).split())[:300]
    if errand.base is None:
        return ModelNotFoundError(f"The model in {errand.folder} cannot be loaded: {reason}")
    return ModelNotFoundError(
        f"The adapter in {errand.folder} belongs to the model {errand.base}, which cannot be loaded: {reason}",
        hint="Give --base the folder or the hub id where that model is now.",
    )


def weight_bytes(errand: Errand, config: Any) -> int:
    """Count the bytes of the weights in the checkpoint's own type, from their shapes alone."""
    with torch.device("meta"):
        model = model_class(errand).from_config(config, trust_remote_code=errand.trust_remote_code)
    dtype = getattr(config, "dtype", None) or torch.float32
    return int(sum(weight.numel() for weight in model.parameters()) * dtype.itemsize)


def check_memory(needed_bytes: int, what: str) -> None:
    """Refuse what would end the process. Raises HostMemoryError: the host has less."""
    available_bytes = host_memory().available_bytes
    if needed_bytes > available_bytes:
        raise HostMemoryError(
            f"{what} takes {format_bytes(needed_bytes)} of host memory, and {format_bytes(available_bytes)} are "
            "available.",
            hint="Close other programs, or take a machine with more memory.",
        )


def load_model(errand: Errand, config: Any) -> Any:
    """Load the weights onto the host, in the checkpoint's own type, and lay the adapter over them."""
    name = errand.base or errand.folder
    try:
        model = model_class(errand).from_pretrained(name, config=config, dtype="auto", **_options(errand))
    except (OSError, ValueError) as error:
        raise missing(errand, error) from error
    if errand.base is None:
        return model
    from peft import PeftModel

    tokens = len(load_tokenizer(errand))
    if tokens > model.get_input_embeddings().weight.shape[0]:  # the training added some
        model.resize_token_embeddings(tokens)
    return PeftModel.from_pretrained(model, errand.folder)


def load_tokenizer(errand: Errand) -> Any:
    """Load the run's tokenizer, which the trainer saved beside the weights."""
    return AutoTokenizer.from_pretrained(errand.folder, trust_remote_code=errand.trust_remote_code)


def _options(errand: Errand) -> dict[str, Any]:
    of_base = {"revision": errand.revision} if errand.base and errand.revision else {}
    return {**of_base, "trust_remote_code": errand.trust_remote_code}


def chat(errand: Errand, send: Send, receive: Receive) -> dict[str, Any]:
    """Load the model, say so, and answer until the parent asks for no more: it then ends this process."""
    config = read_config(errand)
    needed_bytes, device = int(ROOM * weight_bytes(errand, config)), "cpu"
    if not errand.use_cpu and torch.cuda.is_available() and needed_bytes <= torch.cuda.mem_get_info()[0]:
        device = "cuda"
    check_memory(needed_bytes, "The model")
    model, tokenizer = load_model(errand, config).to(device).eval(), load_tokenizer(errand)
    has_template = bool(tokenizer.chat_template) and not errand.plain
    send({"event": "ready", "device": device, "has_template": has_template})
    while request := receive():
        messages = list(request["messages"])
        if errand.gives_score:
            send({"event": "score", "score": score(model, tokenizer, messages, has_template)})
        else:
            send({"event": "answer", "text": answer(errand, model, tokenizer, messages, has_template, send)})
    return {"event": "end"}


class Pieces(TextStreamer):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Sends what is generated as whole words come of it."""

    def __init__(self, tokenizer: Any, send: Send) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._send = send
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """transformers calls it with each piece."""
        self.text += text
        self._send({"event": "piece", "text": text})


@torch.no_grad()  # type: ignore[untyped-decorator]
def answer(
    errand: Errand, model: Any, tokenizer: Any, messages: list[dict[str, str]], has_template: bool, send: Send
) -> str:
    """Generate the next turn of a conversation, or the continuation of its last text."""
    inputs = _inputs(tokenizer, messages, has_template, to_answer=True).to(model.device)
    pieces = Pieces(tokenizer, send)
    model.generate(
        **inputs,
        max_new_tokens=errand.max_new_tokens,
        streamer=pieces,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    return pieces.text


@torch.no_grad()  # type: ignore[untyped-decorator]
def score(model: Any, tokenizer: Any, messages: list[dict[str, str]], has_template: bool) -> float:
    """Score a text, or a conversation."""
    inputs = _inputs(tokenizer, messages, has_template, to_answer=False).to(model.device)
    return float(model(**inputs).logits.float().reshape(-1)[0])


def _inputs(tokenizer: Any, messages: list[dict[str, str]], has_template: bool, *, to_answer: bool) -> Any:
    if has_template:
        options = {"add_generation_prompt": to_answer, "return_tensors": "pt", "return_dict": True}
        return tokenizer.apply_chat_template(messages, **options)
    inputs = tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
    inputs.pop("token_type_ids", None)  # which decoders do not take
    return inputs


CARD_NAME = "README.md"


def merge(errand: Errand, send: Send, receive: Receive) -> dict[str, Any]:
    """Merge in the base's own type, on the host; the folder appears whole or not at all.

    Raises:
        HostMemoryError, OutputFolderError: there is no room for it, in memory or on the disk.
        ModelNotFoundError, UsageError: of the base model.
    """
    config, target = read_config(errand), Path(errand.to)
    written_bytes = weight_bytes(errand, config)
    check_memory(int(ROOM * written_bytes), "Merging")
    folder = target.absolute().parent
    if written_bytes > (free_bytes := free_disk_bytes(folder)):
        raise OutputFolderError(
            f"The merged model takes {format_bytes(written_bytes)}, and the disk of {folder} has "
            f"{format_bytes(free_bytes)} free.",
            hint="Give --out a folder on another disk.",
        )
    send({"event": "note", "message": f"loading {errand.base} ({format_bytes(written_bytes)}) and its adapter"})
    model = load_model(errand, config)
    check_merges(model)
    send({"event": "note", "message": "merging"})
    merged = model.merge_and_unload(safe_merge=True)  # refuses weights that are no numbers
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        merged.save_pretrained(unfinished)
        load_tokenizer(errand).save_pretrained(unfinished)
        card = Path(errand.folder, CARD_NAME)
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace").replace("library_name: peft\n", "")
            (unfinished / CARD_NAME).write_text(text, encoding="utf-8")
        if target.exists():  # by now
            message = f"{target} exists by now, and is not written over."
            raise OutputFolderError(message, hint="Give --out a new folder.")
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"event": "end", "path": str(target), "bytes": written_bytes, "dtype": str(merged.dtype).split(".")[-1]}


def check_merges(model: Any) -> None:
    """Refuses an adapter that is no change of weights, such as prompts (``peft/peft_model.py: PeftModel.__getattr__``
    hands the question on to the base model, which knows no merging).

    Raises:
        UsageError: it cannot be merged.
    """
    if not hasattr(model, "merge_and_unload"):
        kind = next(iter(model.peft_config.values())).peft_type.value
        raise UsageError(
            f"An adapter of the kind {kind} is not merged: it adds tokens or states, and changes no weight.",
            hint="Use it beside its base model, as autofit chat does.",
        )
