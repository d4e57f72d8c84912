"""SFT rehearsed with the installed TRL: the worst batch, what knobs add, nothing left behind, and what saving takes.

And rehearsals against what torch's CUDA build took for the same trainings. ``scripts/cuda_parity --record`` wrote the
numbers. No GPU was there: NVIDIA's libraries were stand-ins, and kernels computed nothing; the operators, autograd and
the caching allocator were torch's own. The script compares a hundred larger cases.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
import trl
from real_run import SMALL, peaks, rehearsal_of
from tiny import tiny_config
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from autotrain_mem.checks import arguments
from autotrain_mem.estimator.memory import estimate_memory
from autotrain_mem.estimator.replay import DeviceCapacity
from autotrain_mem.methods.configs import REHEARSED_STEPS
from autotrain_mem.methods.worst_case_text import shorten_last_rejected, shorten_last_row
from autotrain_mem.rehearsal.rehearse import rehearse as rehearse_anew
from autotrain_mem.rehearsal.saving import rehearse_saving
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.trainers.host_optimizer import HostOptimizer
from autotrain_mem.types import Job, Knobs, Owner, Phase, Trace
from autotrain_mem.worker import server

pytestmark = pytest.mark.slow

LENGTH = 48
TOKEN_ID_BYTES = 8


@pytest.fixture(scope="module")
def folder(qwen: Path) -> Path:
    return qwen


def some_knobs(**changes: Any) -> Knobs:
    plain = {"gradient_accumulation_steps": 1, "gradient_checkpointing": False, "max_length": LENGTH, "packing": False}
    return replace(SMALL, **{**plain, **changes})


def rehearse(model: Path, arguments: dict[str, Any] | None = None, length: int = LENGTH, **changes: Any) -> Trace:
    job = Job(method="sft", model=str(model), dataset=None, arguments=arguments or {})
    return rehearsal_of(job, some_knobs(**changes), length)


ENDLESS = DeviceCapacity(capacity_bytes=None)


def total(trace: Trace, owner: Owner) -> int:
    """All bytes that ever belonged to an owner."""
    return sum(block.size_bytes for block in trace.blocks if block.owner is owner)


def peak(trace: Trace) -> int:
    return estimate_memory(trace, ENDLESS).peak_allocated_bytes


@pytest.mark.parametrize(
    ("rows", "length", "max_length", "tokens"),
    [(1, 48, 48, 48), (3, 17, 48, 51), (2, 100, 30, 60), (2, 100, None, 200)],
    ids=["one row", "short rows", "truncated by TRL", "without a limit"],
)
def test_the_worst_batch_fills_rows(rows: int, length: int, max_length: int | None, tokens: int, folder: Path) -> None:
    trace = rehearse(folder, length=length, max_length=max_length, per_device_train_batch_size=rows)
    assert {block.size_bytes for block in trace.blocks if block.module == "batch"} == {tokens * TOKEN_ID_BYTES}


@pytest.mark.parametrize("evaluated", [20, None])
def test_rows_to_evaluate_are_as_long_as_the_longest_of_them(evaluated: int | None, folder: Path) -> None:
    given = {"eval_strategy": "steps", "per_device_eval_batch_size": 1}
    job = Job(method="sft", model=str(folder), dataset=None, arguments=given, evaluated_length=evaluated)
    trace = rehearsal_of(job, some_knobs(per_device_train_batch_size=1, per_device_eval_batch_size=1), LENGTH)
    batches = {block.size_bytes for block in trace.blocks if block.module == "batch"}
    assert batches == {LENGTH * TOKEN_ID_BYTES, (evaluated or LENGTH) * TOKEN_ID_BYTES}
    assert any("evaluation" in sentence for sentence in trace.not_counted) is (evaluated is not None)


def test_a_batch_of_several_rows_is_padded_by_one_token_so_that_it_carries_a_mask() -> None:
    rows = [{"input_ids": [5, 5, 5], "labels": [5, 5, 5]} for _ in range(3)]
    assert [len(row["input_ids"]) for row in shorten_last_row(rows)] == [3, 3, 2]
    assert [len(row["labels"]) for row in shorten_last_row(rows)] == [3, 3, 2]
    assert shorten_last_row(rows[:1]) == rows[:1]
    assert [len(row["input_ids"]) for row in rows] == [3, 3, 3], "the dataset's own rows stay as they are"


def test_a_pair_is_padded_after_the_collator_has_cut_it_too() -> None:
    """DPO's cuts to max_length: one token off a longer row would be nothing, and the batch would need no mask."""
    pair = {"prompt_ids": [1] * 4, "chosen_ids": [2] * 6, "rejected_ids": [2] * 6}
    first, last = shorten_last_rejected([pair, pair], limit=8)
    assert (first, len(last["rejected_ids"])) == (pair, 3)
    assert len(shorten_last_rejected([pair])[0]["rejected_ids"]) == 5


def parameter_bytes(itemsize: int = 4) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen2"))
    return sum(parameter.numel() for parameter in model.parameters()) * itemsize


@pytest.mark.parametrize(
    ("dtype", "itemsize", "changes"),
    [
        ("float32", 4, {}),
        ("bfloat16", 2, {}),
        ("auto", 2, {"dtype": "bfloat16"}),
        ("float32", 4, {"tie_word_embeddings": False}),
    ],
)
def test_weights_gradients_and_moments_have_the_bytes_of_the_dtype_and_of_the_config(
    dtype: str, itemsize: int, changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    trace = rehearse(tmp_path, dtype=dtype)
    untied_head = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"] * itemsize
    parameters = [b for b in trace.blocks if b.owner is Owner.WEIGHTS and b.module.endswith(("weight", "bias"))]
    expected = parameter_bytes(itemsize) + untied_head
    assert sum(block.size_bytes for block in parameters) == expected
    assert total(trace, Owner.GRADIENTS) == REHEARSED_STEPS * expected
    assert total(trace, Owner.OPTIMIZER_STATE) == pytest.approx(2 * expected, rel=0.001), "AdamW's two moments"


def test_accumulation_keeps_the_gradients_of_the_first_micro_step(folder: Path) -> None:
    one, two, four = (rehearse(folder, gradient_accumulation_steps=steps) for steps in (1, 2, 4))
    weights = parameter_bytes()
    assert peak(one) < peak(two) <= peak(one) + 1.05 * weights
    assert peak(two) == peak(four), "a third micro-step meets nothing that the second did not"
    assert estimate_memory(four, ENDLESS).owners_at_peak[Owner.GRADIENTS] >= weights


@pytest.mark.parametrize(
    "flags",
    [
        ("--load_in_4bit", "true"),
        ("--load_in_8bit", "true"),
        ("--use_peft", "true"),
        ("--gradient_checkpointing", "true"),
        ("--bf16", "false"),
        ("--torch_compile", "true"),
        ("--activation_offloading", "true"),
        ("--eval_strategy", "steps"),
        ("--use_liger_kernel", "true"),
        ("--optim", "paged_adamw_32bit"),
        ("--optim", "paged_ademamix_8bit"),
    ],
    ids=" ".join,
)
def test_what_moves_the_peak_is_rehearsed_refused_or_listed(flags: tuple[str, ...], folder: Path) -> None:
    """Unknown stays unknown: a flag that changes the memory of a real run is never dropped in silence.

    On a GPU bitsandbytes keeps the paged state of tensors of 100,000 elements and more in CUDA's managed memory, beyond
    torch's allocator (``bitsandbytes/optim/optimizer.py: get_state_buffer``). On the CPU it does not.
    """
    plain = rehearse(folder)
    try:
        trace = ask(folder, *flags)
    except AutofitError:
        return
    assert (trace.blocks, trace.not_counted) != (plain.blocks, plain.not_counted)
    if "--optim" in flags:
        embedding = max(block.size_bytes for block in trace.blocks if block.owner is Owner.WEIGHTS)
        state = [block.size_bytes for block in trace.blocks if block.owner is Owner.OPTIMIZER_STATE]
        assert max(state) < embedding or any("paged" in sentence for sentence in trace.not_counted)


def ask(model: Path, *flags: str) -> Trace:
    """A rehearsal as the command has it done: flags are read, and the worker is asked."""
    given, defaults = arguments.parse("sft", flags, {}, ())
    job = Job(method="sft", model=str(model), dataset=None, arguments=given)
    asked = {name: given[name] for name in codec.to_json(defaults) if name in given}
    return server.rehearse(job, some_knobs(**asked), LENGTH, (8, 0), None, None, str(model.parent / "scratch"))


def state_of_torch() -> list[Any]:
    """What a rehearsal exchanges beside attributes, which ``unittest.mock`` puts back."""
    return [
        torch.nn.Module._apply,
        torch.nn.Module.__call__,
        torch.UntypedStorage.resize_,
        len(torch.nn.modules.module._global_forward_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    ]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_rehearsal_leaves_no_trace_and_the_next_one_is_the_same(fails: bool, folder: Path, tmp_path: Path) -> None:
    """The same but for the order in which autocast drops its cached weights, which is that of their addresses."""
    job, knobs = Job(method="sft", model=str(folder), dataset=None), some_knobs(use_peft=True)
    before, first = state_of_torch(), rehearse(folder, use_peft=True)
    if fails:
        broken = patch.object(trl.SFTTrainer, "compute_loss", side_effect=ZeroDivisionError("in a forward pass"))
        with broken, pytest.raises(ZeroDivisionError):
            rehearse_anew(job, knobs, LENGTH, str(tmp_path))
        assert state_of_torch() == before
    second = rehearse_anew(job, knobs, LENGTH, str(tmp_path))
    assert state_of_torch() == before
    assert type(torch.ones(2)) is torch.Tensor
    assert first.blocks == second.blocks
    assert first.phase_starts == second.phase_starts
    assert estimate_memory(first, ENDLESS).phases == estimate_memory(second, ENDLESS).phases


RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_cuda.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = RECORDED["cases"]
ALLOCATED_BAR = 0.005
RESERVED_BAR = 0.06
"""As in the script. A segment of 20 MiB is 3 to 7 % of what these small trainings reserve."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "config.json").write_text(json.dumps(RECORDED["model_config"]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("recorded", CASES, ids=[case["name"] for case in CASES])
def test_a_rehearsal_takes_what_the_cuda_build_took(recorded: dict[str, Any], model: Path, tmp_path: Path) -> None:
    knobs = Knobs(**recorded["knobs"])
    job = Job(method=recorded["method"], model=str(model), dataset=None, arguments=recorded["arguments"])
    trace = rehearse_anew(job, knobs, recorded["length"], str(tmp_path), tuple(RECORDED["compute_capability"]))
    memory = estimate_memory(trace, ENDLESS)
    mode = memory.reserved.modes["expandable_segments:True" in recorded["allocator"]]
    assert memory.peak_allocated_bytes == pytest.approx(recorded["peak_allocated_bytes"], rel=ALLOCATED_BAR)
    assert mode.peak_reserved_bytes == pytest.approx(recorded["peak_reserved_bytes"], rel=RESERVED_BAR)
    assert mode.num_alloc_retries == recorded["num_alloc_retries"]


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


plain = partial(Qwen2ForCausalLM, Qwen2Config(**SIZES))
mixture = partial(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS))


def trace_of(save: Callable[[Recorder], Any], model: torch.nn.Module) -> Trace:
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
    real = trace_of(lambda recorder: model.save_pretrained(tmp_path), model)
    trainer = trainer_of(model)
    ours = trace_of(lambda recorder: rehearse_saving(trainer, recorder), model)
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
    trace = trace_of(lambda recorder: rehearse_saving(trainer, recorder), model)
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.safetensors", "optimizer.pt")]
    assert sizes[0] - 5000 < trace.saved_model_bytes < sizes[0], "but for its header"
    assert 2 * trace.saved_model_bytes < trace.saved_state_bytes < sizes[1], "two moments, and a step each"
    trainer.optimizer = HostOptimizer(model.parameters(), torch.optim.AdamW)
    trace = trace_of(lambda recorder: rehearse_saving(trainer, recorder), model)
    assert trace.saved_state_bytes == 2 * trace.saved_model_bytes


def test_fsdp2_gathers_one_weight_at_a_time() -> None:
    model = plain()
    trainer = trainer_of(model, is_fsdp_enabled=True)
    trace = trace_of(lambda recorder: rehearse_saving(trainer, recorder), model)
    weights = sum(block.size_bytes for block in trace.blocks if block.owner == "weights")
    largest = max(weight.nbytes for weight in model.parameters())
    assert peaks(trace)["save"] == weights + largest
