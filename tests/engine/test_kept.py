"""What may be kept of a rehearsal for the next run, and what may not."""

from __future__ import annotations

import pathlib
from dataclasses import replace

from nouns import TRL_DEFAULTS

from autotrain_mem.engine.rehearsals import NOWHERE, Rehearsals, job_key
from autotrain_mem.machine.catalog import named
from autotrain_mem.spec import Job
from autotrain_mem.store import Store
from autotrain_mem.worker.pool import Workers

JOB = Job(method="sft", model="m", dataset=None, arguments={"optim": "sgd", "learning_rate": 1e-4})


def with_arguments(**arguments: object) -> Job:
    return replace(JOB, arguments={**JOB.arguments, **arguments})


def test_what_moves_no_byte_is_no_part_of_the_key() -> None:
    assert job_key(with_arguments(learning_rate=3e-3, output_dir="elsewhere", num_train_epochs=7)) == job_key(JOB)


def test_weight_decay_is_for_some_optimizers_hold_decayed_gradients() -> None:
    assert job_key(with_arguments(weight_decay=0.1)) != job_key(JOB)


def test_nothing_is_kept_of_a_model_with_code_of_its_own(tmp_path: pathlib.Path) -> None:
    store = Store(tmp_path, told=lambda message: None)
    kept = Rehearsals(workers=Workers.holding(), job=JOB, defaults=TRL_DEFAULTS, hardware=named("rtx3060"), store=store)
    assert kept.footprint_store is store
    assert replace(kept, job=with_arguments(trust_remote_code=True)).footprint_store is NOWHERE
