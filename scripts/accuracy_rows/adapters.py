"""Compares rehearsals of PEFT's adapters with the public runs of PEFT's own method comparison.

The results are the JSON files of ``method_comparison/MetaMathQA/results`` in PEFT's repository, one for each run. Each
is a bare loop around a model of PEFT's on an L40S (``method_comparison/MetaMathQA/run.py: train``): no trainer, the
model's own loss, torch's AdamW. Batches are sorted within buckets of 20, the longest first, and the cache is emptied
every 10 steps, so the longest batch of a bucket always finds it empty. What the loop reserved is compared.

Some adapters keep other tensors in the PEFT that is installed here than in that of the runs, which their results name
by its commit: its ``src`` on PYTHONPATH is rehearsed instead. One number is not told: how many tokens the longest batch
had. It is taken from one run, LoRA of rank 32, and all others are predictions.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import bench

from autotrain_mem.settings import adapter_config
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Owner, Phase, Trace

BAR = 0.03
"""Share of what was measured."""
L40S = (8, 9)
LONGEST = 768
"""``default_training_params.json: max_seq_length``."""
KNOWN = "lora--llama-3.2-3B-rank32"
"""The run by which the length of the longest batch is found."""
APART = {
    "boft--": "its permutations stay on the host in that loop, where a trainer moves all of a model to the device",
    "prefixtuning--llama-3.2-3B-lr": "with 200 virtual tokens its evaluation, which generates for 50 rows, takes more",
}
"""How the names of results begin -> why they do not count."""
PLAIN = {"optimizer_type": "AdamW", "dtype": "bfloat16", "compile": False, "use_amp": False, "use_gc": False}
"""How a run is trained that the loop stands for."""
STEPS = 2
"""The optimizer makes its state in the first; the second is as all others."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    result: dict[str, Any]

    @property
    def measured_bytes(self) -> int:
        """What the process had reserved at most, loading and evaluation included (``utils.py: log_results``)."""
        return int(self.result["train_info"]["accelerator_memory_max"])

    @property
    def adapter(self) -> dict[str, Any] | None:
        """PEFT's config, as the run began with it; None where all weights were trained.

        AdaLoRA writes into it which ranks it kept (``peft/tuners/adalora/model.py: update_and_allocate``).
        """
        told: dict[str, Any] | None = self.result["run_info"]["peft_config"]
        return {**told, "rank_pattern": None} if told and told["peft_type"] == "ADALORA" else told or None

    @property
    def config(self) -> dict[str, Any]:
        """How it was trained."""
        found: dict[str, Any] = self.result["run_info"]["train_config"]
        return found


def check(results: pathlib.Path, model: pathlib.Path, kinds: str) -> bool:
    """Print a line for each run; returns whether all that count are within the bar.

    Args:
        model: A folder with the config.json of the model that they trained.
        kinds: Those to compare, separated by commas, as the results' names begin; empty for all.
    """
    bench.on_cpu()
    files = [Run(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*.json"))]
    runs = [run for run in files if run.result["train_info"]["status"] == "success"]
    runs = [run for run in runs if PLAIN.items() <= run.config.items()]
    known = next(run for run in runs if run.name == KNOWN)
    shortest, longest = 1, LONGEST
    while shortest < longest:
        middle = (shortest + longest) // 2
        if rehearsed_bytes(model, known, middle) < known.measured_bytes:
            shortest = middle + 1
        else:
            longest = middle
    print(f"the longest batch has rows of {shortest} tokens, by {KNOWN}")
    asked = [run for run in runs if run is not known and (not kinds or run.name.split("--")[0] in kinds.split(","))]
    off = [abs(error) for run in asked if (error := compared(model, run, shortest)) is not None]
    if not off:
        print("none of them counts")
        return False
    print(f"{len(off)} runs: median {statistics.median(off):.1%}, worst {max(off):.1%}; {BAR:.0%} is the bar")
    return max(off) <= BAR


def compared(model: pathlib.Path, run: Run, length: int) -> float | None:
    """Print a run beside its rehearsal; returns the share by which it is off, None where that does not count."""
    why = adapter_config.why_unrehearsed(adapter_config.canonical(run.adapter or {}))
    try:
        made = 0 if why else rehearsed_bytes(model, run, length)
    except ImportError as missing:  # AdaMSS takes scikit-learn
        why = str(missing)
    if why:
        print(f"{run.name:58} not rehearsed: {why}")
        return None
    error = made / run.measured_bytes - 1
    apart = next((why for beginning, why in APART.items() if run.name.startswith(beginning)), None)
    print(
        f"{run.name:58} {made / GIB:6.2f} / {run.measured_bytes / GIB:6.2f} GiB reserved {error:+.1%}"
        f"{f'  not counted: {apart}' if apart else ''}",
        flush=True,
    )
    return None if apart else error


def rehearsed_bytes(model: pathlib.Path, run: Run, length: int) -> int:
    """What a run reserves with rows of so many tokens."""
    from autotrain_mem.estimator.replay import DeviceCapacity, reserve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = rehearse_loop(model, run, length)
    return reserve(trace, DeviceCapacity(capacity_bytes=None), grows=False).peak_reserved_bytes


def rehearse_loop(folder: pathlib.Path, run: Run, length: int) -> Trace:
    """Rehearse a run in bfloat16, without checkpointing, from the moment at which its model is loaded.

    Args:
        length: Tokens of the longest row; the last row has one less, since rows of one length need no mask.
    """
    import torch
    from peft import PeftConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from autotrain_mem.rehearsal.cuda.rules import cuda_semantics
    from autotrain_mem.rehearsal.cuda.workspaces import workspaces
    from autotrain_mem.rehearsal.fake_run import fake_tensors, materialize
    from autotrain_mem.rehearsal.known_values import KnownValues
    from autotrain_mem.rehearsal.trace.recorder import Recorder
    from autotrain_mem.trainers.weightless import without_weights

    ids = torch.ones((run.config["batch_size"], length), dtype=torch.int64)
    mask = ids.clone()
    mask[-1, -1] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
    with ExitStack() as stack:
        mode = stack.enter_context(fake_tensors())
        stack.enter_context(without_weights(materialize))
        values = KnownValues(mode)
        recorder = Recorder(values.run, workspace=workspaces(L40S))
        stack.enter_context(cuda_semantics(recorder, L40S))
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if run.adapter is not None:
            config = PeftConfig.from_peft_type(**run.adapter)
            model = get_peft_model(model, config, autocast_adapter_dtype=run.config["autocast_adapter_dtype"])
        model.train()
        recorder.adopt_model(model)
        with recorder.recording():
            _train(model, batch, recorder, values)
    return recorder.trace()


def _train(model: Any, rows: dict[str, Any], recorder: Any, values: Any) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    def own_state(*_: Any) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    recorder.mark(value, Owner.OPTIMIZER_STATE, str(name))

    optimizer.register_step_post_hook(own_state)
    tokens = int(rows["attention_mask"].sum())
    for _ in range(STEPS):
        recorder.empty_cache()
        batch = dict(values.arrive(rows))
        recorder.adopt_batch(batch.values())
        optimizer.zero_grad()
        recorder.enter_phase(Phase.FORWARD)
        output = model(**batch, num_items_in_batch=tokens)
        recorder.enter_phase(Phase.BACKWARD)
        output.loss.backward()
        recorder.enter_phase(Phase.OPTIMIZER_STEP)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
