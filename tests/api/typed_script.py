"""A user's script, which only mypy reads: where it does not report one of the three errors, it reports the ignore."""

from pathlib import Path
from typing import assert_type

import autotrain_mem
from autotrain_mem import AutoFit, Estimate, Harm, Phase, Plan

chosen = autotrain_mem.plan("sft", Path("tiny"), autofit=AutoFit(gpu="l4"), learning_rate=1e-4, use_peft=True)
assert_type(chosen, Plan)
assert_type(chosen.knobs.per_device_train_batch_size, int)
assert_type(chosen.levers[0].harm, Harm)
assert_type(chosen.estimate.memory.phases[Phase.BACKWARD], int)
assert_type(autotrain_mem.fit("sft", "tiny", on_event=lambda event: None).prediction_error, float | None)
assert_type([card.total_bytes for card in autotrain_mem.gpus()], list[int])
assert_type(autotrain_mem.cards("sft", "tiny").verdicts[0].estimate, Estimate | None)
assert_type(Plan.load("plan.json"), Plan)
autotrain_mem.plann("sft", "tiny")  # type: ignore[attr-defined]
autotrain_mem.plan("sft", 5)  # type: ignore[arg-type]
chosen.knobs.max_length = 5  # type: ignore[misc]
