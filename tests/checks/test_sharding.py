"""Tests what does not work with sharding, or with shared tokens."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotrain_mem.checks import sharding, table
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.checks.model_files import ModelOnCard
from autotrain_mem.search.levels import levels
from autotrain_mem.search.shardings import shared
from autotrain_mem.support import codec
from autotrain_mem.types import Job
from autotrain_mem.types.findings import collect
from tests.search.synthetic_memory import ONLINE, PPO, TRL, space_of


def problems(method: str = "sft", **given: Any) -> list[str]:
    return [finding.message for finding in collect(table.FLAGS, Flags(method=method, given=given))]


@pytest.mark.parametrize(
    "given",
    [
        {"load_in_8bit": True, "use_peft": True},
        {"optim": "adamw_8bit"},
        {"optim": "paged_adamw_32bit"},
        {"optimizer_offload": True},
        {"save_only_model": True},
        {"activation_offloading": True},
    ],
    ids=str,
)
def test_what_needs_whole_models_is_refused_with_shards_and_not_with_ddp(given: dict[str, Any]) -> None:
    (message,) = problems(**given, sharding="fsdp2")
    assert message.startswith(f"--{next(iter(given))} ")
    assert "does not work with --sharding fsdp2: " in message
    assert problems(**given, sharding="ddp") == problems(**given) == []


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
    defaults = {"sft": TRL, "dpo": TRL, "grpo": ONLINE, "ppo": PPO}[method]
    four = replace(defaults, processes=4 * nodes, sharding="ddp")
    space = replace(space_of(method=method, defaults=four, longest=100), nodes=nodes)
    ways = [way for level in levels(space) for setting in level.settings for way in shared(space, setting)]
    assert {way.sharding for way in ways} > {"ddp"} or method == "ppo"
    for way in ways:
        assert problems(method, **codec.to_json(way)) == [], way


@pytest.mark.parametrize(
    ("way", "given", "said"),
    [
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
    ],
    ids=str,
)
def test_what_does_not_work_with_shared_tokens_is_refused_with_an_alternative(
    way: str, given: dict[str, Any], said: str
) -> None:
    refused = collect(table.FLAGS, Flags(method="sft", given={way: 4, **given}))
    assert said in next(each for each in refused if f"--{way}" in each.message).cure
    assert way == "sp_size" or len([each for each in refused if "--cp_size 4" in each.message]) == 1
    assert problems(**given, **{way: 1}) == problems(**given)


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


@pytest.mark.parametrize(
    ("heads", "keys", "size", "cure"),
    [
        (32, 8, 8, None),
        (32, 8, 16, None),  # keys are given to two GPUs each
        (14, 2, 4, "Give --sp_size 2"),
        (15, 5, 2, "Remove --sp_size"),
    ],
)
def test_gpus_must_divide_the_heads(heads: int, keys: int, size: int, cure: str | None) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": keys}
    cures = [each for _, each in shared_attention(config, sp_size=size)]
    assert [each.startswith(cure or "never") for each in cures] == ([True] if cure else [])


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"layer_types": ["full_attention"], "sliding_window": 4096}, None),
        ({}, None),
    ],
)
def test_only_full_attention_can_share_tokens(config: dict[str, Any], kinds: str | None) -> None:
    reasons = [reason for reason, _ in shared_attention(config, cp_size=2)]
    assert [kinds in reason for reason in reasons] == ([True] if kinds else [])
    assert not shared_attention(config)
