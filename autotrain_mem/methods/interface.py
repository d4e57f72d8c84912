"""Defines what the module of a training method must or can provide, and loads such a module."""

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast

from autotrain_mem.methods.configs import LORA_TASK, Configs, build, experimental_parser, fill, script_parser
from autotrain_mem.methods.image_rows import RowImages, Texts
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.worst_case_text import EditRows
from autotrain_mem.settings.words import EPOCHS
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import METHODS, DataProfile, Finding, Job, Knobs, MethodFacts


class Basis(StrEnum):
    """Names what a loss is averaged over. The guard uses it to combine the losses of a micro-batch's parts."""

    WHOLE = "whole"
    """A sum divided by a count over all micro-batches, so that the losses of parts are added without weights."""
    UNITS = "units"
    """A mean over rows or pairs."""
    TOKENS = "tokens"
    """A mean over the tokens that count for the loss."""
    CHOSEN_TOKENS = "chosen tokens"
    """A mean over the tokens of the chosen completions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AxolotlFacts:
    """Holds the keys that select a method in Axolotl's YAML (``exports.axolotl`` names the Axolotl version)."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """The keys that choose the trainer (``core/builders/causal.py`` and ``rl.py: _get_trainer_cls``)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> Axolotl's key."""
    row_type: str | None = None
    """The ``type`` of conversational rows (``prompt_strategies``); None if Axolotl reads them as TRL does."""
    notes: tuple[str, ...]
    """Notes on the rows that the file can read, and on what Axolotl does with other rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFactoryFacts:
    """Holds the keys that select a method in LLaMA-Factory's YAML (``exports.llamafactory``)."""

    stage: str
    """The value of ``finetuning_args.py: FinetuningArguments.stage``."""
    entry: Mapping[str, Any]
    """The dataset's entry in ``data/dataset_info.json`` (``data/README.md``, ``data/parser.py: DatasetAttr``)."""
    rows: str
    """A description of the rows that the entry can read."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The keys that have the same value in every job."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> LLaMA-Factory's key. It is written if the job or ``MethodFacts.defaults`` has a value."""
    losses: tuple[str | None, ...] = ()
    """The values of TRL's ``loss_type`` with the same meaning in LLaMA-Factory; None is TRL's default."""
    loss_key: str | None = None
    """The key that names the loss; None if it cannot be chosen."""
    length_notes: tuple[str, ...] = ()
    """Notes on what LLaMA-Factory does differently with long rows."""
    notes: tuple[str, ...] = ()
    """Notes on what else LLaMA-Factory does differently from TRL."""


class Method(Protocol):
    """Defines the names that a method's module has, in this order. A name with a default can be left out."""

    facts: MethodFacts
    """The method's facts from ``METHODS``. The module does not define them."""
    takes_model_name: bool = True
    """Whether the trainer can load a model by its name; otherwise it takes only model objects."""
    takes_transformers_arguments: bool = False
    """Whether the trainer also accepts transformers' TrainingArguments as its config."""
    is_evaluated: bool = True
    """Whether the trainer evaluates if its config sets an evaluation strategy."""
    samples_each_micro_step: bool = False
    """Whether each micro-step samples its own completions. Other online methods sample for whole optimizer steps."""
    learns_tokens: bool = False
    """Whether every token of an answer is a label; otherwise a whole row teaches about one bit."""
    adapter_rate: tuple[float, str] | None = None
    """The learning rate of a LoRA adapter under Adam, and its source; None if ``search.adapter`` derives them."""
    joins_sides: bool = False
    """Whether a batch holds first all chosen sequences, then all rejected ones."""
    liger_since: str | None = ""
    """The oldest TRL whose Liger loss can be rehearsed; empty if the model computes the loss; None if there is none."""
    axolotl: AxolotlFacts | None = None
    """The facts for an Axolotl file; None if no such file can be written."""
    llamafactory: LlamaFactoryFacts | None = None
    """The facts for a LLaMA-Factory file; None if no such file can be written."""

    def missing(self, given: Callable[[str], object], *, to_train: bool) -> UsageError | None:
        """Returns the error for a job without a needed teacher or reward; None if all is given. A plan needs no reward.
        ``given``: returns the value of a TRL argument, or None if the argument is not given. ``to_train``: whether the
        job trains, and is not only planned."""
        teacher, judge = self.facts.teacher_argument, self.facts.reward_model_argument
        if teacher and not given(teacher):
            return UsageError(
                "No teacher is given, which the student learns from.",
                hint=f"Give --{teacher} MODEL, a larger model with the student's vocabulary.",
            )
        if judge and to_train and not given(judge) and not given("reward_funcs"):
            return UsageError(
                "No reward is given, and training needs scores for its completions.",
                hint="Give --reward_funcs module.function (or one of TRL's own, such as think_format_reward), or "
                f"--{judge} MODEL.",
            )
        return None

    def least_rows(self, arguments: Mapping[str, Any]) -> int:
        """Returns the minimum number of rows in a micro-batch."""
        return 1

    def mini_batches(self, arguments: Mapping[str, Any]) -> int | None:
        """Returns the number of mini-batches in an effective batch; None if the method has no mini-batches."""
        return None

    def judge_of_text(self, arguments: Mapping[str, Any]) -> Any:
        """Returns the name of a reward model that reads text with its own tokenizer; None without one."""
        return arguments.get(self.facts.reward_model_argument or "")

    def models_in_step(self, model: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the models that are rehearsed with equally many layers: those from which trained models start."""
        return (model,)

    def not_counted(self, job: Job, knobs: Knobs) -> Iterable[str]:
        """Yields descriptions of memory that a run of this method needs but an estimate does not include."""
        return ()

    def make_parser(self) -> Any:
        """Returns TRL's own parser, so that every flag and YAML key that it accepts is accepted."""
        name = self.facts.name
        if not self.facts.is_experimental:
            return script_parser(name)
        return experimental_parser(
            name, getattr(importlib.import_module(f"trl.experimental.{name}"), f"{self.facts.title}Config")
        )

    def configs(self, arguments: Mapping[str, Any]) -> Configs:
        """Fills TRL's dataclasses. For a model with a score head, LoRA's task type is SEQ_CLS unless given: TRL's
        default CAUSAL_LM would leave the new head frozen (trl/trainer/model_config.py: lora_task_type)."""
        return fill(self.make_parser, {**(LORA_TASK if self.facts.has_score_head else {}), **arguments})

    def rehearsal_changes(self, arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
        """Returns the arguments of a rehearsal that differ from ``rehearsal.rehearse: rehearsal_arguments``."""
        return {}

    def build_trainer(
        self, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
    ) -> Any:
        """Builds the installed trainer as TRL's own script does. ``stub``: the rehearsal's tokenizer; None in a real
        run."""
        return build(self.facts.trainer, filled, model, train_dataset, eval_dataset, stub)

    def without_precomputing(self) -> AbstractContextManager[Any]:
        """Within the block, a trainer skips passes over all data before training, such as a reference's scoring. For
        a rehearsal of two steps they would take too long, and they need less memory than training."""
        return nullcontext()

    def worst_rows(self, filled: Configs, length: int, rows: int) -> Any:
        """Makes a dataset of ``rows`` rows of ``length`` tokens each. In online methods a row is a prompt."""

    def rows_editor(self, filled: Configs) -> EditRows:
        """Returns a function that turns the rows that the sampler drew into the worst micro-batch."""

    def worst_image_rows(self, filled: Configs, length: int, rows: int, images: RowImages) -> Any:
        """Makes :meth:`worst_rows` with images. ``length`` includes the tokens of the images."""

    def image_rows_editor(self, filled: Configs) -> EditRows:
        """Returns the :meth:`rows_editor` for rows with images."""

    def training_patches(self, trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
        """Within the block, applies the patches that a rehearsal of this trainer needs while it trains."""
        return nullcontext()

    def ways_of_step(self, trainer: Any) -> Iterable[AbstractContextManager[None]]:
        """Returns a context manager for each random variant of a training step, which forces that variant."""
        return (nullcontext(),)

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Returns how many passes train on the sampled completions. A rehearsal makes one."""
        return 1

    def optimizer_steps(self, rows: int, epochs: float, knobs: Knobs, arguments: Mapping[str, Any]) -> int:
        """Counts the optimizer steps of a training without ``max_steps``, as transformers does (``trainer.py:
        set_initial_training_values``). ``rows``: those that the trainer keeps, or the packed blocks."""
        return math.ceil(epochs * max(1, math.ceil(rows / knobs.effective_batch_size)))

    def micro_steps_per_generation(self, filled: Configs, knobs: Knobs) -> int:
        """Returns how many micro-steps train on the completions of one generation; 0 if nothing is generated."""
        return 0

    def unprepared_lengths(self, trainer: Any, rows: list[Any]) -> list[int] | None:
        """Counts the most tokens that each row can have in a step; None unless the collator tokenizes conversations."""
        return None

    def row_lengths(
        self, filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
    ) -> RowLengths:
        """Counts the tokens of every row after the trainer's own formatting, without truncation. ``formatting``: a
        script's formatting function. Only SFT is called with it."""

    def image_texts(self, filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
        """Formats one of the user's rows, which has this number of images, as the trainer does."""

    def check(self, filled: Configs) -> None:
        """Raises UsageError for arguments that the trainer would reject later or silently ignore."""

    def tokenizer_findings(self, filled: Configs, tokenizer: Any) -> Iterable[Finding]:
        """Returns the problems of the tokenizer that matter only to this trainer."""
        return ()

    def why_not_split(self, trainer: Any) -> str | None:
        """Returns why splitting a micro-batch would change its gradient; None if a weighted sum of losses preserves it.

        Source, also of the next two methods: ``trl/trainer/*_trainer.py: compute_loss, _compute_loss``, TRL 1.12, 1.16.
        """
        return None

    def loss_basis(self, trainer: Any, *, is_counted: bool) -> Basis:
        """Returns what the loss of a micro-batch is averaged over. ``is_counted``: whether each loss is divided by the
        token count of all micro-batches, which transformers passes."""
        return Basis.UNITS

    def is_models_loss(self, trainer: Any) -> bool:
        """Returns whether the model's own forward computes the loss. The guard then finds the basis by experiment."""
        return False


@functools.cache
def method_of(name: str) -> Method:
    """Returns the module of a method in ``METHODS``. Names that it lacks come from its ``base`` module, if it has
    one, and then from :class:`Method`."""
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; the methods are {', '.join(METHODS)}")
    module = importlib.import_module(f"autotrain_mem.methods.{name}")
    names = vars(getattr(module, "base", module)) | vars(module)
    own = {each: names[each] for each in vars(Method).keys() & names.keys() if each[0] != "_"}
    bound = {each: staticmethod(value) if callable(value) else value for each, value in own.items()}
    return cast(Method, type(name, (Method,), {**bound, "facts": METHODS[name]})())


def method_of_trainer(trainer: Any) -> Method | None:
    """Returns the method to whose TRL trainer class this trainer belongs; None for other trainers."""
    names = {row.trainer: name for name, row in METHODS.items()}
    found = (names[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in names)
    return None if (name := next(found, None)) is None else method_of(name)


def steps_of(job: Job, knobs: Knobs, profile: DataProfile | None, rows: int | None = None) -> int | None:
    """Returns the optimizer steps of the whole training; None if neither ``max_steps`` nor the data determine them.
    ``rows``: their number if tokens were not counted; it gives the most, as none is dropped or packed with others."""
    if isinstance(asked := job.arguments.get("max_steps", -1), int) and asked > 0:
        return asked
    if profile is not None:
        limit = job.row_limit(knobs)
        rows = profile.rows - (profile.truncated_rows(limit) if profile.drops else 0)
        if not knobs.pads_rows and limit:
            rows = math.ceil(profile.kept_tokens(None) / limit)
    epochs = float(job.arguments.get("num_train_epochs", EPOCHS))
    return None if rows is None else method_of(job.method).optimizer_steps(rows, epochs, knobs, job.arguments)
