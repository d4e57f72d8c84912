"""A run in one process goes on with shards as if they were its own checkpoint, and with nothing that is not its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_trainers
import torch
import torch.distributed.checkpoint as dcp
from nouns import TRL_DEFAULTS
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import TrainerCallback

from autotrain_mem.support.errors import OutputFolderError, TrainingError
from autotrain_mem.training.process.resharding.parts import TorchParts
from autotrain_mem.training.process.resharding.resume import _load_schedule, opened, reading_other_forms
from autotrain_mem.training.process.resharding.saved import Shards, WholeFiles

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


def _gone_on_with(calm: Any, model: Path, folder: Path, checkpoint: Path) -> Any:
    made = _trainer(model, folder, calm.is_lora)
    notes: list[Any] = []
    with reading_other_forms(made, str(checkpoint), TRL_DEFAULTS, notes.append):
        made.train(resume_from_checkpoint=str(checkpoint))
    assert not notes
    return made


def _shards(calm: Any) -> Path:
    return Path(calm.args.output_dir) / f"shards-{SAVED}"


def test_a_run_goes_on_with_shards_to_the_bit(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    made = _gone_on_with(calm, gpt2, tmp_path, _shards(calm))
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (calm, made)]
    assert losses[0] == losses[1]
    assert len(losses[1]) == STEPS
    for before, now in zip(calm.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(before, now)


def test_both_forms_hold_the_same(calm: Any) -> None:
    order = [name for name, each in calm.model.named_parameters() if each.requires_grad]
    whole = Path(calm.args.output_dir) / f"checkpoint-{SAVED}"
    with opened(whole) as first, opened(_shards(calm)) as second:
        assert isinstance(first, WholeFiles)
        assert isinstance(second, Shards)
        assert first.names <= second.names
        assert first.states() == second.states() == len(order)
        assert all(torch.equal(first.weight(name), second.weight(name)) for name in first.names)
        assert [group["lr"] for group in first.options()] == [group["lr"] for group in second.options()]


def test_weights_of_another_model_end_it(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    other = shutil.copytree(_shards(calm), tmp_path / "other")
    shutil.rmtree(other / "pytorch_model_fsdp_0")
    _save({"model": {"stranger": torch.zeros(2)}}, other / "pytorch_model_fsdp_0")
    with pytest.raises(TrainingError, match="are not those of this model"):
        _gone_on_with(calm, gpt2, tmp_path / "run", other)


def test_an_optimizer_that_lacks_a_parameter_ends_it(calm: Any, gpt2: Path, tmp_path: Path) -> None:
    other = shutil.copytree(_shards(calm), tmp_path / "other")
    state = get_optimizer_state_dict(calm.model, calm.optimizer)
    state["state"].popitem()
    shutil.rmtree(other / "optimizer_0")
    _save({"optimizer": state}, other / "optimizer_0")
    with pytest.raises(TrainingError, match="has state for"):
        _gone_on_with(calm, gpt2, tmp_path / "run", other)


def test_what_was_not_taken_over_ends_it(
    calm: Any, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchParts, "put_weight", lambda *_: None)
    with pytest.raises(TrainingError, match="is not as it was saved"):
        _gone_on_with(calm, gpt2, tmp_path, _shards(calm))
    monkeypatch.undo()
    monkeypatch.setattr(TorchParts, "put_states", lambda *_: None)
    with pytest.raises(TrainingError, match=r"0 of .* parameters have optimizer state"):
        _gone_on_with(calm, gpt2, tmp_path, _shards(calm))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(OutputFolderError, match=r"Cannot resume from .*FileNotFoundError.*optimizer\.pt"),
        opened(tmp_path),
    ):
        pass


def test_a_schedule_fits_other_groups_where_all_have_the_same(tmp_path: Path) -> None:
    def schedule(*rates: float) -> Any:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
        return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), lambda step: 1 / (step + 1))

    before, now = schedule(0.5, 0.5), schedule(0.1)
    before.optimizer.step()
    before.step()
    torch.save(before.state_dict(), tmp_path / "scheduler.pt")
    _load_schedule(now, tmp_path / "scheduler.pt")
    assert (now.last_epoch, now.base_lrs, now.get_last_lr()) == (1, [0.5], [0.25])
    torch.save(schedule(0.5, 0.1).state_dict(), tmp_path / "scheduler.pt")
    with pytest.raises(TrainingError, match=r"base_lrs \[0.5, 0.1\]"):
        _load_schedule(now, tmp_path / "scheduler.pt")
