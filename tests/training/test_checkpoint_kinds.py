"""What a checkpoint's files say of its form, and who can go on with it."""

from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.training.checkpoint_kinds import Resumer, how_to_resume, is_of_another_form, why_not

FILES = {
    "whole": ["model.safetensors", "optimizer.pt"],
    "shards": ["pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"],
    "zero": ["global_step3/mp_rank_00_model_states.pt", "model.safetensors"],
    "zero3": ["global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt", "model.safetensors"],
}


def checkpoint(folder: Path, form: str, ranks: int = 2) -> Path:
    for name in (*FILES[form], *(f"rng_state_{rank}.pth" for rank in range(ranks if ranks > 1 else 0))):
        file = folder / "checkpoint-3" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
    return folder / "checkpoint-3"


@pytest.mark.parametrize(
    ("form", "resumer", "why"),
    [
        ("whole", {"sharding": None, "processes": 1}, ""),
        ("whole", {"sharding": "fsdp2", "processes": 4, "optim": "adamw_torch_fused"}, ""),
        ("whole", {"sharding": "zero3", "processes": 4}, "DeepSpeed resumes only its own"),
        ("whole", {"sharding": "fsdp2", "processes": 2, "optim": "adafactor"}, "adafactor cannot be resharded"),
        ("whole", {"sharding": "ddp", "processes": 2, "optim": "adafactor"}, ""),
        ("shards", {"sharding": "ddp", "processes": 3}, ""),
        ("shards", {"sharding": "zero2", "processes": 2}, "DeepSpeed resumes only its own"),
        ("zero3", {"sharding": "zero3", "processes": 2}, ""),
        ("zero3", {"sharding": "zero3", "processes": 4}, "ZeRO-3 of 2 ranks, and DeepSpeed resumes it only with"),
        ("zero3", {"sharding": "fsdp2", "processes": 2}, "as many ranks"),
        ("zero", {"sharding": "zero3", "processes": 2}, "ZeRO-1 or 2 of 2 ranks"),
    ],
)
def test_who_can_go_on_with_it(tmp_path: Path, form: str, resumer: dict[str, Any], why: str) -> None:
    told = why_not(checkpoint(tmp_path, form), Resumer(**resumer))
    assert why in told if why else told == ""


def test_libraries_go_on_with_their_own_form_by_themselves(tmp_path: Path) -> None:
    shards = checkpoint(tmp_path, "shards")
    assert not is_of_another_form(shards, Resumer(sharding="hsdp", processes=4))
    assert is_of_another_form(shards, Resumer(sharding="ddp", processes=4))
    zero = checkpoint(tmp_path / "zero", "zero")
    assert not is_of_another_form(zero, Resumer(sharding="zero1", processes=2))
    assert is_of_another_form(zero, Resumer(sharding="zero2", processes=4))


WAYS_OUT = {
    "whole": "--gpus 2 --sharding ddp",
    "shards": "any number of GPUs with --sharding fsdp2",
    "zero3": "--gpus 2 --sharding zero3",
    "zero": "checkpoint-3/zero_to_fp32.py ",
}


@pytest.mark.parametrize("form", WAYS_OUT)
def test_the_way_out_is_told(tmp_path: Path, form: str) -> None:
    assert WAYS_OUT[form] in how_to_resume(checkpoint(tmp_path, form))
