"""Completes the model card that TRL writes beside the weights: the base model where it is a folder, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotrain_mem.files import replace_file
from autotrain_mem.spec import codec
from autotrain_mem.spec.knobs import knob_names
from autotrain_mem.training.request import Request
from autotrain_mem.units import format_bytes

NO_BASE = "[None](https://huggingface.co/None)"
"""What TRL's template makes of a base model that is a folder (``trl/templates/lm_model_card.md``, ``trl/trainer/
base_trainer.py: create_model_card``)."""


def complete_cards(trainer: Any, request: Request) -> None:
    """Have every card that this trainer writes completed: one is written with each checkpoint and each push."""
    create = trainer.create_model_card

    def create_model_card(*args: Any, **kwargs: Any) -> None:
        create(*args, **kwargs)
        card = Path(trainer.args.output_dir) / "README.md"
        if card.is_file():  # only the first process writes it
            replace_file(card, completed(card.read_text(encoding="utf-8"), request).encode())

    trainer.create_model_card = create_model_card


def completed(card: str, request: Request) -> str:
    """The text of a card with the folder's name, which says nothing of where it lies, and a table of settings."""
    knobs, hardware = request.knobs, request.hardware
    values = codec.to_json(knobs)
    rows = [f"| {name} | {values[name]} |" for name in knob_names(request.job.method, knobs)]
    chosen = f"Chosen by autofit for {hardware.name} with {format_bytes(hardware.total_bytes)}"
    size = f"{knobs.effective_batch_size} rows in each optimizer step."
    table = "\n".join(["| setting | value |", "|---|---|", *rows])
    base = f"`{Path(request.job.model).resolve().name}`"
    return f"{card.replace(NO_BASE, base).rstrip()}\n\n## Settings\n\n{chosen}; {size}\n\n{table}\n"
