"""Frozen dataclasses with shared methods do as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import ClassVar

import pytest

from hetctl.model import values

DECORATORS = [values.dataclass, dataclasses.dataclass]


@values.dataclass(frozen=True)
class Point:
    """A value of a module, as pickles need it."""

    x: int
    tags: list[str] = field(default_factory=list, compare=False)
    secret: str = field(default="s", repr=False)
    dimensions: ClassVar[int] = 1

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("negative")


@values.dataclass(frozen=True)
class Named(Point):
    """One with a field more, by keyword alone."""

    name: str = field(kw_only=True)


def test_values_are_made_compared_and_shown():
    point = Point(3)
    assert (point.x, point.tags, point.secret) == (3, [], "s")
    assert point.tags is not Point(3).tags
    assert point == Point(3, ["other"]) != Point(4)
    assert hash(point) == hash(Point(3, ["other"]))
    assert len({point, Point(3), Point(4)}) == 2
    assert point != Named(3, name="n") != Named(3, name="m")
    assert repr(point) == "Point(x=3, tags=[])"
    assert repr(Named(3, name="n")) == "Named(x=3, tags=[], name='n')"
    with pytest.raises(ValueError, match="negative"):
        Point(-1)


def test_values_are_copied_and_described():
    named = Named(3, ["t"], name="n")
    for same in (pickle.loads(pickle.dumps(named)), copy.deepcopy(named), replace(named)):
        assert (same, same.tags, type(same)) == (named, ["t"], Named)
    assert replace(named, x=4).x == 4
    assert asdict(named) == {"x": 3, "tags": ["t"], "secret": "s", "name": "n"}
    assert [each.name for each in fields(Named)] == ["x", "tags", "secret", "name"]
    match Point(5):
        case Point(x, _):
            assert x == 5


def test_values_do_not_change():
    point = Point(3)
    for change in (
        lambda: setattr(point, "x", 4),
        lambda: delattr(point, "x"),
        lambda: setattr(point, "y", 1),
    ):
        with pytest.raises(FrozenInstanceError):
            change()


@pytest.mark.parametrize("dataclass", DECORATORS)
def test_the_signature_is_that_of_the_standard_library(dataclass):
    @dataclass(frozen=True, kw_only=True)
    class Base:
        """A base."""

        last: int = 1

    @dataclass(frozen=True)
    class Own(Base):
        """A class."""

        first: str
        second: float = 0.5

        def __repr__(self):
            return "own"

    parameters = inspect.signature(Own).parameters.values()
    assert [(each.name, each.kind.name, each.default) for each in parameters] == [
        ("first", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("second", "POSITIONAL_OR_KEYWORD", 0.5),
        ("last", "KEYWORD_ONLY", 1),
    ]
    assert repr(Own("a")) == "own"
    with pytest.raises(TypeError):
        Own("a", 0.5, 1)
    with pytest.raises(TypeError):
        Own()
