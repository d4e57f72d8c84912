"""Mixtures of experts are rehearsed as they run, to the byte, whatever computes them; ``test_parity`` adapts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from real_run import Folder, assert_alike, births, case, difference, peak, peaks, rehearsed, trained
from tiny import pack_in_mxfp4, tiny_folder

from autotrain_mem.rehearsal import rehearse
from autotrain_mem.rehearsal import routing as experts
from autotrain_mem.rehearsal.known_values import real_tensors
from autotrain_mem.types import Owner, Trace
from autotrain_mem.types.trace import Routing

pytestmark = pytest.mark.slow


def test_mxfp4_is_dequantized_as_it_loads(tmp_path: Path) -> None:
    folder = pack_in_mxfp4(tiny_folder(tmp_path / "oss", "gpt_oss"))
    fake, real, trainer = assert_alike(case("sft", folder, use_peft=True, dtype="bfloat16"), tmp_path)
    weight = 2 * 4 * 64 * (2 * 192)
    assert peaks(fake)["load"] == peaks(real)["load"]
    born = [(owner, size) for phase, owner, size, *_ in births(fake) if phase == "load"]
    assert born.count((Owner.WEIGHTS.value, weight)) == 2, "gate and up of two layers"
    assert born.count((Owner.OTHER.value, weight)) == 2 * 3, "before it is transposed, and indices of both its halves"
    assert trainer.model.get_submodule("base_model.model.model.layers.0.mlp.experts").gate_up_proj.abs().sum() > 0


@pytest.mark.parametrize(("family", "routing"), [("qwen3_moe", Routing.ONE), ("gpt_oss", Routing.EVEN)])
def test_a_loop_over_experts_is_rehearsed_for_either_routing(
    family: str, routing: Routing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tiny_folder(tmp_path / family, family), experts_implementation="eager")
    one = case("sft", folder, gradient_checkpointing=routing is Routing.ONE, dtype="bfloat16")
    fake = rehearse.rehearse(one.job, one.knobs, one.length, str(tmp_path), routing=routing)
    monkeypatch.setattr(experts, "assign", put)
    with experts.routed(routing):
        real, _ = trained(one, tmp_path / "real")
    assert not difference(one, fake, real)
    assert fake.routing is routing


def put(choice: torch.Tensor, chosen: torch.Tensor) -> None:
    with real_tensors():
        choice.data.copy_(chosen)  # autograd has it, and counts what is written otherwise


def written(folder: Path, **more: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder


def test_of_a_loop_over_experts_the_worst_is_told_and_of_a_grouped_product_that_it_has_none(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both: list[Trace] = []

    once = rehearse.rehearse

    def kept(*given: Any, **options: Any) -> Trace:
        both.append(once(*given, **options))
        return both[-1]

    monkeypatch.setattr(rehearse, "rehearse", kept)
    one = case("sft", written(tiny_folder(tmp_path / "eager", "qwen3_moe"), experts_implementation="eager"))
    worst = rehearsed(one)
    assert [trace.routing for trace in both] == [Routing.ONE, Routing.EVEN]
    assert peak(worst) == max(map(peak, both))
    assert rehearsed(case("sft", model_folder("qwen3_moe"), dtype="bfloat16")).routing is Routing.ANY
