"""Determines which of several machines this is, from flags or from a launcher's environment.

Names are those of the launchers: of ``accelerate launch`` (``--machine_rank``, ``--main_process_ip``,
``--main_process_port``); of torchrun, whose flags may be in the environment as ``PET_...``
(``torch/distributed/argparse_util.py: env``; Kubeflow's trainer sets them); of Slurm (srun(1), "OUTPUT ENVIRONMENT
VARIABLES"); of SkyPilot (its guide to distributed jobs); of launchers that count processes; and of MPI.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.support.errors import UsageError

PORT = 29500
"""The default port (``accelerate/commands/launch.py: main_process_port``; torchrun's too)."""
FIRST_PORT, PORTS = 20000, 10000
"""A Slurm job's port is the first port plus the last four digits of the job's id. All are below 32768, where Linux's
ephemeral ports begin (``ip_local_port_range``)."""
FLAGS = ("machine_rank", "main_process_ip", "main_process_port")

_HOW = (
    "Start the same command on every machine, with --machine_rank N (0 to {last}) and --main_process_ip ADDRESS of "
    "machine 0;\n--export slurm, kubernetes, skypilot or commands writes what each of them runs."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Identifies one of several machines that train together."""

    rank: int
    """The machine's number, from 0; machine 0 plans and leads."""
    machines: int
    address: str
    """The address of the first machine, reachable from all."""
    port: int
    """The port on which the first machine listens."""

    @property
    def endpoint(self) -> str:
        """Returns address and port: ``10.0.0.1:29500``, or ``[fe80::1]:29500``."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def place_of(nodes: int | None, given: Mapping[str, Any], environment: Mapping[str, str]) -> Place | None:
    """Returns this machine's place; None for a single machine, or if it is unknown. Raises UsageError if flags and
    environment contradict each other or themselves, or are not numbers.

    >>> place_of(2, {"machine_rank": 1, "main_process_ip": "10.0.0.1"}, {})
    Place(rank=1, machines=2, address='10.0.0.1', port=29500)
    >>> place_of(None, {}, {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "4711"})
    Place(rank=0, machines=2, address='a', port=4711)

    Args:
        nodes: The value of ``--nodes``; None if it is not given, so that a launcher's environment may decide.
        given: The values of ``FLAGS`` that are given.
    """
    if flags := {name: value for name, value in given.items() if value is not None}:
        if (nodes or 1) == 1:
            names = ", ".join(f"--{name}" for name in flags)
            raise UsageError(f"{names}: there is one machine.", hint="Add --nodes N, or remove them.")
        if "main_process_ip" not in flags or "machine_rank" not in flags:
            lacking = "machine_rank" if "machine_rank" not in flags else "main_process_ip"
            raise UsageError(f"--nodes {nodes} needs --{lacking} too.", hint=how_to_start(nodes or 2))
        return _checked("--machine_rank", nodes or 1, flags["machine_rank"], flags["main_process_ip"], flags)
    if nodes == 1:
        return None
    found = _slurm(environment) or _read(_LAUNCHERS, environment)
    if found is None and nodes is not None:
        found = _read(_PROCESS_LAUNCHERS, environment)
    if found is None:
        return None
    name, place = found
    if nodes is not None and nodes != place.machines:
        raise UsageError(
            f"--nodes {nodes} and {name}, which started {place.machines} machines, contradict each other.",
            hint=f"Remove --nodes, or start the command on {nodes} machines.",
        )
    return place if place.machines > 1 else None


def how_to_start(nodes: int) -> str:
    """Describes how to start the command when the machine's rank is unknown."""
    return _HOW.format(last=nodes - 1)


def _checked(name: str, machines: int, rank: Any, address: Any, more: Mapping[str, Any]) -> Place:
    port = more.get("main_process_port") or PORT
    try:
        place = Place(rank=int(rank), machines=int(machines), address=str(address), port=int(port))
    except ValueError as error:
        words = f"One of these is not a number: {name} {rank!r}, {machines!r} machines, port {port!r}."
        raise UsageError(words, hint=_HOW.format(last="N - 1")) from error
    if not 0 <= place.rank < place.machines:
        raise UsageError(f"{name} {place.rank} is not one of {place.machines} ranks.", hint=how_to_start(machines))
    if not place.address.strip():
        raise UsageError("The first machine's address is empty.", hint=how_to_start(machines))
    if not 0 < place.port < 65536:
        raise UsageError(f"--main_process_port {place.port} is not a port number.", hint="It takes 1 to 65535.")
    return place


FoundPlace = tuple[str, Place]


def _slurm(environment: Mapping[str, str]) -> FoundPlace | None:
    """Reads the place from a step of ``srun``; a batch script itself runs on its first node only, without a step."""
    machines = environment.get("SLURM_STEP_NUM_NODES", "1")
    if not machines.isdigit() or int(machines) < 2:
        return None
    if environment.get("SLURM_STEP_NUM_TASKS", machines) != machines:
        raise UsageError(
            f"Slurm started {environment['SLURM_STEP_NUM_TASKS']} tasks on {machines} nodes.",
            hint="Start one on each: srun --ntasks-per-node=1. autofit starts a process for each GPU itself.",
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    port = FIRST_PORT + int(environment.get("SLURM_JOB_ID", "0")) % PORTS
    found = {"main_process_port": port}
    return "Slurm", _checked("SLURM_NODEID", int(machines), environment.get("SLURM_NODEID"), first_host(nodes), found)


def first_host(nodes: str) -> str:
    """Returns the first host of a list in Slurm's notation.

    >>> first_host("gpu[07-09,12],cpu1"), first_host("rack[1-2]n[3-4]"), first_host("a,b")
    ('gpu07', 'rack1n3', 'a')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def _read(launchers: Iterable[tuple[str, str, str, str, str]], environment: Mapping[str, str]) -> FoundPlace | None:
    for name, machines, rank, address, port in launchers:
        count = environment.get(machines, "").rpartition(":")[2]  # torchrun's 1:4 means 1 to 4 machines
        if not count.isdigit() or int(count) < 2 or rank not in environment:
            continue
        if not (first := environment.get(address, "").split()[:1]):
            raise UsageError(
                f"{machines} sets the number of machines to {count}, but the first machine's address is not given.",
                hint=f"Set {address} to that address on every machine, or give --main_process_ip and --machine_rank.",
            )
        found = {"main_process_port": environment.get(port)}
        return name, _checked(rank, int(count), environment[rank], first[0], found)
    return None


_LAUNCHERS = (
    ("torchrun", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", ""),
)
"""Launchers other than Slurm that count machines: name, and the variables of count, rank, address and port."""
_PROCESS_LAUNCHERS = (
    ("the launcher", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
    ("MPI", "PMI_SIZE", "PMI_RANK", "MASTER_ADDR", "MASTER_PORT"),
    ("MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT"),
)
"""Launchers that count processes. They are read only with ``--nodes N``, and must then have started N processes."""
