"""Answers what the planner asks: rehearsals by two workers, of few layers where that is enough, kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from autotrain_mem.engine.predict.depth_extrapolation import Copies, Point
from autotrain_mem.engine.predict.suggestions import would_fit
from autotrain_mem.engine.rehearsals import Lengths, Rehearsals, job_key, row_length
from autotrain_mem.errors import AutofitError
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.shared_work import shared_work
from autotrain_mem.planner.levers import SWITCHES
from autotrain_mem.spec import Estimate, Footprint, Knobs, Phase, Trace, codec
from autotrain_mem.spec.hardware import kernel_class
from autotrain_mem.spec.model import Depths, ModelFacts
from autotrain_mem.versions import versions_key
from autotrain_mem.worker.client import Worker

LEAST_RECOMPUTED = 0.3
"""Share of a forward pass that checkpointing does again, at least: all layers, and not the head, which has half of the
work in the smallest models."""


class Predictions:
    """The ``Predictor`` of one job on one device.

    Args:
        facts: Of the job's model.
        lengths: Of its rows.
        shared: Footprints that other cards with the same kernels were asked for, and that are added to.
        confirms: Whether the whole model is rehearsed where that is asked for; not to compare cards.
    """

    def __init__(
        self,
        rehearsals: Rehearsals,
        facts: ModelFacts,
        lengths: Lengths,
        shared: dict[Any, Footprint] | None = None,
        *,
        confirms: bool = True,
    ) -> None:
        self._confirms = confirms
        self._rehearsals = rehearsals
        self._facts = facts
        self._lengths = lengths
        self._footprints: dict[Any, Footprint] = {} if shared is None else shared
        self._unclear: set[Any] = set()
        self._has_shared = False
        self._copies = Copies(rehearsals.workers, self._trace, has_chunks=rehearsals.job.method_facts.has_chunked_loss)
        self._kernels = kernel_class(rehearsals.compute_capability)

    def rehearse(self, points: Sequence[Knobs], *, whole: bool) -> list[Estimate]:
        """Returns what these points need, each in the order of asking. Raises RehearsalError."""
        whole = whole and self._confirms
        missing = [knobs for knobs in points if self._known(knobs, whole) is None]
        few = [] if whole else [knobs for knobs in missing if self._depths(knobs) is not None]
        unclear = self._rehearse_few_layers(few)
        full = [knobs for knobs in missing if knobs not in few or knobs in unclear]
        traces = self._rehearsals.workers.map([partial(self._trace, knobs, None, None) for knobs in full])
        for knobs, trace in zip(full, traces, strict=True):
            self._keep(knobs, trace, None)
        return [judge(self._rehearsals, knobs, self._there(knobs, whole), self._lengths) for knobs in points]

    def tokens_per_second(self, known: Estimate, knobs: Knobs) -> float:
        """By the work of a rehearsed point: at best, where recomputation differs, with offloading as it is; about so,
        where processes share the model otherwise."""
        rows, known_rows = knobs.per_device_train_batch_size, known.knobs.per_device_train_batch_size
        # The copies' where there are some: it tells which work is done for each chunk of the loss.
        work = (self._known(known.knobs, False) or self._there(known.knobs, True)).work
        if knobs.sharding != known.knobs.sharding:
            work = shared_work(work, known, knobs)
        if rows == 1 < known_rows and not knobs.packing:
            work = work.without_mask()
        time = self._rehearsals.step_time(work, knobs, self._lengths, ratio=rows / known_rows)
        recomputed = 0.0  # forward passes that are done more, at least, or fewer, at most
        if knobs.gradient_checkpointing != known.knobs.gradient_checkpointing:
            recomputed = LEAST_RECOMPUTED if knobs.gradient_checkpointing else -1.0
        seconds = time.step_seconds + recomputed * time.phases.get(Phase.FORWARD, 0.0)
        return time.tokens / seconds if seconds > 0 else 0.0

    def would_fit(self, estimate: Estimate) -> tuple[str, ...]:
        """The next larger cards of the catalog, and more of this one."""
        return would_fit(self._rehearsals, estimate, None if self._has_shared else self._shared)

    def _shared(self, knobs: Knobs, devices: int) -> Estimate | None:
        """Returns what settings need where so many of these cards share the model; None where that is refused."""
        self._has_shared = True  # one rehearsal is told apart; a plan does not wait for more of them
        hardware = self._rehearsals.hardware
        try:
            there = self._rehearsals.on(replace(hardware, topology=replace(hardware.topology, devices=devices)))
            more = Predictions(there, self._facts, self._lengths, self._footprints, confirms=False)
            return more.rehearse([knobs], whole=False)[0]
        except AutofitError:  # the plan that is on its way matters more than one about a proposal
            return None

    def _there(self, knobs: Knobs, whole: bool) -> Footprint:
        footprint = self._known(knobs, whole)
        assert footprint is not None, "an estimate comes of a footprint"
        return footprint

    # -- what is known -----------------------------------------------------------------------------------------------

    def _known(self, knobs: Knobs, whole: bool) -> Footprint | None:
        """Finds a footprint from this run or one before: of the whole model, or of few layers where these will do."""
        depths = self._facts.depths_for(knobs)
        for layers in (None,) if whole or depths is None else (depths.long, None):
            key = self._key(knobs, layers)
            if key not in self._footprints:
                kept = self._rehearsals.footprint_store.get("footprint", self._stored_key(knobs, layers))
                if kept is None:
                    continue
                self._footprints[key] = codec.from_json(Footprint, kept)
            return self._footprints[key]
        return None

    def _keep(self, knobs: Knobs, trace: Trace, layers: int | None) -> None:
        memory = replace(estimate_memory(trace, self._rehearsals.endless_room), rehearsed_layers=layers)
        footprint = Footprint(memory=memory, work=trace.work)
        self._footprints[self._key(knobs, layers)] = footprint
        self._rehearsals.footprint_store.put("footprint", self._stored_key(knobs, layers), codec.to_json(footprint))

    def _key(self, knobs: Knobs, layers: int | None) -> Any:
        return replace(knobs, expandable_segments=False), layers, self._kernels  # a rehearsal is the same with both

    def _stored_key(self, knobs: Knobs, layers: int | None) -> dict[str, Any]:
        return {
            "job": job_key(self._rehearsals.job),
            "model": self._facts.digest,
            "knobs": codec.to_json(replace(knobs, expandable_segments=False)),
            "tokens": self._tokens(knobs),
            "layers": layers,
            "kernels": self._kernels,
            "allocator": asdict(self._rehearsals.endless_room),
            "versions": versions_key(),
        }

    def _depths(self, knobs: Knobs) -> Depths | None:
        """Returns the depths of the copies that tell what the whole does; None where it must be rehearsed itself."""
        return None if _kind(knobs) in self._unclear else self._facts.depths_for(knobs)

    def _tokens(self, knobs: Knobs) -> int:
        return row_length(self._rehearsals.job, knobs, self._lengths.longest)

    # -- what is rehearsed -------------------------------------------------------------------------------------------

    def _rehearse_few_layers(self, points: Sequence[Knobs]) -> list[Knobs]:
        """Returns the points for which few layers do not tell what the whole does."""
        depths = [(knobs, each) for knobs in points if (each := self._depths(knobs)) is not None]
        asked = [
            Point(knobs=knobs, depths=each, tokens=knobs.per_device_train_batch_size * self._tokens(knobs))
            for knobs, each in depths
        ]
        unclear = []
        for point, trace in zip(asked, self._copies.traces(asked), strict=True):
            if trace is None:
                unclear.append(point.knobs)
                self._unclear.add(_kind(point.knobs))
            else:
                self._keep(point.knobs, trace, point.depths.long)
        return unclear

    def _trace(self, knobs: Knobs, layers: int | None, chunks: int | None, worker: Worker) -> Trace:
        job, tokens = self._rehearsals.job, self._tokens(knobs)
        return worker.rehearse(job, knobs, tokens, self._kernels, layers=layers, chunks=chunks)


def judge(rehearsals: Rehearsals, knobs: Knobs, footprint: Footprint, lengths: Lengths) -> Estimate:
    """A footprint against one device: whether it fits, by what probes measured too, and how fast it is."""
    return Estimate(
        knobs=knobs,
        hardware=rehearsals.hardware,
        memory=rehearsals.correction.of(footprint.memory, knobs),
        budget_bytes=rehearsals.budget_bytes,
        time=rehearsals.step_time(footprint.work, knobs, lengths),
        vllm_share_bytes=rehearsals.vllm_share_bytes,
    )


def judge_trace(rehearsals: Rehearsals, knobs: Knobs, trace: Trace, lengths: Lengths) -> Estimate:
    """The same for one rehearsal, replayed on the device that there is: what happens where it ends is told as well."""
    footprint = Footprint(memory=estimate_memory(trace, rehearsals.room(knobs)), work=trace.work)
    return judge(rehearsals, knobs, footprint, lengths)


def _kind(knobs: Knobs) -> Any:
    """Settings that run the same code: where few layers are unclear for one, no time is lost on the next."""
    names = ("gradient_checkpointing", *SWITCHES, "optim", "packing", "sharding")
    return tuple(getattr(knobs, name) for name in names)
