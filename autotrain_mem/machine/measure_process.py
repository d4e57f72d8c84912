"""The process that is measured: ``python -m autotrain_mem.machine.measure_process``.

It says what torch sees of the card, or why it cannot use it. Then it does, in small, what a training step does, so that
the driver loads the same kernels, says how much torch reserved, and holds still until its parent ends it. Its tensors
are small: what the kernels hold does not depend on them, while cuBLAS picks other kernels by size, so there are
several.
"""

from __future__ import annotations

import contextlib
from typing import Any

from autotrain_mem.machine.usable import check_usable
from autotrain_mem.support.errors import UnreadableGpuError
from autotrain_mem.support.processes import Channel

SIZES = (64, 512, 2048)
"""Widths of the matrices. The largest takes some 200 MiB in fp32, with gradients and optimizer state."""
HEADS = 4
VOCABULARY = 4096


def main() -> None:
    """Loads on the one card that this process sees, tells what torch's allocator holds, and holds still."""
    channel = Channel(ignore_interrupt=True)
    try:
        import torch

        check_usable(0)
        channel.send({"device": _device()})
        # fp16 where bf16 is only emulated (before Ampere)
        half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        exercise("cuda", half)
        torch.cuda.synchronize()
        channel.send({"reserved_bytes": int(torch.cuda.memory_reserved())})
    except UnreadableGpuError as error:
        channel.send({"unusable": error.to_json()})
    except Exception as error:  # whatever stands in the way, the parent does without the figure and says why
        channel.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
    channel.receive()


def _device() -> dict[str, Any]:
    """The fields of a ``torch_child.TorchDevice``."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    is_integrated = bool(properties.is_integrated)
    return {"total_bytes": properties.total_memory, "free_bytes": free_bytes, "is_integrated": is_integrated}


def exercise(device: str, half: Any, sizes: tuple[int, ...] = SIZES) -> None:
    """Trains and samples, in fp32 and in 16 bits, at every size."""
    import torch

    for dtype in (torch.float32, half):
        for size in sizes:
            _train(device, dtype, size)
            _sample(device, dtype, size)


def _train(device: str, dtype: Any, size: int) -> None:
    """A training step: token embedding, norms, attention, a gated MLP with dropout, LoRA under autocast, 4-bit weights,
    language-model head and loss; then clipping and AdamW, as foreach and as fused."""
    import torch
    from torch.nn import functional
    from torch.optim import AdamW

    def tensor(*shape: int, dtype: Any = dtype) -> Any:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    table, weight = tensor(VOCABULARY, size), tensor(size, size)
    tokens = torch.randint(VOCABULARY, (2, 128), device=device)
    x = functional.embedding(tokens, table)
    normed = functional.layer_norm(x, (size,)) + functional.rms_norm(x, (size,))
    gated = functional.silu(functional.linear(normed, weight)) * functional.gelu(normed @ weight)
    rotated = torch.cat((-gated[..., size // 2 :], gated[..., : size // 2]), dim=-1)
    hidden = functional.dropout(rotated, 0.1) + x
    logits = (hidden.flatten(0, 1) @ table.T).float()
    loss = functional.cross_entropy(logits, tokens.flatten()) + hidden.float().softmax(-1).sum()

    query, key, value = (tensor(1, HEADS, 128, min(128, size)) for _ in range(3))
    mask = torch.ones(1, 1, 128, 128, device=device, dtype=torch.bool).tril()
    causal = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    masked = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    loss = loss + causal.sum() + masked.sum()

    full, down, up = (tensor(*shape, dtype=torch.float32) for shape in ((size, size), (size, 8), (8, size)))
    with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
        adapted = torch.randn(128, size, device=device)
        loss = loss + (adapted @ full + (adapted @ down) @ up).float().pow(2).mean()
    loss.backward()
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # bitsandbytes is not there, or not for this card
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(size, size, compute_dtype=dtype, quant_type="nf4").to(device)
        layer(tensor(128, size)).sum().backward()

    weights = [weight, full]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    AdamW(weights, foreach=True).step()
    AdamW(weights, fused=True).step()


def _sample(device: str, dtype: Any, size: int) -> None:
    """Runs what generation, evaluation and preference losses use."""
    import torch

    logits = torch.randn(4, size, device=device, dtype=dtype)
    ordered, order = logits.sort(descending=True)
    probabilities = ordered.float().softmax(-1).cumsum(-1)
    chosen = torch.multinomial(logits.float().softmax(-1), 1)
    logits.log_softmax(-1).gather(-1, chosen).sum().item()
    logits.masked_fill(logits > 0, 0).logsumexp(-1).topk(2)
    order[probabilities < 0.5].unique().argmax()


if __name__ == "__main__":
    main()
