"""Shares values among the ranks of one run, and sends heartbeats to the parent.

Ranks agree through the rendezvous store: no tensor is allocated or traced."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from autotrain_mem.support.host import interface_to
from autotrain_mem.training.pulses import PULSE_SECONDS
from autotrain_mem.training.task import SendEvent

OLDER_DRIVERS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
"""The variables that ``accelerate launch`` sets for RTX 40 cards with older drivers. accelerate refuses to start
without them (``accelerate/commands/launch.py: multi_gpu_launcher``, ``accelerate/state.py: PartialState``)."""

LOOPBACK = "lo"
"""Linux's name of the loopback interface, which reaches no other machine."""

POLL_SECONDS = 1.0
"""Time between two rounds in which the ranks ask each other whether to stop, for up to :data:`POLLED_RANKS` ranks. More
ranks ask less often, so that rounds take at most 0.2 % of the time: one takes 0.15 ms with 2 ranks, 4 ms with 64 and 11
to 17 ms with 256 (measured over loopback, on two cores)."""
POLLED_RANKS = 32

FLAG = 1 << 32
"""What a raised flag adds to a round's counter, whose lower 32 bits count the ranks."""


def find_other_machines() -> None:
    """Makes gloo use the interface that reaches the first machine, unless the user sets one.

    By default gloo uses the address of this machine's host name (``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp:
    createDefaultDevice``), which /etc/hosts often maps to the loopback interface. NCCL finds interfaces itself.
    """
    if (interface := interface_to(os.environ["MASTER_ADDR"])) is not None and interface != LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


class World:
    """Connects the processes that train together. All ranks must call the same methods in the same order."""

    def __init__(self, args: Any) -> None:
        self.rank, self.processes = int(args.process_index), int(args.world_size)
        self._timeout = timedelta(seconds=args.ddp_timeout)
        self._round = self._calls = self._last_poll = 0
        self._next_poll, self._polled = 1, time.monotonic()
        if self.processes > 1:
            self._store = dist.PrefixStore("autofit", dist.distributed_c10d._get_default_store())

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, word: str) -> list[str]:
        """Waits for a text from each rank; returns all of them in rank order. Raises RuntimeError if a rank exited or
        timed out (``ddp_timeout``)."""
        if self.processes == 1:
            return [word]
        keys = [f"{self._round}/{rank}" for rank in range(self.processes)]
        self._store.set(keys[self.rank], word)
        self._store.wait(keys, self._timeout)
        words = [said.decode() for said in self._store.multi_get(keys)]
        if self._round:  # all ranks have begun this round, so they have read the previous one
            self._store.delete_key(f"{self._round - 1}/{self.rank}")
        self._round += 1
        return words

    def poll(self, flag: bool) -> bool:
        """Returns whether any rank raised its flag; all get the same answer. Every rank must call it at every step.

        Ranks exchange flags every :data:`POLL_SECONDS`, and the answer in between is False. The last rank to arrive
        answers for all.
        """
        self._calls += 1
        if self.processes == 1 or self._calls < self._next_poll:
            return flag and self.processes == 1
        apart, now = self._calls - self._last_poll, time.monotonic()
        flags, answer = f"flags/{self._calls}", f"answer/{self._calls}"
        raised, arrived = divmod(self._store.add(flags, flag * FLAG + 1), FLAG)
        if arrived == self.processes:
            seconds = POLL_SECONDS * max(1, self.processes / POLLED_RANKS)
            steps = min(2 * apart, int(apart * seconds / max(now - self._polled, 1e-6)))
            self._store.set(answer, f"{raised} {max(1, steps)}")
            for name in ("flags", "answer"):  # all ranks have begun this round, so they have read the previous one
                self._store.delete_key(f"{name}/{self._last_poll}")
        self._store.wait([answer], self._timeout)
        count, steps = map(int, self._store.get(answer).split())
        self._last_poll, self._next_poll, self._polled = self._calls, self._calls + steps, now
        return count > 0


class Moves(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Counts a trainer's progress, for :func:`beating`."""

    count = 0
    """The progress count of this process."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts micro-steps, steps, evaluation batches, and the events between them."""
        Moves.count += 1

    on_substep_end = on_optimizer_step = on_step_end = on_prediction_step = on_step_begin
    on_evaluate = on_save = on_log = on_train_begin = on_train_end = on_step_begin


@contextmanager
def beating(send: SendEvent) -> Iterator[None]:
    """Within the block, a thread sends a ``pulse`` every second: the trainer's progress count, and where the calling
    thread is."""
    ended, main = threading.Event(), threading.get_ident()

    def beat() -> None:
        while not ended.wait(PULSE_SECONDS):
            try:
                send({"event": "pulse", "moves": Moves.count, "place": _place(main)})
            except OSError:  # the parent exited, so this process exits too
                return

    from accelerate.utils import check_cuda_p2p_ib_support

    if not check_cuda_p2p_ib_support():  # set what ``accelerate launch`` would set
        for name in OLDER_DRIVERS:
            os.environ.setdefault(name, "1")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PULSE_SECONDS)


def _place(thread: int) -> str:
    """Returns the innermost Python function of a thread, as ``in dataloader.py: __next__``."""
    frame = sys._current_frames().get(thread)  # released on return: a frame keeps its tensors alive
    code = None if frame is None else frame.f_code
    return "at its end" if code is None else f"in {os.path.basename(code.co_filename)}: {code.co_name}"
