"""Routes tokens to a mixture's experts in two ways, since fake tensors have no values to route by.

By default, transformers 5 computes fused experts by ``grouped_mm`` on CUDA and on the CPU
(``transformers/modeling_utils.py: get_correct_experts_implementation``). ``grouped_mm`` sorts all pairs of token and
expert into one tensor, so its sizes do not depend on the routing. Nor do those of ``batched_mm``. The ``eager`` loop
allocates as much for each expert as the expert's tokens need.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers.integrations.moe import ExpertsInterface

from autotrain_mem.rehearsal import known_values
from autotrain_mem.rehearsal.known_values import know, real_tensors
from autotrain_mem.types.trace import Routing

LARGEST_ROUTED_ELEMENTS = 1 << 26
"""The largest tracked mask of tokens x choices x experts: 64 Ki tokens that choose 8 of 128 experts."""


@contextmanager
def routed(routing: Routing) -> Iterator[set[Routing]]:
    """Within the block, loops over experts use this routing.

    Yields the routings that occurred; ``Routing.ANY`` stands for experts that are computed without a loop.
    """
    choose, met = ExpertsInterface.get_interface, set[Routing]()

    def get_interface(interface: Any, implementation: Any, loop: Callable[..., Any]) -> Callable[..., Any]:
        implemented: Callable[..., Any] = choose(interface, implementation, loop)
        met.add(routing if implemented is loop else Routing.ANY)
        if implemented is not loop:
            return implemented

        def looped(experts: Any, *args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            choice = next(each for each in given if isinstance(each, torch.Tensor) and each.dtype is torch.int64)
            tokens, choices = choice.shape
            assign(choice, chosen(routing, tokens, choices, experts.num_experts))
            with patch.object(known_values, "LARGEST_KNOWN_ELEMENTS", LARGEST_ROUTED_ELEMENTS):
                return loop(experts, *args, **kwargs)

        return looped

    with patch.object(ExpertsInterface, "get_interface", get_interface):
        yield met


def assign(choice: torch.Tensor, experts: torch.Tensor) -> None:
    """Records the chosen experts; tests that train for real patch this to fill the tensor."""
    know(choice, experts)


def chosen(routing: Routing, tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Returns each token's experts: the same for all tokens, or all experts in turn."""
    with real_tensors():
        if routing is Routing.ONE:
            return torch.arange(choices).repeat(tokens, 1)
        return (torch.arange(tokens * choices) % experts).view(tokens, choices)
