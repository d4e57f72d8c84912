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
from real_run import VARIANTS, Case, Folder, assert_alike, births, case, peak, rehearsal_of, trained
from trace_reading import REAL_AND_FAKE, live

from autotrain_mem.rehearsal.cuda import rules as rules_module
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, every_rule, not_imitated, recorded_empty_cache
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import Owner, Phase
from autotrain_mem.types.trace import CACHE_EMPTIED

LAYERS = 4
ELEMENTS = 1000


def rules() -> AbstractContextManager[None]:
    """That of an A100; nobody reads its record of emptied caches."""
    return cuda_semantics(Recorder(), (8, 0))


@contextmanager
def operators() -> Iterator[list[str]]:
    """The names of the operators that are dispatched inside."""
    names: list[str] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(operator._schema.name.removeprefix("aten::"))
        return operator(*args, **kwargs)

    with Recorder(run).recording():
        yield names


def parameters_with_gradients() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(ELEMENTS)) for _ in range(LAYERS)]
    for parameter in made:
        parameter.grad = torch.ones(ELEMENTS)
    return made


@REAL_AND_FAKE
def test_the_first_rows_of_a_decomposition_are_a_view_of_all(tensors: Callable[[], Any]) -> None:
    with tensors(), rules():
        u, s, vh = torch.linalg.svd(torch.ones(6, 4), full_matrices=False)
        first = vh[:2].contiguous()
    assert (u.shape, s.shape, first.shape) == ((6, 4), (4,), (2, 4))
    assert first.untyped_storage().nbytes() == 4 * 4 * 4


@REAL_AND_FAKE
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_clipping_and_an_optimizer_work_on_all_parameters_at_once(
    kind: type[torch.optim.Optimizer], tensors: Callable[[], Any]
) -> None:
    with tensors(), rules():
        parameters = parameters_with_gradients()
        optimizer = kind(parameters)
        with operators() as clipping:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with operators() as names:
            optimizer.step()
    assert {"_foreach_norm", "_foreach_mul_"} <= set(clipping)
    assert any(name.startswith("_foreach") for name in names)
    assert "addcdiv_" not in names, "nothing goes parameter by parameter"


@REAL_AND_FAKE
def test_foreach_adamw_holds_temporaries_for_all_parameters_together(tensors: Callable[[], Any]) -> None:
    """On CUDA they are the peak of full fine-tuning with adamw_torch: a copy of all weights, beside the state."""
    with tensors():
        with rules():
            together = temporaries_of_a_step()
        one_by_one = temporaries_of_a_step()
    assert together >= LAYERS * ELEMENTS * 4
    assert one_by_one < LAYERS * ELEMENTS * 4


def temporaries_of_a_step() -> int:
    """Peak bytes of AdamW's second step beyond weights, gradients and state."""
    parameters = parameters_with_gradients()
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step()
    recorder = Recorder()
    for parameter in parameters:
        for tensor in (parameter, parameter.grad, *optimizer.state[parameter].values()):
            recorder.mark(tensor, Owner.OTHER, "")
    with recorder.recording():
        optimizer.step()
    trace = recorder.trace()
    return peak(trace) - sum(block.size_bytes for block in live(trace))


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


def trl_empty_cache() -> None:
    from trl.experimental.utils import empty_cache

    empty_cache()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.empty_cache(),
        lambda: memory.clear_device_cache(),
        lambda: transformers.trainer.clear_device_cache(),
        lambda: memory.release_memory(None),
        lambda: accelerate.Accelerator(cpu=True).free_memory(),
        trl_empty_cache,
    ],
    ids=["torch", "accelerate", "transformers", "release_memory", "free_memory", "trl"],
)
def test_every_way_to_empty_a_devices_cache_is_recorded_once(call: Callable[[], Any]) -> None:
    recorder = Recorder()
    with recorded_empty_cache(recorder):
        call()
    call()
    assert list(recorder.trace().events) == [CACHE_EMPTIED]


def test_what_is_not_imitated_is_said() -> None:
    assert not_imitated((8, 0))
    assert set(not_imitated((8, 0))) < set(not_imitated((9, 0))), "cuDNN attends on Hopper"


def test_every_rule_is_listed_in_its_module() -> None:
    """A public function of the folder that makes a context is a rule, but for what applies all, and what hides."""
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
    """But for the scaler, whose few scalars depend on values: it is off on both sides."""
    monkeypatch.setattr(rules_module, "detect_fake_mode", lambda: "as if there were one")
    one = case("sft", model_folder("qwen2"), fp16=True, **HALF_BASE[variant])
    assert_alike(one, tmp_path)


@pytest.mark.parametrize(("method", "variant"), [("sft", "4-bit"), ("reward", "lora"), ("reward", "8-bit")])
def test_what_is_trained_is_float32_beside_a_float16_base(
    method: str, variant: str, model_folder: Folder, tmp_path: Path
) -> None:
    """TRL makes the adapter of a quantized base bfloat16, which CUDA's scaler refuses; a reward model's head would be
    float16, which every scaler refuses."""
    one = case(method, model_folder("qwen2"), fp16=True, **HALF_BASE[variant])
    _, trainer = trained(one, tmp_path)
    dtypes = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    assert dtypes == {torch.float32}
    assert trainer.accelerator.scaler.is_enabled()


def forward(one: Case, card: tuple[int, int]) -> list[tuple[str, str, int, str]]:
    found = births(rehearsal_of(one.job, one.knobs, one.length, compute_capability=card))
    return [birth for birth in found if birth[0] == Phase.FORWARD.value]


def test_a_float16_base_is_not_cast_more_often_than_a_bfloat16_one(model_folder: Folder) -> None:
    half = case("sft", model_folder("qwen2"), fp16=True, **HALF_BASE["lora"])
    brain = case("sft", model_folder("qwen2"), use_peft=True, dtype="bfloat16")
    assert forward(half, (8, 0)) == forward(brain, (8, 0))
