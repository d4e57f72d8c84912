"""Defines the estimate of a configuration: its memory, its time, and whether it fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support.codec import CodecError, Form
from autotrain_mem.support.lazy_names import ShownInNotebooks
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types.hardware import Hardware
from autotrain_mem.types.trace import Owner, Routing, RunFacts
from autotrain_mem.types.vllm import VllmSleep
from autotrain_mem.types.work import Phase, StepTime, Workload

STEPS = (10, 100, 1000)
"""The numbers of optimizer steps after which :class:`MixedLengths` records the peak reserved memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedLengths:
    """Holds the peak reserved memory of many steps with rows of every length, in both allocator modes.

    The longest rows run once before the first step, as in every run of this project.

    >>> from autotrain_mem import MixedLengths
    >>> mixed = MixedLengths(native=(2**30, 2**30, 3 * 2**29), expandable_segments=(2**30, 2**30, 2**30))
    >>> mixed.modes[True] == mixed.expandable_segments
    True
    """

    native: tuple[int, ...]
    """The peak reserved bytes up to each of :data:`STEPS`, on an unlimited device, in the default mode."""
    expandable_segments: tuple[int, ...]
    """The peak reserved bytes up to each of :data:`STEPS`, with ``expandable_segments:True``."""

    @classmethod
    def of_both(cls, found: Callable[[bool], tuple[int, ...]]) -> Self:
        return cls(native=found(False), expandable_segments=found(True))

    @property
    def modes(self) -> dict[bool, tuple[int, ...]]:
        return {False: self.native, True: self.expandable_segments}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedEstimate:
    """Holds the memory that the caching allocator reserves in one of its two modes, for one rehearsed run.

    >>> from autotrain_mem import ReservedEstimate
    >>> sizes = {"peak_allocated_bytes": 7, "peak_reserved_bytes": 9, "peak_limited_bytes": 8, "slack_bytes": 2}
    >>> ReservedEstimate(**sizes, num_alloc_retries=1).fits  # it released its cache
    False
    """

    peak_allocated_bytes: int
    """The peak of ``torch.cuda.memory_allocated``. It includes block remainders that are too small to split off."""
    peak_reserved_bytes: int
    """The peak of reserved bytes, on an unlimited device if the run does not fit, so that the shortage is known."""
    peak_limited_bytes: int
    """The peak of reserved bytes on the real device, where the allocator releases its cache before it refuses a
    request. The replay grants refused requests and continues. Equal to ``peak_reserved_bytes`` if the run fits."""
    slack_bytes: int = 0
    """The reserved but unallocated bytes when the peak was first reached: free blocks and remainders of split ones."""
    num_alloc_retries: int = 0
    """The number of times that the allocator released its whole cache to serve a request."""
    largest_refused_bytes: int | None = None
    """The largest request, in bytes, that failed even after the cache was released; None if none failed."""

    @property
    def fits(self) -> bool:
        """Returns whether the run fits without releasing the cache, which stalls the device each time."""
        return self.num_alloc_retries == 0 and self.largest_refused_bytes is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedByMode:
    """Holds the memory that the allocator reserves in each of its two modes, for one rehearsed run.

    >>> from autotrain_mem import AutoFit, estimate
    >>> found = estimate("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> found.memory.reserved.native == found.memory.reserved.modes[False] == found.reserved
    True
    """

    native: ReservedEstimate
    """The default mode: the allocator requests a new segment for each request that no cached block can serve."""
    expandable_segments: ReservedEstimate
    """The mode ``expandable_segments:True``: segments grow page by page."""

    @classmethod
    def of_both(cls, found: Callable[[bool], ReservedEstimate]) -> Self:
        return cls(native=found(False), expandable_segments=found(True))

    @property
    def modes(self) -> dict[bool, ReservedEstimate]:
        return {False: self.native, True: self.expandable_segments}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate(RunFacts):
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
    """The largest sum of live blocks, each rounded up to 512 bytes as torch's CUDA allocator does."""
    peak_phase: Phase
    phases: Mapping[Phase, int]
    """The peak of allocated bytes per phase, in order of first occurrence."""
    owners_at_peak: Mapping[Owner, int]
    """The allocated bytes of each owner at the peak."""
    modules_at_peak: tuple[tuple[str, int], ...]
    """The modules with the most bytes of activations and temporaries at the peak, and these bytes, largest first."""
    reserved: ReservedByMode
    rehearsal_seconds: float
    parts_at_peak: tuple[tuple[str, int], ...] = ()
    """The bytes of each part of a vision-language model at the peak: vision tower, projector, language model, rest."""
    rehearsed_layers: int | None = None
    """The layers of the larger truncated copy that this is extrapolated from; None if the whole model was rehearsed."""
    mixed_lengths: MixedLengths | None = None
    """The reserved memory over many steps; None if all rows are equally long, or if their lengths are unknown."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        """Turns lists of objects in an estimate's JSON into a mapping and pairs. Raises CodecError if malformed."""
        objects = MemoryEstimate.json_form.objects
        try:
            pairs = {name: [(each[key], each[to]) for each in values[name]] for name, (key, to) in objects.items()}
            return {**values, **pairs, "phases": dict(pairs["phases"])}
        except (KeyError, TypeError):
            raise CodecError(f"{', '.join(objects)} should be lists of objects with two keys") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Holds a rehearsed configuration's memory and work, which are equal on all GPUs with the same kernels."""

    memory: MemoryEstimate
    """The memory of the run, replayed on an unlimited device."""
    work: Workload
    awake: MemoryEstimate | None = None
    """The memory while a colocated vLLM engine is awake; None if it never sleeps."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        parts = {name: values[name] and MemoryEstimate.unfolded(values[name]) for name in ("memory", "awake")}
        return {**values, **parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(ShownInNotebooks):
    """Holds the estimate of one configuration on one device, in bytes and seconds.

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
    """The device memory that the run may take."""
    time: StepTime
    """The time of one optimizer step, averaged over the data if the data are known."""
    vllm_share_bytes: int = 0
    """The bytes that a vLLM engine on the same card takes for weights and KV cache, in its own pool. If it sleeps at
    times, this and ``memory`` describe the state, awake or asleep, in which the card needs more memory."""
    vllm_sleep: VllmSleep | None = None
    """The engine's memory awake and asleep; None if it never sleeps."""

    @staticmethod
    def unfolded(values: Any) -> Any:
        """Returns an estimate's JSON with its memory's keys also under ``memory``. Raises CodecError if malformed."""
        memory = MemoryEstimate.unfolded(values)  # first, since it rejects a value that is not an object
        return {**values, "memory": memory}

    @property
    def outside_bytes(self) -> int:
        """Computes the bytes that the run holds on the device outside the trainer's own allocator."""
        return self.hardware.non_torch_bytes + self.communicators_bytes + self.vllm_share_bytes

    @property
    def communicators_bytes(self) -> int:
        """Computes the bytes of device memory that NCCL holds; 0 for one process."""
        return self.hardware.communicator_bytes * self.knobs.communicators

    @property
    def grows(self) -> bool:
        """Returns whether these knobs choose expandable segments, which grow page by page."""
        return self.knobs.expandable_segments

    @property
    def segments(self) -> str:
        """Returns `` (expandable segments)``, to follow a figure; empty on a host, which has none."""
        return "" if self.hardware.origin == "cpu" else f" ({self.knobs.segments})"

    @property
    def reserved(self) -> ReservedEstimate:
        """Returns the figures of the allocator mode that these knobs choose."""
        return self.memory.reserved.modes[self.grows]

    @property
    def mixed(self) -> tuple[int, ...] | None:
        """Returns the peak reserved bytes up to each of :data:`STEPS` in the knobs' allocator mode; None if unknown."""
        return None if (mixed := self.memory.mixed_lengths) is None else mixed.modes[self.grows]

    @property
    def reserved_bytes(self) -> int:
        """Returns the larger peak of reserved bytes: of the worst batch, or of steps with rows of every length."""
        worst_batch = self.reserved.peak_reserved_bytes
        return worst_batch if self.mixed is None else max(worst_batch, self.mixed[-1])

    @property
    def reservable_bytes(self) -> int:
        """Returns the bytes that torch's allocator may reserve: the budget minus the memory outside it."""
        return max(0, self.budget_bytes - self.outside_bytes)

    @property
    def cached_bytes(self) -> int:
        """Computes by how many bytes the peak of reserved memory exceeds the peak of allocated memory."""
        return max(0, self.reserved_bytes - self.memory.peak_allocated_bytes)

    @property
    def required_bytes(self) -> int:
        """Computes the bytes that must fit the budget: reserved bytes plus memory outside the allocator."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def fits(self) -> bool:
        return self.reserved.fits and self.required_bytes <= self.budget_bytes

    @property
    def tokens_per_second(self) -> float:
        """Returns the predicted speed. If ``time.assumed`` names another GPU, it is only good for ranking plans."""
        return self.time.tokens_per_second

    @property
    def unquantized(self) -> str:
        """Returns a sentence on the part of a quantized base that stays unquantized; empty if there is none."""
        if not (size_bytes := self.memory.unquantized_bytes) or self.knobs.base_bits is None:
            return ""
        return (
            f"{format_bytes(size_bytes)} of the base are not quantized to {self.knobs.base_bits} bits: bitsandbytes "
            "quantizes linear layers, and these experts are fused into one tensor per layer, which stays in "
            f"{self.knobs.dtype}{' (--dtype bfloat16 halves it)' if self.knobs.dtype == 'float32' else ''}"
        )

    @property
    def on_host(self) -> str:
        """Returns a sentence on the host memory that offloading takes; empty if there is none."""
        pinned, other = self.memory.pinned_host_bytes, self.memory.unpinned_host_bytes
        beside = f", and {format_bytes(other)} unpinned" if other else ""
        each = " in each process" if self.knobs.processes > 1 else ""
        words = f"{format_bytes(pinned)} of pinned host memory, in blocks of powers of two{beside}{each}"
        return words if pinned else ""

    @property
    def routed(self) -> str:
        """Describes the routing of tokens to experts that this estimate assumes; empty for a model without experts."""
        worst = "the worst case of a loop over experts"
        return {
            None: "",
            Routing.ANY: "grouped: memory does not depend on which experts the tokens choose",
            Routing.ONE: f"all tokens at the same experts, {worst}",
            Routing.EVEN: f"equally many tokens at every expert, {worst}",
        }[self.memory.routing]

    def growing(self) -> Self:
        """Returns the estimate of the same run with expandable segments; no new rehearsal is needed."""
        return replace(self, knobs=self.knobs.growing())


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Describes a configuration on one device: an attempt of the search, or the best that a level of harm offers.

    >>> from autotrain_mem import AutoFit, plan
    >>> chosen = plan("sft", "Qwen/Qwen2.5-0.5B", autofit=AutoFit(gpu="rtx3060"), max_length=512)
    >>> any(attempt.fits for attempt in chosen.attempts)
    True
    """

    json_form: ClassVar = Form(derived={"fits": "fits"})

    level: str = ""
    """The level of harm whose best or least demanding plan this is; empty for an attempt of the search."""
    knobs: Knobs
    required_bytes: int
    budget_bytes: int
    tokens_per_second: float | None = None
    """The predicted speed; None if the device's rates are unknown."""
    rehearsed_layers: int | None = None
    """The layers of the larger rehearsed copy; None if the whole model was rehearsed."""
    ratio: float | None = None
    """Its tokens per second divided by the chosen plan's; None if it does not fit, or is an attempt of the search."""
    would_fit: tuple[str, ...] = ()
    """The hardware on which it would fit: the next larger cards, or more of these cards. Empty if it fits here."""

    @property
    def fits(self) -> bool:
        return self.required_bytes <= self.budget_bytes
