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
from autotrain_mem.exports.axolotl_rewards import add_grpo
from autotrain_mem.exports.draft import (
    IDLE_WITHOUT_ADAPTER,
    LORA_DEFAULTS,
    OF_ADAPTER,
    OF_DATA,
    Data,
    Draft,
    Tool,
    document,
    draft_of,
    note_environment,
    note_host_optimizer,
    note_no_limit,
    note_whole_logits,
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
    draft = draft_of(plan, job)
    draft.keys |= {"base_model": job.model, **_known(draft).keys}
    draft.answered.add("model_name_or_path")
    variables = draft.environment
    if variables.keys().isdisjoint({NEWER_VARIABLE, OLDER_VARIABLE}):
        # Unless it is told otherwise Axolotl grows segments (``utils/__init__.py: set_pytorch_cuda_alloc_conf``).
        variables[NEWER_VARIABLE] = "expandable_segments:False"
    tool = Tool(name="Axolotl", command=f"axolotl train FILE{_launcher(draft)}", trains_with_trl=False)
    _add_data(draft)
    draft.rename({name: name for name in SAME} | RENAMED)
    _add_adapter(draft)
    _add_precision(draft)
    _add_checkpointing(draft)
    _add_sharding(draft)
    _add_schedule(draft)
    _add_method(draft)
    _add_reporting(draft)
    note_host_optimizer(draft, "Axolotl's deepspeed key with a ZeRO configuration that offloads is the nearest")
    note_environment(draft)
    note_whole_logits(draft, "Axolotl", "micro_batch_size")
    return document(draft, tool, variables)


def _known(draft: Draft) -> AxolotlFacts:
    """Returns Axolotl's facts of the method; ``tools.check`` has refused methods without any."""
    known = method_of(draft.job.method).axolotl
    assert known is not None
    return known


# -- data ----------------------------------------------------------------------------------------------------------

_UNMASKED = (
    "train_on_inputs true: TRL trains on all tokens of a conversation or a text; of prompts with completions it trains "
    "on the completions, which is train_on_inputs false"
)


def _add_data(draft: Draft) -> None:
    """Writes the data's part: of long rows TRL drops pairs of reward models and cuts all others, Axolotl drops all."""
    method, packs, keys = draft.method_facts, not draft.knobs.pads_rows, draft.keys
    draft.answered.update((*OF_DATA, "dataset_text_field"))
    if draft.data:
        keys["datasets"] = [_dataset(draft, train=True)]
        if draft.job.is_evaluated:
            keys["test_datasets"] = [_dataset(draft, train=False)]
    else:
        draft.answered.add("datasets")
        draft.note_data("datasets: Axolotl reads a mixture from its own datasets key, one entry each")
    keys |= {"chat_template": "tokenizer_default", "sequence_len": draft.length}
    if not method.is_online:
        keys["excess_length_strategy"] = "drop" if method.long_rows == "dropped" else "truncate"
    masks = bool(draft.settings.get("assistant_only_loss") or draft.settings.get("completion_only_loss"))
    packs_evaluated = bool(draft.get("eval_packing", packs))
    if method.is_packable:
        keys["sample_packing"] = packs
        if "test_datasets" in keys:
            keys["eval_sample_packing"] = packs_evaluated
        keys["train_on_inputs"] = not masks
    keys["pad_to_sequence_len"] = packs
    if not draft.settings.get("dataset_text_field"):
        draft.notes += _known(draft).notes
    if method.is_packable and not masks:
        draft.notes.append(_UNMASKED)
    note_no_limit(draft, "sequence_len")


def _dataset(draft: Draft, *, train: bool) -> dict[str, Any]:
    data = draft.data
    assert isinstance(data, Data)
    text, row_type = draft.get("dataset_text_field"), _known(draft).row_type
    rows = {} if row_type is None else {"type": row_type}
    if (TEXT_COLUMN,) in draft.method_facts.formats:
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
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
"""Turned on unless each is refused (``config.py: check_auto_enable_lora_kernels``): other buffers than TRL's."""


def _add_adapter(draft: Draft) -> None:
    """``loaders/model.py: _set_quantization_config`` takes 4 bits with qlora and 8 bits with lora only."""
    knobs, keys = draft.knobs, draft.keys
    if not knobs.use_peft:
        draft.answered.update(IDLE_WITHOUT_ADAPTER)
        return
    draft.answered.update(OF_ADAPTER)
    storage = draft.get("bnb_4bit_quant_storage", sharding_arguments(knobs).get("bnb_4bit_quant_storage", "uint8"))
    keys |= {
        "adapter": "qlora" if knobs.load_in_4bit else "lora",
        "load_in_4bit": knobs.load_in_4bit,
        "load_in_8bit": knobs.load_in_8bit,
    }
    if knobs.load_in_4bit:
        keys["bnb_config_kwargs"] = {
            "bnb_4bit_quant_type": draft.get("bnb_4bit_quant_type", "nf4"),
            "bnb_4bit_use_double_quant": knobs.use_bnb_nested_quant,
            "bnb_4bit_quant_storage": storage,
        }
    keys |= {key: value for name, key in _LORA.items() if (value := draft.get(name)) or name in LORA_DEFAULTS}
    asked = draft.get("lora_target_modules")
    if asked in ("all-linear", ["all-linear"]):
        draft.keys["lora_target_linear"] = True
    elif asked:
        single = isinstance(asked, list) and len(asked) == 1  # to TRL a regular expression, and to PEFT a text is one
        draft.keys["lora_target_modules"] = asked[0] if single else asked
    else:
        draft.notes.append("lora_target_modules: TRL leaves them to PEFT; Axolotl needs their names")
    keys |= dict.fromkeys(_LORA_KERNELS, False)
    if knobs.load_in_4bit or knobs.load_in_8bit:
        draft.notes.append(_ROUNDED)


_ROUNDED = (
    "the adapter: TRL trains it in bfloat16 on a rounded base, Axolotl in float32, with twice the bytes; while it "
    "loads it holds embeddings and output layer in float32 (prepare_model_for_kbit_training)"
)


def _add_precision(draft: Draft) -> None:
    """Weights come in what is computed in (``utils/config/__init__.py``, where cfg.torch_dtype is set)."""
    computes = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}[draft.precision]
    wanted = draft.knobs.dtype
    draft.answered.update(("bf16", "fp16", "dtype"))
    draft.keys |= {name: draft.precision == name for name in ("bf16", "fp16")} | {"tf32": bool(draft.get("tf32"))}
    if wanted != computes:
        draft.notes.append(f"dtype {wanted}: Axolotl loads weights in {computes}, the precision that it computes in")


def _add_checkpointing(draft: Draft) -> None:
    """Axolotl's own default is reentrant in SFT (``utils/config/__init__.py: normalize_config``), TRL's is not.

    Offloading is refused without checkpointing (``validation.py: check_activation_offloading_wo_gc``).
    """
    offloads = draft.knobs.activation_offloading
    checkpoints = draft.knobs.gradient_checkpointing or offloads
    details = draft.get("gradient_checkpointing_kwargs") or {"use_reentrant": False}
    draft.answered.update(("gradient_checkpointing", "activation_offloading"))
    draft.keys |= {
        "gradient_checkpointing": checkpoints,
        **({"gradient_checkpointing_kwargs": details} if checkpoints else {}),
        "activation_offloading": offloads,
    }
    if offloads:
        way = "in place of recomputing" if draft.knobs.use_peft else "of what recomputing starts from"
        draft.notes.append(
            f"activation_offloading true: Axolotl's is {way}, whatever TRL's gradient_checkpointing says"
        )


# -- several processes -----------------------------------------------------------------------------------------------


def _launcher(draft: Draft) -> str:
    """Writes how processes start.

    ``accelerate launch`` gets what follows ``--`` (``cli/args.py``, ``cli/utils/train.py``).
    """
    count, nodes = draft.knobs.processes, draft.nodes
    if count == 1:
        return ""
    others = f" --num_machines={nodes} --machine_rank=0 --main_process_ip={FIRST_MACHINE} --main_process_port={PORT}"
    return f" --launcher accelerate -- --num_processes={count}{others if nodes > 1 else ''}"


def _add_sharding(draft: Draft) -> None:
    """``utils/schemas/fsdp.py: FSDPConfig``, whose keys have no prefix; DDP needs none."""
    knobs, settings = draft.knobs, fsdp_settings(draft.launch)
    if draft.nodes > 1:
        draft.notes.append(f"machine_rank and {FIRST_MACHINE} in the command: each machine has its own rank")
    if not knobs.is_sharded:
        return
    same = {name: value for name, value in settings.items() if name in _FSDP_KEYS and value is not None}
    sizes = {"dp_replicate_size": knobs.processes // knobs.shards, "dp_shard_size": knobs.shards}
    draft.keys |= {
        "fsdp_version": 2,
        "fsdp_config": same,
        **(sizes if knobs.sharding == "hsdp" else {}),
    }


_FSDP_KEYS = (
    *("activation_checkpointing", "offload_params", "cpu_ram_efficient_loading", "state_dict_type", "min_num_params"),
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "reshard_after_forward"),
)


# -- the course of the run -----------------------------------------------------------------------------------------


def _add_schedule(draft: Draft) -> None:
    """Axolotl's defaults are a cosine, 3 % of warm-up, one epoch, a checkpoint each epoch and four of them kept."""
    warmup = draft.get("warmup_steps")  # below 1 a share of all steps: TrainingArguments.get_warmup_steps
    draft.keys |= {
        "learning_rate": draft.get("learning_rate"),
        "lr_scheduler": draft.get("lr_scheduler_type"),
        **({"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}),
        "weight_decay": draft.get("weight_decay"),
        "max_grad_norm": draft.get("max_grad_norm"),
        "num_epochs": draft.get("num_train_epochs"),
        "seed": draft.get("seed"),
        "logging_steps": draft.get("logging_steps"),
        **_strategy(draft, "save"),
        **(_strategy(draft, "eval") if draft.job.is_evaluated else {}),
    }
    draft.answered.update(("save_strategy", "save_steps", "eval_strategy", "eval_steps"))
    steps, resumes = draft.get("max_steps", -1), draft.get("resume_from_checkpoint")
    if steps > 0:
        draft.keys["max_steps"] = steps
    if resumes is True:
        draft.keys["auto_resume_from_checkpoints"] = True
    elif resumes:
        draft.keys["resume_from_checkpoint"] = resumes
    if draft.get("save_total_limit") is None:
        draft.notes.append("save_total_limit: Axolotl keeps four checkpoints, TRL all")
    if warmup == 1:
        draft.notes.append("warmup_steps 1: Axolotl takes two")


def _strategy(draft: Draft, what: str) -> dict[str, Any]:
    """Steps are refused beside any other strategy (``validation.py: check_saves``, ``check_evals``)."""
    strategy = str(draft.get(f"{what}_strategy", "no"))
    steps = draft.get(f"{what}_steps") or draft.get("logging_steps")
    return {f"{what}_strategy": strategy, **({f"{what}_steps": steps} if strategy == "steps" else {})}


def _add_method(draft: Draft) -> None:
    if draft.job.is_online:
        add_grpo(draft)
        return
    known, keys = _known(draft).renamed, draft.keys
    draft.rename(known)
    if "beta" in known:
        keys[known["beta"]] = draft.get("beta")
    if isinstance(keys.get("dpo_loss_type"), str):
        keys["dpo_loss_type"] = [keys["dpo_loss_type"]]
    if draft.method_facts.has_chunked_loss:
        if draft.get("use_liger_kernel"):
            keys |= LIGER
        if draft.settings.get("loss_type") in (None, "nll"):
            draft.answered.add("loss_type")


def _add_reporting(draft: Draft) -> None:
    asked = draft.settings.get("report_to") or []
    trackers = [asked] if isinstance(asked, str) else list(asked)
    draft.keys |= {REPORTERS[name]: True for name in trackers if name in REPORTERS}
    if "wandb" in trackers and draft.settings.get("run_name"):
        draft.keys["wandb_name"] = draft.get("run_name")
    if {*trackers} <= {*REPORTERS, "none"}:
        draft.answered.add("report_to")
