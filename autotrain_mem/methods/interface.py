"""Names what every method's module offers, has what holds where it leaves something out, and finds the module."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast

from autotrain_mem.methods.configs import LORA_TASK, Configs, build, experimental_parser, fill, script_parser
from autotrain_mem.methods.image_rows import RowImages, Texts
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.worst_case_text import EditRows
from autotrain_mem.support.errors import UsageError
from autotrain_mem.types import Job, Knobs
from autotrain_mem.types.findings import Finding
from autotrain_mem.types.methods_table import METHODS, MethodFacts


class Basis(StrEnum):
    """Names what a loss is a mean over: by it the guard adds up a micro-batch's parts."""

    WHOLE = "whole"
    """A mean with the divisor of all micro-batches together: the parts' losses add up as they are."""
    UNITS = "units"
    """Rows, or pairs."""
    TOKENS = "tokens"
    """A mean over the tokens that count for the loss."""
    CHOSEN_TOKENS = "chosen tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class AxolotlFacts:
    """Holds the keys by which Axolotl's YAML asks for a method (``exports.axolotl`` says which version was read)."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """The keys that choose the trainer (``core/builders/causal.py`` and ``rl.py: _get_trainer_cls``)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> Axolotl's key."""
    row_type: str | None = None
    """The ``type`` of rows that are conversations (``prompt_strategies``); None: they are taken as TRL takes them."""
    notes: tuple[str, ...]
    """For which rows the file is written, and what becomes of other ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFactoryFacts:
    """Holds the keys by which LLaMA-Factory's YAML asks for a method (``exports.llamafactory`` says which version was
    read)."""

    stage: str
    """``finetuning_args.py: FinetuningArguments.stage``."""
    entry: Mapping[str, Any]
    """The part of an entry of ``data/dataset_info.json`` about the columns (``data/README.md``, ``data/parser.py:
    DatasetAttr``)."""
    rows: str
    """The rows that the entry is for."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one value for every job."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> LLaMA-Factory's key; written where the job or ``MethodFacts.defaults`` has a value."""
    losses: tuple[str | None, ...] = ()
    """Values of TRL's ``loss_type`` that mean the same there; None is TRL's default."""
    loss_key: str | None = None
    """Where the loss is named; None where it cannot be chosen."""
    length_notes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is done otherwise than in TRL."""


class Method(Protocol):
    """The protocol of a method's module: these names in this order; a module may leave out those with a default."""

    facts: MethodFacts
    """The method's row in the table; no name of its module."""

    # -- asked in any process, before a plan ---------------------------------------------------------------------------

    takes_model_name: bool = True
    """Whether the trainer loads the model by name, in the plan's dtype and by TRL's own rules; else the caller passes
    model objects."""

    takes_transformers_arguments: bool = False
    """The trainer also takes transformers' TrainingArguments as its config."""

    is_evaluated: bool = True
    """The trainer evaluates where it is asked to."""

    samples_each_micro_step: bool = False
    """Completions are sampled for one micro-batch, inside its own step; otherwise, in online methods, for all of an
    optimizer step at once, or for several."""

    learns_tokens: bool = False
    """Whether the loss is about every token of an answer, which holds about a bit each; else a row holds about one."""

    joins_sides: bool = False
    """A batch holds all chosen sequences, then all rejected ones, as a tensor's first dimension."""

    liger_since: str | None = ""
    """The oldest TRL whose Liger loss for this method can be rehearsed; empty where the loss is the model's own, None
    where none can."""

    lighter_methods: Mapping[str, str] = {}
    """Methods that learn from the same rewards with fewer models -> which ones they do without."""

    axolotl: AxolotlFacts | None = None
    """None where no file for Axolotl is written."""

    llamafactory: LlamaFactoryFacts | None = None
    """None where no file for LLaMA-Factory is written."""

    def missing(self, given: Callable[[str], object], *, to_train: bool) -> UsageError | None:
        """Makes the error of a job that lacks another model, or a reward, without which it cannot be.

        Args:
            given: Finds what an argument of TRL's is; None where it is not given.
            to_train: The job is to be trained; a plan can do without some.
        """
        return None

    def least_rows(self, arguments: Mapping[str, Any]) -> int:
        """Returns how many rows a micro-batch has at least."""
        return 1

    def mini_batches(self, arguments: Mapping[str, Any]) -> int | None:
        """Returns in how many whole mini-batches an effective batch is trained on; None where there are no such."""
        return None

    def why_not_sharded(self, sharding: str) -> tuple[str, str] | None:
        """Returns why the trainer's models cannot be divided in this way, and what to do instead."""
        return None

    def judge_of_text(self, arguments: Mapping[str, Any]) -> Any:
        """Names the reward model that is handed text, and so needs a tokenizer of its own; None where none is given."""
        return arguments.get(self.facts.reward_model_argument or "")

    def models_in_step(self, model: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Names the models that are rehearsed with as many layers as each other: the one that is trained, and those
        from which others that are trained with it start."""
        return (model,)

    def not_counted(self, job: Job, knobs: Knobs) -> Iterable[str]:
        """Returns what this method adds to a run and an estimate leaves out, in sentences."""
        return ()

    # -- asked where TRL is --------------------------------------------------------------------------------------------

    def make_parser(self) -> Any:
        """Makes TRL's own parser: every flag and YAML key that it takes, we take."""
        name = self.facts.name
        return (
            experimental_parser(name, f"{self.facts.title}Config")
            if self.facts.is_experimental
            else script_parser(name)
        )

    def configs(self, arguments: Mapping[str, Any]) -> Configs:
        """Fills TRL's dataclasses; LoRA's task is SEQ_CLS for a head of one score, unless given.

        PEFT then trains the new head with the adapter, which TRL's own default (CAUSAL_LM) would leave frozen as it was
        drawn (trl/trainer/model_config.py: lora_task_type).
        """
        return fill(self.make_parser, {**(LORA_TASK if self.facts.has_score_head else {}), **arguments})

    def rehearsal_changes(self, arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
        """Lists what a rehearsal of this trainer needs otherwise than ``rehearse.rehearsal_arguments`` has it."""
        return {}

    def build_trainer(
        self, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
    ) -> Any:
        """Builds the installed trainer as TRL's own script does; the model is loaded by TRL from its path.

        Args:
            stub: The tokenizer of a rehearsal; None in a real run, which takes the model's own.
        """
        return build(self.facts.trainer, filled, model, train_dataset, eval_dataset, stub)

    def without_precomputing(self) -> AbstractContextManager[Any]:
        """Keeps a trainer from a pass over all the data before it trains, such as a reference's that scores them.

        For two steps that would take too long, and it is a forward alone: less than training.
        """
        return nullcontext()

    def worst_rows(self, filled: Configs, length: int, rows: int) -> Any:
        """Makes a dataset of ``rows`` rows, each of which fills ``length`` tokens (of the prompt, in online
        methods)."""

    def rows_editor(self, filled: Configs) -> EditRows:
        """Returns what makes the worst micro-batch of the rows that the sampler drew."""

    def worst_image_rows(self, filled: Configs, length: int, rows: int, images: RowImages) -> Any:
        """Makes the same of rows with images, of which ``length`` tokens hold those of the images too."""

    def image_rows_editor(self, filled: Configs) -> EditRows:
        """Returns what :meth:`rows_editor` does, for rows with images."""

    def training_patches(self, trainer: Any, filled: Configs, knobs: Knobs) -> AbstractContextManager[None]:
        """Arrange what a rehearsal of this trainer needs while it trains."""
        return nullcontext()

    def ways_of_step(self, trainer: Any) -> Iterable[AbstractContextManager[None]]:
        """Lists the ways that chance may choose for a training step, each as what makes it go so inside."""
        return (nullcontext(),)

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Returns the number of passes over what was sampled; a rehearsal makes one."""
        return 1

    def micro_steps_per_generation(self, filled: Configs, knobs: Knobs) -> int:
        """Returns how many micro-steps of one pass train on what an optimizer step of a rehearsal generates; 0: on
        nothing that was generated."""
        return 0

    def unprepared_lengths(self, trainer: Any, rows: list[Any]) -> list[int] | None:
        """Counts the tokens that a step makes of each row, at most, where rows stay conversations until the collator
        makes a batch of them, which cuts their beginning; None where the trainer prepares rows before."""
        return None

    def row_lengths(
        self, filled: Configs, split: Any, tokenizer: Any, formatting: Callable[[Any], str] | None = None
    ) -> RowLengths:
        """Counts tokens of every row after the trainer's own formatting, untruncated.

        Args:
            formatting: A script's own function, which SFT's trainer takes; the others are not called with one.
        """

    def image_texts(self, filled: Configs, row: Mapping[str, Any], images: int, processor: Any) -> Texts:
        """Formats a row of the user's own, with so many images, as the trainer does."""

    def check(self, filled: Configs, *, to_train: bool) -> None:
        """Refuses what the trainer would refuse later, or silently ignore. Raises UsageError."""

    def tokenizer_findings(self, filled: Configs, tokenizer: Any) -> Iterable[Finding]:
        """Finds what is wrong with the tokenizer for this trainer alone."""
        return ()

    def why_not_split(self, trainer: Any) -> str | None:
        """Returns why a micro-batch cannot be split without another gradient; None where its loss is a weighted sum of
        those of its parts.

        Read from TRL 1.12 and 1.16, as are the two below: ``trl/trainer/*_trainer.py: compute_loss, _compute_loss``.
        """
        return None

    def loss_basis(self, trainer: Any, *, is_counted: bool) -> Basis:
        """Names what the loss of a micro-batch is a mean over: rows, or pairs.

        Args:
            is_counted: transformers counted the tokens of all micro-batches, and each one's loss is divided by that.
        """
        return Basis.UNITS

    def is_models_loss(self, trainer: Any) -> bool:
        """Returns whether the loss is what the model's own forward returns: what it is a mean over must be tried
        then."""
        return False


@functools.cache
def method_of(name: str) -> Method:
    """Finds the module of a method in ``METHODS``; what it leaves out is :class:`Method`'s own."""
    if name not in METHODS:
        raise ValueError(f"no method {name!r}; there are {', '.join(METHODS)}")
    module = vars(importlib.import_module(f"autotrain_mem.methods.{name}"))
    own = {each: module[each] for each in vars(Method).keys() & module.keys() if each[0] != "_"}
    bound = {each: staticmethod(value) if callable(value) else value for each, value in own.items()}
    return cast(Method, type(name, (Method,), {**bound, "facts": METHODS[name]})())


def method_of_trainer(trainer: Any) -> Method | None:
    """Finds the method whose TRL trainer this is, or derives from; None for others."""
    names = {row.trainer: name for name, row in METHODS.items()}
    found = (names[kind.__name__] for kind in type(trainer).__mro__ if kind.__name__ in names)
    name = next(found, None)
    return None if name is None else method_of(name)
