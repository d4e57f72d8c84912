"""Tests the checks of host memory for loading and offloading, and of disk space for saving."""

import pathlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from nouns import memory_of

from autotrain_mem.machine.detect import HOST_NON_TORCH_BYTES
from autotrain_mem.machine.host_requirements import Load, room_findings
from autotrain_mem.support.errors import HostMemoryError, OutputFolderError
from autotrain_mem.support.host import HostMemory
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Job, MemoryEstimate, Phase
from autotrain_mem.types.findings import Download, Finding, settle

BILLIONS = 1_000_000_000
PLENTY = 10_000 * GIB
OF_RUN = ("processes", "memory", "download")


def rehearsed(**bytes_of: int) -> MemoryEstimate:
    return memory_of(peak_phase=Phase.SAVE, phases={Phase.SAVE: 1}, **bytes_of)


def load(on_cpu: bool = False, parameters: int = 7 * BILLIONS, steps: int | None = None, **words: Any) -> Load:
    of_run = {"memory": rehearsed()} | {name: words.pop(name) for name in OF_RUN if name in words}
    job = Job(method="sft", model="m", dataset=None, arguments=words)
    folder = pathlib.Path("out")
    return Load(job=job, parameters=parameters, on_cpu=on_cpu, output_dir=folder, optimizer_steps=steps, **of_run)


def looked_at(one: Load, *, memory: int = PLENTY, disk: int = PLENTY) -> tuple[Finding, ...]:
    there = HostMemory(total_bytes=memory, available_bytes=memory, source="made up")
    return room_findings(one, memory=there, free_disk_bytes=disk)


def only_below(one: Load, needed: int) -> Finding:
    """Returns the finding with one byte of host memory less than needed; there is none with that byte."""
    assert not looked_at(one, memory=needed)
    (finding,) = looked_at(one, memory=needed - 1)
    return finding


ADAMW = {"saved_model_bytes": 28 * BILLIONS, "saved_state_bytes": 56 * BILLIONS}
FULL = {"use_peft": False, "dtype": "float32"}
"""28 GB of weights, and as much again for each of AdamW's two moments."""


def test_weights_must_fit_into_host_memory_on_a_cpu_for_each_process_that_loads_them() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({"dtype": "float32"}, 28 * BILLIONS),
        ({"dtype": "auto"}, 14 * BILLIONS),
        ({"dtype": "float32", "load_in_8bit": True}, 7 * BILLIONS),
        ({"dtype": "bfloat16", "load_in_4bit": True}, int(3.5 * BILLIONS)),
        ({**FULL, "processes": 4, "sharding": "zero2"}, 4 * 28 * BILLIONS),  # divides what is loaded only then
        ({**FULL, "processes": 4, "sharding": "fsdp2"}, 28 * BILLIONS),  # the first process loads for all
        ({**FULL, "processes": 4}, 28 * BILLIONS),  # sharded perhaps
    ]
    for words, needed in cases:
        with pytest.raises(HostMemoryError, match="host memory"):
            settle([only_below(load(on_cpu=True, **words), needed)])


def test_the_predicted_memory_of_several_simulated_cards_must_fit_into_host_memory() -> None:
    words = {**FULL, "on_cpu": True, "parameters": 1, "processes": 2}
    words["memory"] = replace(rehearsed(pinned_host_bytes=GIB), peak_allocated_bytes=3 * GIB)
    needed = 2 * (3 * GIB + HOST_NON_TORCH_BYTES)
    finding = only_below(load(**words), needed)
    assert (finding.kind, "in 2 processes" in finding.message) == ("error", True)
    assert not looked_at(load(**words | {"processes": 1}), memory=1 * GIB), "a single process is not checked"
    offloads = words | {"sharding": "zero2", "offload_optimizer_device": "cpu"}
    assert only_below(load(**offloads), needed + 2 * GIB).kind == "error"
    assert only_below(load(**offloads | {"processes": 1}), needed // 2 + GIB).kind == "error"


def test_several_loading_processes_are_a_warning_and_offloaded_shards_must_fit() -> None:
    finding = only_below(load(**FULL, processes=4, sharding="ddp"), 4 * 28 * BILLIONS)
    assert (finding.kind, "--sharding fsdp2" in finding.cure) == ("warning", True)
    assert not looked_at(load(**FULL | {"sharding": "fsdp2"}, processes=4), memory=1)
    quantized = {"use_peft": True, "load_in_4bit": True, "sharding": "ddp"}
    assert not looked_at(load(**quantized, processes=4), memory=1), "these are made on the card"
    sharded = {"dtype": "bfloat16", "sharding": "fsdp2", "fsdp_offload_params": True, "processes": 4}
    # float32 under mixed precision: parameter, gradient and two moments, of all processes together
    finding = only_below(load(use_peft=False, memory=rehearsed(**ADAMW), **sharded), 4 * 28 * BILLIONS)
    assert (finding.kind, "--fsdp_offload_params: " in finding.message) == ("error", True)
    assert only_below(load(use_peft=True, **sharded), 14 * BILLIONS).kind == "error"
    whole = only_below(load(**{**quantized, **sharded}), 4 * int(3.5 * BILLIONS))
    assert "fewer --gpus: each process holds the whole 4-bit base" in whole.cure


def test_offloaded_tensors_of_all_processes_must_fit() -> None:
    memory = rehearsed(pinned_host_bytes=6 * GIB, saved_model_bytes=GIB, saved_state_bytes=2 * GIB)
    activations = {"memory": memory, "activation_offloading": True, "use_peft": True}
    finding = only_below(load(**activations), 6 * GIB)
    assert finding.error == "HostMemoryError"
    assert finding.message.startswith("Host memory for --activation_offloading: 6.00 GiB are needed")
    assert "--forbid activation_offloading. Smaller batches" in finding.cure
    assert not looked_at(load(**FULL), memory=1 * GIB), "a card's weights pass through the host one by one"
    memory = rehearsed(pinned_host_bytes=6 * GIB, unpinned_host_bytes=10 * GIB)
    both = activations | {"optimizer_offload": True, "memory": memory}
    finding = only_below(load(**both, parameters=1, processes=2, sharding="ddp"), 2 * 16 * GIB)
    assert "--activation_offloading and --optimizer_offload: " in finding.message
    zero = {"sharding": "zero3", "offload_optimizer_device": "cpu"}
    finding = only_below(load(**FULL, **zero, memory=memory, processes=2), 2 * 16 * GIB)
    assert finding.message.startswith("Host memory for --offload_optimizer_device cpu: 32.0 GiB are needed")
    assert "--use_peft" in finding.cure


def test_a_download_must_fit_into_the_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=20 * GIB))
    at_hand = Download(size_bytes=20 * GIB, folder=str(tmp_path / "not" / "made"))
    assert not looked_at(load(download=at_hand, use_peft=True))
    (finding,) = looked_at(load(download=replace(at_hand, size_bytes=20 * GIB + 1), use_peft=True))
    assert (finding.error, "HF_HOME" in finding.cure) == ("ModelNotFoundError", True)
    one = replace(load(download=at_hand, **FULL, memory=rehearsed(**ADAMW)), output_dir=tmp_path / "run")
    (finding,) = looked_at(one)
    assert "the download and the trained model take 46.1 GiB, and its disk has 20.0 GiB free" in finding.message
    missing = replace(load(parameters=1), output_dir=tmp_path / "a" / "b")
    assert not room_findings(missing), "this machine is read, also for a folder that does not exist"


@pytest.mark.parametrize(
    ("words", "needed"), [({}, 4), ({"save_only_model": True}, 2), ({"optim": "sgd"}, 2), ({"save_strategy": "no"}, 1)]
)
def test_a_checkpoint_must_fit_beside_the_model(words: dict[str, Any], needed: int) -> None:
    """In models: a checkpoint holds one, and AdamW's two moments."""
    memory = rehearsed(**ADAMW | ({"saved_state_bytes": 0} if "optim" in words else {}))
    one = load(**FULL, **words, memory=memory)
    assert not looked_at(one, disk=needed * 28 * BILLIONS)
    (finding,) = looked_at(one, disk=needed * 28 * BILLIONS - 1)
    assert ("--save_only_model" in finding.cure) == (needed > 1)
    with pytest.raises(OutputFolderError, match=None if needed > 1 else r"trained model takes 26\.1 GiB"):
        settle([finding])


def test_too_many_checkpoints_are_a_warning_with_a_limit() -> None:
    for words, steps, kept in (
        ({"max_steps": 5000}, None, 10),
        ({}, 5000, 10),
        ({"save_steps": 0.25}, 5000, 4),
        ({"save_steps": 1000}, 5000, 5),
        ({"save_strategy": "epoch", "num_train_epochs": 6}, None, 6),
        ({"max_steps": 5000, "save_total_limit": 2}, None, 3),
    ):
        one = load(**FULL, steps=steps, **words, memory=rehearsed(**ADAMW))
        checkpoint, model = 3 * 28 * BILLIONS, 28 * BILLIONS
        assert not looked_at(one, disk=kept * checkpoint + model), words
        (finding,) = looked_at(one, disk=(kept - 1) * checkpoint + model)
        assert finding.kind == "warning", words
        assert f"enough for {kept - 1} of {kept} checkpoints" in finding.message, words
        assert f"--save_total_limit {kept - 2}" in finding.cure, words
        limited = load(**FULL, steps=steps, memory=rehearsed(**ADAMW), **{**words, "save_total_limit": kept - 2})
        assert not looked_at(limited, disk=(kept - 1) * checkpoint + model), words
    unknown = load(**FULL, memory=rehearsed(**ADAMW))
    assert not looked_at(unknown, disk=5 * 28 * BILLIONS), "the number of steps is not known"
