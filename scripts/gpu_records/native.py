"""Rehearses on fake cuda tensors, where torch itself takes CUDA's paths. Needs a GPU.

``python -m gpu_records.native REQUEST.json`` rehearses one case so and writes its trace. Where its allocations differ
from those of the usual rehearsal (fake cpu tensors under the rules of CUDA), a rule is missing. What kernels allocate
within one operator no fake tensor shows; a recorded run does, with which both can be compared too.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotrain_mem.support import codec
from autotrain_mem.types import Trace
from autotrain_mem.types.methods_table import METHODS
from gpu_records.cases import GpuCase
from gpu_records.child import import_all, real_trainer_spec
from gpu_records.record import write_json
from gpu_records.sequences import births_of_trace, differences, summary

SMALLEST_BYTES = 1 << 20
"""Compared are allocations from here on: of smaller ones there are many, and they move no peak."""


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    case = codec.from_json(GpuCase, request["case"])
    import_all(case)
    if not sys.stdin.readline():
        return
    with tempfile.TemporaryDirectory(prefix="native-", ignore_cleanup_errors=True) as scratch:
        trace, capability = rehearse_natively(case, Path(request["model"]), scratch)
    content = {"case": request["case"], "compute_capability": capability, "trace": codec.to_json(trace)}
    write_json(native_path(Path(request["out"]), case.name), content)
    sys.stdout.flush()
    os._exit(0)


def native_path(folder: Path, case: str) -> Path:
    return folder / f"{case}.native.json"


def apart(case: GpuCase) -> tuple[str, ...]:
    """Phases that a rehearsal does not go through allocation by allocation: it makes weights, and takes a generation
    by its two ends.
    """
    return ("load", "generate", "evaluate") if METHODS[case.method].is_online else ("load",)


def compare_all(
    cases: Iterable[GpuCase], out: Path, models: Path, packages: Path | None, budget_seconds: float
) -> bool:
    """Rehearse cases natively and as usual, and print where the two differ; returns whether all could be."""
    from autotrain_mem.support.errors import AutofitError
    from autotrain_mem.worker.client import Worker
    from gpu_records.models import model_folder
    from gpu_records.runs import python_path, start_child

    os.environ["PYTHONPATH"] = python_path(packages)  # the worker's
    start = start_child(out, models, "cuda", packages, module="gpu_records.native")
    began, done = time.monotonic(), True
    with Worker() as worker:
        for case in cases:
            path = native_path(out, case.name)
            left_seconds = budget_seconds - (time.monotonic() - began)
            print(f"\n{case.name}: fake cuda tensors against fake cpu tensors")
            if not path.is_file():
                running = start(case)
                error = running.go(max(left_seconds, 1.0))
                running.stop()
                if error:
                    print("\n".join(error.splitlines()[-6:]))
                    done = False
                    continue
            content = json.loads(path.read_text(encoding="utf-8"))
            capability = tuple(content["compute_capability"])
            job = case.job(model_folder(models, case.model))
            try:
                usual = worker.rehearse(job, case.knobs, case.length, capability)
            except AutofitError as error:
                print(f"the usual rehearsal failed: {error}")
                done = False
                continue
            for line in compared(case, codec.from_json(Trace, content["trace"]), usual):
                print(line)
    return done


def compared(case: GpuCase, native: Trace, usual: Trace, smallest_bytes: int = SMALLEST_BYTES) -> list[str]:
    """What only one of the two rehearsals allocates."""
    first, second = (births_of_trace(trace, apart(case), smallest_bytes) for trace in (native, usual))
    found = differences(first, second)
    counts = f"{len(first)} and {len(second)} allocations of at least {smallest_bytes:,} bytes"
    return [f"{counts}, {len(found)} differences", *summary(found, ("native", "usual"))]


# -- the rehearsal ---------------------------------------------------------------------------------------------------


def rehearse_natively(case: GpuCase, model: Path, scratch: str) -> tuple[Trace, tuple[int, int]]:
    """As ``rehearsal.fake_run.rehearse_trainer`` does, but for the device and the rules that it needs."""
    import torch

    from autotrain_mem.rehearsal import fake_run
    from autotrain_mem.rehearsal.cuda.rules import cuda_semantics
    from autotrain_mem.rehearsal.cuda.workspaces import workspaces
    from autotrain_mem.trainers.weightless import without_weights

    capability = torch.cuda.get_device_capability(0)
    spec = real_trainer_spec(case, model, scratch, on_host=False, dataloader_pin_memory=False)

    def on_cuda(model: Any) -> Any:
        """Models come into being on the device."""
        with torch.device("cuda"):
            return fake_run.materialize(model)

    moved = patch.object(torch.nn.Module, "_apply", _apply)
    with fake_run.fake_tensors() as mode, without_weights(on_cuda), moved:
        values = _values_on_host(mode)
        recorder = _recorder_of_cuda(values.run, workspaces(capability))
        with cuda_semantics(recorder, capability, "fake cuda"):
            fake_run.train_on_fakes(spec, recorder, values)
    return recorder.trace(), capability


def _apply(module: Any, convert: Callable[[Any], Any], recurse: bool = True, made: Any = None) -> Any:
    """``Module._apply``, by which a parameter that is moved becomes a new one: a fake tensor's data cannot be exchanged
    for one of another device.
    """
    import torch

    made = {} if made is None else made
    for child in module.children() if recurse else ():
        _apply(child, convert, recurse, made)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if id(parameter) not in made:
            with torch.no_grad():
                new = convert(parameter)
            if new is not parameter and new.device == parameter.device:
                parameter.data = new
                new = parameter
            elif new is not parameter:
                new = torch.nn.Parameter(new, parameter.requires_grad)
            made[id(parameter)] = parameter, new  # the old one too, so that its id is not given again
        module._parameters[name] = made[id(parameter)][1]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def _recorder_of_cuda(execute: Any, workspace: Any) -> Any:
    """A recorder that sees what lies on the device only."""
    from autotrain_mem.rehearsal.trace.recorder import Recorder

    class OfCuda(Recorder):
        def _see(self, tensor: Any) -> int | None:
            device = getattr(tensor, "fake_device", None) or tensor.device
            return super()._see(tensor) if device.type == "cuda" else None

    return OfCuda(execute, workspace=workspace)


def _values_on_host(mode: Any) -> Any:
    """Known values stay on the host, whatever device the operator that makes them names."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    from autotrain_mem.rehearsal.known_values import Known, KnownValues, know, known_value, real_tensors

    class OnHost(KnownValues):
        def _is_known(self, operator: Any, args: Any, kwargs: Any) -> bool:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and tensor.is_cuda:
                    with real_tensors():  # made of Python numbers, right on the device
                        tensor.__dict__.setdefault("known", Known(tensor.cpu(), [True]))
            return super()._is_known(operator, args, kwargs)

        def _compute_beside(self, operator: Any, args: Any, kwargs: Any, out: Any) -> None:
            elsewhere = {"device": torch.device("cpu"), "pin_memory": False}
            moved = {name: elsewhere.get(name, value) for name, value in kwargs.items()}
            super()._compute_beside(operator, args, moved, out)

        def _dynamic(self, operator: Any, args: Any, kwargs: Any, known: bool) -> Any:
            out = super()._dynamic(operator, args, kwargs, known)
            device = args[0].device
            return tuple(_on(one, device) for one in out) if isinstance(out, tuple) else _on(out, device)

    def _on(fake: Any, device: Any) -> Any:
        if fake.device == device:
            return fake
        moved = torch.empty(fake.shape, dtype=fake.dtype, device=device)
        value = known_value(fake)
        if value is not None:
            know(moved, value)
        return moved

    return OnHost(mode)


if __name__ == "__main__":
    main()
