"""Out-of-memory errors are told apart from other errors, and the report shows what held the memory."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotrain_mem.allocator.simulator import Refusal
from autotrain_mem.machine.simulated_card import SimulatedGpu
from autotrain_mem.rehearsal.simulated_run import SimulatedRun
from autotrain_mem.rehearsal.trace.recorder import Recorder
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.training.cuda_oom import RanOut, attempt, is_out_of_memory, kind_of, kind_of_text
from autotrain_mem.training.process.build import Device, PhasePeaks
from autotrain_mem.training.process.oom_report import shortage_of
from autotrain_mem.training.process.train import Safeguards
from autotrain_mem.types import Hardware, Owner, Phase

CARD = Hardware(name="toy", origin="imagined", total_bytes=128 * MIB, free_bytes=110 * MIB, non_torch_bytes=10 * MIB)
REAL = Hardware(name="real", origin="detected", total_bytes=24 * GIB, free_bytes=23 * GIB, non_torch_bytes=300 * MIB)

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.50 GiB of which 512.00 MiB is "
    "free. Process 4711 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has 21.00 GiB memory in "
    "use. Of the allocated memory 20.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but "
    "unallocated."
)


def real_card(allocated_gib: int, reserved_gib: int) -> Any:
    reading = SimpleNamespace(allocated_bytes=allocated_gib * GIB, reserved_bytes=reserved_gib * GIB)
    return SimpleNamespace(hardware=REAL, simulated=None, read=lambda: reading, phase=Phase.FORWARD)


def trainer(step: int = 3, model: torch.nn.Module | None = None, optimizer: Any = None) -> Any:
    model = model or torch.nn.Linear(2, 2)
    return SimpleNamespace(model=model, optimizer=optimizer, state=SimpleNamespace(global_step=step))


def refused() -> tuple[Device, BaseException]:
    """Weights of 20 MiB, gradients of 10 MiB, 7 bytes of something else, and a request too many."""
    gpu = SimulatedGpu(CARD)
    recorder = Recorder(device=gpu)
    ledger = recorder.ledger
    ledger.enter_phase(Phase.OPTIMIZER_STEP)
    sizes = ((20 * MIB, Owner.WEIGHTS), (10 * MIB, Owner.GRADIENTS), (30 * MIB, None), (7, None))
    blocks = []
    for size, owner in sizes:
        blocks.append(ledger.write_birth(size, ""))
        if owner is not None:
            ledger.describe(blocks[-1], owner, "")
        ledger.allocate(blocks[-1])
    ledger.end(blocks[2])
    with pytest.raises(torch.OutOfMemoryError) as raised:
        ledger.allocate(ledger.write_birth(90 * MIB - 5, ""))
    ledger.end(blocks[0])  # as the error passes through
    peaks = PhasePeaks(gpu.reading, gpu.reset_peaks)
    peaks.enter_phase(Phase.OPTIMIZER_STEP)
    return Device(
        hardware=CARD,
        peaks=peaks,
        placed=dict,
        train=lambda trainer: None,
        simulated=SimulatedRun(gpu=gpu, watch=SimpleNamespace(recorder=recorder)),
    ), raised.value


def test_on_a_simulated_card_the_figures_are_those_of_the_moment_to_the_byte() -> None:
    device, error = refused()
    shortage = shortage_of(error, trainer(), device)
    assert (shortage.requested_bytes, shortage.segment_bytes, shortage.step) == (90 * MIB - 5, 90 * MIB, 3)
    assert shortage.phase is Phase.OPTIMIZER_STEP
    owners = {Owner.WEIGHTS: 20 * MIB, Owner.GRADIENTS: 10 * MIB, Owner.TEMPORARY: 7, Owner.OTHER: 505}
    assert shortage.measured == owners
    assert (shortage.allocated_bytes, shortage.rest_bytes) == (30 * MIB + 512, 0)
    assert shortage.outside_bytes == 10 * MIB
    assert shortage.others_bytes == CARD.total_bytes - CARD.free_bytes
    # An error that the card did not raise is not explained by its last refusal.
    shortage = shortage_of(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), trainer(), device)
    assert shortage.requested_bytes is None
    assert shortage.measured == {}
    assert shortage.allocated_bytes == device.read().allocated_bytes  # type: ignore[union-attr]


FIGURES = ("requested_bytes", "allocated_bytes", "reserved_bytes", "total_bytes", "free_bytes", "outside_bytes")
SIMULATED = (GIB, 20 * GIB, 22 * GIB, 24 * GIB, 0, GIB)
REFUSAL = Refusal(**dict(zip(FIGURES, SIMULATED, strict=True)), segment_bytes=GIB)
HALF = 512 * MIB


def test_on_a_real_card_the_message_tells_what_was_held() -> None:
    """What the allocator says afterwards, ``left`` in GiB, is less, since tensors died meanwhile."""
    for error, left, figures in (
        (torch.OutOfMemoryError(MESSAGE), (2, 20), (3 * HALF, 20 * GIB, 41 * HALF, 47 * HALF, HALF, HALF, 2 * GIB)),
        (
            RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
            (2, 3),
            (None, 2 * GIB, 3 * GIB, 24 * GIB, 20 * GIB - 300 * MIB, 300 * MIB, GIB),
        ),
        (torch.OutOfMemoryError(REFUSAL.message()), (0, 0), (*SIMULATED, GIB)),
    ):
        shortage = shortage_of(error, trainer(), real_card(*left))
        assert tuple(getattr(shortage, name) for name in (*FIGURES, "others_bytes")) == figures, error


def test_owners_of_a_real_card_are_counted_by_storage_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("scale", torch.ones(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    wrapped = SimpleNamespace(optimizer=optimizer)
    made = trainer(model=model, optimizer=wrapped)
    assert shortage_of(RuntimeError(), made, real_card(0, 0)).measured == {
        Owner.WEIGHTS: 4 * 64 + 4 * 4,
        Owner.GRADIENTS: 4 * 64,
        Owner.OPTIMIZER_STATE: 2 * 4 * 64 + 4,
    }
    safeguards = Safeguards.__new__(Safeguards)
    safeguards._trainer, safeguards._device, safeguards._shortage = SimpleNamespace(), real_card(0, 0), None
    assert safeguards.shortage(torch.OutOfMemoryError(MESSAGE)) is None, "what cannot be read hides no error"


SAID = {
    "CUDA out of memory. Tried to allocate 92.00 MiB. GPU 0 has a total capacity of 7.79 GiB": "GPU memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "cuBLAS workspace",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "cuBLAS workspace",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(handle)`": "cuBLAS workspace",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "cuDNN workspace",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "cuDNN workspace",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED": "host memory",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": "cuSOLVER workspace",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`": "cuSPARSE workspace",
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'": "NCCL buffer",
    "node:2134736:2285781 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'": "NCCL buffer",
    "Failed to CUDA calloc async 4 bytes": "NCCL buffer",
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory.": "GPU memory",
    "Error out of memory at line 88 in file /src/csrc/ops.cu": "bitsandbytes buffer",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported": "CUDA runtime memory",
    "CUDA driver error: out of memory": "CUDA driver memory",
    "Triton Error [CUDA]: out of memory": "CUDA driver memory",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4000000000000000 bytes. Error code 12 (Cannot allocate memory)": "host memory",
    "unable to mmap 1024 bytes from file </torch_1>: Cannot allocate memory (12)": "host memory",
    "std::bad_alloc": "host memory",
}
NOT_MEMORY = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 1 'invalid argument'",
    "CUDA error: an illegal memory access was encountered, after CUDA out of memory",
    "OutOfMemoryError: CUDA error: an illegal memory access was encountered",
    "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
)


def test_what_a_library_says_names_whose_memory_ran_out_and_types_speak_for_themselves() -> None:
    assert {text: kind_of_text(text) for text in SAID} == SAID
    assert {text: kind_of(RuntimeError(text)) for text in SAID} == SAID
    assert [text for text in NOT_MEMORY if is_out_of_memory(RuntimeError(text))] == []
    assert kind_of(torch.OutOfMemoryError("")) == "GPU memory"
    assert kind_of(MemoryError()) == "host memory"
    assert kind_of(ValueError("CUDA out of memory.")) is None
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert kind_of(caught.value) == "host memory"


def test_neither_an_attempt_that_failed_nor_what_led_to_its_error_holds_anything() -> None:
    seen = []

    def hold(error: Exception) -> None:
        held = torch.zeros(3)
        seen.append(weakref.ref(held))
        raise error

    def caught(error: Exception) -> Exception:
        with pytest.raises(type(error)) as raised:
            hold(error)
        return raised.value

    def work() -> None:
        own = torch.zeros(3)
        seen.append(weakref.ref(own))
        cause = caught(KeyError())
        enclosed = torch.zeros(3)
        seen.append(weakref.ref(enclosed))

        def recompute() -> None:
            hold(IndexError(enclosed.shape))

        try:
            recompute()
        except IndexError:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried") from cause

    gc.disable()
    try:
        outcome = attempt(work)
    finally:
        gc.enable()
    assert isinstance(outcome, RanOut)
    assert outcome.message == "CUDA out of memory."
    assert "in work" in outcome.error.__notes__[0]
    assert [each() for each in seen] == [None] * 4
    assert attempt(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)
