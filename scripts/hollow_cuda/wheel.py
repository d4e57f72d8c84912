"""The CUDA build of torch that is examined without a GPU, and the headers that it was built with."""

from __future__ import annotations

TORCH = "2.13.0"
WHEEL = (
    "https://files.pythonhosted.org/packages/01/79/1f2d34ad7034ee1c7ffc1cf8bf0f8213af2a81df6ecdb3997ecec107c09d/"
    f"torch-{TORCH}-cp311-cp311-manylinux_2_28_x86_64.whl"
)
"""As ``pip install torch`` takes it on Linux for Python 3.11; its C++ libraries are the same for any Python."""
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
"""CUDA 13.0, which this torch is built with: the layout of cudaDeviceProp depends on it."""
