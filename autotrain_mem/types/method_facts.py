"""Holds the kinds of facts that tell one training method from another; the methods are in ``methods_table``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class AxolotlFacts:
    """How Axolotl's YAML asks for a method (``exports.axolotl`` says which version was read)."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """What chooses the trainer (``core/builders/causal.py`` and ``rl.py: _get_trainer_cls``)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> Axolotl's key."""
    row_type: str | None = None
    """The ``type`` of rows that are conversations (``prompt_strategies``); None: they are taken as TRL takes them."""
    notes: tuple[str, ...]
    """For which rows the file is written, and what becomes of other ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaFactoryFacts:
    """How LLaMA-Factory's YAML asks for a method (``exports.llamafactory`` says which version was read)."""

    stage: str
    """``finetuning_args.py: FinetuningArguments.stage``."""
    entry: Mapping[str, Any]
    """What an entry of ``data/dataset_info.json`` says of the columns (``data/README.md``, ``data/parser.py:
    DatasetAttr``)."""
    rows: str
    """The rows that the entry is for."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys with one value for every job."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """TRL's argument -> LLaMA-Factory's key; written where the job or :attr:`MethodFacts.defaults` has a value."""
    losses: tuple[str | None, ...] = ()
    """Values of TRL's ``loss_type`` that mean the same there; None is TRL's default."""
    loss_key: str | None = None
    """Where the loss is named; None where it cannot be chosen."""
    length_notes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is done otherwise than in TRL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFacts:
    """All that is known of one TRL trainer beside what its module in this package does with it.

    A fact is asked by its own name, so that no other place needs to know which methods there are.
    """

    name: str
    """The command: ``autofit sft``, and ``trl sft`` where TRL has it."""
    title: str
    """The method as TRL's classes call it: ``SFT``."""
    knobs: tuple[str, ...]
    """Knobs worth showing beside those that every method has (``types.knobs.knob_names``)."""
    defaults: Mapping[str, Any]
    """TRL's defaults that another tool must be told, since its own differ (``trl/trainer/*_config.py``)."""

    # data
    example_dataset: str
    """What TRL's own documentation trains on (docstrings of trl/scripts/sft.py and trl/trainer/*_trainer.py); a
    plan takes its rows when no dataset is given."""
    formats: tuple[tuple[str, ...], ...]
    """Sets of columns that the trainer reads, in its own order of preference."""
    has_text_column: bool = False
    """A column of plain text is read where no set of ``formats`` is there; ``dataset_text_field`` names it."""
    row_noun: str = "rows"
    """What a batch counts."""
    sequences_per_row: int = 1
    """2 for pairs: a batch of the model holds all chosen sequences, then all rejected ones. So it does of two
    completions."""
    collates_sides_apart: bool = False
    """The chosen rows of a batch and its rejected ones reach the trainer in tensors of their own, which it joins."""
    collates_conversations: bool = False
    """Rows stay conversations until the collator makes a batch of them, which cuts their beginning: the answers to
    their prompts are what is learned. A row must keep a token of its prompt."""
    least_rows: int = 1
    """Rows that a micro-batch has at least."""
    one_row_losses: tuple[str, ...] = ()
    """Values of ``loss_type`` with which :attr:`least_rows` does not hold."""
    is_packable: bool = False
    """Rows reach the sampler as one sequence, ``input_ids``: they can be packed, or drawn by their length."""
    keeps_max_length: bool = True
    """No row is longer than ``max_length``. Otherwise TRL leaves some longer, and rows are planned for as they are."""
    drops_long_rows: bool = False
    """Rows longer than ``max_length`` are left out of training instead of truncated."""
    reads_images: bool = False
    """The trainer trains on images wherever the data have such a column (``_is_vision_dataset`` in
    trl/trainer/sft_trainer.py and dpo_trainer.py; ``_generate_and_score_completions`` in grpo_trainer.py and
    rloo_trainer.py). For the others these are columns that nobody reads."""

    # models
    has_score_head: bool = False
    """The model that is trained is a classifier of one score; a causal model is given such a head."""
    has_value_model: bool = False
    """A value model is trained beside the policy, and may differ from it in depth."""
    reward_model_argument: str | None = None
    """TRL's argument that names a reward model; None where none is taken."""
    teacher_argument: str | None = None
    """TRL's argument that names a teacher, which runs beside the model that is trained and is never trained itself."""
    takes_model_name: bool = True
    """The trainer loads the model from its name, in the dtype that a plan says and by TRL's own rules; otherwise the
    caller hands it the models as objects."""

    # training
    is_online: bool = False
    """Completions are sampled while training: the data are prompts, which TRL never truncates."""
    samples_each_micro_step: bool = False
    """Completions are sampled for one micro-batch, inside its own step; otherwise for all of an optimizer step at once,
    or for several."""
    generates_unwrapped: bool = False
    """Completions are sampled by the bare model: FSDP's first version gathers no weights for that."""
    groups_completions: bool = False
    """The completions of one prompt form a group, and the batches of TRL's config divide by each other in groups."""
    holds_models_whole: bool = False
    """Each process holds its models whole: how this trainer calls them where they are divided does not work, or is not
    rehearsed."""
    has_mini_batches: bool = False
    """An effective batch is trained on in whole mini-batches (``num_mini_batches``)."""
    shares_tokens: bool = False
    """Several processes may share the tokens of a row (context parallelism)."""
    has_chunked_loss: bool = False
    """The loss is next-token cross-entropy, which TRL computes some tokens at a time (``loss_type`` None or
    chunked_nll) instead of from all logits at once."""
    learns_tokens: bool = False
    """The loss asks for every token of an answer, which tells about a bit each; elsewhere a row tells about one."""
    has_activation_offload: bool = False
    """TRL's config has the argument for it."""
    makes_optimizer_early: bool = False
    """The trainer makes its optimizer as it is built, over more than one model: it can neither be replaced nor
    moved."""
    liger_since: str | None = ""
    """The oldest TRL whose Liger loss for this method can be rehearsed; empty where the loss is the model's own, None
    where that of no TRL can."""

    # what else there is
    is_experimental: bool = False
    """It is in ``trl.experimental``, of which TRL says that it may change or go in any release."""
    has_trl_command: bool = True
    """TRL has a script for it, and so ``trl NAME``."""
    takes_transformers_arguments: bool = False
    """The trainer also takes transformers' TrainingArguments as its config (trl/trainer/sft_trainer.py: __init__)."""
    lighter_methods: Mapping[str, str] = field(default_factory=dict)
    """Methods that learn from the same rewards with fewer models -> which ones they do without."""
    axolotl: AxolotlFacts | None = None
    """None where no file for Axolotl is written."""
    llamafactory: LlamaFactoryFacts | None = None
    """None where no file for LLaMA-Factory is written."""

    @property
    def trainer(self) -> str:
        """``SFTTrainer``."""
        return f"{self.title}Trainer"

    @property
    def module(self) -> str:
        """``trl.trainer.sft_trainer``, where TRL has the trainer."""
        home = f"experimental.{self.name}" if self.is_experimental else "trainer"
        return f"trl.{home}.{self.name}_trainer"

    def noun(self, number: int) -> str:
        """Names what a batch counts, for that many of it: ``pair`` for 1."""
        return self.row_noun.removesuffix("s") if number == 1 else self.row_noun

    def rows(self, number: int) -> str:
        """``1 pair``, ``1,200 pairs``."""
        return f"{number:,} {self.noun(number)}"
