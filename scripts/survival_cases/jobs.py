"""The flags of each method and mode, and the card that a plan fills."""

from collections.abc import Mapping, Sequence

from autotrain_mem import api
from autotrain_mem.cli import flags as cli_flags
from autotrain_mem.support.errors import DoesNotFitError
from autotrain_mem.support.units import KIB
from autotrain_mem.types import Plan

ROWS_PER_STEP = 40
"""It divides the 1,000 rows, so an epoch has 25 full steps."""
METHODS: Mapping[str, str] = {
    "sft": "--dataset text.jsonl",
    "reward": "--dataset pairs.jsonl",
    "dpo": "--dataset pairs.jsonl",
    "grpo": "--dataset prompts.jsonl --reward_model_name_or_path judge --num_generations 2 --max_completion_length 6",
    "rloo": "--dataset prompts.jsonl --reward_funcs judging.short --num_generations 2 --max_completion_length 6",
    "ppo": "--dataset prompts.jsonl --reward_model_path judge --response_length 6 --num_ppo_epochs 1",
}
MODES: Mapping[str, str] = {
    "full": "--use_peft false --load_in_4bit false",
    "LoRA": "--use_peft --load_in_4bit false --lora_dropout 0.0",
    "4-bit": "--use_peft --load_in_4bit --lora_dropout 0.0",
}
SHARED = "--model model --num_train_epochs 1 --learning_rate 1e-3 --logging_steps 1 --fit lossless"


def rows_per_step(method: str) -> int:
    """Returns the effective batch; in GRPO and RLOO each of a prompt's two completions is a row."""
    return ROWS_PER_STEP * (2 if method in ("grpo", "rloo") else 1)


def flags(method: str, mode: str) -> list[str]:
    """Returns the flags of a run of one epoch."""
    batch = f"--effective_batch_size {rows_per_step(method)}"
    return f"{SHARED} {METHODS[method]} {MODES[mode]} {batch}".split()


LARGE = "3.5GiB"
"""A card that holds the whole effective batch of every job, and is too small to hold a CUDA context."""
ROOMIER = 1.25
"""While nothing fits, the card is enlarged by this factor."""
FILL = 0.93
"""The share of the budget that the plan fills: the card is made as small as that."""
BUDGET = 0.96
"""The share of a small card that is left after the default headroom (``machine/overhead.py``)."""


def filled_card(workers: api.Workers, method: str, argv: Sequence[str], share: float) -> str:
    """Returns a card for ``--gpu`` that the best plan fills to ``FILL``: the plan that is best on a larger card.
    ``workers``: workers that were started in the folder of the job's files. ``share``: the larger card's size, as a
    share of what the whole effective batch needs as one micro-batch."""
    size_bytes = int(share * _planned(workers, method, argv, LARGE).estimate.required_bytes)
    while True:
        try:
            needs_bytes = _planned(workers, method, argv, card_of(size_bytes)).estimate.required_bytes
            return card_of(int(needs_bytes / FILL / BUDGET))
        except DoesNotFitError:
            size_bytes = int(size_bytes * ROOMIER)


def card_of(size_bytes: int) -> str:
    """Returns the card of this size for ``--gpu``, in whole KiB."""
    return f"{-(-size_bytes // KIB)}KiB"


def _planned(workers: api.Workers, method: str, argv: Sequence[str], card: str) -> Plan:
    request, _ = cli_flags.read(f"autofit {method}", [*argv, "--gpu", card])
    rehearsals = api.rehearsals_for(workers, request, print)
    return api.plan(rehearsals, to_train=True, simulate=True)
