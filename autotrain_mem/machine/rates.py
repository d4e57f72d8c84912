"""How fast the catalog's cards are beside their memory and their bf16 tensor cores.

**fp32** is what ordinary cores do, without TF32, which torch leaves off (``torch.backends.cuda.matmul.allow_tf32``):
peak TFLOP/s from the data sheets, multiprocessors x 256 FLOP per clock at boost from GA102 on. A GeForce card does half
as much of it as in bf16 with fp32 accumulation (512 FLOP per clock and SM), a workstation card a quarter (1024).

**fp16** runs at bf16's rate on every card that has both; before Ampere there is fp16 only.

**The host link** is PCI Express: 0.985, 1.969 and 3.938 GB/s for each lane of generation 3, 4 and 5, one way, after
128b/130b coding (PCI-SIG's FAQ on each generation). Cards of generation 5 in an older board get the board's.
"""

from __future__ import annotations

from dataclasses import dataclass

_LANE_BYTES_PER_SECOND = {3: 985 * 10**6, 4: 1969 * 10**6, 5: 3938 * 10**6}


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one card."""

    fp32_teraflops: float
    generation: int
    """Of PCI Express."""
    lanes: int
    fp16_teraflops: float | None = None
    """Dense, tensor cores; None: as bf16."""

    @property
    def link_bytes_per_second(self) -> int:
        return _LANE_BYTES_PER_SECOND[self.generation] * self.lanes


RATES = {
    "a10": Rates(31.2, 4, 16),
    "a100-40gb": Rates(19.5, 4, 16),
    "a100-80gb": Rates(19.5, 4, 16),
    "a100-80gb-pcie": Rates(19.5, 4, 16),
    "a10g": Rates(35.0, 4, 16),
    "b200": Rates(75.0, 5, 16),
    "h100-80gb": Rates(66.9, 5, 16),
    "h100-nvl": Rates(60.0, 5, 16),
    "h100-pcie": Rates(51.2, 5, 16),
    "h200": Rates(66.9, 5, 16),
    "l4": Rates(30.3, 4, 16),
    "l40s": Rates(91.6, 4, 16),
    "mi300x": Rates(163.4, 5, 16),
    "rtx-6000-ada": Rates(91.1, 4, 16),
    "rtx-a4000": Rates(19.2, 4, 16),
    "rtx-a5000": Rates(27.8, 4, 16),
    "rtx-a6000": Rates(38.7, 4, 16),
    "rtx-pro-6000-blackwell": Rates(125.0, 5, 16),
    "rtx3060": Rates(12.7, 4, 16),
    "rtx3060ti": Rates(16.2, 4, 16),
    "rtx3070": Rates(20.3, 4, 16),
    "rtx3080": Rates(29.8, 4, 16),
    "rtx3080-12gb": Rates(30.6, 4, 16),
    "rtx3080ti": Rates(34.1, 4, 16),
    "rtx3090": Rates(35.6, 4, 16),
    "rtx3090ti": Rates(40.0, 4, 16),
    "rtx4060": Rates(15.1, 4, 8),
    "rtx4060ti-16gb": Rates(22.1, 4, 8),
    "rtx4060ti-8gb": Rates(22.1, 4, 8),
    "rtx4070": Rates(29.1, 4, 16),
    "rtx4070super": Rates(35.5, 4, 16),
    "rtx4070ti": Rates(40.1, 4, 16),
    "rtx4070tisuper": Rates(44.1, 4, 16),
    "rtx4080": Rates(48.7, 4, 16),
    "rtx4080super": Rates(52.2, 4, 16),
    "rtx4090": Rates(82.6, 4, 16),
    "rtx5060ti-16gb": Rates(23.7, 5, 8),
    "rtx5060ti-8gb": Rates(23.7, 5, 8),
    "rtx5070": Rates(30.9, 5, 16),
    "rtx5070ti": Rates(43.9, 5, 16),
    "rtx5080": Rates(56.3, 5, 16),
    "rtx5090": Rates(104.8, 5, 16),
    "t4": Rates(8.1, 3, 16, fp16_teraflops=65),
    "v100-16gb": Rates(15.7, 3, 16, fp16_teraflops=125),
    "v100-32gb": Rates(15.7, 3, 16, fp16_teraflops=125),
}
"""By the catalog's keys: NVIDIA's and AMD's data sheets, for A10G AWS's page on G5 instances."""
