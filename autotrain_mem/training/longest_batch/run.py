"""Runs the longest rows once before the first step, forward and backward: a misfit shows now, and not in hour five.

Nothing of it stays: no weight moves, no random number is drawn from the run, no row is taken from its order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from transformers import GenerationConfig

from autotrain_mem.data.image_sizes import has_images
from autotrain_mem.data.longest_rows import (
    are_conversations,
    fetched,
    longest_of,
    repeated,
    samples_completions,
)
from autotrain_mem.methods import online
from autotrain_mem.methods.interface import method_of_trainer
from autotrain_mem.methods.row_lengths import prepared_lengths
from autotrain_mem.settings.optimizer_verdicts import optimizer_of
from autotrain_mem.support.errors import DatasetFormatError
from autotrain_mem.training.longest_batch.restore import (
    OnError,
    keeps_whole_gradients,
    models_of,
    untouched,
    with_memory_of_later_steps,
)

Rows = tuple[list[Any], int]
"""Rows of the training data as the dataloader would hand them to the collator, and the tokens of the longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestBatch:
    """The result of running the longest rows before the first step, or why they were not run."""

    rows: int = 0
    longest_tokens: int = 0
    """Of the longest row; of the longest prompt where completions are sampled."""
    seconds: float = 0.0
    why_not: str = ""
    """Why nothing was run; empty where it was."""


def attach_longest_batch(
    trainer: Any, on_result: Callable[[LongestBatch], None], on_error: OnError | None = None
) -> None:
    """Have the longest rows run before the first micro-step of this trainer. A guard is attached before this.

    Its ``training_step``, as it is now, is called once more, with the longest rows of ``train_dataset``: what splits a
    batch that is too large splits this one. What a first step has not yet beside it stands in: the optimizer's state,
    and the gradients of a micro-step before. An out-of-memory error of it passes through.

    Of several ranks each runs the same longest rows.

    Online methods sample completions of full length with transformers; a vLLM engine, whose memory is its own from its
    start, is not asked, since its random state is out of reach: completions of random tokens stand in. Reward functions
    are not called, reward models are. PPO makes no ``training_step``, and its loop
    empties the cache in every update (``trl/experimental/ppo/ppo_trainer.py: train``): a probe alone runs its longest.
    """
    step = trainer.training_step

    def first_step(model: Any, *args: Any, **kwargs: Any) -> Any:
        if pending:
            pending.clear()
            if vars(trainer).get("training_step") is first_step:  # else somebody wrapped it, and it passes through
                trainer.training_step = step
            on_result(run_longest_batch(trainer, model, step, on_error))
        return step(model, *args, **kwargs)

    pending = [True]
    trainer.training_step = first_step


def run_longest_batch(
    trainer: Any, model: Any, step: Callable[..., Any], on_error: OnError | None = None
) -> LongestBatch:
    """Run the longest rows once through ``step``, and put everything back."""
    why_not = _why_not(trainer)
    if why_not:
        return LongestBatch(why_not=why_not)
    started, method = time.perf_counter(), method_of_trainer(trainer)
    # Trackers would be told how long parts of it took (``trl/extras/profiling.py: profiling_context``).
    with untouched(trainer), patch.object(trainer.args, "report_to", []):
        try:
            rows, longest_tokens = _rows(trainer)
        except DatasetFormatError as error:  # of an image; training may never come to it, or fetch it from elsewhere
            return LongestBatch(why_not=str(error).splitlines()[0].rstrip("."))
        batch = trainer.data_collator(rows)
        if not samples_completions(trainer):
            batch = trainer._prepare_inputs(batch)
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        with with_memory_of_later_steps(trainer, on_error), _sampling_to_the_end(trainer):
            for way in (nullcontext(),) if method is None else method.ways_of_step(trainer):
                with way:
                    step(model, _again(batch), items)
            if keeps_whole_gradients(model):  # FSDP2 reduces them in a step's last micro-batch
                model.set_requires_gradient_sync(True)
                try:
                    step(model, _again(batch), items)
                finally:
                    model.set_requires_gradient_sync(False)
        del batch
    return LongestBatch(rows=len(rows), longest_tokens=longest_tokens, seconds=time.perf_counter() - started)


def _again(batch: Any) -> Any:
    """A batch of which another step may be made: GKD's puts answers into what it is given."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def cost_of_emptying(trainer: Any, batch: LongestBatch) -> str | None:
    """Say what ``torch_empty_cache_steps`` costs a trainer whose longest rows ran; None where it costs nothing."""
    steps = trainer.args.torch_empty_cache_steps
    if steps is None or batch.why_not:
        return None
    return (
        f"torch_empty_cache_steps {steps} gives back what the longest rows, run first, left in the allocator's cache: "
        "where rows differ in length, reserved memory creeps up as in any order. Remove it to keep that cache."
    )


# -- where it cannot be done -----------------------------------------------------------------------------------------


def _why_not(trainer: Any) -> str:
    dataset, optimizer = trainer.train_dataset, optimizer_of(trainer.args)
    if not all(hasattr(dataset, name) for name in ("select_columns", "with_format", "__len__")):
        return "the training data are a stream, whose longest rows are not known"
    if not len(dataset):
        return "the training data have no rows"
    is_known = has_images(dataset.column_names) or (samples_completions(trainer) and "prompt" in dataset.column_names)
    is_known = is_known or are_conversations(trainer, dataset)
    if prepared_lengths(dataset) is None and not is_known:
        return f"the training data have none of the columns that are known here: {', '.join(dataset.column_names)}"
    if str(getattr(trainer.accelerator.distributed_type, "value", "")) == "DEEPSPEED":
        return "DeepSpeed's backward steps the optimizer itself"
    has_hooks = any(parameter._post_accumulate_grad_hooks for parameter in trainer.model.parameters())
    if "lomo" in optimizer or "layerwise" in optimizer or has_hooks:
        return "the optimizer steps within the backward pass"
    user_code = [name for name in ("tools", "environment_factories", "rollout_func") if getattr(trainer, name, None)]
    if user_code:
        return f"sampling calls code of the user's own ({', '.join(user_code)}), which may have effects"
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "transformers' continuous batching casts the weights to sample"
    return ""


# -- rows ------------------------------------------------------------------------------------------------------------


def _rows(trainer: Any) -> Rows:
    """Give what one process gets: of a generation each prompt as often as it is answered, side by side, as
    ``trl/trainer/utils.py: RepeatSampler`` draws them."""
    if not samples_completions(trainer):
        numbers, tokens = longest_of(trainer, trainer.train_dataset, trainer._train_batch_size)
        return fetched(trainer, trainer.train_dataset, numbers), tokens
    args, group, wanted = trainer.args, online.answers_of(trainer), online.prompts_at_once(trainer)
    longest, tokens = longest_of(trainer, trainer.train_dataset, wanted)
    everyone = [number for number in repeated(longest, wanted) for _ in range(group)]
    own = len(everyone) // args.world_size
    return fetched(trainer, trainer.train_dataset, everyone[own * args.process_index :][:own]), tokens


# -- online methods --------------------------------------------------------------------------------------------------


@contextmanager
def _sampling_to_the_end(trainer: Any) -> Iterator[None]:
    """Sample completions of full length, judged by numbers that differ within a group, not by the user's functions."""
    if not samples_completions(trainer):
        yield
        return
    changes: dict[str, Any] = {}
    if "reward_funcs" in vars(trainer):
        models = models_of(trainer)
        changes["reward_funcs"] = [
            judge if any(judge is model for model in models) else _differing_rewards for judge in trainer.reward_funcs
        ]
    if getattr(trainer, "use_vllm", False):
        changes["vllm_generation"] = _Completions(trainer)
    else:
        options = {**trainer.generation_config.to_dict(), "min_new_tokens": trainer.max_completion_length}
        changes["generation_config"] = GenerationConfig.from_dict(options)
    with patch.multiple(trainer, **changes):
        yield


def _differing_rewards(prompts: Sequence[Any], **_: Any) -> list[float]:
    return [float(number % 2) for number, _ in enumerate(prompts)]


class _Completions:
    """Stands in for ``trl/generation/vllm_generation.py: VLLMGeneration``: completions of full length."""

    def __init__(self, trainer: Any) -> None:
        self._tokens: int = trainer.max_completion_length
        special = (trainer._tokenizer.eos_token_id, trainer._tokenizer.pad_token_id)
        self._token = next(token for token in range(3) if token not in special)

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, list[list[int]], list[list[list[float]]], Any]:
        """Prompts, completions, for every token the log-probabilities of the likeliest, and nothing."""
        completions = [[self._token] * self._tokens for _ in prompts]
        return prompts, completions, [[[0.0] for _ in completion] for completion in completions], None

    def sync_weights(self) -> None:
        """Nothing moved."""
