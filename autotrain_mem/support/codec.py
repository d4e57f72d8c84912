"""Converts frozen dataclasses ("nouns") to JSON; msgspec reads them back and checks the types.

A noun's JSON has a key for each field; tuples and frozen sets become lists, enums their values. A class attribute
``json_form`` declares other keys; a static method ``unfolded`` rearranges such JSON before it is read.

>>> from autotrain_mem import Incident, Phase
>>> from autotrain_mem.support import codec
>>> written = codec.to_json(Incident(step=7, phase=Phase.BACKWARD, rows=8, tokens=96, remedy="split", message=""))
>>> written["phase"], codec.from_json(Incident, written).phase is Phase.BACKWARD
('backward', True)
>>> try:
...     codec.from_json(Incident, {**written, "rows": "many"})
... except codec.CodecError as error:
...     print(error)
Expected `int | null`, got `str` - at `$.rows`
"""

from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from autotrain_mem.support.errors import AutofitError

Noun = TypeVar("Noun")

SCHEMA = "schema"
"""The key that names the kind and the version of an object."""


class CodecError(ValueError):
    """Raised for a value that is not the JSON of its noun; the message gives the value's path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Declares how a noun's JSON differs from its fields."""

    schema: str = ""
    """The value of the key ``schema``; empty for none."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """Additional key -> a dotted path of attributes; null if one of them is None. Ignored when the noun is read."""
    inline: Collection[str] = ()
    """Fields that hold a noun; its keys become keys of this noun."""
    optional: Collection[str] = ()
    """Fields that are left out if None or equal to the default."""
    hidden: Collection[str] = ()
    """Fields that are never written."""
    objects: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Field that holds a mapping or pairs, written as a list of objects -> the two keys of each object."""


def to_json(value: Any) -> Any:
    """Converts a noun, an error, or containers of them to JSON values. Other values stay as they are."""
    if isinstance(value, (str, int, float)):  # first, since a trace has millions
        return _plain(value)
    if isinstance(value, array):
        return value.tolist()
    if is_dataclass(value):
        return _noun_json(value)
    if isinstance(value, AutofitError):
        return value.to_json()
    if isinstance(value, Mapping):
        are_counts = all(type(key) is int for key in value)  # sorted, so that equal mappings have equal JSON
        items = sorted(value.items()) if are_counts else value.items()
        return {str(_plain(key)): to_json(each) for key, each in items}
    if isinstance(value, frozenset):
        value = sorted(value)
    return [to_json(each) for each in value] if isinstance(value, tuple | list) else _plain(value)


def _noun_json(noun: Any) -> dict[str, Any]:
    form = getattr(noun, "json_form", _PLAIN)
    written = {SCHEMA: form.schema} if form.schema else {}
    for key, path in form.derived.items():
        value = noun
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        written[key] = to_json(value)
    for each in fields(noun):
        name, value = each.name, getattr(noun, each.name)
        if name in form.inline:
            written |= _noun_json(value)
        elif name in form.objects:
            pairs = value.items() if isinstance(value, Mapping) else value
            written[name] = [dict(zip(form.objects[name], map(to_json, pair), strict=True)) for pair in pairs]
        elif name not in form.hidden and not (name in form.optional and value in (None, each.default)):
            written[name] = to_json(value)
    return written


_PLAIN = Form()


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


def from_json(noun: type[Noun], value: Any) -> Noun:
    """Reads a noun that :func:`to_json` wrote. Unknown keys are ignored. Raises CodecError if a key is missing, or a
    value does not have its field's type."""
    import msgspec  # takes 10 ms

    unfolded = getattr(noun, "unfolded", None)
    try:
        # msgspec supports all types of fields except array.
        content = unfolded(value) if unfolded else value
        return msgspec.convert(content, noun, str_keys=True, dec_hook=lambda kind, each: array("q", each))
    except msgspec.ValidationError as error:
        raise CodecError(str(error)) from None
