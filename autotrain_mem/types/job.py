"""Defines the job that the user requested. Its ``max_length`` is a number of tokens or a word such as ``auto``."""

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
    """Refers to a file that holds a script's call of a trainer, for the rehearsal (``trainers.script_call``)."""

    path: str
    holds_model: bool
    """Whether the script passes a model object, whose structure is rehearsed; otherwise it passes a model's name."""
    holds_rows: bool
    """Whether the script passes training rows that can be counted; a stream cannot."""
    digest: str
    """A digest of all that a rehearsal depends on. If it is empty (the user's own code or model), nothing is cached."""
    identity: str = ""
    """A digest of these objects, the rows and the tokenizer. If it is empty, they are read again for each plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Holds one training job as the user stated it.

    >>> from autotrain_mem import Job
    >>> job = Job(method="sft", model="Qwen/Qwen2.5-0.5B", dataset=None, arguments={"max_length": 512})
    >>> job.pins_length, job.row_tokens
    (True, 512)

    ``arguments`` holds only the arguments that the user gave, under TRL's names. A plan changes none of them.
    """

    json_form: ClassVar = Form(
        optional=(
            *("python_call", "unrecorded", "accelerate", "within_seconds"),
            *("budget", "tokens", "images", "answer_length", "evaluated_length"),
        )
    )

    method: str
    """The training method: a key of ``methods_table.METHODS``."""
    model: str
    """The model's hub id or folder. A rehearsal needs only its config.json; training also needs the weights."""
    dataset: str | None
    """A hub id, a folder, or a .json, .jsonl, .parquet or .csv file. None: the dataset that ``arguments`` name. If they
    name none, a plan uses the dataset of TRL's example, and training is not possible."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """The ``env:`` mapping of a YAML config, which is set in the processes that load the model."""
    unrecorded: tuple[str, ...] | None = None
    """The variables that a plan's file leaves out of ``environment``, as they may be secret; None if there are none."""
    effective_batch_size: int | None = None
    """The rows per optimizer step, if given as one number instead of TRL's batch size and accumulation."""
    prompt_length: int | None = None
    """Online methods: the longest prompt to plan for without reading data, in tokens. In a rehearsal of GKD, which
    generates answers to its rows' prompts: the longest prompt of the data, in tokens."""
    answer_length: int | None = None
    """In a rehearsal of GKD: the longest answer of the data, in tokens. The user cannot set it."""
    evaluated_length: int | None = None
    """In a rehearsal: the longest row to evaluate, in tokens; None: as long as in training. The user cannot set it."""
    fit: Fit = "all"
    forbid: frozenset[str] = frozenset()
    """The names of levers that a plan must not use (see ``search.levels``)."""
    max_slowdown: float = MAX_SLOWDOWN
    """If a plan takes this many times as long per token as the next level's best plan, the next level is chosen."""
    within_seconds: float | None = None
    """The longest predicted duration of the whole training, in seconds; None for no limit."""
    budget: float | None = None
    """The highest cost of the whole training, in the currency of the prices; None for no limit."""
    tokens: int | None = None
    """The tokens to train on in all, to predict time and cost; None for those of the data or of ``max_steps``."""
    accelerate: Mapping[str, Any] | None = None
    """The keys of the user's config for ``accelerate launch``, which fixes processes, machines and sharding."""
    images: tuple[str, ...] = ()
    """The image sizes of each rehearsed row, ``"1024x768"`` (width x height): given, or from the data's worst row."""
    python_call: PythonCall | None = None
    """The file with a script's call of the trainer; None for a job in flags. It exists only while the script plans, and
    a plan's file never refers to it."""

    @property
    def names_data(self) -> bool:
        """Returns whether the job states its training data, by name or as objects of a script."""
        is_named = bool(self.dataset or self.arguments.get("dataset_name") or self.arguments.get("datasets"))
        return is_named or self.python_call is not None

    @property
    def pins_length(self) -> bool:
        """Returns whether ``max_length`` (for prompts ``prompt_length``) fixes the rows' length without the data."""
        if self.is_online:
            return self.prompt_length is not None
        return self.arguments.get(MAX_LENGTH, AUTO) == MOST or not is_maximized(self.arguments.get(MAX_LENGTH, AUTO))

    @property
    def streams(self) -> bool:
        """Returns whether the rows come from a stream, so that neither their number nor their lengths are known."""
        if self.python_call is not None:
            return not self.python_call.holds_rows
        return bool(self.arguments.get("dataset_streaming") or self.arguments.get("streaming"))

    @property
    def row_tokens(self) -> int | None:
        """Returns the tokens of the longest row or prompt if the job gives a number; else None."""
        if not self.pins_length or self.arguments.get(MAX_LENGTH) == MOST:
            return None
        return self.prompt_length if self.is_online else self.arguments[MAX_LENGTH]

    def row_limit(self, knobs: Knobs) -> int | None:
        """Returns the tokens to which rows are cut; None without a limit, and for prompts, which are never cut."""
        return None if self.is_online else knobs.max_length

    @property
    def maximized(self) -> str | None:
        """Returns the name of the argument with the value ``max``; None if there is none."""
        return next((name for name in MAXIMIZED if self.arguments.get(name) == MOST), None)

    @property
    def trl_arguments(self) -> dict[str, Any]:
        """Returns the given arguments that TRL's configs have, except the model's name."""
        others = {*NOT_TRLS, "model_name_or_path"}
        return {name: value for name, value in without_said(self.arguments).items() if name not in others}

    def bounds_time(self, *, is_counted: bool) -> bool:
        """Returns whether the predicted time of the training is the most: rows, if their tokens are not counted, or
        completions may be shorter than the longest."""
        return self.tokens is None and (self.is_online or not is_counted)

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
