"""LLaMA-Factory's YAML (``llamafactory-cli train FILE``).

Keys after https://github.com/hiyouga/LLaMA-Factory, August 2026 (ff6d4d1), ``src/llamafactory/hparams``:
``model_args.py``, ``data_args.py``, ``finetuning_args.py``, ``generating_args.py`` and ``training_args.py``, whose
TrainingArguments are transformers' own; what they become after ``model/loader.py``, ``model/adapter.py`` and ``train``.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from autotrain_mem.exports.accelerate import ACCELERATE_FILE, FIRST_MACHINE, PORT, launch_note
from autotrain_mem.exports.case import LORA_DEFAULTS, TRAINER_DEFAULTS, Case, Data, case_of
from autotrain_mem.exports.part import (
    OF_DATA,
    Part,
    Tool,
    allocator,
    document,
    environment,
    host_optimizer,
    no_limit,
    renamed,
    whole_logits,
)
from autotrain_mem.methods.interface import LlamaFactoryFacts, method_of
from autotrain_mem.types import Job, Plan

TRAINER_ARGUMENTS = (
    *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps"),
    *("average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval"),
    *("fp16_full_eval", "tf32", "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache"),
    *("neftune_noise_alpha", "torch_empty_cache_steps", "auto_find_batch_size", "logging_strategy"),
    *("logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
    *("include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name"),
    *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps"),
    *("eval_delay", "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start"),
    *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
    *("batch_eval_metrics", "save_only_model", "save_strategy", "save_steps", "save_on_each_node"),
    *("save_total_limit", "enable_jit_checkpoint", "push_to_hub", "hub_private_repo", "hub_model_id"),
    *("hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model"),
    *("greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint", "full_determinism"),
    *("seed", "data_seed", "accelerator_config", "parallelism_config", "dataloader_drop_last"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("remove_unused_columns", "label_names", "train_sampling_strategy", "length_column_name"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout", "debug", "skip_memory_metrics", "resume_from_checkpoint"),
)
"""transformers 5.23, ``training_args.py: TrainingArguments``, without those that say which device or how many."""

RENAMED = {
    "dataset_num_proc": "preprocessing_num_workers",
    "use_liger_kernel": "enable_liger_kernel",
    "model_revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
}
ATTENTION = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
"""``extras/constants.py: AttentionFunction``, after ``model/model_utils/attention.py``."""

_OWN_WAY = frozenset(
    {
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_liger_kernel", "liger_kernel_config"),
        *("remove_unused_columns", "label_names", "bf16", "fp16", "output_dir", *TRAINER_DEFAULTS),
    }
)
"""Of transformers' arguments, those that LLaMA-Factory overrides, or that are said elsewhere."""


def llamafactory(plan: Plan, job: Job) -> str:
    """The file for ``llamafactory-cli train FILE``."""
    case = case_of(plan, job)
    tool = Tool(name="LLaMA-Factory", command=_command(case), trains_with_trl=False)
    parts = [
        _model(case),
        _data(case),
        _adapter(case),
        _precision(case),
        _checkpointing(case),
        _method(case),
        _trainer(case),
        host_optimizer(case, "its deepspeed key with a ZeRO configuration that offloads is the nearest"),
        allocator(case),
        environment(case),
        whole_logits(case, "LLaMA-Factory", "per_device_train_batch_size"),
        launch_note(case) if case.knobs.is_sharded else Part(),
    ]
    return document(case, tool, parts, case.environment)


def _command(case: Case) -> str:
    """Its own command starts torchrun, which is DDP (``cli.py: main``); accelerate shards (``examples/extras``)."""
    count, nodes = case.knobs.processes, case.nodes
    if case.knobs.is_sharded:
        return f"accelerate launch --config_file {ACCELERATE_FILE} src/train.py FILE"
    others = f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR={FIRST_MACHINE} MASTER_PORT={PORT} " if nodes > 1 else ""
    several = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={count // nodes} {others}" if count > 1 else ""
    return f"{several}llamafactory-cli train FILE"


def _known(case: Case) -> LlamaFactoryFacts:
    """Returns LLaMA-Factory's entry of the method, which was checked before planning (``tools.check_method``)."""
    known = method_of(case.job.method).llamafactory
    assert known is not None
    return known


def _model(case: Case) -> Part:
    part = renamed(case, RENAMED)
    asked = case.get("attn_implementation")
    attention = {"flash_attn": ATTENTION[asked]} if asked in ATTENTION else {}
    return Part(
        keys={
            "model_name_or_path": case.job.model,
            "stage": _known(case).stage,
            "do_train": True,
            "finetuning_type": "lora" if case.knobs.use_peft else "full",
            **part.keys,
            **attention,
        },
        answered=part.answered
        | {"model_name_or_path", "use_peft", "do_train"}
        | ({"attn_implementation"} if attention else frozenset()),
    )


# -- data ----------------------------------------------------------------------------------------------------------


def _data(case: Case) -> Part:
    """Data have a name in ``dataset_info.json``, with what is to be read of them."""
    data, packs, is_packable = case.data, case.knobs.packing, case.method_facts.is_packable
    length = (case.plan.prompt_length or case.length) if case.job.is_online else case.length
    masks = bool(case.settings.get("assistant_only_loss") or case.settings.get("completion_only_loss"))
    packing = {"packing": packs, "neat_packing": packs, "train_on_prompt": not masks} if is_packable else {}
    masked = (
        "train_on_prompt true: TRL trains on all tokens of a conversation; of prompts with completions it trains on "
        "the completions, which is train_on_prompt false",
    )
    name = pathlib.PurePath(data.path).stem.replace(",", "_") if data else ""  # a comma would divide it in two
    names = {"dataset": name} if data else {}
    if data and case.job.is_evaluated:
        names["eval_dataset"] = f"{name}_eval"
    return Part(
        keys={**names, "cutoff_len": length, **packing},
        answered=OF_DATA | (frozenset() if data else {"datasets"}),
        notes=(
            *(
                _entries(case, data, names)
                if data
                else case.no_data("datasets: name each of the mixture in dataset, divided by commas")
            ),
            *(masked if is_packable and not masks else ()),
            *_known(case).length_notes,
            *no_limit(case, "cutoff_len").notes,
        ),
    )


def _entries(case: Case, data: Data, names: Mapping[str, str]) -> list[str]:
    """Writes what to add to ``data/dataset_info.json``, in one line for each split."""
    source = {"hf_hub_url": data.path} if data.kind is None else {"file_name": str(data.path)}
    subset = {} if data.subset is None else {"subset": data.subset}
    splits = dict(zip(names.values(), (data.train_split, data.test_split), strict=False))
    known = _known(case)
    entries = {name: {**source, **subset, "split": split, **known.entry} for name, split in splits.items()}
    lines = [f'"{name}": {json.dumps(entry, ensure_ascii=False)}' for name, entry in entries.items()]
    return [f"dataset: a name in data/dataset_info.json, to which this is added, for {known.rows}: {x}" for x in lines]


# -- what is trained, and in which numbers -------------------------------------------------------------------------

_LORA = {"lora_r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_SWITCHES = {"use_rslora": "use_rslora", "use_dora": "use_dora"}
_OF_ADAPTER = frozenset(
    {
        *(*_LORA, *_SWITCHES, "lora_target_modules", "lora_modules_to_save", "load_in_4bit", "load_in_8bit"),
        *("use_bnb_nested_quant", "bnb_4bit_quant_type"),
    }
)


def _adapter(case: Case) -> Part:
    if not case.knobs.use_peft:
        return Part(answered=_OF_ADAPTER | {"bnb_4bit_quant_storage", "lora_target_parameters", "lora_task_type"})
    targets, saved = _targets(case), case.get("lora_modules_to_save")
    return Part(
        keys={
            **{_LORA[name]: case.get(name) for name in LORA_DEFAULTS},
            **targets.keys,
            **({"additional_target": ",".join(saved)} if saved else {}),
            **renamed(case, _SWITCHES).keys,
            **_quantized(case),
        },
        answered=_OF_ADAPTER,
        notes=(
            *targets.notes,
            "the adapter: LLaMA-Factory trains it in float32; on a rounded base TRL's is bfloat16, half the bytes",
        ),
    )


def _targets(case: Case) -> Part:
    """``model/adapter.py: _setup_lora_tuning``; PEFT reads a single text as a regular expression, this divides it."""
    asked = case.get("lora_target_modules")
    if asked in ("all-linear", ["all-linear"]):
        return Part(keys={"lora_target": "all"})
    if isinstance(asked, list) and len(asked) > 1:
        return Part(keys={"lora_target": ",".join(asked)})
    if asked:
        pattern = asked if isinstance(asked, str) else asked[0]
        name = re.fullmatch(r"\.\*(?:\\\.)?(\w+)", pattern)
        if name is not None:
            return Part(keys={"lora_target": name[1]})
        return Part(
            notes=(f"lora_target_modules {pattern}: a regular expression; lora_target takes names, with commas",)
        )
    return Part(notes=("lora_target_modules: TRL leaves them to PEFT; LLaMA-Factory takes all linear layers",))


def _quantized(case: Case) -> dict[str, Any]:
    """``model/model_utils/quantization.py: configure_quantization``."""
    knobs = case.knobs
    if knobs.load_in_4bit:
        return {
            "quantization_method": "bnb",
            "quantization_bit": 4,
            "quantization_type": case.get("bnb_4bit_quant_type", "nf4"),
            "double_quantization": knobs.use_bnb_nested_quant,
        }
    return {"quantization_method": "bnb", "quantization_bit": 8} if knobs.load_in_8bit else {}


def _precision(case: Case) -> Part:
    """Weights come in the checkpoint's dtype (``model/loader.py: load_model``), and what is trained becomes float32
    unless it is told to be pure (``model/adapter.py: init_adapter``)."""
    wanted, full = case.knobs.dtype, not case.knobs.use_peft
    note = f"dtype {wanted}: LLaMA-Factory loads weights in the checkpoint's own dtype"
    return Part(
        keys={
            "bf16": case.precision == "bf16",
            "fp16": case.precision == "fp16",
            "pure_bf16": full and wanted == "bfloat16",
        },
        answered=frozenset({"bf16", "fp16", "dtype"}),
        notes=() if full and wanted == "float32" else (note,),
    )


def _checkpointing(case: Case) -> Part:
    """``model/model_utils/checkpointing.py: prepare_model_for_training``; reentrant by default, which TRL's is not."""
    details = dict(case.get("gradient_checkpointing_kwargs") or {})
    reentrant = bool(details.pop("use_reentrant", False))
    notes = [f"gradient_checkpointing_kwargs {json.dumps(details)}: no key"] if details else []
    if case.knobs.activation_offloading:
        nearest = "use_unsloth_gc true keeps what recomputing starts from on the host, which is the nearest"
        notes.append(f"activation_offloading true: no key, so that it needs more than is predicted; {nearest}")
    return Part(
        keys={
            "disable_gradient_checkpointing": not case.knobs.gradient_checkpointing,
            "use_reentrant_gc": reentrant,
        },
        answered=frozenset({"gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_offloading"}),
        notes=tuple(notes),
    )


# -- the method and the course of the run --------------------------------------------------------------------------


def _method(case: Case) -> Part:
    """Writes what the method's row says of LLaMA-Factory; a loss that is not among its losses is left unanswered."""
    known = _known(case)
    asked = case.get("loss_type")
    loss = asked[0] if isinstance(asked, list) and len(asked) == 1 else asked
    has_loss = loss in known.losses
    values = {key: value for name, key in known.renamed.items() if (value := case.get(name)) is not None}
    chosen = {known.loss_key: loss} if has_loss and known.loss_key else {}
    return Part(
        keys={**values, **chosen, **known.keys},
        answered=frozenset({*known.renamed, *(("loss_type",) if has_loss else ())}),
        notes=known.notes,
    )


def _trainer(case: Case) -> Part:
    """transformers' arguments, as they are; TRL's defaults where they differ from transformers'."""
    part = renamed(case, {name: name for name in TRAINER_ARGUMENTS if name not in _OWN_WAY})
    output = {"output_dir": case.settings["output_dir"]} if case.settings.get("output_dir") else {}
    defaults = {name: case.get(name) for name in ("learning_rate", *TRAINER_DEFAULTS)}
    return Part(
        keys={**output, **part.keys, **defaults, "report_to": case.get("report_to", "none")},
        answered=part.answered | {"output_dir", *TRAINER_DEFAULTS},
    )
