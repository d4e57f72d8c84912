"""Checks host memory for loading and offloading, and disk space for saving, once a plan is made."""

import math
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from autotrain_mem.machine.detect import HOST_NON_TORCH_BYTES
from autotrain_mem.settings.knobs import BASE_BITS
from autotrain_mem.settings.levers import OFFLOADING
from autotrain_mem.settings.own import OF_DEEPSPEED
from autotrain_mem.settings.words import EPOCHS
from autotrain_mem.support.errors import AutofitError, HostMemoryError, ModelNotFoundError, OutputFolderError
from autotrain_mem.support.host import HostMemory, existing, host_memory
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Download, Finding, Job, MemoryEstimate

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {name: bits / 8 for name, bits in BASE_BITS.items()}
"""Bytes per parameter of a quantized linear layer without its scales: a lower bound."""
MASTER_BYTES = 4
"""Bytes per trained parameter under FSDP with mixed precision: accelerate converts it to float32
(``accelerate/utils/fsdp_utils.py: fsdp2_prepare_model``)."""
SAVE_STEPS = 500
"""transformers' default of ``save_steps`` (``training_args.py: TrainingArguments``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Describes what a planned job needs of this machine besides its card."""

    job: Job
    """The job with the arguments that the plan chose."""
    parameters: int
    """Parameters of the model, from the size of its weights' files."""
    on_cpu: bool
    """Whether training runs on the CPU, with the weights in host memory."""
    output_dir: pathlib.Path
    memory: MemoryEstimate
    optimizer_steps: int | None = None
    """Steps of the whole training; None if unknown."""
    processes: int = 1
    """Processes on this machine."""
    download: Download | None = None
    """Weights to download; None if they are on disk."""

    @property
    def loaders(self) -> int:
        """Counts the processes that hold all weights in host memory at once.

        Under DDP, ZeRO-1 and ZeRO-2 every process does: TRL loads to the host first (``trl/trainer/sft_trainer.py:
        __init__``, its ``device_map``). Under FSDP only the first does (``fsdp_cpu_ram_efficient_loading``), and under
        ZeRO-3 each holds a part (``deepspeed.zero.Init``). Quantized models count, though they load on the card, or
        on the host in each process if their shards are offloaded (``trainers.model_support: quantized_to_host``).
        """
        given = self.job.arguments
        is_whole = given.get("sharding") in {"ddp", "zero1", "zero2"}
        is_whole |= bool(given.get("fsdp_offload_params") and given.get("load_in_4bit"))
        return self.processes if is_whole else 1

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
    def offloaded_bytes(self) -> int:
        """Returns the bytes that this machine's processes keep on the host during training, without FSDP's shards."""
        return (self.memory.pinned_host_bytes + self.memory.unpinned_host_bytes) * self.processes


def room_findings(
    load: Load, *, memory: HostMemory | None = None, free_disk_bytes: int | None = None
) -> tuple[Finding, ...]:
    """Returns a finding for each lack of host memory or disk space; measures the figures that are not given."""
    if free_disk_bytes is None:
        free_disk_bytes = shutil.disk_usage(existing(load.output_dir)).free
    available_bytes = (memory or host_memory()).available_bytes
    on_host = (_on_cpu if load.on_cpu else beside_the_card)(load, available_bytes)
    return (*on_host, *_disk(load, free_disk_bytes), *_download(load))


def _refusal(error: type[AutofitError], message: str, cure: str) -> Finding:
    return Finding(kind="error", error=error.__name__, message=message, cure=cure)


def _on_cpu(load: Load, available_bytes: int) -> Iterator[Finding]:
    """Checks host memory for the weights, and for the tensors of a simulated run with several processes."""
    held_bytes = load.loaded_bytes * load.loaders
    if load.processes > 1 or load.by_deepspeed:
        simulated_bytes = load.processes * (load.memory.peak_allocated_bytes + HOST_NON_TORCH_BYTES)
        held_bytes = max(held_bytes, simulated_bytes + (load.offloaded_bytes if load.by_deepspeed else 0))
    if held_bytes > available_bytes:
        yield _refusal(
            HostMemoryError,
            f"Training {load.job.model} on the CPU takes at least {format_bytes(held_bytes)} of host memory in "
            f"{load.processes} process{'es' * (load.processes > 1)}, and {format_bytes(available_bytes)} are "
            "available: the kernel would kill the run.",
            "Use a smaller model, shorter rows, fewer --gpus, or a machine with more memory; --gpu NAME --plan_only "
            "plans for a card without a run.",
        )


def beside_the_card(load: Load, available_bytes: int) -> Iterator[Finding]:
    """Checks host memory for several processes that load at once, and for what is offloaded. A single process needs
    almost no host memory: tensors go from the mapped file to the card."""
    given, available = load.job.arguments, f"{format_bytes(available_bytes)} are available"
    loaded_bytes = load.loaded_bytes * load.loaders
    is_quantized = any(given.get(name) for name in QUANTIZED_BYTES)
    if load.loaders > 1 and not is_quantized and loaded_bytes > available_bytes:
        yield Finding(
            kind="warning",
            message=f"{load.processes} processes load {load.job.model} at once, up to {format_bytes(loaded_bytes)} of "
            f"host memory in all, and {available}: the kernel may kill one of them.",
            cure="--sharding fsdp2 loads the weights in one process, and sends their shards to the others; if "
            "--dtype is that of the checkpoint, the processes read the mapped file without a copy.",
        )
    kept: list[tuple[list[str], int, str]] = []
    if given.get("fsdp_offload_params"):
        shards_bytes = loaded_bytes
        if not given.get("use_peft"):  # float32 parameters and gradients, and the optimizer's state
            trained_bytes = load.loaded_bytes if given.get("bf16") is False else load.parameters * MASTER_BYTES
            shards_bytes = 2 * trained_bytes + load.memory.saved_state_bytes
        cure = "Remove --fsdp_offload_params, give more --gpus, or train an adapter: --use_peft."
        if load.loaders > 1:
            cure = "Give fewer --gpus: each process holds the whole 4-bit base until it is sharded."
        kept.append((["--fsdp_offload_params"], shards_bytes, cure))
    offloads = [name for name in OFFLOADING if given.get(name)]
    if load.by_deepspeed:
        cure = "Train an adapter (--use_peft), remove a flag, or give more --nodes: each then offloads less."
        kept.append(([f"--{name} {given[name]}" for name in load.by_deepspeed], load.offloaded_bytes, cure))
    elif offloads and not kept:
        cure = (
            f"Plan without offloading: --forbid {','.join(offloads)}. Smaller batches or a shorter --max_length keep "
            "fewer activations; --optim adamw_8bit keeps its state on the card, in a quarter of the bytes."
        )
        kept.append(([f"--{name}" for name in offloads], load.offloaded_bytes, cure))
    for flags, held_bytes, cure in kept:
        if held_bytes > available_bytes:
            message = f"Host memory for {' and '.join(flags)}: {format_bytes(held_bytes)} are needed, and {available}."
            yield _refusal(HostMemoryError, message, cure)


def _disk(load: Load, free_bytes: int) -> Iterator[Finding]:
    """Checks the output folder's disk for the trained model, and for the checkpoints that are kept."""
    given, model_bytes, elsewhere = load.job.arguments, load.memory.saved_model_bytes, "--output_dir on another disk"
    one = 0
    if str(given.get("save_strategy", "steps")) != "no":
        # Without the optimizer's state if only the model is saved (transformers/trainer.py: _save_checkpoint).
        one = model_bytes + (0 if given.get("save_only_model") else load.memory.saved_state_bytes)
    free = f"The disk of {load.output_dir} has {format_bytes(free_bytes)} free"
    if one + model_bytes > free_bytes:
        what, cure = "the trained model", f"Give {elsewhere}."
        if one:
            what = "a checkpoint with the trained model"
            cure = f"Give {elsewhere}, --save_only_model true (no optimizer state), or --save_strategy no."
        yield _refusal(OutputFolderError, f"{free}, and {what} takes {format_bytes(one + model_bytes)}.", cure)
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
                message=f"{free}, enough for {room} of {kept} checkpoints of {format_bytes(one)}.",
                cure=f"Give {fewer}, or {elsewhere}.",
            )


def _checkpoints(load: Load) -> int | None:
    """Returns the number of checkpoints that are written; None if the number of steps is unknown."""
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
    needed_bytes, what = load.download.size_bytes, "the download takes"
    if folder.stat().st_dev == existing(load.output_dir).stat().st_dev:
        needed_bytes += load.memory.saved_model_bytes
        what = "the download and the trained model take"
    if needed_bytes > free_bytes:
        yield _refusal(
            ModelNotFoundError,
            f"The weights of {load.job.model} do not fit into {load.download.folder}: {what} "
            f"{format_bytes(needed_bytes)}, and its disk has {format_bytes(free_bytes)} free.",
            "Free some space, or set the variable HF_HOME to a folder on another disk.",
        )
