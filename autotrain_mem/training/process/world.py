"""Lets the ranks of one training agree on a value, and sends the parent heartbeats.

Ranks agree through the rendezvous store (``torch/distributed/distributed_c10d.py:
init_process_group``): no tensor is made, on no device and in no trace, and no collective of the training is disturbed.
A round takes 0.3 ms of two ranks on one machine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from autotrain_mem.support.host import interface_to
from autotrain_mem.training.pulses import PULSE_SECONDS
from autotrain_mem.training.task import SendEvent

OLDER_DRIVERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
"""What ``accelerate launch`` switches off for cards of the RTX 40 series under older drivers, without which accelerate
refuses to start (``accelerate/commands/launch.py: multi_gpu_launcher``, ``accelerate/state.py: PartialState``)."""

LOOPBACK = "lo"
"""Linux's name of the loopback interface, which reaches no other machine."""

STILL_PULSES = 5
"""Heartbeats without progress after which a process reports what it waits in; reading that takes 0.1 ms."""


def find_other_machines() -> None:
    """Makes gloo use the interface that reaches the first machine, unless the user names one.

    By itself it takes the address of this machine's own name (``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:
    createDefaultDevice``), which /etc/hosts often says to be one of the loopback's. NCCL looks for interfaces itself.
    """
    interface = interface_to(os.environ["MASTER_ADDR"])
    if interface is not None and interface != LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


class World:
    """The processes that train together, as one of them sees them; every rank calls the same methods in the same order.

    Args:
        args: The trainer's, whose ``ddp_timeout`` limits how long another rank is waited for.
    """

    def __init__(self, args: Any) -> None:
        self.rank, self.processes = int(args.process_index), int(args.world_size)
        self._timeout = timedelta(seconds=args.ddp_timeout)
        self._round = 0
        if self.processes > 1:
            self._store = dist.PrefixStore("autofit", dist.distributed_c10d._get_default_store())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, word: str) -> list[str]:
        """Returns the words of all ranks, in their order, when all have said theirs.

        Raises:
            RuntimeError: a rank exited or timed out (``ddp_timeout``).
        """
        if self.processes == 1:
            return [word]
        keys = [f"{self._round}/{rank}" for rank in range(self.processes)]
        self._store.set(keys[self.rank], word)
        self._store.wait(keys, self._timeout)
        words = [said.decode() for said in self._store.multi_get(keys)]
        if self._round:  # all have begun this round, and so have read the one before
            self._store.delete_key(f"{self._round - 1}/{self.rank}")
        self._round += 1
        return words

    def any(self, flag: bool) -> bool:
        """Returns whether it is true for any rank; the same answer for all."""
        return "1" in self.gather("1" if flag else "0")


class Moves(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Counts how often a trainer moves, for :func:`beating`."""

    count = 0
    """The number of this process's moves."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts a micro-step, a step, a batch of evaluation, and what comes between."""
        Moves.count += 1

    on_substep_end = on_optimizer_step = on_step_end = on_prediction_step = on_step_begin
    on_evaluate = on_save = on_log = on_train_begin = on_train_end = on_step_begin


@contextmanager
def beating(send: SendEvent) -> Iterator[None]:
    """Within the block, a thread sends a ``pulse`` every second: how often the trainer has moved, and where the caller
    is; after a while without a move, also the collectives that it has reached."""
    ended, main = threading.Event(), threading.get_ident()

    def beat() -> None:
        moves = still = 0
        while not ended.wait(PULSE_SECONDS):
            still = still + 1 if Moves.count == moves else 0
            moves = Moves.count
            pulse = {"event": "pulse", "moves": moves, "place": _place(main)}
            if moves and still >= STILL_PULSES:
                pulse["collectives"] = last_collectives()
            try:
                send(pulse)
            except OSError:  # the parent exited, so this process exits too
                return

    from accelerate.utils import check_cuda_p2p_ib_support

    if not check_cuda_p2p_ib_support():  # NCCL is told what ``accelerate launch`` would tell it
        for name in OLDER_DRIVERS:
            os.environ.setdefault(name, "1")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PULSE_SECONDS)


Collectives = dict[str, tuple[int, str]]
"""Name of a group -> the number of the last collective that was asked of it, and its name while it is waited for."""

_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


def _place(thread: int) -> str:
    """Returns where a thread is, as ``in dataloader.py: __next__``: the innermost function that Python knows of.

    It must stay a function: a frame that the caller kept until its next heartbeat would keep its tensors alive.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "at its end"
    return f"in {os.path.basename(frame.f_code.co_filename)}: {frame.f_code.co_name}"


def last_collectives() -> Collectives:
    """Returns them for all groups of this process; none if nothing is recorded, or torch has changed."""
    found: Collectives = {}
    with contextlib.suppress(Exception):  # a private function of torch's, and a word that is only good to have
        from torch._C import _distributed_c10d

        for name in _DUMPS:
            if (dump := getattr(_distributed_c10d, name, None)) is not None:
                found |= read(pickle.loads(dump(True, False, True)))
    return found


def read(dump: Mapping[str, Any]) -> Collectives:
    """Reads one dump, of the form that ``torch/distributed/flight_recorder`` analyses."""
    waited = {
        (entry["process_group"][0], entry["collective_seq_id"]): str(entry["profiling_name"]).rpartition(":")[2]
        for entry in dump.get("entries", ())
        if not entry["retired"] and not entry["is_p2p"]
    }
    last = {group: int(status["last_enqueued_collective"]) for group, status in dump.get("pg_status", {}).items()}
    return {group: (number, waited.get((group, number), "")) for group, number in last.items() if number >= 0}
