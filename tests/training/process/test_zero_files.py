"""DeepSpeed's files, as stages 2 and 3 lay them out, give back the tensors that were cut."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.training.process.resharding.names import OptimizerOrder, numbered, options_of
from autotrain_mem.training.process.resharding.resume import opened

SHAPES = {"a": (3, 2), "b": (5,), "c": (4, 1)}
WHOLE = {name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) for name, shape in SHAPES.items()}
KEYS = {"exp_avg": 10.0, "exp_avg_sq": 20.0}
GROUPS = [{"lr": 0.5, "params": [0]}]
RANKS = 2
BESIDE = {
    "zero_stage": ZeroStageEnum.weights,
    "loss_scaler": LossScaler(1.0),
    "dynamic": DynamicLossScaler(2.0**16, 1000, 1.0, 2, False),
}
"""What ZeRO's optimizers write, of one dtype and of the other (``state_dict``)."""


def save(folder: Path, parameters: Any, states: list[dict[str, Any]], model: str) -> Path:
    place = folder / "global_step3"
    place.mkdir(parents=True)
    for rank, state in enumerate(states):
        file = place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": BESIDE | state}, file)
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
        {"a": fragment_address(start=0, numel=6), "b": fragment_address(start=6, numel=2)},
        {"b": fragment_address(start=0, numel=3), "c": fragment_address(start=3, numel=4)},
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
    with opened(layout(tmp_path)) as saved:
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
    order = OptimizerOrder(SimpleNamespace(create_optimizer=None, optimizer=None))
    order.groups = [["a", "b", "c"], []]
    with opened(second(tmp_path)) as saved:
        assert numbered(order, saved) == {"a": 0, "b": 1, "c": 2}
        assert options_of(order, saved) == [{"lr": 0.5}, {}]


@pytest.mark.parametrize(
    "left_out", ["*_optim_states.pt", "*_0_mp_*_optim_states.pt", "*_1_mp_*_optim_states.pt", "*_model_states.pt"]
)
@pytest.mark.parametrize("content", [None, {}])
def test_a_checkpoint_without_its_files_is_named_and_not_recommended(
    tmp_path: Path, left_out: str, content: dict[str, Any] | None
) -> None:
    folder = second(tmp_path / "checkpoint-3")
    for rank in range(2):
        (folder / f"rng_state_{rank}.pth").touch()
    for file in folder.glob(f"global_step3/{left_out}"):
        file.unlink() if content is None else torch.save(content, file)
    with pytest.raises(OutputFolderError) as caught, opened(folder):
        pass
    assert caught.value.message.startswith(f"Cannot resume from {folder}, whose files are not as they should be: ")
    assert "--resume_from_checkpoint" in caught.value.hint
    assert str(folder) not in caught.value.hint
