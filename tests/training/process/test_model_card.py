"""The card beside the weights: TRL knows no base model that is a folder, and nothing of a plan."""

import re
from dataclasses import replace
from pathlib import Path

from tiny_trainers import trainer

from autotrain_mem.support.units import GIB
from autotrain_mem.training.process.model_card import NO_BASE, complete_cards
from autotrain_mem.training.task import Request
from autotrain_mem.types import Hardware, Harm, Job, Lever, Phase
from autotrain_mem.types.report import MemoryReading
from tests.nouns import TRL_DEFAULTS

CARD = Hardware(name="toy", origin="imagined", total_bytes=12 * GIB, free_bytes=11 * GIB, non_torch_bytes=0)
LINEAR = ("all-linear",)


def test_a_card_names_the_folder_of_the_base_model_and_the_settings(qwen: Path, tmp_path: Path) -> None:
    made = trainer("sft", qwen, tmp_path)
    made.create_model_card()
    assert NO_BASE in (tmp_path / "README.md").read_text(), "TRL names it by now"
    request = Request(
        task="train",
        job=Job(method="sft", model=f"{qwen}/", dataset=None, arguments={}),
        knobs=replace(TRL_DEFAULTS, gradient_accumulation_steps=2, use_peft=True, lora_target_modules=LINEAR),
        hardware=CARD,
        simulate=True,
        output_dir=str(tmp_path),
        predicted={Phase.BACKWARD: 2 * GIB},
        level="LoRA",
        levers=(
            Lever(name="use_peft", before=False, after=True, harm=Harm.WHAT_IS_TRAINED, why="so that it fits"),
            Lever(name="lora_target_modules", before=None, after=LINEAR, harm=Harm.WHAT_IS_TRAINED, why="it learns"),
        ),
    )
    reading = MemoryReading.from_stats({"allocated_bytes.all.peak": GIB})
    complete_cards(made, request, lambda: reading)
    made.create_model_card(model_name="mine")
    card = (tmp_path / "README.md").read_text()
    assert "fine-tuned version of `qwen2`." in card
    assert "Chosen by autofit for toy with 12.0 GiB; 16 rows in each optimizer step." in card
    assert "| per_device_train_batch_size | 8 |" in card
    assert card.count("## Settings") == 1
    assert "| method | SFT |" in card
    assert re.search(r"\| trained \| all, [\d,]+ weights \|", card)
    assert "| plan | LoRA, for toy with 12.0 GiB |" in card
    assert "| peak memory allocated | 2.00 GiB predicted, 1.00 GiB measured |" in card
    assert "- use_peft: False -> True, so that it fits" in card
    assert "- lora_target_modules: none -> all-linear, it learns" in card
    assert "| lora_target_modules | all-linear |" in card
    assert str(qwen) not in card.partition("## Training")[2], "where it lies is nobody's business"
