"""A generation's two ends on fake tensors, and what is written of the steps between, against all steps on real ones."""

import itertools
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from real_run import peak, with_lora
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationConfig

from autotrain_mem.methods.worst_case_text import ORDINARY_TOKEN, stub_tokenizer
from autotrain_mem.rehearsal import generation
from autotrain_mem.rehearsal.cuda.rules import grouped_experts_of_bfloat16
from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
from autotrain_mem.rehearsal.generation import generation_by_its_ends
from autotrain_mem.rehearsal.known_values import KnownValues
from autotrain_mem.rehearsal.trace import skipped_decode_steps
from autotrain_mem.rehearsal.trace.ledger import Ledger
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.trace.skipped_decode_steps import Budget, GrowingState, Jump, write_skipped_steps
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import KIB
from autotrain_mem.types import Owner, Phase, Trace

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


class Run:
    """One recorded generation."""

    def __init__(self, trace: Trace, output: Any) -> None:
        self.trace = trace
        self.output = output
        self.events: list[tuple[int, int, int]] = []
        """(+1 or -1, bytes, live bytes after it) of everything within the generation."""
        live = 0
        for phase, sign, block in trace.walk():
            live += sign * block.size_bytes
            if phase is Phase.GENERATE:
                self.events.append((sign, block.size_bytes, live))

    @property
    def peak_bytes(self) -> int:
        return max(live for _, _, live in self.events)

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


def large(run: Run) -> Counter[tuple[int, int]]:
    """Births and deaths by size, of 4 KiB or more: masks and token ids are smaller."""
    return Counter((sign, size) for sign, size, _ in run.events if size >= 4 * KIB)


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
    short, long = (rehearsed("qwen2", 2, 8, tokens) for tokens in (10, 200))
    assert long.trace.operators == short.trace.operators


def test_steps_are_left_out_of_a_long_generation_but_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "Budget", lambda layers: skipped_decode_steps.Budget(layers=layers, events=4000))
    real, fake = (run("qwen2", 2, 6, 60, do_sample=True) for run in (really, rehearsed))
    assert len(fake.events) < 4000 < len(real.events)
    assert fake.peak_bytes == real.peak_bytes


def test_a_cache_of_an_unknown_kind_is_rehearsed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_GROWABLE", frozenset())
    real, fake = (run("qwen2", 2, 6, 12, do_sample=True) for run in (really, rehearsed))
    assert fake.events == real.events


def completions(run: Run, prompt: int) -> list[list[int]]:
    assert isinstance(run.sequences, FakeTensor)
    with generation_by_its_ends():
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
    assert rows * chosen * expert_bytes in [size for sign, size, _ in fake.events if sign > 0]


def test_on_real_tensors_generation_is_what_it_was() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config("qwen2"))
    outputs = []
    for context in (nullcontext, generation_by_its_ends):
        with context():
            outputs.append(model.generate(**prompts(2, 8, padded=True), max_new_tokens=12, do_sample=False))
    assert torch.equal(*outputs)


def test_beam_search_is_refused() -> None:
    with pytest.raises(UsageError, match="num_beams"):
        rehearsed("qwen2", 1, 4, 8, num_beams=2)


TOKEN = 100
PREFILL = 3
TEMPORARY, LOGITS, SCORES, LEFT = 7, 5000, 9, 11


class Generation:
    """A cache of one tensor, logits that live into the next step, permanent scores, and a block of the prefill."""

    def __init__(self, skipped: int, *, scores: bool = False) -> None:
        self.ledger = Ledger()
        self.skipped = skipped
        self.scores = scores
        self._born("weights", 1)
        self.ledger.enter_phase(Phase.GENERATE)
        self.cache = self._born("cache", PREFILL * TOKEN)
        self.logits = self._born("logits", LOGITS)
        self.left = self._born("left", LEFT)

    def _born(self, name: str, size_bytes: int) -> int:
        block = self.ledger.write_birth(size_bytes, name)
        self.ledger.describe(block, Owner.KV_CACHE if name == "cache" else Owner.OTHER, name)
        return block

    def jump_and_step(self, events: int = 1_000_000, budget: Budget | None = None) -> Trace:
        ledger, before = self.ledger, self.cache
        start = len(ledger.events)
        tool = self._born("tool", 13)
        ahead = self._born("cache", (PREFILL + self.skipped) * TOKEN)
        ledger.end(before)
        ledger.end(tool)
        for _ in range(self.skipped * self.scores):
            self._born("scores", SCORES)
        stop = len(ledger.events)
        after = self.step(ahead, (PREFILL + self.skipped + 1) * TOKEN)
        lengths = tuple(range(PREFILL + 1, PREFILL + self.skipped + 1))
        state = GrowingState(before_jump=before, after_jump=ahead, after_last=after, lengths=lengths)
        jump = Jump(start=start, stop=stop, states=(state,), steps=self.skipped)
        write_skipped_steps(ledger, jump, budget or Budget(layers=1, events=2 * events))
        ledger.enter_phase(Phase.SCORE)
        ledger.end(self.logits)
        return ledger.trace()

    def step(self, shorter: int, size_bytes: int) -> int:
        """Runs a step: a temporary, the longer cache beside the shorter, new logits beside the old."""
        ledger = self.ledger
        temporary = self._born("temporary", TEMPORARY)
        longer = self._born("cache", size_bytes)
        ledger.end(shorter)
        if self.left >= 0:
            ledger.end(self.left)
            self.left = -1
        ledger.end(temporary)
        logits = self._born("logits", LOGITS)
        ledger.end(self.logits)
        self.logits = logits
        if self.scores:
            self._born("scores", SCORES)
        return longer

    def all_steps(self) -> Trace:
        for step in range(self.skipped + 1):
            self.cache = self.step(self.cache, (PREFILL + step + 1) * TOKEN)
        self.ledger.enter_phase(Phase.SCORE)
        self.ledger.end(self.logits)
        return self.ledger.trace()


def told(trace: Trace) -> list[tuple[str, int, str]]:
    return [(phase.value, sign * block.size_bytes, block.module) for phase, sign, block in trace.walk()]


def assert_lives(trace: Trace) -> None:
    """Blocks are allocated only while free, and freed only while allocated."""
    alive: set[int] = set()
    for event in trace.events:
        assert (abs(event) in alive) is (event < 0)
        alive ^= {abs(event)}


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("skipped", [1, 2, 3, 10, 11])
def test_with_room_for_all_the_record_is_that_of_all_steps(skipped: int, scores: bool) -> None:
    written = Generation(skipped, scores=scores).jump_and_step()
    assert told(written) == told(Generation(skipped, scores=scores).all_steps())
    assert_lives(written)


def test_without_room_for_whole_steps_the_cache_still_grows_step_by_step_or_in_longer_strides() -> None:
    for skipped, stride in ((20, 1), (100, 10)):
        events = 2 * skipped_decode_steps.GROWTH_OF_A_LAYER * skipped // stride
        written = Generation(skipped).jump_and_step(events)
        grown = [-size // TOKEN for _, size, name in told(written) if name == "cache" and size < 0]
        assert grown[-1] == PREFILL + skipped
        assert {later - earlier for earlier, later in itertools.pairwise(grown)} == {stride}
        assert len([name for _, size, name in told(written) if name == "temporary" and size > 0]) < skipped // stride


@settings(max_examples=60, deadline=None)
@given(skipped=st.integers(1, 60), events=st.integers(0, 8000), scores=st.booleans())
def test_however_much_room_there_is_lives_are_whole_and_the_peak_is_that_of_all_steps(
    skipped: int, events: int, scores: bool
) -> None:
    written = Generation(skipped, scores=scores).jump_and_step(events)
    assert_lives(written)
    assert peak(written) == peak(Generation(skipped, scores=scores).all_steps())


def test_a_phase_and_a_use_of_a_stream_that_come_later_move_along() -> None:
    generation = Generation(10)
    ledger = generation.ledger
    trace = generation.jump_and_step()
    ledger.use_on_stream(0, 1)
    ledger.end(0)
    (use,) = ledger.trace().stream_uses
    assert ledger.trace().events[use.event] == -1
    assert trace.phase_starts[-1] == (len(trace.events) - 1, Phase.SCORE)
