"""The order of rows, where it would be another after a new start."""

from __future__ import annotations

from typing import Any


def keep_order(trainer: Any) -> None:
    """From now on each epoch's order depends on the seed and the epoch alone, as it does where rows are shuffled.

    With ``train_sampling_strategy group_by_length`` transformers draws it from what random numbers are next
    (``transformers/trainer_pt_utils.py: LengthGroupedSampler``): a run that goes on in a later epoch would meet some of
    its rows twice and others never.
    """
    make = trainer._get_train_sampler

    def made(*args: Any, **kwargs: Any) -> Any:
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        sampler, arguments = make(*args, **kwargs), trainer.args
        if isinstance(sampler, LengthGroupedSampler):
            seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
            sampler.generator = torch.Generator().manual_seed(seed)
            sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
        return sampler

    trainer._get_train_sampler = made
