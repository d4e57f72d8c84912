"""Checks model, tokenizer and data before anything is rehearsed, and reports all problems at once.

A check passes if it cannot decide, such as for a model that is not downloaded yet. The padding side is not checked:
every trainer sets it (``trl/trainer/sft_trainer.py: DataCollatorForLanguageModeling``; ``grpo_trainer.py:
_generate_single_turn``; our PPO's tokenizer).
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.checks.compatibility import flash_package_missing
from autotrain_mem.data import load
from autotrain_mem.data.token_lengths import load_tokenizer
from autotrain_mem.methods.configs import Configs, on_cpu, trusts_remote_code, undivided
from autotrain_mem.methods.interface import method_of
from autotrain_mem.settings.flag_verdicts import Verdict, group_of
from autotrain_mem.settings.optimizer_verdicts import is_projecting, optimizer_of
from autotrain_mem.support import errors
from autotrain_mem.support.host import missing_to_compile
from autotrain_mem.support.sources import lacks_tokenizer, no_template
from autotrain_mem.trainers.script_call import keyword_of
from autotrain_mem.types import Finding, Job, Problems
from autotrain_mem.types.hardware import AMPERE, Capability, lacks_bf16

UNFORESEEN = (Exception,)
"""Exceptions of a tokenizer, a template or a model's own code; the rehearsal that follows reports them."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Holds a job, its model's config, and its device."""

    job: Job
    filled: Configs
    """The job's arguments in TRL's dataclasses."""
    config: Any
    """The model's config."""
    compute_capability: Capability
    """The card's compute capability; ASSUMED_CAPABILITY without a card."""
    to_train: bool
    """Whether this machine also trains; else it only plans, perhaps for another machine's card."""
    on_cpu: bool
    """Whether training runs on the CPU, with or without a simulated card, and needs no packages for GPUs."""
    reads_data: bool

    @functools.cached_property
    def rows(self) -> Any:
        """Returns the training rows, or the AutofitError raised while reading them; None if they are not read."""
        if not self.reads_data:
            return None
        try:
            return load.load(self.job, self.filled)[self.filled.script.dataset_train_split]
        except errors.AutofitError as error:
            return error

    @functools.cached_property
    def tokenizer(self) -> Any:
        """Returns the job's or its model's tokenizer; None if it cannot be loaded: counting tokens reports why."""
        tokenizer = keyword_of(self.job, "processing_class")
        if tokenizer is None and lacks_tokenizer(pathlib.Path(self.job.model)):
            return None
        with contextlib.suppress(*UNFORESEEN):
            tokenizer = tokenizer or load_tokenizer(self.job.model, trust_remote_code=trusts_remote_code(self.filled))
        return getattr(tokenizer, "tokenizer", tokenizer)  # a processor of text and images holds one


def setup_of(job: Job, config: Any, output_dir: str, **facts: Any) -> Setup:
    """Fills TRL's dataclasses with a job's arguments; ``facts`` are the rest of :class:`Setup`."""
    arguments = {**on_cpu(undivided(job.arguments)), "output_dir": output_dir, "report_to": "none"}
    return Setup(job=job, filled=method_of(job.method).configs(arguments), config=config, **facts)


def emulated_bf16(setup: Setup) -> Problems:
    """Warns of emulated bf16, which transformers accepts (``training_args.py: _validate_args``)."""
    given = setup.job.arguments
    if given.get("bf16") and lacks_bf16(setup.compute_capability) and not given.get("use_cpu"):
        capability = ".".join(map(str, setup.compute_capability))
        yield Finding(
            kind="warning",
            message=f"--bf16 is emulated on this card (compute capability {capability}): it has no bf16 tensor cores, "
            "and no fused attention kernels support bf16 on it.",
            cure="Remove --bf16, or give --fp16.",
        )


def tf32(setup: Setup) -> Problems:
    """Refuses ``--tf32`` on cards before Ampere, as transformers' TrainingArguments do
    (``utils/import_utils.py: is_torch_tf32_available``)."""
    if setup.job.arguments.get("tf32") and not setup.on_cpu and setup.compute_capability < AMPERE:
        capability = ".".join(map(str, setup.compute_capability))
        yield (
            f"--tf32 needs an NVIDIA card of Ampere or newer; this one has compute capability {capability}.",
            "Remove --tf32.",
        )


def flash_attention_package(setup: Setup) -> None:
    """Refuses to train with flash-attention if its package is missing; a plan does not need it."""
    name = str(setup.job.arguments.get("attn_implementation") or "")
    if (command := flash_package_missing(name)) and setup.to_train and not setup.on_cpu:
        raise errors.MissingExtraError(
            f"Training with --attn_implementation {name} needs a package that is not installed here.",
            hint=f"{command}, or remove the flag: sdpa, the default, has its own flash kernel.",
        )


def compiled_optimizer(setup: Setup) -> Problems:
    """Warns if PATH lacks tools to compile DeepSpeed's optimizer for the host; one compiled earlier is reused."""
    given = setup.job.arguments
    if not given.get("offload_optimizer_device") or not setup.to_train or setup.on_cpu:
        return
    if missing := missing_to_compile({**os.environ, **setup.job.environment}):
        yield Finding(
            kind="warning",
            message=f"DeepSpeed compiles its optimizer at its first use, and PATH lacks {' and '.join(missing)}.",
            cure="Run: pip install ninja, and apt install g++; or remove --offload_optimizer_device.",
        )


def data(setup: Setup) -> Problems:
    """Reports data that cannot be read.

    If the hub does not answer (``datasets/load.py: dataset_module_factory`` then raises ConnectionError), a plan
    without training gets only a warning, provided that the number of tokens in a row is given.
    """
    job, error = setup.job, setup.rows
    if not isinstance(error, errors.AutofitError):
        return
    out_of_reach = isinstance(error, errors.DatasetError) and isinstance(error.__cause__, ConnectionError)
    if setup.to_train or job.row_tokens is None or not out_of_reach:
        yield Finding.of(error)
        return
    rows = f"prompts of {job.row_tokens} tokens" if job.is_online else f"rows that fill max_length, {job.row_tokens}"
    yield Finding(
        kind="warning",
        error="DatasetNotFoundError",
        message=f"The dataset {load.dataset_name(job)} could not be read, since the hub cannot be reached: planned for "
        f"{rows}.",
        cure="Plan with access to the hub to use the rows' lengths.",
    )


LOOKED_AT_ROWS = 4
"""Rows that are searched for a conversation; the trainers check only the first."""


def special_tokens(setup: Setup) -> Problems:
    """Refuses end and padding tokens that are not in the vocabulary, as SFT, reward and DPO trainers do
    (``trl/trainer/sft_trainer.py: __init__``). A cloned template may add the padding token."""
    filled, tokenizer = setup.filled, setup.tokenizer
    if tokenizer is None:
        return
    for name in ("eos_token",) if _resizes(filled) else ("eos_token", "pad_token"):
        token = getattr(filled.training, name, None)
        if token is not None and token not in tokenizer.get_vocab():
            yield Finding(
                kind="error",
                message=f"--{name} {token!r} is not in the tokenizer's vocabulary.",
                cure=f"Remove --{name}, so that {getattr(tokenizer, name)!r} is used, or give a token of the "
                "vocabulary.",
            )
    given = getattr(filled.training, "pad_token", None) or getattr(filled.training, "eos_token", None)
    if not given and tokenizer.pad_token is None and tokenizer.eos_token is None:
        flag = "Give --pad_token a token of its vocabulary, or: " if hasattr(filled.training, "pad_token") else ""
        raise errors.TokenizerError(
            "The tokenizer has neither a padding token nor an end token, so no batch can be padded.",
            hint=f"{flag}Set tokenizer.pad_token and save the tokenizer with the model.",
        )


def padding_of_method(setup: Setup) -> Problems:
    """Refuses a padding token that also occurs in text, for trainers that recognize padding by its id."""
    if setup.tokenizer is not None:
        yield from method_of(setup.job.method).tokenizer_findings(setup.filled, setup.tokenizer)


def vocabulary(setup: Setup) -> Problems:
    """Finds token ids without a row in the embeddings. On a GPU they fail a kernel's assertion that names no token.

    Special tokens that never occur in text (Gemma 3's image token in its text models) are ignored, unless they are the
    padding, end or beginning token, or the chat template uses them.
    """
    if (tokenizer := setup.tokenizer) is None or _resizes(setup.filled):
        return
    rows = setup.config.get_text_config().vocab_size
    added = {str(token.content): token.special for token in tokenizer.added_tokens_decoder.values()}
    numbers = tokenizer.get_vocab()
    beyond = sorted((token for token, number in numbers.items() if number >= rows), key=numbers.__getitem__)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used = {token for token in tokenizer.get_added_vocab() if token in template}
    used |= {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token}
    sure = [token for token in beyond if token not in added or token in used]
    perhaps = [token for token in beyond if not added.get(token, True)]
    if not sure and not perhaps:
        return
    enough = max(numbers.values()) + 1
    named = sure or perhaps
    some = ", ".join(map(repr, named[:2])) + (", ..." if len(named) > 2 else "")
    yield Finding(
        kind="error" if sure else "warning",
        error="TokenizerError",
        message=f"The embeddings of {setup.job.model} have {rows} rows, and {len(beyond)} of the tokenizer's tokens "
        f"are beyond them ({some}): training fails at the first batch with one of these.",
        cure="Use the tokenizer that the model was trained with, or call "
        f"model.resize_token_embeddings({enough}) once, save model and tokenizer in a folder, and give it to --model.",
    )


def _resizes(filled: Configs) -> bool:
    """Returns whether a chat template is cloned from another tokenizer: cloning adds its tokens and resizes the
    embeddings (``trl/chat_template_utils.py: clone_chat_template``)."""
    path = getattr(filled.training, "chat_template_path", None)
    return path is not None and not str(path).endswith((".jinja", ".j2"))


def chat_template(setup: Setup) -> None:
    """Refuses conversations without a chat template."""
    from trl import is_conversational

    filled, tokenizer, rows = setup.filled, setup.tokenizer, setup.rows
    if tokenizer is None or rows is None or isinstance(rows, errors.AutofitError):
        return
    if tokenizer.chat_template is not None or getattr(filled.training, "chat_template_path", None):
        return
    columns = load.columns_of(setup.job, filled, rows.column_names)
    looked_at = [{name: rows[index][name] for name in columns} for index in range(min(LOOKED_AT_ROWS, len(rows)))]
    if "conversations" not in columns and not any(is_conversational(row) for row in looked_at):
        return
    raise no_template(setup.job.model, takes_path=hasattr(filled.training, "chat_template_path"))


def idle(setup: Setup) -> Problems:
    """Warns of flags without effect, once for each reason, and of flags that are newer than this version."""
    job, given = setup.job, setup.job.arguments
    groups = {name: group_of(job.method, name) for name in _asked(given, setup.filled)}
    if unknown := [f"--{name}" for name, group in groups.items() if group is None]:
        yield Finding(
            kind="warning",
            message=f"{', '.join(unknown)}: newer than this autofit, so the effect on memory is not checked. "
            "Rehearsals pass such flags to TRL's trainer.",
            cure="",
        )
    reasons: dict[str, list[str]] = {}
    for name, group in groups.items():
        switch = next((switch for prefix, switch in _SWITCHES.items() if name.startswith(prefix)), "")
        value = given.get(switch) or "no"
        in_script = group is not None and group.in_commands and job.python_call is not None
        if group is not None and group.verdict is Verdict.IDLE and not in_script:
            reasons.setdefault(group.why, []).append(name)
        elif switch and str(getattr(value, "value", value)) == "no":
            reasons.setdefault(f"--{switch} is not given", []).append(name)
    if given.get("optim_target_modules") and not is_projecting(optimizer_of(setup.filled.training)):
        reasons["only optimizers of GaLore and APOLLO read it, and --optim is neither"] = ["optim_target_modules"]
    for why, names in reasons.items():
        flags = ", ".join(f"--{name}" for name in names)
        yield Finding(
            kind="warning",
            message=f"{flags} {'has' if len(names) == 1 else 'have'} no effect with {job.method}: {why}.",
            cure=f"Remove {'it' if len(names) == 1 else 'them'}.",
        )


_SWITCHES = {
    "vllm_": "use_vllm",
    "ref_model_": "sync_ref_model",
    "liger_kernel_config": "use_liger_kernel",
    "eval_steps": "eval_strategy",
    "packing_strategy": "packing",
    "entropy_coef_": "use_adaptive_entropy",
}
"""Prefixes of flags -> the flag without which TRL ignores them, and which no plan turns on."""


def _asked(given: Mapping[str, Any], filled: Configs) -> Iterator[str]:
    """Yields the names of arguments whose values differ from TRL's default."""
    parts = (filled.script, filled.training, filled.model, filled.dataset)
    fields = {field.name: field for part in parts for field in dataclasses.fields(part)}
    for name, value in given.items():
        if value in (None, False, "") or name not in fields:
            continue
        factory = fields[name].default_factory
        default = fields[name].default if factory is dataclasses.MISSING else factory()
        if value != getattr(default, "value", default):
            yield name
