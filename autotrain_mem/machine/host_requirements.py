"""Checks host memory for loading and offloading, and disk space for saving, once a plan is made."""

from __future__ import annotations

import math
import os
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from autotrain_mem.machine.detect import HOST_NON_TORCH_BYTES
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import OFFLOADING
from autotrain_mem.settings.words import EPOCHS
from autotrain_mem.support.errors import AutofitError, HostMemoryError, ModelNotFoundError, OutputFolderError
from autotrain_mem.support.host import HostMemory, existing, host_memory
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Job, MemoryEstimate
from autotrain_mem.types.findings import Download, Finding

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {name: bits / 8 for name, bits in BASE_BITS.items()}
"""Bytes of a parameter of a quantized linear layer without its scales (``rehearsal.quantized.statistics``): a lower
bound."""
MASTER_BYTES = 4
"""Bytes of a trained parameter under FSDP with mixed precision: accelerate converts it to float32
(``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``)."""
OF_DEEPSPEED = ("offload_optimizer_device", "offload_param_device")
"""DeepSpeed's settings that keep tensors on the host, or on NVMe through buffers on the host."""
SAVE_STEPS = 500
"""transformers' default of ``save_steps`` (``training_args.py: TrainingArguments``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Describes what a planned job needs of this machine beside its card."""

    job: Job
    """The job; its arguments include what the plan decided."""
    parameters: int
    """Parameters of the model, from the size of its weights' files."""
    on_cpu: bool
    """True if the training itself runs on the CPU, with the weights in host memory."""
    output_dir: pathlib.Path
    memory: MemoryEstimate
    optimizer_steps: int | None = None
    """Steps of the whole training; None if data and batch do not determine them."""
    processes: int = 1
    """The processes on this machine."""
    download: Download | None = None
    """Weights that must be downloaded; None if they are here."""

    @property
    def loaders(self) -> int:
        """Counts the processes that hold all weights in host memory at once.

        Each does under DDP, ZeRO-1 and ZeRO-2, for which TRL loads to the host first
        (``trl/trainer/sft_trainer.py: __init__``, its ``device_map``); under FSDP the first alone
        (``fsdp_cpu_ram_efficient_loading``), and under ZeRO-3 each a part (``deepspeed.zero.Init``). Weights of 4 and 8
        bits are made on the card.
        """
        return self.processes if self.job.arguments.get("sharding") in {"ddp", "zero1", "zero2"} else 1

    @property
    def offloads(self) -> tuple[str, ...]:
        """Returns the switches that move activations or the optimizer to the host."""
        return tuple(name for name in OFFLOADING if self.job.arguments.get(name))

    @property
    def loaded_bytes(self) -> int:
        """Returns the bytes of the loaded weights; an unknown dtype (``auto``) counts as the smallest."""
        given = [each for name, each in QUANTIZED_BYTES.items() if self.job.arguments.get(name)]
        item_bytes = ITEM_BYTES.get(str(self.job.arguments.get("dtype")), min(ITEM_BYTES.values()))
        return int(self.parameters * min(given, default=item_bytes))

    @property
    def by_deepspeed(self) -> tuple[str, ...]:
        """Returns DeepSpeed's offload settings that are on."""
        return tuple(name for name in OF_DEEPSPEED if self.job.arguments.get(name))

    @property
    def on_nvme(self) -> tuple[str, ...]:
        """Returns the settings that offload to NVMe, through buffers on the host."""
        return tuple(name for name in self.by_deepspeed if self.job.arguments.get(name) == "nvme")

    @property
    def offloaded_bytes(self) -> int:
        """Returns what all processes of this machine keep on the host during training, except FSDP's shards."""
        held = self.memory.pinned_host_bytes
        if self.by_deepspeed:
            held += self.memory.unpinned_host_bytes
        elif self.job.arguments.get("optimizer_offload"):
            held += self.memory.saved_state_bytes
        return held * self.processes

    @property
    def shards_bytes(self) -> int:
        """Returns the bytes of FSDP's shards on the host, of all processes: parameters; if they are trained, float32
        copies, gradients and the optimizer's state."""
        if self.job.arguments.get("use_peft"):
            return self.loaded_bytes
        masters_bytes = self.loaded_bytes if self.job.arguments.get("bf16") is False else self.parameters * MASTER_BYTES
        return masters_bytes * 2 + self.memory.saved_state_bytes

    @property
    def simulated_bytes(self) -> int:
        """Returns the host memory of a simulated run, whose tensors are real, with what its processes offload; 0 for a
        single process without offloading, whose peak is the run's own to meet."""
        if not self.on_cpu or (self.processes == 1 and not self.by_deepspeed):
            return 0
        held_bytes = self.processes * (self.memory.peak_allocated_bytes + HOST_NON_TORCH_BYTES)
        return held_bytes + (self.offloaded_bytes if self.by_deepspeed else 0)


def room_findings(
    load: Load, *, memory: HostMemory | None = None, free_disk_bytes: int | None = None
) -> tuple[Finding, ...]:
    """Returns what does not fit; by default this machine's memory and the output folder's disk are read."""
    if free_disk_bytes is None:  # of a folder that may yet have to be made
        free_disk_bytes = shutil.disk_usage(existing(load.output_dir)).free
    available_bytes = (memory or host_memory()).available_bytes
    return (*_host_memory(load, available_bytes), *_disk(load, free_disk_bytes), *_download(load), *_nvme(load))


def _refusal(error: type[AutofitError], message: str, cure: str) -> Finding:
    return Finding(kind="error", error=error.__name__, message=message, cure=cure)


def _host_memory(load: Load, available_bytes: int) -> Iterator[Finding]:
    """A card's weights come tensor by tensor out of the mapped file (``transformers/core_model_loading.py``), so they
    need next to no host memory; on the CPU they lie in it."""
    available = f"{format_bytes(available_bytes)} are available"
    loaded_bytes = load.loaded_bytes * load.loaders
    if load.on_cpu:
        held_bytes = max(loaded_bytes, load.simulated_bytes)
        if held_bytes > available_bytes:
            yield _refusal(
                HostMemoryError,
                f"Training {load.job.model} on the CPU takes at least {format_bytes(held_bytes)} of host memory in "
                f"{load.processes} process{'es' * (load.processes > 1)}, and {available}: the kernel would kill it.",
                "Take a smaller model, shorter rows, fewer --gpus, or a machine with more memory; --gpu NAME "
                "--plan_only plans for a card without a run.",
            )
        return
    quantized = any(load.job.arguments.get(name) for name in QUANTIZED_BYTES)
    if load.loaders > 1 and not quantized and loaded_bytes > available_bytes:
        yield Finding(
            kind="warning",
            message=f"{load.processes} processes load {load.job.model} at once, up to {format_bytes(loaded_bytes)} of "
            f"host memory in all, and {available}: the kernel may kill one of them.",
            cure="--sharding fsdp2 loads in one process and divides from there; --dtype as in the checkpoint needs no "
            "copy of the file's pages.",
        )
    for flags, held_bytes, cure in _kept_on_host(load):
        if held_bytes > available_bytes:
            message = f"On the host, {' and '.join(flags)} need {format_bytes(held_bytes)} of memory, and {available}."
            yield _refusal(HostMemoryError, message, cure)


def _kept_on_host(load: Load) -> Iterator[tuple[list[str], int, str]]:
    """Yields flags that move memory to the host, the bytes of all processes there, and the cure."""
    if load.job.arguments.get("fsdp_offload_params"):
        cure = "Remove --fsdp_offload_params, give more --gpus, or train an adapter: --use_peft."
        yield ["--fsdp_offload_params"], load.shards_bytes, cure
    if load.by_deepspeed:
        flags = [f"--{name} {load.job.arguments[name]}" for name in load.by_deepspeed]
        cure = (
            "Train an adapter, which has little to offload (--use_peft), or remove a flag; more --nodes hold less each."
        )
        if load.on_nvme:
            cure = f"{cure} A smaller zero_optimization.sub_group_size makes smaller buffers."
        yield flags, load.offloaded_bytes, cure
    elif load.offloads:
        cure = (
            f"Plan without: --forbid {','.join(load.offloads)}. Fewer rows at once or a shorter --max_length hold "
            "fewer activations; --optim adamw_8bit has its state on the card, in a quarter of the bytes."
        )
        yield [f"--{name}" for name in load.offloads], load.offloaded_bytes, cure


def _disk(load: Load, free_bytes: int) -> Iterator[Finding]:
    """Checks the output folder for a checkpoint with the trained model, and for all checkpoints that are kept."""
    given, model_bytes = load.job.arguments, load.memory.saved_model_bytes
    one = 0
    if str(given.get("save_strategy", "steps")) != "no":
        # Without the optimizer's state if only the model is saved (transformers/trainer.py: _save_checkpoint).
        one = model_bytes + (0 if given.get("save_only_model") else load.memory.saved_state_bytes)
    free = f"The disk of {load.output_dir} has {format_bytes(free_bytes)} free"
    if one + model_bytes > free_bytes:
        what, fewer = "the trained model", ""
        if one:
            what = "a checkpoint with the trained model"
            fewer = ", --save_only_model true to keep no optimizer state, or --save_strategy no to write no checkpoint"
        message = f"{free}, and {what} takes {format_bytes(one + model_bytes)}."
        yield _refusal(OutputFolderError, message, f"Give --output_dir a folder on another disk{fewer}.")
    elif one:
        # A checkpoint is deleted after the next one is written (``training/checkpoints.py: rotate``).
        kept, limit = _checkpoints(load), given.get("save_total_limit")
        if kept is not None and limit is not None:
            kept = min(kept, int(limit) + 1)
        room = (free_bytes - model_bytes) // one
        if kept is not None and kept > room:
            fewer = f"--save_total_limit {room - 1}" if room > 1 else "--save_strategy no"
            yield Finding(
                kind="warning",
                message=f"{free}, which is enough for {room} of {kept} checkpoints of {format_bytes(one)}.",
                cure=f"Give {fewer}, or --output_dir a folder on another disk.",
            )


def _checkpoints(load: Load) -> int | None:
    """Returns how many are written; None if the number of steps is unknown."""
    given = load.job.arguments
    if str(given.get("save_strategy", "steps")) == "epoch":
        return math.ceil(float(given.get("num_train_epochs", EPOCHS)))
    steps = int(given.get("max_steps") or 0)
    steps = steps if steps > 0 else load.optimizer_steps or 0
    every = float(given.get("save_steps", SAVE_STEPS))
    if not steps or str(given.get("save_strategy", "steps")) != "steps" or every <= 0:
        return None
    return math.ceil(1 / every) if every < 1 else steps // int(every)


def _download(load: Load) -> Iterator[Finding]:
    """Checks the hub's cache, which may share its disk with the output folder."""
    if load.download is None:
        return
    folder = existing(pathlib.Path(load.download.folder))
    free_bytes = shutil.disk_usage(folder).free
    needed_bytes, beside = load.download.size_bytes, ""
    if folder.stat().st_dev == existing(load.output_dir).stat().st_dev:
        needed_bytes += load.memory.saved_model_bytes
        beside = " with the trained model"
    if needed_bytes > free_bytes:
        yield _refusal(
            ModelNotFoundError,
            f"The weights of {load.job.model} are to be downloaded to {load.download.folder}: they take{beside} "
            f"{format_bytes(needed_bytes)}, and its disk has {format_bytes(free_bytes)} free.",
            "Free some space, or set the variable HF_HOME to a folder on another disk.",
        )


def _nvme(load: Load) -> Iterator[Finding]:
    """Checks the folders that DeepSpeed creates for offloading to NVMe."""
    zero = (load.job.arguments.get("deepspeed") or {}).get("zero_optimization") or {}
    paths = {str(zero[name.removesuffix("_device")]["nvme_path"]) for name in load.on_nvme}
    needed_bytes = load.memory.nvme_bytes * load.processes
    for path in sorted(paths):
        folder = existing(pathlib.Path(path))
        free_bytes = shutil.disk_usage(folder).free
        why = f"{folder} may not be written to"
        if os.access(folder, os.W_OK):
            why = f"its disk has {format_bytes(free_bytes)} free"
            if needed_bytes <= free_bytes:
                continue
        yield _refusal(
            OutputFolderError,
            f"DeepSpeed is to offload {format_bytes(needed_bytes)} to {path} (nvme_path), and {why}.",
            "Write another nvme_path into the file that --deepspeed names.",
        )
