"""Under the rules CPU tensors take CUDA's paths."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import memory
from real_run import VARIANTS, Case, Folder, assert_alike, births, case, rehearsed, trained
from trace_reading import REAL_AND_FAKE, live

from autotrain_mem.rehearsal.cuda import rules as rules_module
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, every_rule, recorded_empty_cache
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Phase, Trace
from autotrain_mem.types.trace import CACHE_EMPTIED


def rules() -> AbstractContextManager[None]:
    return cuda_semantics(Recorder(), (8, 0))


@contextmanager
def operators() -> Iterator[list[str]]:
    """Yields the names of the operators that are dispatched in the block."""
    names: list[str] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(operator._schema.name.removeprefix("aten::"))
        return operator(*args, **kwargs)

    with Recorder(run).recording():
        yield names


@REAL_AND_FAKE
def test_the_first_rows_of_a_decomposition_are_a_view_of_all(tensors: Callable[[], Any]) -> None:
    with tensors(), rules():
        u, s, vh = torch.linalg.svd(torch.ones(6, 4), full_matrices=False)
        first = vh[:2].contiguous()
    assert (u.shape, s.shape, first.shape) == ((6, 4), (4,), (2, 4))
    assert first.untyped_storage().nbytes() == 4 * 4 * 4


@REAL_AND_FAKE
def test_clipping_and_optimizers_process_all_parameters_at_once(tensors: Callable[[], Any]) -> None:
    """On CUDA the peak of full fine-tuning with adamw_torch includes a copy of all weights."""
    kinds = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)
    with tensors(), rules():
        parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones(1000)
        with operators() as names:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert {"_foreach_norm", "_foreach_mul_"} <= set(names)
        for kind in kinds:
            optimizer = kind(parameters)
            with operators() as names:
                optimizer.step()
            assert any(name.startswith("_foreach") for name in names)
            assert "addcdiv_" not in names, "one parameter after the other"


@REAL_AND_FAKE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dropout_mask_is_one_byte_per_element(tensors: Callable[[], Any], dtype: torch.dtype) -> None:
    with tensors(), rules():
        x = torch.ones(1000, dtype=dtype, requires_grad=True)
        with Recorder().recording() as recorder:
            out = torch.nn.functional.dropout(x, 0.5)
            kept = [block.size_bytes for block in live(recorder.trace())]
    assert kept == [1000, 1000 * dtype.itemsize], "the mask, then the result, nothing else"
    assert out.dtype is dtype


def test_dropouts_backward_lets_through_what_its_forward_let_through() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, requires_grad=True)
    with rules():
        out = torch.nn.Dropout(0.25)(x)
        for p, training, expected in ((0.5, False, 1.0), (0.0, True, 1.0), (1.0, True, 0.0)):
            assert torch.nn.functional.dropout(torch.ones(10), p, training).tolist() == [expected] * 10
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())
    assert out.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert 0.2 < (out == 0).float().mean().item() < 0.3, "1000 draws of 0.25: 3.6 standard deviations"


def test_every_way_to_empty_a_devices_cache_is_recorded_once() -> None:
    from trl.experimental import utils

    calls: list[Callable[[], Any]] = [
        lambda: torch.cuda.empty_cache(),
        lambda: memory.clear_device_cache(),
        lambda: transformers.trainer.clear_device_cache(),
        lambda: memory.release_memory(None),
        lambda: accelerate.Accelerator(cpu=True).free_memory(),
        utils.empty_cache,
    ]
    for call in calls:
        recorder = Recorder()
        with recorded_empty_cache(recorder):
            call()
        call()
        assert list(recorder.trace().events) == [CACHE_EMPTIED]


def test_every_rule_is_listed_in_its_module() -> None:
    """Every public context manager of the folder is a rule, except ``cuda_semantics`` and ``unseen``."""
    listed = 0
    for path in Path(rules_module.__file__).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        rules_of_it = source.partition("\nRULES = (")[2]
        made = {
            node.name
            for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
            and node.name not in ("cuda_semantics", "unseen")
            and ast.unparse(node.returns or ast.Constant(None)) in ("Iterator[None]", "AbstractContextManager[None]")
        }
        listed += len(made)
        assert {name for name in made if f"{name}(" not in rules_of_it} == set(), path.name
    assert listed == len(every_rule())


HALF_BASE = {"full": {}} | {name: {**VARIANTS[name], "dtype": "float16"} for name in ("lora", "4-bit", "8-bit")}


@pytest.mark.slow
@pytest.mark.parametrize("variant", HALF_BASE)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    variant: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler is off on both sides, since its scalars depend on values."""
    monkeypatch.setattr(rules_module, "detect_fake_mode", lambda: "as if there were one")
    fake, _, trainer = assert_alike(half_base("sft", variant, model_folder), tmp_path)
    assert trained_dtypes(trainer) == {torch.float32}, "TRL makes the adapter of a quantized base bfloat16"
    if variant == "lora":
        brain = rehearsed(case("sft", model_folder("qwen2"), use_peft=True, dtype="bfloat16"))
        assert forward(fake) == forward(brain), "float16 weights are cast no more often than bfloat16 ones"


@pytest.mark.parametrize("variant", ["lora", "8-bit"])
def test_a_reward_models_head_is_float32_beside_a_float16_base(
    variant: str, model_folder: Folder, tmp_path: Path
) -> None:
    """It would be float16, which every scaler refuses."""
    _, trainer = trained(half_base("reward", variant, model_folder), tmp_path)
    assert trained_dtypes(trainer) == {torch.float32}
    assert trainer.accelerator.scaler.is_enabled()


def half_base(method: str, variant: str, model_folder: Folder) -> Case:
    return case(method, model_folder("qwen2"), fp16=True, **HALF_BASE[variant])


def trained_dtypes(trainer: Any) -> set[torch.dtype]:
    return {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}


def forward(trace: Trace) -> list[tuple[str, str, int, int, str]]:
    return [birth for birth in births(trace) if birth[0] == Phase.FORWARD.value]
