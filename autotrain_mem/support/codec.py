"""The codec turns frozen nouns into what JSON can hold, and reads them back strictly.

A noun is a dataclass. Its JSON is an object with a key for each field, which the field's type describes: tuples and
frozen sets are lists, enums their values, mappings objects, and mappings whose keys are whole numbers lists of pairs.
A noun whose JSON is other than that says so with a class attribute ``json_form``.

>>> from autotrain_mem import Incident, Phase
>>> from autotrain_mem.support import codec
>>> written = codec.to_json(Incident(step=7, phase=Phase.BACKWARD, rows=8, tokens=96, remedy="split", message=""))
>>> written["phase"], codec.from_json(Incident, written).phase is Phase.BACKWARD
('backward', True)
>>> try:
...     codec.from_json(Incident, {**written, "rows": "many"})
... except codec.CodecError as error:
...     print(error)
rows is 'many'
"""

from __future__ import annotations

import math
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from enum import Enum
from functools import cache, reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, overload

from autotrain_mem.support.errors import AutofitError

Noun = TypeVar("Noun")
_Function = Callable[[Any], Any]

SCHEMA = "schema"
"""The key that names the kind and the version of an object."""


class CodecError(ValueError):
    """Says that a value is not the JSON of its noun; its text begins with the path to the value.

    Args:
        problem: What is wrong, as it follows the path: ``is missing``.
        path: The keys and list indices that lead there, the outermost first.
    """

    def __init__(self, problem: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(problem, path)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        """Says path and problem: ``attempts[2].knobs.dtype is 7``."""
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return f"{keys.removeprefix('.') or 'it'} {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Declares in what a noun's JSON differs from its fields."""

    schema: str = ""
    """Is written under ``schema``, and must stand there when the noun is read; empty for none."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """Key -> the attribute whose value is written beside the fields, with dots where it is one of an attribute's: None
    where one on the way is None. The key must be there when the noun is read, and what it holds is passed over."""
    inline: Collection[str] = ()
    """Fields with nouns whose keys are written among this noun's own."""
    optional: Collection[str] = ()
    """Fields that are left out where they are None or as they are by default."""
    hidden: Collection[str] = ()
    """Fields that are never written; they take their defaults when the noun is read."""
    objects: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fields with mappings or pairs -> the two keys of the objects that they are written as, in a list."""
    is_row: bool = False
    """The noun is written as the list of its values, where there are many of them."""
    write: _Function | None = None
    read: _Function | None = None
    """Write and read the noun in place of all this."""


class _IsDataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


@overload
def to_json(value: _IsDataclass | AutofitError) -> dict[str, Any]: ...
@overload
def to_json(value: Any) -> Any: ...
def to_json(value: Any) -> Any:
    """Writes a noun, an error, or containers of them as what JSON can hold. Other values stay as they are."""
    if is_dataclass(value):
        kind: Any = type(value)  # which mypy does not take for hashable
        return _codec(kind).write(value)
    if isinstance(value, AutofitError):
        return value.to_json()
    if isinstance(value, Mapping):
        return {_plain(key): to_json(each) for key, each in value.items()}
    return [to_json(each) for each in value] if isinstance(value, tuple | list) else _plain(value)


def from_json(noun: type[Noun], value: Any) -> Noun:
    """Reads what :func:`to_json` wrote of a noun.

    Raises:
        CodecError: a key is missing or unknown, or a value is not of its field's type.
    """
    kind: Any = noun
    result: Noun = _codec(kind).read(value)
    return result


class _Codec(NamedTuple):
    """Writes and reads the values of one type."""

    write: _Function
    read: _Function
    """Raises CodecError."""


@cache
def _codec(kind: Any) -> _Codec:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _Codec(_plain, _plain)
    if is_dataclass(kind):
        return _noun_codec(kind, getattr(kind, "json_form", _PLAIN))
    if origin in (typing.Union, types.UnionType):
        return _union_codec([each for each in arguments if each is not types.NoneType], types.NoneType in arguments)
    if origin is Mapping:
        return _mapping_codec(*arguments)
    if origin is frozenset or arguments[1:] == (Ellipsis,):
        return _items_codec(origin, _codec(arguments[0]))
    if origin is tuple:
        return _row_codec(arguments)
    if origin is typing.Literal:
        return _Codec(_plain, _checked(lambda value: type(value) is str and value in arguments))
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = {each.value for each in kind}
        check = _checked(lambda value: type(value) in (str, int) and value in values)
        return _Codec(attrgetter("value"), lambda value: kind(check(value)))
    if kind is float:  # a whole number stands for a real one, a truth does not
        is_real = _checked(lambda value: type(value) is int or (type(value) is float and math.isfinite(value)))
        return _Codec(_plain, is_real)
    return _Codec(_plain, _checked(lambda value: type(value) is kind))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else str(value) if isinstance(value, Path) else value


def _checked(is_right: Callable[[Any], bool]) -> _Function:
    def read(value: Any) -> Any:
        if not is_right(value):
            raise CodecError(f"is {reprlib.repr(value)}")
        return value

    return read


_object = _checked(lambda value: isinstance(value, dict))
_list = _checked(lambda value: isinstance(value, list))


def _at(key: str | int, read: _Function, value: Any) -> Any:
    """Reads the value under a key, which an error then names."""
    try:
        return read(value)
    except CodecError as error:
        raise CodecError(error.problem, (key, *error.path)) from None


# -- types with parts ----------------------------------------------------------------------------------------------


def _union_codec(kinds: list[Any], takes_none: bool) -> _Codec:
    codecs = [_codec(kind) for kind in kinds]

    def read(value: Any) -> Any:
        if value is None and takes_none:
            return None
        errors = []
        for each in codecs:
            try:
                return each.read(value)
            except CodecError as error:
                errors.append(error)
        raise errors[0]

    if len(codecs) > 1:
        return _Codec(to_json, read)
    write = codecs[0].write
    return _Codec(lambda value: None if value is None else write(value), read)


def _mapping_codec(key_kind: Any, value_kind: Any) -> _Codec:
    if key_kind is int:
        pairs = _items_codec(tuple, _row_codec((key_kind, value_kind)))
        return _Codec(lambda mapping: pairs.write(sorted(mapping.items())), lambda value: _unique(pairs.read(value)))
    (write_key, read_key), (write, read) = _codec(key_kind), _codec(value_kind)
    return _Codec(
        lambda mapping: {write_key(key): write(value) for key, value in mapping.items()},
        lambda mapping: {_at(key, read_key, key): _at(key, read, value) for key, value in _object(mapping).items()},
    )


def _unique(pairs: tuple[tuple[Any, Any], ...]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise CodecError("has a key twice")
    return values


def _items_codec(container: Any, item: _Codec) -> _Codec:
    """Makes the codec of lists of any length, whose items are all of one type."""
    order = sorted if container is frozenset else list
    return _Codec(
        lambda values: [item.write(each) for each in order(values)],
        lambda value: container([_at(index, item.read, each) for index, each in enumerate(_list(value))]),
    )


def _row_codec(kinds: tuple[Any, ...]) -> _Codec:
    """Makes the codec of lists of one length, with a type for each place."""
    codecs = [_codec(kind) for kind in kinds]

    def read(value: Any) -> tuple[Any, ...]:
        if len(_list(value)) != len(codecs):
            raise CodecError(f"has {len(value)} values where it should have {len(codecs)}")
        return tuple(_at(index, codec.read, value[index]) for index, codec in enumerate(codecs))

    return _Codec(lambda values: [codec.write(each) for codec, each in zip(codecs, values, strict=True)], read)


# -- nouns ---------------------------------------------------------------------------------------------------------

_PLAIN = Form()


def _noun_codec(noun: Any, form: Form) -> _Codec:
    if form.write and form.read:
        return _Codec(form.write, form.read)
    hints = typing.get_type_hints(noun)
    kinds = {each.name: hints[each.name] for each in fields(noun) if each.name not in form.hidden}
    if form.is_row:
        row, values_of = _row_codec(tuple(kinds.values())), attrgetter(*kinds)
        return _Codec(
            lambda value: row.write(values_of(value)),
            lambda value: noun(**dict(zip(kinds, row.read(value), strict=True))),
        )
    codecs = {
        name: _objects_codec(kind, form.objects[name]) if name in form.objects else _codec(kind)
        for name, kind in kinds.items()
    }
    return _Codec(_noun_writer(noun, form, codecs), _noun_reader(noun, form, codecs))


def _noun_writer(kind: Any, form: Form, codecs: Mapping[str, _Codec]) -> _Function:
    derived = {key: path.split(".") for key, path in form.derived.items()}
    left_out = {name: (None, kind.__dataclass_fields__[name].default) for name in form.optional}

    def write(noun: Any) -> dict[str, Any]:
        written = {SCHEMA: form.schema} if form.schema else {}
        written |= {key: to_json(reduce(_attribute, path, noun)) for key, path in derived.items()}
        for name, codec in codecs.items():
            value = getattr(noun, name)
            if name in form.inline:
                written |= codec.write(value)
            elif name not in left_out or value not in left_out[name]:
                written[name] = codec.write(value)
        return written

    return write


def _attribute(value: Any, name: str) -> Any:
    return None if value is None else getattr(value, name)


def _noun_reader(noun: Any, form: Form, codecs: Mapping[str, _Codec]) -> _Function:
    hints = typing.get_type_hints(noun)
    inline = {name: _keys(hints[name]) for name in form.inline}
    known = _keys(noun)
    required = known - {*form.optional}

    def read(value: Any) -> Any:
        keys = _object(value).keys()
        if odd := sorted(map(str, keys - known)) or sorted(required - keys):
            raise CodecError(f"is {'missing' if odd[0] in known else 'unknown'}", (odd[0],))
        if form.schema and value[SCHEMA] != form.schema:
            raise CodecError(f"is {reprlib.repr(value[SCHEMA])}, not {form.schema!r}", (SCHEMA,))
        arguments = {}
        for name, codec in codecs.items():
            if name in inline:
                arguments[name] = codec.read({key: value[key] for key in inline[name]})
            elif name in value:
                arguments[name] = _at(name, codec.read, value[name])
        return noun(**arguments)

    return read


def _keys(noun: Any) -> set[str]:
    """Lists all keys of a noun's object."""
    form, hints = getattr(noun, "json_form", _PLAIN), typing.get_type_hints(noun)
    keys = {*form.derived, *([SCHEMA] if form.schema else [])}
    for each in fields(noun):
        keys |= _keys(hints[each.name]) if each.name in form.inline else {each.name} - {*form.hidden}
    return keys


def _objects_codec(kind: Any, keys: tuple[str, str]) -> _Codec:
    """Makes the codec of lists of objects with two keys, which stand for a mapping, or for a tuple of pairs."""
    is_mapping = typing.get_origin(kind) is Mapping
    kinds = typing.get_args(kind if is_mapping else typing.get_args(kind)[0])
    entry = _codec(make_dataclass("Entry", zip(keys, kinds, strict=True)))
    values_of = attrgetter(*keys)

    def write(value: Any) -> list[Any]:
        pairs = value.items() if is_mapping else value
        return [dict(zip(keys, map(to_json, pair), strict=True)) for pair in pairs]

    def read(value: Any) -> Any:
        pairs = tuple(values_of(_at(index, entry.read, each)) for index, each in enumerate(_list(value)))
        return _unique(pairs) if is_mapping else pairs

    return _Codec(write, read)
