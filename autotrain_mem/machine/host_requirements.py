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
OF_DEEPSPEED = {
    "offload_optimizer_device": "weights and gradients in float32 and the optimizer's two moments",
    "offload_param_device": "shards of the weights",
}
"""Maps DeepSpeed's offload settings to what each keeps on the host."""


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
    def model_bytes(self) -> int:
        """Returns the bytes of the trained model, or the adapter, on disk."""
        return self.memory.saved_model_bytes

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
    return (*_memory(load, memory or host_memory()), *_disk(load, free_disk_bytes), *_other_disks(load))


def _refusal(error: type[AutofitError], *, message: str, cure: str) -> Finding:
    return Finding(kind="error", error=error.__name__, message=message, cure=cure)


def _other_disks(load: Load) -> Iterator[Finding]:
    """Checks the hub's cache, and the folders that DeepSpeed creates for offloading to NVMe."""
    if load.download is not None:
        folder = existing(pathlib.Path(load.download.folder))
        free_bytes = shutil.disk_usage(folder).free
        needed, beside = load.download.size_bytes, ""
        if folder.stat().st_dev == existing(load.output_dir).stat().st_dev and load.model_bytes:
            needed += load.model_bytes
            beside = f", and the trained model {format_bytes(load.model_bytes)} on the same disk"
        if needed > free_bytes:
            yield _refusal(
                ModelNotFoundError,
                message=f"The weights of {load.job.model} are to be downloaded to {load.download.folder}: they take "
                f"{format_bytes(load.download.size_bytes)}{beside}, and its disk has {format_bytes(free_bytes)} free.",
                cure="Free some space, or set the variable HF_HOME to a folder on another disk.",
            )
    zero = (load.job.arguments.get("deepspeed") or {}).get("zero_optimization") or {}
    parts = (zero[name.removesuffix("_device")] for name in load.on_nvme)
    for path in sorted({str(part["nvme_path"]) for part in parts}):
        there = existing(pathlib.Path(path))
        cure = "Write another nvme_path into the file that --deepspeed names."
        if not os.access(there, os.W_OK):
            message = f"DeepSpeed is to write to {path} (nvme_path), and {there} may not be written to."
            yield _refusal(OutputFolderError, message=message, cure=cure)
            continue
        free_bytes = shutil.disk_usage(there).free
        needed = load.memory.nvme_bytes * load.processes
        if free_bytes < needed:
            message = (
                f"What DeepSpeed offloads to {path} (nvme_path) takes {format_bytes(needed)}, and its disk has "
                f"{format_bytes(free_bytes)} free."
            )
            yield _refusal(OutputFolderError, message=message, cure=f"Free some space. {cure}")


def _memory(load: Load, memory: HostMemory) -> Iterator[Finding]:
    """A card's weights come tensor by tensor out of the mapped file (``transformers/core_model_loading.py``), so they
    need next to no host memory; on the CPU they lie in it."""
    available = f"{format_bytes(memory.available_bytes)} are available"
    loaded_bytes = load.loaded_bytes * load.loaders
    each = f" in each of {load.processes} processes" if load.loaders > 1 else ""
    if load.on_cpu and loaded_bytes > memory.available_bytes:
        yield _refusal(
            HostMemoryError,
            message=f"The weights of {load.job.model}{each} alone take {format_bytes(loaded_bytes)} of host memory, "
            f"and {available}: the kernel would kill the process that loads them.",
            cure="Take a smaller model, a machine with more memory, or a card: --gpu NAME --plan_only says which.",
        )
    elif load.simulated_bytes > memory.available_bytes:
        several = load.processes > 1
        yield _refusal(
            HostMemoryError,
            message=f"{f'{load.processes} simulated cards hold' if several else 'A simulated card holds'} "
            f"{format_bytes(load.simulated_bytes)} in host memory, and {available}: the kernel would kill a process.",
            cure=f"Give {'fewer --gpus, ' if several else ''}a smaller model or shorter rows; --plan_only plans "
            "without a run.",
        )
    quantized = any(load.job.arguments.get(name) for name in QUANTIZED_BYTES)
    if not load.on_cpu and load.loaders > 1 and not quantized and loaded_bytes > memory.available_bytes:
        yield Finding(
            kind="warning",
            message=f"{load.processes} processes load {load.job.model} at once, up to {format_bytes(loaded_bytes)} of "
            f"host memory in all, and {available}: the kernel may kill one of them.",
            cure="--sharding fsdp2 loads in one process and divides from there; --dtype as in the checkpoint needs no "
            "copy of the file's pages.",
        )
    for flags, what, taken_bytes, cure in () if load.on_cpu else _kept_on_host(load):
        if taken_bytes > memory.available_bytes:
            takes = "takes" if len(flags) == 1 else "take"
            message = (
                f"{' and '.join(flags)} {takes} {format_bytes(taken_bytes)} of host memory ({what}), and {available}."
            )
            yield _refusal(HostMemoryError, message=message, cure=cure)


def _kept_on_host(load: Load) -> Iterator[tuple[list[str], str, int, str]]:
    """Yields flags that move memory to the host, what they move, its bytes, and the cure."""
    if load.job.arguments.get("fsdp_offload_params"):
        cure = "Remove --fsdp_offload_params, give more --gpus, or train an adapter: --use_peft."
        yield ["--fsdp_offload_params"], "pinned shards of all processes", load.shards_bytes, cure
    if load.by_deepspeed:
        flags, held = [], []
        for name in load.by_deepspeed:
            to_nvme = name in load.on_nvme
            flags.append(f"{name.removesuffix('_device')} to nvme" if to_nvme else f"--{name} cpu")
            held.append("buffers to and from NVMe, gradients" if to_nvme else OF_DEEPSPEED[name])
        each = f" of {load.processes} processes" if load.processes > 1 else ""
        cures = [
            "Train an adapter, which has little of all that: --use_peft",
            ", or remove --offload_param_device: the weights stay on the GPU" if len(flags) > 1 else "",
            "; a smaller zero_optimization.sub_group_size makes smaller buffers" if load.on_nvme else "",
            "; more --nodes hold a smaller share each" if each else "",
        ]
        yield flags, f"{', and '.join(held)}{each}", load.offloaded_bytes, f"{''.join(cures)}."
    elif load.offloads:
        moves_optimizer = "optimizer_offload" in load.offloads
        held = ["weights, gradients and the optimizer's state"] if moves_optimizer else []
        held += ["activations"] if len(load.offloads) > len(held) else []
        smaller = "fewer rows at once or a shorter --max_length hold fewer activations"
        if moves_optimizer:
            smaller = "--optim adamw_8bit has its state on the card, in a quarter of the bytes"
        flags = [f"--{name}" for name in load.offloads]
        cure = f"Plan without: --forbid {','.join(load.offloads)}; or {smaller}."
        yield flags, f"{' and '.join(held)}, in pinned blocks", load.offloaded_bytes, cure


def _disk(load: Load, free_bytes: int) -> Iterator[Finding]:
    saves = str(load.job.arguments.get("save_strategy", "steps")) != "no"
    free = f"The disk of {load.output_dir} has {format_bytes(free_bytes)} free"
    # The optimizer's state is left out if only the model is saved (transformers/trainer.py: _save_checkpoint).
    state_bytes = 0 if load.job.arguments.get("save_only_model") else load.memory.saved_state_bytes
    one = load.model_bytes + state_bytes if saves else 0
    if one and one + load.model_bytes <= free_bytes:
        # A checkpoint is deleted after the next one is written (``training/checkpoints.py: rotate``).
        written, limit = _checkpoints(load), load.job.arguments.get("save_total_limit")
        room = (free_bytes - load.model_bytes) // one
        kept = written if limit is None or written is None else min(written, int(limit) + 1)
        if kept is not None and kept > room:
            cure = (
                f"Give --save_total_limit {room - 1}"
                if room > 1
                else "Give --save_strategy no, or --save_only_model true"
            )
            yield Finding(
                kind="warning",
                message=f"{free}, which is enough for {room} of {kept} checkpoints of {format_bytes(one)}.",
                cure=f"{cure}, or --output_dir a folder on another disk.",
            )
    if one + load.model_bytes <= free_bytes:
        return
    what, cure = "the trained model", "Give --output_dir a folder on another disk."
    if load.model_bytes <= free_bytes:
        what = "one checkpoint with the trained model"
        alone = "--save_strategy no writes the trained model alone; or give --output_dir a folder on another disk."
        cure = f"--save_only_model true keeps no optimizer state, {alone}"
    needed = one + load.model_bytes if load.model_bytes <= free_bytes else load.model_bytes
    message = f"{free}, and {what} takes {format_bytes(needed)}."
    yield _refusal(OutputFolderError, message=message, cure=cure)


SAVE_STEPS = 500
"""transformers' default of ``save_steps`` (``training_args.py: TrainingArguments``)."""


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
