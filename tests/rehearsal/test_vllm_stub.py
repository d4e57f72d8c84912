"""Without vLLM installed, TRL's own VLLMGeneration runs against its stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from rank_run import assert_births_in_order, trained_by_ranks
from real_run import Folder, case, peak, peaks, rehearsed
from torch._subclasses.fake_tensor import FakeTensorMode
from trace_reading import sizes

from autotrain_mem.rehearsal import vllm_stub
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.rehearsal.vllm_stub import vllm_stand_in
from autotrain_mem.types import Phase
from autotrain_mem.types.trace import CACHE_EMPTIED

PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
TOKENS = 6
WEIGHT_ELEMENTS = 1000


def engine(mode: str, **options: Any) -> Any:
    from trl.generation.vllm_generation import VLLMGeneration

    model = torch.nn.Linear(WEIGHT_ELEMENTS, 3, bias=False)
    model.name_or_path = "a/model"
    return VLLMGeneration(
        model=model,
        accelerator=Accelerator(cpu=True),
        processing_class=SimpleNamespace(),
        mode=mode,
        max_completion_length=TOKENS,
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
    lengths = [TOKENS, *[TOKENS - 1] * (len(PROMPTS) - 1)]
    assert [len(ids) for ids in completions] == lengths
    assert [len(row) for row in logprobs] == lengths
    assert {type(value) for row in logprobs for (value,) in row} == {float}


def test_an_engine_is_awake_from_its_weights_to_its_last_token(model_folder: Folder) -> None:
    """TRL empties torch's cache before it wakes it, and vLLM as it falls asleep; nothing is trained between."""
    given = {"use_vllm": True, "vllm_enable_sleep_mode": True}
    run = rehearsed(case("grpo", model_folder("qwen2"), given))
    awake = [*run.awake()]
    assert len(awake) >= 2
    assert not [*rehearsed(case("grpo", model_folder("qwen2"), {"use_vllm": True})).awake()]
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
    ({"vllm_mode": "server"}, {"sharding": "fsdp2", "use_peft": True}),
    ({"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}, {"sharding": "fsdp2-no-reshard"}),
]


@pytest.mark.parametrize(("given", "knobs"), MODES)
def test_weights_are_gathered_for_vllm_as_by_real_ranks(
    given: dict[str, Any], knobs: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    one = case("grpo", model_folder("qwen2"), {"use_vllm": True, **given}, processes=2, **knobs)
    fake = rehearsed(one)
    with vllm_stand_in():
        real, *_ = trained_by_ranks(one, tmp_path)
    assert_births_in_order(fake, real, PICKLED)
    # Now and then gloo's own threads let go of what was gathered a little later.
    for phase, peak_bytes in peaks(real).items():
        assert peaks(fake)[phase] == pytest.approx(peak_bytes, rel=0.001), phase
