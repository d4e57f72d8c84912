"""Writes LLaMA-Factory's YAML (``llamafactory-cli train FILE``).

Keys follow https://github.com/hiyouga/LLaMA-Factory, August 2026 (ff6d4d1), ``src/llamafactory/hparams``:
``model_args.py``, ``data_args.py``, ``finetuning_args.py``, ``generating_args.py``, and transformers' own arguments in
``training_args.py``. What they do was read in ``model/loader.py``, ``model/adapter.py`` and ``train``.
"""

import json
import pathlib
import re

from autotrain_mem.exports.accelerate import ACCELERATE_FILE, FIRST_MACHINE, note_launch
from autotrain_mem.exports.draft import (
    IDLE_WITHOUT_ADAPTER,
    LORA_DEFAULTS,
    OF_ADAPTER,
    OF_DATA,
    TRAINER_DEFAULTS,
    Draft,
    Tool,
    document,
    draft_of,
    note_no_limit,
    note_other_trainer,
)
from autotrain_mem.methods.interface import LlamaFactoryFacts, method_of
from autotrain_mem.parallel.place import PORT
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
"""Arguments of transformers 5.23 (``training_args.py: TrainingArguments``), except those that choose devices."""

RENAMED = {
    "dataset_num_proc": "preprocessing_num_workers",
    "use_liger_kernel": "enable_liger_kernel",
    "model_revision": "model_revision",
    "trust_remote_code": "trust_remote_code",
}
ATTENTION = {"eager": "disabled", "sdpa": "sdpa", "flash_attention_2": "fa2", "flash_attention_3": "fa3"}
"""TRL's name -> LLaMA-Factory's (``extras/constants.py: AttentionFunction``, ``model/model_utils/attention.py``)."""

_OWN_WAY = frozenset(
    {
        *("gradient_checkpointing", "gradient_checkpointing_kwargs", "use_liger_kernel", "liger_kernel_config"),
        *("remove_unused_columns", "label_names", "bf16", "fp16", "output_dir", *TRAINER_DEFAULTS),
    }
)
"""Arguments of transformers that LLaMA-Factory overrides, or that are written elsewhere in this module."""


def llamafactory(plan: Plan, job: Job) -> str:
    """Returns the file for ``llamafactory-cli train FILE``."""
    draft = draft_of(plan, job)
    count, nodes, facts = draft.knobs.processes, draft.nodes, _facts(draft)
    others = f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR={FIRST_MACHINE} MASTER_PORT={PORT} " if nodes > 1 else ""
    several = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={count // nodes} {others}" if count > 1 else ""
    command = f"{several}llamafactory-cli train FILE"  # starts torchrun for DDP (``cli.py: main``)
    if draft.knobs.is_sharded:  # as in ``examples/extras``
        command = f"accelerate launch --config_file {ACCELERATE_FILE} src/train.py FILE"
    tool = Tool(name="LLaMA-Factory", command=command, trains_with_trl=False)
    draft.answered.update(("model_name_or_path", "do_train"))
    draft.keys |= {
        "model_name_or_path": draft.job.model,
        "stage": facts.stage,
        "do_train": True,
        "finetuning_type": "lora" if draft.knobs.use_peft else "full",
    }
    draft.rename(RENAMED)
    if draft.settings.get("attn_implementation") in ATTENTION:
        draft.keys["flash_attn"] = ATTENTION[draft.get("attn_implementation")]
    _add_data(draft)
    _add_adapter(draft)
    _add_arithmetic(draft)
    asked = draft.settings.get("loss_type", draft.method_facts.defaults.get("loss_type"))
    loss = asked[0] if isinstance(asked, list) and len(asked) == 1 else asked
    draft.keys |= {key: value for name, key in facts.renamed.items() if (value := draft.get(name)) is not None}
    if loss in facts.losses:  # any other loss is noted as lost
        draft.answered.add("loss_type")
        if facts.loss_key:
            draft.keys[facts.loss_key] = loss
    draft.keys |= facts.keys
    draft.notes += facts.notes
    if output := draft.get("output_dir"):
        draft.keys["output_dir"] = output
    draft.rename({name: name for name in TRAINER_ARGUMENTS if name not in _OWN_WAY})
    draft.keys |= {name: draft.get(name) for name in ("learning_rate", *TRAINER_DEFAULTS)}
    draft.keys["report_to"] = draft.get("report_to", "none")
    offload = "its deepspeed key with a ZeRO configuration that offloads is the nearest"
    note_other_trainer(draft, "LLaMA-Factory", batch="per_device_train_batch_size", offload=offload)
    if draft.knobs.is_sharded:
        note_launch(draft)
    return document(draft, tool, draft.environment)


def _facts(draft: Draft) -> LlamaFactoryFacts:
    """Returns LLaMA-Factory's facts about the method; ``tools.check`` has rejected methods without any."""
    facts = method_of(draft.job.method).llamafactory
    assert facts is not None
    return facts


def _add_data(draft: Draft) -> None:
    """Adds the data: a name whose entry in ``dataset_info.json`` defines what to read."""
    data, packs, facts = draft.data, draft.knobs.packing, _facts(draft)
    draft.answered.update(OF_DATA)
    names = {}
    if data is None:
        draft.answered.add("datasets")
        draft.note_data("datasets: list the names of the mixture's datasets in dataset, separated by commas")
    else:
        name = pathlib.PurePath(data.path).stem.replace(",", "_")  # a comma would split the name
        names = {"dataset": name} | ({"eval_dataset": f"{name}_eval"} if draft.job.is_evaluated else {})
        source = {"hf_hub_url": data.path} if data.kind is None else {"file_name": str(data.path)}
        subset = {} if data.subset is None else {"subset": data.subset}
        for key, split in zip(names.values(), (data.train_split, data.test_split), strict=False):
            entry = json.dumps({**source, **subset, "split": split, **facts.entry}, ensure_ascii=False)
            added = f'({facts.rows}): "{key}": {entry}'
            draft.notes.append(f"dataset: add this entry to data/dataset_info.json {added}")
    prompts_only = draft.job.is_online and draft.plan.prompt_length
    draft.keys |= {**names, "cutoff_len": draft.plan.prompt_length if prompts_only else draft.length}
    if draft.method_facts.is_packable:
        draft.keys |= {"packing": packs, "neat_packing": packs, "train_on_prompt": draft.trains_on_prompts}
        if draft.trains_on_prompts:
            draft.notes.append(
                "train_on_prompt true: TRL trains on all tokens of a conversation; for prompts with completions it "
                "trains on the completions only, which is train_on_prompt false"
            )
    draft.notes += facts.length_notes
    note_no_limit(draft, "cutoff_len")


_LORA = {"lora_r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def _add_adapter(draft: Draft) -> None:
    """Adds the adapter. ``model/adapter.py: _setup_lora_tuning`` splits a text at its commas, while PEFT reads a single
    text as a regular expression. Quantization follows ``model/model_utils/quantization.py: configure_quantization``."""
    if not draft.knobs.use_peft:
        draft.answered.update(IDLE_WITHOUT_ADAPTER)
        return
    draft.answered.update(OF_ADAPTER)
    draft.keys |= {_LORA[name]: draft.get(name) for name in LORA_DEFAULTS}
    asked = draft.get("lora_target_modules")
    pattern = asked[0] if isinstance(asked, list) and len(asked) == 1 else asked
    if pattern == "all-linear":
        draft.keys["lora_target"] = "all"
    elif isinstance(pattern, list):
        draft.keys["lora_target"] = ",".join(pattern)
    elif not pattern:
        draft.notes.append("lora_target_modules: TRL leaves them to PEFT; LLaMA-Factory takes all linear layers")
    elif name := re.fullmatch(r"\.\*(?:\\\.)?(\w+)", pattern):
        draft.keys["lora_target"] = name[1]
    else:
        draft.notes.append(f"lora_target_modules {pattern}: a regular expression; lora_target takes a list of names")
    if saved := draft.get("lora_modules_to_save"):
        draft.keys["additional_target"] = ",".join(saved)
    draft.rename({name: name for name in ("use_rslora", "use_dora")})
    bits = draft.knobs.base_bits
    if bits is not None:
        draft.keys |= {"quantization_method": "bnb", "quantization_bit": bits}
    if bits == 4:
        draft.keys["quantization_type"] = draft.get("bnb_4bit_quant_type", "nf4")
        draft.keys["double_quantization"] = draft.knobs.use_bnb_nested_quant
    draft.notes.append(
        "the adapter: LLaMA-Factory trains it in float32; on a quantized base TRL uses bfloat16, half the bytes"
    )


def _add_arithmetic(draft: Draft) -> None:
    """Adds precision and checkpointing.

    LLaMA-Factory loads weights in the checkpoint's dtype (``model/loader.py: load_model``), and casts trained ones to
    float32 unless ``pure_bf16`` is set (``model/adapter.py: init_adapter``). Its checkpointing is reentrant by default,
    TRL's is not (``model/model_utils/checkpointing.py: prepare_model_for_training``).
    """
    knobs, is_full = draft.knobs, not draft.knobs.use_peft
    details = dict(draft.get("gradient_checkpointing_kwargs") or {})
    reentrant = bool(details.pop("use_reentrant", False))
    draft.answered.update(("bf16", "fp16", "dtype", "gradient_checkpointing", "activation_offloading"))
    draft.keys |= {
        "bf16": draft.precision == "bf16",
        "fp16": draft.precision == "fp16",
        "pure_bf16": is_full and knobs.dtype == "bfloat16",
        "disable_gradient_checkpointing": not knobs.gradient_checkpointing,
        "use_reentrant_gc": reentrant,
    }
    if not (is_full and knobs.dtype == "float32"):
        draft.notes.append(f"dtype {knobs.dtype}: LLaMA-Factory loads weights in the checkpoint's own dtype")
    if details:
        draft.notes.append(f"gradient_checkpointing_kwargs {json.dumps(details)}: no key")
    if knobs.activation_offloading:
        nearest = "use_unsloth_gc true is the nearest: it keeps on the host what recomputing starts from"
        draft.notes.append(f"activation_offloading true: no key, so the run needs more than predicted; {nearest}")
