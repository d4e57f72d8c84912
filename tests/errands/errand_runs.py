"""Folders of runs, with an adapter or a whole model in them."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotrain_mem.types import codec
from tests.report.report_examples import UNCHANGED_PLAN

MakeRun = Callable[..., pathlib.Path]


@pytest.fixture
def make_run(tmp_path: pathlib.Path) -> MakeRun:
    """``make_run("run", "adapter_config.json", ...)``: plan, report and empty files of these names."""

    def made(name: str, *files: str, model: str = "tiny", method: str = "sft", **knobs: object) -> pathlib.Path:
        folder = tmp_path / name
        folder.mkdir()
        plan = replace(UNCHANGED_PLAN, job=replace(UNCHANGED_PLAN.job, model=model, method=method))
        plan = replace(plan, estimate=replace(plan.estimate, knobs=replace(plan.knobs, **knobs)))
        (folder / "plan.json").write_text(json.dumps(codec.to_json(plan)), encoding="utf-8")
        (folder / "run.json").write_text('{"steps": 7}', encoding="utf-8")
        for file in files:
            (folder / file).write_text("{}", encoding="utf-8")
        return folder

    return made


ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
