"""Model objects are rehearsed by their own structure, and stay as they are."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.drop_in import call_plan as planning
from autotrain_mem.drop_in import launched
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.support.errors import DoesNotFitError, UnsupportedModelError
from autotrain_mem.trainers.script_call import Call, read
from autotrain_mem.types import Hardware, Job, Owner, Plan, Topology
from autotrain_mem.types.job import PythonCall
from tests.drop_in.conftest import QUIET, SETTLED, config, pairs, texts
from tests.report.report_examples import PLAN

pytestmark = pytest.mark.slow


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "float32", **options})


def sft(model: Any, folder: Path, autofit: AutoFit = QUIET, **more: Any) -> Any:
    args = config(trl.SFTConfig, folder, **more.pop("settings", {"max_length": 64, **SETTLED}))
    return autotrain_mem.SFTTrainer(model, args=args, train_dataset=texts(), autofit=autofit, **more)


def state(model: Any) -> dict[str, Any]:
    """All by which one could tell that a model was touched."""
    tensors = {name: (id(each), each.requires_grad, each._version) for name, each in model.named_parameters()}
    modules = {name: (id(each), each.training, sorted(vars(each))) for name, each in model.named_modules()}
    return {"tensors": tensors, "modules": modules, "config": copy.deepcopy(model.config.to_dict())}


def test_planning_leaves_the_object_alone_and_the_generators_as_the_seed_sets_them(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tiny_qwen)
    values = {name: each.clone() for name, each in model.state_dict().items()}
    before = state(model)
    seen: list[Any] = []

    @functools.wraps(trl.SFTTrainer.__init__)
    def construct(self: Any, **keywords: Any) -> None:
        seen.append(keywords)

    monkeypatch.setattr(trl.SFTTrainer, "__init__", construct)
    monkeypatch.setattr("autotrain_mem.drop_in.trainers.finished", lambda trainer, knobs: trainer)
    trainer = sft(model, tmp_path)
    assert trainer.plan is not None
    assert seen[0]["model"] is model
    assert state(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(42).get_state())


def test_resized_embeddings_and_a_module_of_the_scripts_own_are_rehearsed(tiny_qwen: Path, tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.up, self.down = inner, torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden) + self.down(self.up(hidden))

    model = loaded(tiny_qwen)
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 4096)
    model.model.layers[0].mlp = Wide(model.model.layers[0].mlp)
    roomy = replace(QUIET, gpu="400MiB")  # the smaller card has room for an adapter only
    wide = sft(model, tmp_path, roomy).plan.estimate.memory
    plain = sft(loaded(tiny_qwen), tmp_path, roomy).plan.estimate.memory
    (weights,) = [owner for owner in wide.owners_at_peak if owner.value == "weights"]
    more_bytes = 4 * (4096 * 64 + 2 * 64 * 8192 + 8192 + 64)
    assert more_bytes <= wide.owners_at_peak[weights] - plain.owners_at_peak[weights] < 1.01 * more_bytes
    assert wide.peak_allocated_bytes > plain.peak_allocated_bytes + more_bytes


LORA = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_an_adapter_is_kept_and_only_it_is_trained(tiny_qwen: Path, tmp_path: Path) -> None:
    trainer = sft(get_peft_model(loaded(tiny_qwen), copy.deepcopy(LORA)), tmp_path)
    assert trainer.plan.knobs.use_peft
    assert "use_peft" not in [lever.name for lever in trainer.plan.levers]
    trainer.train()


def test_what_a_reload_would_allow_is_shown_and_not_done(tiny_qwen: Path, tmp_path: Path) -> None:
    def plan_for(model: Any, *, refused: bool = False) -> tuple[Plan, list[Job]]:
        asked = list[Job]()

        def plan_job(job: Job) -> Plan:
            asked.append(job)
            if job.python_call is not None and job.python_call.holds_model:
                if refused:
                    raise DoesNotFitError("It does not fit.")
                return replace(PLAN, level="LoRA")
            return replace(PLAN, level="rounding", estimate=replace(estimate, knobs=half))

        call = Call(trainer=autotrain_mem.SFTTrainer, args=(), kwargs={}, keywords={"model": model})
        python_call = PythonCall(path="", holds_model=True, holds_rows=True, digest="of it")
        given = {"dtype": "float32", "seed": 7}
        job = Job(method="sft", model="tiny", dataset=None, arguments=given, python_call=python_call)
        return planning.with_reloaded(plan_job, job, call, tmp_path), asked

    estimate = PLAN.estimate
    half = replace(estimate.knobs, dtype="bfloat16")
    plan, (_, reloaded) = plan_for(loaded(tiny_qwen))
    assert (plan.level, plan.knobs) == ("LoRA", estimate.knobs)
    assert [(other.level, other.knobs) for other in plan.alternatives[len(PLAN.alternatives) :]] == [
        ("rounding, model given by its name", half)
    ]
    assert reloaded.arguments == {"seed": 7}
    assert reloaded.python_call is not None
    assert (reloaded.python_call.holds_model, reloaded.python_call.digest) == (False, "")
    assert read(reloaded).model == reloaded.model == str(tmp_path / "reloaded")
    said = r'given by its name, model="\S+", it would be loaded bfloat16 and fit \('
    with pytest.raises(DoesNotFitError, match=said):
        plan_for(loaded(tiny_qwen), refused=True)
    own = loaded(tiny_qwen)
    own.extra = type("Own", (torch.nn.Identity,), {"__module__": __name__})()
    with pytest.raises(DoesNotFitError) as caught:
        plan_for(own, refused=True)
    assert "by its name" not in str(caught.value), "which would load another model"


def test_a_model_that_cannot_be_trained_is_refused_with_the_cure(tiny_qwen: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        without_bytes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_qwen))
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    quantized = loaded(tiny_qwen, quantization_config=options)
    frozen = loaded(tiny_qwen).requires_grad_(False)
    for model, cure in ((frozen, "peft_config"), (without_bytes, "meta"), (quantized, "quantized")):
        with pytest.raises(UnsupportedModelError, match=cure):
            sft(model, tmp_path)
    assert sft(quantized, tmp_path, peft_config=copy.deepcopy(LORA)).plan.knobs.use_peft


def test_a_dpo_reference_object_is_rehearsed_too(tiny_qwen: Path, tmp_path: Path) -> None:
    args = config(trl.DPOConfig, tmp_path, max_length=64, **SETTLED)
    given = autotrain_mem.DPOTrainer(
        loaded(tiny_qwen), ref_model=loaded(tiny_qwen), args=args, train_dataset=pairs(), autofit=QUIET
    )
    named = autotrain_mem.DPOTrainer(str(tiny_qwen), args=args, train_dataset=pairs(), autofit=QUIET)
    assert given.plan.estimate.required_bytes == named.plan.estimate.required_bytes


def test_an_object_needs_what_its_name_needs_and_processes_hold_a_copy_of_gradients_or_a_part_of_all(
    tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, given = (sft(model, tmp_path).plan for model in (str(tiny_qwen), loaded(tiny_qwen)))
    assert (given.knobs, given.estimate.required_bytes) == (named.knobs, named.estimate.required_bytes)

    def smallest(find: Callable[[], Hardware], link: str | None) -> Hardware:
        return replace(find(), topology=Topology(devices=2))

    alone_of_two = {"processes": lambda: 2, "smallest": smallest, "agreed": lambda make: make()}
    for name, function in {**alone_of_two, "is_first": lambda: True}.items():
        for module in (launched, planning):
            monkeypatch.setattr(module, name, function, raising=False)
    together = sft(str(tiny_qwen), tmp_path).plan
    trained_bytes = sum(each.nbytes for each in loaded(tiny_qwen).parameters())
    peaks = [plan.estimate.memory.peak_allocated_bytes for plan in (together, named)]
    assert 0.99 * trained_bytes <= peaks[0] - peaks[1] < 1.1 * trained_bytes  # the moment of the peak is another
    assert together.knobs.sharding == "ddp"
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    for variable, value in launch_environment({"distributed_type": "FSDP", "fsdp_config": fsdp}).items():
        monkeypatch.setenv(variable, value)
    sharded = sft(loaded(tiny_qwen), tmp_path).plan
    assert (sharded.knobs.processes, sharded.knobs.sharding) == (2, "fsdp2")
    optimizers = [plan.estimate.memory.owners_at_peak[Owner.OPTIMIZER_STATE] for plan in (sharded, named)]
    assert optimizers[0] < 0.6 * optimizers[1]
