"""Model objects are rehearsed by their own structure, and stay as they are."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.drop_in import ranks
from autotrain_mem.errors import UnsupportedModelError
from tests.drop_in.conftest import pairs, texts

pytestmark = pytest.mark.slow

QUIET = AutoFit(gpu="80MiB", show=False)


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "float32", **options})


def sft(model: Any, folder: Path, autofit: AutoFit = QUIET, **more: Any) -> Any:
    from trl import SFTConfig

    settings = {"max_length": 64, "max_steps": 1, "report_to": "none"} | more.pop("config", {})
    args = SFTConfig(str(folder / "out"), use_cpu=True, **settings)
    return autotrain_mem.SFTTrainer(model, args=args, train_dataset=texts(), autofit=autofit, **more)


def state(model: Any) -> dict[str, Any]:
    """All by which one could tell that a model was touched."""
    tensors = {name: (id(each), each.requires_grad, each._version) for name, each in model.named_parameters()}
    modules = {name: (id(each), each.training, sorted(vars(each))) for name, each in model.named_modules()}
    return {"tensors": tensors, "modules": modules, "config": copy.deepcopy(model.config.to_dict())}


def test_planning_leaves_the_object_and_the_generators_alone(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl

    model = loaded(tiny_qwen)
    values = {name: each.clone() for name, each in model.state_dict().items()}
    before, generator = state(model), torch.random.get_rng_state()
    seen: list[Any] = []

    @functools.wraps(trl.SFTTrainer.__init__)
    def construct(self: Any, **keywords: Any) -> None:
        seen.append(keywords)

    monkeypatch.setattr(trl.SFTTrainer, "__init__", construct)
    monkeypatch.setattr("autotrain_mem.drop_in.build.finished", lambda trainer, knobs: trainer)
    trainer = sft(model, tmp_path)
    assert trainer.plan is not None
    assert seen[0]["model"] is model
    assert state(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_an_object_needs_what_its_name_needs(tiny_qwen: Path, tmp_path: Path) -> None:
    named = sft(str(tiny_qwen), tmp_path).plan
    given = sft(loaded(tiny_qwen), tmp_path).plan
    assert given.knobs == named.knobs
    assert given.estimate.required_bytes == named.estimate.required_bytes


def test_resized_embeddings_are_in_the_plan(tiny_qwen: Path, tmp_path: Path) -> None:
    model = loaded(tiny_qwen)
    rows, width = model.get_input_embeddings().weight.shape
    model.resize_token_embeddings(rows + 4096)
    wide = sft(model, tmp_path).plan.estimate.memory.owners_at_peak
    plain = sft(loaded(tiny_qwen), tmp_path).plan.estimate.memory.owners_at_peak
    (weights,) = [owner for owner in wide if owner.value == "weights"]
    assert wide[weights] - plain[weights] == 4096 * width * 4


def test_a_module_of_the_scripts_own_is_rehearsed(tiny_qwen: Path, tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        """A feed-forward layer with a detour of a million parameters."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.up, self.down = inner, torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden) + self.down(self.up(hidden))

    model = loaded(tiny_qwen)
    model.model.layers[0].mlp = Wide(model.model.layers[0].mlp)
    wide = sft(model, tmp_path).plan.estimate.memory
    plain = sft(loaded(tiny_qwen), tmp_path).plan.estimate.memory
    assert wide.peak_allocated_bytes > plain.peak_allocated_bytes + 2 * 64 * 8192 * 4


def test_an_adapter_is_kept_and_only_it_is_trained(tiny_qwen: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(loaded(tiny_qwen), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = sft(model, tmp_path)
    assert trainer.plan.knobs.use_peft
    assert "use_peft" not in [lever.name for lever in trainer.plan.levers]
    trainer.train()


def test_what_a_reload_would_allow_is_shown_and_not_done(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = sft(loaded(tiny_qwen), tmp_path, AutoFit(gpu="26MiB", show=False, forbid=frozenset({"max_length"})))
    assert trainer.plan.knobs.dtype == "float32"
    assert {parameter.dtype for parameter in trainer.model.parameters()} >= {torch.float32}
    reloading = [other for other in trainer.plan.alternatives if "by its name" in other.level]
    assert [other.knobs.dtype for other in reloading] == ["bfloat16"]
    assert all(other.fits for other in reloading)


def test_a_model_that_cannot_be_trained_is_refused_with_the_cure(tiny_qwen: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        without_bytes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_qwen))
    for model, cure in ((loaded(tiny_qwen).requires_grad_(False), "peft_config"), (without_bytes, "meta")):
        with pytest.raises(UnsupportedModelError, match=cure):
            sft(model, tmp_path)


def test_a_quantized_model_is_planned_with_an_adapter(tiny_qwen: Path, tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = loaded(tiny_qwen, quantization_config=quantized)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = sft(model, tmp_path, peft_config=lora)
    assert trainer.plan.knobs.use_peft
    with pytest.raises(UnsupportedModelError, match="quantized"):
        sft(loaded(tiny_qwen, quantization_config=quantized), tmp_path)


def test_a_dpo_reference_object_is_rehearsed_too(tiny_qwen: Path, tmp_path: Path) -> None:
    from trl import DPOConfig

    args = DPOConfig(str(tmp_path / "out"), use_cpu=True, report_to="none", max_steps=1, max_length=64)
    given = autotrain_mem.DPOTrainer(
        loaded(tiny_qwen), ref_model=loaded(tiny_qwen), args=args, train_dataset=pairs(), autofit=QUIET
    )
    named = autotrain_mem.DPOTrainer(str(tiny_qwen), args=args, train_dataset=pairs(), autofit=QUIET)
    assert given.plan.estimate.required_bytes == named.plan.estimate.required_bytes


def test_several_processes_hold_what_is_trained_once_more(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = sft(str(tiny_qwen), tmp_path).plan.estimate.memory
    alone_of_two = {"processes": lambda: 2, "smallest": lambda find: find(), "agreed": lambda make: make()}
    for name, function in {**alone_of_two, "is_first": lambda: True}.items():
        monkeypatch.setattr(ranks, name, function)
    together = sft(str(tiny_qwen), tmp_path).plan
    trained_bytes = sum(each.nbytes for each in loaded(tiny_qwen).parameters())
    assert together.estimate.memory.peak_allocated_bytes - alone.peak_allocated_bytes >= trained_bytes
    assert together.estimate.memory.peak_allocated_bytes - alone.peak_allocated_bytes < 1.1 * trained_bytes
    assert "2 processes" in "".join(together.warnings)
