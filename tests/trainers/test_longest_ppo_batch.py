"""PPO's longest prompts, run before the first update: seen by every model, and gone without a trace."""

import pathlib
from typing import Any

import pytest
import torch
from ppo_runs import NEEDS_PPO, config, logged, prompts, trainer, weights
from tiny import tiny_folder

from autotrain_mem.spec import Learned

pytestmark = NEEDS_PPO


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.mark.parametrize("changes", [{}, {"use_lora": True, "activation_checkpointing": True, "bf16": True}])
def test_losses_and_weights_are_the_same_to_the_bit_with_and_without(
    changes: dict[str, Any], model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    from autotrain_mem.training.longest_batch.run import attach_longest_batch

    def trained(*, worst_first: bool) -> Any:
        options = dict(changes)
        use_lora = options.pop("use_lora", False)
        built = trainer(model, config(tmp_path, max_steps=2, **options), use_lora=use_lora)
        told: list[Any] = []
        if worst_first:
            attach_longest_batch(built, told.append)
        built.train()
        assert len(told) == worst_first
        return built

    without, with_it = trained(worst_first=False), trained(worst_first=True)
    assert logged(with_it, "loss") == logged(without, "loss")
    expected = weights(without)
    assert all(torch.equal(value, expected[name]) for name, value in weights(with_it).items())


def test_the_longest_prompts_are_answered_in_full_by_every_model(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from autotrain_mem.training.longest_batch.ppo import run_longest_ppo_batch

    built = trainer(model, config(tmp_path, response_length=5), prompts(40))
    widest: dict[str, int] = {}

    def seen(name: str) -> Any:
        return lambda _, __, output: widest.update({name: max(widest.get(name, 0), output.shape[1])})

    models = {"policy": built.policy_model, "reference": built.ref_model}
    models |= {"value": built.value_model, "reward": built.reward_model}
    for name, each in models.items():
        each.model.layers[1].register_forward_hook(seen(name))
    state = torch.get_rng_state()
    run = run_longest_ppo_batch(built)
    assert (run.rows, run.longest_tokens, run.why_not) == (4, 6, "")
    assert widest == dict.fromkeys(models, 6 + 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in built.model.parameters())
    assert not built.optimizer.state


def test_what_it_refuses_is_learned_before_the_first_update(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    from autotrain_mem.training.guard.attach import attach_guard
    from autotrain_mem.training.longest_batch.run import attach_longest_batch

    built = trainer(model, config(tmp_path))
    steps: list[int] = []
    guard = attach_guard(
        built, learned=Learned(), on_incident=lambda incident, _: steps.append(incident.step), grow_after=9
    )
    attach_longest_batch(built, lambda _: steps.append(-1))

    def refuse(_: Any, inputs: Any) -> None:
        if torch.is_grad_enabled() and len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    built.policy_model.model.layers[1].register_forward_pre_hook(refuse)
    built.train()
    assert steps == [0, -1]
    assert guard.learned.train_tokens == 6 + 4
