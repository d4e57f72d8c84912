"""A drop-in trainer that meets a full device goes on; one that meets none is as TRL's, between its runs and in them."""

import copy
import functools
import gc
import inspect
import logging
import pickle
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from transformers import TrainerCallback

import autotrain_mem
from autotrain_mem import AutoFit
from autotrain_mem.drop_in import trainers
from autotrain_mem.support import codec
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.guard.context import KEPT_AS
from autotrain_mem.training.process import longest_batch as first
from autotrain_mem.training.run_folder import lock_folder
from autotrain_mem.types import Job, LearnedLimits, Phase, Plan
from tests.drop_in.conftest import SETTLED, config, prompts, shortness, texts
from tests.nouns import TRL_DEFAULTS
from tests.report.report_examples import HOST, IMAGINED, PLAN

KNOBS = replace(TRL_DEFAULTS, max_length=64, learning_rate=None, **SETTLED)
EVERY = SETTLED | {"max_steps": 3, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
EVERY |= {"per_device_eval_batch_size": 4, "learning_rate": 1e-3}


def plan_for(method: str) -> Plan:
    job = Job(method=method, model="tiny", dataset=None, arguments={})
    return replace(PLAN, job=job, estimate=replace(PLAN.estimate, knobs=KNOBS, hardware=IMAGINED))


@pytest.fixture(autouse=True)
def _planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers, "make_plan", lambda asked: asked.autofit.plan or plan_for(asked.method))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many rows each was that ran before a first step."""
    seen = []
    run = first.run_longest_batch

    def counted(*args: Any) -> Any:
        batch = run(*args)
        seen.append(batch.rows)
        return batch

    monkeypatch.setattr(first, "run_longest_batch", counted)
    return seen


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers.autofit"), "warning", seen.append)
    return seen


def sft(model: Path, folder: Path, kind: type = autotrain_mem.SFTTrainer, **more: Any) -> Any:
    settings = {name: more.pop(name) for name in [*more] if name in trl.SFTConfig.__dataclass_fields__}
    args = config(trl.SFTConfig, folder, max_length=64, **EVERY | settings)
    return kind(str(model), args=args, train_dataset=texts(), eval_dataset=texts(8), **more)


def grpo(model: Path, folder: Path, kind: type = autotrain_mem.GRPOTrainer) -> Any:
    args = config(trl.GRPOConfig, folder, num_generations=4, max_completion_length=4, **EVERY)
    return kind(str(model), reward_funcs=[shortness], args=args, train_dataset=prompts())


MAKE = {"sft": sft, "grpo": grpo}
TRLS = {"sft": trl.SFTTrainer, "grpo": trl.GRPOTrainer}


def refuse(trainer: Any, *at: int, training: bool = True) -> None:
    """The second layer finds the device full at these of its training (or other) forward passes."""
    calls = {"count": -1}

    def hook(module: Any, args: Any) -> None:
        if torch.is_grad_enabled() is training:
            calls["count"] += 1
            if calls["count"] in at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nMore of it.")

    trainer.model.model.layers[1].register_forward_pre_hook(hook)


def trained(trainer: Any) -> Any:
    """At once: the order of rows is drawn from what the constructor seeds."""
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def of_trl(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    folder = tmp_path_factory.mktemp("trl")
    return functools.cache(lambda method: trained(MAKE[method](qwen, folder, TRLS[method])))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in trainer.model.parameters()])


@pytest.mark.parametrize("method", MAKE)
def test_a_run_that_meets_a_full_device_ends_as_trls_does(
    method: str, qwen: Path, tmp_path: Path, of_trl: Callable[[str], Any], warnings: list[str]
) -> None:
    trls = of_trl(method)
    ours = MAKE[method](qwen, tmp_path)
    refuse(ours, 1)
    ours.train()
    assert losses(ours) == pytest.approx(losses(trls), rel=2e-3, abs=1e-5)
    assert (weights(ours) - weights(trls)).abs().mean() < 1e-3
    (incident,) = ours.plan.experience.incidents
    assert (incident.step, incident.phase) == (1, Phase.FORWARD)
    assert incident.remedy.startswith("split into 2 + 2")
    assert len(warnings) == 1
    assert warnings[0].startswith("autofit: out of memory in forward after step 1: split into 2 + 2 ")
    assert warnings[0].endswith("(CUDA out of memory. Tried to allocate 1.00 GiB.)")
    assert ours.plan.experience.learned.train_tokens is not None
    assert ours.state.stateful_callbacks[KEPT_AS]["learned"] == codec.to_json(ours.plan.experience.learned)


def test_an_evaluation_without_a_training_goes_on_too(qwen: Path, tmp_path: Path) -> None:
    def hits(results: Any) -> dict[str, float]:
        guessed, labels = results.predictions[:, :-1], results.label_ids[:, 1:]
        return {"rows": len(labels), "hits": float((guessed == labels).sum()), "guesses": float(guessed.sum())}

    own = {
        "loss_type": "nll",
        "compute_metrics": hits,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    trls, ours = sft(qwen, tmp_path, trl.SFTTrainer, **own), sft(qwen, tmp_path, **own)
    refuse(ours, 0, training=False)
    found, expected = ours.evaluate(), trls.evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert [found[f"eval_{name}"] for name in ("rows", "hits", "guesses")] == [
        expected[f"eval_{name}"] for name in ("rows", "hits", "guesses")
    ]
    assert [incident.phase for incident in ours.plan.experience.incidents] == [Phase.EVALUATE]
    rows = texts(4).map(lambda row: {"input_ids": [1, 2, 3]})
    assert ours.predict(rows).metrics["test_guesses"] == trls.predict(rows).metrics["test_guesses"]


def test_a_training_keeps_the_long_rows_cache(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: callers.append(sys._getframe(1).f_code.co_name))
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "eval_accumulation_steps": 1}
    trainer = sft(qwen, tmp_path, max_steps=1, **evaluates)
    trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert "evaluation_loop" not in callers
    trainer.evaluate()
    assert "evaluation_loop" in callers, "without a training it is TRL's"


def test_what_a_plan_has_learned_holds_from_the_first_step_on(qwen: Path, tmp_path: Path) -> None:
    plan, callbacks = plan_for("sft"), list[list[Any]]()
    learned = replace(plan, experience=plan.experience.with_learned(LearnedLimits(train_tokens=100)))
    autofit, own = AutoFit(plan=learned), TrainerCallback()
    trainer = sft(qwen, tmp_path, autofit=autofit, max_steps=1, callbacks=[own])
    handler = trainer.callback_handler
    trainer.model.model.layers[1].register_forward_pre_hook(lambda *args: callbacks.append([*handler.callbacks]))
    trainer.train()
    assert len(callbacks) > 1, "in parts"
    *before, guard = callbacks[0]
    assert own in before
    assert (before, type(guard).__name__) == (handler.callbacks, "Guard"), "it stands behind those of the user's own"


def test_a_training_is_alone_in_its_folder_and_the_next_knows_what_it_learned(qwen: Path, tmp_path: Path) -> None:
    trainer = sft(qwen, tmp_path, save_strategy="steps", save_steps=2)
    refuse(trainer, 1)
    with lock_folder(trainer.args.output_dir), pytest.raises(OutputFolderError, match="Another run is under way"):
        trainer.train()
    trainer.train()
    learned = trainer.plan.experience.learned
    trainer.train()  # once more
    assert (trainer.plan.experience.learned, len(trainer.plan.experience.incidents)) == (learned, 1)
    other = sft(qwen, tmp_path, save_strategy="no", max_steps=4)
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 4


def test_a_shortage_that_cannot_be_met_is_raised_and_leaves_nothing(qwen: Path, tmp_path: Path) -> None:
    trainer = sft(qwen, tmp_path)
    before = held(trainer)
    refuse(trainer, *range(100))
    with pytest.raises(torch.OutOfMemoryError, match="a single row is too large"):
        trainer.train()
    assert trainer.optimizer is not None
    assert held(trainer) == before
    assert not hooks_of(trainer)


def held(trainer: Any) -> list[Any]:
    """Names of what a trainer and what it trains with hold, and its callbacks; no counts."""
    owners = [trainer, trainer.accelerator, trainer.model]
    functions = [{name for name, value in vars(owner).items() if inspect.isroutine(value)} for owner in owners]
    return [*functions, list(trainer.callback_handler.callbacks)]


def hooks_of(trainer: Any) -> list[Any]:
    return [hook for each in trainer.model.parameters() for hook in each._post_accumulate_grad_hooks or ()]


@pytest.mark.parametrize("method", MAKE)
def test_a_trainer_is_as_it_was_before_and_after_its_runs(
    method: str, qwen: Path, tmp_path: Path, batches: list[int], of_trl: Callable[[str], Any]
) -> None:
    trls = of_trl(method)
    ours = MAKE[method](qwen, tmp_path)
    before = held(ours)
    assert pickle.loads(pickle.dumps(ours.args)).to_dict() == ours.args.to_dict()
    assert pickle.loads(pickle.dumps(ours.plan)) == ours.plan
    ours.train()
    if method == "sft":  # TRL's GRPOTrainer is not copied
        assert torch.equal(weights(copy.deepcopy(ours)), weights(ours))
    assert batches == [4]
    assert losses(ours) == losses(trls)  # to the bit: the longest rows ran, and nobody noticed
    assert torch.equal(weights(ours), weights(trls))
    assert held(ours) == before
    assert not hooks_of(ours)
    assert vars(ours).keys() - vars(trls).keys() == {"plan", "_autofit_guarded"}
    assert not [name for name, value in vars(ours.optimizer).items() if "autotrain_mem" in repr(value)]
    optimizer, gone = weakref.ref(ours.optimizer), weakref.ref(ours)
    gc.disable()
    try:
        del ours
        assert gone() is None  # as TRL's: a script that drops it has the memory of its optimizer back
        assert optimizer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["guard=False", "cpu", "training_step", "prediction_step", "compute_loss replaced"])
def test_where_it_stands_back_a_run_is_plain(why: str, qwen: Path, tmp_path: Path, batches: list[int]) -> None:
    kind = autotrain_mem.SFTTrainer
    if (step := getattr(kind, why, None)) is not None:  # the user's own, which does no more than TRL's
        own = {why: lambda self, *args, **kwargs: step(self, *args, **kwargs), "__module__": __name__}
        own[why].__module__ = __name__
        kind = type("Own", (kind,), own)
    plan = plan_for("sft")
    if why == "cpu":
        plan = replace(plan, estimate=replace(plan.estimate, hardware=HOST))
    trainer = sft(qwen, tmp_path, kind, autofit=AutoFit(plan=plan, guard=why != "guard=False"), max_steps=1)
    if why == "compute_loss replaced":
        trainer.compute_loss = lambda *args, **kwargs: type(trainer).compute_loss(trainer, *args, **kwargs)
    refuse(trainer, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. .* GiB\.\nMore of it\.$"):
        trainer.train()
    assert trainer.plan.experience == plan.experience
    assert batches == []


def test_a_train_of_the_users_own_is_called_once(qwen: Path, tmp_path: Path) -> None:
    calls = []

    class OwnTrain(autotrain_mem.SFTTrainer):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(super().train(*args, **kwargs))
            return self.evaluate()

    trainer = sft(qwen, tmp_path, OwnTrain)
    refuse(trainer, 1)
    assert "eval_loss" in trainer.train()
    assert (len(calls), len(trainer.plan.experience.incidents)) == (1, 1)


def test_a_loss_of_the_users_own_is_never_split_and_called_as_often_as_by_trl(
    qwen: Path, tmp_path: Path, batches: list[int], of_trl: Callable[[str], Any]
) -> None:
    noted: list[float] = []

    class OwnLoss(autotrain_mem.SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            noted.append(self.state.global_step)
            return super().compute_loss(*args, **kwargs)

    assert losses(trained(sft(qwen, tmp_path, OwnLoss))) == losses(of_trl("sft"))
    assert (noted, batches) == ([0, 1, 2], [])  # it would note one more
    full = sft(qwen, tmp_path, OwnLoss)
    refuse(full, 1)
    assert losses(trained(full)) == losses(of_trl("sft"))
    (incident,) = full.plan.experience.incidents
    assert incident.remedy == "repeated with activations offloaded to the host"


@pytest.mark.parametrize("own", ["collator", "hook", "rows"])
def test_users_code_never_sees_the_longest_first(own: str, qwen: Path, tmp_path: Path, batches: list[int]) -> None:
    trainer = sft(qwen, tmp_path, max_steps=1)
    collate = trainer.data_collator
    if own == "collator":
        trainer.data_collator = lambda rows: collate(rows)
    elif own == "rows":
        trainer.train_dataset = trainer.train_dataset.with_transform(lambda rows: rows)
    else:
        trainer.model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    trainer.train()
    assert batches == []


def test_a_mistake_in_what_runs_first_does_not_end_a_training(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setattr(first, "run_longest_batch", lambda *args: SimpleNamespace().rows)
    assert trained(sft(qwen, tmp_path, max_steps=1)).state.global_step == 1
    assert warnings[0].startswith("autofit: the longest rows could not be run before the first step: AttributeError")
