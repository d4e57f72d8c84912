"""Defines the estimate of a configuration: the memory that it needs, its time, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support.codec import CodecError, Form
from autotrain_mem.support.lazy_names import html_of
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.hardware import Hardware
from autotrain_mem.types.trace import Owner, Routing, Trained
from autotrain_mem.types.vllm import VllmSleep
from autotrain_mem.types.work import Phase, StepTime, Workload

STEPS = (10, 100, 1000)
"""Optimizer steps after which the allocator is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedOverSteps:
    """Holds the reserved memory after each of :data:`STEPS`, for one order of the rows and one allocator mode.

    >>> from autotrain_mem import ReservedOverSteps
    >>> order = ReservedOverSteps(reserved_bytes=(2**30, 2**30, 3 * 2**29), num_alloc_retries=(0, 0, 1))
    >>> order.last_bytes == 3 * 2**29
    True
    """

    reserved_bytes: tuple[int, ...]
    """Peak reserved until then, on an unlimited device."""
    num_alloc_retries: tuple[int, ...]
    """Times that the whole cache was released until then, on the real device."""

    @property
    def last_bytes(self) -> int:
        """Returns what is reserved after the last of the steps; 0 where there are none."""
        return next(reversed(self.reserved_bytes), 0)

    def moved(self, more_bytes: int) -> ReservedOverSteps:
        """Returns the figures shifted by ``more_bytes``, which a probe measured."""
        moved = tuple(max(0, size + more_bytes) for size in self.reserved_bytes)
        return ReservedOverSteps(reserved_bytes=moved, num_alloc_retries=self.num_alloc_retries)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedByOrder:
    """Holds both orders of the rows, for one allocator mode.

    >>> from autotrain_mem import ReservedByOrder, ReservedOverSteps
    >>> shuffled = ReservedOverSteps(reserved_bytes=(5, 7, 9), num_alloc_retries=(0, 0, 0))
    >>> longest_first = ReservedOverSteps(reserved_bytes=(6, 6, 6), num_alloc_retries=(0, 0, 0))
    >>> ReservedByOrder(any_order=shuffled, longest_first=longest_first).longest_first.last_bytes
    6
    """

    any_order: ReservedOverSteps
    """Shuffled by a sampler, TRL's default."""
    longest_first: ReservedOverSteps
    """The longest rows once before the first step, then any order, as in every run of this project."""

    def moved(self, more_bytes: int) -> ReservedByOrder:
        return ReservedByOrder(
            any_order=self.any_order.moved(more_bytes), longest_first=self.longest_first.moved(more_bytes)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLengths:
    """Holds what the allocator reserves in each of its modes over sampled steps with rows of every length.

    >>> from autotrain_mem import MixedLengths, ReservedByOrder, ReservedOverSteps
    >>> alike = ReservedOverSteps(reserved_bytes=(6, 6, 6), num_alloc_retries=(0, 0, 0))
    >>> both = ReservedByOrder(any_order=alike, longest_first=alike)
    >>> MixedLengths(native=both, expandable_segments=both).modes[True] == both
    True
    """

    native: ReservedByOrder
    expandable_segments: ReservedByOrder

    @classmethod
    def of_both(cls, found: Callable[[bool], ReservedByOrder]) -> MixedLengths:
        return cls(native=found(False), expandable_segments=found(True))

    @property
    def modes(self) -> dict[bool, ReservedByOrder]:
        return {False: self.native, True: self.expandable_segments}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedEstimate:
    """Holds what the caching allocator takes of the device in one of its two modes, for one rehearsed run.

    >>> from autotrain_mem import ReservedEstimate
    >>> sizes = {"peak_allocated_bytes": 7, "peak_reserved_bytes": 9, "peak_limited_bytes": 8, "slack_bytes": 2}
    >>> ReservedEstimate(**sizes, num_alloc_retries=1, largest_refused_bytes=None).fits  # it gives its cache back
    False
    """

    peak_allocated_bytes: int
    """``torch.cuda.max_memory_allocated``: the peak of what is allocated, with the ends of blocks that were handed out
    whole since what was left of them was too small to be split off."""
    peak_reserved_bytes: int
    """The largest sum of its segments; without a limit where the run does not fit, so that the shortage is known."""
    peak_limited_bytes: int
    """The same on the device that there is, where the allocator gives its cache back before it refuses a request; what
    was refused is given all the same, so that the run goes on. Equal to the peak where that fits."""
    slack_bytes: int
    """The unallocated part when the peak was first reached: cached blocks and the ends of split ones."""
    num_alloc_retries: int
    """Times that the whole cache had to be released to the device before a request could be met."""
    largest_refused_bytes: int | None
    """The largest request that could not be met even then; None if all were met."""

    @property
    def fits(self) -> bool:
        """Returns whether the run fits without releasing its cache, which stalls the device each time."""
        return self.num_alloc_retries == 0 and self.largest_refused_bytes is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedByMode:
    """Holds what the allocator takes in each of its two modes, for one rehearsed run.

    >>> from autotrain_mem import AutoFit, estimate
    >>> found = estimate("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> found.memory.reserved.native == found.memory.reserved.modes[False] == found.reserved
    True
    """

    native: ReservedEstimate
    """The figures with a segment for each request that no cached block can serve: the allocator's default."""
    expandable_segments: ReservedEstimate
    """The figures with ``expandable_segments:True``."""

    @classmethod
    def of_both(cls, found: Callable[[bool], ReservedEstimate]) -> ReservedByMode:
        return cls(native=found(False), expandable_segments=found(True))

    @property
    def modes(self) -> dict[bool, ReservedEstimate]:
        return {False: self.native, True: self.expandable_segments}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Holds the peaks of one rehearsed run, in bytes.

    ``sum(owners_at_peak.values()) == phases[peak_phase] == peak_allocated_bytes`` holds.
    """

    json_form: ClassVar = Form(
        objects={
            "phases": ("phase", "peak_bytes"),
            "modules_at_peak": ("module", "bytes"),
            "parts_at_peak": ("part", "bytes"),
        }
    )

    peak_allocated_bytes: int
    """Largest sum of live blocks, each rounded up to 512 bytes as CUDA's allocator does."""
    peak_phase: Phase
    phases: Mapping[Phase, int]
    """Peak allocated bytes per phase, in order of first occurrence."""
    owners_at_peak: Mapping[Owner, int]
    modules_at_peak: tuple[tuple[str, int], ...]
    """The largest holders of activations and temporaries at the peak, by module name, largest first."""
    reserved: ReservedByMode
    not_counted: tuple[str, ...]
    rehearsal_seconds: float
    parts_at_peak: tuple[tuple[str, int], ...] = ()
    """Bytes at the peak by part of a model that reads images: vision tower, projector, language model, and the rest."""
    pinned_host_bytes: int = 0
    """Pinned host memory per process, for offloaded activations and optimizer state."""
    unpinned_host_bytes: int = 0
    """Peak of other host memory per process that DeepSpeed's offload takes."""
    nvme_bytes: int = 0
    """Size of each process's files on NVMe, where DeepSpeed offloads to them."""
    saved_model_bytes: int = 0
    """Size on disk of the saved model: all weights, or those of the adapter."""
    saved_state_bytes: int = 0
    """Size on disk of the optimizer state in a checkpoint."""
    unquantized_bytes: int = 0
    """Experts of a quantized base that bitsandbytes leaves unquantized, since they are fused into one tensor."""
    rehearsed_layers: int | None = None
    """Most layers of the truncated copies that this was extrapolated from; None if the whole model was rehearsed."""
    mixed_lengths: MixedLengths | None = None
    """Reserved memory over hours of rows of every length; None if all rows are equally long, or lengths are unknown."""
    trained: Trained | None = None
    """Trained and total parameters; None where no trainer was built."""
    routing: Routing | None = None
    """How tokens were routed to experts; None for a model without, or one whose own code does it unseen."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        """Returns its JSON with a mapping and pairs in place of the lists of objects."""
        objects = MemoryEstimate.json_form.objects
        try:
            pairs = {name: [(each[key], each[to]) for each in values[name]] for name, (key, to) in objects.items()}
            return {**values, **pairs, "phases": dict(pairs["phases"])}
        except (KeyError, TypeError):
            raise CodecError(f"{', '.join(objects)} should be lists of objects with two keys") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Holds the memory and the work of one rehearsed configuration, on any GPU with the same kernels."""

    memory: MemoryEstimate
    """Replayed on an unlimited device."""
    work: Workload
    awake: MemoryEstimate | None = None
    """The estimate while a colocated vLLM is awake; None where it never sleeps."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        parts = {name: values[name] and MemoryEstimate.unfolded(values[name]) for name in ("memory", "awake")}
        return {**values, **parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Holds one configuration against one device, in bytes and seconds.

    >>> from autotrain_mem import AutoFit, estimate
    >>> found = estimate("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> found.required_bytes == found.reserved_bytes + found.outside_bytes
    True
    """

    json_form: ClassVar = Form(
        schema="autofit.estimate/1",
        derived={
            "gpu": "hardware.name",
            "gpu_source": "hardware.source",
            "peak_reserved_bytes": "reserved.peak_reserved_bytes",
            "non_torch_bytes": "hardware.non_torch_bytes",
            "communicators_bytes": "communicators_bytes",
            "required_bytes": "required_bytes",
            "fits": "fits",
            "step_seconds": "time.known_step_seconds",
            "tokens_per_second": "time.known_tokens_per_second",
        },
        inline=("memory",),
        optional=("vllm_sleep",),
    )

    knobs: Knobs
    hardware: Hardware
    memory: MemoryEstimate
    budget_bytes: int
    time: StepTime
    """The time of one optimizer step, on average over the data where these are known."""
    vllm_share_bytes: int = 0
    """What a vLLM engine on the same card takes for itself: weights and KV cache in a pool of its own. Where it sleeps,
    what it takes at the moment that needs most, of which ``memory`` is then."""
    vllm_sleep: VllmSleep | None = None
    """What it takes awake and asleep; None where it never sleeps."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        """Returns its JSON with the memory's keys under ``memory`` as well."""
        memory = MemoryEstimate.unfolded(values)  # first, since it rejects what is no object
        return {**values, "memory": memory}

    def _repr_html_(self) -> str:
        return html_of(self)

    @property
    def outside_bytes(self) -> int:
        """Adds up what the run holds outside the trainer's own allocator."""
        return self.hardware.non_torch_bytes + self.communicators_bytes + self.vllm_share_bytes

    @property
    def communicators_bytes(self) -> int:
        """Computes what NCCL holds of the device; 0 for one process."""
        return self.hardware.communicator_bytes * self.knobs.communicators

    @property
    def grows(self) -> bool:
        """Returns whether the allocator's segments grow page by page with these knobs."""
        return self.knobs.expandable_segments

    @property
    def reserved(self) -> ReservedEstimate:
        """Returns the figures of the mode that these knobs choose."""
        return self.memory.reserved.modes[self.grows]

    @property
    def mixed(self) -> ReservedByOrder | None:
        """Returns the mixed-length figures of the mode that these knobs choose; None if unknown."""
        mixed = self.memory.mixed_lengths
        return None if mixed is None else mixed.modes[self.grows]

    @property
    def reserved_bytes(self) -> int:
        """Returns what the allocator takes at most: for the worst batch, or over steps of rows of every length, where
        the longest run first, as in every run of this project."""
        worst_batch = self.reserved.peak_reserved_bytes
        return worst_batch if self.mixed is None else max(worst_batch, self.mixed.longest_first.last_bytes)

    @property
    def reservable_bytes(self) -> int:
        """Returns the budget less what lies outside torch's allocator."""
        return max(0, self.budget_bytes - self.outside_bytes)

    @property
    def cached_bytes(self) -> int:
        """Computes what the allocator holds at its peak beyond the peak of what tensors take."""
        return max(0, self.reserved_bytes - self.memory.peak_allocated_bytes)

    @property
    def required_bytes(self) -> int:
        """Adds up what must fit the budget: reserved bytes, and what lies outside the allocator."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def fits(self) -> bool:
        return self.reserved.fits and self.required_bytes <= self.budget_bytes

    @property
    def tokens_per_second(self) -> float:
        """Returns the speed that ranks plans; where ``time.assumed`` names another GPU it means nothing else."""
        return self.time.tokens_per_second

    @property
    def unquantized(self) -> str:
        """Describes what of a quantized base stays as it was, in a sentence; empty where nothing does."""
        size_bytes = self.memory.unquantized_bytes
        if not size_bytes or self.knobs.base_bits is None:
            return ""
        return (
            f"{format_bytes(size_bytes)} of the base are not quantized to {self.knobs.base_bits} bits: bitsandbytes "
            "quantizes linear layers, and these experts are fused into one tensor a layer, which stays in "
            f"{self.knobs.dtype}{' (--dtype bfloat16 halves it)' if self.knobs.dtype == 'float32' else ''}"
        )

    @property
    def routed(self) -> str:
        """Returns for which routing of tokens to experts the figure holds; empty for a model that has none."""
        worst = "the worst that a loop over experts allows"
        return {
            None: "",
            Routing.ANY: "grouped: memory does not depend on which ones the tokens choose",
            Routing.ONE: f"all tokens at the same experts, {worst}",
            Routing.EVEN: f"as many tokens at every expert, {worst}",
        }[self.memory.routing]

    def growing(self) -> Estimate:
        """Returns the same run in the allocator's other mode; nothing needs to be rehearsed again."""
        return replace(self, knobs=self.knobs.growing())


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A configuration on one device: a search rehearsed it, or a level of harm has it to offer.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> any(attempt.fits for attempt in chosen.attempts)
    True
    """

    json_form: ClassVar = Form(derived={"fits": "fits"})

    level: str = ""
    """The level of harm whose best plan it is, or the least that the level would need; empty for a rehearsal of the
    search."""
    knobs: Knobs
    required_bytes: int
    budget_bytes: int
    tokens_per_second: float | None = None
    """None on a device whose speed is not known."""
    rehearsed_layers: int | None = None
    """How many layers the rehearsed copies had at most; None where the whole model was rehearsed."""
    ratio: float | None = None
    """Tokens per second over the chosen plan's; None where it does not fit, and for a rehearsal of the search."""
    would_fit: tuple[str, ...] = ()
    """Where it would: the next larger cards, or more of these, each in a few words; empty where it fits here."""

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes
