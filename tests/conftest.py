"""Shared by all tests: no network, one thread, no telemetry, and nothing of the user's own cache."""

import gc
import os
from collections.abc import Iterator

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    AUTOFIT_CACHE="",
)


@pytest.fixture(autouse=True)
def _what_is_imported_is_not_looked_at_again() -> Iterator[None]:
    """As a worker does before it rehearses: every trainer collects garbage, 0.3 s of it among all that is imported."""
    gc.collect()
    gc.freeze()
    yield
