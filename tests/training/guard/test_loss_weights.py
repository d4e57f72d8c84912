"""A model's own loss, which may be another mean than its trainer thinks: one gradient however rows are divided."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guarded import Faults, Told, as_built, blocks, fail_in_backward, fail_in_forward
from test_guard_gradients import SIZES, Outcome, assert_same, micro_steps
from tiny_trainers import rows, trainer

from autotrain_mem.training.guard.attach import attach_guard
from autotrain_mem.training.guard.loss_weights import why_not_exact
from autotrain_mem.types import LearnedLimits

Reduce = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the loss of each token and whether it counts, by row."""

OWN: dict[str, Reduce | None] = {
    "bart": None,  # its labels are not shifted by one
    "tokens": lambda losses, mask: losses.sum() / mask.sum(),
    "rows": lambda losses, mask: (losses.sum(1) / mask.sum(1).clamp(min=1)).sum() / mask.any(1).sum(),
    "neither": lambda losses, mask: losses.sum() / 9,
}


def takes_its_own_mean(model: Any, reduce: Reduce) -> None:
    """As code from the hub may: its forward accepts whatever it is given, and ignores most of it."""
    forward = model.forward

    def forward_with_loss(input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        outputs = forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        targets = labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none")
        outputs["loss"] = reduce(losses, targets != -100)
        return outputs

    model.forward = forward_with_loss


@functools.cache
def built(kind: str, model: Path, rows: int, number: int) -> Any:
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": number, "loss_type": "nll"}
    made = trainer("sft", model, model.parent / "trained", **SIZES | sizes)
    if reduce := OWN[kind]:
        takes_its_own_mean(made.model, reduce)
    return made


def steps(kind: str, folders: dict[str, Path], rows: int, number: int, disturb: Any = None, **options: Any) -> Outcome:
    """The same eight rows, in so many micro-batches."""
    with as_built(built(kind, folders["qwen" if OWN[kind] else kind], rows, number)) as made:
        if disturb:
            disturb(made)
        outcome = micro_steps(made, count=number, **options)
    for name in [name for name in outcome.gradients if name.endswith("k_proj.bias")]:
        del outcome.gradients[name]  # zero but for rounding: what is added to all keys leaves attention as it is
    return outcome


@pytest.fixture
def folders(qwen: Path, bart: Path, tmp_path: Path) -> dict[str, Path]:
    return {"qwen": qwen, "bart": bart, "out": tmp_path}


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_mean_of_the_models_own_gives_one_gradient_in_parts_and_in_other_micro_batches(
    kind: str, folders: dict[str, Path]
) -> None:
    whole = steps(kind, folders, 8, 1, guarded=False)
    split = steps(kind, folders, 8, 1, lambda made: fail_in_backward(made, at=[0, 1], layer=1))
    assert len(split.told.incidents) == 2
    divided = steps(kind, folders, 2, 4, lambda made: fail_in_forward(made, at=[0]))
    assert len(divided.told.incidents) == 1
    for other in (split, divided):
        for name in ("logged", "counted"):  # of several micro-batches there are several numbers
            setattr(other, name, getattr(whole, name))
        assert_same(other, whole)


@pytest.mark.parametrize("kind", ["neither", "bart"])
def test_a_loss_that_cannot_be_told_is_not_split_and_weighs_each_micro_batch_alike(
    kind: str, folders: dict[str, Path]
) -> None:
    whole = steps(kind, folders, 8, 1, guarded=False)
    repeated = steps(kind, folders, 8, 1, lambda made: fail_in_backward(made, at=[0], layer=1))
    assert repeated.told.remedies == ["repeated with activations offloaded to the host"]
    assert_same(repeated, whole)
    assert not repeated.told.notices
    added_up, meant = steps(kind, folders, 2, 4, guarded=False), steps(kind, folders, 2, 4)
    assert meant.loss == pytest.approx(added_up.loss / 4)
    assert ["testing did not show" in notice for notice in meant.told.notices] == [True]


def test_the_trial_says_which_mean_it_is_and_leaves_no_trace(gpt2: Path, folders: dict[str, Path]) -> None:
    """GPT-2 drops out, and heeds the count: with accumulation it is tried in the first micro-step."""
    outcomes = []
    for guarded in (False, True):
        made = trainer("sft", gpt2, folders["out"], loss_type="nll", **SIZES)
        made.model.transformer.drop.eval()  # a part that does not train stays one
        calls: list[int] = []
        made.model.register_forward_pre_hook(lambda module, _, calls=calls: calls.append(module.training))
        outcomes.append(micro_steps(made, guarded=guarded))
    assert calls == [False, False, True, True]
    assert_same(outcomes[1], outcomes[0])
    assert all(torch.equal(value, outcomes[0].gradients[name]) for name, value in outcomes[1].gradients.items())


def test_an_evaluation_in_parts_gives_the_loss_of_a_mean_of_the_models_own(qwen: Path, tmp_path: Path) -> None:
    """The trial takes six forward passes; where there is no room even for it, nothing is split yet."""
    losses, remedies = [], []
    for at in ([], [0, 7], [0, 1]):
        sizes = {"per_device_eval_batch_size": 4, "loss_type": "nll"}
        made, told = trainer("sft", qwen, tmp_path, eval_dataset=rows("sft"), **sizes), Told()
        takes_its_own_mean(made.model, lambda losses, mask: losses.sum() / mask.sum())
        attach_guard(made, learned=LearnedLimits(), on_incident=told)
        faults = Faults(at)
        blocks(made)[1].register_forward_pre_hook(lambda *_, faults=faults: faults())
        losses.append(made.evaluate()["eval_loss"])
        remedies.append([remedy.split(" rows")[0] for remedy in told.remedies])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    assert remedies == [[], ["split into 2 + 2", "split into 1 + 1"], ["repeated after the cache was emptied"]]


def fake(name: str, family: str, **attributes: Any) -> Any:
    kind = type(name, (), {"compute_loss": lambda *_: None, "_compute_loss": lambda *_: None})
    for method in (kind.compute_loss, kind._compute_loss):  # type: ignore[attr-defined]
        method.__module__ = f"trl.trainer.{family}_trainer"
    made = kind()
    vars(made).update({"model": SimpleNamespace(config=SimpleNamespace()), **attributes})
    return made


def test_each_loss_that_is_no_sum_over_rows_is_named() -> None:
    grpo = {"loss_type": "grpo", "top_entropy_quantile": 1.0}
    named = {
        "loss_type aot_unpaired compares": fake("DPOTrainer", "dpo", loss_types=["sigmoid", "aot_unpaired"]),
        "loss_type sft is a mean over tokens": fake("DPOTrainer", "dpo", loss_types=["sigmoid", "sft"]),
        "top_entropy_quantile": fake("GRPOTrainer", "grpo", **(grpo | {"top_entropy_quantile": 0.5})),
        "adaptive entropy bonus": fake("GRPOTrainer", "grpo", **grpo, use_adaptive_entropy=True),
        "entropy bonus is a mean over tokens": fake("GRPOTrainer", "grpo", **grpo, _entropy_bonus_enabled=True),
        "loss_type novel": fake("GRPOTrainer", "grpo", loss_type="novel"),
        "router's auxiliary loss": fake("SFTTrainer", "sft", aux_loss_enabled=True),
        "compute_loss_func is not TRL's": fake("SFTTrainer", "sft", compute_loss_func=lambda *_: None),
        "SFTTrainer.compute_loss is not TRL's": fake("SFTTrainer", "mine"),
        "KL divergence is estimated over the rows": fake("KTOTrainer", "kto", calculate_KL=True),
        "compare the desirable rows": fake("KTOTrainer", "kto", calculate_KL=False),
        "unknown how BCOTrainer combines rows": fake("BCOTrainer", "bco"),
    }
    for words, made in named.items():
        assert words in str(why_not_exact(made))


def test_a_mean_over_tokens_beside_a_mean_over_tokens_is_exact() -> None:
    made = fake("GRPOTrainer", "grpo", loss_type="bnpo", top_entropy_quantile=1.0, _entropy_bonus_enabled=True)
    assert why_not_exact(made) is None
    assert why_not_exact(fake("DPOTrainer", "dpo", loss_types=["sft"])) is None
