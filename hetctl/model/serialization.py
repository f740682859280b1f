"""Conversion of frozen dataclasses to and from plain JSON values, by their type hints."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Union

T = TypeVar("T")
Decoder = Callable[[Any], Any]

PLAIN = frozenset({str, int, float, bool, type(None)})
TABLE = {"table": True}
"""Metadata of a field with many alike dataclasses of one type, which are encoded as a table: the first one in
full, of each other what differs from it."""
OMITTED = {"omitted": True}
"""Metadata of a field that is left out while it has its default."""
FIRST, OTHERS = "first", "others"


def encode(value: Any) -> Any:
    """Convert a dataclass, enum or container to values that ``json.dumps`` accepts."""
    kind: Any = type(value)
    if kind in PLAIN:
        return value
    if names := _field_names(kind):
        # Most fields are plain: this check spares two thirds of the calls.
        encoded = {
            name: field if type(field := getattr(value, name)) in PLAIN else encode(field) for name in names
        }
        for name in _tables(kind):
            encoded[name] = _table(encoded[name])
        for name, default in _omitted(kind):
            if encoded[name] == default:
                del encoded[name]
        return encoded
    if isinstance(value, enum.Enum):
        return value.value
    # The builtin types are named since a check against an abstract one takes ten times as long.
    if isinstance(value, (dict, Mapping)):
        # JSON has text keys only; `_mapping_of` restores the numbers of GPUs that are keys of rates.
        return {str(key): item if type(item) in PLAIN else encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, Sequence)) and not isinstance(value, (str, bytes)):
        return [item if type(item) in PLAIN else encode(item) for item in value]
    return value


def decode(kind: type[T], data: Any) -> T:
    """Rebuild a value of type `kind` from the result of `encode`.

    Missing fields take their defaults and unknown keys are ignored, so that an older reader accepts a file
    with later additions.

    Raises
    ------
    ValueError
        If `data` does not have the shape of `kind`.
    """
    hint: Any = kind
    return typing.cast(T, _decoder(hint)(data))


def parse(kind: type[T], text: str | bytes) -> T:
    """Rebuild a value of type `kind` from the result of `encode` as JSON.

    Raises
    ------
    ValueError
        If the text is not JSON, or does not have the shape of `kind`.
    """
    try:
        return decode(kind, json.loads(text))
    except RecursionError:
        raise ValueError("JSON of too many levels") from None


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


@functools.cache
def _tables(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if TABLE.items() <= f.metadata.items())


@functools.cache
def _omitted(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (f.name, encode(f.default)) for f in dataclasses.fields(kind) if OMITTED.items() <= f.metadata.items()
    )


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    if len(rows) < 2:
        return rows
    first, *others = rows
    # In Python 1, 1.0 and true are equal, here they are not.
    texts = {name: repr(value) for name, value in first.items()}
    differs = [
        {name: v for name, v in row.items() if v is not first[name] and repr(v) != texts[name]}
        for row in others
    ]
    return {FIRST: first, OTHERS: differs}


def rows_in_full(encoded: Any) -> list[dict[str, Any]]:
    """Return the rows of an encoded field with `TABLE` metadata, each with all its keys."""
    if isinstance(encoded, list):
        return encoded
    first: dict[str, Any] = encoded[FIRST]
    return [first, *({**first, **row} for row in encoded[OTHERS])]


@functools.cache
def _decoder(kind: Any) -> Decoder:
    """Compile the type hints of `kind`, because a run reads hundreds of thousands of values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return _first_of(kind, arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row_of(kind, [*map(_decoder, arguments)])
    if origin in (tuple, Sequence):
        return _tuple_of(kind, arguments[0])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_of(kind, arguments[0], _decoder(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return _dataclass_of(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    return _float if kind is float else _plain(kind)


def _first_of(kind: Any, kinds: tuple[Any, ...]) -> Decoder:
    decoders = [_decoder(one) for one in kinds if one is not type(None)]

    def decoded(data: Any) -> Any:
        if data is None:
            return None
        for decoder in decoders:
            try:
                return decoder(data)
            except (ValueError, TypeError):
                continue
        raise ValueError(f"{data!r} is none of {kind}")

    return decoded


def _row_of(kind: Any, items: Sequence[Decoder]) -> Decoder:
    def decoded(data: Any) -> Any:
        given = _expect(list, data, kind)
        return tuple([item(value) for item, value in zip(items, given, strict=True)])

    return decoded


def _tuple_of(kind: Any, of: Any) -> Decoder:
    item, has_tables = _decoder(of), dataclasses.is_dataclass(of)

    def decoded(data: Any) -> Any:
        if has_tables and type(data) is dict and data.keys() == {FIRST, OTHERS}:
            return _rows(of, data[FIRST], _expect(list, data[OTHERS], kind))
        given = data if type(data) is list else _expect(list, data, kind)
        # Most of a member's are empty.
        return tuple([item(value) for value in given]) if given else ()

    return decoded


def _rows(kind: Any, first: Any, others: Sequence[Any]) -> tuple[Any, ...]:
    """Rebuild the dataclasses of a table: what they have in common is decoded once."""
    model = _decoder(kind)(first)
    if not _is_plain(kind):
        return model, *(_decoder(kind)({**first, **row}) for row in others)
    made, fields = [model], _field_decoders(kind)
    for row in others:
        given = row if type(row) is dict else _expect(dict, row, kind)
        one = object.__new__(kind)
        values = one.__dict__
        values.update(model.__dict__)
        for name in given:
            if name in fields:
                values[name] = fields[name](given[name])
        made.append(one)
    return tuple(made)


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Return true for a dataclass whose __init__ has no further effect; filling it takes half of the time."""
    others = hasattr(kind, "__slots__"), hasattr(kind, "__post_init__"), len(_field_names(kind)) < 2
    is_frozen = kind.__setattr__ is not object.__setattr__
    return is_frozen and not any(others)


@functools.cache
def _field_decoders(kind: Any) -> dict[str, Decoder]:
    hints = typing.get_type_hints(kind)
    return {name: _decoder(hints[name]) for name in _field_names(kind)}


def _mapping_of(kind: Any, key: Decoder, item: Decoder) -> Decoder:
    as_read = key is str and item is _decoder(Any)

    def decoded(data: Any) -> Any:
        given = data if type(data) is dict else _expect(dict, data, kind)
        # Most mappings of a member are empty, or its config, which is as it was read.
        return given if as_read or not given else {key(name): item(value) for name, value in given.items()}

    return decoded


def _dataclass_of(kind: Any) -> Decoder:
    hints = typing.get_type_hints(kind)
    names = _field_names(kind)
    fields, plain = _field_decoders(kind), _is_plain(kind)
    all_names, every = frozenset(names), operator.itemgetter(*names) if plain else tuple
    # Fields whose values still differ from their hints, by the types of all values.
    unfinished: dict[tuple[type, ...], tuple[str, ...]] = {}
    # The newest value without such fields, by the same types: most members of a run have equal settings.
    newest: dict[tuple[type, ...], tuple[Any, Any]] = {}

    def decoded(data: Any) -> Any:
        given = data if type(data) is dict else _expect(dict, data, kind)
        if plain and given.keys() >= all_names:
            found = every(given)
            kinds = tuple(map(type, found))
            if kinds not in unfinished:
                pairs = zip(names, kinds, strict=True)
                unfinished[kinds] = tuple(name for name, one in pairs if not _is_final(hints[name], one))
            if kinds in newest and newest[kinds][0] == found:
                return newest[kinds][1]
            made = object.__new__(kind)
            values = made.__dict__
            values.update(zip(names, found, strict=True))
            for name in unfinished[kinds]:
                values[name] = fields[name](given[name])
            if not unfinished[kinds]:
                newest[kinds] = found, made
            return made
        values = {name: fields[name](value) for name, value in given.items() if name in fields}
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"{kind.__name__}: {error}") from None

    return decoded


def _is_final(hint: Any, kind: type) -> bool:
    """Return true if a value of this type matches a field's hint."""
    accepted = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    return kind in PLAIN and kind in accepted


def _float(data: Any) -> float:
    if type(data) is float:
        return data
    return float(data) if type(data) is int else typing.cast(float, _expect(float, data, float))


def _plain(kind: type) -> Decoder:
    def decoded(data: Any) -> Any:
        return data if type(data) is kind else _expect(kind, data, kind)

    return decoded


def _expect(kind: type, data: Any, wanted: Any) -> Any:
    # In Python true is an instance of int, so a boolean would pass as a number.
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"expected {wanted}, got {data!r}")
    return data
