"""Frozen dataclasses to and from plain JSON values, driven by their type hints."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Turn a dataclass, enum or container into values that ``json.dumps`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], data: Any) -> T:
    """Rebuild a value of type `kind` from what `encode` returned.

    Fields that `data` lacks take their defaults; keys that `kind` lacks are ignored, so that an
    older reader accepts a file with later additions.

    Raises
    ------
    ValueError
        If `data` does not have the shape of `kind`.
    """
    return typing.cast(T, _decode(kind, data))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return None if data is None else _decode_first(arguments, data)
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in _expect(list, data, kind))
    if origin is not None and issubclass(origin, Mapping):
        items = _expect(dict, data, kind).items()
        return {arguments[0](key): _decode(arguments[1], item) for key, item in items}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, _expect(dict, data, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    return _expect(kind, data, kind)


def _decode_first(kinds: tuple[Any, ...], data: Any) -> Any:
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return _decode(kind, data)
        except (ValueError, TypeError):
            continue
    raise ValueError(f"{data!r} is none of {kinds}")


def _decode_dataclass(kind: Any, data: dict[str, Any]) -> Any:
    hints = _hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    try:
        return kind(**{k: _decode(hints[k], v) for k, v in data.items() if k in known})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


def _expect(kind: type, data: Any, wanted: Any) -> Any:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"expected {wanted}, got {data!r}")
    return data
