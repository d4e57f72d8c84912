"""Attacks the first machine of a run: ``python -m survival_cases.attack KIND ADDRESS PORT FOLDER WORDS...``.

Prints ``reached`` and holds its connections, or exits with 1 if it was told something or was not refused.
"""

import json
import pathlib
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from autotrain_mem.machine.catalog import named
from autotrain_mem.parallel.place import Place
from autotrain_mem.run.several_machines import without_flags
from autotrain_mem.support import codec
from autotrain_mem.training.machines.lead import Hello
from autotrain_mem.training.machines.link import introduced
from autotrain_mem.training.run_folder import KEY_NAME

OTHER_CARD = "card"
ATTACKS = ("half a message", "empty hello", "crowd", "interrupt", "no fields", OTHER_CARD)
"""The first three do not hold the key. The last one comes in the second machine's place, with another card."""


def attack(kind: str, address: str, port: int, folder: pathlib.Path, words: Sequence[str]) -> list[Any]:
    """Returns the connections to hold. Raises AssertionError if the first machine did not defend itself."""
    reached = [socket.create_connection((address, port), timeout=60) for _ in range(200 if kind == "crowd" else 1)]
    print("reached", flush=True)
    if kind in ATTACKS[:3]:
        reached[0].sendall(b"\0\0\0\0" if kind == "empty hello" else b"\0\0\1\0half of it")
        if kind == "empty hello":
            with suppress(ConnectionResetError):
                assert len(reached[0].makefile("rb").read()) < 100
        return reached
    place, command = Place(rank=1, machines=2, address=address, port=port), without_flags(words)
    hello = Hello(place=place, command=command if kind == OTHER_CARD else (), hardware=named("a100-80gb"))
    connection = introduced(reached[0], (folder / KEY_NAME).read_bytes(), leads=False)
    connection.send_bytes(json.dumps(codec.to_json(hello)).encode())
    while json.loads(connection.recv_bytes()).get("do") != "finish":
        connection.send_bytes(b"{}")
    with suppress(OSError):
        connection.send_bytes(json.dumps({"do": "interrupt"} if kind == "interrupt" else {"attempt": 1}).encode())
    return [connection]


if __name__ == "__main__":
    kind, address, port, folder, *words = sys.argv[1:]
    for _ in range(60):  # the first machine may not listen yet
        with suppress(ConnectionRefusedError):
            held = attack(kind, address, int(port), pathlib.Path(folder), words)
            time.sleep(0 if kind == OTHER_CARD else 600)
            break
        time.sleep(1)
