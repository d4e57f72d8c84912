"""Lists the training methods with their facts. It is the only list, and imports no ML library."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autotrain_mem.settings.words import MAX_LENGTH


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFacts:
    """Holds the facts about a TRL trainer for code that does not import TRL.

    The module ``methods.NAME`` has the rest: it implements ``methods.interface: Method``.
    """

    name: str
    """The method's name in commands: ``autofit sft``, and ``trl sft`` if TRL has that command."""
    title: str
    """The method's name in TRL's class names: ``SFT`` in ``SFTTrainer``."""
    knobs: tuple[str, ...]
    """The knobs to show besides those that every method has (``settings.knobs.knob_names``)."""
    defaults: Mapping[str, Any]
    """TRL's defaults that a file for another tool must set, since that tool's differ (``trl/trainer/*_config.py``)."""
    example_dataset: str
    """The dataset in TRL's documentation (docstrings of trl/scripts/sft.py and trl/trainer/*_trainer.py). A plan uses
    it if no dataset is given."""
    formats: tuple[tuple[str, ...], ...]
    """The column sets that TRL accepts, in its order of checks. ``dataset_text_field`` replaces :data:`TEXT_COLUMN`."""
    row_noun: str = "rows"
    """The plural noun for the rows of a batch, for texts."""
    sequences_per_row: int = 1
    """The sequences in a batch for each row: 2 for pairs and for two completions of a prompt, else 1."""
    long_rows: Literal["truncated", "dropped", "kept"] = "truncated"
    """What TRL does to rows above ``max_length``. ``kept``: some rows stay longer, so a plan uses their full length."""
    reads_images: bool = False
    """Whether the trainer trains on images if the data have a column of images (``_is_vision_dataset`` in
    trl/trainer/sft_trainer.py and dpo_trainer.py; ``_generate_and_score_completions`` in grpo_trainer.py and
    rloo_trainer.py). Other trainers ignore such a column."""
    has_score_head: bool = False
    """Whether the trained model is a classifier with one score. A causal model gets a new head for it."""
    reward_model_argument: str | None = None
    """TRL's argument that names a reward model; None if the method has none."""
    teacher_argument: str | None = None
    """TRL's argument that names a teacher, a second model that is run but not trained; None if the method has none."""
    is_online: bool = False
    """Whether completions are sampled during training. The data are then prompts, which TRL never truncates."""
    holds_models_whole: bool = False
    """Whether each process holds whole models, so that they cannot be sharded (for reasons see ``checks.sharding``)."""
    shares_tokens: bool = False
    """Whether several processes can share the tokens of a row (context parallelism)."""
    has_chunked_loss: bool = False
    """Whether the loss is next-token cross-entropy, which TRL computes in chunks of tokens (``loss_type`` None or
    chunked_nll) instead of from all logits at once."""
    has_activation_offload: bool = False
    """Whether TRL's config has ``activation_offloading``."""
    builds_early: bool = False
    """Whether the constructor already creates the dataloaders and an optimizer over more than one model. The optimizer
    can then not be replaced or moved, nor the rows changed."""
    is_experimental: bool = False
    """Whether the trainer is in ``trl.experimental``, which can change in any release and has no scripts."""

    @property
    def is_packable(self) -> bool:
        """Returns whether rows can be packed. If so, the sampler gets each row as one sequence, ``input_ids``."""
        return "packing" in self.knobs

    @property
    def has_trl_command(self) -> bool:
        """Returns whether TRL has a script for the method, and so the command ``trl NAME``."""
        return not self.is_experimental

    @property
    def trainer(self) -> str:
        """Returns the name of TRL's class, such as ``SFTTrainer``."""
        return f"{self.title}Trainer"

    @property
    def module(self) -> str:
        """Returns the name of the class's module, such as ``trl.trainer.sft_trainer``."""
        home = f"experimental.{self.name}" if self.is_experimental else "trainer"
        return f"trl.{home}.{self.name}_trainer"

    def noun(self, number: int) -> str:
        """Returns the noun for this many rows: ``pair`` for 1, ``pairs`` for 2."""
        return self.row_noun.removesuffix("s") if number == 1 else self.row_noun

    def rows(self, number: int) -> str:
        """Returns a number of rows as text: ``1 pair``, ``1,200 pairs``."""
        return f"{number:,} {self.noun(number)}"


TEXT_COLUMN = "text"
"""TRL's default for ``dataset_text_field`` (``trl/trainer/sft_config.py``)."""
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
"""The formats are in the order of ``trl/trainer/sft_trainer.py: _prepare_dataset``."""

REWARD = MethodFacts(
    name="reward",
    title="Reward",
    knobs=(MAX_LENGTH,),
    defaults={"learning_rate": 1e-4},
    example_dataset=_PAIRS,
    formats=(
        *(("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
        *(("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    ),
    row_noun="pairs",
    sequences_per_row=2,
    long_rows="dropped",
    has_score_head=True,
    has_activation_offload=True,
)
"""The formats are in the order of ``trl/trainer/reward_trainer.py: _prepare_dataset``."""

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
"""The formats are in the order of ``trl/trainer/dpo_trainer.py: _prepare_dataset``."""

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
"""The formats are in the order of ``trl/trainer/kto_trainer.py: _prepare_dataset``, which splits a pair in two rows."""

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
"""The formats of ``trl/experimental/orpo``, whose ``maybe_extract_prompt`` turns the second format into the first."""

CPO = replace(ORPO, name="cpo", title="CPO", defaults={**ORPO.defaults, "loss_type": "sigmoid", "cpo_alpha": 1.0})
"""The facts of ``trl/experimental/cpo``. SimPO is one of its values for ``loss_type``."""

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
"""Each prompt gets one completion (``trl/scripts/distillation.py``)."""

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
"""The formats are those of ``trl/experimental/utils.py: DataCollatorForChatML``, the defaults those of
``trl/experimental/gkd/gkd_config.py``, and the example that of ``examples/scripts/gkd.py``."""

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
"""The example is GRPO's, since TRL's own needs a split with another name. The defaults are those of
``trl/experimental/ppo/ppo_config.py``."""

METHODS: Mapping[str, MethodFacts] = {
    row.name: row for row in (SFT, REWARD, DPO, KTO, ORPO, CPO, GRPO, RLOO, DISTILLATION, ONLINE_DPO, GKD, PPO)
}
"""The supported TRL trainers, by the names of their commands."""
REWARD_MODEL_ARGUMENTS = tuple(
    dict.fromkeys(row.reward_model_argument for row in METHODS.values() if row.reward_model_argument)
)
"""TRL's arguments that name a reward model, over all methods."""
TEACHER_ARGUMENTS = tuple(dict.fromkeys(row.teacher_argument for row in METHODS.values() if row.teacher_argument))
"""TRL's arguments that name a teacher, over all methods."""
OTHER_MODEL_ARGUMENTS = (*REWARD_MODEL_ARGUMENTS, *TEACHER_ARGUMENTS)
"""TRL's arguments that name a model other than the trained one."""
