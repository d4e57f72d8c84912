"""An optimizer on the host trains what torch's own would, and looks like it to everything around it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotrain_mem.rehearsal.cuda.rules import fp16_on_cpu
from autotrain_mem.support.errors import UsageError
from autotrain_mem.trainers.host_optimizer import HostOptimizer, offload_to_host
from tests.training import tiny_trainers

KINDS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5}),
}


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def groups(trained: torch.nn.Module) -> list[dict[str, Any]]:
    """As transformers makes them: matrices decay, biases do not."""
    parameters = list(trained.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def device_optimizer(trained: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    inner, options = KINDS[kind]
    return inner(groups(trained), **options)


def host(trained: torch.nn.Module, kind: str) -> HostOptimizer:
    inner, options = KINDS[kind]
    return HostOptimizer(groups(trained), inner=inner, **options)


def train(trained: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            torch.manual_seed(2 * step + micro)
            trained(torch.randn(16, 4).to(trained[0].weight.dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


CHANGES: dict[str, Callable[[Any, torch.optim.Optimizer], Any]] = {
    "an option": lambda trained, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "a frozen parameter": lambda trained, optimizer: trained[0].weight.requires_grad_(False),
    "other weights": lambda trained, optimizer: trained.load_state_dict(network().state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_between_two_steps_counts(change: str) -> None:
    on_host, expected = network(), network()
    for trained, optimizer in ((on_host, host(on_host, "adamw")), (expected, device_optimizer(expected, "adamw"))):
        train(trained, optimizer, range(2))
        CHANGES[change](trained, optimizer)
        train(trained, optimizer, range(2, 4))
    assert same(on_host, expected)


def test_a_closure_is_called_and_its_loss_returned_and_hooks_hear_of_a_step_once() -> None:
    trained = network()
    before = network()

    def closure() -> torch.Tensor:
        loss: torch.Tensor = trained(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss

    optimizer, called = host(trained, "adamw"), []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    loss = optimizer.step(closure)
    assert called == ["before", "after"]
    assert torch.equal(loss, before(torch.ones(1, 4)).square().mean())
    assert not same(trained, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "first", "second"),
    [
        *((torch.float32, first, second) for first in (host, device_optimizer) for second in (host, device_optimizer)),
        (torch.bfloat16, host, host),
    ],
)
def test_a_run_trains_and_resumes_to_the_bit_with_or_without_the_offload(
    kind: str, dtype: torch.dtype, first: Any, second: Any, tmp_path: Path
) -> None:
    straight, interrupted = network(dtype), network(dtype)
    train(straight, (device_optimizer if dtype is torch.float32 else host)(straight, kind), range(4))

    optimizer = first(interrupted, kind)
    train(interrupted, optimizer, range(2))
    torch.save((interrupted.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
    resumed = network(dtype)
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(weights)
    optimizer = second(resumed, kind)
    optimizer.load_state_dict(state)
    train(resumed, optimizer, range(2, 4))
    assert same(resumed, straight)
    assert not same(resumed, network(dtype)), "and it did train"


def test_weights_in_half_precision_are_those_of_float32_rounded() -> None:
    """A step of 1e-4 is far below the spacing of bfloat16 at 1, which is 2**-7."""
    half, exact = torch.nn.Parameter(torch.ones(4).bfloat16()), torch.nn.Parameter(torch.ones(4))
    optimizers = HostOptimizer([half], inner=torch.optim.AdamW, lr=1e-4), torch.optim.AdamW([exact], lr=1e-4)
    for _ in range(100):
        for each, optimizer in zip((half, exact), optimizers, strict=True):
            each.grad = torch.ones_like(each)
            optimizer.step()
    assert torch.equal(half, exact.to(half.dtype))
    assert half.max() < 1


def test_there_is_no_state_to_move_and_no_parameters_come_after_the_first_step() -> None:
    """accelerate carries an optimizer's state to the device and back when it prepares it."""
    trained = network()
    optimizer = host(trained, "adagrad")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert device_optimizer(network(), "adagrad").state_dict()["state"]
    assert optimizer.state_dict()["state"] == {}
    train(trained, optimizer, range(2))
    assert not optimizer.state
    assert optimizer.state_dict()["state"]
    with pytest.raises(RuntimeError, match="first step"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def trainer(model: Path, output_dir: Path, **arguments: Any) -> Any:
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 2, "warmup_steps": 1}
    return tiny_trainers.trainer("sft", model, output_dir, weight_decay=0.1, **small | arguments)


@pytest.mark.parametrize("precise", [{}, {"fp16": True}, {"fp16": True, "max_grad_norm": 0.0}])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adagrad"])
def test_a_trainer_trains_the_same_weights_with_it(optim: str, precise: Any, qwen: Path, tmp_path: Path) -> None:
    with fp16_on_cpu():  # 2**16, the scaler's first scale, overflows float16: it skips a step
        ours, theirs = (trainer(qwen, tmp_path, optim=optim, max_steps=3, **precise) for _ in range(2))
        offload_to_host(ours)
        ours.train()
        theirs.train()
    assert isinstance(ours.optimizer.optimizer, HostOptimizer), "and it did step there"
    assert same(ours.model, theirs.model)
    if precise:
        assert ours.accelerator.scaler.get_scale() == theirs.accelerator.scaler.get_scale() < 2**16


REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    **{f"--optim {optim}": ({"optim": optim}, lambda trainer: None) for optim in ("adafactor", "paged_adamw_8bit")},
    "was given one": ({}, lambda trainer: trainer.create_optimizer()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_it_is_refused_by_its_flag(words: str, qwen: Path, tmp_path: Path) -> None:
    arguments, change = REFUSED[words]
    refused = trainer(qwen, tmp_path, **arguments)
    change(refused)
    with pytest.raises(UsageError, match=words):
        offload_to_host(refused)
