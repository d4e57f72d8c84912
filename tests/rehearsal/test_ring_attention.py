"""Ring attention of processes that share the tokens of a row computes what attention of the whole row does."""

from pathlib import Path

import pytest
import torch
from rank_run import forked

PROCESSES, TOKENS = 2, 32


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["flash", "cudnn"])
def test_tokens_that_two_processes_share_attend_as_whole_rows_do(capability: tuple[int, int], tmp_path: Path) -> None:
    forked(_attend, PROCESSES, tmp_path, {}, capability)


def _attend(rank: int, folder: Path, capability: tuple[int, int]) -> None:
    """Results and gradients are those of the whole row, but for rounding to bfloat16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.functional import scaled_dot_product_attention as whole_attention

    from autotrain_mem.rehearsal.ranks.ring_attention import ring_attention

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shapes = ((1, 4, TOKENS, 16), (1, 2, TOKENS, 16), (1, 2, TOKENS, 16))
    whole = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    expected = whole_attention(*whole, is_causal=True, enable_gqa=True)
    expected.float().square().sum().backward()
    quarter = TOKENS // (2 * PROCESSES)
    parts = [each for part in (rank, 2 * PROCESSES - 1 - rank) for each in range(part * quarter, (part + 1) * quarter)]
    own = [each.detach()[:, :, parts].clone().requires_grad_() for each in whole]
    with (
        ring_attention(capability),
        context_parallel(init_device_mesh("cpu", (PROCESSES,)), buffers=[torch.zeros(1, TOKENS)], buffer_seq_dims=[1]),
    ):
        out = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        out.float().square().sum().backward()
    pairs = {"result": (out, expected), **{f"gradient {at}": (own[at].grad, whole[at].grad) for at in range(3)}}
    far = [
        f"{name}: {float((ours - theirs[:, :, parts]).abs().max())}"
        for name, (ours, theirs) in pairs.items()
        if not torch.allclose(ours.float(), theirs[:, :, parts].float(), atol=0.1, rtol=0.05)
    ]
    dist.destroy_process_group()
    assert not far
