"""Which folders hold a run that has ended, and what can be done with it."""

import json
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotrain_mem.cli.errands import check_repository, errand_of, find_run, merge_errand, quantized_note
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, ModelNotFoundError, OutputFolderError, UsageError
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


def test_an_adapter_is_told_from_a_whole_model(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    adapter, whole = find_run(str(make_run("one", *ADAPTER))), find_run(str(make_run("two", "model.safetensors")))
    assert (adapter.is_adapter, adapter.base) == (True, "tiny")
    assert not whole.is_adapter
    assert errand_of(whole, "chat").base is None


def test_a_run_of_another_version_is_a_run(make_run: MakeRun) -> None:
    """Its plan may hold what this version does not know, and lack what it needs."""
    folder = make_run("one", "model.safetensors")
    plan = json.loads((folder / "plan.json").read_text())
    del plan["estimate"], plan["levers"]
    (folder / "plan.json").write_text(json.dumps(plan | {"schema": "autofit.plan/99"}))
    assert find_run(str(folder)).method.name == "sft"
    for text in ("{}", "[", json.dumps(plan | {"method": "later"}), json.dumps(plan | {"model": 7})):
        (folder / "plan.json").write_text(text)
        with pytest.raises(UsageError, match="names no method and model"):
            find_run(str(folder))


def test_what_is_no_run_that_has_ended_is_refused_with_the_way_on(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    begun, dead = make_run("begun", "train.log"), make_run("dead")
    (begun / "checkpoint-4").mkdir()
    (dead / "run.json").unlink()
    for path, kind, words in [
        (str(tmp_path / "nowhere"), UsageError, "There is no folder"),
        ("", UsageError, "There is no folder"),
        (str(begun / "plan.json"), UsageError, "is a file"),
        (str(begun / "checkpoint-4"), UsageError, "is not the folder of a run"),
        (str(tmp_path), UsageError, str(begun)),  # the runs in it are named
        (str(begun), OutputFolderError, "ended after step 7"),
        (str(begun), OutputFolderError, "--resume_from_checkpoint"),
        (str(dead), OutputFolderError, f"--plan {dead}"),
    ]:
        with pytest.raises(kind) as caught:
            find_run(path)
        assert words in str(caught.value)


def test_a_base_model_that_is_gone_is_named_with_the_flag(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    gone = find_run(str(make_run("one", *ADAPTER, model=str(tmp_path / "gone"))))
    with pytest.raises(ModelNotFoundError, match=r"there is no such folder[\s\S]*--base"):
        errand_of(gone, "chat")
    assert errand_of(gone, "chat", base="ORG/NAME").base == "ORG/NAME"
    on_hub = find_run(str(make_run("two", *ADAPTER, model="Qwen/Qwen2.5-0.5B")))
    assert errand_of(on_hub, "chat").base == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(UsageError, match="needs no base"):
        errand_of(find_run(str(make_run("three", "model.safetensors"))), "chat", base="ORG/NAME")


def test_nothing_is_merged_over_a_folder_or_out_of_a_whole_model(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    whole = find_run(str(make_run("whole", "model.safetensors")))
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_errand(whole, errand_of(whole, "merge"), None)
    run = find_run(str(make_run("run", *ADAPTER, model="ORG/NAME", load_in_4bit=True, use_peft=True)))
    errand = errand_of(run, "merge")
    assert merge_errand(run, errand, None).to == str(tmp_path.resolve() / "run-merged")
    assert "in 4 bits" in str(quantized_note(errand))
    shutil.copytree(run.folder, tmp_path / "run-merged")
    for out in (None, str(run.folder), str(tmp_path / "no" / "such")):
        with pytest.raises(OutputFolderError):
            merge_errand(run, errand, out)


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "a b/c", "../x/y"])
def test_a_repository_needs_an_owner_and_a_name(name: str) -> None:
    with pytest.raises(AutofitError, match="--to ORG/NAME"):
        check_repository(name)
