"""What of a config counts as given, and the config with a plan in it. Nothing here rehearses or trains."""

import importlib
import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from peft import LoraConfig
from test_flag_verdicts import INSTALLED_METHODS
from transformers import BitsAndBytesConfig

from autotrain_mem import AutoFit
from autotrain_mem.drop_in.config_merge import given_arguments, main_dtype, planned_config
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Knobs
from autotrain_mem.types.methods_table import METHODS
from tests.nouns import TRL_DEFAULTS

pytestmark = pytest.mark.newest

GENERATING = ("grpo", "rloo")


def kind_of(method: str) -> Any:
    name = METHODS[method].trainer.replace("Trainer", "Config")
    if hasattr(trl, name):
        return getattr(trl, name)
    return getattr(importlib.import_module(f"trl.experimental.{method}"), name)


def config(method: str = "sft", **settings: Any) -> Any:
    return kind_of(method)("out", use_cpu=True, **settings)


def given(args: Any, autofit: AutoFit | None = None, **keywords: Any) -> dict[str, Any]:
    """What is given beside the output folder and TRL's max_length."""
    kind = next(kind_of(method) for method in INSTALLED_METHODS if isinstance(args, kind_of(method)))
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


def planned(args: Any, *, loads: bool = False, **changed: Any) -> Any:
    """The config with a plan in it whose knobs are the config's own, but for these."""
    return planned_config(args, knobs_of(args, **changed), loads=loads)


def settings(args: Any) -> dict[str, Any]:
    """All that is on a config, but for what transformers keeps of the process beside it."""
    return {name: value for name, value in vars(args).items() if name not in ("distributed_state", "_n_gpu")}


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_of_a_default_config_only_the_folder_and_the_length_are_given_and_no_secret(method: str) -> None:
    """On the CPU, which is the device's to say and no word of the config's."""
    args = config(method, hub_token="hf_secret")
    if hasattr(args, "model_init_kwargs"):
        args.model_init_kwargs = {"token": "hf_secret"}
    default = 512 if METHODS[method].is_online else 1024
    length = {"max_length": default} if hasattr(args, "max_length") else {}
    words = given_arguments({"model": "NAME", "args": args}, kind_of(method), AutoFit())
    assert words == {"output_dir": "out", **length}


def loading(**kwargs: Any) -> dict[str, Any]:
    return {"model_init_kwargs": kwargs}


def lora(targets: Any) -> dict[str, Any]:
    return {"peft_config": LoraConfig(r=8, lora_alpha=32, lora_dropout=0.1, target_modules=targets)}


FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
IN_FOUR = {"load_in_4bit": True, "use_bnb_nested_quant": True}
LORA = {"use_peft": True, "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.1}
SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
OWN_OPTIMIZER = {"optim": "adamw_torch_fused", "optimizer_offload": False}
BESIDE = {"quantization_config", "peft_config", "optimizers", "optimizer_cls_and_kwargs"}


def test_what_differs_from_the_default_in_the_config_or_beside_it_is_given_as_trls_flags_tell_it() -> None:
    for settings, words in (
        ({"save_strategy": "no", "report_to": ["tensorboard"], "lr_scheduler_kwargs": {"num_cycles": 2}},) * 2,
        ({"gradient_checkpointing": False},) * 2,  # and not its second name
        ({"max_length": None, "packing": True},) * 2,
        ({"bf16": False},) * 2,
        ({"fp16": True},) * 2,
        ({"learning_rate": 2e-5, "optim": "adamw_torch_fused", "gradient_checkpointing": True, "bf16": True}, {}),
        (loading(dtype=torch.bfloat16), {"dtype": "bfloat16"}),
        (loading(dtype="auto", attn_implementation="eager"), {"dtype": "auto", "attn_implementation": "eager"}),
        (loading(dtype=torch.float32), {}),
        (loading(revision="v2", trust_remote_code=True), {"model_revision": "v2", "trust_remote_code": True}),
        (loading(revision="main", trust_remote_code=False, attn_implementation=None, dtype=None), {}),
        (loading(device_map="auto", use_cache=False, cache_dir=Path("models")), {}),
        (loading(subfolder="last"), loading(subfolder="last")),
        (loading(quantization_config=BitsAndBytesConfig(**FOUR_BITS)), IN_FOUR),
        (loading(quantization_config=FOUR_BITS), IN_FOUR),
        ({"quantization_config": BitsAndBytesConfig(**FOUR_BITS)}, IN_FOUR),
        (
            {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
            {"load_in_4bit": True, "use_bnb_nested_quant": False},  # which no plan replaces
        ),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, {"load_in_8bit": True}),
        (lora(["v_proj", "q_proj"]), LORA | {"lora_target_modules": ["q_proj", "v_proj"]}),
        (lora(["q_proj"]), LORA | {"lora_target_modules": [r".*\.q_proj"]}),
        (lora("all-linear"), LORA | {"lora_target_modules": ["all-linear"]}),
        ({"optimizers": (SGD, None)}, OWN_OPTIMIZER | {"use_peft": False}),  # it has no adapter's weights
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, OWN_OPTIMIZER),
        ({"optimizers": (None, None)}, {}),
    ):
        beside = {name: settings[name] for name in settings.keys() & BESIDE}
        in_config = {name: settings[name] for name in settings.keys() - BESIDE}
        assert given(config(**in_config), **beside) == words, settings


BEST = {"load_best_model_at_end": True, "save_steps": 10}


def test_what_a_config_sets_by_itself_is_not_given() -> None:
    for settings in (
        {"eval_strategy": "steps"},  # do_eval, eval_steps
        {"eval_strategy": "steps", "logging_steps": 5, **BEST},  # metric_for_best_model, greater_is_better
        {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "eval_reward"},
        {"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"},
        {"torch_compile": True},  # torch_compile_backend
        {"torch_compile_mode": "default"},  # torch_compile
        {"torch_compile_backend": "aot_eager"},
        {"use_liger_kernel": True},  # loss_type, of SFT and GKD
        {"use_transformers_paged": True},  # use_transformers_continuous_batching
        {"vllm_importance_sampling_cap": 3.0},  # vllm_importance_sampling_clip_max
    ):
        for method in INSTALLED_METHODS:
            if settings.keys() <= {field.name for field in fields(kind_of(method))}:
                assert given(config(method, **settings)) == settings


def test_of_a_generations_sizes_its_rows_are_told() -> None:
    for sizes, words in (
        ({}, {}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        ({"steps_per_generation": 2}, {"generation_batch_size": 16}),
        ({"generation_batch_size": 32}, {"generation_batch_size": 32}),
        ({"gradient_accumulation_steps": 2, "generation_batch_size": 16}, {"gradient_accumulation_steps": 2}),
    ):
        of_four = {"per_device_train_batch_size": 4, "eval_strategy": "steps"}
        for method in GENERATING:
            assert given(config(method, per_device_train_batch_size=8, **sizes)) == words
            config(method, per_device_train_batch_size=8, **words)  # and TRL takes what is told
            # 4 rows hold no group of 8; 8 rows to evaluate are TRL's default, so that they do not differ
            grouped = config(method, num_generations=8, per_device_eval_batch_size=8, steps_per_generation=2, **of_four)
            found = given(grouped)
            found.pop("num_generations", None)
            assert found == of_four | {"generation_batch_size": 8}


def test_of_a_model_object_its_dtype_and_its_adapter_are_given() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.bfloat16), torch.nn.Linear(2, 2))
    assert main_dtype(model) == "bfloat16"
    as_it_is = {"dtype": "bfloat16", "load_in_4bit": False, "load_in_8bit": False}
    assert given(config(), model=model) == as_it_is
    model.peft_config = {"default": None}
    assert given(config(), model=model) == as_it_is | {"use_peft": True}


def test_a_dtype_that_trl_ignores_and_a_name_that_no_plan_decides_are_refused() -> None:
    with pytest.raises(UsageError, match=re.escape('model_init_kwargs={"dtype": "bfloat16"}')):
        given(config(**loading(torch_dtype=torch.bfloat16)))
    with pytest.raises(UsageError, match="Did you mean max_length"):
        given(config(), AutoFit(tune=["max_lenght"]))


def test_pin_gives_a_default_and_tune_takes_a_value_away() -> None:
    pinned = AutoFit(pin=["gradient_checkpointing", "dtype", "load_in_4bit"])
    assert given(config(), pinned) == {"gradient_checkpointing": True, "dtype": "float32", "load_in_4bit": False}
    assert given(config(optim="adamw_torch"), AutoFit(tune=["optim"])) == {}
    assert given(config(), AutoFit(tune=["max_length"])) == {"max_length": "auto"}
    assert given(config(), AutoFit(plan="plan.json")) == {}, "a default length gives way to a plan's own"
    assert given(config(max_length=512), AutoFit(plan="plan.json")) == {"max_length": 512}


@pytest.mark.parametrize("method", INSTALLED_METHODS)
def test_only_what_the_plan_changes_is_changed(method: str) -> None:
    args = config(method, learning_rate=1e-4, lr_scheduler_kwargs={"num_cycles": 2}, seed=7, hub_token="hf_secret")
    before = dict(vars(args))
    same = planned(args)
    assert (type(same), settings(same)) == (type(args), settings(args))
    assert same is not args
    merged = settings(planned(args, gradient_checkpointing=False, optim="adamw_torch"))
    both_names = {"gradient_checkpointing", "activation_checkpointing"} & merged.keys()
    assert {name for name in merged if merged[name] != settings(args)[name]} == {"optim", *both_names}
    assert merged["optim"] == "adamw_torch"
    assert not any(merged[name] for name in both_names)
    assert dict(vars(args)) == before


@pytest.mark.parametrize(
    ("sizes", "rows", "follows"),
    [({}, 2, (4, 8)), ({"steps_per_generation": 2}, 4, (4, 16)), ({"generation_batch_size": 16}, 4, (4, 16))],
    ids=["the step's", "steps", "batch"],
)
def test_a_generation_that_is_not_one_steps_keeps_its_rows(sizes: Any, rows: int, follows: tuple[int, int]) -> None:
    for method in GENERATING:
        args = config(method, per_device_train_batch_size=8, **sizes)
        merged = planned(args, per_device_train_batch_size=rows, gradient_accumulation_steps=8 // rows)
        assert (merged.steps_per_generation, merged.generation_batch_size) == follows


@dataclass
class OwnConfig(trl.SFTConfig):
    loudness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.twice = 2 * self.loudness


def test_a_config_of_the_users_own_stays_one() -> None:
    args = OwnConfig("out", use_cpu=True, loudness=3.0)
    args.note = "kept"
    made = planned(args, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert type(made) is OwnConfig
    assert (made.loudness, made.twice, made.note) == (3.0, 6.0, "kept")
    assert (made.per_device_train_batch_size, args.per_device_train_batch_size) == (1, 8)


def test_a_model_given_by_name_is_loaded_in_the_plans_dtype() -> None:
    args = config(model_init_kwargs={"dtype": torch.float32, "revision": "v2"})
    made = planned(args, dtype="bfloat16", loads=True)
    assert made.model_init_kwargs == {"dtype": "bfloat16", "revision": "v2"}
    assert args.model_init_kwargs == {"dtype": torch.float32, "revision": "v2"}
    assert planned(config(), dtype="float32", loads=True).model_init_kwargs is None
    assert planned(args, dtype="bfloat16").model_init_kwargs == args.model_init_kwargs, "of an object"


def test_nothing_that_trl_writes_into_is_shared_and_an_accelerator_of_the_scripts_own_lives_on() -> None:
    args = config(accelerator_config={"dispatch_batches": None}, lr_scheduler_kwargs={"power": 2})
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    given_arguments({"model": "NAME", "args": args}, trl.SFTConfig, AutoFit())
    made = planned(args)
    assert made.accelerator_config is not args.accelerator_config
    assert made.lr_scheduler_kwargs is not args.lr_scheduler_kwargs
    assert made.to_dict() == args.to_dict()
    assert accelerator.mixed_precision == "bf16"
    half = planned(config(), fp16=True)
    assert (half.fp16, half.bf16) == (True, False), "it takes the place of bfloat16"
    kept = planned(config(bf16=False))
    assert (kept.fp16, kept.bf16) == (False, False)
