"""A run in one process goes on with shards as if they were its own checkpoint, and with nothing that is not its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_trainers
import torch
import torch.distributed.checkpoint as dcp
from nouns import TRL_DEFAULTS
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainerCallback

from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.training.process.resharding import (
    OTHER_MODEL,
    _copy_part,
    _fill_from_file,
    _fill_from_shards,
    _load_weights,
    read_other_forms,
)

STEPS, SAVED = 5, 2
SAVING = {"save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS}


class SaveShards(TrainerCallback):  # type: ignore[misc]
    """Writes beside each checkpoint what FSDP's ranks would."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        whole = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        shards = whole.with_name(f"shards-{state.global_step}")
        shutil.copytree(whole, shards, ignore=shutil.ignore_patterns("*.safetensors", "optimizer.pt"))
        weights = load_file(next(whole.glob("*model.safetensors")))
        if "transformer.wte.weight" in weights:  # FSDP's ranks write both names of a tied weight
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        _save({"model": weights}, shards / "pytorch_model_fsdp_0")
        _save({"optimizer": get_optimizer_state_dict(model, optimizer)}, shards / "optimizer_0")


def _save(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _trainer(model: Path, folder: Path, peft: bool) -> Any:
    more: dict[str, Any] = {}
    if peft:
        from peft import LoraConfig

        more["build"] = {"peft_config": LoraConfig(r=4, lora_dropout=0.1)}
    return tiny_trainers.trainer("sft", model, folder, **SAVING, **more)


@pytest.fixture(scope="module", params=[False, True], ids=["full", "LoRA"])
def calm(request: Any, gpt2: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that nothing befalls, with dropout: random numbers count."""
    made = _trainer(gpt2, tmp_path_factory.mktemp("calm"), request.param)
    made.add_callback(SaveShards())
    made.train()
    made.is_lora = request.param
    return made


def _shards(calm: Any) -> Path:
    return Path(calm.args.output_dir) / f"shards-{SAVED}"


def test_a_run_goes_on_with_shards_to_the_bit(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    made, notes = _trainer(gpt2, tmp_path, calm.is_lora), []
    read_other_forms(made, str(_shards(calm)), TRL_DEFAULTS, notes.append)
    made.train(resume_from_checkpoint=str(_shards(calm)))
    assert not notes
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (calm, made)]
    assert losses[0] == losses[1]
    assert len(losses[1]) == STEPS
    for before, now in zip(calm.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(before, now)


def test_shards_of_another_model_and_unreadable_ones_are_refused(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    state = get_optimizer_state_dict(calm.model, calm.optimizer)
    state["state"].popitem()
    unreadable = r"Cannot resume from .*FileNotFoundError.*metadata"
    cases: list[tuple[str, Any, type[Exception], str]] = [
        ("pytorch_model_fsdp_0", {"model": {"a": torch.zeros(2)}}, TrainingError, "are not those of this model"),
        ("pytorch_model_fsdp_0", None, OutputFolderError, unreadable),
        ("optimizer_0", {"optimizer": state}, TrainingError, "has state for"),
        ("optimizer_0", None, OutputFolderError, unreadable),
    ]
    made = _trainer(gpt2, tmp_path / "run", calm.is_lora)
    made.create_optimizer()
    for name, content, kind, words in cases:
        other = shutil.copytree(_shards(calm), tmp_path / "checkpoint-3")
        if content is None:
            (other / name / ".metadata").unlink()
        else:
            shutil.rmtree(other / name)
            _save(content, other / name)
        read_other_forms(made, str(other), TRL_DEFAULTS, [].append)
        with pytest.raises(kind, match=words) as caught:
            made._load_optimizer_and_scheduler(str(other))
        again = "Start again: give another --output_dir, and no --resume_from_checkpoint."
        assert caught.value.hint == (again if content is None else OTHER_MODEL)
        shutil.rmtree(other)


def test_both_forms_hold_the_same(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    """``optimizer.pt`` counts parameters, and shards name them."""
    whole, states = Path(calm.args.output_dir) / f"checkpoint-{SAVED}", []
    for checkpoint, fill in ((whole, _fill_from_file), (_shards(calm), _fill_from_shards)):
        made = _trainer(gpt2, tmp_path, calm.is_lora)
        assert _load_weights(made.model, checkpoint, is_in_shards=checkpoint != whole) == ""
        state = get_optimizer_state_dict(made.model, made.create_optimizer())
        fill(state, checkpoint)
        states.append((dict(made.model.named_parameters()), state["state"]))
    assert_close(states[0], states[1], rtol=0, atol=0)
    assert {float(each["step"]) for each in states[0][1].values()} == {SAVED}


def test_weights_that_lose_precision_are_said(calm: Any) -> None:
    before = calm.model.dtype
    try:
        said = _load_weights(calm.model.to(torch.bfloat16), _shards(calm), is_in_shards=True)
    finally:
        calm.model.to(before)
    assert said == "weights are float32 in the checkpoint and are rounded to bfloat16, the dtype of this run"


def test_a_rank_takes_its_part_of_what_is_whole() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        part = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        _copy_part("a", torch.arange(6.0).view(3, 2), part)
        assert part.to_local().tolist() == [[4, 5]]
        with pytest.raises(TrainingError, match=r"a has the shape \(2, 2\) in the checkpoint, and \(3, 2\) in this"):
            _copy_part("a", torch.zeros(2, 2), part)
    finally:
        torch.distributed.destroy_process_group()
