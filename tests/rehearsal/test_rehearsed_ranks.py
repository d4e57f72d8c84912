"""A rehearsed process of several is the real one that talks to others through gloo, and is checked; ring attention of
processes that share the tokens of a row computes what attention of the whole row does.

``scripts/rank_parity`` compares many more, all methods among them. Without vLLM installed, TRL's own
VLLMGeneration runs against its stand-ins.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import real_run
import torch
from accelerate import Accelerator, accelerator
from real_run import Case, Folder, case, moves_in_order, peak, peaks, rehearsed, trained_by_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from trace_reading import sizes
from trl.generation.vllm_generation import VLLMGeneration

from autotrain_mem.rehearsal import rehearse, vllm_stub
from autotrain_mem.rehearsal.ranks.fsdp import Chunks
from autotrain_mem.rehearsal.ranks.recording import RankRecorder
from autotrain_mem.rehearsal.ranks.zero_offload import HostAdam
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.support.errors import RehearsalError
from autotrain_mem.types import CACHE_EMPTIED, Kind, Owner, Phase

SMALL = 512
"""Bytes up to which blocks are told apart: scalars of metrics, which c10d boxes anew as it likes."""

OF_4_BITS: dict[str, object] = {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16"}
ON_HOST: dict[str, object] = {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
CONFIG = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
}
RANKS: list[tuple[str, dict[str, object]]] = [
    ("sft", {"sharding": "ddp", "use_peft": True}),
    ("sft", {**OF_4_BITS, "sharding": "fsdp2"}),
    ("sft", {**OF_4_BITS, "sharding": "fsdp2", "use_bnb_nested_quant": True, "fsdp_offload_params": True}),
    ("sft", {"sharding": "fsdp2", "cp_size": 2, "fsdp_offload_params": True}),
    ("sft", {"sharding": "zero2", "offload_optimizer_device": "cpu"}),
    ("sft", {"sharding": "zero3", "sp_size": 2, "use_peft": True}),
    ("sft", {"sharding": "zero3", "processes": 1, **ON_HOST, "deepspeed": CONFIG}),
]


def ranked(method: str, folder: Path, **knobs: object) -> Case:
    given = {name: knobs.pop(name) for name in ("deepspeed",) if name in knobs}
    return case(method, folder, given, **{"processes": 2, **knobs})


@pytest.mark.parametrize(("method", "knobs"), RANKS)
def test_a_rehearsed_rank_is_real(method: str, knobs: dict[str, object], qwen: Path, tmp_path: Path) -> None:
    one = ranked(method, qwen, **knobs)
    real, *_ = trained_by_ranks(one, tmp_path)
    fake = rehearsed(one)
    real_run.assert_births_in_order(fake, real, SMALL)
    assert (fake.unpinned_host_bytes, fake.pinned_host_bytes) == (real.unpinned_host_bytes, real.pinned_host_bytes)
    assert (Kind.COLLECTIVE in {work.kind for work in fake.work.work}) is (one.knobs.processes > 1)
    # Now and then gloo's own threads let go of what was gathered a little later.
    assert max(peaks(fake).values()) == pytest.approx(max(peaks(real).values()), rel=0.005)


def test_only_the_trained_model_waits_on_the_host_for_its_shards() -> None:
    for role, size_bytes in (("", 0), ("teacher_model", 10 * 30 * 4)):
        with FakeTensorMode():
            recorder = RankRecorder()
            recorder.shards = True
            recorder.adopt_model(torch.nn.Linear(10, 30, bias=False), role)
            assert peak(recorder.trace(), Owner.WEIGHTS) == size_bytes


def test_a_shard_is_its_part_of_weights_and_state(qwen: Path) -> None:
    sets = ({"processes": 1, "sharding": None}, {"processes": 4, "sharding": "fsdp2"})
    alone, of_four = (rehearsed(ranked("sft", qwen, **each)) for each in sets)
    for owner in (Owner.WEIGHTS, Owner.OPTIMIZER_STATE):
        whole, part = (max(peaks(trace, owner).values()) for trace in (alone, of_four))
        assert part == pytest.approx(whole / 4, rel=0.02)
    assert any(block.owner is Owner.GATHERED_WEIGHTS for block in of_four.blocks)
    assert {work.kind for work in of_four.work.work} >= {Kind.COLLECTIVE}
    assert Kind.COLLECTIVE not in {work.kind for work in alone.work.work}


def test_a_stage_of_zero_divides_what_it_says(qwen: Path) -> None:
    folder = qwen
    stages = {
        stage: rehearsed(ranked("sft", folder, gradient_accumulation_steps=1, sharding=f"zero{stage}"))
        for stage in (1, 2, 3)
    }
    state = {stage: max(peaks(trace, Owner.OPTIMIZER_STATE).values()) for stage, trace in stages.items()}
    weights = {stage: trace.trained.parameters for stage, trace in stages.items() if trace.trained}
    for stage in stages:  # AdamW's two moments and the weights that it steps on, in float32, of half of the model
        assert state[stage] == pytest.approx(weights[stage] * 12 / 2, rel=0.02)
    held = {stage: max(peaks(trace, Owner.WEIGHTS).values()) for stage, trace in stages.items()}
    assert held[1] == held[2]
    assert held[3] < 0.6 * held[2]


def test_what_zero_offloads_is_not_on_the_device(qwen: Path) -> None:
    trace = rehearsed(ranked("sft", qwen, sharding="zero2", offload_optimizer_device="cpu"))
    assert not [block for block in trace.blocks if block.owner is Owner.OPTIMIZER_STATE and block.size_bytes > SMALL]
    assert trace.trained is not None
    shard = trace.trained.parameters / 2
    assert trace.unpinned_host_bytes == pytest.approx(8 * shard, rel=0.001), "Adam's two moments"
    assert trace.pinned_host_bytes >= (4 + 4 + 4) * shard, "the weights, gradients to step with, those added up"


def test_shared_tokens_are_a_part_of_the_work_and_go_around(qwen: Path) -> None:
    ways = {size: ranked("sft", qwen, processes=4, sharding="fsdp2", cp_size=size) for size in (1, 4)}
    works = {size: rehearsed(one).work.work for size, one in ways.items()}
    flops = {
        kind: [sum(each.flops * each.count for each in work if each.kind is kind) for work in works.values()]
        for kind in (Kind.MATMUL, Kind.ATTENTION)
    }
    assert flops[Kind.MATMUL][1] == pytest.approx(flops[Kind.MATMUL][0] / 4, rel=0.1)
    # Padded rows have a mask, with which a kernel computes all scores; ring attention skips what is ahead.
    assert flops[Kind.ATTENTION][1] == pytest.approx(flops[Kind.ATTENTION][0] / 8, rel=0.1)
    sent = {
        size: [each for each in work if each.kind is Kind.COLLECTIVE and each.bytes] for size, work in works.items()
    }
    assert sent[4], "keys and values, which grow with the tokens"
    assert not sent[1]


def test_rows_made_for_one_process_are_those_made_for_all(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ranked("grpo", qwen, processes=3, sharding="ddp", gradient_accumulation_steps=1)
    made = rehearsed(one)
    monkeypatch.setattr(rehearse, "PROCESSES_WITH_ROWS", 1)
    monkeypatch.setattr(real_run, "_TRACES", {})
    repeated = rehearsed(one)
    assert repeated is not made
    assert moves_in_order(repeated, 0) == moves_in_order(made, 0)
    assert repeated.work == made.work


@pytest.mark.parametrize("rows", [0, 1, 5, 7, 8, 17])
def test_parts_made_when_asked_for_are_those_of_torch(rows: int) -> None:
    tensor, count = torch.arange(2 * rows).view(rows, 2), 8
    ours, theirs = Chunks(tensor, count, 0), _chunk_with_empty(tensor, count, 0)
    for at, part in enumerate(theirs):
        assert ours[at].tolist() == part.tolist()
        assert ours[at].shape == part.shape


def test_an_optimizer_that_holds_other_parameters_is_no_prediction(qwen: Path) -> None:
    one = ranked("sft", qwen, sharding="fsdp2", gradient_accumulation_steps=1)
    with (
        patch.object(accelerator, "fsdp2_switch_optimizer_parameters", lambda *_: None),
        pytest.raises(RehearsalError, match="the optimizer does not hold"),
    ):
        rehearsed(one)


def test_adapters_of_experts_alone_are_trained_although_their_layers_do_not_run(model_folder: Folder) -> None:
    experts = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0}
    one = case("sft", model_folder("qwen3_moe"), experts, processes=2, sharding="ddp", use_peft=True)
    assert rehearsed(one).trained is not None


RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.98), 1e-6, 0.1


def test_its_steps_are_those_of_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 65)) for _ in range(2))
    average, square = torch.zeros(65), torch.zeros(65)
    optimizer = torch.optim.AdamW([theirs], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    step = HostAdam().adam_update
    for number in range(1, 4):
        theirs.grad = torch.randn(65)
        optimizer.step()
        step(0, number, RATE, *BETAS, EPS, DECAY, True, ours.data, theirs.grad, average, square)
    torch.testing.assert_close(ours.data, theirs.data)
    torch.testing.assert_close(average, optimizer.state[theirs]["exp_avg"])


def test_it_looks_at_no_fake_values() -> None:
    with FakeTensorMode():
        tensors = [torch.ones(3) for _ in range(4)]
        assert HostAdam().adam_update(0, 1, RATE, *BETAS, EPS, DECAY, True, *tensors) == 0


PROCESSES, TOKENS = 2, 32


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["flash", "cudnn"])
def test_tokens_that_two_processes_share_attend_as_whole_rows_do(capability: tuple[int, int], tmp_path: Path) -> None:
    real_run.forked(_attend, PROCESSES, tmp_path, {}, capability)


def _attend(rank: int, folder: Path, capability: tuple[int, int]) -> None:
    """Results and gradients are those of the whole row, but for rounding to bfloat16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.functional import scaled_dot_product_attention as whole_attention

    from autotrain_mem.rehearsal.ranks.ring_attention import ring_attention

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    shapes = ((1, 4, TOKENS, 16), (1, 2, TOKENS, 16), (1, 2, TOKENS, 16))
    whole = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    expected = whole_attention(*whole, is_causal=True, enable_gqa=True)
    expected.float().square().sum().backward()
    quarter = TOKENS // (2 * PROCESSES)
    parts = [each for part in (rank, 2 * PROCESSES - 1 - rank) for each in range(part * quarter, (part + 1) * quarter)]
    own = [each.detach()[:, :, parts].clone().requires_grad_() for each in whole]
    with (
        ring_attention(capability),
        context_parallel(init_device_mesh("cpu", (PROCESSES,)), buffers=[torch.zeros(1, TOKENS)], buffer_seq_dims=[1]),
    ):
        out = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        out.float().square().sum().backward()
    pairs = {"result": (out, expected), **{f"gradient {at}": (own[at].grad, whole[at].grad) for at in range(3)}}
    far = [
        f"{name}: {float((ours - theirs[:, :, parts]).abs().max())}"
        for name, (ours, theirs) in pairs.items()
        if not torch.allclose(ours.float(), theirs[:, :, parts].float(), atol=0.1, rtol=0.05)
    ]
    dist.destroy_process_group()
    assert not far


PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
COMPLETION = 6
WEIGHT_ELEMENTS = 1000


def engine(mode: str, **options: Any) -> Any:
    model = torch.nn.Linear(WEIGHT_ELEMENTS, 3, bias=False)
    model.name_or_path = "a/model"
    return VLLMGeneration(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=SimpleNamespace(),
        mode=mode,
        max_completion_length=COMPLETION,
        **options,
    )


@pytest.mark.parametrize("sleeping", [False, True])
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_the_first_completion_has_full_length_and_the_others_a_token_less(mode: str, sleeping: bool) -> None:
    with vllm_stand_in():
        stand_in = engine(mode, enable_sleep_mode=sleeping)
        stand_in.sync_weights()
        prompts, completions, logprobs, _ = stand_in.generate(PROMPTS, images=None, num_generations=2)
    assert prompts == PROMPTS
    lengths = [COMPLETION, *[COMPLETION - 1] * (len(PROMPTS) - 1)]
    assert [len(ids) for ids in completions] == lengths
    assert [len(row) for row in logprobs] == lengths
    assert {type(value) for row in logprobs for (value,) in row} == {float}


def test_an_engine_is_awake_from_its_weights_to_its_last_token(qwen: Path) -> None:
    """TRL empties torch's cache before it wakes it, and vLLM as it falls asleep; nothing is trained between."""
    given = {"use_vllm": True, "vllm_enable_sleep_mode": True}
    run = rehearsed(case("grpo", qwen, given))
    awake = [*run.awake()]
    assert len(awake) >= 2
    assert not [*rehearsed(case("grpo", qwen, {"use_vllm": True})).awake()]
    for span in awake:
        assert run.events[span.start - 1] == run.events[span.stop] == CACHE_EMPTIED
        entered = {phase for index, phase in run.phase_starts if span.start < index <= span.stop}
        assert entered <= {Phase.GENERATE, Phase.SCORE}
    forwards = [index for index, phase in run.phase_starts if phase in (Phase.FORWARD, Phase.BACKWARD)]
    assert forwards
    assert not any(index in span for index in forwards for span in awake)


def test_a_server_gets_its_weights_in_packed_buffers_of_which_two_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights fill a buffer; of three buffers the first dies before the third is born."""
    weight_bytes = WEIGHT_ELEMENTS * 4
    monkeypatch.setattr(vllm_stub, "PACKED_BUFFER_BYTES", 2 * weight_bytes - 1)
    with FakeTensorMode(), Recorder().recording() as recorder:
        weights = [(str(index), torch.empty(WEIGHT_ELEMENTS)) for index in range(6)]
        vllm_stub._Client().update_named_params([], iter(weights))
        trace = recorder.trace()
    assert sizes(trace) == [weight_bytes] * 6 + [2 * weight_bytes] * 3
    assert peak(trace) == 6 * weight_bytes + 2 * 2 * weight_bytes


PICKLED = 2500
"""Bytes up to which blocks are told apart: prompts and metrics, which a group that is not there does not pickle."""

MODES = [
    ({"vllm_mode": "server"}, {"sharding": "fsdp2", "use_peft": True, "gradient_accumulation_steps": 1}),
    ({"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}, {"sharding": "fsdp2-no-reshard"}),
]


@pytest.mark.parametrize(("given", "knobs"), MODES)
def test_weights_are_gathered_for_vllm_as_by_real_ranks(
    given: dict[str, Any], knobs: dict[str, Any], qwen: Path, tmp_path: Path
) -> None:
    one = case("grpo", qwen, {"use_vllm": True, **given}, processes=2, **knobs)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, *_ = trained_by_ranks(one, tmp_path)
    real_run.assert_births_in_order(fake, real, PICKLED)
    # Now and then gloo's own threads let go of what was gathered a little later.
    for phase, peak_bytes in peaks(real).items():
        assert peaks(fake)[phase] == pytest.approx(peak_bytes, rel=0.001), phase
