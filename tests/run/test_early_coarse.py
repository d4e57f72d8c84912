"""What sizes alone tell of a model is right, or not said."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotrain_mem import api
from autotrain_mem.methods.parameter_count import parameters
from autotrain_mem.run.early import coarse_answer

QWEN = {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
QWEN |= {"num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256}
QWEN3 = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 |= {"head_dim": 128}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (QWEN, 494_032_768),  # as the models' cards and safetensors say
        (LLAMA, 8_030_261_248),
        (QWEN3, 596_049_920),
        (LLAMA | {"model_type": "mixtral"}, None),
        (LLAMA | {"attention_bias": True}, None),
        (LLAMA | {"hidden_size": None}, None),
        ({"model_type": "llama"}, None),
    ],
)
def test_parameters_are_counted_for_known_decoders_only(config: dict[str, Any], count: int | None) -> None:
    assert parameters(config) == count


def test_a_line_says_what_weights_and_training_take_and_nothing_of_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    line = coarse_answer(api.Wish(method="sft", model=str(tmp_path)))
    assert all(figure in line for figure in ("From sizes alone", "8.03 billion", "119.7 GiB", "15.0 GiB"))
    assert coarse_answer(api.Wish(method="sft", model="org/model")) == ""
