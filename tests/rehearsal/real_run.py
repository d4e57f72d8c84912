"""Rehearses a training and runs it for real, side by side: one job, fake tensors or true ones; and compares the two.

A trainer may also be made around a model object, as a script would make it, or in several processes that talk through
gloo.
"""

import itertools
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bitsandbytes.nn import Params4bit
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import GenerationMixin
from trl import SFTConfig, SFTTrainer
from trl.trainer import distillation_trainer, grpo_trainer, rloo_trainer

from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, stub_tokenizer
from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.parallel.launch_environment import launch_environment, rank_environment
from autotrain_mem.rehearsal.fake_run import TrainerSpec, Watch, rehearse_trainer
from autotrain_mem.rehearsal.generation import end_of_sequence, experts_as_on_cuda
from autotrain_mem.rehearsal.rehearse import rehearse, trainer_spec
from autotrain_mem.support import codec
from autotrain_mem.support.codec import from_json
from autotrain_mem.types import Job, Knobs, Owner, Phase, Trace

Folder = Callable[[str], Path]

LENGTH = 40
"""Tokens of a row, or of a prompt with its completion."""
COMPLETION = 6

SMALL = Knobs(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    use_peft=False,
    dtype="float32",
    optim="adamw_torch_fused",
)
OF_METHOD: dict[str, dict[str, Any]] = {
    "sft": {"max_length": LENGTH},
    "reward": {"max_length": LENGTH},
    "dpo": {"max_length": LENGTH},
    "kto": {"max_length": LENGTH},
    "orpo": {"max_length": LENGTH},
    "cpo": {"max_length": LENGTH},
    "grpo": {"max_completion_length": COMPLETION, "num_generations": 2},
    "rloo": {"max_completion_length": COMPLETION, "num_generations": 2},
    "distillation": {"max_completion_length": COMPLETION},
    "online_dpo": {"max_length": LENGTH, "max_new_tokens": COMPLETION},
    "gkd": {"max_length": LENGTH, "max_new_tokens": COMPLETION},
    "ppo": {"response_length": COMPLETION, "local_rollout_forward_batch_size": 2},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"use_peft": True},
    "4-bit": {"use_peft": True, "load_in_4bit": True},
    "8-bit": {"use_peft": True, "load_in_8bit": True},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: what is given, and what is chosen."""

    job: Job
    knobs: Knobs
    tokens: int = LENGTH
    """Of a row, or of a prompt with its completion."""

    @property
    def length(self) -> int:
        """What ``rehearse`` takes: of a row, or of the prompt alone."""
        return self.tokens - COMPLETION if self.job.is_online else self.tokens


def case(method: str, folder: Path | str, arguments: dict[str, Any] | None = None, **knobs: Any) -> Case:
    """A small training. Completions always have their full length, as those of a rehearsal have."""
    generates = "max_completion_length" in OF_METHOD[method]
    full = {"generation_kwargs": {"min_new_tokens": COMPLETION}} if generates else {}
    models = {name: str(folder) for name in OTHER_MODELS.get(method, ())}
    job = Job(method=method, model=str(folder), dataset=None, arguments={**full, **models, **(arguments or {})})
    return Case(job=job, knobs=replace(SMALL, **{**OF_METHOD[method], **knobs}))


OTHER_MODELS = {"ppo": ("reward_model_path",)} | dict.fromkeys(("distillation", "gkd"), ("teacher_model_name_or_path",))
"""What a method cannot do without: here the model itself."""

_TRACES: dict[str, Trace] = {}


def rehearsal_of(job: Job, knobs: Knobs, length: int, **options: Any) -> Trace:
    """What the product would do: each configuration is rehearsed once in a run of the tests.

    Args:
        options: Of ``rehearse``: ``compute_capability``, ``layers``, ``chunks``.
    """
    key = repr((job, knobs, length, sorted(options.items())))
    if key not in _TRACES:
        with _unshuffled(), tempfile.TemporaryDirectory() as scratch:
            _TRACES[key] = rehearse(job, knobs, length, scratch, **options)
    return _TRACES[key]


def rehearsed(one: Case, **options: Any) -> Trace:
    """The rehearsal of a small training."""
    return rehearsal_of(one.job, one.knobs, one.length, **options)


def trained(one: Case, output_dir: Path, **card: Any) -> tuple[Trace, Any]:
    """Trains with the model's own weights, on true tensors, as it was rehearsed; returns the trainer too."""
    torch.manual_seed(0)
    watch = Watch(knobs=one.knobs, **card)
    experts = patch.object(GenerationMixin, "_optimize_model_for_decode", experts_as_on_cuda)
    with watch.cuda_semantics(), _ends_as_rehearsed(), _unshuffled(), experts:
        spec = trainer_spec(one.job, one.knobs, one.length, str(output_dir))
        with _quantized_as_on_a_card() if one.job.method == "online_dpo" else nullcontext():
            trainer = spec.build()
        with spec.patches(trainer):
            watch.train(trainer, edit_rows=spec.edit_rows)
    return watch.recorder.trace(), trainer


def sft_trainer(model: Any, output_dir: Path) -> Any:
    """A trainer of two steps."""
    small = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True}
    quiet = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(output_dir), **small, **quiet),
        train_dataset=Dataset.from_list([{"input_ids": [5] * 48}] * 8),
        processing_class=stub_tokenizer(),
    )


def with_lora(model: Any, **options: Any) -> Any:
    """The model with an adapter on all its linear layers."""
    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **options))


def rehearsed_by(build: Callable[[], Any]) -> Trace:
    """What a trainer would allocate, by its rehearsal."""
    return rehearse_trainer(TrainerSpec(build=build))


def trained_by(build: Callable[[], Any]) -> Trace:
    """What it allocates on real tensors."""
    torch.manual_seed(0)
    watch = Watch()
    with watch.cuda_semantics():
        watch.train(build())
    return watch.recorder.trace()


@contextmanager
def _quantized_as_on_a_card() -> Iterator[None]:
    """Online DPO takes 4-bit weights on the CPU for those of a sharded model, and prepares them otherwise: it goes by
    the name of their class (``trl/experimental/utils.py: prepare_peft_model``)."""
    name, Params4bit.__name__ = Params4bit.__name__, "Params4bitOfACard"
    try:
        yield
    finally:
        Params4bit.__name__ = name


@contextmanager
def _unshuffled() -> Iterator[None]:
    """Rows of a generation stay in order: newer TRL drops their padding, so that it matters which are together."""
    with (
        patch.object(grpo_trainer, "shuffle_sequence_dict", dict),
        patch.object(rloo_trainer, "shuffle_sequence_dict", dict),
        patch.object(distillation_trainer, "shuffle_sequence_dict", dict),
    ):
        yield


@contextmanager
def _ends_as_rehearsed() -> Iterator[None]:
    """Completions that all have full length, of the tokens that a rehearsal has, ending where they do there."""
    sample = GenerationMixin._sample

    def sample_and_end(model: Any, prompt: Any, *args: Any, generation_config: Any, **options: Any) -> Any:
        result = sample(model, prompt, *args, generation_config=generation_config, **options)
        ids = result if isinstance(result, torch.Tensor) else result.sequences
        end = end_of_sequence(generation_config)
        with torch._C._DisableTorchDispatch():
            ids[:, prompt.shape[1] :] = ORDINARY_TOKEN
            if end:
                ids[1:, -2:] = torch.tensor(end)
        return result

    with patch.object(GenerationMixin, "_sample", sample_and_end):
        yield


def difference(one: Case, fake: Trace, real: Trace) -> str:
    """Empty when the two are alike, to the byte; else the first place where they part.

    Where completions are sampled, a rehearsal takes the two ends of the generation: of it, and of an evaluation, which
    generates too, the peak is compared, and of everything else every birth. Nothing is saved here (``test_rehearse``).
    """
    apart = (Phase.GENERATE, *((Phase.EVALUATE,) if one.job.is_online else ()))
    if parting := first_difference(fake, real, (*apart, Phase.SAVE)):
        return parting
    ours, theirs = ({name: peak for name, peak in peaks(trace).items() if name != Phase.SAVE} for trace in (fake, real))
    return "" if ours == theirs else f"peaks: rehearsed {ours}, real {theirs}"


def first_difference(fake: Trace, real: Trace, apart: tuple[Phase, ...] = ()) -> str:
    """Empty when the same bytes were born in the same order for the same reasons, but for some phases."""
    pairs = itertools.zip_longest(births(fake, apart), births(real, apart), fillvalue=("", "", 0, 0, "nothing more"))
    for index, (ours, theirs) in enumerate(pairs):
        if ours[:4] != theirs[:4]:
            return f"birth {index}: rehearsed {ours}, real {theirs}"
    return ""


def births(trace: Trace, apart: tuple[Phase, ...] = ()) -> list[tuple[str, str, int, int, str]]:
    """Phase, owner, size, stream and module of every block in the order of their births, but for some phases."""
    return [
        (phase.value, block.owner.value, block.size_bytes, block.stream, block.module)
        for phase, sign, block in trace.walk()
        if sign > 0 and phase not in apart
    ]


def peaks(trace: Trace, owner: Owner | None = None) -> dict[str, int]:
    """Largest live bytes within each phase, of one owner or of all."""
    live, largest = 0, {}
    for phase, sign, block in trace.walk():
        if owner in (None, block.owner):
            live += sign * block.size_bytes
            largest[phase.value] = max(largest.get(phase.value, 0), live)
    return largest


def peak(trace: Trace, owner: Owner | None = None) -> int:
    """Largest live bytes of all, or of one owner."""
    return max(peaks(trace, owner).values(), default=0)


def assert_alike(one: Case, folder: Path, **card: Any) -> tuple[Trace, Trace, Any]:
    """Rehearse and train, for a card of some ``compute_capability``; returns both traces and the trainer."""
    fake = rehearsed(one, **card)
    real, trainer = trained(one, folder / "real", **card)
    assert not difference(one, fake, real)
    assert len(births(real)) > 100
    assert [use[1:] for use in fake.stream_uses] == [use[1:] for use in real.stream_uses]
    return fake, real, trainer


SECONDS = 120
"""For all ranks of a case; each takes a few."""


def trained_by_ranks(one: Case, folder: Path) -> list[Trace]:
    """The traces of all ranks of a case, forked off this process; an AssertionError holds what they printed."""
    launched = launch_environment(accelerate_config(one.knobs))
    forked(_train, one.knobs.processes, folder, launched, one)
    return [from_json(Trace, json.loads((folder / f"{rank}.json").read_text())) for rank in range(one.knobs.processes)]


def _train(rank: int, folder: Path, one: Case) -> None:
    trace, _ = trained(one, folder / f"out{rank}")
    (folder / f"{rank}.json").write_text(json.dumps(codec.to_json(trace)))


def forked(run: Callable[..., None], processes: int, folder: Path, environment: Mapping[str, str], *args: Any) -> None:
    """Runs ``run(rank, folder, *args)`` in several processes; an AssertionError holds what they printed."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank: int) -> None:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        sys.stdout = sys.stderr = os.fdopen(log, "w")
        os.environ |= {**environment, **rank_environment(rank, processes, address="127.0.0.1", port=port)}
        torch.set_num_threads(1)
        code = 0
        try:
            run(rank, folder, *args)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)

    ranks = [multiprocessing.get_context("fork").Process(target=start, args=(rank,)) for rank in range(processes)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(SECONDS)
        each.kill()
    logs = "".join((folder / f"{rank}.log").read_text() for rank in range(processes))
    assert all(each.exitcode == 0 for each in ranks), logs[-6000:]


def assert_births_in_order(fake: Trace, real: Trace, above_bytes: int) -> None:
    made, really_made = ([move for move in moves_in_order(trace, above_bytes) if move[1] > 0] for trace in (fake, real))
    assert made == really_made


def moves_in_order(trace: Trace, above_bytes: int) -> list[tuple[str, int, int]]:
    """Phase, bytes (negative for a death) and stream of every block above a size, in order.

    Deaths that follow each other, with no birth between, stand by size: autograd frees a node's tensors in any order.
    Saving is left out: the ranks that really train here save nothing.
    """
    order: list[tuple[str, int, int]] = []
    deaths: list[tuple[str, int, int]] = []
    for phase, sign, block in trace.walk():
        if block.size_bytes <= above_bytes or phase is Phase.SAVE:
            continue
        if sign < 0:
            deaths.append((phase.value, -block.size_bytes, block.stream))
            continue
        order += [*sorted(deaths), (phase.value, block.size_bytes, block.stream)]
        deaths = []
    return order + sorted(deaths)
