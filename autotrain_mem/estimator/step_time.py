"""Predicts how long an optimizer step takes on a card, with a roofline model of the rehearsed operators.

An operator takes as long as its FLOPs at the card's rate, or its bytes at the bandwidth of the card's memory, whichever
is longer. The host launches kernels meanwhile, so a phase lasts as long as the busier of the two. Copies on their own
stream overlap with both; an optimizer on the host runs after them.

Collectives of sharded processes overlap with computation, except the largest of each pass, since the first gather and
the last reduction must be waited for. DDP's gradients are reduced in one go after the backward pass: no
process sends gradients of a micro-step that can still run out of memory and be repeated (``training.guard``).

The constants are the same for every card and model; none is fitted to a run.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

from autotrain_mem.types import Estimate, Hardware, Kind, Knobs, Owner, Phase, StepTime, Topology, Work, Workload

MATMUL_EFFICIENCY = 0.75
"""A share of the data sheet's FLOP/s. The best of many shapes reaches 0.86 on an A100 SXM, 0.82 on an A100 PCIe, 0.80
on an H100 SXM and 0.78 on a B200 (stas00/ml-engineering, ``compute/accelerator/README.md``: Maximum Achievable Matmul
FLOPS); a model's shapes are not the best ones."""

ATTENTION_EFFICIENCY = 0.5
"""FlashAttention-2 (arXiv:2307.08691, section 4.1): forward 50 to 73 % and backward 40 to 63 % of an A100's peak."""

BANDWIDTH_EFFICIENCY = 0.8
"""Large copies get about 0.9 of the data sheet's bandwidth; kernels that convert, broadcast or reduce get less."""

LINK_EFFICIENCY = 0.8
"""A share of PCI Express's rate, for pinned memory: 25 of 31.5 GB/s at generation 4 (NVIDIA's bandwidthTest)."""

HOST_BYTES_PER_SECOND = 40 * 10**9
"""The memory traffic of an optimizer step on the host: 80 % of the 51 GB/s of two channels of DDR4-3200. The processes
of a machine share it."""

COLLECTIVE_EFFICIENCY = 0.85
"""A share of the bus bandwidth that nccl-tests reaches with the largest messages. A layer's weights, some 100 MB, are
smaller than these: "256M is too small to reach peak bandwidth" on 8 x H100 (NVIDIA/nccl-tests#212)."""

COLLECTIVE_SECONDS = 30e-6
"""The least seconds of a collective, however small: 19 microseconds among 8 GPUs with NVLink
(kvcache-ai/Mooncake#3484), 43 among 8 x RTX 4090 over PCI Express (NVIDIA/nccl#1530)."""

LAUNCH_SECONDS = 12e-6
"""Host seconds for each kernel of eager PyTorch: 4 to 5 microseconds for an operator called from Python, plus modules
and hooks of transformers and PEFT, autograd, and about one view. An estimate: hosts differ by a factor of two."""

KERNEL_SECONDS = 2e-6
"""Device seconds for each kernel besides its work: from its launch to its first block, and from its last block to the
next kernel. They do not grow with the rows, so twice the rows take less than twice the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rates:
    """Holds the rates of one device, per second."""

    bf16: float
    fp16: float
    fp32: float
    bandwidth: float
    host_link: float
    host: float = HOST_BYTES_PER_SECOND
    link: float = 0.0
    network: float = 0.0

    def flops(self, dtype: str) -> float:
        """Returns FLOP/s of products in this dtype; int8 is at least as fast as fp16 on every card that has it."""
        if dtype == "bfloat16":
            return self.bf16
        return self.fp16 if dtype in ("float16", "int8") else self.fp32


_REFERENCE = "a100-80gb"
_REFERENCE_RATES = {"bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "bandwidth": 2039e9, "host_link": 31.5e9}
"""Rates for a device whose own are unknown, from NVIDIA's data sheet; they serve to rank plans."""

_REFERENCE_LINK, _REFERENCE_LINK_RATE = "PCIe 4.0", 20e9
_REFERENCE_NETWORK, _REFERENCE_NETWORK_RATE = "400 Gb/s per node of 8 GPUs", 6.25e9
"""Rates for unknown links; these also serve only to rank plans."""


@dataclass(slots=True)
class _Busy:
    """Sums how many seconds each part of a machine is busy in one phase."""

    device: float = 0.0
    host: float = 0.0
    host_link: float = 0.0
    link: float = 0.0
    network: float = 0.0
    alone: float = 0.0
    """Seconds of the largest collective, which overlaps with no computation."""
    after: float = 0.0
    """Seconds of work that waits for everything else."""

    def __add__(self, other: "_Busy") -> "_Busy":
        return _Busy(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def of_one(self, passes: int) -> "_Busy":
        """Returns the share of one of several equal passes; ``alone`` already belongs to one pass."""
        sums = {each.name: getattr(self, each.name) / passes for each in fields(self)}
        return _Busy(**{**sums, "alone": self.alone})

    @property
    def seconds(self) -> float:
        """Returns the seconds of the busiest part, plus those that overlap with nothing."""
        joined = max(self.link, self.network) - self.alone
        return max(0.0, max(self.device, self.host, self.host_link, joined) + self.alone + self.after)


def step_time(
    workload: Workload,
    hardware: Hardware,
    *,
    gradient_accumulation_steps: int,
    tokens: float,
    share: float = 1.0,
    rows: float = 1.0,
    overlaps: bool = True,
) -> StepTime:
    """Predicts one optimizer step: its micro-steps, the update, and its part of a generation.

    Args:
        tokens: Tokens of one optimizer step, without padding.
        share: A padded row's mean tokens divided by those of the longest row, which was rehearsed. It scales FLOPs and
            bytes that grow with tokens; its square scales attention's FLOPs. Weights, launches and the update stay.
        rows: The rows of a micro-batch divided by the rehearsed ones. The result never overestimates the time: each
            chunk of a loss writes a gradient for all tokens (backward of its slices), which only fewer rows scale.
        overlaps: Whether collectives overlap with computation, as those of sharded processes do.
    """
    rates, assumed = _rates(hardware, {work.kind for work in workload.work})
    # Counts how often a phase occurs in one training step, and how often it was rehearsed. GRPO with 8 micro-steps
    # per generation and an accumulation of 4 generates in every second step.
    optimizer_steps = workload.passes
    micro_steps = optimizer_steps * gradient_accumulation_steps
    per_generation = workload.micro_steps_per_generation
    generations = micro_steps / per_generation if per_generation else 0.0
    each_micro_step, each_optimizer_step = max(workload.micro_steps, 1), max(workload.optimizer_steps, 1)
    each_generation = max(each_micro_step // (per_generation or each_micro_step), each_optimizer_step)
    repeats = {
        Phase.GENERATE: (generations, each_generation),
        Phase.SCORE: (generations, each_generation),
        Phase.FORWARD: (micro_steps, each_micro_step),
        Phase.BACKWARD: (micro_steps, each_micro_step),
        Phase.OPTIMIZER_STEP: (optimizer_steps, each_optimizer_step),
    }
    phases: dict[Phase, float] = {}
    for phase, (times, rehearsed) in repeats.items():
        works = [work for work in workload.work if work.phase is phase]
        if times and works:
            size = (1.0, 1.0) if phase is Phase.OPTIMIZER_STEP else (share, rows)
            every, last = (
                _busy((work for work in works if work.of_step is of_step), rates, *size, overlaps=overlaps)
                for of_step in (False, True)
            )
            one, updates = every.of_one(rehearsed), min(times, workload.passes)
            with_last = one + last.of_one(max(workload.optimizer_steps, 1))
            phases[phase] = (times - updates) * one.seconds + updates * with_last.seconds
    return StepTime(tokens=tokens, phases=phases, assumed=assumed)


def _rates(hardware: Hardware, kinds: set[Kind]) -> tuple[_Rates, str]:
    """Returns the rates of the card and its links, and the card whose rates replace missing ones."""
    fp16, fp32 = hardware.fp16_flops_per_second, hardware.fp32_flops_per_second
    bandwidth, host_link = hardware.bandwidth_bytes_per_second, hardware.host_link_bytes_per_second
    host = HOST_BYTES_PER_SECOND / hardware.topology.devices
    topology = hardware.topology
    known_link, known_network = topology.link_bytes_per_second, topology.network_bytes_per_second
    spans_nodes = topology.nodes > 1 and Kind.NETWORK_COLLECTIVE not in kinds
    if spans_nodes:  # no group of processes stays within a node
        kinds = kinds - {Kind.COLLECTIVE} | ({Kind.NETWORK_COLLECTIVE} if Kind.COLLECTIVE in kinds else set())
    assumed = [_REFERENCE_LINK] if known_link is None and Kind.COLLECTIVE in kinds else []
    assumed += [_REFERENCE_NETWORK] if known_network is None and Kind.NETWORK_COLLECTIVE in kinds else []
    network = float(known_network or _REFERENCE_NETWORK_RATE)
    link = float(known_link or _REFERENCE_LINK_RATE)
    if spans_nodes:  # rings of all processes leave a node through the ports of all its devices
        link = min(link, network * topology.devices)
    if fp16 is None or fp32 is None or bandwidth is None or host_link is None:
        rates = _Rates(**_REFERENCE_RATES, host=host, link=link, network=network)
        return rates, ", ".join([_REFERENCE, *assumed])
    # Without tensor cores for it, bf16 is computed in fp32.
    bf16 = hardware.bf16_flops_per_second or fp32
    speeds = {"bf16": bf16, "fp16": fp16, "fp32": fp32, "bandwidth": bandwidth, "host_link": host_link}
    return _Rates(**speeds, host=host, link=link, network=network), ", ".join(assumed)


def _busy(works: Iterable[Work], rates: _Rates, share: float, rows: float, *, overlaps: bool) -> _Busy:
    """Sums the seconds of one phase, at a share of a row's rehearsed tokens and a multiple of the rehearsed rows."""
    busy = _Busy()
    for work in works:
        count, tokens, size, written = work.count, share, rows, rows
        if work.of_chunk:  # fewer tokens or rows make fewer chunks
            count, tokens, size = count * share * rows, 1.0, 1.0
            written = 1.0 if work.flops else min(rows, 1.0)
        moved = work.bytes * tokens * written + work.fixed_bytes
        busy.host += count * work.launches * LAUNCH_SECONDS
        match work.kind:
            case Kind.OVERLAPPED_COPY:
                busy.host_link += count * moved / (rates.host_link * LINK_EFFICIENCY)
            case Kind.COPY:
                busy.after += count * moved / (rates.host_link * LINK_EFFICIENCY)
            case Kind.HOST_STEP:
                busy.after += count * moved / rates.host
            case Kind.COLLECTIVE | Kind.NETWORK_COLLECTIVE:
                is_within = work.kind is Kind.COLLECTIVE
                rate = (rates.link if is_within else rates.network) * COLLECTIVE_EFFICIENCY
                seconds = moved / rate + work.launches * COLLECTIVE_SECONDS
                if not overlaps:
                    busy.after += count * seconds
                    continue
                busy.alone = max(busy.alone, seconds)
                if is_within:
                    busy.link += count * seconds
                else:
                    busy.network += count * seconds
            case _:
                is_attention = work.kind is Kind.ATTENTION
                flops = work.flops * size * (tokens * tokens if is_attention else tokens)
                efficiency = ATTENTION_EFFICIENCY if is_attention else MATMUL_EFFICIENCY
                computing = flops / (rates.flops(work.dtype) * efficiency)
                moving = moved / (rates.bandwidth * BANDWIDTH_EFFICIENCY)
                busy.device += count * (max(computing, moving) + work.launches * KERNEL_SECONDS)
    return busy


HALF = ("bfloat16", "float16")
GATHERED_IN = 32
"""Number of gathers for all weights. One gather overlaps with nothing. 8B models have up to 32 layers, 70B has 80."""


def shared_work(work: Workload, known: Estimate, knobs: Knobs) -> Workload:
    """Returns the work of a rehearsed point, with its model sharded as in ``knobs``. The bytes of the whole model
    are the weights of one process at the peak of ``known``, times the shards in ``known``."""
    before, topology = known.knobs, known.hardware.topology
    # Processes that share a row's tokens send keys and values, whose bytes grow with the tokens, under any sharding.
    kept = [each for each in work.work if each.kind not in (Kind.COLLECTIVE, Kind.NETWORK_COLLECTIVE) or each.bytes]
    kept = kept if knobs.is_sharded else _under_autocast(kept)
    share = before.shards / knobs.shards
    updated = [
        replace(each, fixed_bytes=round(each.fixed_bytes * share)) if each.phase is Phase.OPTIMIZER_STEP else each
        for each in kept
    ]
    weights = known.memory.owners_at_peak.get(Owner.WEIGHTS, 0) * before.shards
    sent = [each for each in _sent(work, knobs, topology, weights) if each.fixed_bytes]
    return replace(work, work=(*updated, *sent))


def _under_autocast(work: Sequence[Work]) -> list[Work]:
    """Counts all matrix products in the dtype of most of them, if that is a 16-bit one.

    accelerate wraps a model's forward pass in autocast, except under FSDP2 (``accelerator.py: prepare_model,
    _prepare_fsdp2``), where products of float32 tensors stay in float32. TRL's chunked loss has such
    products (``trl/trainer/sft_trainer.py: _chunk``). They take half of a step on an A100.
    """
    flops: defaultdict[str, float] = defaultdict(float)
    for each in work:
        if each.kind is Kind.MATMUL:
            flops[each.dtype] += each.flops * each.count
    if (most := max(flops, key=flops.__getitem__, default="")) not in HALF:
        return [*work]
    return [replace(each, dtype=most) if each.kind is Kind.MATMUL else each for each in work]


def _sent(work: Workload, knobs: Knobs, topology: Topology, weights: int) -> Iterator[Work]:
    """Yields the collectives among processes.

    Gradients are as large as the trained weights. DDP reduces them in their own dtype; FSDP reduces them and gathers
    weights in the compute dtype (``accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin
    .set_mixed_precision``). An adapter's gradients are negligible.
    """
    trained = 0 if knobs.use_peft else weights
    if not knobs.is_sharded:
        rounds = 2 * (knobs.processes - 1) / knobs.processes
        yield _collective(topology, Phase.BACKWARD, trained * rounds, work.optimizer_steps, of_step=True)
        return
    half = 2 if knobs.dtype == "float32" else 1
    share, is_within = (knobs.shards - 1) / knobs.shards, knobs.sharding == "hsdp"
    gathered = weights / half * share / GATHERED_IN
    rehearsed = {each.phase for each in work.work}
    passes = {Phase.FORWARD: work.micro_steps, Phase.SCORE: work.optimizer_steps}
    passes |= {Phase.GENERATE: work.optimizer_steps * knobs.sampled_tokens}
    passes |= {Phase.BACKWARD: 0 if knobs.sharding == "fsdp2-no-reshard" else work.micro_steps}
    for phase in rehearsed & passes.keys():
        yield _collective(topology, phase, gathered, passes[phase] * GATHERED_IN, is_within=is_within)
    reduced = trained / half * share / GATHERED_IN
    yield _collective(topology, Phase.BACKWARD, reduced, work.micro_steps * GATHERED_IN, is_within=is_within)
    if is_within:
        groups = knobs.processes / knobs.shards
        rounds = 2 * (groups - 1) / groups / knobs.shards
        yield _collective(topology, Phase.BACKWARD, trained / half * rounds, work.micro_steps)


def _collective(
    topology: Topology, phase: Phase, sent: float, count: int, *, is_within: bool = False, of_step: bool = False
) -> Work:
    kind = Kind.COLLECTIVE if topology.nodes == 1 or is_within else Kind.NETWORK_COLLECTIVE
    return Work(
        phase=phase,
        kind=kind,
        dtype="bfloat16",
        fixed_bytes=round(sent),
        count=float(count),
        of_step=of_step,
    )
