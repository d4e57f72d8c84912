"""TRL's fused head under the lens: what its Triton path allocates, with the values of its PyTorch path."""

import importlib.util
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from trace_reading import recorded_step

from autotrain_mem.rehearsal.cuda.triton_kernels import fused_head_stand_ins
from autotrain_mem.rehearsal.known_values import known_value
from autotrain_mem.types import Owner

HAS_FUSED_HEAD = importlib.util.find_spec("trl.kernels") is not None
needs_fused_head = pytest.mark.skipif(not HAS_FUSED_HEAD, reason="TRL 1.16 brought the fused head")

ROWS, TOKENS, PROMPT, HIDDEN, VOCABULARY = 2, 32, 20, 64, 320
SCORED = ROWS * (TOKENS - PROMPT)


def model_with_head(weights: torch.dtype) -> Any:
    from tiny import tiny_config
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = tiny_config("qwen2")
    config.vocab_size = VOCABULARY
    model = AutoModelForCausalLM.from_config(config, dtype=weights).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(10, 100, (ROWS, TOKENS))
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def trained(fake: bool, stand_ins: bool = True, weights: torch.dtype = torch.float32) -> tuple[list[int], Any, Any]:
    """Births of a forward and a backward pass, with the model's and the batch's, the outputs, and the model."""

    def step(model: Any, batch: Any) -> Any:
        outputs = model(**batch, fused_lm_head=True)
        outputs.loss.backward()
        return outputs

    rules = fused_head_stand_ins() if stand_ins else nullcontext()
    trace, outputs, model = recorded_step(lambda: model_with_head(weights), batch(), rules, step, fake=fake)
    return [block.size_bytes for block in trace.blocks if block.owner is not Owner.WEIGHTS], outputs, model


@needs_fused_head
@pytest.mark.newest
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_fake_tensors_allocate_what_real_ones_do_and_nothing_is_known_of_their_loss(weights: torch.dtype) -> None:
    """A kernel that does nothing leaves zeros, which a trainer would decide by."""
    births, outputs, model = trained(fake=True, weights=weights)
    assert births == trained(fake=False, weights=weights)[0]
    assert known_value(outputs.loss) is None
    assert all(known_value(parameter.grad) is None for parameter in model.parameters())


@needs_fused_head
@pytest.mark.newest
def test_values_and_gradients_are_those_of_trls_own_path() -> None:
    """float32 throughout; sums run over other rows, so the last digits differ."""
    _, mine, model = trained(fake=False)
    _, theirs, reference = trained(fake=False, stand_ins=False)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


@needs_fused_head
@pytest.mark.newest
def test_only_tokens_with_a_label_are_scored_and_a_tile_is_folded_without_copies() -> None:
    """TRL's PyTorch path holds the tile in float32 several times over, and half precision weights in float32."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    births, tile = trained(fake=True)[0], _CHUNKED_LOGPROB_CHUNK_SIZE * 4
    assert births.count(SCORED * tile) == 2, "one buffer in the forward pass, one in the backward pass"
    assert ROWS * (TOKENS - 1) * tile not in births
    births, _, _ = trained(fake=True, weights=torch.bfloat16)
    theirs, _, _ = trained(fake=True, stand_ins=False, weights=torch.bfloat16)
    assert SCORED * VOCABULARY * 4 not in births
    assert ROWS * (TOKENS - 1) * VOCABULARY * 4 in theirs
    # float32 copies of the head: its gradient's accumulator alone, where TRL's path casts the weights as well.
    assert births.count(VOCABULARY * HIDDEN * 4) == 1
    assert theirs.count(VOCABULARY * HIDDEN * 4) > 1


def test_without_the_head_nothing_is_rehearsed_while_its_absence_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    with pytest.raises(ValueError, match="the user's") as raised, fused_head_stand_ins():
        raise ValueError("the user's")
    assert raised.value.__context__ is None
