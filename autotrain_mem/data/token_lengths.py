"""Counts the tokens of the whole dataset, after the trainer's own formatting."""

import contextlib
import pathlib
from collections import Counter
from functools import partial
from typing import Any

from autotrain_mem.data import load
from autotrain_mem.data.image_lengths import image_lengths
from autotrain_mem.data.image_sizes import has_images
from autotrain_mem.data.load import check_rows
from autotrain_mem.methods.configs import Configs, on_cpu, trusts_remote_code, undivided
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.row_lengths import OnProgress, RowLengths, counting_maps, processes
from autotrain_mem.settings.levers import SWITCHES
from autotrain_mem.settings.words import MAX_LENGTH
from autotrain_mem.support import errors
from autotrain_mem.support.data_files import row_place
from autotrain_mem.support.sources import check_image_packages, lacks_tokenizer, no_tokenizer
from autotrain_mem.trainers.pretrained import why_unreachable
from autotrain_mem.trainers.script_call import keyword_of
from autotrain_mem.types import DataProfile, ImageProfile, Job


def profile(job: Job, scratch: str, on_progress: OnProgress = lambda counting: None) -> DataProfile:
    """Counts tokens as the installed trainer prepares the data, untruncated.

    Raises:
        DatasetError: see :func:`autotrain_mem.data.load.load`.
        ModelNotFoundError: the model has no tokenizer.
        RewardFunctionError: a reward function fails on the first rows.
    """
    filled = method_of(job.method).configs(counting_arguments(job, scratch))
    splits = load.load(job, filled)
    with counting_maps(on_progress):
        (trained, images, empty), *others = (
            _lengths(job, filled, splits[split], load.rows_name(job, filled, split))
            for split in (filled.script.dataset_train_split, *load.evaluated_splits(job, filled, splits))
        )
    if max(lengths := Counter(trained.longer), default=0) < FEWEST_TOKENS[job.is_online]:
        raise errors.EmptyDatasetError(
            f"No row of {load.dataset_name(job)} has enough tokens to train on.",
            hint="Every row is empty or was dropped as fully masked; check the chat template and the columns.",
        )
    drops = job.method_facts.long_rows == "dropped"  # ``trl/trainer/reward_trainer.py: _prepare_dataset``
    limit, shortest = job.arguments.get(MAX_LENGTH), min(lengths)
    if drops and isinstance(limit, int) and limit < shortest:
        raise errors.EmptyDatasetError(
            f"--max_length {limit} drops every pair of {load.dataset_name(job)}: reward training drops longer pairs, "
            f"and the shortest pair has {shortest} tokens.",
            hint=f"--max_length {shortest} keeps the shortest, --max_length {max(lengths)} or auto keeps all.",
        )
    counted = [trained, *(lengths for lengths, *_ in others)]
    answers = [(each.longer, each.prompts) for each in counted if each.prompts]
    shorter_sides: Counter[int] = Counter()  # tokens of the shorter sequences, summed over all pairs of each length
    for longer, shorter in zip(trained.longer, trained.shorter, strict=bool(trained.shorter)):
        shorter_sides[longer] += shorter
    return DataProfile(
        rows_by_length=dict(lengths),
        longest_prompt=max((tokens for each in counted for tokens in each.prompts), default=0),
        longest_answer=max((row - prompt for pair in answers for row, prompt in zip(*pair, strict=True)), default=0),
        longest_evaluated=max((length for lengths, *_ in others for length in lengths.longer), default=0),
        images=None if images is None else images.with_worst_of([more for _, more, _ in others if more is not None]),
        shorter_sides=dict(shorter_sides),
        drops=drops,
        empty_rows=empty,
    )


FEWEST_TOKENS = {False: 2, True: 1}
"""The fewest tokens to train on, by ``Job.is_online``. A row needs one token to predict another; a prompt needs one."""


def load_tokenizer(model: str, max_pixels: int | None = None, **options: Any) -> Any:
    """Returns the model's tokenizer. Raises ModelNotFoundError if there is none, and MissingExtraError if it is part of
    an image processor, whose packages are not installed."""
    from autotrain_mem.trainers.pretrained import FAMILIES, load_processor

    if lacks_tokenizer(pathlib.Path(model)):
        raise no_tokenizer(model)
    try:
        return load_processor(model, max_pixels, **options)
    except (OSError, ValueError, TypeError, ImportError) as error:
        from transformers import AutoConfig

        with contextlib.suppress(OSError, ValueError):
            if (model_type := AutoConfig.from_pretrained(model, **options).model_type) in FAMILIES:
                check_image_packages(model, model_type)
        raise no_tokenizer(model, why_unreachable(error)) from error


def counting_arguments(job: Job, output_dir: str) -> dict[str, Any]:
    """Returns the job's arguments without those that need a GPU, a network or a real model."""
    is_given = isinstance(job.arguments.get(MAX_LENGTH), int)
    return {
        **on_cpu(undivided(job.arguments)),
        "output_dir": output_dir,
        "report_to": "none",
        "eval_strategy": "no",
        "load_best_model_at_end": False,
        "push_to_hub": False,
        **dict.fromkeys(SWITCHES, False),
        "use_liger_kernel": False,
        "use_vllm": False,
        # Rows are not checked against TRL's default max_length, which the user did not set.
        **({} if is_given or job.method_facts.long_rows != "kept" else {MAX_LENGTH: None}),
    }


def _lengths(job: Job, filled: Configs, rows: Any, name: str) -> tuple[RowLengths, ImageProfile | None, int]:
    formatting, columns = keyword_of(job, "formatting_func"), load.columns_of(job, filled, rows.column_names)
    tokenizer = keyword_of(job, "processing_class")
    smaller = job.arguments.get("max_pixels")
    tokenizer = tokenizer or load_tokenizer(job.model, smaller, trust_remote_code=trusts_remote_code(filled))
    template, path = getattr(tokenizer, "chat_template", None), getattr(filled.training, "chat_template_path", None)
    if path is not None:
        template = pathlib.Path(path).read_text(encoding="utf-8") if pathlib.Path(path).is_file() else None
    empty = 0
    if formatting is None or "input_ids" in rows.column_names:
        empty = check_rows(rows, columns, name, None if template is None else str(template))
    given = job.arguments.get("dataset_num_proc")
    filled.training.dataset_num_proc = processes(len(rows), given)  # harmless in GRPO's config, which has no such field
    try:
        if has_images(rows.column_names) and job.method_facts.reads_images:
            # ``trl/trainer/sft_trainer.py: __init__`` rejects a text model, but only once it is loaded.
            if getattr(tokenizer, "image_processor", None) is None:
                raise errors.DatasetFormatError(
                    f"{name} holds images, but {job.model} reads only text.",
                    hint="Use a model that reads images, such as Qwen/Qwen2.5-VL-3B-Instruct, or remove the column of "
                    "images to train on the text.",
                )
            of_row = partial(method_of(job.method).image_texts, filled)
            lengths, images = image_lengths(rows, tokenizer, of_row, processes=filled.training.dataset_num_proc)
            # TRL passes the images of all prompts to the processor, which rejects an empty list among others
            # (``trl/trainer/grpo_trainer.py: _generate_and_score_completions``).
            without, total = images.rows_by_images.get(0, 0), sum(images.rows_by_images.values())
            if job.is_online and 0 < without < total:
                raise errors.DatasetFormatError(
                    f"{without:,} of the {total:,} rows of {name} have no image, and {job.method_facts.trainer} cannot "
                    "mix rows with and without images in a batch.",
                    hint="Remove the rows without images, or train on them separately.",
                )
            return lengths, images, empty
        more = () if formatting is None else (formatting,)
        return method_of(job.method).row_lengths(filled, rows, tokenizer, *more), None, empty
    except errors.AutofitError:
        raise
    except Exception as error:  # TRL, the chat template and the tokenizer may raise anything
        where = "--debug shows where TRL failed." if job.python_call is None else "Also check formatting_func if given."
        place = ""
        for number, row in enumerate(
            rows.select_columns(list(columns)).with_format(None) if formatting is None else ()
        ):
            try:
                for column in {*columns} - {"prompt", "conversations"}:
                    messages = [*(row.get("prompt") or ()), *row[column]]
                    if isinstance(messages[0], dict):
                        tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception:  # the template fails here, too
                place = f"{row_place(name, number)} of "
                break
        raise errors.DatasetFormatError(
            f"TRL cannot prepare {place}{name}: {errors.described(error)}",
            hint=f"Check the values of its columns and the chat template. {where}",
        ) from error
