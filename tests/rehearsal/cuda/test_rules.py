"""Under the rules CPU tensors take CUDA's paths, and CPU autocast has the dtypes of CUDA's lists."""

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import memory
from real_run import VARIANTS, Case, Folder, assert_alike, births, case, rehearsed, trained
from torch.nn import functional
from trace_reading import REAL_AND_FAKE, live, sizes

from autotrain_mem.rehearsal.cuda import autocast as casts
from autotrain_mem.rehearsal.cuda import rules as rules_module
from autotrain_mem.rehearsal.cuda.autocast import cuda_autocast
from autotrain_mem.rehearsal.cuda.rules import cuda_semantics, every_rule, recorded_empty_cache
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.types import CACHE_EMPTIED, Phase, Trace


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
def test_a_reward_head_is_float32_beside_a_float16_base(variant: str, model_folder: Folder, tmp_path: Path) -> None:
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


Op = Callable[[torch.Tensor], torch.Tensor]

ROWS, COLUMNS = 6, 8

# Operators of a training and each form of a call; test_the_lists_here_are_the_installed_torchs compares all names.
FLOAT32: dict[str, Op] = {
    "cumsum": lambda x: torch.cumsum(x, -1),
    "cumsum by keyword": lambda x: torch.cumsum(x, dim=1),
    "exp": torch.exp,
    "layer_norm": lambda x: functional.layer_norm(x, (COLUMNS,)),
    "layer_norm with weights": lambda x: functional.layer_norm(x, (COLUMNS,), x[0], x[1]),
    "nll_loss": lambda x: functional.nll_loss(x, torch.zeros(ROWS, dtype=torch.long)),
    "norm": lambda x: torch.ops.aten.norm.Scalar(x),
    "norm of rows": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]),
    "norm of rows, kept": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 1, [1], True),
    "pow": lambda x: x.pow(2),
    "pow of a number": lambda x: 2**x,
    "pow of tensors": lambda x: x**x,
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1),
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
}

LOWER: dict[str, Op] = {
    "addmm": lambda x: torch.addmm(x[:, :ROWS], x, x.t()),
    "bmm": lambda x: torch.bmm(x[None], x.t()[None]),
    "conv1d": lambda x: functional.conv1d(x[None], x[:, :3][None]),
    "linear": lambda x: functional.linear(x, x),
    "sdpa": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
}

ALONE: dict[str, Op] = {
    "add": lambda x: x + x,
    "cat": lambda x: torch.cat([x, x]),
    "mean": lambda x: x.mean(-1),
    "embedding": lambda x: functional.embedding(torch.zeros(2, dtype=torch.long), x),
    "sum told its dtype": lambda x: x.sum(-1, dtype=x.dtype),
    "softmax told its dtype": lambda x: torch.softmax(x, -1, dtype=x.dtype),
}

WIDEST: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "index_put": lambda x, y: x.index_put((torch.zeros(1, dtype=torch.long),), y[0]),
    "scatter_add": lambda x, y: x.scatter_add(0, torch.zeros(1, COLUMNS, dtype=torch.long), y),
}

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def bf16() -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16)


def sample(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).float() % 7 / 10 + 0.1).to(dtype)


def run(op: Op, dtype: torch.dtype, tensors: Callable[[], Any]) -> torch.Tensor:
    with tensors(), cuda_autocast(), bf16():
        return op(sample(dtype))


def test_the_lists_here_are_the_installed_torchs() -> None:
    lists = [casts.LOWER_PRECISION, casts.FLOAT32, casts.FLOAT32_BY_DTYPE, {*casts.FLOAT32_BY_OVERLOAD}, casts.WIDEST]
    named = frozenset({casts.REFUSED}).union(*lists)
    assert len(named) == 1 + sum(len(names) for names in lists), "an operator has one policy"
    of_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert named == casts._registered("AutocastCUDA") - of_cudnn
    with cuda_autocast():
        assert casts._registered("AutocastCPU") >= named, "every operator that CUDA casts is cast"


POLICIES: dict[str, tuple[dict[str, Op], torch.dtype | None]] = {
    "float32": (FLOAT32, torch.float32),
    "lower precision": (LOWER, torch.bfloat16),
    "left alone": (ALONE, None),
}


@REAL_AND_FAKE
@DTYPES
@pytest.mark.parametrize(("policy", "name"), [(policy, name) for policy, (ops, _) in POLICIES.items() for name in ops])
def test_an_operator_runs_in_the_dtype_that_cuda_runs_it_in(
    policy: str, name: str, dtype: torch.dtype, tensors: Callable[[], Any]
) -> None:
    ops, cast = POLICIES[policy]
    out = run(ops[name], dtype, tensors)
    assert out.dtype is (cast or dtype)
    if tensors is nullcontext and cast is not None:
        torch.testing.assert_close(out, ops[name](sample(dtype).to(cast)))


@pytest.mark.parametrize("name", WIDEST)
def test_mixed_inputs_run_in_the_widest_dtype(name: str) -> None:
    op = WIDEST[name]
    low, wide = sample(torch.bfloat16), sample(torch.float32)
    with cuda_autocast(), bf16():
        assert op(low, wide).dtype is op(wide, low).dtype is torch.float32
        assert op(low, low).dtype is torch.bfloat16
        torch.testing.assert_close(op(low, wide), op(low.float(), wide))


def test_float16_is_cast_to_other_numbers_are_left_alone_and_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    with cuda_autocast(), torch.autocast("cpu", torch.float16):
        x = sample(torch.float32)
        assert torch.mv(x, x[0]).dtype is torch.float16
        assert (x @ x.t()).softmax(-1).dtype is torch.float32
    for name in ("sum of rows", "cumsum", "pow", "exp"):
        assert run(FLOAT32[name], torch.float64, nullcontext).dtype is torch.float64
    assert run(FLOAT32["cumsum"], torch.long, nullcontext).dtype is torch.long
    with cuda_autocast(), bf16(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        functional.binary_cross_entropy(torch.ones(2), torch.ones(2))


def born(tensors: Callable[[], Any], step: Callable[[], Any]) -> list[int]:
    """Returns the bytes of every allocation of one step under bf16 autocast."""
    with tensors(), cuda_autocast(), bf16(), Recorder().recording() as recorder:
        step()
    return sizes(recorder.trace())


@REAL_AND_FAKE
def test_a_step_allocates_what_cudas_casts_do(tensors: Callable[[], Any]) -> None:
    with tensors():
        low, wide = torch.ones(1, 1000, dtype=torch.bfloat16, requires_grad=True), torch.ones(1, 500)
        layer = torch.nn.Linear(100, 50, bias=False)
        x = torch.ones(3, 100, dtype=torch.bfloat16)
    normed = born(tensors, lambda: functional.layer_norm(low, (1000,)))
    assert normed.count(1000 * 4) == 2, "a float32 copy of the input, and the result"
    assert born(tensors, lambda: torch.cat([low, wide], 1)) == [1500 * 4], "no copies of what is joined"
    assert born(tensors, lambda: layer(x).sum() + layer(x).sum()).count(100 * 50 * 2) == 1, "one cast for all uses"


def test_who_asks_for_autocast_without_naming_a_device_hears_of_cudas() -> None:
    with cuda_autocast():
        assert not torch.is_autocast_enabled()
        with bf16():
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cpu")
    with bf16():
        assert not torch.is_autocast_enabled(), "given back"


@pytest.mark.parametrize("raises", [False, True])
def test_the_cpus_policy_is_given_back(raises: bool) -> None:
    before = casts._registered("AutocastCPU")
    with pytest.raises(ZeroDivisionError) if raises else nullcontext(), cuda_autocast():
        with cuda_autocast():
            pass
        with bf16():
            assert sample(torch.bfloat16).exp().dtype is torch.float32, "the outer policy is still there"
        if raises:
            raise ZeroDivisionError
    assert casts._registered("AutocastCPU") == before
    low, wide = sample(torch.bfloat16), sample(torch.float32)
    with bf16():
        assert low.exp().dtype is torch.bfloat16
        assert low.prod().dtype is torch.float32
        assert functional.binary_cross_entropy(wide, wide).dtype is torch.float32
    with bf16(), Recorder().recording() as recorder:
        torch.cat([low, wide])
    assert len(recorder.trace().blocks) == 2, "the CPU casts before it joins"


def test_operators_of_cudnn_that_only_a_cuda_build_registers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = casts._registered
    of_cuda_build = {"AutocastCUDA": {"_cudnn_rnn", "cudnn_convolution"}}
    monkeypatch.setattr(casts, "_registered", lambda key: registered(key) | of_cuda_build.get(key, set()))
    assert not [name for name in casts._kernels() if "cudnn" in name]
