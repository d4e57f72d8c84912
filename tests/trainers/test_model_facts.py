"""What is asked of a model before it trains: its layers, its bytes, and why its name does not lead to it."""

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from huggingface_hub import constants, errors
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from autotrain_mem.data.token_lengths import load_tokenizer
from autotrain_mem.support.errors import ModelNotFoundError
from autotrain_mem.trainers.finish import layers_to_shard, name_layers_to_shard
from autotrain_mem.trainers.model_support import unquantized_bytes
from autotrain_mem.trainers.pretrained import not_loaded


def plugin() -> Any:
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")


@pytest.mark.parametrize("adapts", [False, True])
def test_fsdp_shards_the_layers_that_a_model_has_though_transformers_names_those_of_images_too(adapts: bool) -> None:
    few = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "vocab_size": 32, "hidden_size": 16}
    small = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**few, **small))
    trained = get_peft_model(model, LoraConfig(target_modules="all-linear")) if adapts else model
    with pytest.raises(ValueError, match="Could not find"):
        plugin().set_auto_wrap_policy(trained)
    assert layers_to_shard(trained) == ("Qwen3_5DecoderLayer",)
    name_layers_to_shard(trained)
    wraps = plugin()
    wraps.set_auto_wrap_policy(trained)
    (layer,) = wraps.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert layer.__name__ == "Qwen3_5DecoderLayer"


class Mixture(torch.nn.Module):
    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = linear, torch.nn.LayerNorm(8)
        self.experts = torch.nn.Parameter(torch.zeros(4, 8, 8, dtype=torch.bfloat16))


def test_fused_experts_beside_quantized_layers_are_left_at_their_own_bytes() -> None:
    for linear in (bitsandbytes.nn.Linear4bit(8, 8), bitsandbytes.nn.Linear8bitLt(8, 8, has_fp16_weights=False)):
        assert unquantized_bytes(Mixture(linear)) == 4 * 8 * 8 * 2
    assert unquantized_bytes(Mixture(torch.nn.Linear(8, 8))) == 0


def test_a_hub_that_does_not_answer_is_told_from_one_that_has_no_such_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, said, cure in (
        (errors.RepositoryNotFoundError, "and the hub has no such model", "hf auth login"),
        (errors.GatedRepoError, "org/m is gated", "https://huggingface.co/org/m"),
        (errors.RevisionNotFoundError, "no such --model_revision", "commits/main"),
        (errors.LocalEntryNotFoundError, "and the hub (https://huggingface.co) cannot be reached", "the connection"),
        (PermissionError, "cannot be loaded: PermissionError at m when downloading.", "Check the spelling"),
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        raised = OSError("PermissionError at m when downloading.\nCheck your cache.")
        raised.__cause__ = kind.__new__(kind)  # some want the hub's response
        error = not_loaded("org/m", raised)
        assert said in error.message, kind
        assert cure in error.hint, kind
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert ("HF_HUB_OFFLINE" in not_loaded("org/m", raised).message) is (kind is errors.LocalEntryNotFoundError)


def test_a_tokenizer_that_the_hub_was_not_asked_for_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="can be loaded: HF_HUB_OFFLINE forbids"):
        load_tokenizer("no-such-org/no-such-model")
    with pytest.raises(ModelNotFoundError, match=r"can be loaded\.\n"):
        load_tokenizer(str(tmp_path))
