"""Everything that a step leaves behind is put back; what somebody arranged for good is kept."""

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autotrain_mem.training.process.longest_batch import keeps_whole_gradients, untouched


class Growing(torch.nn.Module):
    """As a rotary embedding that grows with the longest row (``transformers/modeling_rope_utils.py``)."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 4
        self.register_buffer("frequencies", torch.arange(4.0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] > self.longest:
            self.longest = rows.shape[0]
            self.register_buffer("frequencies", torch.arange(float(rows.shape[0])))
        return rows


def trainer(**attributes: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), Growing())
    accelerator = SimpleNamespace(gradient_state=SimpleNamespace(_shared_state={"sync_gradients": False}), scaler=None)
    state = SimpleNamespace(num_input_tokens_seen=7, log_history=[])
    return SimpleNamespace(model=model, model_wrapped=model, accelerator=accelerator, state=state, **attributes)


def test_buffers_and_the_models_mode_are_put_back_to_the_bit_after_an_error_too() -> None:
    made = trainer(_step=3)
    made.model.eval()
    before = {name: (buffer, buffer.clone()) for name, buffer in made.model.named_buffers()}

    def step() -> None:
        with untouched(made):
            made._step = 4
            made.model.train()
            made.model(torch.randn(9, 3))
            assert made.model[1].num_batches_tracked == 1
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        step()
    assert made._step == 3
    after = dict(made.model.named_buffers())
    assert after.keys() == before.keys()
    for name, (buffer, values) in before.items():
        assert after[name] is buffer
        assert torch.equal(buffer, values)
    assert made.model[2].longest == 4
    assert not any(module.training for module in made.model.modules())


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_whole_gradients_that_fsdp2_keeps_between_micro_steps_are_dropped(alone_in_a_group: None) -> None:
    made = trainer()
    made.model = made.model_wrapped = model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    def gradients() -> list[Any]:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    expected = gradients()
    model.zero_grad()
    with untouched(made):
        assert not keeps_whole_gradients(model)
        model.set_requires_gradient_sync(False)
        assert keeps_whole_gradients(model)
        model(torch.ones(2, 3)).sum().backward()
        model.set_requires_gradient_sync(True)
    assert all(map(torch.equal, gradients(), expected))


def test_gradients_of_a_model_in_ddp_are_put_back_though_both_hold_them(alone_in_a_group: None) -> None:
    made = trainer()
    made.model_wrapped = torch.nn.parallel.DistributedDataParallel(made.model)
    before = [torch.ones_like(parameter) for parameter in made.model.parameters()]
    for parameter, gradient in zip(made.model.parameters(), before, strict=True):
        parameter.grad = gradient
    with untouched(made):
        assert made.model[0].weight.grad is None
        made.model_wrapped(torch.randn(4, 3)).sum().backward()
    assert all(each.grad is gradient for each, gradient in zip(made.model.parameters(), before, strict=True))
    assert made.model_wrapped._lazy_init_ran


def test_all_random_states_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    of_cards, put_back = [torch.tensor([1]), torch.tensor([2])], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: of_cards)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", put_back.append)
    made, draws = trainer(), []
    for runs_first in (False, True):
        random.seed(1)
        numpy.random.seed(1)
        torch.random.default_generator.manual_seed(1)
        if runs_first:
            with untouched(made):
                drawn()
        draws.append(drawn())
    assert draws[0] == draws[1]
    assert put_back == [of_cards]


def test_metrics_that_are_added_to_names_that_are_new_and_accelerates_switches_are_put_back() -> None:
    metrics = {"train": {"loss": [1.0]}}
    made = trainer(_metrics=metrics)
    with untouched(made):
        made._metrics["train"]["loss"].append(2.0)
        made._entropy_window_stats = torch.ones(2)
        made.accelerator.gradient_state._shared_state["sync_gradients"] = True
    assert made._metrics is metrics
    assert metrics == {"train": {"loss": [1.0]}}
    assert not hasattr(made, "_entropy_window_stats")
    assert made.accelerator.gradient_state._shared_state == {"sync_gradients": False}


def test_a_scaler_has_the_scale_that_it_had() -> None:
    made = trainer()
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = made.accelerator.scaler.state_dict()
    with untouched(made):
        made.accelerator.scaler.scale(torch.ones(()))
        made.accelerator.scaler.update(2.0)
    assert made.accelerator.scaler._scale is None
    assert made.accelerator.scaler.state_dict() == before


def test_a_method_that_was_replaced_for_good_stays_replaced() -> None:
    """A guard that learned to keep activations on the host must not be undone."""
    made = trainer(compute_loss=min)
    with untouched(made):
        made.compute_loss = max
        made.guard = SimpleNamespace()
    assert made.compute_loss is max
    assert made.guard
