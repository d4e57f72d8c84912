"""Every name that the package gives to TRL is one that the installed TRL has, and every default it counts on is its."""

import ast
import dataclasses
import functools
import importlib
import importlib.util

import pytest
import trl
from nouns import TRL_DEFAULTS
from test_contract import TREES

from autotrain_mem.estimator import vllm_share
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.flag_verdicts import Verdict, group_of
from autotrain_mem.settings.knobs import NOT_TRLS, knob_names
from autotrain_mem.settings.levers import LADDER, LEVERS
from autotrain_mem.trainers.host_optimizer import SUPPORTED
from autotrain_mem.types import Knobs
from autotrain_mem.types.methods_table import METHODS, TEXT_COLUMN

pytestmark = pytest.mark.newest

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None
INSTALLED_METHODS = [method for method in METHODS if HAS_PPO or method != "ppo"]


@functools.cache
def trl_fields(method: str) -> frozenset[str]:
    filled = method_of(method).configs({"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"})
    kinds = [filled.script, filled.training, filled.model, filled.dataset]
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind) if field.init)


def every_trl_field() -> frozenset[str]:
    return frozenset().union(*map(trl_fields, INSTALLED_METHODS))


EVERYTHING_ON = dataclasses.replace(
    TRL_DEFAULTS,
    per_device_eval_batch_size=8,
    **{field.name: True for field in dataclasses.fields(Knobs) if field.default is False},
)


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_every_knob_that_is_told_or_moved_by_a_lever_is_a_field_of_the_installed_trl(method: str) -> None:
    """But for switches that a method lacks, which no lever of it moves."""
    own_and_offline = {*NOT_TRLS, "activation_offloading", "packing"}
    assert set(knob_names(METHODS[method].knobs, TRL_DEFAULTS)) <= trl_fields(method)
    assert sorted(set(knob_names(METHODS[method].knobs, EVERYTHING_ON)) - own_and_offline - trl_fields(method)) == []
    moved = {knob for row in LADDER if row.suits(METHODS[method]) for knob in (*row.knobs, *row.also)}
    assert sorted(moved - NOT_TRLS - trl_fields(method)) == []


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_the_facts_of_a_method_are_those_of_the_installed_trl(method: str) -> None:
    row, fields = METHODS[method], trl_fields(method)
    heeded = {name for name in fields if heeds(method, name)}  # GKD's config has all of SFT's
    assert row.has_activation_offload == ("activation_offloading" in fields)
    assert ((TEXT_COLUMN,) in row.formats) == ("dataset_text_field" in heeded)
    assert row.is_packable == ("packing" in heeded)
    assert ("num_generations" in row.knobs) == ("num_generations" in fields)
    assert (method_of(method).mini_batches({}) is not None) == ("num_mini_batches" in fields)
    assert ("max_length" in row.knobs) == ("max_length" in fields)
    assert row.reward_model_argument in {None, *fields}
    of_images = {"worst_image_rows", "image_rows_editor", "image_texts"}
    assert of_images & vars(importlib.import_module(f"autotrain_mem.methods.{method}")).keys() == (
        of_images if row.reads_images else set()
    )
    assert row.has_trl_command == (importlib.util.find_spec(f"trl.scripts.{method}") is not None)
    assert hasattr(trl, row.trainer) == row.has_trl_command


def heeds(method: str, flag: str) -> bool:
    group = group_of(method, flag)
    return group is not None and group.verdict not in (Verdict.IDLE, Verdict.REFUSED)


def test_every_knob_is_a_field_of_some_method_or_ours() -> None:
    of_ppo = set() if HAS_PPO else {"response_length", "local_rollout_forward_batch_size"}
    knobs = {field.name for field in dataclasses.fields(Knobs)}
    assert sorted(knobs - NOT_TRLS - of_ppo - every_trl_field()) == []


def test_the_optimizers_that_the_ladder_offloads_are_those_that_can_be() -> None:
    assert LEVERS["optimizer_offload"].needs["optim"] == SUPPORTED


def test_every_keyword_that_the_package_writes_for_trl_is_one_of_its_fields() -> None:
    """The dicts with ``use_cpu`` in them are arguments for TRL's dataclasses: all of their keys must exist.

    But for accelerate's, which have a test of their own.
    """
    known = every_trl_field()
    for module, tree in TREES.items():
        if module == "autotrain_mem.exports.accelerate":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                if "use_cpu" in keys:
                    assert keys <= known, f"{module}:{node.lineno}: {keys - known}"


def test_vllm_takes_the_share_that_the_installed_trl_gives_it() -> None:
    for kind in (trl.GRPOConfig, trl.RLOOConfig):
        assert kind.vllm_mode == vllm_share.VLLM_MODE
        assert kind.vllm_gpu_memory_utilization == vllm_share.VLLM_SHARE
