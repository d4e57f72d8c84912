"""A generation's two ends on fake tensors, and what is derived of the steps between, against all steps on real ones."""

import itertools
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from real_run import with_lora
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationConfig

from autotrain_mem.allocator.settings import parse_settings
from autotrain_mem.estimator import decode_steps
from autotrain_mem.estimator.replay import DeviceCapacity, Replay, reserve
from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, stub_tokenizer
from autotrain_mem.rehearsal import generation
from autotrain_mem.rehearsal.cuda.rules import grouped_experts_of_bfloat16
from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import KIB, MIB
from autotrain_mem.types import Phase, Trace

EOS, PAD, BOS = 1, 2, 0


def config(family: str) -> Any:
    if family != "qwen3_next":
        return tiny_config(family)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    more = {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
    return transformers.Qwen3NextConfig(**shape, **heads, **linear, **experts, **more)


WITHOUT_PROOFS = parse_settings("max_split_size_mb:20")
"""With a limit on splits, a replay leaves no event out."""


class Run:
    """One recorded generation, with the steps that were skipped."""

    def __init__(self, trace: Trace, output: Any) -> None:
        self.trace = trace
        self.output = output
        self.moves: list[int] = []
        room = DeviceCapacity(capacity_bytes=None, settings=WITHOUT_PROOFS)
        Replay(trace, room, grows=False, on_action=self._record).run()
        live = [*itertools.accumulate(self.moves)]
        starts = {phase: at for at, phase in trace.phase_starts}
        span = slice(starts[Phase.GENERATE], starts[Phase.SCORE] - len(trace.events) or None)
        self.events = [*zip(self.moves, live, strict=True)][span]
        """(bytes, negative if freed; live bytes after it) of everything within the generation."""

    def _record(self, action: str, address: int, size_bytes: int, stream: int) -> None:
        sign = {"alloc": 1, "free_requested": -1}.get(action)
        if sign is not None:
            self.moves.append(sign * size_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(live for _, live in self.events)

    @property
    def sequences(self) -> Any:
        return self.output if isinstance(self.output, torch.Tensor) else self.output.sequences


def generate(
    model: Any, recorder: Recorder, batch: dict[str, torch.Tensor], tokens: int, autocast: bool, **options: Any
) -> Run:
    """Always to full length: a real model may draw an end."""
    full = {"max_new_tokens": tokens, "min_new_tokens": tokens, "eos_token_id": EOS, "pad_token_id": PAD}
    config = GenerationConfig(**{**full, **options})
    recorder.adopt_model(model)
    with recorder.recording(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        recorder.adopt_batch(batch.values())
        recorder.enter_phase(Phase.GENERATE)
        output = model.generate(**batch, generation_config=config)
        recorder.enter_phase(Phase.SCORE)
    return Run(recorder.trace(), output)


def prompts(rows: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
    ids, mask = torch.full((rows, length), 5), torch.ones(rows, length, dtype=torch.long)
    if padded:
        ids[-1, :2], mask[-1, :2] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def run(
    family: str, rows: int, length: int, tokens: int, *, fake: bool, dtype: str = "float32", adapter: bool = False,
    autocast: bool = False, padded: bool = True, **options: Any,
) -> Run:  # fmt: skip
    """A generation by its two ends on fake tensors, or all of it on real ones."""
    torch.manual_seed(0)
    batch, recorder = prompts(rows, length, padded), Recorder()
    with ExitStack() as stack:
        if fake:
            values = KnownValues(stack.enter_context(fake_tensors()))
            recorder, batch = Recorder(values.run), values.arrive(batch)
            stack.enter_context(generation_by_its_ends(recorder))
            stack.enter_context(grouped_experts_of_bfloat16())
        with torch.device("meta") if fake else nullcontext():
            model = transformers.AutoModelForCausalLM.from_config(config(family), dtype=getattr(torch, dtype))
        if fake:
            model.tie_weights()
            model = materialize(model)
        model = with_lora(model.train(), r=4) if adapter else model.train()
        return generate(model, recorder, batch, tokens, autocast, **options)


really, rehearsed = partial(run, fake=False), partial(run, fake=True)


def common_ends(one: Run, other: Run) -> tuple[int, int]:
    """How many events the two have in common from the start, and from the end: running totals included."""

    def alike(first: Any, second: Any) -> int:
        return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(other.events))

    return alike(one.events, other.events), alike(reversed(one.events), reversed(other.events))


def large(run: Run) -> Counter[int]:
    """Births and deaths by size, of 4 KiB or more: masks and token ids are smaller."""
    return Counter(size for size, _ in run.events if abs(size) >= 4 * KIB)


def worked(run: Run) -> tuple[float, float, float]:
    """FLOPs, bytes and kernels of a generation."""
    works = run.trace.work.work
    return (
        sum(work.flops * work.count for work in works),
        sum((work.bytes + work.fixed_bytes) * work.count for work in works),
        sum(work.launches * work.count for work in works),
    )


KEPT = ("return_dict_in_generate", "output_scores", "output_logits")
HOW = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "scores": {"do_sample": True, "top_k": 0, **dict.fromkeys(KEPT, True)},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "static": {"do_sample": True, "cache_implementation": "static"},
    "without-cache": {"do_sample": True, "use_cache": False},
}

OF_CACHES = ("sampled", "static", "without-cache")
"""What meets each family's own cache; the rest is of what is made of the logits, which is the same for all."""


@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen2", how) for how in HOW] + [(family, how) for family in ("gpt2", "gemma3") for how in OF_CACHES],
)
def test_the_two_ends_allocate_what_all_steps_allocate(family: str, how: str) -> None:
    """Beyond the sliding window, 30 tokens; the first and the last step are alike event by event, totals included.

    Between them is what there was: but where copies of the cache (GPT-2's) or, without one, everything has its step's
    own length, and before a static window is full, when nothing needs to move.
    """
    real, fake = (run(family, 3, 6, 30, **HOW[how]) for run in (really, rehearsed))
    assert fake.peak_bytes == real.peak_bytes
    first, last = common_ends(real, fake)
    assert first > 0
    assert last > 0
    if how not in ("without-cache", "static") and family != "gpt2":
        assert large(fake) == large(real)
    assert len(fake.events) > 0.95 * len(real.events)
    if how not in ("without-cache", "static"):
        # Steps that are not run differ a little: known values are made beside, and windows grow before they are full.
        assert worked(fake) == pytest.approx(worked(real), rel=0.05)


BF16 = {"dtype": "bfloat16"}
PEAKS: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    ("llama", (2, 8, 20), {"adapter": True, "autocast": True}),
    ("llama", (2, 8, 20), {**BF16, "adapter": True, "padded": False}),
    ("gemma3", (2, 8, 20), {"adapter": True, "autocast": True}),
    ("gemma3", (2, 8, 20), BF16),
    ("gemma3", (1, 4, 1), {}),
    ("gemma3", (2, 40, 3), {}),
    ("gemma3", (4, 5, 50), {}),
    ("qwen3_next", (2, 6, 20), {}),  # linear attention keeps a state that does not grow
]


@pytest.mark.parametrize(("family", "sizes", "kind"), PEAKS, ids=str)
def test_the_peak_is_that_of_all_steps_whatever_weights_and_sizes_are(
    family: str, sizes: tuple[int, int, int], kind: dict[str, Any]
) -> None:
    rows, length, tokens = sizes
    real, fake = (run(family, rows, length, tokens, do_sample=True, **kind) for run in (really, rehearsed))
    assert fake.peak_bytes == real.peak_bytes
    assert fake.sequences.shape == real.sequences.shape == (rows, length + tokens)


def test_a_long_generation_takes_no_more_steps_than_a_short_one() -> None:
    short, long = (rehearsed("qwen2", 2, 8, tokens) for tokens in (10, 202))
    assert long.trace.operators == short.trace.operators


def test_what_is_reserved_is_that_of_all_steps_while_the_cache_outgrows_the_small_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = rehearsed("qwen2", 64, 100, 60).trace
    monkeypatch.setattr(generation, "last_steps", lambda length: length)
    every = rehearsed("qwen2", 64, 100, 60).trace
    assert some.operators < every.operators / 5
    for grows in (False, True):
        ours, theirs = (reserve(trace, DeviceCapacity(capacity_bytes=None), grows=grows) for trace in (some, every))
        assert ours == theirs
        assert theirs.peak_reserved_bytes > 20 * MIB


def test_steps_are_left_out_of_a_long_generation_but_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "MOST_EVENTS", 100)
    real, fake = (run("qwen2", 2, 6, 60, do_sample=True) for run in (really, rehearsed))
    assert len(fake.events) < 4000 < len(real.events)
    assert fake.peak_bytes == real.peak_bytes


def test_a_cache_of_an_unknown_kind_is_rehearsed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_GROWABLE", frozenset())
    real, fake = (run("qwen2", 2, 6, 12, do_sample=True) for run in (really, rehearsed))
    assert fake.events == real.events


def completions(run: Run, prompt: int) -> list[list[int]]:
    assert isinstance(run.sequences, FakeTensor)
    with generation_by_its_ends(Recorder()):
        return [row[prompt:] for row in run.sequences.tolist()]


def test_after_the_known_prompt_the_first_completion_has_full_length_and_the_others_end_a_token_early() -> None:
    rows = completions(rehearsed("qwen2", 3, 8, 20, do_sample=True), 0)
    assert [row[:8] for row in rows] == prompts(3, 8, padded=True)["input_ids"].tolist()
    first, *others = (row[8:] for row in rows)
    assert len(first) == 20
    assert not {EOS, PAD, BOS} & set(first)
    assert others == [[*first[:18], EOS, PAD]] * 2
    assert stub_tokenizer().decode(first).split() == [f"t{ORDINARY_TOKEN}"] * 20, "what a rehearsal's tokenizer reads"


@pytest.mark.parametrize(
    ("eos", "pad", "end"), [(None, PAD, []), (EOS, None, []), (7, PAD, [7, PAD]), ([8, 9], 3, [8, 3])]
)
def test_a_sequence_ends_early_where_a_token_ends_one_and_another_pads(eos: Any, pad: Any, end: list[int]) -> None:
    """PPO without a stop token has none that ends one."""
    assert generation.end_of_sequence(GenerationConfig(eos_token_id=eos, pad_token_id=pad)) == end


@pytest.mark.parametrize(("special", "expected"), [(256, ORDINARY_TOKEN), (ORDINARY_TOKEN, 256), ([5, 256, 257], 259)])
def test_a_special_token_is_avoided(special: Any, expected: int) -> None:
    token = generation._ordinary_token(GenerationConfig(eos_token_id=special, pad_token_id=258), 512)
    assert token == expected


def test_decoding_copies_the_chosen_experts_for_every_token_as_on_cuda() -> None:
    rows, chosen, expert_bytes = 3, 2, 2 * 32 * 64 * 2
    fake = rehearsed("qwen3_moe", rows, 6, 20, dtype="bfloat16")
    assert rows * chosen * expert_bytes in [size for size, _ in fake.events]


def test_on_real_tensors_generation_is_what_it_was() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config("qwen2"))
    outputs = []
    for context in (nullcontext(), generation_by_its_ends(Recorder())):
        with context:
            outputs.append(model.generate(**prompts(2, 8, padded=True), max_new_tokens=12, do_sample=False))
    assert torch.equal(*outputs)


def test_beam_search_is_refused() -> None:
    with pytest.raises(UsageError, match="num_beams"):
        rehearsed("qwen2", 1, 4, 8, num_beams=2)
