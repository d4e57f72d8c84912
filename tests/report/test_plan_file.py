"""A plan file is read back whole, or refused with one clear message: nothing that is changed in it goes unnoticed; and
no file of the user's is written over."""

import copy
import functools
import json
import os
import pickle
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from report_examples import DATA, GRPO_PLAN, PLAN, PLANS
from test_console import rendered

from autotrain_mem.planning.kept_answers import job_key
from autotrain_mem.planning.read_request import PlanHints, with_plan
from autotrain_mem.planning.run_request import RunRequest
from autotrain_mem.report.estimate_view import check_snapshot, write_snapshot
from autotrain_mem.report.explain_view import explain_view
from autotrain_mem.settings.knobs import Knobs
from autotrain_mem.support import codec
from autotrain_mem.support.errors import OutputFolderError, PlanFileError
from autotrain_mem.support.units import GIB, MIB
from autotrain_mem.types import AutoFit, ImageSummary, Job, LargestValue, Plan, Price, PythonCall
from autotrain_mem.types.plan_file import LARGEST_BYTES, PLAN_NAME, PLAN_SCHEMA
from autotrain_mem.types.planned import read_plan

WRITTEN = json.loads(json.dumps(codec.to_json(PLAN)))


def read(values: Any) -> Plan:
    return read_plan(json.dumps(values).encode(), "plan.json")


PICTURES = ImageSummary(images=9, rows_without=1, percentiles=(1, 2, 3, 4), most=5, worst=("1024x768",))
PICTURED = replace(PLAN.estimate.memory, parts_at_peak=(("vision tower", 2**30),))
RARE = replace(
    PLAN,
    price=Price(gpu="rtx3060", per_hour=0.1, provider="somebody", seen="2026-11-01"),
    most=LargestValue(name="max_length", value=768, next_value=832, next_required_bytes=2**34),
    job=replace(PLAN.job, within_seconds=28800.0, budget=20.0, images=("1024x768",)),
    estimate=replace(PLAN.estimate, knobs=replace(PLAN.knobs, max_pixels=2**19), memory=PICTURED),
    data=replace(DATA, images=PICTURES),
)
"""With a budget in time and money, as much as fits of a length, and images."""


@pytest.mark.parametrize("plan", [*PLANS, RARE], ids=lambda plan: f"{plan.method} {plan.level}")
def test_every_plan_is_read_back_from_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan
    assert Plan.load(str(tmp_path / PLAN_NAME)) == plan
    whole_run = {"schema": "autofit.fit/1", "plan": codec.to_json(plan), "run": {}}
    assert read(json.loads(json.dumps(whole_run))) == plan


def test_a_broken_file_gets_a_message_that_says_where() -> None:
    text = json.dumps(WRITTEN, indent=2)
    for share in (0.02, 0.5, 0.9999):
        end = int(len(text) * share)
        with pytest.raises(PlanFileError, match=r"is not JSON: .*: line \d+"):
            read_plan(text[:end].encode(), "plan.json")
        comma = text.rindex(",\n", 0, end)
        with pytest.raises(PlanFileError, match="is not JSON"):
            read_plan(f"{text[:comma]} oops{text[comma:]}".encode(), "plan.json")
    for content in (b"[" * 100_000, b'{"schema": ' + b"9" * 5000 + b"}", b"NaN", b"null", b"[1, 2]", b'{"a": "\xff"}'):
        with pytest.raises(PlanFileError, match=r"plan\.json"):
            read_plan(content, "plan.json")


def test_a_value_changed_by_hand_is_named_with_what_it_should_be() -> None:
    for path, value, said in (
        (("estimate", "required_bytes"), 1, r"estimate\.required_bytes is 1 where it should be 9\d+"),
        (("estimate", "owners_at_peak", "weights"), 1, "owners_at_peak do not sum to peak_allocated_bytes"),
        (("job", "max_slowdown"), float("inf"), r"job\.max_slowdown is inf"),
        (("estimate", "time", "tokens"), 10**400, r"tokens"),
        (("data", "rows"), "many", r"Expected `int`, got `str` - at `\$\.data\.rows`"),
    ):
        with pytest.raises(PlanFileError, match=said):
            read(with_value(path, value))


# Every key and every leaf.


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value, objects and lists among them; of a list to the first, since its values are alike."""
    keys = values.keys() if isinstance(values, dict) else range(len(values))[:1] if isinstance(values, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(values[key], (*path, key))


PLACES = list(places(WRITTEN))
FREE = [("job", "arguments"), ("job", "environment"), ("versions",)]
"""Objects with keys of the user's or of the installation's."""


def at(values: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda found, key: found[key], path, values)


def with_value(path: tuple[Any, ...], value: Any) -> Any:
    """The file's JSON with another value, or with a key more."""
    changed = copy.deepcopy(WRITTEN)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def test_a_plan_without_any_one_key_or_with_an_unknown_one_is_refused() -> None:
    for path in ((), *PLACES):
        if path not in FREE and isinstance(at(WRITTEN, path), dict):
            with pytest.raises(PlanFileError):
                read(with_value((*path, "colour"), 7))
            for key in at(WRITTEN, path).keys() - Knobs.json_form.optional:
                changed = copy.deepcopy(WRITTEN)
                del at(changed, path)[key]
                with pytest.raises(PlanFileError):
                    read(changed)


ODD = st.sampled_from([None, True, -1, 0, 10**30, 2.5, float("nan"), float("inf"), "", "words", [], [1], {}, {"a": 1}])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACES), ODD)
def test_whatever_stands_anywhere_is_explained_or_refused(path: tuple[Any, ...], odd: Any) -> None:
    try:
        said = rendered(explain_view(read(with_value(path, odd)))).strip()
    except PlanFileError as refusal:
        said = refusal.message and refusal.hint
    assert said


# Files.


def test_a_plan_is_written_over_any_plan_or_an_empty_file_and_over_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    for before in ("", "\n", '{"schema": "autofit.plan/1"}', json.dumps(codec.to_json(GRPO_PLAN))):
        path.write_text(before)
        PLAN.save(path)
        assert Plan.load(path) == PLAN
    for before in ("words", "[1]", '{"schema": "autofit.estimate/1"}', '{"schema": "autofit.plan/6"'):
        path.write_text(before)
        with pytest.raises(PlanFileError, match=r"notes\.json exists and is not a plan, so it is not overwritten"):
            PLAN.save(path)
        assert path.read_text() == before


def test_a_snapshot_is_written_over_a_snapshot_through_a_link_and_over_nothing_else(tmp_path: Path) -> None:
    snapshot = {"segments": [], "device_traces": [[]]}
    (tmp_path / "run.pickle").write_bytes(pickle.dumps("an older one"))
    (tmp_path / "latest").symlink_to("run.pickle")
    write_snapshot(tmp_path / "latest", snapshot)
    assert (tmp_path / "latest").is_symlink()
    assert pickle.loads((tmp_path / "run.pickle").read_bytes()) == snapshot
    (tmp_path / "notes.md").write_text("mine")
    for refuse in (check_snapshot, lambda path: write_snapshot(path, snapshot)):
        with pytest.raises(
            OutputFolderError, match=r"notes\.md exists and is not a snapshot, so it is not overwritten"
        ):
            refuse(tmp_path / "notes.md")
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_device_or_a_pipe_is_neither_read_nor_replaced(kind: str, tmp_path: Path) -> None:
    """A reader would wait for it, or never see its end."""
    path = tmp_path / "endless.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(PlanFileError, match=r"endless\.json"):
        Plan.load(path)
    with pytest.raises(OutputFolderError, match=r"endless\.json"):
        PLAN.save(path)
    assert path.exists()
    assert not path.is_file()


def test_a_file_too_large_for_a_plan_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(20 * GIB)  # takes no room on the disk
    with pytest.raises(PlanFileError, match=r"huge\.json is not a plan: it is larger than 8\.00 MiB"):
        Plan.load(path)
    with pytest.raises(PlanFileError, match="is not a plan, so it is not overwritten"):
        PLAN.save(path)


def test_the_worst_that_is_read_as_a_plan_takes_little_memory() -> None:
    share = 64
    tracemalloc.start()
    with pytest.raises(PlanFileError):
        read_plan(b"[" + b"{}," * (LARGEST_BYTES // 3 // share) + b"{}]", "plan.json")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert share * peak_bytes < 300 * MIB


def test_an_empty_path_is_not_the_folder_that_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for of_path in (PLAN.save, Plan.load):
        with pytest.raises(PlanFileError, match="The path of the plan is empty"):
            of_path("")
    assert not list(tmp_path.iterdir())
    PLAN.save(".")
    assert Plan.load("plan.json") == PLAN


def test_a_file_holds_no_secret_and_no_object_of_a_script() -> None:
    names = ["DATABASE_URL", "GITHUB_PAT", "WANDB_API_KEY", "hf_token", "https_proxy"]
    job = Job(
        method="sft",
        model="m",
        dataset="d",
        arguments={"hub_token": "hf_secret", "pad_token": "<pad>", "lora_r": 8},
        environment={"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(names, "secret")},
        python_call=PythonCall(path="/tmp/call", holds_model=True, holds_rows=True, digest="d"),
    )
    kept = replace(PLAN, job=job).job
    assert kept == replace(
        job,
        arguments={"pad_token": "<pad>", "lora_r": 8},
        environment={"TOKENIZERS_PARALLELISM": "false"},
        unrecorded=tuple(names),
        python_call=None,
    )
    assert "secret" not in json.dumps([codec.to_json(replace(PLAN, job=job)), job_key(job)])
    assert job_key(job) != job_key(replace(job, environment=dict.fromkeys(names, "other")))
    shown = rendered(explain_view(replace(PLAN, job=job)), 160)
    assert "env       TOKENIZERS_PARALLELISM=false DATABASE_URL=... GITHUB_PAT=..." in shown


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "HF_ENDPOINT", "SOME_VARIABLE"])
def test_a_variable_that_no_plan_holds_is_not_taken_from_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = with_value(("job", "environment", name), "/evil")
    monkeypatch.delenv(name, raising=False)
    with pytest.raises(PlanFileError, match=f"sets {name}, which a plan must not set"):
        read(changed)
    monkeypatch.setenv(name, "/mine")  # before the command: the user's own counts
    assert read(changed) == PLAN


def test_a_plans_variables_and_code_are_told_before_any_process_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    variables = {"OMP_NUM_THREADS": "2", "WANDB_NAME": "a", "HF_TOKEN": "secret", "A": "1"}
    job = replace(PLAN.job, arguments={"trust_remote_code": True}, environment=variables)
    autofit = AutoFit(plan=replace(PLAN, job=job))
    request = RunRequest(method="sft", autofit=autofit, environment={"WANDB_NAME": "b", "A": "2"})
    notes = list[str]()
    followed = with_plan(request, PlanHints(other_method="", objects=""), notes.append, to_train=False)
    assert followed.environment == {"OMP_NUM_THREADS": "2", "WANDB_NAME": "b", "A": "2"}
    assert len(notes) == 3
    assert notes[0] == f"the plan runs code that comes with {PLAN.model} (trust_remote_code)"
    assert "the plan sets OMP_NUM_THREADS=2 for" in notes[1]
    assert "was made with HF_TOKEN, which a plan does not store" in notes[2]


def test_what_is_written_is_valid_by_the_published_schema_with_each_optional_part_and_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from docs_pages.plan_schema import plan_schema

    schema = plan_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": PLAN_SCHEMA}
    assert schema["$defs"]["Knobs"]["properties"].keys() == {field.name for field in fields(Knobs)}
    assert "description" in schema["properties"]["level"]
    written = [json.loads(json.dumps(codec.to_json(plan))) for plan in (*PLANS, RARE)]
    assert [error.message for each in written for error in Draft202012Validator(schema).iter_errors(each)] == []
    for name in ("data", "prompt_length", "optimizer_steps", "objects", "step_seconds"):
        assert {each[name] is None for each in written} == {True, False}, name
    for name in ("levers", "attempts", "alternatives", "proposals", "warnings", "allocator"):
        assert {bool(each[name]) for each in written} == {True, False}, name
