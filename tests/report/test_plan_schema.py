"""The JSON schema that the package carries describes exactly the files that are written."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from report_examples import PLANS
from test_plan_file import KEYED, OBJECTS, with_value, without

from autotrain_mem.spec import codec
from autotrain_mem.spec.estimate import ESTIMATE_SCHEMA
from autotrain_mem.spec.hardware import Hardware
from autotrain_mem.spec.knobs import Knobs
from autotrain_mem.spec.plan_file import PLAN_SCHEMA

SCHEMA = json.loads((resources.files("autotrain_mem") / "plan.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)
BY_PHASE_OR_OWNER = [("estimate", "owners_at_peak"), ("estimate", "time", "phases")]
"""Objects with a key for each that there is."""
FIXED = [path for path in KEYED if path[:-1] not in BY_PHASE_OR_OWNER]


def test_it_is_a_schema_of_the_version_that_is_written() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$id"].endswith(f":{PLAN_SCHEMA}")
    assert SCHEMA["properties"]["schema"]["const"] == PLAN_SCHEMA
    assert SCHEMA["$defs"]["estimate"]["properties"]["schema"]["const"] == ESTIMATE_SCHEMA


def test_what_is_written_is_valid_with_each_optional_part_and_without_it() -> None:
    written = [json.loads(json.dumps(codec.to_json(plan))) for plan in PLANS]
    assert [error.message for each in written for error in VALIDATOR.iter_errors(each)] == []
    for name in ("data", "prompt_length", "optimizer_steps", "objects", "step_seconds"):
        assert {each[name] is None for each in written} == {True, False}, name
    for name in ("levers", "attempts", "alternatives", "proposals", "warnings", "allocator"):
        assert {bool(each[name]) for each in written} == {True, False}, name


def test_no_field_may_be_missing_of_another_type_or_new() -> None:
    assert [path for path in FIXED if VALIDATOR.is_valid(without(path))] == []
    assert [path for path in FIXED if VALIDATOR.is_valid(with_value(path, [{}]))] == []
    assert [path for path in OBJECTS if VALIDATOR.is_valid(with_value((*path, "colour"), 7))] == []


@pytest.mark.parametrize(("name", "noun"), [("knobs", Knobs), ("hardware", Hardware)])
def test_it_knows_every_field_of_a_noun_also_of_those_that_no_example_uses(name: str, noun: Any) -> None:
    assert SCHEMA["$defs"][name]["properties"].keys() == {field.name for field in fields(noun)}
