from typing import Any

import pytest

from autotrain_mem.estimator.memory import vllm_share_bytes
from autotrain_mem.spec import Hardware, Job
from autotrain_mem.units import GIB

CARD = Hardware(name="toy24", origin="named", total_bytes=24 * GIB, free_bytes=20 * GIB, non_torch_bytes=0)


def share(**words: Any) -> float:
    """In GiB."""
    return vllm_share_bytes(Job(method="grpo", model="m", dataset=None, arguments=words), CARD) / GIB


def test_a_vllm_on_the_same_card_takes_its_share_of_the_whole_card() -> None:
    assert share(use_vllm=True) == pytest.approx(7.2)
    assert share(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.5) == 12


@pytest.mark.parametrize(
    "words", [{}, {"use_vllm": False}, {"use_vllm": True, "vllm_mode": "server"}, {"vllm_gpu_memory_utilization": 0.5}]
)
def test_without_an_engine_on_this_card_nothing_is_taken(words: dict[str, Any]) -> None:
    assert share(**words) == 0
