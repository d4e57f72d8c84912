"""Shared by all tests: no network, one thread, no telemetry."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
)
