"""Inside without_weights, from_pretrained makes the model that it makes with weights."""

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from tiny import FAMILIES
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, Qwen2Model, dynamic_module_utils

from autotrain_mem.rehearsal.fake_run import materialize
from autotrain_mem.support.errors import UnsupportedModelError
from autotrain_mem.trainers.weightless import without_weights

Folder = Callable[[str], pathlib.Path]

WEIGHTS = "model.safetensors"


def bare(folder: pathlib.Path, to: pathlib.Path, **changes: Any) -> str:
    """A folder with the config only, changed."""
    config = json.loads((folder / "config.json").read_text()) | changes
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return str(to)


def fake(auto: Any, path: Any, **options: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True), without_weights(materialize):
        return auto.from_pretrained(path, **options)


def tensors(model: Any) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named]


def facts(model: Any) -> list[Any]:
    config, generation = model.config, getattr(model, "generation_config", None)
    plain = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    return [
        type(model),
        model.training,
        plain,
        config._attn_implementation,
        config._name_or_path,
        generation and generation.to_dict(),
        model.all_tied_weights_keys,
    ]


OPTIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "auto"},
    {"dtype": torch.bfloat16},
    {"dtype": "float16"},
    {"attn_implementation": "eager"},
    {"use_cache": False, "revision": "main"},
)


@pytest.mark.parametrize(
    ("family", "given"),
    [*(("qwen2", given) for given in OPTIONS), *itertools.product(FAMILIES, ({}, {"num_labels": 1}))],
    ids=str,
)
def test_the_model_is_that_which_has_weights(family: str, given: dict[str, Any], model_folder: Folder) -> None:
    auto = transformers.AutoModelForSequenceClassification if "num_labels" in given else AutoModelForCausalLM
    real = auto.from_pretrained(model_folder(family), **given)
    made = fake(auto, model_folder(family), **given)
    assert tensors(made) == tensors(real)
    assert facts(made) == facts(real)
    assert all(isinstance(tensor, FakeTensor) for tensor in (*made.parameters(), *made.buffers()))


def test_a_config_without_dtype_takes_the_checkpoints(qwen: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16).save_pretrained(path)
    bare(path, path, dtype=None)
    assert fake(AutoModelForCausalLM, path).dtype is torch.bfloat16
    (path / WEIGHTS).unlink()
    assert fake(AutoModelForCausalLM, path).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_what_an_architecture_keeps_in_float32_stays_so(
    attribute: str, dtype: torch.dtype, qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen2ForCausalLM, attribute, ["down_proj"])
    real = Qwen2ForCausalLM.from_pretrained(qwen, dtype=dtype)
    assert tensors(fake(Qwen2ForCausalLM, qwen, dtype=dtype)) == tensors(real)


def test_tied_embeddings_are_one_parameter_on_no_real_device(qwen: pathlib.Path) -> None:
    made = fake(AutoModelForCausalLM, qwen, device_map="auto")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert not hasattr(made, "hf_device_map"), "no map is made for the machine that rehearses"
    with without_weights():
        made = AutoModelForCausalLM.from_pretrained(qwen)
    assert {tensor.device.type for tensor in made.parameters()} == {"meta"}, "without a fake mode"


REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM
class OwnConfig(Qwen2Config):
    model_type = "its_own"
class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_that_brings_its_own_code_is_made_alike(
    qwen: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path = bare(qwen, tmp_path / "own", auto_map=names, model_type="its_own")
    (tmp_path / "own" / "own.py").write_text(REMOTE)
    made = fake(AutoModelForCausalLM, path, trust_remote_code=True)
    assert type(made).__name__ == "OwnModel"
    assert all(isinstance(tensor, FakeTensor) for tensor in made.parameters())


def test_no_head_attention_that_is_not_installed_and_an_adapter_beside_its_base_are_refused(
    qwen: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="no output head"):
        fake(Qwen2Model, qwen)
    with pytest.raises(UnsupportedModelError, match="attn") as caught:
        fake(AutoModelForCausalLM, qwen, attn_implementation="no_such_attention")
    assert "--attn_implementation" in caught.value.hint
    path = pathlib.Path(bare(qwen, tmp_path / "adapted"))
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x/y"}')
    with pytest.raises(UnsupportedModelError, match="LoRA adapter"):
        fake(AutoModelForCausalLM, path)


def test_neither_adapters_nor_defaults_need_the_network(qwen: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a config that the caller gives is at hand here: everything else would have to be asked for."""
    config = transformers.AutoConfig.from_pretrained(qwen)
    asked: list[str] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.utils._http, "get_session", lambda: asked.append("session"))
    with pytest.raises(OSError, match="cached"):  # no generation_config.json, and no config.json in its place
        fake(Qwen2ForCausalLM, "nobody/nothing", config=config)
    assert not asked
