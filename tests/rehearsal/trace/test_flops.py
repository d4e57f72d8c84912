"""The FLOPs, bytes and kernels of real tensors are counted, and those of a chunked loss assigned to its chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer import sft_trainer

from autotrain_mem.rehearsal.cuda.attention import cuda_attention
from autotrain_mem.rehearsal.rehearse import trainer_spec
from autotrain_mem.rehearsal.trace.loss_chunks import marked_chunks
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Job, Kind, Knobs, Phase, Work

TOKENS, INPUTS, OUTPUTS = 12, 32, 48
FLOAT = 4


@contextmanager
def recorded(phase: Phase = Phase.FORWARD, model: torch.nn.Module | None = None) -> Iterator[Recorder]:
    recorder = Recorder()
    if model is not None:
        recorder.adopt_model(model)
    with recorder.recording():
        recorder.enter_phase(phase)
        yield recorder


def found(recorder: Recorder) -> tuple[Work, ...]:
    recorder.work.optimizer_stepped()
    return recorder.work.workload().work


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(INPUTS, OUTPUTS, bias=False)


def test_only_the_weights_of_a_linear_layer_are_fixed_bytes() -> None:
    layer, rows = linear(), torch.ones(TOKENS, INPUTS)
    with recorded(model=layer) as recorder:
        layer(rows)
        (product,) = (work for work in found(recorder) if work.flops)
    with recorded(Phase.BACKWARD, layer) as recorder:
        torch.mm(torch.ones(OUTPUTS, TOKENS), rows)
        (gradient,) = (work for work in found(recorder) if work.flops)
    assert gradient.fixed_bytes == INPUTS * OUTPUTS * FLOAT
    assert product.flops == 2 * TOKENS * INPUTS * OUTPUTS
    assert product.bytes == TOKENS * (INPUTS + OUTPUTS) * FLOAT
    assert product.fixed_bytes == INPUTS * OUTPUTS * FLOAT
    assert (product.kind, product.dtype, product.launches) == (Kind.MATMUL, "float32", 1)


def test_bytes_of_weights_are_fixed_whatever_their_shape() -> None:
    flat = torch.ones(TOKENS)
    with recorded() as recorder:
        flat.clone()
        with recorder.work.of_weights():
            flat.clone()
        sizes = [(work.bytes, work.fixed_bytes) for work in found(recorder)]
    assert sorted(sizes) == [(0, 2 * TOKENS * FLOAT), (2 * TOKENS * FLOAT, 0)]


def test_flops_are_those_of_torchs_own_counter() -> None:
    model = torch.nn.Sequential(linear(), torch.nn.GELU(), torch.nn.Linear(OUTPUTS, INPUTS))
    rows = torch.ones(3, TOKENS, INPUTS)
    with FlopCounterMode(display=False) as counter:
        model(rows).sum().backward()
    with recorded(model=model) as recorder:
        loss = model(rows).sum()
        recorder.enter_phase(Phase.BACKWARD)
        loss.backward()
        works = found(recorder)
    assert sum(work.flops * work.count for work in works) == counter.get_total_flops()
    assert {work.phase for work in works} == {Phase.FORWARD, Phase.BACKWARD}


def viewing() -> Callable[[], Any]:
    tensor = torch.ones(TOKENS, INPUTS)
    return lambda: (tensor.view(-1).unsqueeze(0).expand(4, -1).t(), tensor[2:, ::2], tensor.split(4), torch.empty(9))


def listed(chunks: int) -> Callable[[], Any]:
    weights = [torch.empty(65536 * chunks // 4) for _ in range(4)]
    return lambda: torch._foreach_mul_(weights, 0.5)


COSTS: dict[str, tuple[Callable[[], Callable[[], Any]], int, int]] = {
    "views and allocations cost nothing": (viewing, 0, 0),
    "a copy does not read what it overwrites": (
        lambda: partial(torch.empty(TOKENS).copy_, torch.empty(TOKENS, dtype=torch.float64)),
        TOKENS * (FLOAT + 8),
        1,
    ),
    "an embedding reads the rows that it returns": (
        lambda: partial(torch.nn.Embedding(50_000, INPUTS), torch.arange(TOKENS)),
        2 * TOKENS * INPUTS * FLOAT + TOKENS * 8,
        1,
    ),
    "an expanded tensor has the bytes of its storage": (
        lambda: torch.empty(1, INPUTS).expand(1000, INPUTS).sum,
        (INPUTS + 1) * FLOAT,
        1,
    ),
    "a list of tensors takes launches of 320 chunks": (lambda: listed(400), 2 * 65536 * 400 * FLOAT, 2),
}


@pytest.mark.parametrize("name", COSTS)
def test_an_operator_moves_what_its_kernel_moves(name: str) -> None:
    prepare, moved_bytes, launches = COSTS[name]
    step = prepare()
    with recorded() as recorder:
        step()
        works = found(recorder)
    assert len(works) == (launches > 0)
    assert sum(work.bytes + work.fixed_bytes for work in works) == moved_bytes
    assert sum(work.launches for work in works) == launches


def test_fused_attention_counts_the_flops_that_a_causal_mask_leaves() -> None:
    query, key = torch.empty(2, 8, 64, 16), torch.empty(2, 4, 64, 16)
    with cuda_attention((8, 0)), recorded() as recorder:
        half = [tensor.bfloat16().requires_grad_() for tensor in (query, key, key)]
        out = torch.nn.functional.scaled_dot_product_attention(*half, is_causal=True, enable_gqa=True)
        recorder.enter_phase(Phase.BACKWARD)
        out.backward(torch.empty_like(out))
        forward, backward = (work for work in found(recorder) if work.kind is Kind.ATTENTION)
    scores = 2 * 8 * 64 * 64 * 16
    assert forward.flops == 2 * 2 * scores // 2
    assert backward.flops == 5 * 2 * scores // 2
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)


@pytest.mark.parametrize("phase", [Phase.LOAD, Phase.EVALUATE, Phase.SAVE])
def test_only_phases_of_every_step_are_counted(phase: Phase) -> None:
    with recorded(phase) as recorder:
        torch.ones(3)
        assert found(recorder) == ()


def a_step(recorder: Recorder, *, makes_state: bool) -> None:
    for _ in range(2):
        recorder.enter_phase(Phase.FORWARD)
        torch.ones(TOKENS)
        recorder.enter_phase(Phase.BACKWARD)
        torch.ones(TOKENS)
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
    if makes_state:
        torch.zeros(1000)
    recorder.work.optimizer_stepped()


@pytest.mark.parametrize("after", [Phase.EVALUATE, Phase.FORWARD], ids=lambda phase: phase.value)
def test_the_last_whole_step_counts_without_what_follows(after: Phase) -> None:
    """The first step creates the optimizer's state; PPO computes statistics after a step, in a forward phase."""
    with recorded(Phase.LOAD) as recorder:
        a_step(recorder, makes_state=True)
        a_step(recorder, makes_state=False)
        recorder.enter_phase(after)
        torch.ones(TOKENS)
    workload = recorder.work.workload()
    assert (workload.micro_steps, workload.optimizer_steps) == (2, 1)
    assert {work.phase: work.count for work in workload.work} == {Phase.FORWARD: 2.0, Phase.BACKWARD: 2.0}


def test_a_trainers_spec_has_the_micro_steps_per_generation(tmp_path: Path) -> None:
    for method, arguments, passes, micro_steps in (
        ("grpo", {}, 1, 4),
        ("grpo", {"num_iterations": 2}, 1, 8),
        ("grpo", {"steps_per_generation": 12}, 1, 12),
        ("rloo", {}, 1, 4),
        ("ppo", {}, 4, 16),
        ("ppo", {"num_ppo_epochs": 2}, 2, 8),
    ):
        length = {"response_length": 8} if method == "ppo" else {"max_completion_length": 8, "num_generations": 4}
        small = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": False}
        knobs = Knobs(**small, **length, use_peft=False, dtype="float32", optim="adamw_torch")
        job = Job(method=method, model="unused", dataset=None, arguments=arguments)
        spec = trainer_spec(job, knobs, 8, str(tmp_path))
        assert (spec.passes, spec.micro_steps_per_generation) == (passes, micro_steps), method


def test_skipped_decode_steps_count_with_the_mean_length_of_the_cache() -> None:
    longest = 11
    with recorded(Phase.GENERATE) as recorder:
        torch.ones(5, longest).mul_(2.0)
        mark = recorder.work.mark()
        cache, logits = torch.empty(5, longest), torch.empty(5, 99)
        cache.mul_(2.0)
        logits.mul_(2.0)
        recorder.work.repeat(mark, 4, longest=longest, mean_length=5.5)
        works = found(recorder)
    moved = sum(work.bytes * work.count for work in works)
    prefill, step_of_cache, step_of_logits = 3 * 5 * 11 * FLOAT, 2 * 5 * 11 * FLOAT, 2 * 5 * 99 * FLOAT
    assert moved == prefill + step_of_cache * (1 + 4 / 2) + step_of_logits * 5


WIDTH, VOCABULARY, CHUNK = 6, 40, 4


def work_of(chunks: int, *, marked: bool = True) -> list[Work]:
    """Returns the work of a layer and TRL's loss on ``chunks`` chunks, forward and backward."""
    recorder, layer = Recorder(), torch.nn.Linear(WIDTH, WIDTH)
    head = torch.nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
    labels = torch.zeros(1, chunks * CHUNK, dtype=torch.long)
    for weight in (*layer.parameters(), head):
        recorder.work.know_weight(weight)
    with recorder.recording(), marked_chunks(marked):
        recorder.enter_phase(Phase.FORWARD)
        hidden = layer(torch.ones(1, chunks * CHUNK, WIDTH))
        loss = sft_trainer._chunked_cross_entropy_loss(hidden, head, CHUNK, shift_labels=labels)[0]
        recorder.enter_phase(Phase.BACKWARD)
        loss.backward()
        recorder.work.optimizer_stepped()
    return list(recorder.work.workload().work)


def products(work: list[Work], *, of_chunk: bool) -> float:
    return sum(each.count for each in work if each.flops and each.of_chunk is of_chunk)


@pytest.mark.skipif(not hasattr(sft_trainer, "_chunk"), reason="this TRL's loss has one chunk")
@pytest.mark.parametrize("chunks", [2, 7])
def test_each_chunk_computes_its_logits_twice_and_two_gradients(chunks: int) -> None:
    work = work_of(chunks)
    assert products(work, of_chunk=True) == 4 * chunks
    assert products(work, of_chunk=False) == 2, "the layer's own product, and the gradient of its weight"
    heads = [each for each in work if each.of_chunk and each.flops and each.phase is Phase.FORWARD]
    assert [each.fixed_bytes for each in heads] == [4 * VOCABULARY * WIDTH]
    assert not any(each.of_chunk for each in work_of(chunks, marked=False))
