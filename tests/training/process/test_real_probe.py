"""The real trainer is built and probed on its longest rows, on a simulated card, phase by phase."""

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nouns import TRL_DEFAULTS, divided

from autotrain_mem.cli.word_problems import write_rows
from autotrain_mem.machine.catalog import named
from autotrain_mem.machine.detect import host
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.simulated_run import simulated_device
from autotrain_mem.support import codec
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.support.units import MIB
from autotrain_mem.training import run_folder
from autotrain_mem.training.process import checkpointing, train
from autotrain_mem.training.process import main as process
from autotrain_mem.training.process import probe as probing
from autotrain_mem.training.process.build import PhasePeaks, build, cuda_peaks, real_device
from autotrain_mem.training.process.probe import probe, probe_changes
from autotrain_mem.training.task import Request
from autotrain_mem.training.watch.callback import cuda_reading
from autotrain_mem.types import Job, Knobs, MemoryReading, Phase, PhasePeak, Probe
from autotrain_mem.types.plan_file import check_place

KNOBS = divided(TRL_DEFAULTS, 2, 3, max_length=128, gradient_checkpointing=False)
*HELD, RETRIES = ("allocated_bytes", "reserved_bytes", "num_alloc_retries")
WORDS = [3, 5, 4, 60, 6, 2, 40, 3]
"""Of each row; two rows are far longer than the rest."""


@pytest.fixture(scope="module")
def place(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "tiny").symlink_to(qwen)
    (folder / "splits").mkdir()
    texts = [{"text": "word " * count} for count in WORDS]
    pairs = [{"prompt": "word", "chosen": "word " * n, "rejected": "word " * (n // 2)} for n in WORDS]
    prompts = [{"prompt": "word " * count} for count in WORDS]
    files = {"rows": texts, "splits/train": texts, "splits/test": texts[::-1], "pairs": pairs, "prompts": prompts}
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


def request(place: Path, folder: Path, method: str, data: str, knobs: Knobs, arguments: dict[str, Any]) -> Request:
    job = Job(method=method, model=str(place / "tiny"), dataset=str(place / data), arguments=arguments)
    hardware = named("300MiB")
    return Request(task="probe", job=job, knobs=knobs, hardware=hardware, simulate=True, output_dir=str(folder))


def probed(
    place: Path, folder: Path, method: str = "sft", data: str = "rows.jsonl", gpu: str = "300MiB", **changes: Any
) -> Probe:
    asked = request(place, folder, method, data, changes.pop("knobs", KNOBS), changes)
    answer = probe(replace(asked, hardware=named(gpu)), lambda event: None, simulated_device)
    assert answer["event"] == "probe"
    return codec.from_json(Probe, json.loads(json.dumps(answer["probe"])))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and tokens of every batch that a probed trainer computes a loss of."""
    seen: list[tuple[int, int]] = []
    build = probing.build

    def watched(*args: Any) -> Any:
        trainer = build(*args)
        compute = trainer.compute_loss

        def compute_loss(model: Any, inputs: Mapping[str, Any], *more: Any, **options: Any) -> Any:
            seen.append(tuple(inputs["input_ids"].shape))
            return compute(model, inputs, *more, **options)

        trainer.compute_loss = compute_loss
        return trainer

    monkeypatch.setattr(probing, "build", watched)
    return seen


def test_two_steps_an_evaluation_and_a_save(place: Path, tmp_path: Path, batches: list[tuple[int, int]]) -> None:
    evaluates = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "eval_on_start": True}
    made = probed(place, tmp_path, data="splits", **evaluates)
    assert made.fits
    assert batches == [(2, made.row_tokens)] * (4 + 2)  # two micro-batches a step, two batches of an evaluation
    step = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP]
    assert [*made.phases] == [Phase.LOAD, *step, Phase.EVALUATE, Phase.SAVE]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert made.step_seconds is not None
    assert made.measured is not None
    assert made.measured.peak_allocated_bytes == max(peak.allocated_bytes for peak in made.phases.values())
    assert made.measured.peak_reserved_bytes == max(peak.reserved_bytes for peak in made.phases.values())
    loaded, backward = made.phases[Phase.LOAD], made.phases[Phase.BACKWARD]
    assert 0 < loaded.allocated_bytes < backward.allocated_bytes


def test_a_card_that_is_full_is_an_answer_with_the_phase_and_the_libraries_words(place: Path, tmp_path: Path) -> None:
    made = probed(place, tmp_path, gpu="24MiB")
    assert not made.fits
    assert made.refused.startswith("CUDA out of memory. Tried to allocate")
    assert made.refused_in in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)
    assert list(made.phases)[-1] is made.refused_in
    assert made.measured is not None
    assert made.measured.peak_reserved_bytes <= 24 * MIB


def test_pairs_have_prompt_and_longer_side(place: Path, tmp_path: Path, batches: list[tuple[int, int]]) -> None:
    made = probed(place, tmp_path, "dpo", "pairs.jsonl", save_strategy="no", precompute_ref_log_probs=True)
    assert made.fits
    assert batches == [(2 * 2, made.row_tokens)] * 4
    assert (tmp_path / "model.safetensors").is_file()  # what a training without checkpoints writes at its end


def test_completions_have_their_full_length(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "probe_rewards.py").write_text(
        "def length(completions, completion_ids, **_):\n    return LENGTHS.append("
        "[len(ids) for ids in completion_ids]) or [0.0] * len(completions)\nLENGTHS = []\n"
    )
    knobs = replace(KNOBS, max_length=None, num_generations=2, max_completion_length=3)
    made = probed(
        place, tmp_path, "rloo", "prompts.jsonl", knobs=knobs, reward_funcs=["probe_rewards.length"], save_strategy="no"
    )
    import probe_rewards  # type: ignore[import-not-found]

    assert probe_rewards.LENGTHS == [[3] * 6] * 2
    assert {Phase.GENERATE, Phase.SCORE} <= made.phases.keys()


def test_nothing_of_a_probe_is_seen_outside() -> None:
    loud = {"push_to_hub": True, "load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    quiet = {"report_to": "none", "push_to_hub": False, "load_best_model_at_end": False}
    for arguments, strategies in (
        (loud, {"eval_strategy": "steps", "save_strategy": "steps"}),
        ({"save_strategy": "no"}, {"eval_strategy": "no", "save_strategy": "no"}),
    ):
        changes = probe_changes(Job(method="sft", model="m", dataset=None, arguments=arguments), KNOBS)
        assert changes.items() >= {**quiet, **strategies, "gradient_accumulation_steps": 2}.items()


ADAPTER = replace(TRL_DEFAULTS, use_peft=True, lora_target_modules=("all-linear",), max_length=32)


@pytest.mark.parametrize(("method", "drawn"), [("sft", "lora_A"), ("reward", "score")])
def test_what_is_drawn_before_training_follows_the_seed(place: Path, tmp_path: Path, method: str, drawn: str) -> None:
    def weights(seed: int) -> list[torch.Tensor]:
        torch.seed()  # as a new process begins
        knobs = ADAPTER if method == "sft" else KNOBS
        arguments = {"seed": seed, "use_cpu": True, "bf16": False, "report_to": "none"}
        asked = request(place, tmp_path, method, "rows.jsonl" if method == "sft" else "pairs.jsonl", knobs, arguments)
        seeded = replace(asked, task="train", hardware=host(), simulate=False)
        with real_device(seeded) as device:
            trainer = build(seeded, device.placed)
        return [weight.detach() for name, weight in trainer.model.named_parameters() if drawn in name]

    first, again, other = weights(7), weights(7), weights(8)
    assert first
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_each_phase_has_its_own_peak_and_only_a_full_device_ends_the_one_that_it_was_full_in() -> None:
    """One that comes again has the larger peak; the error ends phases as it passes through."""
    gpu = SimulatedGpu(named("100MiB"))
    peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
    gpu.allocate(1, 20 * MIB)
    for number, size_mib in ((2, 30), (3, 50), (4, 40)):
        peaks.enter_phase(Phase.FORWARD)
        gpu.allocate(number, size_mib * MIB)
        gpu.free(number)
        gpu.empty_cache()
        peaks.enter_phase(Phase.BACKWARD)
    assert peaks.peaks() == {
        Phase.LOAD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
        Phase.FORWARD: PhasePeak(allocated_bytes=70 * MIB, reserved_bytes=70 * MIB),
        Phase.BACKWARD: PhasePeak(allocated_bytes=20 * MIB, reserved_bytes=20 * MIB),
    }
    for error, phase in ((KeyError, Phase.FORWARD), (torch.OutOfMemoryError, Phase.EVALUATE)):
        peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
        peaks.enter_phase(Phase.EVALUATE)
        try:
            raise error
        except error:
            peaks.enter_phase(Phase.FORWARD)
        assert peaks.phase is phase


def test_cuda_is_read_as_torch_flattens_it_and_a_users_callback_reads_the_peaks_since_its_own_last_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimulatedGpu(named("100MiB"))

    def stats(device: Any = None) -> dict[str, Any]:
        """In the form of C++ (``torch/csrc/cuda/Module.cpp: THCPModule_memoryStats``)."""
        read, ends = gpu.memory_stats(), ("current", "peak")
        return {name: {"all": {end: read[f"{name}.all.{end}"] for end in ends}} for name in HELD} | {RETRIES: 2}

    assert cuda_reading() is None, "before CUDA is there"
    for place in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(place, "memory_stats_as_nested_dict", stats)
        monkeypatch.setattr(place, "reset_peak_memory_stats", lambda device=None: gpu.reset_peaks())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with cuda_peaks() as peaks:
        gpu.allocate(1, 30 * MIB)
        gpu.free(1)
        assert cuda_reading() == MemoryReading.from_stats(dict(torch.cuda.memory_stats(0)))
        peaks.enter_phase(Phase.FORWARD)
        gpu.allocate(2, 20 * MIB)
        seen = [torch.cuda.max_memory_allocated(device) // MIB for device in (0, "cuda:0", 1)]
        assert seen == [30, 30, 20], "of another card, what torch itself says"
        gpu.free(2)
        torch.cuda.reset_peak_memory_stats(0)
        peaks.enter_phase(Phase.BACKWARD)
        assert torch.cuda.max_memory_allocated(0) == 0
    assert [peak.allocated_bytes // MIB for peak in peaks.peaks().values()] == [30, 20, 0]


def test_a_traceback_precedes_its_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[str] = []

    def hear(message: Mapping[str, Any]) -> None:
        assert "The trainer raised ValueError: no such row" in str(message)
        logged.append(capsys.readouterr().err)

    request = SimpleNamespace(task="train", output_dir=".", knobs=TRL_DEFAULTS, processes_here=1)
    fail = Mock(side_effect=ValueError("no such row"))
    monkeypatch.setattr(process, "Channel", lambda **_: SimpleNamespace(receive=dict, send=hear))
    monkeypatch.setattr(codec, "from_json", lambda *_: request)
    monkeypatch.setattr(train, "train", fail)
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    process.main()
    assert "ValueError: no such row" in logged[0]


def test_an_error_is_told_as_it_was_raised_and_a_disk_without_room_is_blamed_for_what_torch_could_not_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = str(tmp_path / "moved" / "run")
    raised, denied = ValueError("no such row"), PermissionError(errno.EACCES, "Permission denied")
    assert process._failure(raised, gone).message == "The trainer raised ValueError: no such row"
    assert re.search("run, whose disk has .+ free: .*Permission denied", process._failure(denied, gone).message)
    monkeypatch.setattr(checkpointing, "free_disk_bytes", lambda folder: 1000)
    with pytest.raises(RuntimeError) as unwritten:
        torch.save(torch.ones(1000), "/dev/full")
    assert "could not be written" in process._failure(unwritten.value, str(tmp_path)).message
    assert process._failure(raised, str(tmp_path)).message == "The trainer raised ValueError: no such row"
    disk = os.statvfs(tmp_path)
    values = {name: getattr(disk, name) for name in dir(disk) if name.startswith("f_")}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**values | {"f_files": 400, "f_favail": 0}))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "no inode left" in process._failure(full, str(tmp_path)).message
    assert "no inode left" in run_folder.unwritable(tmp_path, str(full.strerror)).message
    for check in (partial(run_folder.check_folder, resuming=False), check_place):
        with pytest.raises(OutputFolderError, match="no inode left"):
            check(str(tmp_path / "new"))
