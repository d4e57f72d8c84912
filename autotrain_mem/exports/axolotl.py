"""Axolotl's YAML (``axolotl train FILE``).

Keys after https://github.com/axolotl-ai-cloud/axolotl, July 2026 (067b021), ``src/axolotl/utils/schemas``:
``config.py: AxolotlInputConfig`` and the classes that it is made of; what they become after ``core/builders/base.py:
TrainerBuilderBase``, ``causal.py: HFCausalTrainerBuilder`` and ``rl.py: HFRLTrainerBuilder``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotrain_mem.allocator.settings import NEWER_VARIABLE, OLDER_VARIABLE
from autotrain_mem.exports.accelerate import FIRST_MACHINE, PORT
from autotrain_mem.exports.axolotl_rewards import grpo
from autotrain_mem.exports.case import LORA_DEFAULTS, Case, Data, case_of
from autotrain_mem.exports.part import (
    OF_DATA,
    Part,
    Tool,
    document,
    environment,
    host_optimizer,
    no_limit,
    renamed,
    whole_logits,
)
from autotrain_mem.methods.interface import AxolotlFacts, method_of
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.parallel.launch_environment import fsdp_settings
from autotrain_mem.types import Job, Plan
from autotrain_mem.types.methods_table import TEXT_COLUMN

SAME = (
    *("output_dir", "gradient_accumulation_steps", "optim_args", "optim_target_modules", "learning_rate"),
    *("lr_scheduler_kwargs", "weight_decay", "max_grad_norm", "seed", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "save_total_limit", "save_only_model", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "logging_steps", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_prefetch_factor", "dataloader_drop_last", "dataset_num_proc", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "neftune_noise_alpha", "torch_empty_cache_steps"),
    *("remove_unused_columns", "auto_find_batch_size", "trust_remote_code", "attn_implementation"),
    *("model_revision", "hub_model_id", "hub_strategy", "hub_revision", "ddp_timeout", "ddp_bucket_cap_mb"),
    *("ddp_broadcast_buffers", "ddp_find_unused_parameters", "pad_to_multiple_of"),
)
"""Keys that Axolotl and TRL share by name and meaning."""
RENAMED = {
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
    "num_train_epochs": "num_epochs",
}

REPORTERS = {
    "wandb": "use_wandb",
    "mlflow": "use_mlflow",
    "tensorboard": "use_tensorboard",
    "comet_ml": "use_comet",
    "trackio": "use_trackio",
}
"""``core/builders/base.py: _configure_reporting``."""

LIGER: Mapping[str, Any] = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy"), True),
}
"""What transformers' flag turns on (``integrations/liger/args.py: LigerArgs``)."""


def axolotl(plan: Plan, job: Job) -> str:
    """The file for ``axolotl train FILE``."""
    case = case_of(plan, job)
    model = Part(keys={"base_model": job.model, **_known(case).keys}, answered=frozenset({"model_name_or_path"}))
    variables = case.environment
    if variables.keys().isdisjoint({NEWER_VARIABLE, OLDER_VARIABLE}):
        # Unless it is told otherwise Axolotl grows segments (``utils/__init__.py: set_pytorch_cuda_alloc_conf``).
        variables[NEWER_VARIABLE] = "expandable_segments:False"
    tool = Tool(name="Axolotl", command=f"axolotl train FILE{_launcher(case)}", trains_with_trl=False)
    parts = [
        model,
        _data(case),
        renamed(case, {name: name for name in SAME} | RENAMED),
        _adapter(case),
        _precision(case),
        _checkpointing(case),
        _sharding(case),
        _schedule(case),
        _method(case),
        _reporting(case),
        host_optimizer(case, "Axolotl's deepspeed key with a ZeRO configuration that offloads is the nearest"),
        environment(case),
        whole_logits(case, "Axolotl", "micro_batch_size"),
    ]
    return document(case, tool, parts, variables)


def _known(case: Case) -> AxolotlFacts:
    """Returns Axolotl's facts of the method; ``tools.check_method`` has refused methods without any."""
    known = method_of(case.job.method).axolotl
    assert known is not None
    return known


# -- data ----------------------------------------------------------------------------------------------------------

_UNMASKED = (
    "train_on_inputs true: TRL trains on all tokens of a conversation or a text; of prompts with completions it trains "
    "on the completions, which is train_on_inputs false",
)


def _data(case: Case) -> Part:
    """Writes the data's part: of long rows TRL drops pairs of reward models and cuts all others, Axolotl drops all."""
    method, packs = case.method_facts, not case.knobs.pads_rows
    evaluates = {"test_datasets": [_dataset(case, train=False)]} if case.job.is_evaluated and case.data else {}
    masks = bool(case.settings.get("assistant_only_loss") or case.settings.get("completion_only_loss"))
    packed = {
        "sample_packing": packs,
        **({"eval_sample_packing": bool(case.settings.get("eval_packing", packs))} if evaluates else {}),
        "train_on_inputs": not masks,
    }
    longer = "drop" if method.long_rows == "dropped" else "truncate"
    mixture = case.no_data("datasets: Axolotl reads a mixture from its own datasets key, one entry each")
    return Part(
        keys={
            **({"datasets": [_dataset(case, train=True)]} if case.data else {}),
            **evaluates,
            "chat_template": "tokenizer_default",
            "sequence_len": case.length,
            **({} if method.is_online else {"excess_length_strategy": longer}),
            **(packed if method.is_packable else {}),
            "pad_to_sequence_len": packs,
        },
        answered=OF_DATA | {"dataset_text_field", "eval_packing"} | (frozenset() if case.data else {"datasets"}),
        notes=(
            *mixture,
            *(() if case.get("dataset_text_field") else _known(case).notes),
            *(_UNMASKED if method.is_packable and not masks else ()),
            *no_limit(case, "sequence_len").notes,
        ),
    )


def _dataset(case: Case, *, train: bool) -> dict[str, Any]:
    data = case.data
    assert isinstance(data, Data)
    text, row_type = case.get("dataset_text_field"), _known(case).row_type
    rows = {} if row_type is None else {"type": row_type}
    if (TEXT_COLUMN,) in case.method_facts.formats:
        rows = {"type": "completion", "field": text} if text else {**rows, "field_messages": "messages"}
    return {
        "path": data.path,
        **({} if data.kind is None else {"ds_type": data.kind}),
        **({} if data.subset is None else {"name": data.subset}),
        "split": data.train_split if train else data.test_split,
        **rows,
    }


# -- what is trained, and in which numbers -------------------------------------------------------------------------


_LORA = {
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora",
    "lora_modules_to_save": "lora_modules_to_save",
    "lora_target_parameters": "lora_target_parameters",
}
_OF_ADAPTER = frozenset(
    {
        *(*_LORA, "use_peft", "load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "bnb_4bit_quant_type"),
        *("bnb_4bit_quant_storage", "lora_target_modules"),
    }
)
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
"""Turned on unless each is refused (``config.py: check_auto_enable_lora_kernels``): other buffers than TRL's."""


def _adapter(case: Case) -> Part:
    """``loaders/model.py: _set_quantization_config`` takes 4 bits with qlora and 8 bits with lora only."""
    knobs = case.knobs
    if not knobs.use_peft:
        return Part(answered=_OF_ADAPTER)
    lora = {_LORA[name]: case.get(name) for name in _LORA if name in LORA_DEFAULTS or case.get(name)}
    storage = sharding_arguments(knobs).get("bnb_4bit_quant_storage", "uint8")
    four_bits = {
        "bnb_4bit_quant_type": case.get("bnb_4bit_quant_type", "nf4"),
        "bnb_4bit_use_double_quant": knobs.use_bnb_nested_quant,
        "bnb_4bit_quant_storage": case.get("bnb_4bit_quant_storage", storage),
    }
    targets = _targets(case)
    return Part(
        keys={
            "adapter": "qlora" if knobs.load_in_4bit else "lora",
            "load_in_4bit": knobs.load_in_4bit,
            "load_in_8bit": knobs.load_in_8bit,
            **({"bnb_config_kwargs": four_bits} if knobs.load_in_4bit else {}),
            **lora,
            **targets.keys,
            **dict.fromkeys(_LORA_KERNELS, False),
        },
        answered=_OF_ADAPTER,
        notes=(*targets.notes, *(_ROUNDED if knobs.load_in_4bit or knobs.load_in_8bit else ())),
    )


_ROUNDED = (
    "the adapter: TRL trains it in bfloat16 on a rounded base, Axolotl in float32, with twice the bytes; while it "
    "loads it holds embeddings and output layer in float32 (prepare_model_for_kbit_training)",
)


def _targets(case: Case) -> Part:
    asked = case.get("lora_target_modules")
    if asked in ("all-linear", ["all-linear"]):
        return Part(keys={"lora_target_linear": True})
    if asked:
        single = isinstance(asked, list) and len(asked) == 1  # to TRL a regular expression, and to PEFT a text is one
        return Part(keys={"lora_target_modules": asked[0] if single else asked})
    return Part(notes=("lora_target_modules: TRL leaves them to PEFT; Axolotl must be told which",))


def _precision(case: Case) -> Part:
    """Weights come in what is computed in (``utils/config/__init__.py``, where cfg.torch_dtype is set)."""
    computes = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}[case.precision]
    wanted = case.knobs.dtype
    note = f"dtype {wanted}: Axolotl loads weights in {computes}, the precision that it computes in"
    return Part(
        keys={"bf16": case.precision == "bf16", "fp16": case.precision == "fp16", "tf32": bool(case.get("tf32"))},
        answered=frozenset({"bf16", "fp16", "tf32", "dtype"}),
        notes=() if wanted == computes else (note,),
    )


def _checkpointing(case: Case) -> Part:
    """Axolotl's own default is reentrant in SFT (``utils/config/__init__.py: normalize_config``), TRL's is not.

    Offloading is refused without checkpointing (``validation.py: check_activation_offloading_wo_gc``).
    """
    offloads = case.knobs.activation_offloading
    checkpoints = case.knobs.gradient_checkpointing or offloads
    details = case.get("gradient_checkpointing_kwargs") or {"use_reentrant": False}
    way = "in place of recomputing" if case.knobs.use_peft else "of what recomputing starts from"
    note = f"activation_offloading true: Axolotl's is {way}, whatever TRL's gradient_checkpointing says"
    return Part(
        keys={
            "gradient_checkpointing": checkpoints,
            **({"gradient_checkpointing_kwargs": details} if checkpoints else {}),
            "activation_offloading": offloads,
        },
        answered=frozenset({"gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading"}),
        notes=(note,) if offloads else (),
    )


# -- several processes -----------------------------------------------------------------------------------------------


def _launcher(case: Case) -> str:
    """Writes how processes start.

    ``accelerate launch`` gets what follows ``--`` (``cli/args.py``, ``cli/utils/train.py``).
    """
    count, nodes = case.knobs.processes, case.nodes
    if count == 1:
        return ""
    others = f" --num_machines={nodes} --machine_rank=0 --main_process_ip={FIRST_MACHINE} --main_process_port={PORT}"
    return f" --launcher accelerate -- --num_processes={count}{others if nodes > 1 else ''}"


def _sharding(case: Case) -> Part:
    """``utils/schemas/fsdp.py: FSDPConfig``, whose keys have no prefix; DDP needs none."""
    knobs, settings = case.knobs, fsdp_settings(case.launch)
    each = (
        (f"machine_rank and {FIRST_MACHINE} in the command: each machine has its own rank",) if case.nodes > 1 else ()
    )
    if not knobs.is_sharded:
        return Part(notes=each)
    same = {name: value for name, value in settings.items() if name in _FSDP_KEYS and value is not None}
    sizes = {"dp_replicate_size": knobs.processes // knobs.shards, "dp_shard_size": knobs.shards}
    return Part(
        keys={
            "fsdp_version": int(settings.get("version", 1)),
            "fsdp_config": same,
            **(sizes if knobs.sharding == "hsdp" else {}),
        },
        notes=each,
    )


_FSDP_KEYS = (
    *("activation_checkpointing", "offload_params", "cpu_ram_efficient_loading", "state_dict_type", "min_num_params"),
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "reshard_after_forward"),
)


# -- the course of the run -----------------------------------------------------------------------------------------


def _schedule(case: Case) -> Part:
    """Axolotl's defaults are a cosine, 3 % of warm-up, one epoch, a checkpoint each epoch and four of them kept."""
    warmup = case.get("warmup_steps")  # below 1 a share of all steps: TrainingArguments.get_warmup_steps
    keys = {
        "learning_rate": case.get("learning_rate"),
        "lr_scheduler": case.get("lr_scheduler_type"),
        **({"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}),
        "weight_decay": case.get("weight_decay"),
        "max_grad_norm": case.get("max_grad_norm"),
        "num_epochs": case.get("num_train_epochs"),
        "seed": case.get("seed"),
        "logging_steps": case.get("logging_steps"),
        **_strategy(case, "save"),
        **(_strategy(case, "eval") if case.job.is_evaluated else {}),
    }
    steps, resumes = case.get("max_steps", -1), case.get("resume_from_checkpoint")
    keeps = ("save_total_limit: Axolotl keeps four checkpoints, TRL all",)
    takes = ("warmup_steps 1: Axolotl takes two",)
    if steps > 0:
        keys["max_steps"] = steps
    if resumes is True:
        keys["auto_resume_from_checkpoints"] = True
    elif resumes:
        keys["resume_from_checkpoint"] = resumes
    return Part(
        keys=keys,
        answered=frozenset(
            {
                *("save_strategy", "save_steps", "eval_strategy", "eval_steps", "max_steps", "resume_from_checkpoint"),
                "warmup_steps",
            }
        ),
        notes=(*(keeps if case.get("save_total_limit") is None else ()), *(takes if warmup == 1 else ())),
    )


def _strategy(case: Case, what: str) -> dict[str, Any]:
    """Steps are refused beside any other strategy (``validation.py: check_saves``, ``check_evals``)."""
    strategy = str(case.get(f"{what}_strategy", "no"))
    steps = case.get(f"{what}_steps") or case.get("logging_steps")
    return {f"{what}_strategy": strategy, **({f"{what}_steps": steps} if strategy == "steps" else {})}


def _method(case: Case) -> Part:
    if case.job.is_online:
        return grpo(case)
    known = _known(case).renamed
    part = renamed(case, known)
    keys = dict(part.keys)
    if "beta" in known:
        keys[known["beta"]] = case.get("beta")
    if isinstance(keys.get("dpo_loss_type"), str):
        keys["dpo_loss_type"] = [keys["dpo_loss_type"]]
    if not case.method_facts.has_chunked_loss:
        return Part(keys=keys, answered=part.answered)
    liger = LIGER if case.get("use_liger_kernel") else {}
    answered = part.answered | {"loss_type"} if case.get("loss_type") in (None, "nll") else part.answered
    return Part(keys={**keys, **liger}, answered=answered | {"use_liger_kernel"})


def _reporting(case: Case) -> Part:
    asked = case.get("report_to") or []
    trackers = [asked] if isinstance(asked, str) else list(asked)
    keys: dict[str, Any] = {REPORTERS[name]: True for name in trackers if name in REPORTERS}
    if "wandb" in trackers and case.get("run_name"):
        keys["wandb_name"] = case.get("run_name")
    known = {name for name in trackers if name in (*REPORTERS, "none")}
    answered = [*(["report_to"] if known == set(trackers) else []), *(["run_name"] if "wandb_name" in keys else [])]
    return Part(keys=keys, answered=frozenset(answered))
