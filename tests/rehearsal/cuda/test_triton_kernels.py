"""Rehearsed Triton kernels allocate like Liger's, whose host code (0.8.5) ran on fake tensors, and TRL's fused head."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from real_run import peak
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import sizes
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, trainer
from transformers.utils import import_utils

from autotrain_mem.rehearsal.cuda import triton_kernels
from autotrain_mem.rehearsal.cuda.triton_kernels import chunk_tokens, fused_head_stand_ins, liger_stand_ins
from autotrain_mem.rehearsal.fake_mode import QuickFakeMode
from autotrain_mem.rehearsal.known_values import KnownValues, known_value
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.errors import UsageError
from autotrain_mem.trainers.model_support import LIGER_MODELS, why_not_liger
from autotrain_mem.types import Owner, Trace

BF16, FP32 = torch.bfloat16, torch.float32
ROWS, TOKENS, HIDDEN, VOCABULARY = 2, 24, 64, 300


def births(run: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = BF16) -> list[int]:
    """Returns the sizes that ``run`` allocates, given fake tensors of these shapes that require gradients."""
    with QuickFakeMode() as mode:
        given = [torch.empty(shape, dtype=dtype).requires_grad_() for shape in shapes]
        recorder = Recorder(KnownValues(mode).run)
        for tensor in given:
            recorder.mark(tensor, Owner.OTHER, "given")
        with recorder.recording():
            run(*given)
    return sizes(recorder.trace())[len(given) :]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_norm_keeps_one_number_per_row_and_overwrites_its_gradient(in_place: bool) -> None:
    def run(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
        out = triton_kernels.RMSNorm.apply(x, weight, in_place)
        torch.autograd.grad(out, (x, weight), grad.detach())

    shape = (ROWS, TOKENS, HIDDEN)
    forward = [ROWS * TOKENS * HIDDEN * 2, ROWS * TOKENS * 4]
    new_gradient = [] if in_place else [ROWS * TOKENS * HIDDEN * 2]
    partial_sums = [132 * HIDDEN * 4, *new_gradient, HIDDEN * 4, HIDDEN * 2]
    assert births(run, shape, (HIDDEN,), shape) == forward + partial_sums


def test_a_gated_product_allocates_only_its_result_and_a_rotation_nothing() -> None:
    def gate(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
        torch.autograd.grad(triton_kernels.GatedProduct.apply(gate, up), (gate, up), grad.detach())

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor) -> None:
        rows_first = [tensor.transpose(1, 2) for tensor in (query, key)]
        triton_kernels.Rotation.apply(*rows_first, cos.detach(), cos.detach())

    shape = (ROWS, TOKENS, 192)
    assert births(gate, shape, shape, shape) == [ROWS * TOKENS * 192 * 2]
    assert births(rotate, (ROWS, TOKENS, 4, 16), (ROWS, TOKENS, 2, 16), (1, TOKENS, 16)) == []


def test_a_chunk_of_logits_has_about_the_bytes_of_the_hidden_states() -> None:
    sizes = [(16384, 32000, 4096), (40, 300, 64), (4096, 151_936, 896), (4, 32000, 4096), (5, 64, 64)]
    assert [chunk_tokens(*size) for size in sizes] == [2048, 8, 32, 1, 5]


def head(
    weight_trains: bool, dtype: torch.dtype = BF16, autocast: bool = False, hidden_trains: bool = True
) -> list[int]:
    def run(hidden: torch.Tensor, weight: torch.Tensor) -> None:
        target = torch.zeros(hidden.shape[0], dtype=torch.long)
        hidden, weight = hidden.requires_grad_(hidden_trains), weight.requires_grad_(weight_trains)
        with torch.autocast("cpu", dtype=BF16) if autocast else nullcontext():
            loss, _ = triton_kernels.FusedLinearCrossEntropy.apply(hidden, weight, target, -100, True)
        if hidden_trains:
            torch.autograd.grad(loss, (hidden, weight) if weight_trains else (hidden,))

    return births(run, (ROWS * TOKENS, HIDDEN), (VOCABULARY, HIDDEN), dtype=dtype)


CHUNK = chunk_tokens(ROWS * TOKENS, VOCABULARY, HIDDEN)
CHUNKS = -(-ROWS * TOKENS // CHUNK)


def test_a_frozen_head_gets_no_gradient_and_an_evaluation_only_makes_logits() -> None:
    trained = head(weight_trains=False)
    evaluated = head(weight_trains=False, hidden_trains=False, dtype=FP32)
    assert VOCABULARY * HIDDEN * 2 not in trained
    assert VOCABULARY * HIDDEN * 4 not in evaluated
    assert max(evaluated) <= 2 * max(trained)


def test_every_chunk_casts_float32_weights_under_autocast_and_makes_a_second_gradient_of_them_without() -> None:
    assert head(weight_trains=True, dtype=FP32, autocast=True).count(VOCABULARY * HIDDEN * 2) >= CHUNKS
    assert head(weight_trains=True, dtype=FP32).count(VOCABULARY * HIDDEN * 4) == 1 + CHUNKS


@pytest.mark.parametrize(("version", "again"), [("0.8.2", 1), ("0.8.3", 0), (None, 0)])
def test_the_head_holds_one_chunk_of_logits_and_both_gradients_and_an_older_one_more(
    version: str | None, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "installed_versions", lambda names: dict.fromkeys(names, version))
    made = head(weight_trains=True)
    assert made.count(VOCABULARY * HIDDEN * 2) == 1 + again * CHUNKS
    assert made.count(VOCABULARY * HIDDEN * 4) == again * CHUNKS
    assert made.count(CHUNK * VOCABULARY * 2) == 1 + again * (CHUNKS - 1)
    assert again or max(made) == VOCABULARY * HIDDEN * 2


def recorded_step(
    build: Callable[[], Any],
    batch: dict[str, torch.Tensor],
    rules: AbstractContextManager[Any],
    step: Callable[[Any, dict[str, Any]], Any],
    *,
    fake: bool,
) -> tuple[Trace, Any, Any]:
    """Builds a model under some rules and records a step with it: the record, the step's result, and the model."""
    mode = QuickFakeMode() if fake else nullcontext()
    with mode, rules, patch.object(import_utils, "is_fake_tensor", lambda value: False):
        values = KnownValues(mode) if fake else None
        model = build()
        recorder = Recorder(values.run) if values else Recorder()
        recorder.adopt_model(model)
        arrived = values.arrive(batch) if values else batch
        recorder.adopt_batch(arrived.values())
        with recorder.recording():
            result = step(model, arrived)
    return recorder.trace(), result, model


def config(family: str) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return transformers.AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=2)


def training_step(family: str, switches: dict[str, Any] | None, with_liger: bool) -> tuple[list[int], int, Any]:
    """Returns the sizes and the peak of one step of a tiny fake model, and the output of its forward pass."""

    def build() -> Any:
        model = AutoModelForCausalLM.from_config(config(family), dtype=BF16).train()
        if with_liger:
            trainer.apply_liger_kernel(model, switches)
        return model

    def step(model: Any, batch: Any) -> Any:
        output = model(**batch, **({"return_token_accuracy": True} if with_liger and switches is None else {}))
        output.loss.backward()
        return output

    ids = torch.randint(10, 100, (ROWS, TOKENS))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    trace, output, _ = recorded_step(build, batch, liger_stand_ins(), step, fake=True)
    return sizes(trace), peak(trace), output


@pytest.mark.parametrize("family", LIGER_MODELS)
def test_a_model_with_ligers_kernels_allocates_no_logits_and_needs_less(family: str) -> None:
    made, peak, output = training_step(family, None, with_liger=True)
    plain, plain_peak, _ = training_step(family, None, with_liger=False)
    logits = ROWS * TOKENS * VOCABULARY * 2
    assert logits in plain
    assert logits not in made
    assert output.logits is None
    assert known_value(output.loss) is known_value(output.token_accuracy) is None
    assert peak < plain_peak


def test_each_kernel_and_the_head_can_be_switched_off() -> None:
    """TRL 1.16 uses the layers without the head."""
    everything, _, _ = training_step("llama", None, with_liger=True)
    for switch in ("rope", "rms_norm", "swiglu"):
        assert len(training_step("llama", {switch: False}, with_liger=True)[0]) > len(everything)
    made, _, output = training_step("llama", {"fused_linear_cross_entropy": False}, with_liger=True)
    assert output.logits is not None
    assert len(made) < len(training_step("llama", None, with_liger=False)[0])


def test_other_models_real_tensors_and_switches_are_refused() -> None:
    gpt2 = GPT2Config(n_layer=1, n_embd=64, n_head=4)
    for mode, kind, one, reason in (
        (FakeTensorMode(), AutoModelForCausalLM, gpt2, "not for gpt2"),
        (FakeTensorMode(), AutoModelForSequenceClassification, config("llama"), "LlamaForSequenceClassification lacks"),
        (nullcontext(), AutoModelForCausalLM, config("llama"), "GPU only"),
    ):
        with mode, liger_stand_ins():
            model = kind.from_config(one)
            with pytest.raises(UsageError, match=reason):
                trainer.apply_liger_kernel(model, None)
    assert why_not_liger("llama") is why_not_liger("qwen3", {"rope": False, "cross_entropy": False}) is None
    assert "cross_entropy" in str(why_not_liger("llama", {"cross_entropy": True}))


HAS_FUSED_HEAD = importlib.util.find_spec("trl.kernels") is not None
needs_fused_head = pytest.mark.skipif(not HAS_FUSED_HEAD, reason="TRL 1.16 brought the fused head")

LABELLED, PROMPT, WORDS = 32, 20, 320
SCORED = ROWS * (LABELLED - PROMPT)


def model_with_head(weights: torch.dtype) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    config = tiny_config("qwen2")
    config.vocab_size = WORDS
    model = AutoModelForCausalLM.from_config(config, dtype=weights).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(10, 100, (ROWS, LABELLED))
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def trained(fake: bool, stand_ins: bool = True, weights: torch.dtype = torch.float32) -> tuple[list[int], Any, Any]:
    """Returns the sizes of a forward and a backward pass without the weights, the outputs, and the model."""

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
    """A kernel that does nothing would leave zeros, on which a trainer's decisions would depend."""
    births, outputs, model = trained(fake=True, weights=weights)
    assert births == trained(fake=False, weights=weights)[0]
    assert known_value(outputs.loss) is None
    assert all(known_value(parameter.grad) is None for parameter in model.parameters())


@needs_fused_head
@pytest.mark.newest
def test_values_and_gradients_are_those_of_trls_own_path() -> None:
    """In float32; the order of sums differs, and so do the last digits."""
    _, mine, model = trained(fake=False)
    _, theirs, reference = trained(fake=False, stand_ins=False)
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


@needs_fused_head
@pytest.mark.newest
def test_only_tokens_with_a_label_are_scored_and_tiles_are_not_copied() -> None:
    """TRL's PyTorch path holds several float32 copies of the tile, and one of half-precision weights."""
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    births, tile = trained(fake=True)[0], _CHUNKED_LOGPROB_CHUNK_SIZE * 4
    assert births.count(SCORED * tile) == 2, "one buffer in the forward pass, one in the backward pass"
    assert ROWS * (LABELLED - 1) * tile not in births
    births, _, _ = trained(fake=True, weights=torch.bfloat16)
    theirs, _, _ = trained(fake=True, stand_ins=False, weights=torch.bfloat16)
    assert SCORED * WORDS * 4 not in births
    assert ROWS * (LABELLED - 1) * WORDS * 4 in theirs
    # float32 copies of the head: its gradient's accumulator alone, where TRL's path casts the weights as well.
    assert births.count(WORDS * HIDDEN * 4) == 1
    assert theirs.count(WORDS * HIDDEN * 4) > 1


def test_errors_without_the_head_do_not_have_its_absence_as_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.kernels", None)
    with pytest.raises(ValueError, match="the user's") as raised, fused_head_stand_ins():
        raise ValueError("the user's")
    assert raised.value.__context__ is None
