"""CPU autocast under CUDA's policy has the dtypes of CUDA's lists, on real and on fake tensors."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional
from trace_reading import REAL_AND_FAKE, sizes

from autotrain_mem.rehearsal.cuda import autocast as rules
from autotrain_mem.rehearsal.cuda.autocast import cuda_autocast
from autotrain_mem.rehearsal.trace.recorder import Recorder

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
    lists = [rules.LOWER_PRECISION, rules.FLOAT32, rules.FLOAT32_BY_DTYPE, {*rules.FLOAT32_BY_OVERLOAD}, rules.WIDEST]
    named = frozenset({rules.REFUSED}).union(*lists)
    assert len(named) == 1 + sum(len(names) for names in lists), "an operator has one policy"
    of_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert named == rules._registered("AutocastCUDA") - of_cudnn
    with cuda_autocast():
        assert rules._registered("AutocastCPU") >= named, "every operator that CUDA casts is cast"


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


def test_autocast_to_float16_casts_to_float16() -> None:
    with cuda_autocast(), torch.autocast("cpu", torch.float16):
        x = sample(torch.float32)
        assert torch.mv(x, x[0]).dtype is torch.float16
        assert (x @ x.t()).softmax(-1).dtype is torch.float32


def test_float64_and_integers_such_as_positions_are_left_alone() -> None:
    for name in ("sum of rows", "cumsum", "pow", "exp"):
        assert run(FLOAT32[name], torch.float64, nullcontext).dtype is torch.float64
    assert run(FLOAT32["cumsum"], torch.long, nullcontext).dtype is torch.long


def test_binary_cross_entropy_is_refused_as_on_cuda() -> None:
    half = torch.full((2,), 0.5)
    with cuda_autocast(), bf16(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        functional.binary_cross_entropy(half, half)


def births(tensors: Callable[[], Any], step: Callable[[], Any]) -> list[int]:
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
    normed = births(tensors, lambda: functional.layer_norm(low, (1000,)))
    assert normed.count(1000 * 4) == 2, "a float32 copy of the input, and the result"
    assert births(tensors, lambda: torch.cat([low, wide], 1)) == [1500 * 4], "no copies of what is joined"
    assert births(tensors, lambda: layer(x).sum() + layer(x).sum()).count(100 * 50 * 2) == 1, "one cast for all uses"


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
    before = rules._registered("AutocastCPU")
    with pytest.raises(ZeroDivisionError) if raises else nullcontext(), cuda_autocast():
        with cuda_autocast():
            pass
        with bf16():
            assert sample(torch.bfloat16).exp().dtype is torch.float32, "the outer policy is still there"
        if raises:
            raise ZeroDivisionError
    assert rules._registered("AutocastCPU") == before
    low, wide = sample(torch.bfloat16), sample(torch.float32)
    with bf16():
        assert low.exp().dtype is torch.bfloat16
        assert low.prod().dtype is torch.float32
        assert functional.binary_cross_entropy(wide, wide).dtype is torch.float32
    with bf16(), Recorder().recording() as recorder:
        torch.cat([low, wide])
    assert len(recorder.trace().blocks) == 2, "the CPU casts before it joins"


def test_operators_of_cudnn_that_only_a_cuda_build_registers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = rules._registered
    of_cuda_build = {"AutocastCUDA": {"_cudnn_rnn", "cudnn_convolution"}}
    monkeypatch.setattr(rules, "_registered", lambda key: registered(key) | of_cuda_build.get(key, set()))
    assert not [name for name in rules._kernels() if "cudnn" in name]
