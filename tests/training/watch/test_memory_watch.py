"""The watch on real trainers of two layers, with built readings: each series shows one sign, healthy ones none."""

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_trainers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig

from autotrain_mem import MemoryWatch, Phase, PhasePeak, Sign
from autotrain_mem.support.host import HostMemory
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.training.watch import callback as module
from autotrain_mem.training.watch import diagnose
from autotrain_mem.training.watch.callback import Batches, Rows
from autotrain_mem.training.watch.diagnose import AGAIN, WINDOW, Sample, SignDetector
from autotrain_mem.types.report import MemoryReading

HOST_BYTES = 64 * GIB
HOST = HostMemory(total_bytes=HOST_BYTES, available_bytes=32 * GIB, source="built")
READING = MemoryReading(
    allocated_bytes=2 * GIB,
    peak_allocated_bytes=3 * GIB,
    reserved_bytes=4 * GIB,
    peak_reserved_bytes=4 * GIB,
    num_alloc_retries=1,
)


class Tracker(TrainerCallback):  # type: ignore[misc]
    """Stands where ``report_to`` puts its own: before what a user gives."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.steps = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.got.append(dict(logs))

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.steps += 100

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker()
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda _: [made])
    return made


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    return said


def watch(**changes: Any) -> MemoryWatch:
    return MemoryWatch(**{"read": lambda: READING, "total_bytes": 24 * GIB, "host": lambda: HOST, **changes})


def lines(folder: Path, name: str = "memory.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def figures(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if name.startswith("memory/")}


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        return {"loss": self.embedding(input_ids).square().mean()}


def toy_trainer(folder: Path, callback: Any, rows: int = 4, **changes: Any) -> Trainer:
    words = {"max_steps": 3, "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    args = TrainingArguments(str(folder), use_cpu=True, per_device_train_batch_size=1, **{**words, **changes})
    data = [{"input_ids": torch.zeros(5 + number, dtype=torch.long), "labels": 0} for number in range(rows)]
    return Trainer(Toy(), args, train_dataset=data, eval_dataset=data[:2], callbacks=[callback])


def test_figures_reach_trackers_and_record(gpt2: Path, tmp_path: Path, tracker: Tracker, warned: list[str]) -> None:
    """TRL's own trainer, evaluation included; peaks of phases stand beside what was predicted."""
    forward = PhasePeak(allocated_bytes=GIB, reserved_bytes=2 * GIB)
    save = PhasePeak(allocated_bytes=GIB // 2, reserved_bytes=2 * GIB)
    predicted, peaks = {Phase.BACKWARD: 3 * GIB, Phase.FORWARD: 2 * GIB}, {Phase.FORWARD: forward, Phase.SAVE: save}
    planned = {"budget": 5 * GIB, "predicted_peak_reserved": None}
    callback = watch(predicted=predicted, phases=lambda: peaks, planned=planned)
    evaluates = {"eval_dataset": tiny_trainers.rows("sft"), "eval_strategy": "steps", "eval_steps": 2}
    trainer = tiny_trainers.trainer(
        "sft", gpt2, tmp_path, build={"callbacks": [callback]}, gradient_accumulation_steps=2, **evaluates
    )
    last = Tracker()
    trainer.add_callback(last)
    trainer.train()
    assert trainer.callback_handler.callbacks[1] is callback
    assert (tracker.steps, last.steps) == (103, 103), "it moved before them, and none was skipped or called twice"
    logged, of_evaluation = [got for got in tracker.got if "loss" in got], tracker.got[2]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [figures(got) for got in logged] == [figures(entry) for entry in history]
    assert figures(logged[0]) == {
        "memory/allocated_gib": 2.0,
        "memory/peak_allocated_gib": 3.0,
        "memory/peak_reserved_gib": 4.0,
        "memory/slack_share": 0.25,
        "memory/retries": 1,
        "memory/predicted_peak_gib": 3.0,
        "memory/budget_gib": 5.0,
        "memory/forward_gib": 1.0,
        "memory/forward_predicted_gib": 2.0,
        "memory/save_gib": 0.5,
        "memory/longest_row_tokens": figures(logged[0])["memory/longest_row_tokens"],
        "memory/longest_batch_tokens": 2 * figures(logged[0])["memory/longest_row_tokens"],
        "memory/tokens_per_second": figures(logged[0])["memory/tokens_per_second"],
        "memory/host_available_gib": 32.0,
    }
    assert "eval_loss" in of_evaluation
    assert not figures(of_evaluation)
    events = [line["event"] for line in lines(tmp_path)]
    assert events == ["start", "sample", "sample", "sample", "end"]
    assert lines(tmp_path)[0]["predicted_bytes"] == {"backward": 3 * GIB, "forward": 2 * GIB}
    first, *samples, last = lines(tmp_path)
    seconds = [0.0, *(sample["seconds"] for sample in samples), last["time"] - first["time"] + 0.1]
    assert seconds == sorted(seconds), "since training began"
    assert lines(tmp_path)[1]["device"]["peak_allocated_bytes"] == 3 * GIB
    assert lines(tmp_path)[-1]["phases"]["save"] == {"allocated_bytes": GIB // 2, "reserved_bytes": 2 * GIB}
    assert not warned


@pytest.mark.parametrize("kind", ["host", "full"])
def test_other_ranks_have_their_own_files_and_signs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sign] = []
    made = watch(on_sign=told.append, host=lambda: HostMemory(total_bytes=100, available_bytes=1, source=""))
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    sign: Any = Sign(kind=kind, step=1, seen="Seen.", advice="Do.", severity=1)  # type: ignore[arg-type]
    monkeypatch.setattr(module.SignDetector, "see", lambda *_: [sign])
    monkeypatch.setattr(TrainingArguments, "process_index", 3)
    state = TrainerState(global_step=1, is_world_process_zero=False)
    made.on_train_begin(args, state, TrainerControl(), model=Toy())
    made.on_log(args, state, TrainerControl(), logs={})
    assert [line["event"] for line in lines(tmp_path, "memory.rank3.jsonl")] == ["start", "sample", "sign"]
    assert told == ([sign] if kind == "full" else [])


def test_the_longest_row_is_of_training_since_the_log_before(tmp_path: Path, tracker: Tracker) -> None:
    """Rows of 5 to 8 tokens in the order of the data; evaluation and what runs without gradients do not count."""
    sequential = {"train_sampling_strategy": "sequential", "logging_steps": 2, "max_steps": 4}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    trainer = toy_trainer(tmp_path, watch(), **evaluates, **sequential)
    hooks = []
    trainer.model.register_forward_hook(lambda module, *_: hooks.append(len(module.embedding._forward_pre_hooks)))
    trainer.train()
    longest = [got["memory/longest_row_tokens"] for got in tracker.got if "loss" in got]
    assert longest == [6, 8]
    assert set(hooks) == {1}
    assert not trainer.model.embedding._forward_pre_hooks, "the model is left as it was"


def test_without_cuda_rows_speed_and_host_are_logged_and_the_host_read_seldom(tmp_path: Path, tracker: Tracker) -> None:
    read: list[int] = []
    toy_trainer(tmp_path, MemoryWatch(host=lambda: (read.append(1), HOST)[1])).train()
    names = {name.removeprefix("memory/") for name in figures(tracker.got[0])}
    assert names == {"longest_row_tokens", "longest_batch_tokens", "tokens_per_second", "host_available_gib"}
    assert len(tracker.got) > len(read) == 1


def test_a_model_that_its_user_compiled_is_compiled_once_and_one_that_will_be_is_left_alone(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    args, other = TrainingArguments(str(tmp_path), use_cpu=True), Toy()
    args.torch_compile = True
    watch().on_train_begin(args, TrainerState(), TrainerControl(), model=other)
    assert not other.embedding._forward_pre_hooks
    torch._dynamo.reset()
    rows, toy, counted = Rows(), Toy(), CompileCounter()
    rows.follow(toy)
    compiled = torch.compile(toy, backend=counted)
    for _ in range(4):
        compiled(torch.zeros(2, 9, dtype=torch.long))
    assert counted.frame_count == 1
    assert rows.take() is None


def test_a_batch_that_is_not_of_tokens_is_not_counted() -> None:
    rows, toy, both = Rows(), Toy(), torch.nn.Module()
    both.policy, both.value_model = toy, Toy()  # as PPO has them
    rows.follow(torch.nn.Linear(2, 2))  # reads no tokens
    rows.follow(both)
    for ids in (torch.zeros(3, dtype=torch.long), torch.zeros(2, 3, 4, dtype=torch.long)):
        toy(ids)
    with torch.no_grad():
        toy(torch.zeros(2, 9, dtype=torch.long))
    assert rows.take() is None
    toy.embedding(input=torch.zeros(2, 7, dtype=torch.long))
    toy(torch.zeros(5, 6, dtype=torch.long))
    assert rows.take() == Batches(rows=2, tokens=7, all_tokens=14 + 30)
    assert rows.take() is None


def test_evaluation_and_saving_do_not_slow_the_training_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 15.0, 25.0, 40.0, 45.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    made = module._Clock()
    made.mark()  # 10: a step is done
    assert made.take() == 15.0
    made.mark()  # 25: the next
    made.leave_out()  # 40: after an evaluation of 15
    assert made.take() == 45.0 - 15.0 - 15.0


def test_a_sign_is_told_once_recorded_and_warned_of_by_default(tmp_path: Path, warned: list[str]) -> None:
    steps = itertools.count()

    def leaking() -> MemoryReading:
        return dataclasses.replace(READING, allocated_bytes=(2048 + 64 * next(steps)) * MIB, num_alloc_retries=0)

    toy_trainer(tmp_path, watch(read=leaking), max_steps=40).train()
    recorded = [line for line in lines(tmp_path) if line["event"] == "sign"]
    assert [line["kind"] for line in recorded] == ["leak"]
    assert warned == [f"{recorded[0]['seen']} {recorded[0]['advice']}"]


@pytest.mark.parametrize("part", ["read", "host", "phases", "on_sign", "settings"])
def test_no_failure_ends_a_run(tmp_path: Path, part: str, warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no such device"))
    parts: dict[str, Any] = {"host": lambda: HostMemory(total_bytes=100, available_bytes=0, source="")}
    if part == "settings":
        monkeypatch.setattr(module, "environment_settings", broken)  # as PYTORCH_ALLOC_CONF that torch would refuse
    else:
        parts[part] = broken
    trainer = toy_trainer(tmp_path, watch(**parts))
    trainer.train()
    assert trainer.state.global_step == 3
    assert [said for said in warned if "no such device" in said] == [
        "the memory watch failed; training continues: RuntimeError: no such device"
    ]


def test_a_full_disk_is_told_once_and_figures_are_logged_all_the_same(
    tmp_path: Path, tracker: Tracker, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = module.JsonLines.write, []

    def full(self: Any, line: Any) -> None:
        if len(refused) < 2:
            refused.append(line)
            raise OSError(28, "No space left on device")
        write(self, line)

    monkeypatch.setattr(module.JsonLines, "write", full)
    toy_trainer(tmp_path, watch()).train()
    assert len(warned) == 1
    assert warned[0].startswith(f"{tmp_path / 'memory.jsonl'} cannot be written; figures are logged all the same")
    assert (tmp_path / "memory.jsonl").read_text().endswith("}\n"), "there was room again"
    assert len([got for got in tracker.got if figures(got)]) == 3


def sample(step: int, **changes: Any) -> Sample:
    """A healthy one: 12 GiB held, 14 at the peak, 15 reserved of 24; a log each 10 seconds."""
    gib = {"allocated_bytes": 12, "peak_allocated_bytes": 14, "reserved_bytes": 15, "peak_reserved_bytes": 15}
    device = {name: size * GIB for name, size in gib.items()} | {"num_alloc_retries": 0}
    others: dict[str, Any] = {"total_bytes": 24 * GIB, "rows": 4, "tokens": 512, "tokens_per_second": 5000.0}
    others |= {"host_available_bytes": HOST_BYTES // 2, "host_total_bytes": HOST_BYTES}
    for name, value in changes.items():
        (device if name in device else others)[name] = value
    return Sample(step=step, seconds=10.0 * step, device=MemoryReading(**device), **others)


def series(length: int, **of_step: Callable[[int], Any]) -> list[Sample]:
    """Healthy, but for what is a function of the step."""
    return [sample(step, **{name: value(step) for name, value in of_step.items()}) for step in range(length)]


def signs(samples: Iterable[Sample], expandable_segments: bool = False) -> list[Sign]:
    detector = SignDetector(expandable_segments)
    return [sign for sample in samples for sign in detector.see(sample)]


def kinds(samples: Sequence[Sample], expandable_segments: bool = False) -> list[str]:
    return [sign.kind for sign in signs(samples, expandable_segments)]


def steady(noise: random.Random) -> list[Sample]:
    return series(
        150,
        allocated_bytes=lambda step: 12 * GIB + int(noise.random() * 2 * GIB),
        tokens_per_second=lambda step: 5000 * noise.uniform(0.7, 1.3),
        host_available_bytes=lambda step: HOST_BYTES // 2 - int(noise.random() * 8 * GIB),
        reserved_bytes=lambda step: int(23 * GIB),
        peak_reserved_bytes=lambda step: 23 * GIB,
        peak_allocated_bytes=lambda step: 21 * GIB,
    )


def mixed_lengths(noise: random.Random) -> list[Sample]:
    """What is left after a step, the peak and what is reserved follow the rows; one row in 50 is 8 times as long."""
    tokens = [4000 if noise.random() < 0.02 else noise.randint(50, 800) for _ in range(200)]
    peaks = [12 * GIB + 2 * MIB * longest for longest in itertools.accumulate(tokens, max)]
    return series(
        200,
        tokens=lambda step: tokens[step],
        allocated_bytes=lambda step: 12 * GIB + tokens[step] * MIB // 2,
        peak_allocated_bytes=lambda step: peaks[step],
        reserved_bytes=lambda step: int(peaks[step] * 1.1),
        peak_reserved_bytes=lambda step: int(peaks[step] * 1.1),
        tokens_per_second=lambda step: 3000 + 2 * tokens[step] ** 0.9,
    )


def warm_up(noise: random.Random) -> list[Sample]:
    """Optimizer state that comes as the weights are first trained, workers that fill their queues."""
    growth, steps = noise.uniform(1.01, 3.0), noise.randint(1, 20)
    grown = [min(1.0, step / steps) + noise.random() / 100 for step in range(120)]
    allocated = [int(4 * GIB * (1 + (growth - 1) * share)) for share in grown]
    most = [*itertools.accumulate(allocated, max)]
    samples = series(
        120,
        allocated_bytes=lambda step: allocated[step],
        peak_allocated_bytes=lambda step: most[step] + GIB,
        reserved_bytes=lambda step: most[step] + 2 * GIB,
        peak_reserved_bytes=lambda step: most[step] + 2 * GIB,
        host_available_bytes=lambda step: HOST_BYTES // 2 - int(8 * GIB * grown[step]),
    )
    return [each for each in samples if each.slack is not None and each.slack < diagnose.SLACK]


@pytest.mark.parametrize("healthy", [steady, mixed_lengths, warm_up])
@given(seed=st.integers(0, 10**9))
@settings(max_examples=30)
def test_a_healthy_run_with_noise_says_nothing(healthy: Callable[[random.Random], list[Sample]], seed: int) -> None:
    assert kinds(healthy(random.Random(seed))) == []


UNMEASURED = [Sample(step=step, seconds=step, tokens_per_second=10.0) for step in range(100)]
FALLING_HOST = series(WINDOW, host_available_bytes=lambda step: HOST_BYTES // 2 - step * 64 * MIB)
SILENT: dict[str, list[Sample]] = {
    "rows that grow longer from step to step leave more after each": series(
        100, tokens=lambda step: 100 + 20 * step, allocated_bytes=lambda step: 12 * GIB + 20 * step * MIB
    ),
    "a device that nobody measures": UNMEASURED,
    "one retry with little slack": series(20, num_alloc_retries=lambda step: int(step >= 10)),
    "slack without retries": series(100, peak_allocated_bytes=lambda step: 8 * GIB),
    "a leak of less than a hundredth per window": series(100, allocated_bytes=lambda step: 12 * GIB + 4 * MIB * step),
    "host memory that would last a night": [
        dataclasses.replace(each, seconds=each.seconds * 10) for each in FALLING_HOST
    ],
}


def test_nothing_is_said_of_what_is_harmless() -> None:
    assert {name: told for name, samples in SILENT.items() if (told := kinds(samples))} == {}


SAID: dict[str, tuple[list[Sample], int, tuple[str, ...]]] = {
    "fragmentation": (
        series(20, num_alloc_retries=lambda step: int(step >= 10), peak_allocated_bytes=lambda step: 10 * GIB),
        10,
        ("release its cache 1 time, while 33% of the 15.0 GiB",),
    ),
    "full": (series(14, num_alloc_retries=lambda step: max(0, step - 9)), 11, ("--gradient_accumulation_steps",)),
    "leak": (
        series(WINDOW, allocated_bytes=lambda step: 12 * GIB + 64 * MIB * step),
        WINDOW - 1,
        # 10 GiB above the peak, at 64 MiB a step
        ("rose from 12.0 GiB to 13.5 GiB within 31 steps", "out of memory in about 160 steps", ".item()"),
    ),
    "host": (FALLING_HOST, WINDOW - 1, ("30.1 GiB of 64.0 GiB is left; at this rate it runs out in about 1.3",)),
    "host at once": (
        [dataclasses.replace(each, host_available_bytes=3 * GIB, host_total_bytes=HOST_BYTES) for each in UNMEASURED],
        0,
        ("3.00 GiB of 64.0 GiB is left",),
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_one_sign_is_said_with_its_figures_and_its_cure_whose_flags_are_trls(name: str) -> None:
    samples, step, words = SAID[name]
    (sign,) = signs(samples)
    assert (sign.kind, sign.step) == (name.split()[0], step)
    assert [each for each in words if each not in sign.message] == []
    assert {*re.findall(r"--(\w+)", sign.advice)} <= {field.name for field in dataclasses.fields(SFTConfig)}
    assert "\n" not in sign.message


def test_expandable_segments_are_advised_under_torchs_name_to_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    fragmented = SAID["fragmentation"][0]
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in signs(fragmented)[0].advice
    assert signs(fragmented, expandable_segments=True)[0].advice.startswith("Lower --per_device_train_batch_size")


@given(seed=st.integers(0, 10**9), noise_mib=st.integers(0, 200), spikes=st.floats(0, 0.1))
@settings(max_examples=30)
def test_a_leak_is_seen_through_noise_and_rare_long_rows(seed: int, noise_mib: int, spikes: float) -> None:
    """20 MiB a step, under up to 200 MiB of noise and now and then 2 GiB more."""
    draw = random.Random(seed)
    tops = [draw.random() * noise_mib * MIB + (2 * GIB if draw.random() < spikes else 0) for _ in range(120)]
    samples = series(120, allocated_bytes=lambda step: int(4 * GIB + 20 * MIB * step + tops[step]))
    assert "leak" in kinds(samples)


def test_a_steady_leak_is_said_again_only_when_it_took_four_times_as_much() -> None:
    told = signs(series(1000, allocated_bytes=lambda step: 12 * GIB + 64 * MIB * step))
    assert {sign.kind for sign in told} == {"leak"}
    assert 3 <= len(told) <= 5
    assert all(later.severity >= AGAIN * earlier.severity for earlier, later in itertools.pairwise(told))
