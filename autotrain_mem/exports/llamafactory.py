"""Writes and reads LLaMA-Factory's YAML (``llamafactory-cli train FILE``).

Keys follow https://github.com/hiyouga/LLaMA-Factory, August 2026 (ff6d4d1), ``src/llamafactory/hparams``:
``model_args.py``, ``data_args.py``, ``finetuning_args.py``, ``generating_args.py``, and transformers' own arguments in
``training_args.py``. What they do was read in ``model/loader.py``, ``model/adapter.py`` and ``train``.
"""

import json
import pathlib
import re

from autotrain_mem.exports import draft as drafts
from autotrain_mem.exports.accelerate import ACCELERATE_FILE, FIRST_MACHINE, note_launch
from autotrain_mem.exports.draft import Draft, Tool, document, draft_of
from autotrain_mem.exports.tool_keys import Reading
from autotrain_mem.methods.interface import LlamaFactoryFacts, method_of
from autotrain_mem.parallel.place import PORT
from autotrain_mem.types import Job, Plan


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
    draft.write("llamafactory", "same")
    draft.keys |= {name: draft.get(name) for name in ("learning_rate", *drafts.TRAINER_DEFAULTS)}
    draft.keys["report_to"] = draft.get("report_to", "none")
    offload = "its deepspeed key with a ZeRO configuration that offloads is the nearest"
    drafts.note_other_trainer(draft, "LLaMA-Factory", batch="per_device_train_batch_size", offload=offload)
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
    draft.answered.update(drafts.OF_DATA)
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
    drafts.note_no_limit(draft, "cutoff_len")


def _add_adapter(draft: Draft) -> None:
    """Adds the adapter. ``model/adapter.py: _setup_lora_tuning`` splits a text at its commas, while PEFT reads a single
    text as a regular expression. Quantization follows ``model/model_utils/quantization.py: configure_quantization``."""
    if not draft.knobs.use_peft:
        draft.answered.update(drafts.IDLE_WITHOUT_ADAPTER)
        return
    draft.answered.update(drafts.OF_ADAPTER)
    draft.write_adapter("llamafactory")
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
    if (bits := draft.knobs.base_bits) is not None:
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


def read(reading: Reading) -> None:
    """Reads the keys of a file for LLaMA-Factory that no row of the table can, as ``model/patcher.py: patch_config``,
    ``model/adapter.py: init_adapter`` and ``hparams/parser.py`` do. The table's defaults are those of
    ``finetuning_args.py: LoraArguments, FinetuningArguments`` and of transformers' ``training_args.py``."""
    take, keys, settings = reading.take, reading.keys, reading.settings
    is_full = keys.get("finetuning_type") == "full"
    if facts := method_of(reading.method).llamafactory:
        reading.rename(facts.renamed)
    reading.set_length(take("cutoff_len", 2048))
    _read_data(reading)
    pure, half = take("pure_bf16", False), take("fp16", False)
    brain = take("bf16", False) or pure
    loaded = "bfloat16" if brain and (pure or not is_full) else "float16" if half and not is_full else "float32"
    settings |= {"bf16": brain, "fp16": half, "dtype": loaded}
    if (reentrant := take("use_reentrant_gc")) is not None:
        settings["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    bits, nested = take("quantization_bit", 0), take("double_quantization", True)
    if bits in (4, 8):
        settings[f"load_in_{bits}bit"] = True
    elif bits:
        reading.notes.append(f"quantization_bit {bits}: TRL quantizes to 4 or 8 bits; the plan has an unquantized base")
    if bits == 4:
        settings["use_bnb_nested_quant"] = nested
    target, saved = take("lora_target", "all"), take("additional_target")
    if not is_full:
        keys["lora_rank"] = take("lora_rank", settings["lora_r"])
        settings["lora_alpha"] = 2 * keys["lora_rank"]
        settings["lora_target_modules"] = ["all-linear"] if target == "all" else _split(target)
        if saved:
            settings["lora_modules_to_save"] = _split(saved)
        if bits:
            reading.notes.append("the adapter: LLaMA-Factory trains it in float32, and here TRL in bfloat16")


def _split(names: str | list[str]) -> list[str]:
    """Returns a list's names (``finetuning_args.py: FinetuningArguments.__post_init__``)."""
    return names.split(",") if isinstance(names, str) else names


def _read_data(reading: Reading) -> None:
    """Reads the data's names, with their entries in ``dataset_info.json`` (``data/parser.py: get_dataset_list``)."""
    take = reading.take
    folder, names = pathlib.Path(take("dataset_dir", "data")), str(take("dataset", "")).split(",")
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        info = {}
    entries = [info[name.strip()] for name in names if isinstance(info.get(name.strip()), dict)]
    sources = []
    for entry in entries:
        path = str(folder / entry["file_name"]) if "file_name" in entry else entry.get("hf_hub_url")
        source = {"path": path, "name": entry.get("subset"), "split": entry.get("split", "train")}
        sources.append({name: value for name, value in source.items() if value is not None})
    reading.set_data([] if len(entries) < len(names) else sources)
    if len(entries) < len(names) and {"dataset", "dataset_name"}.isdisjoint(reading.given):
        reading.notes.append(
            f"dataset {','.join(names)}: {folder / 'dataset_info.json'} has no such entry: give --dataset DATA"
        )
    is_chat = any(entry.get("formatting") == "sharegpt" for entry in entries)
    if not take("train_on_prompt", False) and reading.facts.is_packable and is_chat:
        reading.settings["assistant_only_loss"] = True
    if reading.keys.get("val_size") or reading.keys.get("eval_dataset"):
        reading.keys.update(dict.fromkeys(("eval_strategy", "eval_steps")))
