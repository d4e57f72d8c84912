"""FSDP shards the layers that a model has, though transformers names others too."""

from typing import Any

import pytest
import torch

from autotrain_mem.trainers.finish import layers_to_shard, name_layers_to_shard


@pytest.fixture
def model() -> Any:
    """Names layers of images beside those of text, and has none of them."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    few = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "vocab_size": 32, "hidden_size": 16}
    small = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with torch.device("meta"):
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**few, **small))


def plugin() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")


@pytest.mark.parametrize("adapts", [False, True])
def test_accelerate_finds_the_layers(model: Any, adapts: bool) -> None:
    from peft import LoraConfig, get_peft_model

    trained = get_peft_model(model, LoraConfig(target_modules="all-linear")) if adapts else model
    with pytest.raises(ValueError, match="Could not find"):
        plugin().set_auto_wrap_policy(trained)
    assert layers_to_shard(trained) == ("Qwen3_5DecoderLayer",)
    name_layers_to_shard(trained)
    wraps = plugin()
    wraps.set_auto_wrap_policy(trained)
    assert [layer.__name__ for layer in wraps.auto_wrap_policy.keywords["transformer_layer_cls"]] == [
        "Qwen3_5DecoderLayer"
    ]
