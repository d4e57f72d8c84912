"""PPO in two processes (DDP on the CPU), each with the environment that torchrun gives it."""

import json
import os
import pathlib
from typing import Any

import pytest
from ppo_runs import NEEDS_PPO

from tests.forked import ROOT, Forge

pytestmark = NEEDS_PPO

SCRIPT = pathlib.Path(__file__).with_name("ppo_script.py")


@pytest.fixture(scope="module")
def ran(model: pathlib.Path, forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(the folder that the processes wrote to, what each of them found)."""
    folder = tmp_path_factory.mktemp("ddp")
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", SCRIPT.parent)))
    forge.two_ranks([SCRIPT, model, folder], folder / "log", PYTHONPATH=path)
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_train_the_same_weights_resume_bit_for_bit_and_write_checkpoints_once(
    kind: str, ran: Any
) -> None:
    folder, found = ran
    results = [found[rank][kind][run] for rank in range(2) for run in ("straight", "resumed")]
    assert {result["weights"] for result in results} == {results[0]["weights"]}
    assert {tuple(result["scores"]) for result in results} == {tuple(results[0]["scores"])}
    assert (results[0]["distributed"], results[0]["precision"]) == ("MULTI_CPU", "bf16")
    assert all(len(result["grad_norm"]) == 2 for result in results)
    first, second = sorted((folder / kind).glob("checkpoint-*"))
    assert (first.name, second.name) == ("checkpoint-1", "checkpoint-2")
    weights = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    for name in (weights, "value_model/model.safetensors"):
        assert all((place / name).is_file() for place in (folder / kind, second))
    assert (folder / kind / "README.md").is_file()
    assert {path.name for path in second.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}


def test_a_policy_saved_by_two_processes_loads_and_a_wish_of_one_to_stop_and_save_is_that_of_all(ran: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder, found = ran
    _, loading = AutoModelForCausalLM.from_pretrained(folder / "full", output_loading_info=True)
    assert not loading["missing_keys"], "DDP's prefix in the names would leave every weight newly drawn"
    assert not loading["unexpected_keys"]
    assert [of_rank["stopped"] for of_rank in found] == [1, 1]
    assert (folder / "stopped" / "checkpoint-1" / "optimizer.pt").is_file()
