"""Rehearses the prefill, the first and the last decode steps of ``generate()``, and skips the steps in between.

Hundreds of decode steps on fake tensors take minutes, and the last one allocates the most: the KV cache only grows.
After the first decode step, the loop's state jumps to just before the last ones. The recorder gets a mark at the start
of each step, from which ``estimator/decode_steps.py`` derives the steps in between.

The first completion has the maximum length and the others are one token shorter, so that batches are as large as
possible and need a mask.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationMixin, cache_utils
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils import ModelOutput

from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN
from autotrain_mem.rehearsal.known_values import know, known_value, real_tensors
from autotrain_mem.rehearsal.trace.flops import Mark
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.errors import UsageError

_DYNAMIC, _SLIDING, _STATIC, _STATIC_SLIDING, _CONSTANT = (
    {kind for name in names.split() if (kind := getattr(cache_utils, name, None))}
    for names in (
        "DynamicLayer LinearAttentionAndFullAttentionLayer",
        "DynamicSlidingWindowLayer LinearAttentionAndSlidingWindowAttentionLayer",
        "StaticLayer LinearAttentionAndStaticFullAttentionLayer",
        "StaticSlidingWindowLayer LinearAttentionAndStaticSlidingWindowAttentionLayer",
        "LinearAttentionLayer",
    )
)
_GROWABLE = _DYNAMIC | _SLIDING | _STATIC | _STATIC_SLIDING | _CONSTANT
"""Cache layers whose growth is implemented here (``transformers/cache_utils.py``; older versions lack some). With any
other cache layer, every step is rehearsed, which is slow but correct."""


def last_steps(length: int) -> int:
    """Returns how many decode steps to rehearse at the end of rows of this length. The first two have the same events:
    only every eighth step does not pad its attention mask (``cuda/attention.py``), and the last one fills a static
    cache."""
    return next(steps for steps in (3, 4, 5) if 0 not in ((length - steps) % 8, (length - steps + 1) % 8))


@contextmanager
def generation_by_its_ends(recorder: Recorder) -> Iterator[None]:
    """Within the block, ``generate()`` on fake tensors runs only its first and last steps.

    Its result has full length: the prompt with its known values, then an ordinary token at each position; all rows but
    the first end with an end token and padding. Requested scores and logits exist for every token.

    Raises UsageError for beam search and assisted generation, whose steps depend on the model's outputs.
    """
    sample = GenerationMixin._sample

    def sample_by_its_ends(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> Any:
        if not isinstance(input_ids, FakeTensor):
            return sample(model, input_ids, logits_processor, stopping_criteria, generation_config, **more)
        ends = _Ends(input_ids, generation_config, model.config, recorder, scores_are_logits=not logits_processor)
        with ends.watching(model):
            criteria = _Watched(stopping_criteria, ends.sampled)
            result = sample(model, input_ids, logits_processor, criteria, generation_config, **more)
        return ends.complete(result)

    with (
        patch.object(GenerationMixin, "_sample", sample_by_its_ends),
        patch.object(GenerationMixin, "_beam_search", _refusing(GenerationMixin._beam_search, "num_beams")),
        patch.object(GenerationMixin, "_assisted_decoding", _refusing(GenerationMixin._assisted_decoding, "assistant")),
        patch.object(GenerationMixin, "_optimize_model_for_decode", experts_as_on_cuda),
        patch.object(FakeTensor, "tolist", _tolist),
    ):
        yield


def _refusing(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    def refuse(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input_ids, FakeTensor):
            raise UsageError(
                f"Generation with {what} cannot be rehearsed: its steps depend on the model's outputs.",
                hint=f"Remove {what} from --generation_kwargs.",
            )
        return method(model, input_ids, *args, **kwargs)

    return refuse


class _Watched(StoppingCriteriaList):  # type: ignore[misc]  # transformers is untyped to mypy here
    """Runs the stopping criteria and replaces their results: only the length ends a sequence."""

    def __init__(self, criteria: Any, sampled: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(criteria)
        self._sampled = sampled

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = super().__call__(input_ids, scores, **kwargs)
        self._sampled(input_ids, done)
        return done


class _Ends:
    """Follows one sampling loop, and skips its middle steps.

    At the start of the second decode step, it changes the loop's ids, masks and cache in place, each in the order in
    which a step replaces them. All other tensors of the loop keep their lifetimes.
    """

    def __init__(
        self, prompt: Tensor, config: Any, model_config: Any, recorder: Recorder, *, scores_are_logits: bool
    ) -> None:
        self._prompt = known_value(prompt)
        self._prompt_length = prompt.shape[1]
        self._config = config
        self._recorder = recorder
        self._scores_are_logits = scores_are_logits
        self._token = _ordinary_token(config, model_config.get_text_config(decoder=True).vocab_size)
        self._end = end_of_sequence(config)
        between = config.max_length - self._prompt_length - 2 - last_steps(config.max_length)
        records_more = config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states)
        self._to_skip = 0 if records_more else max(between, 0)
        self._ids: Tensor | None = None
        self._model_kwargs: dict[str, Any] = {}
        self._vocabulary = 0
        self._skipped: dict[str, tuple[Tensor, ...]] = {}
        self._unworked: range = range(0)
        """The lengths of the KV cache in the skipped steps, whose work is not yet counted."""
        self._work: Mark = {}

    def watching(self, model: Any) -> AbstractContextManager[Any]:
        """Wraps two methods of the model that the loop calls, to read and change the loop's state."""
        update = model._update_model_kwargs_for_generation
        has_unfinished = model._has_unfinished_sequences

        def watched_update(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._vocabulary = outputs.logits.shape[-1]
            self._model_kwargs = update(outputs, *args, **kwargs)
            return self._model_kwargs

        def watched_head(*args: Any, **kwargs: Any) -> Any:
            if self._ids is not None:
                self._mark(self._ids)
                has_stepped = self._ids.shape[1] == self._prompt_length + 2
                if self._to_skip and has_stepped and _can_grow(self._model_kwargs.get("past_key_values")):
                    self._jump(update)
                    self._mark(self._ids)
            self._ids, self._model_kwargs = None, {}
            return has_unfinished(*args, **kwargs)

        return patch.multiple(
            model, _update_model_kwargs_for_generation=watched_update, _has_unfinished_sequences=watched_head
        )

    def sampled(self, ids: Tensor, done: Tensor) -> None:
        """Sets the values of the sampled tokens; no sequence stops before the maximum length."""
        self._ids = ids
        self._know_ids(ids)
        with real_tensors():
            know(done, torch.full(done.shape, ids.shape[1] >= self._config.max_length))

    def _mark(self, ids: Tensor) -> None:
        """Marks the start of a decode step; after the last one, counts the work of the skipped steps."""
        tokens, work, skipped = ids.shape[1], self._recorder.work, self._unworked
        self._recorder.ledger.mark(tokens)
        if skipped and tokens >= self._config.max_length:
            mean_length = (skipped[0] + skipped[-1]) / 2
            work.repeat(self._work, len(skipped), longest=tokens - 1, mean_length=mean_length)
        self._work = work.mark()

    def _jump(self, update: Callable[..., Any]) -> None:
        """Moves the loop's state from after the first decode step to before the last ones."""
        assert self._ids is not None
        skip, self._to_skip = self._to_skip, 0
        self._unworked = range(self._ids.shape[1], self._ids.shape[1] + skip)
        cache = self._model_kwargs.get("past_key_values")
        for layer in cache.layers if cache is not None else ():
            _grow(layer, skip)
        self._model_kwargs.update(update(ModelOutput(), self._model_kwargs, num_new_tokens=skip))
        rows = self._ids.shape[0]
        self._ids.set_(torch.cat([self._ids, self._ids.new_full((rows, skip), self._token)], dim=-1))
        self._know_ids(self._ids)
        for name in ("scores", "logits") if self._config.return_dict_in_generate else ():
            if not getattr(self._config, f"output_{name}"):
                continue
            if name == "logits" and self._scores_are_logits and "scores" in self._skipped:
                self._skipped[name] = self._skipped["scores"]
            else:  # float32, as in real decode steps
                self._skipped[name] = tuple(torch.empty(rows, self._vocabulary) for _ in range(skip))

    def _know_ids(self, ids: Tensor) -> None:
        if self._prompt is None:
            return
        with real_tensors():
            more = ids.shape[1] - self._prompt_length
            sampled = self._prompt.new_full((ids.shape[0], more), self._token)
            if ids.shape[1] >= self._config.max_length and more >= len(self._end):
                sampled[1:, more - len(self._end) :] = self._prompt.new_tensor(self._end)
            know(ids, torch.cat([self._prompt, sampled], dim=-1))

    def complete(self, result: Any) -> Any:
        """Inserts the scores and logits of the skipped steps."""
        for name, skipped in self._skipped.items():
            first, *last = getattr(result, name)
            result[name] = (first, *skipped, *last)
        self._skipped = {}
        return result


def _ordinary_token(config: Any, vocabulary: int) -> int:
    """Returns a token that is not special: preferably one that the rehearsal's tokenizer can decode."""
    special: set[Any] = set()
    for ids in (config.eos_token_id, config.pad_token_id, config.bos_token_id):
        special.update(ids if isinstance(ids, (list, tuple)) else [ids])
    candidates = (ORDINARY_TOKEN, *range(vocabulary // 2, vocabulary))
    token: int = next(token for token in candidates if token not in special)
    return token


def end_of_sequence(config: Any) -> list[int]:
    """Returns the last two tokens of a sequence that ends one token early; empty if no token ends a sequence."""
    ends, pad = config.eos_token_id, config.pad_token_id
    end = ends[0] if isinstance(ends, (list, tuple)) and ends else ends
    return [end, pad] if isinstance(end, int) and isinstance(pad, int) else []


def _can_grow(cache: Any) -> bool:
    if cache is None:
        return True
    return type(cache) in (cache_utils.DynamicCache, cache_utils.StaticCache) and all(
        type(layer) in _GROWABLE or not getattr(layer, "is_initialized", True) for layer in cache.layers
    )


def _grow(layer: Any, tokens: int) -> None:
    """Grows a cache layer as ``tokens`` decode steps would."""
    if (kind := type(layer)) not in _CONSTANT and not layer.is_initialized:
        return  # this layer uses another layer's keys and values
    if kind in _DYNAMIC:
        length = layer.keys.shape[-2] + tokens
        layer.keys = _longer(layer.keys, length)
        layer.values = _longer(layer.values, length)
    elif kind in _SLIDING:
        layer.cumulative_length += tokens
        # ``DynamicSlidingWindowLayer.update`` keeps a view of the last window - 1 tokens of the concatenated tensor.
        stored, seen = min(layer.cumulative_length, layer.sliding_window), layer.sliding_window - 1
        layer.keys = _longer(layer.keys, stored)[:, :, -seen:, :]
        layer.values = _longer(layer.values, stored)[:, :, -seen:, :]
    elif kind in _STATIC:
        layer.cumulative_length.add_(tokens)
    elif kind in _STATIC_SLIDING:
        layer.cumulative_length_int += tokens
        if layer.cumulative_length_int < layer.max_cache_len:
            layer.cumulative_length.add_(tokens)  # a full window is not counted further


def _longer(states: Tensor, length: int) -> Tensor:
    return states.new_empty((*states.shape[:-2], length, states.shape[-1]))


@contextmanager
def experts_as_on_cuda(model: Any) -> Iterator[None]:
    """Within the block, decode steps copy the chosen experts' weights for every token, as transformers does on devices
    other than the CPU (``generation/utils.py: _optimize_model_for_decode``)."""
    before = model.get_experts_implementation()
    after = {part: "batched_mm" if chosen == "grouped_mm" else chosen for part, chosen in before.items()}
    if after == before:
        yield
        return
    model.set_experts_implementation(after)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _tolist(tensor: Tensor) -> Any:
    """Replaces ``FakeTensor.tolist``: reads all values at once; one by one, a batch of completions takes seconds."""
    value = known_value(tensor)
    with real_tensors():
        if value is not None:
            return value.tolist()
        answer = 0.5 if tensor.is_floating_point() else tensor.dtype is not torch.bool
        return torch.full(tensor.shape, answer, dtype=tensor.dtype).tolist()
