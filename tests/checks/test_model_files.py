"""What is still to be downloaded of a model: by the hub's own figures, or by the config where it does not answer."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from transformers import Qwen2Config, Qwen2ForCausalLM

from autotrain_mem.checks.model_files import download

CONFIG = Qwen2Config(
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=32,
    dtype="bfloat16",
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The files of a model on a hub that answers, with their sizes."""
    files: dict[str, int] = {}

    def model_info(self: Any, model: str, **options: Any) -> Any:
        assert options["files_metadata"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in files.items()])

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return files


def size_of(model: str) -> int:
    found = download(model, CONFIG)
    assert found is not None
    assert found.folder == constants.HF_HUB_CACHE
    return found.size_bytes


def test_the_hub_has_the_sizes_and_only_safetensors_are_downloaded(hub: dict[str, int]) -> None:
    hub |= {"config.json": 7, "pytorch_model.bin": 90}
    assert size_of("org/name") == 90
    hub |= {
        "model-00001-of-00002.safetensors": 40,
        "model-00002-of-00002.safetensors": 30,
        "original/x.safetensors": 70,
    }
    assert size_of("org/name") == 70


def test_without_an_answer_the_size_follows_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    weights = sum(weight.numel() for weight in Qwen2ForCausalLM(CONFIG).parameters())
    assert size_of("org/name") == 2 * weights


def test_weights_on_disk_are_not_downloaded(
    hub: dict[str, int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["model.safetensors"] = 90
    assert download(str(tmp_path), CONFIG) is None
    index, shard = tmp_path / "index.json", tmp_path / "a.safetensors"
    index.write_text(json.dumps({"metadata": {"total_size": 90}, "weight_map": {"x": "a.safetensors"}}))
    cached: dict[str, str] = {"model.safetensors.index.json": str(index)}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, name, revision: cached.get(name))
    assert size_of("org/name") == 90, "an index alone is no model"
    cached["a.safetensors"] = str(shard)
    assert download("org/name", CONFIG) is None
