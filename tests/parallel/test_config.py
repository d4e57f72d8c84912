"""A user's own config of DeepSpeed: what is read of it, what is refused, and what ours says."""

from __future__ import annotations

from typing import Any

import pytest

from autotrain_mem.parallel.config import (
    read_deepspeed,
    with_auto,
)
from autotrain_mem.support.errors import UsageError


def zero(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **more}}


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/disk"}


@pytest.mark.parametrize(
    ("optimizer", "param", "read"), [(CPU, {"device": "none"}, ("cpu", None)), (NVME, NVME, ("nvme", "nvme"))]
)
def test_a_stage_and_its_offload_are_read(optimizer: Any, param: Any, read: tuple[str | None, str | None]) -> None:
    found = read_deepspeed(zero(3, offload_optimizer=optimizer, offload_param=param), "ds.json")
    assert (found.sharding, found.offload_optimizer_device, found.offload_param_device) == ("zero3", *read)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "stage is not 1, 2 or 3"),
        (zero(0), "stage is not 1, 2 or 3"),
        (zero() | {"optimizer": {"type": "AdamW"}}, "--optim makes the optimizer"),
        (zero(3, zero_quantized_weights=True), "ZeRO"),
        (zero(2, offload_optimizer=NVME), "offload_optimizer to NVMe is of stage 3"),
        (zero(3, offload_param={"device": "nvme"}), "offload_param has no nvme_path"),
        (zero(3, offload_optimizer=NVME | {"buffer_count": 3}), "buffer_count 3 is too few"),
        (zero(3, offload_optimizer=NVME) | {"aio": {"use_gds": True}}, "GPUDirect Storage"),
        (zero() | {"fp16": {"enabled": True}}, "fp16"),
        (zero() | {"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
    ],
)
def test_what_is_not_rehearsed_is_refused_by_name(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"^ds.json cannot be planned with: .*{why}"):
        read_deepspeed(config, "ds.json")


def test_numbers_that_are_trls_arguments_too_become_these() -> None:
    config = zero() | {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": "auto", "train_batch_size": 64}
    left, said = with_auto(config)
    assert said == {"per_device_train_batch_size": 4}
    assert left["train_micro_batch_size_per_gpu"] == left["train_batch_size"] == "auto"
