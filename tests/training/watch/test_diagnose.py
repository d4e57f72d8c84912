"""Series are built, so that each says one thing; series of healthy runs, with noise of every seed, say nothing."""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.training.watch import diagnose as module
from autotrain_mem.training.watch.diagnose import AGAIN, WINDOW, Sample, Sign, SignDetector
from autotrain_mem.types.report import MemoryReading

TOTAL = 24 * GIB
HOST = 64 * GIB


def sample(step: int, **changes: Any) -> Sample:
    """A healthy one: 12 GiB held, 14 at the peak, 15 reserved of 24; a log each 10 seconds."""
    gib = {"allocated_bytes": 12, "peak_allocated_bytes": 14, "reserved_bytes": 15, "peak_reserved_bytes": 15}
    device = {name: size * GIB for name, size in gib.items()} | {"num_alloc_retries": 0}
    others: dict[str, Any] = {"total_bytes": TOTAL, "rows": 4, "tokens": 512, "tokens_per_second": 5000.0}
    others |= {"host_available_bytes": HOST // 2, "host_total_bytes": HOST}
    for name, value in changes.items():
        (device if name in device else others)[name] = value
    return Sample(step=step, seconds=10.0 * step, device=MemoryReading(**device), **others)


def series(length: int, **of_step: Callable[[int], Any]) -> list[Sample]:
    """Healthy, but for what is a function of the step."""
    return [sample(step, **{name: value(step) for name, value in of_step.items()}) for step in range(length)]


def signs(samples: Iterable[Sample], expandable_segments: bool = False) -> list[Sign]:
    """All that a whole series says, in the order in which it could be said."""
    detector = SignDetector(expandable_segments)
    return [sign for sample in samples for sign in detector.see(sample)]


def kinds(samples: Sequence[Sample], expandable_segments: bool = False) -> list[str]:
    return [sign.kind for sign in signs(samples, expandable_segments)]


def steady(noise: random.Random) -> list[Sample]:
    return series(
        150,
        allocated_bytes=lambda step: 12 * GIB + int(noise.random() * 2 * GIB),
        tokens_per_second=lambda step: 5000 * noise.uniform(0.7, 1.3),
        host_available_bytes=lambda step: HOST // 2 - int(noise.random() * 8 * GIB),
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
        host_available_bytes=lambda step: HOST // 2 - int(8 * GIB * grown[step]),
    )
    return [each for each in samples if each.slack is not None and each.slack < module.SLACK]


@pytest.mark.parametrize("healthy", [steady, mixed_lengths, warm_up])
@given(seed=st.integers(0, 10**9))
@settings(max_examples=30)
def test_a_healthy_run_with_noise_says_nothing(healthy: Callable[[random.Random], list[Sample]], seed: int) -> None:
    assert kinds(healthy(random.Random(seed))) == []


def test_a_run_whose_device_nobody_measures_is_only_watched_for_its_host() -> None:
    bare = [Sample(step=step, seconds=step, tokens_per_second=10.0) for step in range(100)]
    assert kinds(bare) == []
    poor = [dataclasses.replace(each, host_available_bytes=GIB, host_total_bytes=HOST) for each in bare]
    assert kinds(poor) == ["host"]


FALLING_HOST = series(WINDOW, host_available_bytes=lambda step: HOST // 2 - step * 64 * MIB)
SILENT: dict[str, list[Sample]] = {
    "rows that grow longer from step to step leave more after each": series(
        100, tokens=lambda step: 100 + 20 * step, allocated_bytes=lambda step: 12 * GIB + 20 * step * MIB
    ),
    "one retry with little slack": series(20, num_alloc_retries=lambda step: int(step >= 10)),
    "slack without retries": series(100, peak_allocated_bytes=lambda step: 8 * GIB),
    "a leak of less than a hundredth per window": series(100, allocated_bytes=lambda step: 12 * GIB + 4 * MIB * step),
    "host memory that would last a night": [
        dataclasses.replace(each, seconds=each.seconds * 10) for each in FALLING_HOST
    ],
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of(name: str) -> None:
    assert kinds(SILENT[name]) == []


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
    "host at once": (series(3, host_available_bytes=lambda step: 3 * GIB), 0, ("3.00 GiB of 64.0 GiB is left",)),
}


@pytest.mark.parametrize("name", SAID)
def test_one_sign_is_said_with_its_figures_and_its_cure(name: str) -> None:
    samples, step, words = SAID[name]
    (sign,) = signs(samples)
    assert (sign.kind, sign.step) == (name.split()[0], step)
    assert [each for each in words if each not in sign.message] == []


def test_expandable_segments_are_advised_under_the_name_that_torch_reads_to_who_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_every_flag_in_the_advice_is_one_of_trls() -> None:
    from trl import SFTConfig

    told = [sign for samples, *_ in SAID.values() for sign in signs(samples)]
    assert {sign.kind for sign in told} == {"fragmentation", "full", "leak", "host"}
    flags = {flag for sign in told for flag in re.findall(r"--(\w+)", sign.advice)}
    assert flags <= {field.name for field in dataclasses.fields(SFTConfig)}
    assert not [sign for sign in told if "\n" in sign.message]
