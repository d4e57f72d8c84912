"""Runs one training request on the CPU for a simulated card (``python -m autotrain_mem.rehearsal.simulated_run``).

A rehearsal's recorder counts the allocations, so that the simulated card runs out of memory when a real one would.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autotrain_mem.training.process.main import main as run
from autotrain_mem.types import Owner

if TYPE_CHECKING:
    from autotrain_mem.allocator.simulator import Refusal
    from autotrain_mem.machine.simulated_card import SimulatedGpu
    from autotrain_mem.rehearsal.fake_run import Watch
    from autotrain_mem.training.process.build import Device
    from autotrain_mem.training.task import Request


def main() -> None:
    """Runs one request on a simulated card."""
    run(simulated_device)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedRun:
    """Gives the training process the simulated card's failed allocations, and its allocated bytes by owner."""

    gpu: SimulatedGpu
    watch: Watch

    def refusal(self, error: BaseException) -> Refusal | None:
        refusal = self.gpu.refusal
        return refusal if refusal is not None and refusal.message() in str(error) else None

    def owned(self, named: Mapping[Owner, list[Any]], refusal: Refusal) -> dict[Owner, int]:
        """Returns the bytes allocated at the failed request, by owner; the allocator's rounding counts as OTHER."""
        recorder = self.watch.recorder
        for owner, tensors in named.items():  # a run marks gradients only after a backward pass, state after a step
            for tensor in tensors:
                if recorder.block_of(tensor) is not None:
                    recorder.mark(tensor, owner, "")
        owned = recorder.ledger.owned(self.gpu.held_then)
        rounding = refusal.allocated_bytes - sum(owned.values())
        return {**owned, Owner.OTHER: owned.get(Owner.OTHER, 0) + rounding}


@contextlib.contextmanager
def simulated_device(request: Request) -> Iterator[Device]:
    """Yields the device of a training process: within the block, CPU tensors count as the simulated card's."""
    # These imports take seconds: the process handles interrupts first.
    from autotrain_mem.allocator.settings import environment_settings
    from autotrain_mem.machine.fault_injection import injected_faults
    from autotrain_mem.machine.simulated_card import SimulatedGpu
    from autotrain_mem.methods.configs import on_cpu
    from autotrain_mem.rehearsal.fake_run import Watch
    from autotrain_mem.training.process.build import Device, PhasePeaks

    settings = environment_settings(request.job.environment)
    settings = replace(settings, grows=request.knobs.expandable_segments)
    # Counts NCCL's buffers: gloo has none on a card.
    hardware = request.hardware.with_communicators(request.knobs.communicators)
    gpu = SimulatedGpu(hardware, settings)
    watch = Watch(gpu, hardware.capability, request.knobs)
    # Faults are injected into the training run only, not into a probe.
    environment = os.environ if request.task == "train" else dict[str, str]()
    faults = injected_faults(gpu, environment, pathlib.Path(request.output_dir), lambda: watch.phase)
    with watch.cuda_semantics(), contextlib.ExitStack() as until_trained:
        until_trained.enter_context(faults)
        peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
        peaks.listen(watch.recorder)
        yield Device(
            hardware=hardware,
            peaks=peaks,
            placed=on_cpu,
            train=watch.train,
            simulated=SimulatedRun(gpu=gpu, watch=watch),
            end_faults=until_trained.close,
        )


if __name__ == "__main__":
    main()
