"""What needs no TRL is refused before a worker is asked."""

import json
from pathlib import Path

import pytest

from autotrain_mem import api, local_files
from autotrain_mem.engine.early import refuse
from autotrain_mem.errors import MissingExtraError
from autotrain_mem.spec.autofit import AutoFit


def test_a_model_that_reads_images_is_refused_where_nothing_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "find_spec", lambda name: None)
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.mkdir()
    rows.write_text("{}\n")
    wish = api.Wish(method="sft", model=str(model), dataset=str(rows), autofit=AutoFit(gpu="t4"))
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    refuse(wish, to_train=False)
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3", "vision_config": {}}))
    with pytest.raises(MissingExtraError, match="Pillow"):
        refuse(wish, to_train=False)
    refuse(wish, to_train=False, reads_data=False)
