"""What saving takes of the device, against what transformers really takes as it writes the files."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_run import peaks
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from autotrain_mem.rehearsal.saving import rehearse_saving
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.trainers.host_optimizer import HostOptimizer
from autotrain_mem.types import Phase, Trace

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 4}


def plain() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def mixture() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))


def recorded(save: Callable[[Recorder], Any], model: torch.nn.Module) -> Trace:
    recorder = Recorder()
    recorder.adopt_model(model)
    with recorder.recording():
        recorder.enter_phase(Phase.SAVE)
        save(recorder)
    return recorder.trace()


def trainer_of(model: Any, **facts: Any) -> Any:
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return SimpleNamespace(model=model, model_wrapped=model, accelerator=accelerator, optimizer=optimizer, **facts)


@pytest.mark.parametrize(("build", "copies"), [(plain, 0), (mixture, 3 * 4 * 2 * 6 * 8 * 4)])
def test_saving_copies_fused_experts_all_at_once_and_nothing_else(
    build: Callable[[], PreTrainedModel], copies: int, tmp_path: Path
) -> None:
    """Gate and up of 4 experts in 3 layers, 6 x 8 float32 each."""
    model = build()
    real = recorded(lambda recorder: model.save_pretrained(tmp_path), model)
    trainer = trainer_of(model)
    ours = recorded(lambda recorder: rehearse_saving(trainer, recorder), model)
    weights = sum(block.size_bytes for block in ours.blocks if block.owner == "weights")
    assert peaks(ours).get("save", weights) == peaks(real).get("save", weights) == weights + copies
    if not copies:
        assert ours.phase_starts[-1] == (len(ours.events), Phase.SAVE), "the phase is in the trace all the same"


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    trainer = trainer_of(model)
    trainer.optimizer = SimpleNamespace(optimizer=optimizer)  # as accelerate wraps it
    trace = recorded(lambda recorder: rehearse_saving(trainer, recorder), model)
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    assert sizes[0] - 5000 < trace.saved_model_bytes < sizes[0], "but for its header"
    assert 2 * trace.saved_model_bytes < trace.saved_state_bytes < sizes[1], "two moments, and a step each"
    trainer.optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW)
    trace = recorded(lambda recorder: rehearse_saving(trainer, recorder), model)
    assert trace.saved_state_bytes == 2 * trace.saved_model_bytes


def test_fsdp2_gathers_one_weight_at_a_time() -> None:
    model = plain()
    trainer = trainer_of(model, is_fsdp_enabled=True)
    trace = recorded(lambda recorder: rehearse_saving(trainer, recorder), model)
    weights = sum(block.size_bytes for block in trace.blocks if block.owner == "weights")
    largest = max(weight.nbytes for weight in model.parameters())
    assert peaks(trace)["save"] == weights + largest
