"""Tests that arguments which TRL accepts but a training would fail on are refused before a rehearsal."""

import json
import pathlib
from typing import Any

import pytest

from autotrain_mem.checks import table, trl_arguments
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.methods.configs import on_cpu
from autotrain_mem.settings.flag_verdicts import REFUSED, REFUSED_WHEN_OFF
from autotrain_mem.types.findings import collect

pytestmark = pytest.mark.newest


def problems(method: str = "sft", **given: Any) -> list[str]:
    checks = (*table.FLAGS, trl_arguments.evaluation_of_command)
    return [finding.message for finding in collect(checks, Flags(method=method, given=given))]


EVALUATED = {"eval_strategy": "steps"}


@pytest.mark.parametrize(
    ("given", "cured", "said"),
    [
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_would_fail_later_is_refused_and_its_cure_accepted(
    given: dict[str, Any], cured: dict[str, Any], said: str
) -> None:
    (message,) = problems(**given)
    assert said in message
    assert problems(**given | cured) == []


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_rows_without_input_ids_cannot_be_grouped_by_length(method: str) -> None:
    (message,) = problems(method, train_sampling_strategy="group_by_length")
    assert "lack" in message
    assert problems("sft", train_sampling_strategy="group_by_length") == []


@pytest.mark.parametrize("as_file", [False, True])
def test_accelerates_config_is_read_from_json_and_from_a_file(as_file: bool, tmp_path: pathlib.Path) -> None:
    text = json.dumps({"split_batches": True})
    (tmp_path / "accelerator.json").write_text(text, encoding="utf-8")
    (message,) = problems(accelerator_config=str(tmp_path / "accelerator.json") if as_file else text)
    assert "split_batches" in message


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_WHEN_OFF])
def test_each_refused_flag_is_refused_with_its_cure(name: str) -> None:
    must_be_on = name in REFUSED_WHEN_OFF
    (finding,) = collect((*table.FLAGS,), Flags(method="sft", given={name: not must_be_on and "something"}))
    assert finding.message == f"--{name} {'false ' * must_be_on}is not supported yet."
    assert {**REFUSED, **REFUSED_WHEN_OFF}[name] in finding.cure
    assert not must_be_on or problems(**{name: True}) == []


def test_label_smoothing_is_refused_only_with_a_chunked_loss() -> None:
    from trl import SFTConfig

    def refused(method: str = "sft", **given: Any) -> list[Any]:
        flags = Flags(method=method, given={"label_smoothing_factor": 0.1, **given})
        return list(collect((trl_arguments.label_smoothing,), flags))

    is_chunked = SFTConfig("unused", use_cpu=True, report_to="none").loss_type in (None, "chunked_nll")
    assert bool(refused()) is is_chunked
    assert refused(loss_type="nll") == refused("dpo") == []


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
