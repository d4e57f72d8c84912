"""Provides the functions that methods with sampled completions share: GRPO, RLOO, distillation, online DPO, PPO."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from autotrain_mem.methods import image_rows
from autotrain_mem.methods.configs import Configs, trainer_arguments
from autotrain_mem.methods.interface import method_of_trainer
from autotrain_mem.methods.reward_functions import rehearsed_reward, reward_functions, try_once
from autotrain_mem.methods.row_lengths import RowLengths
from autotrain_mem.methods.worst_case_text import EditRows, repeated, text_of
from autotrain_mem.types import Knobs


def build_trainer(
    trainer: str, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None
) -> Any:
    """Builds the trainer of this name as TRL's script does."""
    import trl

    rewards = rewards_of(filled, filled.script.reward_model_name_or_path, rehearsed=stub is not None)
    # In a rehearsal a reward model reads the stub's tokens. In a real run TRL loads the reward model's own tokenizer.
    judges = None if stub is None else [stub if isinstance(reward, str) else None for reward in rewards]
    return getattr(trl, trainer)(
        reward_funcs=rewards,
        reward_processing_classes=judges,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        **trainer_arguments(filled, model, stub),
    )


def rewards_of(filled: Configs, model: str | None, *, rehearsed: bool) -> list[Any]:
    """Returns the reward model's path and the reward functions, in the order of trl/scripts/grpo.py: main."""
    names = filled.script.reward_funcs or []
    functions = [rehearsed_reward] * len(names) if rehearsed else reward_functions(names)
    if rehearsed and not model and not names:
        functions = [rehearsed_reward]
    return [*([model] if model else []), *functions]


def reward_model(filled: Configs, loading: Mapping[str, Any]) -> Any:
    """Loads the reward model, with a score head of one output, without the policy's revision."""
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.utils import create_model_from_path

    own = {name: value for name, value in loading.items() if name != "revision"}
    path = filled.training.reward_model_path
    return create_model_from_path(path, AutoModelForSequenceClassification, num_labels=1, **own)


def worst_rows(filled: Configs, length: int, rows: int) -> Any:
    """Makes prompts of ``length`` tokens."""
    return repeated({"prompt": text_of(length)}, rows)


def rows_editor(filled: Configs) -> EditRows:
    """Returns a function that shortens the first of several prompts in a generation.

    The batch then needs masks, but no tensor becomes smaller: TRL pads all prompts of a generation to the longest, and
    all completions to the first, which alone has its full length (``rehearsal.generation``).
    """
    group: int = getattr(filled.training, "num_generations", 1)
    group = min(group, getattr(filled.training, "num_generations_eval", None) or group)

    def shorten(rows: list[Any]) -> list[Any]:
        if len(rows) <= group:
            return rows
        return [{**row, "prompt": image_rows.without_a_word(row["prompt"])} for row in rows[:group]] + rows[group:]

    return shorten


worst_image_rows = image_rows.prompts
image_rows_editor = rows_editor
image_texts = image_rows.prompt_texts


def rehearsal_changes(arguments: Mapping[str, Any], knobs: Knobs) -> dict[str, Any]:
    """Sets ``steps_per_generation`` to the plan's accumulation, unless the user sets the size of a generation. TRL's
    default is the config's accumulation (trl/trainer/grpo_config.py: __post_init__), which a rehearsal reduces."""
    given = any(arguments.get(name) is not None for name in ("steps_per_generation", "generation_batch_size"))
    return {} if given else {"steps_per_generation": knobs.gradient_accumulation_steps}


@contextmanager
def training_patches(trainer: Any, filled: Configs, knobs: Knobs) -> Iterator[None]:
    """Makes every optimizer step of a rehearsal begin with a generation: the second has optimizer state allocated.

    TRL generates once for ``steps_per_generation * num_iterations`` micro-steps (trl/trainer/grpo_trainer.py:
    _prepare_inputs). Whether it scores completions before training depends on the accumulation, so
    TRL's method that decides this, _generate_and_score_completions, runs with the plan's accumulation.
    """
    every = trainer.args.steps_per_generation * trainer.num_iterations
    trainer.add_callback(generating_each_step(trainer, every))
    trainer._generate_and_score_completions = with_accumulation(
        knobs.gradient_accumulation_steps, trainer._generate_and_score_completions, trainer.args
    )
    yield


def optimizer_steps(rows: int, epochs: float, knobs: Knobs, arguments: Mapping[str, Any]) -> int:
    """Counts as TRL's sampler does, which drops the prompts of an incomplete generation and repeats each generation
    ``num_iterations`` times (trl/trainer/utils.py: RepeatSampler; grpo_trainer.py: _get_train_sampler)."""
    micro_batch, accumulation = knobs.per_device_train_batch_size * knobs.processes, knobs.gradient_accumulation_steps
    asked = arguments.get("generation_batch_size")
    each = asked // micro_batch if asked else arguments.get("steps_per_generation") or accumulation
    generations = rows // (micro_batch * each // (knobs.num_generations or 1))
    micro_steps = generations * each * (arguments.get("num_iterations") or 1)
    return math.ceil(epochs * max(1, math.ceil(micro_steps / accumulation)))


def micro_steps_per_generation(filled: Configs, knobs: Knobs) -> int:
    """Returns ``steps_per_generation`` x ``num_iterations``."""
    return int(filled.training.steps_per_generation) * int(filled.training.num_iterations)


def generating_each_step(trainer: Any, every: int) -> Any:
    """Returns a callback that advances the trainer's micro-step count to the next multiple of ``every``."""
    from transformers import TrainerCallback

    class Forward(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy here
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer._step = -(-trainer._step // every) * every

    return Forward()


def answers_of(trainer: Any) -> int:
    """Returns how many rows one prompt makes: one for each completion, but a pair of completions is one row."""
    return int(getattr(trainer.args, "num_generations", 1))


def prompts_at_once(trainer: Any, accumulation: int | None = None) -> int:
    """Returns the number of prompts in a generation over all processes.

    Distillation generates for an effective batch (trl/trainer/distillation_trainer.py: _get_train_sampler), and online
    DPO for a micro-batch. The configs of GRPO and RLOO give the size. ``accumulation``: the micro-steps of an optimizer
    step; None for those of the trainer's config.
    """
    args = trainer.args
    method = method_of_trainer(trainer)
    is_each = method is not None and method.samples_each_micro_step
    steps = 1 if is_each else accumulation or args.gradient_accumulation_steps
    given = getattr(args, "generation_batch_size", None)
    completions: int = given or args.per_device_train_batch_size * steps * args.world_size
    return max(1, completions // answers_of(trainer))


def with_accumulation(steps: int, function: Callable[..., Any], args: Any) -> Callable[..., Any]:
    """Wraps a trainer's method so that it runs with this ``gradient_accumulation_steps`` in the trainer's config."""

    def called(*positional: Any, **named: Any) -> Any:
        rehearsed, args.gradient_accumulation_steps = args.gradient_accumulation_steps, steps
        try:
            return function(*positional, **named)
        finally:
            args.gradient_accumulation_steps = rehearsed

    return called


def row_lengths(filled: Configs, split: Any, tokenizer: Any) -> RowLengths:
    """Counts the tokens of every prompt with its chat template, and tries the reward functions on a few rows."""
    try_once(getattr(filled.script, "reward_funcs", None) or [], split)
    options = getattr(filled.training, "chat_template_kwargs", None) or {}
    tokenize = partial(prompt_ids, tokenizer=tokenizer, **options)
    return prompt_lengths(split, tokenize, processes=filled.training.dataset_num_proc)


def prompt_lengths(split: Any, tokenize: Callable[[Any], list[int]], *, processes: int | None) -> RowLengths:
    """Counts the tokens of every prompt without datasets' cache, which would not notice a change of ``tokenize``."""
    options = {"remove_columns": split.column_names, "desc": "Tokenizing prompts", "num_proc": processes}
    counted = split.map(lambda row: {"tokens": len(tokenize(row["prompt"]))}, keep_in_memory=True, **options)
    return RowLengths(longer=list(counted["tokens"]))


def prompt_ids(prompt: Any, tokenizer: Any, **options: Any) -> list[int]:
    """Tokenizes a prompt. A conversation gets its chat template and the assistant's generation prompt."""
    if isinstance(prompt, str):
        return list(tokenizer(text=prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **options
    )
    return list(encoded["input_ids"])


def check(filled: Configs) -> None:
    """Raises UsageError if a reward function does not exist."""
    reward_functions(filled.script.reward_funcs or [])
