"""In which collective a process waits: torch's own recorder is asked, of two real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

SCRIPT = """
import json, os, sys, threading, time
import torch, torch.distributed as dist
from autotrain_mem.training.process.world import last_collectives

rank, port = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
dist.all_reduce(torch.ones(2))
def wait_until(is_so):
    until = time.monotonic() + 20
    while not is_so(name for _, name in last_collectives().values()) and time.monotonic() < until:
        time.sleep(0.01)
if rank == "0":
    wait_until(lambda names: not any(names))  # that it is done is noted by another thread
    print(json.dumps(last_collectives()), flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3)), daemon=True).start()
wait_until(any)
print(json.dumps(last_collectives()), flush=True)
os._exit(0)
"""


def test_the_last_of_each_group_is_told_and_the_one_that_is_waited_for_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    )
    told, _ = second.communicate(timeout=60)
    said, _ = first.communicate(timeout=60)
    assert json.loads(told) == {"0": [2, "all_gather"]}
    assert json.loads(said) == {"0": [1, ""]}
