"""Lists the training methods, a row each: the one place that knows which there are. Pure: it runs in any process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from autotrain_mem.types.method_facts import AxolotlFacts, LlamaFactoryFacts, MethodFacts

_PROMPTS = "trl-lib/DeepMath-103K"
_PAIRS = "trl-lib/ultrafeedback_binarized"

_LLAMAFACTORY_PAIRS = {
    "ranking": True,
    "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
}
_LLAMAFACTORY_PAIR_ROWS = "rows with prompt, chosen and rejected as text; conversations take formatting sharegpt"

SFT = MethodFacts(
    name="sft",
    title="SFT",
    knobs=("max_length", "packing"),
    defaults={"learning_rate": 2e-5},
    example_dataset="trl-lib/Capybara",
    formats=(("input_ids",), ("prompt", "completion"), ("messages",), ("conversations",)),
    has_text_column=True,
    is_packable=True,
    reads_images=True,
    shares_tokens=True,
    has_chunked_loss=True,
    learns_tokens=True,
    has_activation_offload=True,
    takes_transformers_arguments=True,
    axolotl=AxolotlFacts(
        renamed={"padding_free": "batch_flattening"},
        row_type="chat_template",
        notes=(
            "type: for rows with a messages column; text rows take type completion with field text, prompts with "
            "completions need a user-defined type",
        ),
    ),
    llamafactory=LlamaFactoryFacts(
        stage="sft",
        entry={
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
            },
        },
        rows="rows with a messages column; rows with other columns name theirs in the entry",
        losses=(None, "nll"),  # whole logits are what TRL calls nll
    ),
)
"""Formats in the order of ``trl/trainer/sft_trainer.py: _prepare_dataset``."""

REWARD = MethodFacts(
    name="reward",
    title="Reward",
    knobs=("max_length",),
    defaults={"learning_rate": 1e-4},
    example_dataset=_PAIRS,
    formats=(("chosen_ids", "rejected_ids"), ("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    row_noun="pairs",
    sequences_per_row=2,
    drops_long_rows=True,
    has_score_head=True,
    has_activation_offload=True,
    axolotl=AxolotlFacts(
        keys={"reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1},
        renamed={"center_rewards_coefficient": "center_rewards_coefficient"},
        row_type="bradley_terry.chat_template",
        notes=("type: for rows with input, chosen and rejected, as Axolotl documents them; TRL's have other columns",),
    ),
    llamafactory=LlamaFactoryFacts(
        stage="rm",
        entry=_LLAMAFACTORY_PAIRS,
        rows=_LLAMAFACTORY_PAIR_ROWS,
        length_notes=("cutoff_len: LLaMA-Factory cuts both sides of a pair that is longer; TRL drops the pair",),
        notes=("the model: LLaMA-Factory trains a causal model with a value head; TRL a classifier with one score",),
    ),
)
"""Formats in the order of ``trl/trainer/reward_trainer.py: _prepare_dataset``; Axolotl's keys after ``validation.py:
set_reward_model_defaults``."""

DPO = MethodFacts(
    name="dpo",
    title="DPO",
    knobs=("max_length",),
    defaults={"learning_rate": 1e-6, "beta": 0.1, "loss_type": ["sigmoid"]},
    example_dataset=_PAIRS,
    formats=(("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    row_noun="pairs",
    sequences_per_row=2,
    reads_images=True,
    has_activation_offload=True,
    liger_since="1.16",
    axolotl=AxolotlFacts(
        keys={"rl": "dpo"},
        renamed={
            "beta": "rl_beta",
            "label_smoothing": "dpo_label_smoothing",
            "loss_type": "dpo_loss_type",
            "loss_weights": "dpo_loss_weights",
            "use_weighting": "dpo_use_weighting",
            "padding_free": "dpo_padding_free",
            "precompute_ref_log_probs": "precompute_ref_log_probs",
            "use_liger_kernel": "dpo_use_liger_kernel",
        },
        notes=(
            "datasets: without a type for rows with prompt, chosen and rejected as text; conversations need a type",
            "excess_length_strategy truncate: a pair whose prompt alone is longer is dropped; TRL cuts it",
        ),
    ),
    llamafactory=LlamaFactoryFacts(
        stage="dpo",
        entry=_LLAMAFACTORY_PAIRS,
        rows=_LLAMAFACTORY_PAIR_ROWS,
        renamed={"beta": "pref_beta", "label_smoothing": "dpo_label_smoothing", "ld_alpha": "ld_alpha"},
        losses=("sigmoid", "hinge", "ipo"),
        loss_key="pref_loss",
        notes=("the loss: logits of policy and reference are whole in float32, whatever TRL's does",),
    ),
)
"""Formats in the order of ``trl/trainer/dpo_trainer.py: _prepare_dataset``; Axolotl's names after
``core/trainers/dpo/__init__.py: DPOStrategy``, LLaMA-Factory's after ``train/dpo/trainer.py: CustomDPOTrainer``."""

KTO = MethodFacts(
    name="kto",
    title="KTO",
    knobs=("max_length",),
    defaults={"learning_rate": 1e-6, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    example_dataset="trl-lib/kto-mix-14k",
    formats=(("prompt", "completion", "label"), *DPO.formats),
    least_rows=2,
    one_row_losses=("apo_zero_unpaired",),
    reads_images=True,
    has_activation_offload=True,
    liger_since=None,
)
"""Formats in the order of ``trl/trainer/kto_trainer.py: _prepare_dataset``, which makes two rows of a pair. Two rows at
least since its KL divergence is estimated from prompts with their neighbours' completions (``__init__``)."""

ORPO = MethodFacts(
    name="orpo",
    title="ORPO",
    knobs=("max_length",),
    defaults={"learning_rate": 1e-6, "beta": 0.1},
    example_dataset=_PAIRS,
    formats=DPO.formats,
    row_noun="pairs",
    sequences_per_row=2,
    collates_sides_apart=True,
    keeps_max_length=False,
    takes_model_name=False,
    is_experimental=True,
    has_trl_command=False,
)
"""Formats and defaults of ``trl/experimental/orpo``; ``maybe_extract_prompt`` makes the second format the first."""

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
    groups_completions=True,
    liger_since="1.16",
    axolotl=AxolotlFacts(
        keys={"rl": "grpo"},
        notes=("datasets: without a type for rows with a prompt column, which TRL reads as they are",),
    ),
)

RLOO = replace(GRPO, name="rloo", title="RLOO", defaults={"learning_rate": 1e-6}, axolotl=None)
"""Axolotl's ``enums.py: RLType`` has no RLOO and no PPO."""

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
    liger_since=None,
)
"""One completion for each prompt, ``trl/scripts/distillation.py``."""

ONLINE_DPO = MethodFacts(
    name="online_dpo",
    title="OnlineDPO",
    knobs=("max_length", "max_new_tokens"),
    defaults={"learning_rate": 5e-7},
    example_dataset="trl-lib/ultrafeedback-prompt",
    formats=(("prompt",),),
    row_noun="prompts",
    sequences_per_row=2,
    reward_model_argument="reward_model_path",
    takes_model_name=False,
    is_online=True,
    samples_each_micro_step=True,
    holds_models_whole=True,
    is_experimental=True,
    has_trl_command=False,
)
"""Two completions of each prompt, which form a pair (``trl/experimental/online_dpo``)."""

GKD = MethodFacts(
    name="gkd",
    title="GKD",
    knobs=("max_length", "max_new_tokens", "lmbda"),
    defaults={"learning_rate": 2e-5, "lmbda": 0.5, "beta": 0.5, "temperature": 0.9},
    example_dataset="trl-lib/chatbot_arena_completions",
    formats=(("messages",),),
    collates_conversations=True,
    generates_unwrapped=True,
    teacher_argument="teacher_model_name_or_path",
    learns_tokens=True,
    has_activation_offload=True,
    liger_since=None,
    is_experimental=True,
    has_trl_command=False,
)
"""Formats after ``trl/experimental/utils.py: DataCollatorForChatML``, defaults after
``trl/experimental/gkd/gkd_config.py``, the example after ``examples/scripts/gkd.py``."""

PPO = MethodFacts(
    name="ppo",
    title="PPO",
    knobs=("response_length", "local_rollout_forward_batch_size"),
    defaults={"learning_rate": 3e-6, "temperature": 0.7},
    example_dataset=_PROMPTS,
    formats=(("input_ids",), ("prompt",)),
    row_noun="completions",
    has_value_model=True,
    reward_model_argument="reward_model_path",
    takes_model_name=False,
    is_online=True,
    holds_models_whole=True,
    has_mini_batches=True,
    makes_optimizer_early=True,
    liger_since="1.16",
    is_experimental=True,
    has_trl_command=False,
    lighter_methods={
        "rloo": "no value model",
        "grpo": "neither a value model nor, at its default beta, a reference model",
    },
    llamafactory=LlamaFactoryFacts(
        stage="ppo",
        entry={"columns": {"prompt": "prompt"}},
        rows="rows with prompt as text",
        keys={"reward_model_type": "full", "do_sample": True, "top_p": 1.0, "top_k": 0},
        renamed={
            "num_ppo_epochs": "ppo_epochs",
            "whiten_rewards": "ppo_whiten_rewards",
            "reward_model_path": "reward_model",
            "response_length": "max_new_tokens",
            "temperature": "temperature",
        },
        length_notes=("cutoff_len: of a prompt; TRL's PPO takes it as long as it is",),
        notes=(
            "PPO: LLaMA-Factory's is that of trl 0.8.6 to 0.9.6, with a value head on the policy; TRL 1.12's has a "
            "value model of its own, so that the prediction is only a rough guide",
        ),
    ),
)
"""TRL's example needs a split of its own, so GRPO's prompts are taken; defaults after
``trl/experimental/ppo/ppo_config.py``. LLaMA-Factory's keys after ``train/ppo/trainer.py: CustomPPOTrainer``, whose
reward model is an adapter by default, and TRL's is whole."""

METHODS: Mapping[str, MethodFacts] = {
    row.name: row for row in (SFT, REWARD, DPO, KTO, ORPO, CPO, GRPO, RLOO, DISTILLATION, ONLINE_DPO, GKD, PPO)
}
"""The TRL trainers that are known, by the names of their commands."""

REWARD_MODEL_ARGUMENTS = tuple(
    dict.fromkeys(row.reward_model_argument for row in METHODS.values() if row.reward_model_argument)
)
"""What the methods call their reward model."""
TEACHER_ARGUMENTS = tuple(dict.fromkeys(row.teacher_argument for row in METHODS.values() if row.teacher_argument))
"""What the methods call their teacher."""
OTHER_MODEL_ARGUMENTS = (*REWARD_MODEL_ARGUMENTS, *TEACHER_ARGUMENTS)
"""What names a model beside the one that is trained."""


def methods_where(holds: Callable[[MethodFacts], bool]) -> frozenset[str]:
    """Name the methods of which something holds."""
    return frozenset(name for name, row in METHODS.items() if holds(row))


_BY_USE = (SFT, DPO, KTO, GRPO, REWARD, RLOO, DISTILLATION, ORPO, CPO, ONLINE_DPO, GKD, PPO)
"""Of two that read the same columns, which is asked for more."""
TEXT_COLUMN = "text"
"""TRL's default of ``dataset_text_field`` (``trl/trainer/sft_config.py``)."""


def methods_reading(columns: Collection[str]) -> tuple[str, ...]:
    """Name the methods that train on rows with these columns, the most likely first: the one that reads most of them.

    ``("prompt", "completion", "label")`` gives kto, sft, grpo, rloo, distillation, online_dpo, ppo.
    """
    read = {row.name: max(map(len, _formats_in(row, {*columns})), default=0) for row in _BY_USE}
    return tuple(sorted((name for name in read if read[name]), key=lambda name: -read[name]))


def _formats_in(row: MethodFacts, columns: set[str]) -> list[tuple[str, ...]]:
    text = ((TEXT_COLUMN,),) if row.has_text_column else ()
    return [names for names in (*row.formats, *text) if columns.issuperset(names)]
