"""What needs no TRL is refused before a worker is asked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotrain_mem import api
from autotrain_mem.parallel.place import Place
from autotrain_mem.planning.output_dir import check_weights
from autotrain_mem.run.early import refuse
from autotrain_mem.support import sources
from autotrain_mem.support.errors import MissingExtraError, ModelNotFoundError, OutputFolderError
from autotrain_mem.types import Job
from autotrain_mem.types.autofit import AutoFit
from tests import fake_worker
from tests.fake_worker import FakeWorker
from tests.planning.test_compare_gpus import LARGE


def test_a_model_that_reads_images_is_refused_where_nothing_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
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


def test_a_folder_with_a_file_of_the_users_own_is_refused_also_where_a_plan_is_followed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    job = Job(method="sft", model="here/m", dataset=None, arguments={"max_length": 64, "output_dir": str(tmp_path)})
    plan = api.plan(fake_worker.rehearsals(FakeWorker(), job, LARGE))
    wish = api.Wish(method="sft", autofit=AutoFit(plan=plan))
    refuse(wish, to_train=False)
    with pytest.raises(OutputFolderError, match=r"\(README\.md\)"):
        refuse(wish, to_train=True)
    refuse(replace(wish, argv=("--output_dir", str(tmp_path / "new"))), to_train=True)
    refuse(replace(wish, place=Place(rank=1, machines=2, address="", port=0)), to_train=True)  # the first one's folder


def test_only_files_of_weights_make_a_folder_one_to_train_from(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        check_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    check_weights(tmp_path)
