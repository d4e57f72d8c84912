"""Replaces Triton kernels in a rehearsal: they run on neither the CPU nor fake tensors.

Liger's layers are replaced by layers without values, for fake tensors only. They allocate the buffers of liger-kernel
0.8.5 on compute capability 8.0 or newer, even if Liger is not installed; if a version before 0.8.3 is installed, the LM
head follows 0.8.0. TRL 1.12's losses for GRPO, DPO and KTO (``liger_kernel.chunked_loss``) are not imitated.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from autotrain_mem.rehearsal.cuda.attention_kernels import HALF
from autotrain_mem.rehearsal.cuda.rules import CudaRule
from autotrain_mem.rehearsal.trace.operator_costs import pass_through, product
from autotrain_mem.rehearsal.trace.recorder import note
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.versions import installed_versions, version_of
from autotrain_mem.trainers.model_support import LIGER_SWITCHES, why_not_liger

_KEEPS_GRADIENT = ("gemma3_text",)
"""Models whose norms allocate a new gradient, since a residual still reads the old one (``monkey_patch.py``)."""

stableadamw = importlib.import_module("optimi.stableadamw")  # in ``optimi``, a function has this name

_IN_PLACE_FROM = (0, 8, 3)
"""The first version with ``ops/fused_linear_cross_entropy.py: _can_use_mm_out``."""


_MULTIPROCESSORS = 132
"""Those of an H100: each keeps a partial sum of a norm's weight gradient."""


@contextmanager
def liger_stand_ins() -> Iterator[None]:
    """Within the block, ``use_liger_kernel=True`` gives a fake model layers that allocate like Liger's."""
    from transformers import trainer

    with ExitStack() as stack:

        def apply(model: Any, config: dict[str, Any] | None) -> None:
            """Gives a model layers like Liger's, as ``monkey_patch.py: _apply_liger_kernel_to_instance`` does."""
            model, switches = trainer.unwrap_peft_model(model), {**LIGER_SWITCHES, **(config or {})}
            reason = why_not_liger(model.config.model_type, switches)
            if reason is None and not isinstance(next(model.parameters()), FakeTensor):
                reason = "Liger's kernels run on a GPU only"
            if reason is not None:
                raise UsageError(f"--use_liger_kernel: {reason}.", hint="Remove --use_liger_kernel.")
            if switches["fused_linear_cross_entropy"] and not hasattr(model, "lm_head"):
                raise UsageError(
                    f"--use_liger_kernel fuses the loss with a head lm_head, which {type(model).__name__} lacks: its "
                    "training would end in an AttributeError.",
                    hint="Remove it, or write in a YAML file liger_kernel_config: {fused_linear_cross_entropy: false}.",
                )
            if switches["rope"]:
                modeling = importlib.import_module(type(model).__module__)
                stack.enter_context(patch.object(modeling, "apply_rotary_pos_emb", Rotation.apply))
            in_place = model.config.model_type not in _KEEPS_GRADIENT
            for name, module in model.named_modules():
                if switches["rms_norm"] and type(module).__name__.endswith("RMSNorm"):
                    module.forward = lambda x, norm=module: RMSNorm.apply(x, norm.weight, in_place)
                if switches["swiglu"] and switches["geglu"] and name.endswith(".mlp"):
                    module.forward = lambda x, mlp=module: mlp.down_proj(
                        GatedProduct.apply(mlp.gate_proj(x), mlp.up_proj(x))
                    )
            if switches["fused_linear_cross_entropy"]:
                model.forward = _model_forward(model, model.forward)

        stack.enter_context(patch.object(trainer, "apply_liger_kernel", apply))
        yield


class RMSNorm(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``ops/rms_norm.py: LigerRMSNormFunction``, which saves its input and one float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        """``x`` is ... x H, ``weight`` H."""
        rows = x.contiguous().view(-1, x.shape[-1])
        out = torch.empty(rows.shape, dtype=x.dtype)
        note(pass_through(rows, out))
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[0], dtype=torch.float32))
        ctx.in_place = in_place
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Writes the input's gradient over the output's, unless ``in_place`` is False."""
        rows, weight, _ = ctx.saved_tensors
        grad = grad.contiguous()
        note(pass_through(rows, grad, grad))
        shape = _MULTIPROCESSORS, weight.shape[0]
        partial = torch.empty(shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_input = grad if ctx.in_place else torch.zeros_like(grad)
        return grad_input, None if partial is None else partial.sum(dim=0).to(weight.dtype), None


class GatedProduct(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``ops/swiglu.py: LigerSiLUMulFunction`` and ``ops/geglu.py: LigerGELUMulFunction``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Saves both factors and recomputes the activation in the backward pass."""
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        note(pass_through(gate, up, gate))
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grad.contiguous()
        gate, up = ctx.saved_tensors
        note(pass_through(grad, gate, up, gate, up))
        return gate, up


class Rotation(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``ops/rope.py: LigerRopeFunction``, which rotates queries and keys in place."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``query`` and ``key`` are B x H x S x D, in memory B x S x H x D."""
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _rows_first(query), _rows_first(key)

    @staticmethod
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        return _rows_first(grad_query), _rows_first(grad_key), None, None


def _rows_first(tensor: Tensor) -> Tensor:
    note(pass_through(tensor, tensor))
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


class FusedLinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``ops/fused_linear_cross_entropy.py``, which computes gradients in the forward pass, in chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignored: int, accuracy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden`` is N x H, ``weight`` V x H, ``target`` N. Returns the loss and the token accuracy."""
        # Since 0.8.3, the head writes products into their final buffers.
        version = installed_versions(["liger-kernel"])["liger-kernel"]
        tokens, is_newer = hidden.shape[0], (version is None or version_of(version) >= _IN_PLACE_FROM)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad and hidden.requires_grad else None
        losses = torch.zeros(tokens, dtype=torch.float32)
        hits = torch.zeros(tokens, dtype=torch.float32) if accuracy else None
        counted = (target != ignored).sum().item()
        size, storage = chunk_tokens(tokens, *weight.shape), None
        if is_newer and _writes_into_storage(hidden, weight):
            storage = torch.empty((size, weight.shape[0]), dtype=hidden.dtype)
        for start in range(0, tokens, size):
            rows = slice(start, start + size)
            chunk = hidden[rows]
            if storage is None:
                logits = chunk @ weight.t()
            else:
                note(product(chunk.shape[0], chunk.shape[1], weight.shape[0], hidden.dtype))
                logits = storage[: chunk.shape[0]]
            note(pass_through(logits, logits))
            _fill(logits, losses, hits)
            if is_newer:
                if hidden.requires_grad:
                    _add_gradients(logits, hidden[rows], weight, grad_hidden[rows], grad_weight)
                del logits
                continue
            # 0.8.0 allocates new logits while it holds those of the chunk before, and the weight's gradient of each
            # chunk in the logits' dtype and in float32. 0.8.1 and 0.8.2 need less for float32 weights under autocast.
            if hidden.requires_grad:
                grad_hidden[rows] = logits @ weight
            if grad_weight is not None:
                grad_weight += torch.mm(logits.t(), hidden[rows]).float()
        del storage
        ctx.save_for_backward(grad_hidden.detach(), None if grad_weight is None else grad_weight.detach())
        return losses.sum(), None if hits is None else hits.sum() / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scales the gradients of the forward pass in place."""
        grad_hidden, grad_weight = ctx.saved_tensors
        torch.empty((), dtype=torch.float32)  # a 1.0 to compare the incoming gradient with
        return grad_hidden, grad_weight, None, None, None


def chunk_tokens(tokens: int, vocabulary: int, width: int) -> int:
    """Returns the tokens per chunk, whose logits have about the bytes of all hidden states. 16,384 tokens of width 4096
    and a vocabulary of 32,000 give chunks of 2,048."""
    share = -(-tokens // -(-vocabulary // width))
    return int(min(tokens, 1 << (share - 1).bit_length()))


def _writes_into_storage(hidden: Tensor, weight: Tensor) -> bool:
    """Follows ``_can_use_mm_out``: returns whether the product needs no cast."""
    same = hidden.dtype == weight.dtype and hidden.dtype in (*HALF, torch.float32)
    autocast = torch.is_autocast_enabled("cpu")
    return same and (not autocast or hidden.dtype == torch.get_autocast_dtype("cpu"))


def _fill(logits: Tensor, *results: Tensor | None) -> None:
    """Writes unknown values, so that a rehearsal does not take the tensors for known zeros."""
    for result in results:
        if result is not None:
            result.copy_(logits[0, 0])


def _add_gradients(
    logits: Tensor, hidden: Tensor, weight: Tensor, grad_hidden: Tensor, grad_weight: Tensor | None
) -> None:
    """Computes the gradients of hidden states and weight from the logits', without temporaries if no cast is needed."""
    if not _writes_into_storage(hidden, weight) or logits.dtype != grad_hidden.dtype:
        grad_hidden.copy_(logits @ weight)
    else:
        note(product(hidden.shape[0], weight.shape[0], weight.shape[1], hidden.dtype))
    _fill(logits, grad_hidden, grad_weight)
    if grad_weight is None:
        return
    if logits.dtype in HALF:
        hidden.to(logits.dtype)
        note(product(hidden.shape[0], weight.shape[1], weight.shape[0], hidden.dtype))
    else:
        grad_weight += torch.mm(logits.t(), hidden)


@dataclass
class LigerOutput(CausalLMOutputWithPast):  # type: ignore[misc]  # untyped to mypy here
    """Replaces ``transformers/model/output_classes.py: LigerCausalLMOutputWithPast``."""

    token_accuracy: Tensor | None = None


def _model_forward(model: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``transformers/model/llama.py: lce_forward``, which the other models repeat."""

    def forward(
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        logits_to_keep: int = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: Any = None,
        return_token_accuracy: bool = False,
        use_token_scaling: bool = False,
        **kwargs: Any,
    ) -> Any:
        if skip_logits is None:
            skip_logits = model.training and (labels is not None or shift_labels is not None)
        if not skip_logits:
            more = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            kwargs.update({name: value for name, value in more.items() if value is not None})
            return plain(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        if use_token_scaling:
            raise UsageError("--use_liger_kernel is not rehearsed with --loss_type dft.", hint="Use --loss_type nll.")
        outputs = model.model(input_ids=input_ids, **kwargs)
        hidden = outputs[0][:, -logits_to_keep or None :, :]
        if shift_labels is None:
            assert labels is not None
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        loss, accuracy = FusedLinearCrossEntropy.apply(
            hidden.view(-1, hidden.shape[-1]), model.lm_head.weight, shift_labels.view(-1), -100, return_token_accuracy
        )
        if num_items_in_batch is not None:
            loss = loss / num_items_in_batch
        return LigerOutput(loss=loss, token_accuracy=accuracy, past_key_values=outputs.past_key_values)

    return forward


@contextmanager
def fused_head_stand_ins() -> Iterator[None]:
    """Within the block, the fused head of TRL 1.16 allocates like its Triton path; real tensors get true values.

    ``trl/kernels/chunked_logprob.py: ChunkedLogProbFunction`` scores tokens tile by tile. With Triton it scores only
    the positions that have a label, without copies; without Triton it scores every position, with float32 copies of
    each tile and of the weights.
    """
    if (head := _fused_head()) is None:
        yield
        return
    from trl.trainer import utils

    with (
        patch.object(head, "_use_triton", lambda device: True),
        patch.object(utils, "_use_triton", lambda device: True),
        patch.object(head, "_forward_kernel", _Kernel(head._forward_tile, statistics=slice(3, 10))),
        patch.object(head, "_backward_kernel", _Kernel(head._backward_tile, statistics=slice(0))),
        patch.object(head, "_addmm_fp32", _add_product),
        patch.object(head, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)), create=True),
    ):
        yield


def _fused_head() -> Any:
    """Returns TRL's module, or None. In the caller, the ImportError would become the context of later errors."""
    try:
        from trl.kernels import chunked_logprob
    except ImportError:
        return None
    return chunked_logprob


class _Kernel:
    """Replaces a jitted kernel: ``kernel[grid](logits, ...)`` writes into its arguments and allocates nothing. ``tile``
    is the same computation in PyTorch; ``statistics`` selects the arguments that are written besides the logits."""

    def __init__(self, tile: Callable[..., None], *, statistics: slice) -> None:
        self._tile, self._statistics = tile, statistics

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        note(pass_through(args[0], args[0]))
        if isinstance(args[0], FakeTensor):
            for statistic in args[self._statistics]:
                statistic.copy_(args[0][0, 0])
            return
        with torch._C._DisableTorchDispatch():
            self._tile(*args, **kwargs)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Replaces ``_addmm_fp32``: CUDA multiplies in half precision and adds in float32, in place."""
    note(product(a.shape[0], a.shape[1], b.shape[1], a.dtype))
    if isinstance(total, FakeTensor):
        total.copy_(a[0, 0])
        return
    with torch._C._DisableTorchDispatch():
        total.addmm_(a.float(), b.float())


@contextmanager
def kahan_stand_in() -> Iterator[None]:
    """Within the block, torch-optimi's StableAdamW allocates as on CUDA, where it steps in Triton kernels, one weight
    at a time and without temporaries (``optimi/stableadamw.py: _triton_stableadamw``). Real tensors get true values."""
    with (
        patch.object(stableadamw, "_default_to_triton", lambda parameters: True),
        patch.object(stableadamw, "_triton_stableadamw", _step_stably, create=True),
    ):
        yield


def _step_stably(*tensors: list[Tensor], **options: Any) -> None:
    parameters, gradients, means, squares, _, lost = tensors
    for each, gradient, mean, square, error in zip(parameters, gradients, means, squares, lost, strict=True):
        # One kernel updates the moments; another one reads them and updates the parameter and its error.
        moved = pass_through(gradient, *(mean, square) * 3, *(each, error) * 2)
        note(replace(moved, bytes=0, fixed_bytes=moved.bytes, launches=3))
    if parameters and not isinstance(parameters[0], FakeTensor):  # an adapter leaves the group without decay empty
        with torch._C._DisableTorchDispatch():
            stableadamw._single_stableadamw(*tensors, **options)


RULES = (
    CudaRule(lambda recorder, card: fused_head_stand_ins()),
    CudaRule(lambda recorder, card: kahan_stand_in()),
    CudaRule(lambda recorder, card: liger_stand_ins(), fakes_only=True),
)
