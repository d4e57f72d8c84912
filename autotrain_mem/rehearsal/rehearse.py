"""Rehearses one configuration: runs the method's trainer on its worst batch and returns the trace."""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from autotrain_mem.methods import configs
from autotrain_mem.methods.configs import Configs, with_knobs
from autotrain_mem.methods.image_rows import RowImages
from autotrain_mem.methods.interface import method_of
from autotrain_mem.methods.reward_functions import rehearsed_reward
from autotrain_mem.methods.worst_case_text import stub_tokenizer
from autotrain_mem.parallel.config import sharding_arguments
from autotrain_mem.rehearsal.fake_run import TrainerSpec, rehearse_trainer
from autotrain_mem.rehearsal.ranks.rank import rehearsed_rank
from autotrain_mem.rehearsal.routing import routed
from autotrain_mem.rehearsal.stub_processor import rehearsed_processor
from autotrain_mem.rehearsal.trace.loss_chunks import marked_chunks, with_chunks
from autotrain_mem.rehearsal.truncated_depth import shorten_model, with_layers
from autotrain_mem.settings.adapter_config import PEFT_CONFIG, starts_from_weights
from autotrain_mem.settings.flag_verdicts import only_for_real
from autotrain_mem.settings.levers import HARM_FIRST, is_pulled
from autotrain_mem.settings.optimizer_verdicts import NOT_COUNTED, optimizer_of
from autotrain_mem.support import codec
from autotrain_mem.trainers.finish import finished, keep_cache_in_evaluation
from autotrain_mem.trainers.model_support import quantized_to_host
from autotrain_mem.trainers.pretrained import revision_of
from autotrain_mem.trainers.script_call import EVALUATED, Keywords, loading, read, substitution
from autotrain_mem.types import Capability, Job, Knobs, Routing, Trace

PROCESSES_WITH_ROWS = 8
"""Rows are tokenized for at most this many processes and repeated for the others: TRL needs 1 ms per 2,048 tokens."""

_WORSE = (Routing.ANY, Routing.EVEN, Routing.ONE)


def rehearse(
    job: Job,
    knobs: Knobs,
    length: int,
    output_dir: str,
    compute_capability: Capability = (8, 0),
    layers: int | None = None,
    chunks: int | None = None,
    rank: int = 0,
    routing: Routing | None = None,
) -> Trace:
    """Rehearses one configuration and returns its trace.

    Args:
        length: Tokens in each row of the worst batch; in online methods, tokens of the prompt.
        output_dir: A scratch folder.
        compute_capability: The card's compute capability, which selects its kernels.
        layers: Shortens the model to this many layers; None keeps all.
        chunks: Shortens a chunked loss to this many chunks; None keeps all.
        rank: The process to rehearse; the first has the largest shards.
        routing: How tokens reach a mixture's experts; None rehearses both ways and returns that with the larger peak.
    """
    if routing is None:
        once = partial(rehearse, job, knobs, length, output_dir, compute_capability, layers, chunks, rank)
        trace = once(routing=Routing.ONE)
        if trace.routing is not Routing.ONE:
            return trace

        def peak(trace: Trace) -> int:
            return max(accumulate(sign * block.size_bytes for _, sign, block in trace.walk()))

        return max(trace, once(routing=Routing.EVEN), key=peak)
    process = rehearsed_rank(knobs, job.accelerate, rank, attention=job.arguments.get("attn_implementation"))
    launched = nullcontext() if process is None else process.launched()
    has_chunks = job.method_facts.has_chunked_loss
    shortened = with_chunks(chunks if has_chunks else None)
    whole = with_layers(method_of(job.method).models_in_step(job.model, job.arguments), layers)
    with launched, whole, shortened as cut, marked_chunks(has_chunks), routed(routing) as met:
        spec = trainer_spec(job, knobs, length, output_dir, layers)
        left = (*not_counted(job, knobs), *left_out(job))
        trace = rehearse_trainer(spec, compute_capability, left, process)
    return replace(trace, loss_chunks=tuple(sorted({*cut})), routing=max(met, key=_WORSE.index, default=None))


def trainer_spec(job: Job, knobs: Knobs, length: int, output_dir: str, layers: int | None = None) -> TrainerSpec:
    """Returns how to build and drive the job's trainer. ``layers`` shortens the model objects that a script passes;
    None keeps all layers."""
    method = method_of(job.method)
    arguments = rehearsal_arguments(job, knobs, output_dir)
    filled = method.configs({**arguments, **method.rehearsal_changes(dict(job.arguments), knobs)})
    filled = replace(filled, prompt_length=job.prompt_length, answer_length=job.answer_length)
    # A step needs rows for every micro-step of every process, or for every generation.
    rows_of_a_step = knobs.per_device_train_batch_size * configs.REHEARSED_ACCUMULATION * knobs.processes
    rows_of_a_step = knobs.effective_batch_size if knobs.completion_length else rows_of_a_step
    side = "left" if job.is_online else "right"
    tokenizer = stub_tokenizer(side)
    made = partial(method.worst_rows, filled)
    edit_rows = method.rows_editor(filled)
    if job.images:
        from transformers import AutoConfig

        options = revision_of(job)
        config = AutoConfig.from_pretrained(job.model, **options)
        tokenizer = rehearsed_processor(job.model, config, side, max_pixels=knobs.max_pixels, **options)
        images = RowImages(processor=tokenizer, sizes=job.images)
        made = partial(method.worst_image_rows, filled, images=images)
        edit_rows = method.image_rows_editor(filled)
    repeats = math.ceil(knobs.processes / PROCESSES_WITH_ROWS)
    rows = made(length, math.ceil(rows_of_a_step * configs.REHEARSED_STEPS / repeats))
    evaluated = None
    if filled.is_evaluated:
        # Each prompt of an online method yields a group of completions.
        group = getattr(filled.training, "num_generations_eval", None) or knobs.num_generations or 1
        count = filled.training.per_device_eval_batch_size * configs.EVALUATED_BATCHES * knobs.processes
        evaluated = made(job.evaluated_length or length, math.ceil(max(1, count // group) / repeats))
    if draws_early := job.method_facts.builds_early:
        rows, evaluated = _repeated(rows, repeats), _repeated(evaluated, repeats)

    def build() -> Any:
        with method.without_precomputing(), quantized_to_host():
            if job.python_call is None:
                trainer = method.build_trainer(filled, job.model, rows, evaluated, stub=tokenizer)
            else:
                trainer = call_again(job, knobs, filled, rows, evaluated, tokenizer, layers)
        finished(trainer, knobs)
        keep_cache_in_evaluation(trainer)
        if not draws_early:
            trainer.train_dataset = _repeated(trainer.train_dataset, repeats)
            trainer.eval_dataset = _repeated(trainer.eval_dataset, repeats)
        return trainer

    passes = method.passes(job.arguments)
    return TrainerSpec(
        build=build,
        edit_rows=edit_rows,
        patches=lambda trainer: method.training_patches(trainer, filled, knobs),
        passes=passes,
        micro_steps_per_generation=passes * method.micro_steps_per_generation(filled, knobs),
        saves=job.python_call is None or str(job.arguments.get("save_strategy", "steps")) != "no",
    )


def rehearsal_arguments(job: Job, knobs: Knobs, output_dir: str) -> dict[str, Any]:
    """Merges the knobs into the job's arguments and drops the arguments that only a real run needs. If the job
    evaluates, the rehearsal evaluates once, after the last step, when the optimizer's state exists."""
    left_out = only_for_real(job.method) | (frozenset() if job.python_call is None else _BY_SCRIPT)
    asked = {name: value for name, value in job.arguments.items() if name not in left_out}
    ours = {} if job.python_call is not None else sharding_arguments(knobs)
    return {
        **configs.on_cpu({**ours, **asked, **codec.to_json(knobs)}),
        "gradient_accumulation_steps": min(configs.REHEARSED_ACCUMULATION, knobs.gradient_accumulation_steps),
        "output_dir": output_dir,
        "max_steps": configs.REHEARSED_STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "steps" if job.is_evaluated else "no",
        "eval_steps": configs.REHEARSED_STEPS,
        "disable_tqdm": True,
    }


_BY_SCRIPT = frozenset({"metric_for_best_model"})
"""Dropped arguments of a script: they may name a metric of its compute_metrics, which a rehearsal does not call."""


def _repeated(rows: Any, repeats: int) -> Any:
    """Repeats a dataset of prepared rows, by index."""
    return rows if rows is None or repeats == 1 else rows.select([*range(len(rows))] * repeats)


def not_counted(job: Job, knobs: Knobs) -> tuple[str, ...]:
    """Lists what the estimate of this configuration leaves out, one text each."""
    given = job.arguments
    facts: dict[str, Any] = {
        **{fact: optimizer_of(knobs).startswith(name) for name, fact in NOT_COUNTED.items()},
        "tokens that the chat template adds to the embeddings: a few rows of the vocabulary": given.get(
            "chat_template_path"
        ),
        "the effect of Inductor: torch_compile is rehearsed uncompiled, which is usually an upper bound. Compiled "
        "chains of elementwise operators save only their inputs and are recomputed in the backward pass; matrix "
        "products, attention, weights, gradients and optimizer state do not change": any(
            given.get(name) for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        ),
        "scoring by the reference model before training: a forward pass of --precompute_ref_batch_size pairs without "
        "gradients, which needs less than training unless it has several times the pairs of a micro-batch": given.get(
            "precompute_ref_batch_size"
        ),
        **{fact: True for row in HARM_FIRST if is_pulled(row, knobs) for fact in row.not_counted},
        "one token: all completions of a generation but the first are rehearsed one token short, so that they are "
        "padded. A loss that drops padding (TRL 1.16) needs up to 1 / max_completion_length more": (
            knobs.num_generations is not None
        ),
        "the shard of one weight at a time, which is copied from host memory when weights are sent to vLLM": (
            given.get("use_vllm") and knobs.fsdp_offload_params
        ),
        "what evaluation's shorter batches leave cached: only its longest are rehearsed": job.evaluated_length,
        "the fp16 gradient scaler: a few scalars": knobs.fp16,
        "cuSOLVER's workspace while the adapter is initialized from one weight after another, before training: "
        "up to a few copies of the largest weight in float32": (
            starts_from_weights(given.get(PEFT_CONFIG) or knobs.peft_config)
        ),
    }
    own = method_of(job.method).not_counted(job, knobs)
    return (*own, *(fact for fact, applies in facts.items() if applies))


def call_again(
    job: Job, knobs: Knobs, filled: Configs, train_dataset: Any, eval_dataset: Any, tokenizer: Any, layers: int | None
) -> Any:
    """Builds the script's own trainer on fake tensors; ``layers`` shortens its models, None keeps all layers."""
    call = read(job)
    if layers is not None and not isinstance(call.model, str):
        # Shortens the model, and a reference model of the same class and depth.
        whole = call.model.config.get_text_config(decoder=True).num_hidden_layers
        for each in {id(value): value for value in call.keywords.values() if type(value) is type(call.model)}.values():
            if each.config.get_text_config(decoder=True).num_hidden_layers in (whole, layers):
                shorten_model(each, layers)

    def substitute(keywords: Keywords) -> Keywords:
        """Replaces rows, tokenizer, arguments, and reward functions, these by a stand-in. Reward models are rehearsed,
        with the rehearsal's tokenizer; an optimizer of the script keeps its fake parameters."""
        changed = with_knobs(keywords, job.method, {**job.arguments, **codec.to_json(knobs)}) | {
            "args": _arguments(keywords.get("args"), filled, knobs, loads=isinstance(keywords["model"], str)),
            "train_dataset": train_dataset,
            "eval_dataset": eval_dataset,
            "processing_class": tokenizer,
        }
        if "reward_funcs" in keywords:
            rewards = keywords["reward_funcs"]
            asked = list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
            are_models = [isinstance(each, str | torch.nn.Module) for each in asked]
            pairs = zip(asked, are_models, strict=True)
            changed["reward_funcs"] = [each if is_model else rehearsed_reward for each, is_model in pairs]
            changed["reward_processing_classes"] = [tokenizer if is_model else None for is_model in are_models]
        return {name: value for name, value in changed.items() if name not in _ONLY_FOR_REAL}

    before = substitution.set(substitute)
    try:
        return call.trainer(*call.args, **call.kwargs)
    finally:
        substitution.reset(before)


_ONLY_FOR_REAL = ("callbacks", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func")
"""Dropped keywords. A formatting function turns rows into text, but rehearsed rows are tokens already. Metrics keep the
logits of a whole evaluation, of which a rehearsal runs only two batches (:func:`left_out`)."""


def left_out(job: Job) -> tuple[str, ...]:
    """Lists what a rehearsal leaves out of a script's call, one text each, for the estimate."""
    if job.python_call is None:
        return ()
    keywords, facts = read(job).keywords, []
    if keywords.get("compute_metrics") is not None:
        is_less = keywords.get("preprocess_logits_for_metrics") is not None
        evaluated: Any = keywords.get(EVALUATED)
        rows = f", {len(evaluated):,} rows x tokens x vocabulary" if hasattr(evaluated, "__len__") else ""
        kept = "the results of preprocess_logits_for_metrics" if is_less else "the logits"
        facts.append(
            f"compute_metrics: {kept} of a whole evaluation{rows}. The trainer keeps them on the card, in two copies "
            "while it appends a batch, unless eval_accumulation_steps moves them to the host"
        )
    if callbacks := keywords.get("callbacks"):
        names = sorted({getattr(each, "__name__", type(each).__name__) for each in callbacks})
        facts.append(f"tensors that the script's own callbacks hold on the card: {', '.join(names)}")
    return tuple(facts)


def _arguments(asked: Any, filled: Configs, knobs: Knobs, *, loads: bool) -> Any:
    """Returns the rehearsal's config in the class of the script's config, with the attributes that the script added.
    ``loads`` is True if the trainer loads the model by name."""
    made = filled.training
    if hasattr(made, "model_init_kwargs"):
        own = getattr(asked, "model_init_kwargs", None)
        made.model_init_kwargs = loading(own, knobs.dtype) if loads else own
    if asked is None or type(asked) is type(made):
        return made
    made = copy.copy(made)
    if isinstance(asked, type(made)):
        made.__class__ = type(asked)
    for name, value in vars(asked).items():
        if name not in vars(made):
            setattr(made, name, value)
    return made
