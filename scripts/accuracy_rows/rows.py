"""Turns rows of measured public runs into jobs and knobs; ``scripts/accuracy`` explains how rows are read."""

import pathlib
import re
from dataclasses import dataclass, replace
from typing import Any, Self

from autotrain_mem.checks.model_files import read_config
from autotrain_mem.machine.catalog import catalog
from autotrain_mem.trainers.model_support import LIGER_MODELS
from autotrain_mem.types import Job, Knobs

FLOAT32 = 4

CARDS = {card.name.upper(): card.name for card in catalog()}
CARDS |= {"A100": "a100-80gb", "H100": "h100-80gb", "V100": "v100-32gb", "RTX3070": "rtx3090", "RTX3080TI": "rtx3090"}
"""A row's name for a card -> a known card of the same compute capability, on which alone an allocated peak depends."""

Row = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    row: Row
    job: Job
    knobs: Knobs
    longest: int | None
    """Tokens of the prompt in online methods; None otherwise."""
    card: str

    @property
    def family(self) -> str:
        """The name shared by the rows of one family, which differ only in batch and length."""
        row = self.row
        parts = (row["model"].split("/")[-1], row["task"], row["method"], row["weights_dtype"], row["loss_impl"])
        return " ".join((*parts, framework(row)))

    @property
    def whole_logits(self) -> bool:
        """Whether the row's loss kept all logits, unlike TRL's chunked loss and Liger's."""
        return self.job.method == "sft" and "liger" not in self.row["loss_impl"]

    @property
    def fused(self) -> Self | None:
        """The same run with the fused layers that the row's framework installed; None if it installed none."""
        model = read_config(replace(self.job, method="sft", arguments={})).model_type
        if "foak" not in framework(self.row) or self.whole_logits or model not in LIGER_MODELS:
            return None
        kernels = {"rope": True, "rms_norm": True, "swiglu": False, "geglu": False, "fused_linear_cross_entropy": True}
        arguments = {"use_liger_kernel": True, "liger_kernel_config": kernels, "loss_type": "nll"}
        return replace(self, job=replace(self.job, arguments={**self.job.arguments, **arguments}))


def why_left_out(row: Row, models: pathlib.Path) -> str | None:
    """Returns why a row cannot be compared with a rehearsal by the installed versions; None if it can."""
    reasons = (
        (row["metric"] != "allocated" or not row["alloc_gib"], "no allocated peak was measured"),
        (not row["core"].startswith("A"), "not all settings are stated"),
        (row["task"] not in ("sft", "grpo"), "another trainer"),
        (row["n_gpus"] != "1", "several GPUs under FSDP's first version, or shared otherwise"),
        (row["offload"] != "none", "offloading of another stack"),
        (row["method"] not in ("full", "lora", "qlora"), "another method"),
        (bool(row["quant"]) and "bnb" not in row["quant"], "another quantization"),
        (row["task"] == "grpo" and (row["stack"] != "trl" or "trl 1." not in row["versions"]), "an older GRPO"),
        (_card(row) is None, "an unknown card"),
        (not (models / row["model"] / "config.json").is_file(), "its config is not in the folder"),
    )
    return next((reason for met, reason in reasons if met), None)


def case_of(row: Row, models: pathlib.Path) -> Case:
    """Converts a row to a job and its knobs. All of these runs had rows of fixed length without padding."""
    arguments, knobs = _common(row)
    model = str(models / row["model"])
    if row["task"] == "grpo":
        arguments |= {"beta": _number(row, r"beta (\d+(?:\.\d+)?)", 0)}
        knobs |= {"max_completion_length": int(row["seq_len"])}
        knobs |= {"num_generations": int(_number(row, r"num_generations (\d+)", 8))}
    else:
        arguments |= {"packing": True, "packing_strategy": "wrapped"}
        arguments |= {} if "liger" in row["loss_impl"] else {"loss_type": "nll"}
        knobs |= {"max_length": int(row["seq_len"]), "packing": True}
    return Case(
        row=row,
        job=Job(method=row["task"], model=model, dataset=None, arguments=arguments),
        knobs=Knobs(**knobs),
        longest=int(_number(row, r"about (\d+) tokens", 20)) if row["task"] == "grpo" else None,
        card=str(_card(row)),
    )


def _common(row: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments and knobs that do not depend on the trainer."""
    adapter, quantized = row["method"] != "full", bool(row["quant"])
    arguments: dict[str, Any] = {"bf16": row["mixed_precision"].startswith("bf16"), "use_peft": adapter}
    knobs: dict[str, Any] = {}
    if adapter:
        knobs = {
            "lora_r": int(row["lora_r"]),
            "lora_alpha": int(_number(row, r"alpha ?(\d+)", 32)),
            "lora_target_modules": tuple(row["lora_targets"].split()),
        }
        arguments |= {"lora_dropout": _number(row, r"dropout ?(\d+(?:\.\d+)?)", 0.05)}
    if quantized:
        arguments |= {"bnb_4bit_quant_type": "nf4" if "nf4" in row["quant"] else "fp4"}
    if "flash" in row["attn"]:
        arguments |= {"attn_implementation": row["attn"]}
    foreach = "foreach" in row["optimizer"]
    optimizer = "adamw_torch_fused" if "default" in row["optimizer"] else row["optimizer"].split()[0]
    return arguments, knobs | {
        "per_device_train_batch_size": int(row["batch"]),
        "gradient_accumulation_steps": int(row["grad_accum"]),
        "gradient_checkpointing": row["grad_ckpt"] == "yes",
        "use_peft": adapter,
        "dtype": row["weights_dtype"].split()[-1],
        "optim": "adamw_torch" if foreach else optimizer,
        "load_in_4bit": quantized,
        "use_bnb_nested_quant": "double" in row["quant"],
    }


def framework(row: Row) -> str:
    found = re.search(r"framework_config=([\w-]+)", row["notes"])
    return found[1] if found else ""


def _number(row: Row, pattern: str, default: float) -> float:
    """Returns the number that the pattern finds in the row's notes, or ``default`` if it finds none."""
    found = re.search(pattern, row["notes"])
    return float(found[1]) if found else default


def _card(row: Row) -> str | None:
    name = re.split(r"[-_ ]", row["gpu"].upper().replace("RTX ", "RTX"))[0]
    return CARDS.get(name)


def ran_older_trl(row: Row) -> bool:
    """Returns whether the torch version of a row implies an older TRL (the mark ``t`` of ``scripts/accuracy``)."""
    return row["task"] == "grpo" and "torch 2.13" not in row["versions"]
