"""PPO's longest prompts, run before the first update: seen by every model, and gone without a trace."""

from typing import Any

import pytest
import torch
from ppo_runs import NEEDS_PPO, Build, logged, models, prompts, same_weights

from autotrain_mem.training.longest_batch.run import attach_longest_batch
from autotrain_mem.types import Learned

pytestmark = NEEDS_PPO


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True, "bf16": True}], ids=["plain", "LoRA"])
def test_losses_and_weights_are_the_same_to_the_bit_with_and_without(changes: dict[str, Any], build: Build) -> None:
    runs, batches = [], []
    for longest_first in (False, True):
        runs.append(build(options={"use_lora": bool(changes)}, max_steps=2, **changes))
        if longest_first:
            attach_longest_batch(runs[-1], batches.append)
        runs[-1].train()
        assert len(batches) == longest_first
    assert logged(runs[1], "loss") == logged(runs[0], "loss")
    assert same_weights(runs[1], runs[0])


def test_the_longest_prompts_are_answered_in_full_by_every_model(build: Build) -> None:
    from autotrain_mem.training.longest_batch.run import run_longest_ppo_batch

    built = build(prompts(40), response_length=5)
    widest = dict.fromkeys(models(built), 0)

    def seen(name: str) -> Any:
        return lambda _, __, output: widest.update({name: max(widest[name], output.shape[1])})

    for name, each in models(built).items():
        each.model.layers[1].register_forward_hook(seen(name))
    state = torch.get_rng_state()
    run = run_longest_ppo_batch(built)
    assert (run.rows, run.longest_tokens, run.why_not) == (4, 6, "")
    assert widest == dict.fromkeys(models(built), 6 + 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in built.model.parameters())
    assert not built.optimizer.state


def test_what_it_refuses_is_learned_before_the_first_update(build: Build) -> None:
    from autotrain_mem.training.guard.attach import attach_guard

    built, steps = build(), []
    guard = attach_guard(built, learned=Learned(), on_incident=lambda incident, _: steps.append(incident.step))
    attach_longest_batch(built, lambda _: steps.append(-1))

    def refuse(_: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    built.policy_model.model.layers[1].register_forward_pre_hook(refuse)
    built.train()
    assert steps == [0, -1]
    assert guard.learned.train_tokens == 6 + 4
