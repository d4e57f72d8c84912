"""Builds the JSON schema of plan files from the dataclasses: their fields, their ``json_form``, and docstrings."""

import ast
import inspect
import textwrap
import typing
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from autotrain_mem.support.codec import Form
from autotrain_mem.types import Plan
from autotrain_mem.types.plan_file import PLAN_SCHEMA

TEMPLATE = "#/$defs/{name}"
Schema = dict[str, Any]


def plan_schema() -> Schema:
    """Returns the schema, in JSON Schema's dialect 2020-12."""
    nouns = _nouns(Plan, {})
    _, parts = msgspec.json.schema_components([Plan], ref_template=TEMPLATE)
    for name, noun in nouns.items():
        parts[name] = _written(noun, parts)
    plan = parts.pop(Plan.__name__)
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:autotrain_mem:{PLAN_SCHEMA}"}
    return {**header, **plan, "$defs": {name: parts[name] for name in sorted(parts)}}


def _nouns(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Collects the dataclasses in a type by name; those of its fields come before itself."""
    if is_dataclass(kind) and isinstance(kind, type):
        for part in typing.get_type_hints(kind).values():
            _nouns(part, found)
        found.setdefault(kind.__name__, kind)
    for part in typing.get_args(kind):
        _nouns(part, found)
    return found


def _written(noun: Any, parts: dict[str, Schema]) -> Schema:
    """Returns the schema of the JSON that ``codec.to_json`` writes for a dataclass."""
    form, told = getattr(noun, "json_form", Form()), _descriptions(noun)
    by_field = parts[noun.__name__]["properties"]
    properties: Schema = {"schema": {"const": form.schema}} if form.schema else {}
    for key, path in form.derived.items():
        properties[key] = _of_type(_kind_of(noun, path.split(".")))
    required = [*properties]
    for each in fields(noun):
        if each.name in form.inline:
            inner = parts[typing.get_type_hints(noun)[each.name].__name__]
            properties |= inner["properties"]
            required += inner["required"]
            continue
        properties[each.name] = {name: value for name, value in by_field[each.name].items() if name != "default"}
        if each.name in form.objects:
            keys, pair = form.objects[each.name], typing.get_args(typing.get_type_hints(noun)[each.name])
            kinds = typing.get_args(pair[0]) if pair[-1] is Ellipsis else pair  # a tuple of pairs, or a mapping
            entry = {key: _of_type(kind) for key, kind in zip(keys, kinds, strict=True)}
            properties[each.name] = {"type": "array", "items": _object(entry, keys)}
        if each.name in told:
            properties[each.name]["description"] = told[each.name]
        if each.name not in form.optional:
            required.append(each.name)
    about = inspect.getdoc(noun) or ""
    return {"title": noun.__name__, "description": about.partition("\n")[0], **_object(properties, required)}


def _object(properties: Schema, required: typing.Iterable[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def _of_type(kind: Any) -> Schema:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
    return schema


def _kind_of(noun: Any, path: list[str]) -> Any:
    """Returns the type of a chain of attributes, such as ``a.b``."""
    kind = noun
    for name in path:
        member = inspect.getattr_static(kind, name)
        hints = typing.get_type_hints(member.fget if isinstance(member, property) else kind)
        kind = hints["return" if isinstance(member, property) else name]
    return kind


def _descriptions(noun: type) -> dict[str, str]:
    """Returns the docstrings below the fields, by field, including inherited fields."""
    told: dict[str, str] = {}
    for each in reversed(noun.__mro__):
        if is_dataclass(each):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(tree, ast.ClassDef)
            for declared, text in zip(tree.body, tree.body[1:], strict=False):
                match declared, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        told[name] = " ".join(words.split())
    return told
