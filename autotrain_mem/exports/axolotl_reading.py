"""Reads Axolotl's YAML: what the table of keys cannot say. ``exports.axolotl`` names Axolotl's version.

The table's defaults are those of ``schemas/training.py: HyperparametersConfig``, ``schemas/peft.py: LoraConfig`` and
``core/builders/base.py: _configure_warmup_and_logging, _configure_save_and_eval_strategy``.
"""

from autotrain_mem.exports.tool_keys import Reading
from autotrain_mem.methods.interface import method_of


def read(reading: Reading) -> None:
    """Reads the keys of a file for Axolotl that no row of the table can."""
    take, keys, settings, facts = reading.take, reading.keys, reading.settings, reading.facts
    if own := method_of(reading.method).axolotl:
        reading.rename(own.renamed)
    reading.set_length(int(take("sequence_len", 512)), keys.get("trl.max_completion_length"))
    if take("excess_length_strategy", "drop") == "drop" and facts.long_rows != "dropped" and not facts.is_online:
        reading.notes.append("rows longer than sequence_len: Axolotl drops them, and TRL truncates them")
    _read_data(reading)
    half = bool(take("fp16") or take("float16"))
    brain = take("bf16", take("bfloat16", "auto")) in (True, "auto", "full") and not half and not take("float32")
    settings |= {"bf16": brain, "fp16": half, "dtype": "bfloat16" if brain else "float16" if half else "float32"}
    checkpointing = take("gradient_checkpointing", False)
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
    share = take("val_set_size", 0)
    reading.keys.update(dict.fromkeys(("eval_strategy", "eval_steps", "evals_per_epoch")))
    if tests or share:
        reading.notes.append(
            f"val_set_size {share}: TRL splits no rows off, so the plan trains on all rows and evaluates nothing; for "
            "evaluation give data with a split test, and --eval_strategy steps"
        )


def _read_steps(reading: Reading, what: str) -> None:
    """Reads how often a run saves or evaluates (``utils/config/__init__.py: normalize_config``)."""
    epochs, times = reading.keys.get("num_epochs") or 1, reading.take(f"{what}s_per_epoch")
    strategy, steps = reading.take(f"{what}_strategy"), reading.take(f"{what}_steps")
    if times and times * epochs > 1:
        steps = 1 / (times * epochs)
    if steps or strategy:
        reading.settings |= {f"{what}_strategy": "steps" if steps else strategy, f"{what}_steps": steps}
