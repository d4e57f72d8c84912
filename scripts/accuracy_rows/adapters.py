"""Compares rehearsals of PEFT's adapters with the public runs of PEFT's own method comparison.

The results are the JSON files of ``method_comparison/MetaMathQA/results`` in PEFT's repository, one for each run. A run
is a plain training loop around a PEFT model on an L40S (``method_comparison/MetaMathQA/run.py: train``): no trainer,
the model's own loss, torch's AdamW. Batches are sorted within buckets of 20, the longest first. The cache is emptied
every 10 steps, so it is always empty before the longest batch of a bucket. The loop's reserved bytes are compared.

Some adapters hold different tensors in the installed PEFT than in the version that the runs used. The results name that
version's commit; put its ``src`` on PYTHONPATH to rehearse it. The length of the longest batch is not reported. It is
inferred from one run, LoRA of rank 32; all others are predictions.
"""

import json
import pathlib
import statistics
import warnings
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import bench

from autotrain_mem.settings import adapter_config
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Owner, Phase, Trace

BAR = 0.03
"""The largest error allowed, as a share of the measured bytes."""
L40S = (8, 9)
LONGEST = 768
"""``default_training_params.json: max_seq_length``."""
KNOWN = "lora--llama-3.2-3B-rank32"
"""The run from which the length of the longest batch is inferred."""
APART = {
    "boft--": "that loop leaves its permutations on the host; a trainer moves the whole model to the device",
    "prefixtuning--llama-3.2-3B-lr": "with 200 virtual tokens, its evaluation, which generates for 50 rows, needs more",
}
"""The beginning of a result's name -> why such results do not count."""
PLAIN = {"optimizer_type": "AdamW", "dtype": "bfloat16", "compile": False, "use_amp": False, "use_gc": False}
"""The settings of a run that the rehearsed loop reproduces; runs with other settings are skipped."""
STEPS = 2
"""The optimizer creates its state in the first step; the second is like all later ones."""


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    result: dict[str, Any]

    @property
    def measured_bytes(self) -> int:
        """The process's peak of reserved bytes, including loading and evaluation (``utils.py: log_results``)."""
        return int(self.result["train_info"]["accelerator_memory_max"])

    @property
    def adapter(self) -> dict[str, Any] | None:
        """PEFT's config at the start of the run; None if all weights were trained.

        AdaLoRA later writes the ranks that it kept into it (``peft/tuners/adalora/model.py: update_and_allocate``).
        """
        told: dict[str, Any] | None = self.result["run_info"]["peft_config"]
        return {**told, "rank_pattern": None} if told and told["peft_type"] == "ADALORA" else told or None

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = self.result["run_info"]["train_config"]
        return found


def check(results: pathlib.Path, model: pathlib.Path, kinds: str) -> bool:
    """Prints a line for each run; returns whether the errors of all counted runs are at most ``BAR``. ``model``: a
    folder with the config.json of the model that the runs trained. ``kinds``: the adapters to compare, separated by
    commas: the first parts of the results' names. Empty for all."""
    bench.on_cpu()
    files = [Run(path.stem, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(results.glob("*.json"))]
    runs = [run for run in files if run.result["train_info"]["status"] == "success"]
    runs = [run for run in runs if PLAIN.items() <= run.config.items()]
    known = next(run for run in runs if run.name == KNOWN)
    lengths = range(1, LONGEST + 1)
    longest = lengths[bisect_left(lengths[:-1], known.measured_bytes, key=partial(rehearsed_bytes, model, known))]
    print(f"the longest batch has rows of {longest} tokens, inferred from {KNOWN}")
    asked = [run for run in runs if run is not known and (not kinds or run.name.split("--")[0] in kinds.split(","))]
    off = [abs(error) for run in asked if (error := compared(model, run, longest)) is not None]
    if not off:
        print("no run counts")
        return False
    print(f"{len(off)} runs: median {statistics.median(off):.1%}, worst {max(off):.1%}; {BAR:.0%} is the limit")
    return max(off) <= BAR


def compared(model: pathlib.Path, run: Run, length: int) -> float | None:
    """Prints a run beside its rehearsal; returns the relative error, or None if the run does not count."""
    why = adapter_config.UNREHEARSED.get(adapter_config.kind_of(adapter_config.canonical(run.adapter or {})))
    try:
        made = 0 if why else rehearsed_bytes(model, run, length)
    except ImportError as missing:  # AdaMSS needs scikit-learn
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
    """Returns the peak of reserved bytes with rows of ``length`` tokens."""
    from autotrain_mem.estimator.replay import DeviceCapacity, reserve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = rehearse_loop(model, run, length)
    return reserve(trace, DeviceCapacity(capacity_bytes=None), grows=False).peak_reserved_bytes


def rehearse_loop(folder: pathlib.Path, run: Run, length: int) -> Trace:
    """Rehearses a run in bfloat16, without checkpointing; records from the moment that its model is loaded. ``length``:
    tokens of the longest row. The last row has one less, since equally long rows would need no mask."""
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
