"""What of a config counts as given, and the config with a plan in it. Nothing here rehearses or trains."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from autotrain_mem import AutoFit
from autotrain_mem.drop_in.config_merge import given_arguments, main_dtype, planned_config
from autotrain_mem.errors import UsageError
from autotrain_mem.methods.table import METHODS as METHOD_TABLE
from autotrain_mem.spec import Knobs
from tests.nouns import TRL_DEFAULTS

pytestmark = pytest.mark.newest

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None
METHODS = tuple(method for method in METHOD_TABLE if HAS_PPO or method != "ppo")
GENERATING = ("grpo", "rloo")


def kind_of(method: str) -> Any:
    if method == "ppo":
        from trl.experimental.ppo import PPOConfig

        return PPOConfig
    return getattr(trl, METHOD_TABLE[method].trainer.replace("Trainer", "Config"))


def config(method: str = "sft", **settings: Any) -> Any:
    return kind_of(method)("out", use_cpu=True, **settings)


def given(args: Any, autofit: AutoFit | None = None, **keywords: Any) -> dict[str, Any]:
    """What is given beside the output folder and TRL's max_length."""
    kind = next(kind_of(method) for method in METHODS if isinstance(args, kind_of(method)))
    words = given_arguments({"model": "NAME", "args": args, **keywords}, kind, autofit or AutoFit())
    assert json.loads(json.dumps(words)) == words  # as JSON has it
    default = {"output_dir": "out", "max_length": getattr(kind("out", use_cpu=True), "max_length", None)}
    return {name: value for name, value in words.items() if name not in default or value != default[name]}


def knobs_of(args: Any, **changed: Any) -> Knobs:
    """The knobs that a config has already, but for these."""
    names = {field.name for field in fields(Knobs)} - {"fp16"}
    held = {name: getattr(args, name) for name in names if hasattr(args, name)}
    plain = {"optim": getattr(args.optim, "value", args.optim), "max_length": getattr(args, "max_length", None)}
    return replace(TRL_DEFAULTS, **{**held, **plain, "fp16": args.fp16, **changed})


def settings(args: Any) -> dict[str, Any]:
    """All that is on a config, but for what transformers keeps of the process beside it."""
    return {name: value for name, value in vars(args).items() if name not in ("distributed_state", "_n_gpu")}


# -- what counts as given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_of_a_default_config_only_the_folder_and_the_length_are_given_and_no_secret(method: str) -> None:
    """On the CPU, which is the device's to say and no word of the config's."""
    args = config(method, hub_token="hf_secret")
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"token": "hf_secret"}
    length = {"max_length": 1024} if hasattr(args, "max_length") else {}
    words = given_arguments({"model": "NAME", "args": args}, kind_of(method), AutoFit())
    assert words == {"output_dir": "out", **length}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"save_strategy": "no", "report_to": ["tensorboard"], "lr_scheduler_kwargs": {"num_cycles": 2}},) * 2,
        ({"gradient_checkpointing": False},) * 2,  # and not its second name
        ({"max_length": None, "packing": True},) * 2,
        ({"bf16": False},) * 2,
        ({"fp16": True},) * 2,
        ({"learning_rate": 2e-5, "optim": "adamw_torch_fused", "gradient_checkpointing": True, "bf16": True}, {}),
    ],
    ids=lambda value: ",".join(value) or "nothing",
)
def test_what_differs_from_the_default_is_given(settings: dict[str, Any], words: dict[str, Any]) -> None:
    assert given(config(**settings)) == words


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        ({"steps_per_generation": 2}, {"generation_batch_size": 16}),
        ({"generation_batch_size": 32}, {"generation_batch_size": 32}),
        ({"gradient_accumulation_steps": 2, "generation_batch_size": 16}, {"gradient_accumulation_steps": 2}),
    ],
    ids=["neither", "accumulation", "steps", "batch", "the batch that follows anyway"],
)
def test_of_a_generations_sizes_its_rows_are_told(sizes: dict[str, int], words: dict[str, int]) -> None:
    for method in GENERATING:
        assert given(config(method, per_device_train_batch_size=8, **sizes)) == words
        config(method, per_device_train_batch_size=8, **words)  # and TRL takes what is told


# -- the model, its adapter and its optimizer --------------------------------------------------------------------------


def loaded(**kwargs: Any) -> dict[str, Any]:
    return given(config(model_init_kwargs=kwargs))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"dtype": "auto", "attn_implementation": "eager"},) * 2,
        ({"dtype": torch.float32}, {}),
        ({"revision": "v2", "trust_remote_code": True}, {"model_revision": "v2", "trust_remote_code": True}),
        ({"revision": "main", "trust_remote_code": False, "attn_implementation": None, "dtype": None}, {}),
        ({"device_map": "auto", "use_cache": False, "cache_dir": Path("models")}, {}),
        ({"subfolder": "last"}, {"model_init_kwargs": {"subfolder": "last"}}),
    ],
    ids=lambda value: ",".join(value) or "nothing",
)
def test_how_the_model_is_loaded_is_told_as_trls_flags_tell_it(kwargs: dict[str, Any], words: dict[str, Any]) -> None:
    assert loaded(**kwargs) == words


def test_quantization_is_told_wherever_it_stands() -> None:
    from transformers import BitsAndBytesConfig

    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    words = {"load_in_4bit": True, "use_bnb_nested_quant": True}
    assert given(config(), quantization_config=four) == words
    assert loaded(quantization_config=four) == words
    assert loaded(quantization_config={"load_in_4bit": True, "bnb_4bit_use_double_quant": True}) == words
    assert given(config(), quantization_config=BitsAndBytesConfig(load_in_8bit=True)) == {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("targets", "told"),
    [(["v_proj", "q_proj"], ["q_proj", "v_proj"]), (["q_proj"], [r".*\.q_proj"]), ("all-linear", "all-linear")],
    ids=["set", "a single one", "all-linear"],
)
def test_an_adapter_is_told_in_the_words_of_flags(targets: Any, told: Any) -> None:
    from peft import LoraConfig

    adapter = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=targets)
    settings = {"lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.1, "lora_target_modules": told}
    assert given(config(), peft_config=adapter) == {"use_peft": True, **settings}


def test_of_a_model_object_its_dtype_and_its_adapter_are_given() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.Linear(2, 2))
    assert main_dtype(model) == "bfloat16"
    as_it_is = {"dtype": "bfloat16", "load_in_4bit": False, "load_in_8bit": False}
    assert given(config(), model=model) == as_it_is
    model.peft_config = {"default": None}
    assert given(config(), model=model) == as_it_is | {"use_peft": True}


def test_a_dtype_that_trl_ignores_and_a_name_that_no_plan_decides_are_refused() -> None:
    with pytest.raises(UsageError, match=re.escape('model_init_kwargs={"dtype": "bfloat16"}')):
        loaded(torch_dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="Did you mean max_length"):
        given(config(), AutoFit(tune=["max_lenght"]))


def test_an_optimizer_of_the_scripts_own_stays() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    kept = {"optim": "adamw_torch_fused", "optimizer_offload": False}
    assert given(config(), optimizers=(optimizer, None)) == kept | {"use_peft": False}  # it has no adapter's weights
    assert given(config(), optimizer_cls_and_kwargs=(torch.optim.SGD, {})) == kept
    assert given(config(), optimizers=(None, None)) == {}


# -- pin and tune ----------------------------------------------------------------------------------------------------


def test_pin_gives_a_default_and_tune_takes_a_value_away() -> None:
    pinned = AutoFit(pin=["gradient_checkpointing", "dtype", "load_in_4bit"])
    assert given(config(), pinned) == {"gradient_checkpointing": True, "dtype": "float32", "load_in_4bit": False}
    assert given(config(optim="adamw_torch"), AutoFit(tune=["optim"])) == {}
    assert given(config(), AutoFit(tune=["max_length"])) == {"max_length": "auto"}
    assert given(config(), AutoFit(plan="plan.json")) == {}, "a default length gives way to a plan's own"
    assert given(config(max_length=512), AutoFit(plan="plan.json")) == {"max_length": 512}


# -- the config that trains ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_only_what_the_plan_changes_is_changed(method: str) -> None:
    args = config(method, learning_rate=1e-4, lr_scheduler_kwargs={"num_cycles": 2}, seed=7, hub_token="hf_secret")
    before = dict(vars(args))
    same = planned_config(args, knobs_of(args), loads=False)
    assert (type(same), settings(same)) == (type(args), settings(args))
    assert same is not args
    knobs = knobs_of(args, gradient_checkpointing=False, optim="adamw_torch")
    merged = settings(planned_config(args, knobs, loads=False))
    both_names = {"gradient_checkpointing", "activation_checkpointing"} & merged.keys()
    assert {name for name in merged if merged[name] != settings(args)[name]} == {"optim", *both_names}
    assert merged["optim"] == "adamw_torch"
    assert not any(merged[name] for name in both_names)
    assert dict(vars(args)) == before


@pytest.mark.parametrize(
    ("sizes", "planned", "follows"),
    [
        ({}, (2, 4), (4, 8)),
        ({"steps_per_generation": 2}, (4, 2), (4, 16)),
        ({"generation_batch_size": 16}, (4, 2), (4, 16)),
    ],
    ids=["the step's", "steps", "batch"],
)
def test_a_generation_that_is_not_one_steps_keeps_its_rows(
    sizes: dict[str, int], planned: tuple[int, int], follows: tuple[int, int]
) -> None:
    for method in GENERATING:
        args = config(method, per_device_train_batch_size=8, **sizes)
        rows, steps = planned
        knobs = knobs_of(args, per_device_train_batch_size=rows, gradient_accumulation_steps=steps)
        merged = planned_config(args, knobs, loads=False)
        assert (merged.steps_per_generation, merged.generation_batch_size) == follows


@dataclass
class OwnConfig(trl.SFTConfig):
    """A config of the user's own, with a field and what follows from it."""

    loudness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.twice = 2 * self.loudness


def test_a_config_of_the_users_own_stays_one() -> None:
    args = OwnConfig("out", use_cpu=True, loudness=3.0)
    args.note = "kept"
    knobs = knobs_of(args, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    made = planned_config(args, knobs, loads=False)
    assert type(made) is OwnConfig
    assert (made.loudness, made.twice, made.note) == (3.0, 6.0, "kept")
    assert (made.per_device_train_batch_size, args.per_device_train_batch_size) == (1, 8)


def test_a_model_given_by_name_is_loaded_in_the_plans_dtype() -> None:
    args = config(model_init_kwargs={"dtype": torch.float32, "revision": "v2"})
    made = planned_config(args, knobs_of(args, dtype="bfloat16"), loads=True)
    assert made.model_init_kwargs == {"dtype": "bfloat16", "revision": "v2"}
    assert args.model_init_kwargs == {"dtype": torch.float32, "revision": "v2"}
    untouched = planned_config(config(), knobs_of(config(), dtype="float32"), loads=True)
    assert untouched.model_init_kwargs is None
    of_an_object = planned_config(args, knobs_of(args, dtype="bfloat16"), loads=False)
    assert of_an_object.model_init_kwargs == args.model_init_kwargs


def test_nothing_that_trl_writes_into_is_shared_and_an_accelerator_of_the_scripts_own_lives_on() -> None:
    from accelerate import Accelerator

    args = config(accelerator_config={"dispatch_batches": None}, lr_scheduler_kwargs={"power": 2})
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    given_arguments({"model": "NAME", "args": args}, trl.SFTConfig, AutoFit())
    made = planned_config(args, knobs_of(args), loads=False)
    assert made.accelerator_config is not args.accelerator_config
    assert made.lr_scheduler_kwargs is not args.lr_scheduler_kwargs
    assert made.to_dict() == args.to_dict()
    assert accelerator.mixed_precision == "bf16"
    half = planned_config(config(), knobs_of(config(), fp16=True), loads=False)
    assert (half.fp16, half.bf16) == (True, False), "it takes the place of bfloat16"
    kept = planned_config(config(bf16=False), knobs_of(config(bf16=False)), loads=False)
    assert (kept.fp16, kept.bf16) == (False, False)
