"""What a drop-in trainer promises beside its plan: TRL's own class, TRL's own refusals, and nothing left behind; model
objects are rehearsed by their own structure, and stay as they are."""

import contextlib
import copy
import functools
import inspect
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, set_seed

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.drop_in import call_plan as planning
from autotrain_mem.drop_in import launched
from autotrain_mem.drop_in.call_digest import digest_of, identity_of
from autotrain_mem.drop_in.config_merge import default_config
from autotrain_mem.methods.configs import with_knobs
from autotrain_mem.parallel.launch_environment import launch_environment
from autotrain_mem.support.errors import DoesNotFitError, UnsupportedModelError
from autotrain_mem.support.store import FOLDER_VARIABLE
from autotrain_mem.trainers.script_call import Call
from autotrain_mem.types import Hardware, Owner, Topology
from autotrain_mem.worker.pool import Workers
from tests.drop_in.conftest import QUIET, SETTLED, config, pairs, prompts, shortness, texts
from tests.forked import Forge

pytestmark = pytest.mark.slow

NAMES = ("SFTTrainer", "RewardTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer", "DistillationTrainer")


def sft(folder: Path, **more: Any) -> Any:
    return config(trl.SFTConfig, folder, **{"max_length": 64, "max_steps": 2, "logging_steps": 1} | more)


def planned(model: Any, folder: Path, autofit: AutoFit = QUIET, kind: type | None = None, **settings: Any) -> Any:
    """With a model object, or one that is given by its name."""
    given = str(model) if isinstance(model, Path) else model
    kind, args = kind or autotrain_mem.SFTTrainer, sft(folder, **settings)
    return kind(given, args=args, train_dataset=texts(), autofit=autofit)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_subclass_with_the_same_constructor(name: str) -> None:
    ours, trls = getattr(autotrain_mem, name), getattr(trl, name)
    assert issubclass(ours, trls)
    assert ours.__name__ == name
    assert list(inspect.signature(ours).parameters) == [*inspect.signature(trls).parameters, "autofit"]
    assert [*inspect.signature(Weighted).parameters] == ["args", "weight", "kwargs"], "of the user's own class its own"
    assert "autofit" in inspect.signature(Broken).parameters


@pytest.mark.usefixtures("workers")
def test_it_trains_as_trls_does_with_the_plans_settings_and_leaves_nothing_behind(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Forge
) -> None:
    def traces() -> list[Any]:
        owners = (trl.SFTTrainer, PreTrainedModel, AutoConfig)
        patched = [(name, value) for owner in owners for name, value in vars(owner).items()]
        return [patched, forge.alive(), dict(os.environ), [*sys.path], _get_current_dispatch_mode()]

    def losses(trainer: Any) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    before, scratch = traces(), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    ours = planned(qwen, tmp_path, seed=7, learning_rate=1e-3)
    of_ours = losses(ours)
    assert traces() == before
    assert not list(scratch.glob("autofit-*"))
    assert "_autofit_call" not in vars(ours)
    assert ours.plan.knobs.gradient_checkpointing is False  # a plan that is not TRL's defaults
    args = sft(tmp_path, seed=7, learning_rate=1e-3, gradient_checkpointing=False)
    assert of_ours == losses(trl.SFTTrainer(str(qwen), args=args, train_dataset=texts()))


def test_an_adapter_follows_from_the_seed(qwen: Path, tmp_path: Path) -> None:
    def adapter(kind: type, **ours: Any) -> list[torch.Tensor]:
        lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        args = sft(tmp_path, seed=7, **SETTLED)
        trainer = kind(str(qwen), args=args, train_dataset=texts(), peft_config=lora, **ours)
        return [weight.detach() for name, weight in trainer.model.named_parameters() if "lora_A" in name]

    torch.seed()  # as a new process begins
    drawn = adapter(autotrain_mem.SFTTrainer, autofit=QUIET)
    set_seed(7)
    assert drawn
    assert all(torch.equal(*pair) for pair in zip(drawn, adapter(trl.SFTTrainer), strict=True))


def refusal(kind: type, **kwargs: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        kind(**kwargs)
    met, error = set(), caught.value
    while error is not None:  # causes that go round in a circle keep some readers of tracebacks for ever
        assert id(error) not in met
        met.add(id(error))
        error = error.__cause__ or error.__context__
    return str(caught.value)


def test_a_call_that_trl_refuses_is_refused_in_its_words_or_has_its_folder(qwen: Path, tmp_path: Path) -> None:
    assert default_config(Path, {"model": "Qwen/Qwen2.5-0.5B"}, "SFT") == Path("Qwen2.5-0.5B-SFT")
    grpo = config(trl.GRPOConfig, tmp_path, num_generations=4, reward_weights=[1.0, 2.0])  # refused as it is built
    for name, words in (
        ("SFTTrainer", {"args": sft(tmp_path), "train_dataset": texts(), "tokenizer": None}),
        ("SFTTrainer", {"args": sft(tmp_path)}),
        ("GRPOTrainer", {"args": grpo, "train_dataset": prompts(), "reward_funcs": [shortness]}),
    ):
        call, ours = {"model": str(qwen), **words}, getattr(autotrain_mem, name)
        assert refusal(ours, **call, autofit=QUIET) == refusal(getattr(trl, name), **call)


def test_a_plan_follows_pin_and_tune_and_can_be_used_again(qwen: Path, tmp_path: Path) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    words = {"pin": ["gradient_checkpointing"], "tune": ["max_length", *sizes]}
    made = planned(qwen, tmp_path, replace(QUIET, **words), optim="adamw_torch", **sizes).plan
    assert made.knobs.gradient_checkpointing is True
    assert made.knobs.max_length == made.data.longest
    assert made.knobs.effective_batch_size == 6
    made.save(tmp_path / "plan.json")
    again = replace(QUIET, plan=tmp_path / "plan.json", **words)
    assert planned(qwen, tmp_path, again, optim="adamw_torch", **sizes).plan.knobs == made.knobs


class Weighted(autotrain_mem.SFTTrainer):
    def __init__(self, *args: Any, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = weight

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        target = torch.zeros(2**20, device=inputs["input_ids"].device)  # as a million tokens of a distillation target
        loss = super().compute_loss(model, inputs, return_outputs=False, **more)
        return self.weight * loss + target.sum()


class Broken(autotrain_mem.SFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("labels_of_mine")


def test_a_subclass_is_rehearsed_with_its_loss_and_fails_with_its_error(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = planned(qwen, tmp_path, **SETTLED)
    own = planned(qwen, tmp_path, kind=Weighted, **SETTLED)
    more = own.plan.estimate.memory.peak_allocated_bytes - plain.plan.estimate.memory.peak_allocated_bytes
    assert more > 2**21 or own.plan.knobs != plain.plan.knobs
    own.train()
    assert own.weight == 1.0
    older = [tmp_path / f"autofit-rehearsal-{number}.log" for number in range(5)]
    for age, each in enumerate(older):
        each.touch()
        os.utime(each, (0, 100 - age))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyError, match="labels_of_mine") as caught:
        planned(qwen, tmp_path, kind=Broken)
    assert [each.exists() for each in older] == [True] * 4 + [False]
    line, place = caught.value.__notes__
    assert "Broken.compute_loss (test_promises.py:" in line
    log = Path(place.removeprefix("The rehearsal's traceback is in ").removesuffix("."))
    assert "in compute_loss" in log.read_text()
    assert "direct cause" not in "".join(traceback.format_exception(caught.value)), "one traceback"


def test_an_optimizer_object_is_rehearsed_as_it_is(qwen: Path, tmp_path: Path) -> None:
    model = loaded(qwen)
    optimizers = (torch.optim.SGD(model.parameters(), lr=1e-4), None)
    args = sft(tmp_path, gradient_checkpointing=False)
    call = {"args": args, "train_dataset": texts(), "compute_metrics": lambda predictions: {}}
    trainer = autotrain_mem.SFTTrainer(model, **call, optimizers=optimizers, autofit=QUIET)
    trainer.train()
    memory = trainer.plan.estimate.memory
    assert not [size for owner, size in memory.owners_at_peak.items() if owner.value == "optimizer_state" and size]
    assert "compute_metrics" in " ".join(memory.not_counted)  # what a rehearsal leaves out is told


SCRIPT = """
    import trl
    from datasets import Dataset
    from autotrain_mem import AutoFit, SFTTrainer

    LOUDNESS = 2.0

    class Louder(SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **more):
            return LOUDNESS * super().compute_loss(model, inputs, return_outputs=False, **more)

    rows = Dataset.from_dict({{"question": ["how many words " * n for n in range(1, 9)]}})
    args = trl.SFTConfig(
        {out!r}, use_cpu=True, report_to="none", max_length=64, max_steps=1, gradient_checkpointing=False,
        optim="adamw_torch", per_device_train_batch_size=2,
    )
    trainer = Louder(
        {model!r}, args=args, train_dataset=rows, formatting_func=lambda row: row["question"],
        autofit=AutoFit(gpu="80MiB"),
    )
    trainer.train()
    longest = len(trainer.processing_class(rows[-1]["question"])["input_ids"]) + 1  # TRL ends each row
    print("steps", trainer.state.global_step, trainer.plan.data.longest - longest)
"""


def test_a_script_with_classes_and_functions_of_its_own(qwen: Path, tmp_path: Path, forge: Forge) -> None:
    """As from a notebook: what is defined in ``__main__``, here without a guard, can be imported by nobody else."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(model=str(qwen), out=str(tmp_path / "out")))
    with forge.commands(sys.modules[__name__]):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "steps 1 0"
    assert "fits 80MiB" in done.stderr


def digest(trainer: type = autotrain_mem.SFTTrainer, **keywords: Any) -> str:
    words = {"model": "NAME", **keywords}
    return digest_of(Call(trainer=trainer, args=(), kwargs=words, keywords=words))


def lora(**more: Any) -> Any:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **more})


class Scorer(torch.nn.Module):
    pass


def test_equal_calls_have_equal_digests_others_another_and_code_of_the_users_own_none(tmp_path: Path) -> None:
    assert digest(peft_config=lora()) == digest(peft_config=lora())
    known = [
        digest(),
        digest(peft_config=lora()),
        digest(peft_config=lora(r=8)),
        digest(quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
        digest(quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        digest(reward_funcs=[shortness]),
        digest(reward_funcs=[shortness, shortness]),
        digest(reward_funcs="NAME"),
    ]
    assert "" not in known
    assert len(set(known)) == len(known)
    own = ({"compute_loss_func": shortness}, {"data_collator": shortness}, {"reward_funcs": [Scorer()]})
    assert {digest(Weighted), *(digest(**keywords) for keywords in own)} == {""}
    # a quantization in the loading arguments is the script's, and none is added
    for given in ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, None):
        words = {"model": "NAME", "args": sft(tmp_path, model_init_kwargs=given), "peft_config": lora()}
        added = with_knobs(words, "sft", {"load_in_4bit": True}).get("quantization_config")
        assert added is None if given else added.load_in_4bit


def test_a_call_is_identified_with_its_rows_tokenizer_and_model_object(qwen: Path) -> None:
    def identity(**words: Any) -> str:
        words = {"model": loaded(qwen), "processing_class": AutoTokenizer.from_pretrained(qwen), **words}
        return identity_of(Call(trainer=autotrain_mem.SFTTrainer, args=(), kwargs=words, keywords=words))

    def changed(kind: Any, name: str, value: Any) -> Any:
        made = kind.from_pretrained(qwen)
        setattr(made, name, value)
        return made

    frozen = loaded(qwen)
    next(frozen.parameters()).requires_grad_(False)
    known = [
        identity(train_dataset=texts(3)),
        identity(train_dataset=texts(4)),
        identity(train_dataset=texts(3), model=frozen),
        identity(train_dataset=texts(3), model=str(qwen)),
        identity(train_dataset=texts(3), processing_class=changed(AutoTokenizer, "chat_template", "of mine")),
    ]
    assert identity(train_dataset=texts(3)) == known[0]
    gelu = {"model": loaded(qwen)}  # Gemma's activation
    gelu["model"].act = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    known.append(identity(train_dataset=texts(3), **gelu))
    assert "" not in known
    assert len(set(known)) == len(known)
    hooked = loaded(qwen)
    hooked.lm_head.register_forward_hook(shortness)
    own = ({"model": hooked}, {"model": changed(AutoModelForCausalLM, "forward", shortness)}, {"model": Scorer()})
    own += ({"formatting_func": shortness}, {"train_dataset": texts().to_iterable_dataset()})
    assert {identity(**{"train_dataset": texts(3), **words}) for words in own} == {""}


def test_the_same_call_again_starts_no_worker(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    for file in qwen.iterdir():
        os.utime(file, (0, 0))  # nothing is kept of files that may still change
    first = settled(loaded(qwen), tmp_path).plan
    with Workers(1) as fresh:
        monkeypatch.setattr(planning, "Workers", lambda: contextlib.nullcontext(fresh))
        monkeypatch.setattr(fresh, "start", lambda: pytest.fail("a worker was started"))
        again = settled(loaded(qwen), tmp_path).plan
    assert (again.knobs, again.estimate.memory) == (first.knobs, first.estimate.memory)


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "float32", **options})


settled = functools.partial(planned, **SETTLED)


def state(model: Any) -> dict[str, Any]:
    """All by which one could tell that a model was touched."""
    tensors = {name: (id(each), each.requires_grad, each._version) for name, each in model.named_parameters()}
    modules = {name: (id(each), each.training, sorted(vars(each))) for name, each in model.named_modules()}
    return {"tensors": tensors, "modules": modules, "config": copy.deepcopy(model.config.to_dict())}


def test_planning_leaves_the_object_alone_and_the_generators_as_the_seed_sets_them(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(qwen)
    values = {name: each.clone() for name, each in model.state_dict().items()}
    before = state(model)
    seen: list[Any] = []

    @functools.wraps(trl.SFTTrainer.__init__)
    def construct(self: Any, **keywords: Any) -> None:
        seen.append(keywords)

    monkeypatch.setattr(trl.SFTTrainer, "__init__", construct)
    monkeypatch.setattr("autotrain_mem.drop_in.trainers.finished", lambda trainer, knobs: trainer)
    trainer = settled(model, tmp_path)
    assert trainer.plan is not None
    assert seen[0]["model"] is model
    assert state(model) == before
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), torch.Generator().manual_seed(42).get_state())


def test_resized_embeddings_and_a_module_of_the_scripts_own_are_rehearsed(qwen: Path, tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.up, self.down = inner, torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden) + self.down(self.up(hidden))

    model = loaded(qwen)
    model.resize_token_embeddings(model.get_input_embeddings().weight.shape[0] + 4096)
    model.model.layers[0].mlp = Wide(model.model.layers[0].mlp)
    roomy = replace(QUIET, gpu="400MiB")  # the smaller card has room for an adapter only
    wide = settled(model, tmp_path, roomy).plan.estimate.memory
    plain = settled(loaded(qwen), tmp_path, roomy).plan.estimate.memory
    (weights,) = [owner for owner in wide.owners_at_peak if owner.value == "weights"]
    more_bytes = 4 * (4096 * 64 + 2 * 64 * 8192 + 8192 + 64)
    assert more_bytes <= wide.owners_at_peak[weights] - plain.owners_at_peak[weights] < 1.01 * more_bytes
    assert wide.peak_allocated_bytes > plain.peak_allocated_bytes + more_bytes


def test_an_adapter_is_kept_and_only_it_is_trained(qwen: Path, tmp_path: Path) -> None:
    trainer = settled(get_peft_model(loaded(qwen), lora(task_type="CAUSAL_LM")), tmp_path)
    assert trainer.plan.knobs.use_peft
    assert "use_peft" not in [lever.name for lever in trainer.plan.levers]
    trainer.train()


def test_only_a_model_object_that_does_not_fit_is_better_given_by_its_name(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, is_object in ((loaded(qwen), True), (qwen, False)):
        refusal = DoesNotFitError("It does not fit.", hint="--use_peft")
        monkeypatch.setattr(planning.api, "plan", Mock(side_effect=refusal))
        with pytest.raises(DoesNotFitError):
            planned(model, tmp_path)
        assert refusal.hint.startswith('--use_peft\nmodel="NAME"' if is_object else "--use_peft")
        assert is_object == (planning._BY_NAME in refusal.hint)


def test_a_model_that_cannot_be_trained_is_refused_with_the_cure(qwen: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        without_bytes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen))
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    quantized = loaded(qwen, quantization_config=options)
    frozen = loaded(qwen).requires_grad_(False)
    for model, cure in ((frozen, "peft_config"), (without_bytes, "meta"), (quantized, "quantized")):
        with pytest.raises(UnsupportedModelError, match=cure):
            settled(model, tmp_path)
    call = {"args": sft(tmp_path, **SETTLED), "train_dataset": texts(), "peft_config": lora(task_type="CAUSAL_LM")}
    assert autotrain_mem.SFTTrainer(quantized, **call, autofit=QUIET).plan.knobs.use_peft


def test_a_dpo_reference_object_is_rehearsed_too(qwen: Path, tmp_path: Path) -> None:
    args = config(trl.DPOConfig, tmp_path, max_length=64, **SETTLED)
    given = autotrain_mem.DPOTrainer(
        loaded(qwen), ref_model=loaded(qwen), args=args, train_dataset=pairs(), autofit=QUIET
    )
    named = autotrain_mem.DPOTrainer(str(qwen), args=args, train_dataset=pairs(), autofit=QUIET)
    assert given.plan.estimate.required_bytes == named.plan.estimate.required_bytes


def test_an_object_needs_what_its_name_needs_and_processes_hold_a_copy_of_gradients_or_a_part_of_all(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, given = (settled(model, tmp_path).plan for model in (qwen, loaded(qwen)))
    assert (given.knobs, given.estimate.required_bytes) == (named.knobs, named.estimate.required_bytes)

    def smallest(find: Callable[[], Hardware], link: str | None) -> Hardware:
        return replace(find(), topology=Topology(devices=2))

    alone_of_two = {"processes": lambda: 2, "smallest": smallest, "agreed": lambda make: make()}
    for name, function in {**alone_of_two, "is_first": lambda: True}.items():
        for module in (launched, planning):
            monkeypatch.setattr(module, name, function, raising=False)
    together = settled(qwen, tmp_path).plan
    trained_bytes = sum(each.nbytes for each in loaded(qwen).parameters())
    peaks = [plan.estimate.memory.peak_allocated_bytes for plan in (together, named)]
    assert 0.99 * trained_bytes <= peaks[0] - peaks[1] < 1.1 * trained_bytes  # the moment of the peak is another
    assert together.knobs.sharding == "ddp"
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    for variable, value in launch_environment({"distributed_type": "FSDP", "fsdp_config": fsdp}).items():
        monkeypatch.setenv(variable, value)
    sharded = settled(loaded(qwen), tmp_path).plan
    assert (sharded.knobs.processes, sharded.knobs.sharding) == (2, "fsdp2")
    optimizers = [plan.estimate.memory.owners_at_peak[Owner.OPTIMIZER_STATE] for plan in (sharded, named)]
    assert optimizers[0] < 0.6 * optimizers[1]
