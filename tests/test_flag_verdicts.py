"""Every flag of the installed TRL has its verdict, every name and default that the package counts on is TRL's, and the
tables that act on flags agree with them.

That what counts as rehearsed takes effect: ``tests/rehearsal/test_given_flags.py``.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import re
from collections import Counter

import pytest
import transformers
import trl
from nouns import TRL_DEFAULTS
from test_contract import TREES

from autotrain_mem.checks import sharding
from autotrain_mem.cli.flags import own_names
from autotrain_mem.estimator import vllm_share
from autotrain_mem.methods import configs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.rehearsal.rehearse import rehearsal_arguments
from autotrain_mem.settings.flag_verdicts import GROUPS, REFUSED, REFUSED_WHEN_OFF, Verdict, group_of, only_for_real
from autotrain_mem.settings.knobs import APPLIED, LAUNCHED, NOT_TRLS, knob_names
from autotrain_mem.settings.levers import LADDER
from autotrain_mem.settings.old_names import old_names
from autotrain_mem.support.versions import version_of
from autotrain_mem.types import METHODS, TEXT_COLUMN, Job, Knobs, PythonCall

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
    """But for switches that a method lacks, which no lever of it moves; those that are None move from False only."""
    own_and_offline = {*NOT_TRLS, "activation_offloading", "packing"}
    assert set(knob_names(METHODS[method].knobs, TRL_DEFAULTS)) <= trl_fields(method)
    assert sorted(set(knob_names(METHODS[method].knobs, EVERYTHING_ON)) - own_and_offline - trl_fields(method)) == []
    rows = [row for row in LADDER if row.suits(METHODS[method])]
    absent = {
        row.knobs[0] for row in rows if row.moves_from == (False,) and getattr(TRL_DEFAULTS, row.knobs[0]) is None
    }
    moved = {knob for row in rows for knob in (*row.knobs, *row.also)}
    assert sorted(moved - NOT_TRLS - absent - trl_fields(method)) == []


def test_an_old_name_is_no_flag_of_today_and_what_it_stands_for_is() -> None:
    """Some methods may still have a name that others replaced; a name that is taken is a flag of none."""
    flags = every_trl_field() | set(own_names())
    everywhere = frozenset.intersection(*map(trl_fields, INSTALLED_METHODS))
    same, like, write = (old_names(kind) for kind in ("same", "like", "write"))
    assert sorted(flags & set(same)) == sorted(everywhere & {*like, *write}) == []
    assert len(same | like | write) == len(same) + len(like) + len(write)
    meant = {*same.values(), *" ".join(like.values()).split(), *re.findall(r"--(\w+)", " ".join(write.values()))}
    if HAS_PPO:
        assert meant - flags == {"config_file", "output_file"}, "of accelerate"


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_the_facts_of_a_method_are_those_of_the_installed_trl(method: str) -> None:
    row, fields = METHODS[method], trl_fields(method)
    unheeded = (None, Verdict.IDLE, Verdict.REFUSED)
    heeded = {name for name in fields if verdict(method, name) not in unheeded}  # GKD's config has all of SFT's
    assert row.has_activation_offload == ("activation_offloading" in fields)
    assert ((TEXT_COLUMN,) in row.formats) == ("dataset_text_field" in heeded)
    assert row.is_packable == ("packing" in heeded)
    assert ("num_generations" in row.knobs) == ("num_generations" in fields)
    assert (method_of(method).mini_batches({}) is not None) == ("num_mini_batches" in fields)
    assert ("max_length" in row.knobs) == ("max_length" in fields)
    assert row.reward_model_argument in {None, *fields}
    of_images = {"worst_image_rows", "image_rows_editor", "image_texts"}
    assert of_images & vars(type(method_of(method))).keys() == (of_images if row.reads_images else set())
    assert row.has_trl_command == (importlib.util.find_spec(f"trl.scripts.{method}") is not None)
    assert hasattr(trl, row.trainer) == row.has_trl_command


def test_every_knob_is_a_field_of_some_method_or_ours() -> None:
    of_ppo = set() if HAS_PPO else {"response_length", "local_rollout_forward_batch_size"}
    knobs = {field.name for field in dataclasses.fields(Knobs)}
    assert sorted(knobs - NOT_TRLS - of_ppo - every_trl_field()) == []


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


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_every_flag_of_the_installed_trl_has_a_verdict(method: str) -> None:
    """New names stand in the failure: read what each does, and write it into ``settings/flag_verdicts.py``."""
    assert sorted(name for name in trl_fields(method) if group_of(method, name) is None) == []


def test_every_name_in_the_table_is_a_flag_with_one_verdict_and_no_row_speaks_of_an_unknown_method() -> None:
    named = {name for group in GROUPS for name in group.names}
    newer = OF_TRANSFORMERS_5_23 if version_of(transformers.__version__) < (5, 23) else set()
    assert sorted(named - every_trl_field() - (set() if HAS_PPO else OF_PPO) - newer) == []
    for method in (None, *METHODS):
        rows = [group for group in GROUPS if (method in group.methods if method else not group.methods)]
        counted = Counter(name for group in rows for name in group.names)
        assert [name for name, times in counted.items() if times > 1] == []
    assert {method for group in GROUPS for method in group.methods} <= METHODS.keys()


OF_TRANSFORMERS_5_23 = {"activation_checkpointing", "activation_checkpointing_kwargs"}
OF_PPO = {
    *("num_mini_batches", "total_episodes", "local_rollout_forward_batch_size", "num_sample_generations"),
    *("response_length", "stop_token", "stop_token_id", "sft_model_path", "world_size"),
    *("num_total_batches", "micro_batch_size", "local_batch_size", "batch_size", "local_mini_batch_size"),
    *("mini_batch_size", "model_adapter_name", "ref_adapter_name", "num_ppo_epochs"),
    *("whiten_rewards", "kl_coef", "kl_estimator", "cliprange", "vf_coef", "cliprange_value", "gamma", "lam"),
}


@pytest.mark.skipif(not HAS_PPO, reason="this TRL has no PPO")
def test_those_of_ppo_alone_are_its_configs() -> None:
    others = frozenset().union(*(trl_fields(method) for method in INSTALLED_METHODS if method != "ppo"))
    assert trl_fields("ppo") - others == OF_PPO


def verdict(method: str, name: str) -> Verdict | None:
    group = group_of(method, name)
    return None if group is None else group.verdict


def test_what_refuses_and_what_a_search_moves_agree_with_the_table() -> None:
    """A lever is rehearsed with the value that a plan gives it, and so is what is refused beside shards alone."""
    moved = {knob for row in LADDER for knob in (*row.knobs, *row.also)} - NOT_TRLS
    beside_shards = {name for row in sharding.REFUSED for name in row.names} - {*APPLIED, *LAUNCHED, "save_only_model"}
    for name in moved | beside_shards:
        refused = set() if name in moved else {Verdict.REFUSED}  # by a method that goes with no shards
        assert {verdict(method, name) for method in METHODS} <= {Verdict.REHEARSED, Verdict.IDLE, *refused}, name
    assert {verdict(method, name) for method in METHODS for name in (*REFUSED, *REFUSED_WHEN_OFF)} == {Verdict.REFUSED}


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_a_rehearsal_passes_on_what_is_rehearsed_and_harmless_and_has_its_own_of_what_is_not(method: str) -> None:
    left_out = only_for_real(method)
    given = {name: f"a value for {name}" for name in trl_fields(method)}
    emitted = rehearsal_arguments(Job(method=method, model="m", dataset=None, arguments=given), TRL_DEFAULTS, "folder")
    knobs = {field.name for field in dataclasses.fields(Knobs)}
    kept = {name for name in given.keys() - knobs if emitted.get(name) == given[name]}
    lost = given.keys() - knobs - kept
    assert sorted(name for name in kept if name in left_out) == []
    assert sorted(lost - left_out) == [], "these are said to be passed on"
    changed = method_of(method).rehearsal_changes({}, TRL_DEFAULTS)
    own = (emitted.keys() - given.keys()) | {name for name in emitted if name in given and name not in kept}
    filled_in = {*configs.DIVIDED}  # where it is not given
    assert sorted(({*own, *changed} - knobs) - filled_in - left_out) == [], "which a rehearsal has its own of"


def test_a_scripts_own_metric_is_not_looked_for_in_a_rehearsal_and_a_commands_is() -> None:
    def rehearsed(method: str, call: PythonCall | None) -> bool:
        job = Job(method=method, model="m", dataset=None, arguments={"metric_for_best_model": "f1"}, python_call=call)
        return "metric_for_best_model" in rehearsal_arguments(job, TRL_DEFAULTS, "folder")

    call = PythonCall(path="call", holds_model=False, holds_rows=True, digest="")
    assert rehearsed("sft", None)
    assert not rehearsed("sft", call)
    assert not rehearsed("grpo", None), "whose rewards are named otherwise"
