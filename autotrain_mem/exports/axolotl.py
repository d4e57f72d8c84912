"""Writes and reads Axolotl's YAML (``axolotl train FILE``).

Keys follow https://github.com/axolotl-ai-cloud/axolotl, July 2026 (067b021), ``src/axolotl/utils/schemas``:
``config.py: AxolotlInputConfig`` and its parts. What they do was read in ``core/builders/base.py: TrainerBuilderBase``,
``causal.py: HFCausalTrainerBuilder`` and ``rl.py: HFRLTrainerBuilder``.

GRPO's ``trl:`` and ``vllm:`` blocks follow ``trl.py: TRLConfig`` and ``vllm.py: VllmConfig``. They hold only what
``core/trainers/grpo/__init__.py: GRPOStrategy.set_training_args_kwargs`` passes to TRL's trainer.
"""

from collections.abc import Mapping
from typing import Any

from autotrain_mem.allocator.settings import NEWER_VARIABLE, OLDER_VARIABLE
from autotrain_mem.exports import draft as drafts
from autotrain_mem.exports.accelerate import FIRST_MACHINE
from autotrain_mem.exports.draft import Data, Draft, Tool, document, draft_of
from autotrain_mem.exports.tool_keys import REWARDS, SHAPED_REWARD, Reading, keys_of
from autotrain_mem.methods.interface import AxolotlFacts, method_of
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.parallel.launch_environment import fsdp_settings
from autotrain_mem.parallel.place import PORT
from autotrain_mem.types import TEXT_COLUMN, Job, Plan

LIGER: Mapping[str, Any] = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    **dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy"), True),
}
"""The keys for what transformers' ``use_liger_kernel`` turns on (``integrations/liger/args.py: LigerArgs``)."""

VLLM_DEFAULTS: Mapping[str, Any] = {"vllm_mode": "colocate", "vllm_enable_sleep_mode": False}
VLLM_SHARE: Mapping[str, Any] = {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 1}
"""TRL's defaults (``trl/trainer/grpo_config.py: GRPOConfig``), here without the prefix
``vllm_``; Axolotl's engine would take 0.9 of the card."""


def axolotl(plan: Plan, job: Job) -> str:
    """Returns the file for ``axolotl train FILE``."""
    draft = draft_of(plan, job)
    draft.keys |= {"base_model": job.model, **_facts(draft).keys}
    draft.answered.add("model_name_or_path")
    variables = draft.environment
    if variables.keys().isdisjoint({NEWER_VARIABLE, OLDER_VARIABLE}):
        # By default Axolotl turns on expandable segments (``utils/__init__.py: set_pytorch_cuda_alloc_conf``).
        variables[NEWER_VARIABLE] = "expandable_segments:False"
    count, nodes, launcher = draft.knobs.processes, draft.nodes, ""
    if count > 1:  # ``accelerate launch`` gets what follows ``--`` (``cli/args.py``, ``cli/utils/train.py``)
        place = f" --num_machines={nodes} --machine_rank=0 --main_process_ip={FIRST_MACHINE} --main_process_port={PORT}"
        launcher = f" --launcher accelerate -- --num_processes={count}{place if nodes > 1 else ''}"
    tool = Tool(name="Axolotl", command=f"axolotl train FILE{launcher}", trains_with_trl=False)
    _add_data(draft)
    draft.write("axolotl", "same")
    _add_adapter(draft)
    _add_arithmetic(draft)
    _add_sharding(draft)
    _add_schedule(draft)
    if draft.job.is_online:
        _add_grpo(draft)
    else:
        _add_loss(draft)
    asked = draft.settings.get("report_to") or []
    trackers = [asked] if isinstance(asked, str) else list(asked)
    reporters = {key.trl: key.name for key in keys_of("axolotl") if key.kind == "report"}
    draft.keys |= {reporters[name]: True for name in trackers if name in reporters}
    if "wandb" in trackers and draft.settings.get("run_name"):
        draft.keys["wandb_name"] = draft.get("run_name")
    if {*trackers} <= {*reporters, "none"}:
        draft.answered.add("report_to")
    offload = "Axolotl's deepspeed key with a ZeRO configuration that offloads is the nearest"
    drafts.note_other_trainer(draft, "Axolotl", batch="micro_batch_size", offload=offload)
    return document(draft, tool, variables)


def _facts(draft: Draft) -> AxolotlFacts:
    """Returns Axolotl's facts about the method; ``tools.check`` has rejected methods without any."""
    facts = method_of(draft.job.method).axolotl
    assert facts is not None
    return facts


def _add_data(draft: Draft) -> None:
    """Adds the data. Axolotl drops long rows; TRL drops them in reward training and truncates them otherwise."""
    method, packs, keys = draft.method_facts, not draft.knobs.pads_rows, draft.keys
    draft.answered.update((*drafts.OF_DATA, "dataset_text_field"))
    if draft.data:
        keys["datasets"] = [_dataset(draft, train=True)]
        if draft.job.is_evaluated:
            keys["test_datasets"] = [_dataset(draft, train=False)]
    else:
        draft.answered.add("datasets")
        draft.note_data("datasets: Axolotl reads a mixture from its own datasets key, one entry for each dataset")
    keys |= {"chat_template": "tokenizer_default", "sequence_len": draft.length}
    if not method.is_online:
        keys["excess_length_strategy"] = "drop" if method.long_rows == "dropped" else "truncate"
    packs_evaluated = bool(draft.get("eval_packing", packs))
    if method.is_packable:
        keys["sample_packing"] = packs
        if "test_datasets" in keys:
            keys["eval_sample_packing"] = packs_evaluated
        keys["train_on_inputs"] = draft.trains_on_prompts
    keys["pad_to_sequence_len"] = packs
    if not draft.settings.get("dataset_text_field"):
        draft.notes += _facts(draft).notes
    if method.is_packable and draft.trains_on_prompts:
        draft.notes.append(
            "train_on_inputs true: TRL trains on all tokens of a conversation or a text; for prompts with completions "
            "it trains on the completions only, which is train_on_inputs false"
        )
    drafts.note_no_limit(draft, "sequence_len")


def _dataset(draft: Draft, *, train: bool) -> dict[str, Any]:
    data = draft.data
    assert isinstance(data, Data)
    text, row_type = draft.get("dataset_text_field"), _facts(draft).row_type
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


_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
"""Each is on unless set to false (``config.py: check_auto_enable_lora_kernels``). They use other buffers than TRL."""


def _add_adapter(draft: Draft) -> None:
    """Adds the adapter. qlora is for 4 bits only, lora for 8 bits (``loaders/model.py: _set_quantization_config``)."""
    knobs, keys = draft.knobs, draft.keys
    if not knobs.use_peft:
        draft.answered.update(drafts.IDLE_WITHOUT_ADAPTER)
        return
    draft.answered.update(drafts.OF_ADAPTER)
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
    draft.write_adapter("axolotl")
    if (asked := draft.get("lora_target_modules")) in ("all-linear", ["all-linear"]):
        keys["lora_target_linear"] = True
    elif asked:
        single = isinstance(asked, list) and len(asked) == 1  # TRL and PEFT read a single text as a regular expression
        keys["lora_target_modules"] = asked[0] if single else asked
    else:
        draft.notes.append("lora_target_modules: TRL leaves them to PEFT; Axolotl needs their names")
    keys |= dict.fromkeys(_LORA_KERNELS, False)
    if knobs.base_bits is not None:
        draft.notes.append(
            "the adapter: on a quantized base, TRL trains it in bfloat16, and Axolotl in float32 with twice the bytes; "
            "while loading, Axolotl holds embeddings and output layer in float32 (prepare_model_for_kbit_training)"
        )


def _add_arithmetic(draft: Draft) -> None:
    """Adds precision and checkpointing.

    Axolotl loads weights in the compute dtype (``utils/config/__init__.py``, where cfg.torch_dtype is set). Its
    checkpointing in SFT is reentrant by default (``utils/config/__init__.py: normalize_config``), TRL's is not. It
    rejects offloading without checkpointing (``validation.py: check_activation_offloading_wo_gc``).
    """
    knobs, computes = draft.knobs, {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}[draft.precision]
    checkpoints = knobs.gradient_checkpointing or knobs.activation_offloading
    details = draft.get("gradient_checkpointing_kwargs") or {"use_reentrant": False}
    draft.answered.update(("bf16", "fp16", "dtype", "gradient_checkpointing", "activation_offloading"))
    draft.keys |= {
        "bf16": draft.precision == "bf16",
        "fp16": draft.precision == "fp16",
        "tf32": bool(draft.get("tf32")),
        "gradient_checkpointing": checkpoints,
        **({"gradient_checkpointing_kwargs": details} if checkpoints else {}),
        "activation_offloading": knobs.activation_offloading,
    }
    if knobs.dtype != computes:
        draft.notes.append(
            f"dtype {knobs.dtype}: Axolotl loads weights in {computes}, the precision that it computes in"
        )
    if knobs.activation_offloading:
        way = "activations instead of recomputing them" if knobs.use_peft else "only what recomputing starts from"
        draft.notes.append(
            f"activation_offloading true: Axolotl offloads {way}, whatever TRL's gradient_checkpointing is"
        )


def _add_sharding(draft: Draft) -> None:
    """Adds FSDP's keys, without accelerate's prefix (``utils/schemas/fsdp.py: FSDPConfig``); DDP needs no keys."""
    knobs, settings = draft.knobs, fsdp_settings(draft.launch)
    if draft.nodes > 1:
        draft.notes.append(f"machine_rank in the command: each machine's own; {FIRST_MACHINE}: the first one's address")
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

_WRITTEN_OUT = (
    *("learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "num_train_epochs", "seed"),
    "logging_steps",
)
"""Settings that are always written, since Axolotl's defaults differ from TRL's."""


def _add_schedule(draft: Draft) -> None:
    """Adds the schedule. Axolotl's defaults: cosine, 3 % warm-up, one epoch; it keeps the last four checkpoints."""
    warmup = draft.get("warmup_steps")  # below 1 a share of all steps: TrainingArguments.get_warmup_steps
    draft.keys |= {
        **{
            key.name: draft.get(key.trl) for key in keys_of("axolotl") if key.kind == "same" and key.trl in _WRITTEN_OUT
        },
        **({"warmup_ratio": warmup} if 0 < warmup < 1 else {"warmup_steps": int(warmup)}),
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
        draft.notes.append("warmup_steps 1: Axolotl warms up for two steps")


def _strategy(draft: Draft, what: str) -> dict[str, Any]:
    """Returns a strategy's keys; only ``steps`` takes a number (``validation.py: check_saves``, ``check_evals``)."""
    strategy = str(draft.get(f"{what}_strategy", "no"))
    steps = draft.get(f"{what}_steps") or draft.get("logging_steps")
    return {f"{what}_strategy": strategy, **({f"{what}_steps": steps} if strategy == "steps" else {})}


def _add_loss(draft: Draft) -> None:
    renamed, keys = _facts(draft).renamed, draft.keys
    draft.rename(renamed)
    if "beta" in renamed:
        keys[renamed["beta"]] = draft.get("beta")
    if isinstance(keys.get("dpo_loss_type"), str):
        keys["dpo_loss_type"] = [keys["dpo_loss_type"]]
    if draft.method_facts.has_chunked_loss:
        if draft.get("use_liger_kernel"):
            keys |= LIGER
        if draft.settings.get("loss_type") in (None, "nll"):
            draft.answered.add("loss_type")


def _add_grpo(draft: Draft) -> None:
    """Adds the ``trl:`` and ``vllm:`` blocks. Unset keys keep TRL's defaults, since the trainer is TRL's own."""
    settings = draft.settings
    draft.write("axolotl", "trl")
    block = draft.keys.setdefault("trl", {})
    block["beta"] = draft.get("beta")
    judge = settings.get("reward_model_name_or_path")
    functions = [*([judge] if judge else []), *(settings.get("reward_funcs") or ())]
    if SHAPED_REWARD in functions:
        draft.notes.append(
            f"reward_funcs {SHAPED_REWARD}: TRL's script passes it arguments; wrap it in a function of your own"
        )
    elif not functions:
        draft.notes.append("reward_funcs: the plan has none, and Axolotl needs one to train")
    if functions:
        names = {name: f"trl.rewards.{name}" for name in REWARDS}
        block["reward_funcs"] = [names.get(name, name) for name in functions if name != SHAPED_REWARD]
        draft.answered.update(("reward_funcs", "reward_model_name_or_path"))
    if settings.get("scale_rewards") in (True, False, "group", "none"):
        block["scale_rewards"] = draft.get("scale_rewards") in (True, "group")
    if (timeout := draft.get("vllm_server_timeout")) is not None:
        block["vllm_server_timeout"] = int(timeout)
    if settings.get("use_vllm"):
        draft.keys["trl"] = {**VLLM_DEFAULTS, **block}
        draft.keys["vllm"] = {**VLLM_SHARE, **draft.keys.get("vllm", {})}


def read(reading: Reading) -> None:
    """Reads the keys of a file for Axolotl that no row of the table can. The table's defaults are those of
    ``schemas/training.py: HyperparametersConfig``, ``schemas/peft.py: LoraConfig`` and ``core/builders/base.py:
    _configure_warmup_and_logging, _configure_save_and_eval_strategy``."""
    take, keys, settings, facts = reading.take, reading.keys, reading.settings, reading.facts
    if own := method_of(reading.method).axolotl:
        reading.rename(own.renamed)
    reading.set_length(take("sequence_len", 512), keys.get("trl.max_completion_length"))
    if take("excess_length_strategy", "drop") == "drop" and facts.long_rows != "dropped" and not facts.is_online:
        reading.notes.append("rows longer than sequence_len: Axolotl drops them, and TRL truncates them")
    if whole := take("batch_size", 0):  # ``utils/config/__init__.py: normalize_config``
        keys.setdefault("gradient_accumulation_steps", max(whole // (keys.get("micro_batch_size") or 1), 1))
    _read_data(reading)
    half = bool(take("fp16") or take("float16"))
    brain = take("bf16", take("bfloat16", "auto")) in (True, "auto", "full") and not half and not take("float32")
    settings |= {"bf16": brain, "fp16": half, "dtype": "bfloat16" if brain else "float16" if half else "float32"}
    checkpointing = take("gradient_checkpointing")
    settings["gradient_checkpointing"] = bool(checkpointing)
    if take("activation_offloading") or isinstance(checkpointing, str):
        if facts.has_activation_offload:
            settings["activation_offloading"] = True
        else:
            reading.notes.append("activation_offloading: TRL has none here, so the plan needs more memory than Axolotl")
    if keys.get("load_in_4bit") or keys.get("load_in_8bit"):
        reading.notes.append("the adapter: Axolotl trains it in float32, and on a quantized base TRL in bfloat16")
    if keys.get("load_in_4bit"):  # ``loaders/model.py: _set_quantization_config``
        settings["use_bnb_nested_quant"] = True
    if functions := take("trl.reward_funcs"):
        names = [str(name).removeprefix("trl.rewards.") for name in functions]
        judges = [name for name in names if "/" in name]
        settings["reward_funcs"] = [name for name in names if name not in judges] or None
        settings["reward_model_name_or_path"] = judges[0] if judges else None
    if take("fsdp") or any(name.startswith("fsdp_config.") for name in keys):
        shards = "fsdp2" if take("fsdp_config.reshard_after_forward", True) else "fsdp2-no-reshard"
        settings["sharding"] = "hsdp" if take("dp_replicate_size", 1) > 1 else shards
        if 2 not in (take("fsdp_version"), keys.get("fsdp_config.version")):
            reading.notes.append("fsdp: version 1 is not rehearsed, and the plan is for version 2 (fsdp_version: 2)")
    _read_steps(reading, "save")
    if keys.get("wandb_project"):  # ``utils/wandb_.py: setup_wandb_env_vars``
        keys["use_wandb"] = True


def _read_data(reading: Reading) -> None:
    take = reading.take
    names, sources, tests = ("path", "name", "split", "data_files"), take("datasets", []), take("test_datasets", [])
    reading.set_data([{name: each[name] for name in names if each.get(name) is not None} for each in sources])
    kinds = {str(each.get("type")).partition(".")[0].partition(":")[0] for each in sources if each.get("type")}
    if others := sorted(kinds - {"chat_template", "completion", "bradley_terry"}):
        reading.notes.append(
            f"datasets with type {', '.join(others)}: Axolotl makes prompts of their columns, and TRL reads columns "
            "messages, text, or prompt and completion: convert the rows first"
        )
    if not take("train_on_inputs", False) and "chat_template" in kinds and reading.facts.is_packable:
        reading.settings["assistant_only_loss"] = True
    if len(tests) == 1 and tests[0].get("path") in {each.get("path") for each in sources}:
        reading.settings["dataset_test_split"] = tests[0].get("split", "test")
        _read_steps(reading, "eval")
        return
    share = take("val_set_size", 0.0)
    reading.keys.update(dict.fromkeys(("eval_strategy", "eval_steps", "evals_per_epoch")))
    if tests or share:
        reading.notes.append(
            f"val_set_size {share}: TRL splits no rows off, so the plan trains on all rows and evaluates nothing; for "
            "evaluation give data with a split test, and --eval_strategy steps"
        )


def _read_steps(reading: Reading, what: str) -> None:
    """Reads how often a run saves or evaluates (``utils/config/__init__.py: normalize_config``)."""
    times = reading.take(f"{what}s_per_epoch", 0)
    epochs = reading.keys["num_epochs"] = reading.take("num_epochs", 1.0)
    strategy, steps = reading.take(f"{what}_strategy"), reading.take(f"{what}_steps")
    if times and times * epochs > 1:
        steps = 1 / (times * epochs)
    if steps or strategy:
        reading.settings |= {f"{what}_strategy": "steps" if steps else strategy, f"{what}_steps": steps}
