"""Which machine this is: by flags, and by what each launcher says."""

import pytest

from autotrain_mem.parallel.place import Place, place_of
from autotrain_mem.support.errors import UsageError

SLURM = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[01-08]",
    "SLURM_JOB_ID": "1234567",
}
PET = {"PET_NNODES": "1:2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "4711"}
SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
OPERATOR = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "first", "MASTER_PORT": "23456"}


def second(address: str, port: int) -> Place:
    return Place(rank=1, machines=2, address=address, port=port)


def test_a_launcher_says_it() -> None:
    for nodes, environment, place in (
        (None, SLURM, second("gpu07", 24567)),
        (2, PET, second("first", 4711)),
        (None, SKY, second("10.0.0.1", 29500)),
        (2, OPERATOR, second("first", 23456)),
        (2, {"PMI_SIZE": "2", "PMI_RANK": "1", "MASTER_ADDR": "first"}, second("first", 29500)),
        (None, OPERATOR, None),  # processes, that torchrun may have started on one machine
        (None, {"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, None),  # the batch script, which runs on one
        (1, SLURM, None),
        (None, {}, None),
    ):
        assert place_of(nodes, {}, environment) == place


def test_flags_win_over_a_launcher() -> None:
    given = {"machine_rank": 2, "main_process_ip": "here", "main_process_port": None}
    assert place_of(3, given, SLURM) == Place(rank=2, machines=3, address="here", port=29500)


def test_what_is_refused() -> None:
    for nodes, given, environment, words in (
        (None, {"machine_rank": 1}, {}, "--nodes"),
        (2, {"machine_rank": 1}, {}, "--main_process_ip"),
        (2, {"main_process_ip": "a"}, {}, "--machine_rank"),
        (2, {"machine_rank": 2, "main_process_ip": "a"}, {}, "not one of 2 ranks"),
        (2, {"machine_rank": 0, "main_process_ip": "a", "main_process_port": 70000}, {}, "70000"),
        (3, {}, SLURM, "--nodes 3 and Slurm"),
        (None, {}, SLURM | {"SLURM_STEP_NUM_TASKS": "16"}, "16 tasks on 2 nodes"),
        (2, {}, {"PMI_SIZE": "2", "PMI_RANK": "1"}, "MASTER_ADDR"),
        (None, {}, PET | {"PET_NODE_RANK": "one"}, "PET_NODE_RANK"),
        (None, {}, PET | {"PET_MASTER_ADDR": ""}, "Set PET_MASTER_ADDR"),
        (None, {}, SKY | {"SKYPILOT_NODE_IPS": " \n"}, "Set SKYPILOT_NODE_IPS"),
        (2, {"machine_rank": 0, "main_process_ip": " "}, {}, "address is empty"),
    ):
        with pytest.raises(UsageError) as refused:
            place_of(nodes, given, environment)
        assert words in f"{refused.value.message} {refused.value.hint}", words
