"""How much is done at once follows what went through, and what did not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotrain_mem.training.guard.batch_split import Layout, Piece, joined
from autotrain_mem.training.guard.context import Limit
from autotrain_mem.training.guard.loss_weights import why_not_exact


def test_half_of_what_failed_is_allowed_or_what_went_through_before_unless_that_fails_now() -> None:
    limit = Limit(None, grow_after=5)
    assert limit.parts(1000, units=8) == 1
    limit.failed(1001)
    assert limit.most == 501
    assert limit.parts(1001, units=8) == 2
    limit.fitted(480)
    limit.failed(500)
    assert limit.most == 480
    limit.failed(480)
    assert limit.most == 240
    assert [limit.parts(1000, units=units) for units in (1, 3)] == [1, 3], "no more parts than rows"
    limit.tighten(None)
    limit.tighten(300)
    assert limit.most == 240, "what a checkpoint knows only makes it stricter"
    limit.tighten(50)
    assert limit.most == 50


def piece(lengths: list[int], layout: Layout, **more: Any) -> Piece:
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    ids = torch.arange(len(lengths)).unsqueeze(1) * mask
    return Piece(inputs={"input_ids": ids, "attention_mask": mask, **more}, layout=layout)


def test_a_pair_stays_together_and_so_do_the_numbers_of_a_pair() -> None:
    whole = piece([2, 3, 4, 5, 6, 7], Layout.PAIRS, margin=torch.tensor([1.0, 2.0, 3.0]), temperature=torch.tensor(0.5))
    parts = whole.cut(2)
    assert whole.units == 3
    assert [part.inputs["input_ids"][:, 0].tolist() for part in parts] == [[0, 1, 3, 4], [2, 5]]
    assert [part.inputs["margin"].tolist() for part in parts] == [[1.0, 2.0], [3.0]]
    assert parts[1].inputs["temperature"] == 0.5


@pytest.mark.parametrize("more", [{"pixel_values": torch.zeros(2, 3)}, {"table": torch.zeros(5, 3)}])
def test_what_is_not_laid_out_by_rows_is_not_cut(more: dict[str, Any]) -> None:
    assert piece([2, 3], Layout.ROWS).units == 2
    assert piece([2, 3], Layout.ROWS, **more).units == 1
    with pytest.raises(TypeError, match="no rows"):
        joined([torch.tensor(1.0), torch.tensor(2.0)], Layout.ROWS)


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
        "compares the desirable rows": fake("KTOTrainer", "kto", calculate_KL=False),
        "BCOTrainer makes one loss": fake("BCOTrainer", "bco"),
    }
    for words, made in named.items():
        assert words in str(why_not_exact(made))


def test_a_mean_over_tokens_beside_a_mean_over_tokens_is_exact() -> None:
    made = fake("GRPOTrainer", "grpo", loss_type="bnpo", top_entropy_quantile=1.0, _entropy_bonus_enabled=True)
    assert why_not_exact(made) is None
    assert why_not_exact(fake("DPOTrainer", "dpo", loss_types=["sft"])) is None
