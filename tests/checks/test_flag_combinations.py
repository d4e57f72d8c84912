"""Tests what does not work with sharding, with shared tokens, or with TRL as it is installed."""

import json
import pathlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.checks import sharding, table, trl_arguments
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.methods.configs import on_cpu
from autotrain_mem.search.levels import levels
from autotrain_mem.search.shardings import shared
from autotrain_mem.settings.flag_verdicts import REFUSED, REFUSED_WHEN_OFF
from autotrain_mem.support import codec
from autotrain_mem.types import Job
from autotrain_mem.types.findings import collect
from tests.search.synthetic_memory import ONLINE, PPO, TRL, space_of


def problems(method: str = "sft", **given: Any) -> list[str]:
    checks = (*table.FLAGS, trl_arguments.evaluation_of_command)
    return [finding.message for finding in collect(checks, Flags(method=method, given=given))]


def test_what_needs_whole_models_is_refused_with_shards_and_not_with_ddp() -> None:
    optimizers: list[dict[str, Any]] = [{"optim": "adamw_8bit"}, {"optim": "paged_adamw_32bit"}]
    names = ("optimizer_offload", "save_only_model", "activation_offloading", "precompute_ref_log_probs")
    switches = [{name: True} for name in names]
    for given in ({"load_in_8bit": True, "use_peft": True}, *optimizers, *switches):
        (message,) = problems(**given, sharding="fsdp2")
        assert message.startswith(f"--{next(iter(given))} ")
        assert "does not work with --sharding fsdp2: " in message
        assert problems(**given, sharding="ddp") == problems(**given) == [], given


@pytest.mark.parametrize("kind", sharding.FSDP)
def test_supported_combinations_are_accepted(kind: str) -> None:
    assert problems(optim="adamw_torch_fused", use_peft=True, load_in_4bit=True, sharding=kind) == []
    assert problems("grpo", sharding=kind) == []
    assert problems("grpo", use_vllm=True, sharding=kind) == problems("gkd", sharding=kind) == []
    (message,) = problems("ppo", sharding=kind)
    assert "does not work with PPO" in message


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "ppo"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_search_combines_only_what_is_accepted(method: str, nodes: int) -> None:
    defaults = {"sft": TRL, "dpo": replace(TRL, precompute_ref_log_probs=False), "grpo": ONLINE, "ppo": PPO}[method]
    four = replace(defaults, processes=4 * nodes, sharding="ddp")
    space = replace(space_of(method=method, defaults=four, longest=100), nodes=nodes)
    ways = [way for level in levels(space) for setting in level.settings for way in shared(space, setting)]
    assert {way.sharding for way in ways} > {"ddp"} or method == "ppo"
    for way in ways:
        assert problems(method, **codec.to_json(way)) == [], way


def test_what_does_not_work_with_shared_tokens_is_refused_with_an_alternative() -> None:
    for way, given, said in (
        ("cp_size", {"packing": True}, "--packing false"),
        ("cp_size", {"use_liger_kernel": True}, "--use_liger_kernel false"),
        ("cp_size", {"fp16": True}, "--bf16"),
        ("cp_size", {"attn_implementation": "flash_attention_2"}, "sdpa"),
        ("cp_size", {"pad_to_multiple_of": 6}, "--pad_to_multiple_of 8"),
        ("cp_size", {"sharding": "zero3"}, "--sharding fsdp2"),
        ("cp_size", {"sharding": "ddp"}, "--sharding fsdp2"),
        ("sp_size", {"packing": True}, "--packing false"),
        ("sp_size", {"attn_implementation": "eager"}, "sdpa"),
        ("sp_size", {"pad_to_multiple_of": 6}, "--pad_to_multiple_of 4"),
        ("sp_size", {"sharding": "fsdp2"}, "--sharding zero3"),
        ("sp_size", {"cp_size": 2}, "Remove --sp_size"),
    ):
        refused = collect(table.FLAGS, Flags(method="sft", given={way: 4, **given}))
        assert said in next(each for each in refused if f"--{way}" in each.message).cure
        assert way == "sp_size" or len([each for each in refused if "--cp_size 4" in each.message]) == 1
        assert problems(**given, **{way: 1}) == problems(**given), given


@pytest.mark.parametrize("method", ["dpo", "ppo"])
def test_tokens_are_shared_only_in_sft(method: str) -> None:
    assert "is for SFT" in problems(method, cp_size=2)[0]
    assert "is for SFT" in problems(method, sp_size=2)[0]
    assert problems(cp_size=2) == problems(cp_size=2, sharding="fsdp2", pad_to_multiple_of=64) == []
    flash = {"attn_implementation": "flash_attention_2", "sharding": "zero2", "bf16": False}
    assert problems(sp_size=2) == problems(sp_size=2, **flash) == []


def shared_attention(fields: dict[str, Any], **arguments: Any) -> list[Any]:
    config = SimpleNamespace(**fields, get_text_config=lambda: config)
    job = Job(method="sft", model="tiny", dataset=None, arguments=arguments)
    return [*sharding.shared_attention(ModelOnCard(job=job, config=config, compute_capability=(8, 0)))]


def heads(count: int, keys: int) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": keys}


def test_gpus_must_divide_the_heads_and_only_full_attention_can_share_tokens() -> None:
    for config, way, said in (
        (heads(32, 8), {"sp_size": 8}, ""),
        (heads(32, 8), {"sp_size": 16}, ""),  # keys are given to two GPUs each
        (heads(14, 2), {"sp_size": 4}, "; Give --sp_size 2"),
        (heads(15, 5), {"sp_size": 2}, "; Remove --sp_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {"cp_size": 2}, "sliding_attention"),
        ({"sliding_window": 4096}, {"cp_size": 2}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, {"cp_size": 2}, "linear_attention"),
        ({"layer_types": ["full_attention"], "sliding_window": 4096}, {"cp_size": 2}, ""),
        ({}, {"cp_size": 2}, ""),
    ):
        assert [said in f"{reason}; {cure}" for reason, cure in shared_attention(config, **way)] == [True] * bool(said)
        assert not shared_attention(config), config


# What TRL accepts and a training would fail on is refused before a rehearsal.

EVALUATED = {"eval_strategy": "steps"}


@pytest.mark.newest
def test_what_would_fail_later_is_refused_and_its_cure_accepted() -> None:
    for given, cured, said in (
        ({"dataloader_prefetch_factor": 2}, {"dataloader_num_workers": 2}, "needs data loader workers"),
        ({"dataloader_multiprocessing_context": "spawn"}, {"dataloader_num_workers": 2}, "needs data loader workers"),
        ({"eval_on_start": True}, EVALUATED, "no rows to evaluate"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, EVALUATED, "never saves a model"),
        ({"save_strategy": "best", **EVALUATED}, {"metric_for_best_model": "loss"}, "needs --metric_for_best_model"),
        ({"include_for_metrics": ["inputs"]}, {"include_for_metrics": []}, "which a command does not have"),
        ({"accelerator_config": {"split_batches": True}}, {"accelerator_config": {}}, "fewer rows than planned"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            "overrides",
        ),
        ({"tf32": True, "use_cpu": True}, {"use_cpu": False}, "only GPUs have TF32"),
        ({"cache_implementation": "offloaded_static"}, {"cache_implementation": "static"}, "not supported yet"),
        (
            {"torch_compile_mode": "reduce-overhead"},
            {"torch_compile_mode": "max-autotune-no-cudagraphs"},
            "CUDA graphs",
        ),
        ({"torch_compile_backend": "cudagraphs"}, {"torch_compile_backend": "inductor"}, "CUDA graphs"),
        ({"sync_ref_model": True, "sharding": "zero3"}, {"sharding": "zero2"}, "the whole policy and reference"),
    ):
        (message,) = problems(**given)
        assert said in message
        assert problems(**given | cured) == [], given


@pytest.mark.newest
def test_rows_without_input_ids_cannot_be_grouped_by_length() -> None:
    for method in ("dpo", "kto", "reward"):
        (message,) = problems(method, train_sampling_strategy="group_by_length")
        assert "lack" in message, method
    assert problems("sft", train_sampling_strategy="group_by_length") == []


@pytest.mark.newest
def test_accelerates_config_is_read_from_json_and_from_a_file(tmp_path: pathlib.Path) -> None:
    text, path = json.dumps({"split_batches": True}), tmp_path / "accelerator.json"
    path.write_text(text, encoding="utf-8")
    for given in (text, str(path)):
        (message,) = problems(accelerator_config=given)
        assert "split_batches" in message
    (message,) = problems("grpo", accelerator_config={"dispatch_batches": True})
    assert "cannot join prompts" in message
    assert problems("ppo", accelerator_config={"dispatch_batches": True}) == []


@pytest.mark.newest
@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_WHEN_OFF])
def test_each_refused_flag_is_refused_with_its_cure(name: str) -> None:
    must_be_on = name in REFUSED_WHEN_OFF
    (finding,) = collect((*table.FLAGS,), Flags(method="sft", given={name: not must_be_on and "something"}))
    assert finding.message == f"--{name} {'false ' * must_be_on}is not supported yet."
    assert {**REFUSED, **REFUSED_WHEN_OFF}[name] in finding.cure
    assert not must_be_on or problems(**{name: True}) == []


@pytest.mark.newest
def test_label_smoothing_is_refused_only_with_a_chunked_loss() -> None:
    from trl import SFTConfig

    def refused(method: str = "sft", **given: Any) -> list[Any]:
        flags = Flags(method=method, given={"label_smoothing_factor": 0.1, **given})
        return list(collect((trl_arguments.label_smoothing,), flags))

    is_chunked = SFTConfig("unused", use_cpu=True, report_to="none").loss_type in (None, "chunked_nll")
    assert bool(refused()) is is_chunked
    assert refused(loss_type="nll") == refused("dpo") == []


@pytest.mark.newest
def test_flags_for_cards_and_data_loader_workers_are_accepted_without_them() -> None:
    """TRL's own dataclasses refuse them on a CPU, where a plan for a card is made."""
    given = {
        "tf32": True,
        "dataloader_num_workers": 2,
        "dataloader_prefetch_factor": 2,
        "dataloader_persistent_workers": True,
        "torch_compile_backend": "inductor",
    }
    assert collect((trl_arguments.accepted_by_trl,), Flags(method="sft", given=given)) == ()
    assert on_cpu(given) == {"use_cpu": True, "dataloader_num_workers": 0}
