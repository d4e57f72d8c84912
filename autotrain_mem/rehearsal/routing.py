"""Routes tokens to a mixture's experts, which no fake tensor can know: where memory depends on it, in two ways.

transformers 5 computes fused experts by ``grouped_mm`` unless a config says otherwise, on CUDA and on the CPU
(``transformers/modeling_utils.py: get_correct_experts_implementation``): all pairs of a token and an expert that it
chose stand in one tensor, sorted, so that its size does not depend on the choice; ``batched_mm`` is alike. The loop
over experts, ``eager``, takes for each expert what its tokens need, one after the other.
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
"""A loop over experts makes a mask of tokens x choices x experts, whose values are known here up to 64 Mi elements: 64
Ki tokens that choose 8 of 128 experts."""


@contextmanager
def routed(routing: Routing) -> Iterator[set[Routing]]:
    """Within the block, loops over experts have their tokens routed so.

    Yields:
        What was met: this routing where a loop was, ``Routing.ANY`` where all tokens were computed at once.
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
    """Sets which experts the tokens chose; tests that train for real replace it to fill the tensor."""
    know(choice, experts)


def chosen(routing: Routing, tokens: int, choices: int, experts: int) -> torch.Tensor:
    """Returns every token's choice: the same experts for all tokens, or all experts in turn."""
    with real_tensors():
        if routing is Routing.ONE:
            return torch.arange(choices).repeat(tokens, 1)
        return (torch.arange(tokens * choices) % experts).view(tokens, choices)
