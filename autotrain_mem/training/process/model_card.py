"""Completes the model card that TRL writes beside the weights: what was trained, on which data, by which plan, with
which peak memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotrain_mem.data.load import dataset_name
from autotrain_mem.settings.knobs import knob_names
from autotrain_mem.support import codec
from autotrain_mem.support.files import replace_file
from autotrain_mem.support.units import format_bytes
from autotrain_mem.training.task import Request
from autotrain_mem.types.report import MemoryReading

NO_BASE = "[None](https://huggingface.co/None)"
"""What TRL's template writes if the base model is a folder (``trl/templates/lm_model_card.md``,
``trl/trainer/base_trainer.py: create_model_card``)."""

NO_NAME = 'model="None"'
"""What the same template writes for a model without a name on the hub."""


def complete_cards(trainer: Any, request: Request, read: Callable[[], MemoryReading | None]) -> None:
    """Completes every model card that this trainer writes, one with each checkpoint and each push.

    Args:
        read: Reads the device's allocator; returns None if it cannot be measured.
    """
    create = trainer.create_model_card

    def create_model_card(*args: Any, **kwargs: Any) -> None:
        create(*args, **kwargs)
        card = Path(trainer.args.output_dir) / "README.md"
        if card.is_file():  # only the first process writes it
            text = completed(card.read_text(encoding="utf-8"), request, trainer, read())
            replace_file(card, text.encode())

    trainer.create_model_card = create_model_card


def write_last_card(trainer: Any) -> None:
    """Writes the final model's card. A full disk does not fail the training."""
    if trainer.is_world_process_zero():
        with contextlib.suppress(OSError):
            name = trainer.args.hub_model_id or Path(trainer.args.output_dir).resolve().name
            trainer.create_model_card(model_name=name.split("/")[-1])


def completed(card: str, request: Request, trainer: Any, reading: MemoryReading | None) -> str:
    """Adds to a card what was trained and how; models and data in local folders appear by name only, without their
    path."""
    base = f"`{named(request.job.model)}`"
    card = card.replace(NO_BASE, base).replace(NO_NAME, f'model="{Path(request.output_dir).resolve().name}"')
    lines = [card.rstrip(), "", "## Training", "", "| what | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in _facts(request, trainer, reading)]
    if request.levers:
        lines += ["", "Changed by the plan, from the settings asked for:", ""]
    for lever in request.levers:
        lines.append(f"- {lever.name}: {_value(lever.before)} -> {_value(lever.after)}, {lever.why}")
    knobs, hardware = request.knobs, request.hardware
    chosen = f"Chosen by autofit for {hardware.name} with {format_bytes(hardware.total_bytes)}"
    size = f"{knobs.effective_batch_size} rows in each optimizer step."
    lines += ["", "## Settings", "", f"{chosen}; {size}", "", "| setting | value |", "|---|---|"]
    values = codec.to_json(knobs)  # without the knobs left to TRL's defaults
    names = [name for name in knob_names(request.job.method_facts.knobs, knobs) if name in values]
    lines += [f"| {name} | {_value(values[name])} |" for name in names]
    return "\n".join(lines) + "\n"


def named(model_or_data: str) -> str:
    """Returns a hub id unchanged, and the last name of a path."""
    path = Path(model_or_data)
    return path.resolve().name if path.exists() or path.is_absolute() else model_or_data


def _facts(request: Request, trainer: Any, reading: MemoryReading | None) -> Iterator[tuple[str, str]]:
    arguments, facts = trainer.args, request.job.method_facts
    yield "method", facts.title
    yield "base model", f"`{named(request.job.model)}`"
    weights = [*trainer.model.parameters()]
    count = f"{sum(weight.numel() for weight in weights if weight.requires_grad):,} weights"
    adapter = next(iter(getattr(trainer.model, "peft_config", {}).values()), None)
    if adapter is None:
        yield "trained", f"all, {count}"
    else:
        rank, alpha = getattr(adapter, "r", None), getattr(adapter, "lora_alpha", None)
        targets = getattr(adapter, "target_modules", None)
        modules = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
        scale = ("" if rank is None else f" of rank {rank}") + ("" if alpha is None else f", alpha {alpha}")
        yield "trained", f"{adapter.peft_type.value} adapter{scale}{f', on {modules}' if modules else ''}: {count}"
    yield "data", f"`{named(dataset_name(request.job))}`"
    yield "optimizer steps", f"{trainer.state.global_step:,} of {facts.rows(request.knobs.effective_batch_size)}"
    schedule = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    yield "learning rate", f"{arguments.learning_rate:g}, {schedule}"
    if request.level:
        yield "plan", f"{request.level}, for {request.hardware.name} with {format_bytes(request.hardware.total_bytes)}"
    peaks = [f"{format_bytes(max(request.predicted.values()))} predicted"] if request.predicted else []
    peaks += [] if reading is None else [f"{format_bytes(reading.peak_allocated_bytes)} measured"]
    if peaks:
        yield "peak memory allocated", ", ".join(peaks)


def _value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(value)
    return "none" if value is None else str(value)
