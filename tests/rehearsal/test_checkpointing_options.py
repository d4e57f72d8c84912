"""Keys of ``gradient_checkpointing_kwargs`` that transformers reads itself: every so many layers, kept on the host."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from real_run import assert_alike, case, peaks, rehearsed

from autotrain_mem.rehearsal.model.truncated_depth import pattern_of
from autotrain_mem.types import Job, Phase

pytestmark = pytest.mark.slow

Folder = Callable[[str], pathlib.Path]


def recomputed(folder: pathlib.Path, **options: Any) -> Any:
    return case("sft", folder, {"gradient_checkpointing_kwargs": {"use_reentrant": False, **options}}, use_peft=True)


@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"offload": True}], ids=str)
def test_they_are_rehearsed_to_the_byte(options: dict[str, Any], model_folder: Folder, tmp_path: pathlib.Path) -> None:
    assert_alike(recomputed(model_folder("llama"), **options), tmp_path)


def test_half_as_many_layers_keep_more_and_the_host_keeps_what_was_kept(model_folder: Folder) -> None:
    folder = model_folder("llama")
    each, half, host = (
        rehearsed(recomputed(folder, **options)) for options in ({}, {"every_n_layers": 2}, {"offload": True})
    )
    assert peaks(host)[Phase.FORWARD] < peaks(each)[Phase.FORWARD] < peaks(half)[Phase.FORWARD]
    assert host.pinned_bytes > each.pinned_bytes


def test_layers_repeat_as_they_are_recomputed(model_folder: Folder) -> None:
    """A whole model is told from a few layers, which must be whole periods."""
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=12, num_attention_heads=4, intermediate_size=64)
    plain, thirds = (
        pattern_of(Job(method="sft", model="m", dataset=None, arguments=arguments), config)
        for arguments in ({}, {"gradient_checkpointing_kwargs": {"every_n_layers": 3}})
    )
    assert plain is not None
    assert thirds is not None
    assert (plain.period, thirds.period) == (1, 3)
