"""Predicts settings: rehearses them in workers, with few layers if these suffice, and stores the results.

It also suggests where a run that does not fit here would fit: on a larger card, or on more cards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from autotrain_mem.estimator.depth.extrapolate import expand
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.estimator.step_time import shared_work, step_time
from autotrain_mem.estimator.vllm_share import asleep_bytes, estimate_while_awake, vllm_share_bytes, with_sleep
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.machine.host_requirements import ITEM_BYTES
from autotrain_mem.planning.kept_answers import job_key
from autotrain_mem.planning.mixed_lengths import batches_of, replayed
from autotrain_mem.planning.rehearsals import Rehearsals, Subject
from autotrain_mem.search.space import with_rows
from autotrain_mem.settings.levers import SWITCHES, pulled
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.support.units import format_bytes
from autotrain_mem.support.versions import versions_key
from autotrain_mem.types import Estimate, Footprint, Hardware, Knobs, MixedLengths, Owner, Phase, Trace, Workload
from autotrain_mem.types.hardware import Capability, kernel_class, lacks_bf16
from autotrain_mem.types.model import FEW_LOSS_CHUNKS, MORE_LOSS_CHUNKS, Depths
from autotrain_mem.types.work import StepTime
from autotrain_mem.worker.client import Worker

CARDS_NAMED = 2

SHARDED = (Owner.WEIGHTS, Owner.GRADIENTS, Owner.OPTIMIZER_STATE)
"""The owners of memory that FSDP divides among its cards."""

MOST_CARDS = 8
"""The largest number of cards in a machine."""

Shared = Callable[[Knobs, int], Estimate | None]
"""Rehearses settings on several cards that share the model; returns None if they cannot."""


def would_fit(rehearsals: Rehearsals, estimate: Estimate, shared: Shared | None) -> tuple[str, ...]:
    """Names where a run that does not fit would fit: on the next larger cards, and on more of this card.

    Another card is judged by the bytes that this one reserves; other kernels may need a few percent more or less.
    ``shared`` rehearses settings on more cards; if it is None, bytes are computed without a rehearsal.
    """
    if rehearsals.hardware.origin == "cpu":
        return ()
    ways = [f"{card.name} ({format_bytes(card.total_bytes)})" for card in _larger_cards(rehearsals, estimate)]
    return (*ways, *_more_of_these(rehearsals, estimate, shared))


def _more_of_these(rehearsals: Rehearsals, estimate: Estimate, shared: Shared | None) -> Iterator[str]:
    """Finds the fewest cards that hold the run under FSDP2: computes their bytes, and confirms them with ``shared``."""
    job, knobs, topology = rehearsals.job, estimate.knobs, rehearsals.hardware.topology
    whole = [row for row in pulled(knobs) if "fsdp2" not in row.needs.get("sharding", ("fsdp2",))]
    # Shards save the bytes, so nothing is offloaded.
    released: dict[str, Any] = {
        row.knobs[0]: False for row in whole if row.offloads and row.knobs[0] not in job.arguments
    }
    needs_whole = len(released) < len(whole)
    if job.method_facts.holds_models_whole or needs_whole or topology.nodes > 1 or job.arguments.get("sharding"):
        return
    rows, owners = knobs.effective_batch_size, estimate.memory.owners_at_peak
    divided = sum(owners.get(owner, 0) for owner in SHARDED)
    counts = [topology.devices * times for times in (2, 4, 8)]
    for count in (each for each in counts if each <= MOST_CARDS and rows % each == 0):
        each_bytes = estimate.required_bytes - divided + divided * knobs.shards // count
        if each_bytes > estimate.budget_bytes:
            continue
        if shared is None:
            yield f"{count} of these (--gpus {count}), about {format_bytes(each_bytes)} each"
            return
        split = replace(knobs, processes=count, sharding="fsdp2", **released)
        there = shared(with_rows(split, min(knobs.per_device_train_batch_size, rows // count), rows), count)
        if there is not None and there.fits:
            yield f"{count} of these (--gpus {count}), {format_bytes(there.required_bytes)} each"
            return


def _larger_cards(rehearsals: Rehearsals, estimate: Estimate) -> list[Hardware]:
    """Returns the smallest cards that would hold the run, with the same half precision; the fastest of each size."""
    job, sleep = rehearsals.job, estimate.vllm_sleep
    halves = lacks_bf16(rehearsals.hardware.capability)

    def needed_bytes(card: Hardware) -> int:
        share_bytes = vllm_share_bytes(job, card)
        if sleep is None:
            return card.non_torch_bytes + estimate.reserved.peak_reserved_bytes + share_bytes
        there = replace(sleep, awake_bytes=share_bytes, asleep_bytes=asleep_bytes(job, card))
        return card.non_torch_bytes + there.needed_bytes

    cards = [card for card in catalog(laptops=False) if lacks_bf16(card.capability) is halves]
    fitting = [card for card in cards if needed_bytes(card) <= card.budget_bytes(rehearsals.headroom_bytes)]
    speeds = [(card.bandwidth_bytes_per_second or 0, card.fp16_flops_per_second or 0) for card in fitting]
    fastest: dict[int, Hardware] = {}
    for _, card in sorted(zip(speeds, fitting, strict=True), key=lambda pair: pair[0], reverse=True):
        fastest.setdefault(card.total_bytes, card)
    return [fastest[size] for size in sorted(fastest)[:CARDS_NAMED]]


LEAST_RECOMPUTED = 0.3
"""The least share of a forward pass that checkpointing recomputes. It never recomputes the head that makes the logits;
in a small model, this head does half of the work."""

TRACES_KEPT = 6
"""The number of traces to keep; each takes a few megabytes."""


Footprints = dict[Any, Footprint]
"""Footprints by settings, layers and kernel class."""


class Predictions:
    """Implements ``Predictor`` for one job on one device. ``shared``: footprints of other cards; new ones are added.
    ``kind``: the kernel class to rehearse, if cards are compared, which never rehearses the whole model."""

    def __init__(self, subject: Subject, shared: Footprints | None = None, kind: Capability | None = None) -> None:
        self._confirms = kind is None
        self._subject = subject
        self._footprints: Footprints = {} if shared is None else shared
        self._unclear: set[Any] = set()
        self._begun: dict[Any, tuple[Future[Trace], Future[Footprint]]] = {}
        """Rehearsals of the whole model and their replays, also those that were started in advance."""
        self._coming: list[Knobs] = []
        self._threads = ThreadPoolExecutor()
        self.kernels = kind or kernel_class(subject.hardware.capability)

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
        """Returns the estimates of these points, in the same order. Raises RehearsalError if a rehearsal fails."""
        whole = whole and self._confirms
        missing = [knobs for knobs in points if self._known(knobs, whole) is None]
        depths = {} if whole else {knobs: found for knobs in missing if (found := self._depths(knobs)) is not None}
        unclear: set[Knobs] = set()
        for (knobs, each), trace in zip(depths.items(), self._of_copies(depths), strict=True):
            if trace is None:
                unclear.add(knobs)
                self._unclear.add(_kind(knobs))
            else:
                self._keep(knobs, trace, footprint_of(trace, self._subject.endless_room, each.long))
        full = [knobs for knobs in missing if knobs not in depths or knobs in unclear]
        self._begin(full, whole=whole)
        for knobs in full:
            if started := self._begun.get(key := self._key(knobs, None)):
                trace = self._subject.workers.result(started[0], self._fill_idle_workers)
                self._keep(knobs, trace, self._subject.workers.result(started[1]))
                del self._begun[key]
        return [judge(self._subject, knobs, self._there(knobs, whole)) for knobs in points]

    def exceeds(self, knobs: Knobs) -> bool:
        """Returns whether the weights, plus all gradients in full fine-tuning, exceed the budget by themselves."""
        if self._subject.facts.parameters is None or knobs.has_group:
            return False
        each_bytes = knobs.base_bits / 8 if knobs.base_bits else ITEM_BYTES.get(knobs.dtype, 0)
        copies = 1 if knobs.use_peft else 2
        least = self._subject.facts.parameters * each_bytes * copies
        return least + self._subject.outside_bytes(knobs) > self._subject.budget_bytes

    def foresee(self, points: Sequence[Knobs], *, whole: bool) -> None:
        """Starts rehearsals of whole models. Points that only may be asked for wait for idle workers until the next
        call, and are left out if few layers suffice, since the search waits longest for whole models."""
        if whole and self._confirms:
            self._begin(points, whole=True)
        elif self._confirms:
            self._coming = [knobs for knobs in points if self._depths(knobs) is None]
            self._fill_idle_workers()

    def _fill_idle_workers(self) -> None:
        workers = self._subject.workers
        count = len(workers) if workers.are_started else 0  # a search that is repeated knows what it asks for
        while self._coming and sum(not begun.done() for begun, _ in self._begun.values()) < count > 1:
            self._begin([self._coming.pop(0)], whole=False)

    def _begin(self, points: Sequence[Knobs], *, whole: bool) -> None:
        room = self._subject.endless_room
        for knobs in points:
            if (key := self._key(knobs, None)) not in self._begun and self._known(knobs, whole) is None:
                begun = self._subject.workers.begin(partial(self._trace, knobs))
                replayed = self._threads.submit(lambda trace: footprint_of(trace.result(), room), begun)
                self._begun[key] = begun, replayed

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """Estimates a point's speed from a rehearsed point's work; an upper bound if only one of them recomputes."""
        rows, known_rows = knobs.per_device_train_batch_size, known.knobs.per_device_train_batch_size
        work = self._there(known.knobs, False).work
        if knobs.sharding != known.knobs.sharding:
            work = shared_work(work, known, knobs)
        if rows == 1 < known_rows and knobs.pads_rows:
            work = work.without_mask()
        time = _step_time(self._subject, work, knobs, ratio=rows / known_rows)
        more = LEAST_RECOMPUTED if knobs.recomputes else -1.0
        recomputed = 0.0 if knobs.recomputes == known.knobs.recomputes else more  # additional forward passes
        seconds = time.step_seconds + recomputed * time.phases.get(Phase.FORWARD, 0.0)
        return time.tokens / seconds if seconds > 0 else 0.0

    def would_fit(self, estimate: Estimate, *, rehearsed: bool) -> tuple[str, ...]:
        return would_fit(self._subject, estimate, self._shared if rehearsed else None)

    def over_steps(self, estimate: Estimate) -> Estimate:
        """Adds the bytes that a run with rows of mixed lengths reserves, or nothing if they are unknown."""
        knobs, is_asked = estimate.knobs, self._confirms and self._subject.caches
        batches = batches_of(self._subject, knobs) if is_asked else None
        if batches is None or estimate.memory.mixed_lengths is not None:
            return estimate
        rehearsed = self._known(knobs, whole=False) or Footprint(memory=estimate.memory, work=Workload())
        key = ("over steps", self._key(knobs, None))
        if key not in self._footprints:  # a search that is repeated after a probe finds it here
            memory = replace(rehearsed.memory, mixed_lengths=self._mixed(knobs))
            self._footprints[key] = replace(rehearsed, memory=memory)
        if (mixed := self._footprints[key].memory.mixed_lengths) is None:
            return estimate
        # The correction by probes applies here as well.
        before, now = rehearsed.memory.reserved.modes, estimate.memory.reserved.modes
        more = {grows: now[grows].peak_reserved_bytes - before[grows].peak_reserved_bytes for grows in (False, True)}
        moved = MixedLengths.of_both(lambda grows: tuple(max(0, size + more[grows]) for size in mixed.modes[grows]))
        return replace(estimate, memory=replace(estimate.memory, mixed_lengths=moved))

    def _mixed(self, knobs: Knobs) -> MixedLengths | None:
        store, key = self._subject.footprint_store, self._stored_key(knobs, None)
        profile = self._subject.lengths.profile
        key |= {"rows": None if profile is None else codec.to_json(profile)}
        if (kept := store.get("mixed_lengths", key)) is not None:
            return codec.from_json(MixedLengths, kept)
        try:
            mixed = replayed(self._subject, knobs, partial(self._trace_at, knobs))
        except AutofitError:  # planning continues without it
            return None
        if mixed is not None:
            store.put("mixed_lengths", key, codec.to_json(mixed))
        return mixed

    def _trace_at(self, knobs: Knobs, tokens: int) -> Trace:
        if (trace := self._subject.traces.get(self._subject.trace_key(knobs, tokens))) is None:
            if (depths := self._depths(knobs)) is not None:
                (trace,) = self._of_copies({knobs: depths}, tokens)
            if trace is None:
                (trace,) = self._subject.workers.map([partial(self._trace, knobs, tokens=tokens)])
        self.remember(knobs, tokens, trace)
        return trace

    def remember(self, knobs: Knobs, tokens: int, trace: Trace) -> None:
        """Keeps a trace for later calls; beyond :data:`TRACES_KEPT` the oldest is dropped."""
        key, traces = self._subject.trace_key(knobs, tokens), self._subject.traces
        traces.pop(key, None)
        traces[key] = trace
        for oldest in list(traces)[:-TRACES_KEPT]:
            del traces[oldest]

    def _shared(self, knobs: Knobs, devices: int) -> Estimate | None:
        """Returns the estimate for several cards that share the model; None if they cannot."""
        hardware = self._subject.hardware
        try:
            there = self._subject.on(replace(hardware, topology=replace(hardware.topology, devices=devices)))
            return Predictions(there, self._footprints, self.kernels).rehearse([knobs], whole=False)[0]
        except AutofitError:  # planning continues without it
            return None

    def _there(self, knobs: Knobs, whole: bool) -> Footprint:
        footprint = self._known(knobs, whole)
        assert footprint is not None, "an estimate needs a footprint"
        return footprint

    def _known(self, knobs: Knobs, whole: bool) -> Footprint | None:
        """Returns a footprint from this run or an earlier one, of few layers if these suffice, or None."""
        depths = self._fewer_layers(knobs)
        for layers in (None,) if whole or depths is None else (depths.long, None):
            if (key := self._key(knobs, layers)) not in self._footprints:
                kept = self._subject.footprint_store.get("footprint", self._stored_key(knobs, layers))
                if kept is None:
                    continue
                self._footprints[key] = codec.from_json(Footprint, kept)
            return self._footprints[key]
        return None

    def _keep(self, knobs: Knobs, trace: Trace, footprint: Footprint) -> None:
        layers = footprint.memory.rehearsed_layers
        self.remember(knobs, self._subject.row_length(knobs), trace)
        self._footprints[self._key(knobs, layers)] = footprint
        self._subject.footprint_store.put("footprint", self._stored_key(knobs, layers), codec.to_json(footprint))

    def _key(self, knobs: Knobs, layers: int | None) -> Any:
        return knobs.growing(False).as_rehearsed(), layers, self.kernels

    def _stored_key(self, knobs: Knobs, layers: int | None) -> dict[str, Any]:
        profile = self._subject.lengths.profile
        return {
            "job": job_key(self._subject.job),
            "model": self._subject.facts.digest,
            "knobs": codec.to_json(knobs.growing(False).as_rehearsed()),
            "tokens": self._subject.row_length(knobs),
            "images": list(self._subject.lengths.images),
            "answers": [] if profile is None else [profile.longest_prompt, profile.longest_answer],
            "layers": layers,
            "kernels": self.kernels,
            "allocator": asdict(self._subject.endless_room),
            "versions": versions_key(),
        }

    def _depths(self, knobs: Knobs) -> Depths | None:
        """Returns how many layers the copies to rehearse have; None if the whole model must be rehearsed."""
        return None if _kind(knobs) in self._unclear else self._fewer_layers(knobs)

    def _fewer_layers(self, knobs: Knobs) -> Depths | None:
        return self._subject.facts.depths_for(knobs, has_images=bool(self._subject.lengths.images))

    def _of_copies(self, points: Mapping[Knobs, Depths], tokens: int | None = None) -> Iterator[Trace | None]:
        """Extrapolates each trace from two copies with few layers; yields None if they do not determine it."""
        calls = []
        for knobs, depths in points.items():
            for layers, chunks in ((depths.long, MORE_LOSS_CHUNKS), (depths.short, FEW_LOSS_CHUNKS)):
                # The loss keeps all chunks if another stream holds activations back: these are freed between chunks.
                cut = None if depths.sees_held_back else chunks
                calls.append(partial(self._trace, knobs, layers=layers, chunks=cut, tokens=tokens))
        traces = self._subject.workers.each(calls)
        for depths in points.values():
            long, short = next(traces), next(traces)
            yield expand(short, long, depths)

    def _trace(self, knobs: Knobs, worker: Worker, *, tokens: int | None = None, **cut: int | None) -> Trace:
        tokens = self._subject.row_length(knobs) if tokens is None else tokens
        job = self._subject.rehearsed_job(knobs, tokens)
        return worker.rehearse(job, knobs, tokens, self.kernels, **cut)


def judge(subject: Subject, knobs: Knobs, footprint: Footprint) -> Estimate:
    """Returns the estimate of a footprint on one device, corrected by what probes measured."""
    estimate = Estimate(
        knobs=knobs,
        hardware=subject.hardware,
        memory=subject.correction.of(footprint.memory, knobs),
        budget_bytes=subject.budget_bytes,
        time=_step_time(subject, footprint.work, knobs),
        vllm_share_bytes=subject.vllm_share_bytes,
    )
    return with_sleep(estimate, footprint.awake, asleep_bytes=asleep_bytes(subject.job, subject.hardware))


def _step_time(subject: Subject, work: Workload, knobs: Knobs, *, ratio: float = 1.0) -> StepTime:
    """Computes the average time of an optimizer step; ``ratio``: rows of ``knobs`` divided by those of ``work``."""
    time = step_time(
        work,
        subject.hardware,
        gradient_accumulation_steps=knobs.gradient_accumulation_steps,
        tokens=knobs.effective_batch_size * subject.row_tokens(knobs),
        share=subject.padded_share(knobs),
        rows=ratio,
        overlaps=knobs.is_sharded,
    )
    if not knobs.precompute_ref_log_probs:
        return time
    # TRL scores the rows in one pass, whatever the number of epochs (``dpo_trainer.py: _precompute_ref_logps``).
    rows = subject.lengths.rows if subject.lengths.profile is None else subject.lengths.profile.rows
    passes = (rows or 0) / knobs.effective_batch_size
    return replace(time, scoring_seconds=passes * time.phases.get(Phase.FORWARD, 0.0))


def judge_trace(subject: Subject, knobs: Knobs, trace: Trace) -> Estimate:
    """Returns the estimate of one rehearsal, replayed within the device's memory."""
    return judge(subject, knobs, footprint_of(trace, subject.room(knobs)))


def footprint_of(trace: Trace, room: DeviceCapacity, layers: int | None = None) -> Footprint:
    """Replays a rehearsal; ``layers``: how many the larger of two shortened copies has; None for the whole model."""
    memory = replace(estimate_memory(trace, room), rehearsed_layers=layers)
    return Footprint(memory=memory, work=trace.work, awake=estimate_while_awake(trace, room, memory))


def _kind(knobs: Knobs) -> Any:
    """Returns an equal key for settings that run the same code: few layers suffice for all of them or for none."""
    switches = [getattr(knobs, name) for name in SWITCHES]
    return (knobs.recomputes, *switches, knobs.optim, knobs.pads_rows, knobs.sharding)
