"""Defines the job that the user requested. Its ``max_length`` is a number of tokens, or a word such as ``auto``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from autotrain_mem.settings.adapter_config import without_said
from autotrain_mem.settings.knobs import NOT_TRLS, Knobs
from autotrain_mem.settings.words import AUTO, MAX_LENGTH, MAX_SLOWDOWN, MAXIMIZED, MOST, Fit, is_maximized
from autotrain_mem.support.codec import Form
from autotrain_mem.types.methods_table import METHODS, MethodFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonCall:
    """Refers to a file with a script's call of a trainer, which is rehearsed (``trainers.script_call``)."""

    path: str
    holds_model: bool
    """Whether the model is an object whose structure is rehearsed; otherwise it is loaded by name."""
    holds_rows: bool
    """Whether the training data can be counted; a stream cannot."""
    digest: str
    """A digest of all that a rehearsal depends on. Empty (the user's own code or model): nothing is cached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Holds one training job as the user stated it.

    >>> from autotrain_mem import Job
    >>> job = Job(method="sft", model="Qwen/Qwen2.5-0.5B", dataset=None, arguments={"max_length": 512})
    >>> job.pins_length, job.row_tokens
    (True, 512)

    ``arguments`` holds exactly what the user gave, under TRL's names, and nothing else: every one of them is pinned.
    """

    json_form: ClassVar = Form(
        optional=("python_call", "unrecorded", "accelerate", "within_seconds", "budget", "images", "answer_length")
    )

    method: str
    """The TRL trainer: one of ``methods_table.METHODS``."""
    model: str
    """A hub id or a folder. A rehearsal needs only its config.json; training needs the weights."""
    dataset: str | None
    """A hub id, a folder, or a .json, .jsonl, .parquet or .csv file. None: the dataset that ``arguments`` name. If they
    name none, a plan uses the rows of TRL's example, and training is not possible."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """The ``env:`` mapping of a YAML config, for the processes that load the model."""
    unrecorded: tuple[str, ...] | None = None
    """Variables that a file's ``environment`` leaves out, since their values may be secrets; None for none."""
    effective_batch_size: int | None = None
    """Rows per optimizer step, if given as one number instead of TRL's two."""
    prompt_length: int | None = None
    """Tokens of the longest prompt to plan for without reading data; online methods only. In a GKD rehearsal, which
    answers the prompts of its rows, tokens of the data's longest prompt."""
    answer_length: int | None = None
    """Tokens of the longest answer in such rows, in a rehearsal; not set by the user."""
    fit: Fit = "all"
    forbid: frozenset[str] = frozenset()
    """Names of levers that may not be pulled (see ``search.levels``)."""
    max_slowdown: float = MAX_SLOWDOWN
    """A plan this many times slower per token than the next level's best is shown, and the next level taken."""
    within_seconds: float | None = None
    """The longest duration of the whole run; None for no limit."""
    budget: float | None = None
    """The highest cost of the whole run, in the currency of the prices; None for no limit."""
    accelerate: Mapping[str, Any] | None = None
    """The keys of the user's own file for ``accelerate launch``, which pins how processes are launched."""
    images: tuple[str, ...] = ()
    """Image sizes of each rehearsed row, ``"1024x768"`` (width x height): of the data's worst row, or given."""
    python_call: PythonCall | None = None
    """What a Python script passed to the trainer besides its config; None for a job in flags. It exists only while the
    script plans, and is never written to our files."""

    @property
    def names_data(self) -> bool:
        """Returns whether the job names its training data."""
        is_named = bool(self.dataset or self.arguments.get("dataset_name") or self.arguments.get("datasets"))
        return is_named or self.python_call is not None

    @property
    def pins_length(self) -> bool:
        """Returns whether row lengths are known without the data, from ``max_length`` or the longest prompt."""
        if self.is_online:
            return self.prompt_length is not None
        return self.arguments.get(MAX_LENGTH, AUTO) == MOST or not is_maximized(self.arguments.get(MAX_LENGTH, AUTO))

    @property
    def row_tokens(self) -> int | None:
        """Returns the tokens of the longest row or prompt, if the job gives a number."""
        if not self.pins_length or self.arguments.get(MAX_LENGTH) == MOST:
            return None
        return self.prompt_length if self.is_online else self.arguments[MAX_LENGTH]

    def row_limit(self, knobs: Knobs) -> int | None:
        """Returns the tokens to which rows are cut; None for no limit, and for prompts, which are never cut."""
        return None if self.is_online else knobs.max_length

    @property
    def maximized(self) -> str | None:
        """Returns the argument whose value is ``max``; None if there is none."""
        return next((name for name in MAXIMIZED if self.arguments.get(name) == MOST), None)

    @property
    def trl_arguments(self) -> dict[str, Any]:
        """Returns the arguments given under TRL's names, without the model's name."""
        others = {*NOT_TRLS, "model_name_or_path"}
        return {name: value for name, value in without_said(self.arguments).items() if name not in others}

    @property
    def method_facts(self) -> MethodFacts:
        return METHODS[self.method]

    @property
    def is_online(self) -> bool:
        """Returns whether completions are sampled during training, so that the data are prompts."""
        return self.method_facts.is_online

    @property
    def is_evaluated(self) -> bool:
        """Returns whether the trainer evaluates during training or before its first step."""
        strategy = str(self.arguments.get("eval_strategy", "no"))
        return strategy not in ("no", "IntervalStrategy.NO") or bool(self.arguments.get("eval_on_start"))
