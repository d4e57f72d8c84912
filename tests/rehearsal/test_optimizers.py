"""Optimizers of other kinds than AdamW are rehearsed as they train: their state is born at the first step.

``methods.optimizer_verdicts`` says which; those of packages are run where their package is installed.
"""

import importlib.util
import pathlib
from collections.abc import Callable

import pytest
from real_run import case, difference, peak, peaks, rehearsed, trained

from autotrain_mem.settings.optimizer_verdicts import PACKAGES, is_projecting
from autotrain_mem.types import Owner

pytestmark = pytest.mark.slow

Folder = Callable[[str], pathlib.Path]

TARGETS = {"optim_target_modules": ["q_proj", "down_proj"]}
INSTALLED = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


@pytest.mark.parametrize("name", ["adafactor", "ademamix_8bit", *INSTALLED])
def test_an_optimizer_is_rehearsed_to_the_byte(name: str, model_folder: Folder, tmp_path: pathlib.Path) -> None:
    one = case("sft", model_folder("llama"), TARGETS if is_projecting(name) else {}, optim=name)
    fake, (real, _) = rehearsed(one), trained(one, tmp_path)
    if name == "apollo_adamw":  # a value decides between a number and a tensor of one element
        assert peaks(fake) == peaks(real)
    else:
        assert not difference(one, fake, real)


def test_three_moments_take_three_times_what_one_takes(model_folder: Folder) -> None:
    folder = model_folder("llama")
    state = {
        name: peak(rehearsed(case("sft", folder, optim=name)), Owner.OPTIMIZER_STATE)
        for name in ("lion_32bit", "adamw_torch_fused", "ademamix")
    }
    assert state["adamw_torch_fused"] == pytest.approx(2 * state["lion_32bit"], rel=0.01)
    assert state["ademamix"] == pytest.approx(3 * state["lion_32bit"], rel=0.01)
