"""Direct preference optimization with TRL's DPOTrainer: a policy held against a reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import add
from typing import Any
from unittest.mock import patch

from autotrain_mem.columns import list_lengths
from autotrain_mem.methods.configs import Configs, fill, trainer_arguments
from autotrain_mem.methods.interface import EditRows
from autotrain_mem.methods.row_lengths import RowLengths, pair_lengths
from autotrain_mem.methods.small import smallest_model
from autotrain_mem.methods.worst_case_text import shorten_last_rejected, text_of
from autotrain_mem.spec import Knobs


def make_parser() -> Any:
    """TRL's own parser of ``trl dpo``."""
    from trl.scripts.dpo import make_parser as make_trl_parser

    return make_trl_parser(prog="autofit dpo")


def configs(arguments: Mapping[str, Any]) -> Configs:
    """TRL's dataclasses, filled."""
    from trl import DPOConfig, ScriptArguments

    return fill(ScriptArguments, DPOConfig, arguments)


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Nothing is different."""
    return {}


def build_trainer(filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """The installed DPOTrainer as ``trl dpo`` builds it.

    TRL itself decides on the reference: a second model, the adapter switched off, or log-probabilities computed before
    training (``precompute_ref_log_probs``).
    """
    from trl import DPOTrainer

    common = trainer_arguments(filled, model, stub)
    with nullcontext() if stub is None else scores_at_hand():
        return DPOTrainer(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def scores_at_hand() -> AbstractContextManager[Any]:
    """Inside, a trainer that computes the reference's scores before training has them already."""
    from trl import DPOTrainer

    return patch.object(DPOTrainer, "_precompute_ref_logps", _with_scores)


def _with_scores(trainer: Any, dataset: Any, *_: Any) -> Any:
    """The data after the reference scored them, which is a forward without gradients: less than training."""
    scores = [0.0] * len(dataset)
    return dataset.add_column("ref_chosen_logps", scores).add_column("ref_rejected_logps", scores)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Pairs whose prompt and either completion fill ``length`` tokens: half prompt, half completion."""
    from datasets import Dataset

    prompt = length // 2
    completion = text_of(length - prompt)
    return Dataset.from_dict(
        {"prompt": [text_of(prompt)] * rows, "chosen": [completion] * rows, "rejected": [completion] * rows}
    )


def rows_editor(filled: Configs) -> EditRows:
    """Every real batch of pairs is padded."""
    return shorten_last_rejected


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Let autograd see a view as it sees one of real tensors.

    TRL's DPO writes into its log-probabilities, which are a view (1.16 no longer does). Backward, such a write goes by
    ``as_strided``, with zeros of the base's size; for tensors of Python's own kind, as fake ones are, the view is
    repeated instead (tools/autograd/gen_inplace_or_view_type.py: is_python_dispatch).
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from trl.trainer import dpo_trainer

    log_softmax = getattr(dpo_trainer, "selective_log_softmax", None)
    if log_softmax is None:
        yield
        return

    def strided(logits: Any, index: Any) -> Any:
        if not isinstance(logits, FakeTensor):
            return log_softmax(logits, index)
        chosen = log_softmax(logits, index.unsqueeze(-1))
        return chosen.as_strided(index.shape, chosen.stride()[:-1])

    with patch.object(dpo_trainer, "selective_log_softmax", strided):
        yield


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Let the trainer prepare the data untruncated; a pair is as long as its prompt with its longer completion."""
    from trl import DPOTrainer

    filled.training.max_length, filled.training.precompute_ref_log_probs = None, False
    trainer = DPOTrainer(
        model=smallest_model(),
        ref_model=smallest_model(),
        args=filled.training,
        train_dataset=split,
        processing_class=tokenizer,
    )
    rows = trainer.train_dataset
    prompts, chosen, rejected = (list_lengths(rows, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    return pair_lengths(list(map(add, prompts, chosen)), list(map(add, prompts, rejected)))


def check(filled: Configs, *, to_train: bool) -> None:
    """Nothing beyond what TRL's config refuses by itself."""
