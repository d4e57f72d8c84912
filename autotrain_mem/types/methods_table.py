"""Lists the training methods, one row each; no other place lists them. Pure: it runs in any process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotrain_mem.settings.words import MAX_LENGTH


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFacts:
    """Holds what rooms that do not import TRL need to know of one of its trainers.

    All else is in the module ``methods.NAME``, which implements ``methods.interface: Method``.
    """

    name: str
    """The command: ``autofit sft``, and ``trl sft`` if TRL has it."""
    title: str
    """The method's name in TRL's classes: ``SFT``."""
    knobs: tuple[str, ...]
    """Knobs to show besides those that every method has (``settings.knobs.knob_names``)."""
    defaults: Mapping[str, Any]
    """TRL's defaults that another tool must be given, since its own differ (``trl/trainer/*_config.py``)."""

    # data
    example_dataset: str
    """The dataset in TRL's own documentation (docstrings of trl/scripts/sft.py and trl/trainer/*_trainer.py); a plan
    uses its rows if no dataset is given."""
    formats: tuple[tuple[str, ...], ...]
    """Sets of columns that the trainer reads, in order; ``dataset_text_field`` replaces :data:`TEXT_COLUMN`."""
    row_noun: str = "rows"
    """The noun for a batch's rows."""
    sequences_per_row: int = 1
    """2 for pairs and for two completions of a prompt: both sequences are in one batch of the model."""
    long_rows: Literal["truncated", "dropped", "kept"] = "truncated"
    """What TRL does to rows above ``max_length``. ``kept``: some stay longer, so the plan takes rows as they are."""
    reads_images: bool = False
    """Whether the trainer trains on images if the data have such a column (``_is_vision_dataset`` in
    trl/trainer/sft_trainer.py and dpo_trainer.py; ``_generate_and_score_completions`` in grpo_trainer.py and
    rloo_trainer.py). Other trainers ignore these columns."""

    # models
    has_score_head: bool = False
    """Whether the trained model is a classifier with one score; a causal model gets such a head."""
    reward_model_argument: str | None = None
    """TRL's argument that names a reward model; None if it takes none."""
    teacher_argument: str | None = None
    """TRL's argument that names a teacher, a second model that runs during training but is not trained."""

    # training
    is_online: bool = False
    """Whether completions are sampled during training: the data are prompts, which TRL never truncates."""
    holds_models_whole: bool = False
    """Whether each process holds its models whole (``checks.sharding: method`` says why)."""
    shares_tokens: bool = False
    """Whether several processes may share the tokens of a row (context parallelism)."""
    has_chunked_loss: bool = False
    """Whether the loss is next-token cross-entropy, which TRL computes in chunks of tokens (``loss_type`` None or
    chunked_nll) instead of from all logits at once."""
    has_activation_offload: bool = False
    """Whether TRL's config has ``activation_offloading``."""
    builds_early: bool = False
    """Whether the constructor already makes the dataloaders and an optimizer over more than one model. Then the
    optimizer cannot be replaced or moved, and the rows cannot be changed."""
    is_experimental: bool = False
    """Whether it is in ``trl.experimental``, which may change in any release and has no script."""

    @property
    def is_packable(self) -> bool:
        """Returns whether rows reach the sampler as one sequence, ``input_ids``."""
        return "packing" in self.knobs

    @property
    def has_trl_command(self) -> bool:
        """Returns whether TRL has a script for it, and so ``trl NAME``."""
        return not self.is_experimental

    @property
    def trainer(self) -> str:
        """``SFTTrainer``: the name of TRL's class."""
        return f"{self.title}Trainer"

    @property
    def module(self) -> str:
        """``trl.trainer.sft_trainer``: TRL's module of the trainer."""
        home = f"experimental.{self.name}" if self.is_experimental else "trainer"
        return f"trl.{home}.{self.name}_trainer"

    def noun(self, number: int) -> str:
        """Returns the noun for this many rows: ``pair`` for 1."""
        return self.row_noun.removesuffix("s") if number == 1 else self.row_noun

    def rows(self, number: int) -> str:
        """Returns a number of rows as text: ``1 pair``, ``1,200 pairs``."""
        return f"{number:,} {self.noun(number)}"


TEXT_COLUMN = "text"
"""TRL's default of ``dataset_text_field`` (``trl/trainer/sft_config.py``)."""

_PROMPTS = "trl-lib/DeepMath-103K"
_PAIRS = "trl-lib/ultrafeedback_binarized"

SFT = MethodFacts(
    name="sft",
    title="SFT",
    knobs=(MAX_LENGTH, "packing"),
    defaults={"learning_rate": 2e-5},
    example_dataset="trl-lib/Capybara",
    formats=(("input_ids",), ("prompt", "completion"), ("messages",), ("conversations",), (TEXT_COLUMN,)),
    reads_images=True,
    shares_tokens=True,
    has_chunked_loss=True,
    has_activation_offload=True,
)
"""Formats in the order of ``trl/trainer/sft_trainer.py: _prepare_dataset``."""

REWARD = MethodFacts(
    name="reward",
    title="Reward",
    knobs=(MAX_LENGTH,),
    defaults={"learning_rate": 1e-4},
    example_dataset=_PAIRS,
    formats=(("chosen_ids", "rejected_ids"), ("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    row_noun="pairs",
    sequences_per_row=2,
    long_rows="dropped",
    has_score_head=True,
    has_activation_offload=True,
)
"""Formats in the order of ``trl/trainer/reward_trainer.py: _prepare_dataset``."""

DPO = MethodFacts(
    name="dpo",
    title="DPO",
    knobs=(MAX_LENGTH,),
    defaults={"learning_rate": 1e-6, "beta": 0.1, "loss_type": ["sigmoid"]},
    example_dataset=_PAIRS,
    formats=(("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    row_noun="pairs",
    sequences_per_row=2,
    reads_images=True,
    has_activation_offload=True,
)
"""Formats in the order of ``trl/trainer/dpo_trainer.py: _prepare_dataset``."""

KTO = MethodFacts(
    name="kto",
    title="KTO",
    knobs=(MAX_LENGTH,),
    defaults={"learning_rate": 1e-6, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    example_dataset="trl-lib/kto-mix-14k",
    formats=(("prompt", "completion", "label"), *DPO.formats),
    reads_images=True,
    has_activation_offload=True,
)
"""Formats in the order of ``trl/trainer/kto_trainer.py: _prepare_dataset``, which makes two rows from a pair."""

ORPO = MethodFacts(
    name="orpo",
    title="ORPO",
    knobs=(MAX_LENGTH,),
    defaults={"learning_rate": 1e-6, "beta": 0.1},
    example_dataset=_PAIRS,
    formats=DPO.formats,
    row_noun="pairs",
    sequences_per_row=2,
    long_rows="kept",
    is_experimental=True,
)
"""Formats and defaults of ``trl/experimental/orpo``; ``maybe_extract_prompt`` turns the second into the first."""

CPO = replace(ORPO, name="cpo", title="CPO", defaults={**ORPO.defaults, "loss_type": "sigmoid", "cpo_alpha": 1.0})
"""``trl/experimental/cpo``, with SimPO as its ``loss_type``."""

GRPO = MethodFacts(
    name="grpo",
    title="GRPO",
    knobs=("max_completion_length", "num_generations"),
    defaults={"learning_rate": 1e-6, "beta": 0.0},
    example_dataset=_PROMPTS,
    formats=(("prompt",),),
    row_noun="completions",
    reads_images=True,
    reward_model_argument="reward_model_name_or_path",
    is_online=True,
)

RLOO = replace(GRPO, name="rloo", title="RLOO", defaults={"learning_rate": 1e-6})

DISTILLATION = MethodFacts(
    name="distillation",
    title="Distillation",
    knobs=("max_completion_length",),
    defaults={"learning_rate": 1e-6, "beta": 1.0},
    example_dataset="trl-lib/ultrafeedback-prompt",
    formats=(("prompt",),),
    row_noun="completions",
    reads_images=True,
    teacher_argument="teacher_model_name_or_path",
    is_online=True,
)
"""One completion for each prompt (``trl/scripts/distillation.py``)."""

ONLINE_DPO = MethodFacts(
    name="online_dpo",
    title="OnlineDPO",
    knobs=(MAX_LENGTH, "max_new_tokens"),
    defaults={"learning_rate": 5e-7},
    example_dataset="trl-lib/ultrafeedback-prompt",
    formats=(("prompt",),),
    row_noun="prompts",
    sequences_per_row=2,
    reward_model_argument="reward_model_path",
    is_online=True,
    holds_models_whole=True,
    is_experimental=True,
)
"""Two completions of each prompt form a pair (``trl/experimental/online_dpo``)."""

GKD = MethodFacts(
    name="gkd",
    title="GKD",
    knobs=(MAX_LENGTH, "max_new_tokens", "lmbda"),
    defaults={"learning_rate": 2e-5, "lmbda": 0.5, "beta": 0.5, "temperature": 0.9},
    example_dataset="trl-lib/chatbot_arena_completions",
    formats=(("messages",),),
    teacher_argument="teacher_model_name_or_path",
    has_activation_offload=True,
    is_experimental=True,
)
"""Formats from ``trl/experimental/utils.py: DataCollatorForChatML``, defaults from
``trl/experimental/gkd/gkd_config.py``, the example from ``examples/scripts/gkd.py``."""

PPO = MethodFacts(
    name="ppo",
    title="PPO",
    knobs=("response_length", "local_rollout_forward_batch_size"),
    defaults={"learning_rate": 3e-6, "temperature": 0.7},
    example_dataset=_PROMPTS,
    formats=(("input_ids",), ("prompt",)),
    row_noun="completions",
    reward_model_argument="reward_model_path",
    is_online=True,
    holds_models_whole=True,
    builds_early=True,
    is_experimental=True,
)
"""TRL's example needs a split of its own, so GRPO's prompts are used; defaults from
``trl/experimental/ppo/ppo_config.py``."""

METHODS: Mapping[str, MethodFacts] = {
    row.name: row for row in (SFT, REWARD, DPO, KTO, ORPO, CPO, GRPO, RLOO, DISTILLATION, ONLINE_DPO, GKD, PPO)
}
"""The supported TRL trainers, by the names of their commands."""

REWARD_MODEL_ARGUMENTS = tuple(
    dict.fromkeys(row.reward_model_argument for row in METHODS.values() if row.reward_model_argument)
)
"""The methods' arguments that name a reward model."""
TEACHER_ARGUMENTS = tuple(dict.fromkeys(row.teacher_argument for row in METHODS.values() if row.teacher_argument))
"""The methods' arguments that name a teacher."""
OTHER_MODEL_ARGUMENTS = (*REWARD_MODEL_ARGUMENTS, *TEACHER_ARGUMENTS)
"""Arguments that name a model other than the trained one."""
