"""Classes that no module holds (of a script, a notebook or a function) as something that pickle can write.

A class is made empty and known before it is filled, so that what is in it may refer to it: its methods, the members of
an enumeration, fields of its own kind. Its attributes are those that it had when all of it had been made: nothing is
worked out again from annotations, which name what only the script holds.
"""

from __future__ import annotations

import enum
import types
from typing import Any

_MADE_ANEW = frozenset({"__dict__", "__weakref__", "_abc_impl", "__module__", "__qualname__", "__slots__"})


def is_own(kind: type) -> bool:
    """Whether a class was made by a script, a notebook or a function; named tuples aside, which dill makes itself."""
    is_named_tuple = kind.__bases__ == (tuple,) and hasattr(kind, "_fields")
    return (kind.__module__ == "__main__" or "<locals>" in kind.__qualname__) and not is_named_tuple


def reduce_class(kind: type) -> tuple[Any, ...]:
    """What ``pickle`` takes from a ``__reduce__``: how to make the class, and what to set on it."""
    if issubclass(kind, enum.Enum):
        body = {member.name: member.value for member in kind}
        attributes = {name: value for name, value in vars(kind).items() if isinstance(value, _DEFINED)}
    else:
        slots = vars(kind).get("__slots__")
        body = {} if slots is None else {"__slots__": slots}
        left_out = {*_MADE_ANEW, *([slots] if isinstance(slots, str) else slots or ())}
        attributes = {name: value for name, value in vars(kind).items() if name not in left_out}
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return _new_class, (type(kind), kind.__name__, kind.__bases__, names | body), attributes, None, None, _fill


_DEFINED = (types.FunctionType, property, classmethod, staticmethod)


def _new_class(metaclass: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    # ``update`` of an enumeration's namespace notes each member (``enum.py: _EnumDict.update``).
    return types.new_class(name, bases, {"metaclass": metaclass}, lambda namespace: namespace.update(body))


def _fill(kind: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(kind, name, value)
