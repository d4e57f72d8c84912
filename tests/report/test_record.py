"""A run is told in two files of its output folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autotrain_mem.engine.output_dir import write_run


def test_a_run_is_recorded_in_two_files_each_when_it_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, plan_json={"schema": "autofit.plan/1"})
    assert os.listdir(tmp_path) == ["plan.json"]
    write_run(tmp_path, report_json={"schema": "autofit.run/1"})
    assert json.loads((tmp_path / "plan.json").read_text()) == {"schema": "autofit.plan/1"}
    assert json.loads((tmp_path / "run.json").read_text()) == {"schema": "autofit.run/1"}
