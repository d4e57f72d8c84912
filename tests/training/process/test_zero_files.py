"""DeepSpeed's files, as stages 2 and 3 lay them out, give back the tensors that were cut."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotrain_mem.training.process.resharding.names import OptimizerOrder, numbered, options_of
from autotrain_mem.training.process.resharding.zero_files import ZeroFiles

SHAPES = {"a": (3, 2), "b": (5,), "c": (4, 1)}
WHOLE = {name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for name, shape in SHAPES.items()}
KEYS = {"exp_avg": 10.0, "exp_avg_sq": 20.0}
GROUPS = [{"lr": 0.5, "params": [0]}]
RANKS = 2


def save(folder: Path, parameters: Any, states: list[dict[str, Any]], model: str) -> Path:
    place = folder / "global_step3"
    place.mkdir()
    for rank, state in enumerate(states):
        file = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, file)
    torch.save({"param_shapes": parameters, "shared_params": {"tied": "a"}}, place / model)
    return folder


def state_of(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(3.0)} | {key: flat + more for key, more in KEYS.items()}


def third(folder: Path) -> Path:
    """Each weight cut evenly and padded; ``c`` is in a second flat tensor."""

    def part(name: str, rank: int) -> torch.Tensor:
        flat, count = WHOLE[name].reshape(-1), math.ceil(WHOLE[name].numel() / RANKS)
        padded = torch.cat([flat, torch.full((count * RANKS - flat.numel(),), math.nan)])
        return padded[rank * count : (rank + 1) * count]

    states = []
    for rank in range(RANKS):
        flats = [torch.cat([part("a", rank), part("b", rank)]), part("c", rank)]
        kept = {"state": {index: state_of(flat) for index, flat in enumerate(flats)}, "param_groups": GROUPS}
        states.append({"fp32_flat_groups": flats, "optimizer_state_dict": kept})
    shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
    return save(folder, shapes, states, "zero_pp_rank_0_mp_rank_00_model_states.pt")


def second(folder: Path) -> Path:
    """One flat tensor cut in the middle of ``b``."""
    flat = torch.cat([each.reshape(-1) for each in WHOLE.values()])
    flat = torch.cat([flat, torch.full((1,), math.nan)])
    places: list[dict[str, Any]] = [
        {"a": SimpleNamespace(start=0, numel=6), "b": SimpleNamespace(start=6, numel=2)},
        {"b": SimpleNamespace(start=0, numel=3), "c": SimpleNamespace(start=3, numel=4)},
    ]
    states = [
        {
            "single_partition_of_fp32_groups": [half],
            "base_optimizer_state": {"state": {0: state_of(half)}, "param_groups": GROUPS},
            "param_slice_mappings": [places[rank]],
        }
        for rank, half in enumerate(flat.split(8))
    ]
    shapes = [{name: torch.Size(shape) for name, shape in SHAPES.items()}]
    return save(folder, shapes, states, "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("layout", [second, third])
def test_each_ranks_part_is_joined(layout: Any, tmp_path: Path) -> None:
    saved = ZeroFiles(layout(tmp_path))
    assert saved.names == {*SHAPES, "tied"}
    assert saved.states() == len(SHAPES)
    assert saved.options() == [{"lr": 0.5}]
    for index, (name, whole) in enumerate(WHOLE.items()):
        assert torch.equal(saved.weight(name), whole)
        state = saved.state(name, index)
        assert float(state["step"]) == 3
        assert all(torch.equal(state[key], whole + more) for key, more in KEYS.items())
    assert torch.equal(saved.weight("tied"), WHOLE["a"])


def test_a_group_without_parameters_may_be_left_out(tmp_path: Path) -> None:
    saved = ZeroFiles(second(tmp_path))
    order = OptimizerOrder(SimpleNamespace(create_optimizer=None, optimizer=None))
    order.groups = [["a", "b", "c"], []]
    assert numbered(order, saved) == {"a": 0, "b": 1, "c": 2}
    assert options_of(order, saved) == [{"lr": 0.5}, {}]
