"""Shared by all tests: no network, one thread, no telemetry, and nothing of the user's own cache."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    AUTOFIT_CACHE="",
)
