"""A script's rows with images are planned for and trained on; what its own objects make of images is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from PIL import Image

import autotrain_mem
from autotrain_mem.support.errors import DatasetFormatError
from tests.drop_in.conftest import QUIET, config


def rows() -> Dataset:
    said = [{"role": "user", "content": "how many apples"}, {"role": "assistant", "content": "two apples"}]
    return Dataset.from_dict({"messages": [said] * 8, "images": [[Image.new("RGB", (112, 84), n)] for n in range(8)]})


def test_a_script_gives_the_model_by_its_name_and_the_images_are_as_small_as_it_says(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    args = config(trl.SFTConfig, tmp_path, max_steps=1)
    model = str(vision_folder("qwen2_5_vl"))
    trainer = autotrain_mem.SFTTrainer(
        model, args=args, train_dataset=rows(), autofit=replace(QUIET, max_pixels=56 * 56)
    )
    assert trainer.plan is not None
    assert trainer.plan.data is not None
    assert trainer.plan.data.images is not None
    assert trainer.plan.data.images.most == 2  # of 28 x 28 pixels; of 12, as the image is
    batch = next(iter(trainer.get_train_dataloader()))
    patches = 2 * 4
    assert batch["pixel_values"].shape[0] == patches * batch["input_ids"].shape[0]
    trainer.train()


@pytest.mark.parametrize("name", ["data_collator", "formatting_func"])
def test_what_a_scripts_own_code_makes_of_images_is_refused(name: str, tiny_qwen: Path, tmp_path: Path) -> None:
    call: dict[str, Any] = {"args": config(trl.SFTConfig, tmp_path), "train_dataset": rows(), name: print}
    with pytest.raises(DatasetFormatError, match=f"holds images .images., and what {name} of a script makes of them"):
        autotrain_mem.SFTTrainer(str(tiny_qwen), **call, autofit=QUIET)
