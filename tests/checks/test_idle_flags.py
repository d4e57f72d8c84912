"""Flags that TRL takes and does nothing with: a plan says so, and says nothing of those that work."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from autotrain_mem.checks import idle_flags, preflight_checks
from autotrain_mem.checks.preflight_checks import setup_of
from autotrain_mem.trainers.pretrained import load_config
from autotrain_mem.types import Job
from autotrain_mem.types.findings import collect
from autotrain_mem.types.job import PythonCall

pytestmark = pytest.mark.newest

Folder = Callable[[str], pathlib.Path]
Said = Callable[..., list[str]]


@pytest.fixture
def said(model_folder: Folder) -> Said:
    """``said("dpo", label_smoothing_factor=0.1)``: the warnings."""
    folder = str(model_folder("qwen2"))

    def found(method: str = "sft", *, card: tuple[int, int] = (8, 0), from_python: bool = False, **given: Any) -> Any:
        job = Job(method=method, model=folder, dataset=None, arguments=given)
        call = PythonCall(path="nowhere", holds_model=False, holds_rows=False, digest="")
        facts = {"compute_capability": card, "to_train": False, "on_cpu": False, "reads_data": False}
        setup = setup_of(job, load_config(folder), "out", **facts)
        setup = dataclasses.replace(setup, job=dataclasses.replace(job, python_call=call)) if from_python else setup
        return [str(finding) for finding in collect((idle_flags.idle, preflight_checks.tf32), setup)]

    return found


@pytest.mark.parametrize(
    ("method", "given", "works_with"),
    [
        ("dpo", {"label_smoothing_factor": 0.1}, "sft"),
        ("grpo", {"train_sampling_strategy": "group_by_length"}, "sft"),
        ("sft", {"bf16_full_eval": True}, None),
        ("sft", {"do_eval": True}, None),
        ("grpo", {"max_tool_calling_iterations": 3}, None),
    ],
)
def test_a_flag_that_does_nothing_is_named_with_the_method(
    method: str, given: dict[str, Any], works_with: str | None, said: Said
) -> None:
    (warning,) = said(method, **given)
    (name,) = given
    assert warning.startswith(f"--{name} does nothing with {method}: ")
    if works_with is not None:
        assert said(works_with, **given) == []


@pytest.mark.parametrize(
    ("method", "given", "switch"),
    [
        ("grpo", {"vllm_mode": "server"}, {"use_vllm": True}),
        ("dpo", {"ref_model_sync_steps": 64}, {"sync_ref_model": True}),
        ("sft", {"eval_steps": 10}, {"eval_strategy": "steps"}),
        ("sft", {"packing_strategy": "wrapped"}, {"packing": True}),
    ],
)
def test_a_flag_without_its_switch_is_named_with_it(
    method: str, given: dict[str, Any], switch: dict[str, Any], said: Said
) -> None:
    (warning,) = said(method, **given)
    assert f"--{next(iter(switch))} is not given" in warning
    assert said(method, **given, **switch) == []


def test_what_is_trls_default_is_no_news_and_several_of_one_reason_are_one_warning(said: Said) -> None:
    assert said("dpo", label_smoothing_factor=0.0, do_predict=False, per_device_train_batch_size=8) == []
    (warning,) = said(do_eval=True, do_predict=True)
    assert warning.startswith("--do_eval, --do_predict do nothing with sft: ")


def test_what_compute_metrics_reads_is_idle_in_commands_alone(said: Said) -> None:
    assert len(said(prediction_loss_only=True)) == 1
    assert said(prediction_loss_only=True, from_python=True) == []


def test_tf32_is_refused_for_a_card_that_has_none(said: Said) -> None:
    (message,) = said(tf32=True, card=(7, 5))
    assert "compute capability 7.5" in message
    assert said(tf32=True, card=(8, 0)) == []


def test_a_flag_that_nobody_has_looked_at_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_flags, "group_of", lambda method, name: None)
    (warning,) = said(neftune_noise_alpha=5.0)
    assert warning.startswith("--neftune_noise_alpha: newer than this autofit")
