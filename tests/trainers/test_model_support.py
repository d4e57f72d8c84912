"""Experts that are fused into one tensor a layer stay as they are in a quantized model, and are counted."""

import bitsandbytes
import torch

from autotrain_mem.trainers.model_support import unquantized_bytes


class Mixture(torch.nn.Module):
    """Two linear layers' worth of weights, and experts in one tensor."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = linear, torch.nn.LayerNorm(8)
        self.experts = torch.nn.Parameter(torch.zeros(4, 8, 8, dtype=torch.bfloat16))


def test_fused_experts_beside_quantized_layers_are_left_at_their_own_bytes() -> None:
    for linear in (bitsandbytes.nn.Linear4bit(8, 8), bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)):
        assert unquantized_bytes(Mixture(linear)) == 4 * 8 * 8 * 2
    assert unquantized_bytes(Mixture(torch.nn.Linear(8, 8))) == 0
