"""The GPUs of a vLLM server are budgeted beside those that train, and its command is written."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem.machine.catalog import named
from autotrain_mem.methods.parameter_count import kv_cache
from autotrain_mem.planning.rehearsals import Lengths, Subject
from autotrain_mem.planning.vllm_server import check_colocated, vllm_server
from autotrain_mem.report.plan_view import vllm_server as shown
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.types import DataProfile, Hardware, Job, ModelFacts, Plan, Topology, VllmServer
from tests.nouns import TRL_DEFAULTS, divided
from tests.report.report_examples import GRPO_KNOBS, GRPO_PLAN

QWEN_7B = ModelFacts(
    context_length=32768, is_quantized=False, parameters=7_615_616_512, kv_heads=4, kv_head_elements=2 * 28 * 128
)
KNOBS = divided(GRPO_KNOBS, 8, 4, processes=6, max_completion_length=512, num_generations=8)


def server(card: str = "a100-40gb", facts: ModelFacts = QWEN_7B, nodes: int = 1, **given: Any) -> VllmServer | None:
    job = Job(method="grpo", model="Qwen/Qwen2.5-7B", dataset=None, arguments={"use_vllm": True, **given})
    hardware = replace(named(card), topology=Topology(nodes=nodes, devices=6))
    return vllm_server(subject(job, hardware, facts), KNOBS)


def subject(job: Job, hardware: Hardware, facts: ModelFacts) -> Subject:
    """Prompts of 256 tokens, which no worker is asked about."""
    nobody: Any = None
    lengths = Lengths(longest=256)
    return Subject(
        workers=nobody, store=nobody, job=job, defaults=KNOBS, hardware=hardware, facts=facts, lengths=lengths
    )


def test_rows_to_evaluate_stay_in_proportion_to_rehearsed_rows_and_are_cut_and_packed_like_them() -> None:
    counted = subject(Job(method="sft", model="m", dataset=None), named("l4"), QWEN_7B)
    for longest_evaluated, packing, tokens, expected in (
        *((529, False, 891, 529), (529, False, 100, 60), (2000, False, 891, 891)),
        *((529, True, 512, None), (0, False, 891, None)),
    ):
        profile = DataProfile(rows_by_length={891: 1}, longest_evaluated=longest_evaluated)
        known = replace(counted, lengths=Lengths(longest=max(891, longest_evaluated), profile=profile))
        knobs = replace(TRL_DEFAULTS, max_length=891, packing=packing)
        assert known.rehearsed_job(knobs, tokens).evaluated_length == expected


def served(card: str = "a100-40gb", **given: Any) -> VllmServer:
    found = server(card, vllm_mode="server", **given)
    assert found is not None
    return found


def test_only_server_mode_has_a_server_and_a_model_of_unknown_size_no_budget() -> None:
    for given in ({}, {"vllm_mode": "colocate"}, {"vllm_mode": "server", "use_vllm": False}):
        assert server(**given) is None
    assert served(facts=ModelFacts(context_length=None, is_quantized=False)).fits


def test_it_takes_the_gpus_after_those_that_train_and_none_of_this_machine_on_another() -> None:
    found = served(vllm_tensor_parallel_size=2)
    assert found.command == (
        "CUDA_VISIBLE_DEVICES=6,7 trl vllm-serve --model Qwen/Qwen2.5-7B --tensor_parallel_size 2 --max_model_len 768 "
        "--gpu_memory_utilization 0.9"
    )
    assert found.weights_bytes == 7_615_616_512  # in half precision, and a half on each
    assert found.token_bytes == 2 * (2 * 28 * 128) * 2  # two of the four heads
    assert found.completion_bytes == 768 * 28672
    four, eight = (served(vllm_tensor_parallel_size=gpus).token_bytes for gpus in (4, 8))
    assert four == eight, "a head is never cut"
    for given in ({"vllm_server_host": "10.0.0.7"}, {"vllm_server_base_url": "http://10.0.0.7:8000"}, {"nodes": 2}):
        found = served(**given)
        assert (found.first_gpu, found.command[:15]) == (None, "trl vllm-serve ")


def test_weights_that_no_card_holds_are_refused_with_the_number_of_gpus_that_do() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        served("rtx3060")
    assert caught.value.message.startswith("14.2 GiB of weights and 42.0 MiB of KV cache for one completion do not fit")
    assert caught.value.hint.startswith("Give --vllm_tensor_parallel_size 2: 2 GPUs hold 7.09 GiB of weights each")
    served("rtx3060", vllm_tensor_parallel_size=2)


def test_trls_own_parser_takes_the_command_with_what_is_given_of_the_server() -> None:
    from trl.scripts.vllm_serve import make_parser

    given = {"vllm_server_port": 8123, "vllm_gpu_memory_utilization": 0.8, "vllm_max_model_length": 2048}
    words = shlex.split(served(**given).command)
    (arguments,) = make_parser().parse_args_and_config(args=words[words.index("vllm-serve") + 1 :])
    assert (arguments.model, arguments.tensor_parallel_size) == ("Qwen/Qwen2.5-7B", 1)
    assert (arguments.max_model_len, arguments.port, arguments.gpu_memory_utilization) == (2048, 8123, 0.8)


def test_a_plan_shows_the_server_and_keeps_it(tmp_path: Path) -> None:
    plan = replace(GRPO_PLAN, vllm_server=(found := served(vllm_tensor_parallel_size=2)))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").vllm_server == found
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["vllm_server"]["command"] == found.command
    placed = "a server on GPUs 6,7, while 0 to 5 train; 7.09 GiB of weights each"
    assert (shown(plan), shown(GRPO_PLAN)) == ((placed, f"start it first: {found.command}"), ())


def test_the_kv_cache_of_a_token_is_counted_where_all_layers_keep_keys_and_values() -> None:
    config = {"hidden_size": 896, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2}
    for changed, expected in (
        *(({}, (2, 2 * 24 * 64)), ({"num_key_value_heads": None}, (14, 2 * 24 * 64))),
        *(({"head_dim": 128}, (2, 2 * 24 * 128)), ({"kv_lora_rank": 512}, None), ({"num_hidden_layers": None}, None)),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (2, 2 * 24 * 64)),
        ({"layer_types": ["linear_attention", "full_attention"]}, None),
    ):
        assert kv_cache(config | changed) == expected, changed


def colocated(card: str = "a100-80gb", devices: int = 1, **given: Any) -> None:
    """Raises DoesNotFitError if the engine's share of the card is too small."""
    job = Job(method="grpo", model="Qwen/Qwen2.5-7B", dataset=None, arguments={"use_vllm": True, **given})
    hardware = replace(named(card), topology=Topology(devices=devices))
    check_colocated(subject(job, hardware, QWEN_7B), KNOBS)


def test_a_share_that_holds_weights_and_a_completion_is_enough_and_a_server_has_none() -> None:
    colocated()
    for given in ({"vllm_mode": "server"}, {"use_vllm": False}, {"vllm_gpu_memory_utilization": 0.9}):
        colocated("rtx4090", **given)
    colocated("rtx4090", devices=4, vllm_tensor_parallel_size=4)


def test_a_share_that_does_not_hold_the_weights_is_refused_before_they_are_loaded() -> None:
    larger = ["--vllm_gpu_memory_utilization 0.74", "--vllm_tensor_parallel_size 4", "--vllm_mode server"]
    for card, devices, cures in (("rtx4090", 4, larger), ("rtx3060", 1, ["--vllm_mode server"])):
        with pytest.raises(DoesNotFitError, match=r"14\.2 GiB of weights and 42\.0 MiB of KV cache") as caught:
            colocated(card, devices)
        hints = caught.value.hint.split("; ")
        assert [hint[: len(cure)] for hint, cure in zip(hints, cures, strict=True)] == cures
