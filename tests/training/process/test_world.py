"""Which collective a process waits in, as torch's own recorder tells two real processes."""

import json
from pathlib import Path

from tests.forked import Forge

SCRIPT = """
import json, os, pathlib, sys, threading, time
import torch, torch.distributed as dist
from autotrain_mem.training.process.world import last_collectives

rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))

def wait_until(is_so):
    until = time.monotonic() + 20
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)

def names():
    return [name for _, name in last_collectives().values()]

if rank == "0":
    wait_until(lambda: not any(names()))  # another thread records that it is done
else:
    threading.Thread(target=lambda: dist.all_gather([torch.ones(3)] * 2, torch.ones(3)), daemon=True).start()
    wait_until(lambda: any(names()))
found = json.dumps(last_collectives())
(folder / f"{rank}.json").write_text(found)
wait_until(lambda: (folder / f"{1 - int(rank)}.json").exists())
os._exit(0)
"""


def test_the_last_collective_of_each_group_is_reported_and_the_one_waited_for_is_named(
    tmp_path: Path, forge: Forge
) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    forge.two_ranks([script, tmp_path], tmp_path / "log")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == {"0": [1, ""]}
    assert second == {"0": [2, "all_gather"]}
