"""What a drop-in trainer promises beside its plan: TRL's own class, TRL's own refusals, and nothing left behind."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import trl

import autotrain_mem
from autotrain_mem import AutoFit
from tests.drop_in.conftest import prompts, shortness, texts

pytestmark = pytest.mark.slow

NAMES = ("SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
QUIET = AutoFit(gpu="80MiB", show=False)


def config(folder: Path, **more: Any) -> Any:
    settings = {"max_length": 64, "max_steps": 2, "report_to": "none", "logging_steps": 1}
    return trl.SFTConfig(str(folder / "out"), use_cpu=True, **settings | more)


def test_a_class_of_the_users_own_shows_its_own_constructor() -> None:
    assert [*inspect.signature(Weighted).parameters] == ["args", "weight", "kwargs"]
    assert "autofit" in inspect.signature(Broken).parameters


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_subclass_with_the_same_constructor(name: str) -> None:
    ours, trls = getattr(autotrain_mem, name), getattr(trl, name)
    assert issubclass(ours, trls)
    assert ours.__name__ == name
    assert list(inspect.signature(ours).parameters) == [*inspect.signature(trls).parameters, "autofit"]


def test_it_leaves_nothing_behind(tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from transformers import AutoConfig, PreTrainedModel

    def patched() -> list[Any]:
        owners = (trl.SFTTrainer, PreTrainedModel, AutoConfig)
        return [(name, value) for owner in owners for name, value in vars(owner).items()]

    environment, classes, path = dict(os.environ), patched(), list(sys.path)
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    trainer = autotrain_mem.SFTTrainer(str(tiny_qwen), args=config(tmp_path), train_dataset=texts(), autofit=QUIET)
    trainer.train()
    assert dict(os.environ) == environment
    assert patched() == classes
    assert sys.path == path
    assert _get_current_dispatch_mode() is None
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children
    assert not list(scratch.glob("autofit-*"))
    assert "_autofit_call" not in vars(trainer)


def test_the_same_training_as_trls_with_the_plans_settings(tiny_qwen: Path, tmp_path: Path) -> None:
    def losses(trainer: Any) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    words = {"seed": 7, "learning_rate": 1e-3}
    ours = autotrain_mem.SFTTrainer(
        str(tiny_qwen), args=config(tmp_path, **words), train_dataset=texts(), autofit=QUIET
    )
    knobs = ours.plan.knobs
    assert knobs.gradient_checkpointing is False  # a plan that is not TRL's defaults
    settings = {"gradient_checkpointing": False} | words
    trls = trl.SFTTrainer(str(tiny_qwen), args=config(tmp_path, **settings), train_dataset=texts())
    assert losses(ours) == losses(trls)


def test_without_a_config_the_output_folder_is_named_as_trl_names_it() -> None:
    from autotrain_mem.drop_in.config_merge import default_config

    class Named:
        def __init__(self, output_dir: str) -> None:
            self.output_dir = output_dir

    assert default_config(Named, {"model": "Qwen/Qwen2.5-0.5B"}, "SFT").output_dir == "Qwen2.5-0.5B-SFT"


# -- what TRL refuses ----------------------------------------------------------------------------------------------


def refusal(kind: type, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(*args, **kwargs)
    met, error = set(), caught.value
    while error is not None:  # causes that go round in a circle keep some readers of tracebacks for ever
        assert id(error) not in met
        met.add(id(error))
        error = error.__cause__ or error.__context__
    return str(caught.value)


@pytest.mark.parametrize("keywords", [{"train_dataset": texts(), "tokenizer": None}, {}], ids=["unknown", "no rows"])
def test_a_call_that_trl_refuses_is_refused_in_its_words(keywords: Any, tiny_qwen: Path, tmp_path: Path) -> None:
    call = {"model": str(tiny_qwen), "args": config(tmp_path), **keywords}
    assert refusal(autotrain_mem.SFTTrainer, **call) == refusal(trl.SFTTrainer, **call)


def test_what_trl_refuses_as_it_builds_is_refused_in_its_words(tiny_qwen: Path, tmp_path: Path) -> None:
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, report_to="none", num_generations=4, reward_weights=[1.0, 2.0])
    call = {"model": str(tiny_qwen), "reward_funcs": [shortness], "args": args, "train_dataset": prompts()}
    said = refusal(autotrain_mem.GRPOTrainer, **call, autofit=QUIET)
    assert said == refusal(trl.GRPOTrainer, **call)


# -- pin and tune --------------------------------------------------------------------------------------------------


def planned(tiny_qwen: Path, tmp_path: Path, autofit: AutoFit, **settings: Any) -> Any:
    args = config(tmp_path, **settings)
    return autotrain_mem.SFTTrainer(str(tiny_qwen), args=args, train_dataset=texts(), autofit=autofit).plan


def test_a_default_may_be_changed_and_what_differs_is_kept(tiny_qwen: Path, tmp_path: Path) -> None:
    assert planned(tiny_qwen, tmp_path, QUIET).knobs.gradient_checkpointing is False
    given = planned(tiny_qwen, tmp_path, QUIET, per_device_train_batch_size=2)
    assert (given.knobs.per_device_train_batch_size, given.knobs.gradient_accumulation_steps) == (2, 1)


def test_pin_keeps_a_default_and_tune_gives_a_setting_free(tiny_qwen: Path, tmp_path: Path) -> None:
    pinned = AutoFit(gpu="80MiB", show=False, pin=["gradient_checkpointing"])
    assert planned(tiny_qwen, tmp_path, pinned).knobs.gradient_checkpointing is True
    tuned = AutoFit(gpu="80MiB", show=False, tune=["gradient_checkpointing", "max_length"])
    free = planned(tiny_qwen, tmp_path, tuned, gradient_checkpointing=True)
    assert free.knobs.gradient_checkpointing is False
    assert free.knobs.max_length == free.data.longest


def test_a_plan_can_be_followed(tiny_qwen: Path, tmp_path: Path) -> None:
    made = planned(tiny_qwen, tmp_path, QUIET)
    made.save(tmp_path / "plan.json")
    again = planned(tiny_qwen, tmp_path, AutoFit(gpu="80MiB", show=False, plan=tmp_path / "plan.json"))
    assert again.knobs == made.knobs


# -- the script's own ----------------------------------------------------------------------------------------------


class Weighted(autotrain_mem.SFTTrainer):
    """A trainer of the user's own, with an attribute that its loss reads."""

    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = weight

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        import torch

        # As much as a million tokens' worth of a distillation target.
        target = torch.zeros(2**20, device=inputs["input_ids"].device)
        loss = super().compute_loss(model, inputs, return_outputs=False, **more)
        return self.weight * loss + target.sum()


def test_a_subclass_is_rehearsed_with_its_own_loss(tiny_qwen: Path, tmp_path: Path) -> None:
    plain = planned(tiny_qwen, tmp_path, QUIET)
    own = Weighted(str(tiny_qwen), args=config(tmp_path), train_dataset=texts(), autofit=QUIET, weight=0.5)
    assert own.plan.estimate.memory.peak_allocated_bytes >= plain.estimate.memory.peak_allocated_bytes
    assert own.plan.knobs != plain.knobs or own.plan.estimate.memory != plain.estimate.memory
    own.train()
    assert own.weight == 0.5


class Broken(autotrain_mem.SFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("labels_of_mine")


def test_a_subclass_that_fails_is_told_by_its_own_error(tiny_qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="labels_of_mine") as caught:
        Broken(str(tiny_qwen), args=config(tmp_path), train_dataset=texts(), autofit=QUIET)
    assert any("Broken.compute_loss (test_promises.py:" in note for note in caught.value.__notes__)


SCRIPT = """
    import trl
    from datasets import Dataset
    from autotrain_mem import AutoFit, SFTTrainer

    LOUDNESS = 2.0

    class Louder(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **more):
            return LOUDNESS * super().compute_loss(model, inputs, return_outputs=False, **more)

    rows = Dataset.from_dict({{"question": ["how many words " * n for n in range(1, 9)]}})
    args = trl.SFTConfig({out!r}, use_cpu=True, report_to="none", max_length=64, max_steps=1)
    trainer = Louder(
        {model!r}, args=args, train_dataset=rows, formatting_func=lambda row: row["question"],
        autofit=AutoFit(gpu="80MiB"),
    )
    trainer.train()
    longest = len(trainer.processing_class(rows[-1]["question"])["input_ids"]) + 1  # TRL ends each row
    print("steps", trainer.state.global_step, trainer.plan.data.longest - longest)
"""


def test_a_script_with_classes_and_functions_of_its_own(tiny_qwen: Path, tmp_path: Path) -> None:
    """As from a notebook: what is defined in ``__main__`` can be imported by nobody else."""
    script = textwrap.dedent(SCRIPT).format(model=str(tiny_qwen), out=str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "steps 1 0"
    assert "fits 80MiB" in done.stderr
