"""Builds a tool's file: its keys, its notes, the user's settings that no key covers, and its text."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotrain_mem.allocator.settings import variable_that_counts
from autotrain_mem.exports.tool_keys import NO_LIMIT_TOKENS, keys_of
from autotrain_mem.parallel.config import accelerate_config
from autotrain_mem.settings.adapter_config import without_said
from autotrain_mem.settings.knobs import NOT_TRLS, knob_names
from autotrain_mem.settings.words import MAX_LENGTH, without_maximized
from autotrain_mem.support.data_files import DATA_KINDS, suffix_of
from autotrain_mem.support.units import format_bytes, one_line, printable
from autotrain_mem.types import Job, Knobs, MethodFacts, Plan
from autotrain_mem.types.planned import as_recorded

TRAINER_DEFAULTS: Mapping[str, Any] = {
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 500,
    "seed": 42,
}
"""Defaults of every TRL config that differ from those of other tools (transformers ``training_args.py:
TrainingArguments`` and ``trl/trainer/base_config.py``)."""
LORA_DEFAULTS: Mapping[str, Any] = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""TRL's defaults (``trl/trainer/model_config.py: ModelConfig``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Describes where the rows come from."""

    path: str
    """A hub id, a folder or a file."""
    kind: str | None
    """The file's kind for ``load_dataset``; None for a hub id or a folder."""
    subset: str | None
    train_split: str
    test_split: str


OF_DATA = (
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
    *(MAX_LENGTH, "packing", "assistant_only_loss", "completion_only_loss"),
)
"""TRL's settings for where the rows come from and how they are prepared."""
OF_ADAPTER = (
    *("use_peft", *LORA_DEFAULTS, "use_rslora", "use_dora", "lora_target_modules", "lora_modules_to_save"),
    *("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "bnb_4bit_quant_type"),
)
"""Settings of an adapter and its base that other tools have too."""
IDLE_WITHOUT_ADAPTER = (*OF_ADAPTER, "bnb_4bit_quant_storage", "lora_target_parameters", "lora_task_type")


@dataclass(kw_only=True, slots=True)
class Draft:
    """Collects the keys of one tool's file. A setting read with :meth:`get` counts as answered; the file names every
    other one as lost, so no setting is lost silently."""

    plan: Plan
    job: Job
    """The job without its secrets, which a file must not hold."""
    hidden: tuple[str, ...]
    """Names of the user's arguments and variables whose values a file must not hold."""
    settings: Mapping[str, Any] = field(init=False)
    """The user's arguments, overridden by the plan's knobs; without TRL's defaults and our own settings. Reading from
    here does not mark a setting as answered."""
    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the tool cannot express or does differently; one line each."""
    answered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = without_maximized(without_said(self.job.arguments))
        for name in knob_names(self.method_facts.knobs, self.knobs):
            if (value := getattr(self.knobs, name)) is not None or name == MAX_LENGTH:
                settings[name] = list(value) if isinstance(value, tuple) else value  # YAML has no tuples
        public = {name: value for name, value in settings.items() if name not in NOT_TRLS}
        self.settings = {name: value for name, value in public.items() if value is not None or name == MAX_LENGTH}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a setting as given or planned, else TRL's default if known; marks it as answered."""
        self.answered.add(name)
        known = {**TRAINER_DEFAULTS, **LORA_DEFAULTS, **self.method_facts.defaults}
        return self.settings.get(name, known.get(name, default))

    def rename(self, names: Mapping[str, str]) -> None:
        """Copies settings that the tool has with the same values, under the same or another name."""
        self.answered.update(names)
        self.keys |= {key: value for name, key in names.items() if (value := self.settings.get(name)) is not None}

    def write(self, tool: str, kind: str) -> None:
        """Adds the tool's keys of a kind, as :meth:`rename` does. A value that the tool lacks is not answered."""
        for key in keys_of(tool):
            value = self.settings.get(key.trl)
            if key.kind != kind or (key.values and value is not None and value not in key.values.values()):
                continue
            self.answered.add(key.trl)
            if value is not None:
                block, _, name = key.name.rpartition(".")
                written = next((theirs for theirs, ours in key.values.items() if ours == value), value)
                (self.keys.setdefault(block, {}) if block else self.keys)[name] = written

    def write_adapter(self, tool: str) -> None:
        """Adds the tool's keys for LoRA: those whose defaults differ, and what the user set."""
        for key in keys_of(tool):
            if key.kind == "adapter" and ((value := self.get(key.trl)) or key.trl in LORA_DEFAULTS):
                self.keys[key.name] = value

    @property
    def knobs(self) -> Knobs:
        return self.plan.knobs

    @property
    def method_facts(self) -> MethodFacts:
        return self.job.method_facts

    @property
    def trains_on_prompts(self) -> bool:
        return not (self.settings.get("assistant_only_loss") or self.settings.get("completion_only_loss"))

    @property
    def precision(self) -> str:
        """Returns the mixed precision: ``bf16`` (TRL's default), ``fp16`` or ``no``."""
        if self.knobs.fp16 or self.settings.get("fp16"):
            return "fp16"
        return "no" if self.settings.get("bf16") is False else "bf16"

    @property
    def nodes(self) -> int:
        return self.plan.estimate.hardware.topology.nodes

    @property
    def devices(self) -> int:
        """Returns the GPUs of one machine."""
        return self.knobs.processes // self.nodes

    @property
    def launch(self) -> Mapping[str, Any]:
        """Returns the launch settings, in the keys of ``accelerate launch``: the user's own, or those that autofit
        uses."""
        return self.launched() if self.job.accelerate is None else self.job.accelerate

    def launched(self, layers: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the launch settings that autofit itself uses. ``layers``: layers to wrap that accelerate does not
        find by itself."""
        attention = self.job.arguments.get("attn_implementation")
        return accelerate_config(
            self.knobs, mixed_precision=self.precision, nodes=self.nodes, wrapped=layers, attention=attention
        )

    @property
    def data(self) -> Data | None:
        """Returns where the rows come from; None if no data are named, or for a mixture, which only TRL reads."""
        named = self.job.dataset or self.settings.get("dataset_name")
        if named is None:
            return None
        path = str(named)
        return Data(
            path=path,
            kind=DATA_KINDS.get(suffix_of(path)),
            subset=self.settings.get("dataset_config"),
            train_split=self.settings.get("dataset_train_split", "train"),
            test_split=self.settings.get("dataset_test_split", "test"),
        )

    def note_data(self, mixture: str = "") -> None:
        """Adds a note if ``data`` is None; ``mixture`` is the note for a mixture."""
        note = mixture if self.job.names_data else "data: the plan was made without any, and training needs some"
        if note and self.data is None:
            self.notes.append(note)

    @property
    def length(self) -> int:
        """Returns the tokens that a row is cut to; without a limit, those of the longest row."""
        if self.job.is_online:
            return (self.plan.prompt_length or NO_LIMIT_TOKENS) + self.knobs.completion_length
        longest = NO_LIMIT_TOKENS if self.plan.data is None else self.plan.data.longest
        return self.job.row_limit(self.knobs) or longest

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables to set before the training process starts: the job's and the allocator's."""
        given = dict(self.job.environment)
        if not self.knobs.expandable_segments:
            return given
        variable = variable_that_counts(given)
        settings = [text for text in given.get(variable, "").split(",") if text]
        if "expandable_segments:True" not in settings:
            settings.append("expandable_segments:True")
        return {**given, variable: ",".join(settings)}


def draft_of(plan: Plan, job: Job) -> Draft:
    """Returns an empty draft without the user's secrets, but with their names."""
    public = as_recorded(job)
    hidden = (*(job.arguments.keys() - public.arguments.keys()), *(job.environment.keys() - public.environment.keys()))
    return Draft(plan=plan, job=public, hidden=tuple(sorted(hidden)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """Describes a tool for the comments at the head of its file."""

    name: str
    """As its authors write it: ``LLaMA-Factory``."""
    command: str
    """The command that runs the file: ``axolotl train FILE``."""
    trains_with_trl: bool
    """Whether the tool trains with TRL, so that the predicted peak applies to it unchanged."""
    notes_head: str = ""
    """The heading of the notes; empty for one about what the tool cannot express."""


def document(draft: Draft, tool: Tool, environment: Mapping[str, str]) -> str:
    """Returns the file: comments, then YAML. In the comments, the variables of ``environment`` precede the command."""
    import yaml

    comments = heading(draft, tool, environment)

    class Dumper(yaml.SafeDumper):
        """Writes strings so that every YAML reader reads them as strings, and keeps their line breaks."""

    def represent(dumper: Any, text: str) -> Any:
        style = "|" if text.endswith("\n") and printable(text) == text else None
        style = "'" if _NUMBER.fullmatch(text) else style
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def dump(*, allow_unicode: bool) -> str:
        return str(yaml.dump(draft.keys, Dumper=Dumper, sort_keys=False, allow_unicode=allow_unicode, width=10_000))

    Dumper.add_representer(str, represent)
    text = dump(allow_unicode=True)  # YAML can escape such characters as change the writing direction
    return comments + (text if printable(text) == text else dump(allow_unicode=False))


_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?")
"""Matches what YAML 1.2 reads as a number. It includes ``2e-05``, which YAML 1.1, and so PyYAML, reads as text."""


def heading(draft: Draft, tool: Tool, environment: Mapping[str, str]) -> str:
    """Returns the comments at the head of the file; the last ones name every setting that no key expresses."""
    plan, estimate = draft.plan, draft.plan.estimate
    topology, name = estimate.hardware.topology, estimate.hardware.name
    machines = f" on each of {topology.nodes} machines" if topology.nodes > 1 else ""
    cards = f"one {name}" if topology.processes == 1 else f"{topology.devices} x {name}{machines}"
    sizes = format_bytes(estimate.required_bytes), format_bytes(estimate.budget_bytes)
    needs = f"{' of a budget of '.join(sizes)}{estimate.segments}"
    each = " on each" if topology.processes > 1 else ""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    lost = {name: value for name, value in draft.settings.items() if name not in draft.answered}
    texts = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in lost.items()}
    notes = [
        *draft.notes,
        *(f"{name} {text}: {tool.name} has no key for it here" for name, text in texts.items()),
        *(f"{name}: perhaps a secret, which is not written here: set it where you train" for name in draft.hidden),
    ]
    lines = [
        f"Made by autofit for {tool.name}: {plan.method} of {plan.model}.",
        f"Planned for {cards}, level of harm: {plan.level}.",
        f"Predicted peak: {needs}{each}{'' if tool.trains_with_trl else ', with TRL as the trainer'}.",
        f"Run: {' '.join([*variables, tool.command])}",
    ]
    if notes:
        lines.append(tool.notes_head or f"What {tool.name} cannot express of this plan, or does differently:")
    return "".join(f"# {one_line(line)}\n" for line in [*lines, *(f"- {note}" for note in notes)])


def note_host_optimizer(draft: Draft, instead: str) -> None:
    """Adds a note that only autofit keeps optimizer state on the host."""
    if draft.knobs.optimizer_offload:
        why = "optimizer_offload true: only autofit keeps optimizer state and step on the host, and without this"
        draft.notes.append(f"{why} the run needs more than is predicted; {instead}")


def note_variables(draft: Draft) -> None:
    """Adds notes that the file has no keys for the allocator's setting and the job's own variables."""
    if draft.knobs.expandable_segments:
        draft.notes.append("expandable_segments true: a variable of the process, which the command above sets")
    if draft.job.environment:
        names = " ".join(draft.job.environment)
        draft.notes.append(f"env {names}: variables of the process, which the command above sets")


def note_other_trainer(draft: Draft, tool: str, *, batch: str, offload: str) -> None:
    """Adds the notes that every tool with a trainer of its own needs. ``batch`` is its key for the micro-batch, and
    ``offload`` the nearest thing to optimizer state on the host.

    TRL makes logits in chunks (``trl/trainer/sft_trainer.py``, loss_type None or chunked_nll), and the tools do not.
    """
    note_host_optimizer(draft, offload)
    note_variables(draft)
    has_chunks = draft.method_facts.has_chunked_loss and draft.settings.get("loss_type") != "nll"
    if not has_chunks or draft.settings.get("use_liger_kernel"):
        return
    why = f"the loss: TRL makes logits for some tokens at a time, {tool} for all of a micro-batch at once, which takes"
    rows = draft.knobs.per_device_train_batch_size
    tokens = "longest row" if draft.length == NO_LIMIT_TOKENS else draft.length
    draft.notes.append(
        f"{why} at least {rows} x {tokens} x vocabulary x 4 bytes more: lower {batch} if it runs out of memory"
    )


def note_no_limit(draft: Draft, key: str) -> None:
    """Adds a note that the tool cannot express that rows have no length limit."""
    if not draft.job.is_online and draft.job.row_limit(draft.knobs) is None:
        draft.notes.append(f"max_length none: {key} takes a number only; this number admits the longest row")
