"""Answers prompts with a trained model, a piece at a time; a reward model scores them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TextStreamer

from autotrain_mem.errands.errand import Errand, Receive, Send
from autotrain_mem.errands.process.load import (
    ROOM,
    check_memory,
    load_model,
    load_tokenizer,
    read_config,
    weight_bytes,
)


def chat(errand: Errand, send: Send, receive: Receive) -> dict[str, Any]:
    """Load the model, say so, and answer until the parent asks for no more: it then ends this process."""
    config = read_config(errand)
    needed_bytes = int(ROOM * weight_bytes(errand, config))
    device = _device(errand, needed_bytes)
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


def _device(errand: Errand, needed_bytes: int) -> str:
    """The GPU where there is one with room."""
    if errand.use_cpu or not torch.cuda.is_available():
        return "cpu"
    free_bytes, _ = torch.cuda.mem_get_info()
    return "cuda" if needed_bytes <= free_bytes else "cpu"


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
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    return pieces.text


@torch.no_grad()  # type: ignore[untyped-decorator]
def score(model: Any, tokenizer: Any, messages: list[dict[str, str]], has_template: bool) -> float:
    """Score a text, or a conversation."""
    inputs = _inputs(tokenizer, messages, has_template, to_answer=False).to(model.device)
    return float(model(**inputs).logits.float().reshape(-1)[0])


def _inputs(tokenizer: Any, messages: list[dict[str, str]], has_template: bool, *, to_answer: bool) -> Any:
    if has_template:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=to_answer, return_tensors="pt", return_dict=True
        )
    text = "\n".join(message["content"] for message in messages)
    inputs = tokenizer(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)  # which decoders do not take
    return inputs
