"""All that can be known to go wrong before anything is rehearsed, looked for at once.

Each check answers with findings and never raises: what it cannot find out, such as a hub id that was not downloaded,
it passes over. What is not looked at, because it hurts nobody: the padding side, which every trainer sets where it pads
(on the right ``trl/trainer/sft_trainer.py: DataCollatorForLanguageModeling``, on the left ``grpo_trainer.py:
_generate_single_turn`` and our PPO's tokenizer).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from autotrain_mem.checks.compatibility import flash_package_missing
from autotrain_mem.checks.lora_targets import unmatched_targets
from autotrain_mem.checks.tokenizer import tokenizer_findings
from autotrain_mem.data import load
from autotrain_mem.errors import AutofitError, DatasetError
from autotrain_mem.methods.configs import Configs, on_cpu, undivided
from autotrain_mem.methods.interface import method_of
from autotrain_mem.spec import Job
from autotrain_mem.spec.preflight import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """What the checks look at."""

    job: Job
    filled: Configs
    """The job's arguments in TRL's dataclasses."""
    config: Any
    """The model's."""
    compute_capability: tuple[int, int]
    """Of the card; ASSUMED_CAPABILITY where there is none."""
    to_train: bool
    """Training follows, on this machine; else a plan is made, perhaps for a card elsewhere."""
    on_cpu: bool
    """The training runs on the CPU, with or without a simulated card: packages for GPUs are not needed."""
    reads_data: bool


def preflight(flight: Flight) -> tuple[Finding, ...]:
    """Every finding, errors and warnings, in the order of the checks."""
    findings: list[Finding] = []
    for check in (_precision, _attention, _data_and_tokenizer, _lora):
        with contextlib.suppress(*_UNEXPECTED):
            findings += check(flight)
    return tuple(findings)


_UNEXPECTED = (Exception,)
"""A tokenizer, a template or a model's own code may raise anything; the rehearsal that follows will say what."""

_Check = Callable[[Flight], Iterator[Finding]]


def make_flight(job: Job, config: Any, output_dir: str, **facts: Any) -> Flight:
    """Args: ``facts``: the rest of :class:`Flight`."""
    arguments = {**on_cpu(undivided(job.arguments)), "output_dir": output_dir, "report_to": "none"}
    return Flight(job=job, filled=method_of(job.method).configs(arguments), config=config, **facts)


BF16_FROM = (8, 0)
"""``planner.precision.BF16_FROM``, where the source stands."""


def _precision(flight: Flight) -> Iterator[Finding]:
    """transformers takes bf16 on every card that can emulate it (``training_args.py: _validate_args`` asks
    ``torch.cuda.is_bf16_supported()``, which counts emulation)."""
    given = flight.job.arguments
    if given.get("bf16") and flight.compute_capability < BF16_FROM and not given.get("use_cpu"):
        major, minor = flight.compute_capability
        yield Finding(
            kind="warning",
            message=f"--bf16 is emulated on this card (compute capability {major}.{minor}): no tensor cores compute "
            "it, and no fused attention kernel takes it.",
            cure="Leave --bf16 away, or give --fp16.",
        )


def _attention(flight: Flight) -> Iterator[Finding]:
    name = str(flight.job.arguments.get("attn_implementation") or "")
    command = flash_package_missing(name)
    if command and flight.to_train and not flight.on_cpu:
        yield Finding(
            kind="error",
            error="MissingExtraError",
            message=f"--attn_implementation {name} needs a package to train that is not installed here.",
            cure=f"{command}, or leave it away: sdpa, the default, has a flash kernel of its own.",
        )


def _data_and_tokenizer(flight: Flight) -> Iterator[Finding]:
    rows = None
    if flight.reads_data:
        try:
            splits = load.load(flight.job, flight.filled)
            rows = splits[flight.filled.script.dataset_train_split]
        except DatasetError as error:
            yield _unseen(flight.job) if _does_without(flight, error) else Finding.of(error)
        except AutofitError as error:
            yield Finding.of(error)
    with contextlib.suppress(*_UNEXPECTED):
        yield from tokenizer_findings(flight.job, flight.filled, flight.config, rows)


def _does_without(flight: Flight, error: DatasetError) -> bool:
    """Whether a plan can be made all the same: nothing is trained here, and the tokens of a row are given."""
    return not flight.to_train and flight.job.row_tokens is not None and load.was_out_of_reach(error)


def _unseen(job: Job) -> Finding:
    rows = f"prompts of {job.row_tokens} tokens" if job.is_online else f"rows that fill max_length, {job.row_tokens}"
    return Finding(
        kind="warning",
        error="DatasetNotFoundError",
        message=f"The dataset {load.dataset_name(job)} could not be looked at, since the hub cannot be reached: "
        f"planned for {rows}.",
        cure="Where it can be reached, the plan heeds how long the rows are.",
    )


def _lora(flight: Flight) -> Iterator[Finding]:
    if flight.job.handed is not None:
        return  # PEFT looks at the script's own config, and at its model
    if flight.job.arguments.get("use_peft") and flight.job.arguments.get("lora_target_modules"):
        yield from unmatched_targets(flight.job, flight.filled, flight.config)
