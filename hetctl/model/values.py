"""The decorator of hetctl's dataclasses, which makes frozen ones in a fifth of the time.

A driver has two hundred classes of values. The standard library compiles six methods of each from source
text, which took half of the time in which a driver starts. Here only ``__init__`` is, when it is first used:
a command makes values of a few of these classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, kw_only=False, **others):
        """Do as the standard library's; only that a frozen class may not inherit from one of that."""
        if not frozen or others:
            return dataclasses.dataclass(cls, frozen=frozen, kw_only=kw_only, **others)

        def made(cls: type) -> type:
            return _frozen(dataclasses.dataclass(cls, init=False, repr=False, eq=False, kw_only=kw_only))

        return made if cls is None else made(cls)


def _frozen(cls: Any) -> Any:
    """Add the methods of a frozen dataclass."""
    compared = [each.name for each in fields(cls) if each.compare]
    values_of = attrgetter(*compared) if compared else lambda _: ()

    def equal(self: Any, other: Any) -> Any:
        return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(values_of(self))

    methods = {
        "__init__": _LazyInit(cls),
        "__repr__": _repr,
        "__eq__": equal,
        "__hash__": hashed,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
    }
    for name, method in methods.items():
        if name not in cls.__dict__:
            setattr(cls, name, method)
    return cls


class _LazyInit:
    """Descriptor that puts a compiled ``__init__`` into its place on first use."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def __get__(self, instance: Any, kind: Any) -> Any:
        self._cls.__init__ = _init_of(self._cls)
        return self._cls.__init__.__get__(instance, kind)


def _init_of(cls: Any) -> Any:
    """Return the ``__init__`` of a class with these fields."""
    names: dict[str, Any] = {"_set": object.__setattr__}
    parameters: list[str] = []
    lines: list[str] = []
    # Those by keyword alone come last, whichever class has them.
    for each in sorted(fields(cls), key=lambda each: bool(each.kw_only)):
        name, default = each.name, f"_default_{each.name}"
        if each.kw_only and "*" not in parameters:
            parameters.append("*")
        value = name
        if each.default is not MISSING:
            names[default] = each.default
        elif each.default_factory is not MISSING:
            names[default] = each.default_factory
            value = f"{name} if {name} is not {default} else {default}()"
        parameters.append(f"{name}={default}" if default in names else name)
        lines.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__(self, {', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), names)
    init = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _repr(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse(self: Any, name: str, *_value: object) -> None:
    raise FrozenInstanceError(f"cannot change {name!r} of {type(self).__name__}")
