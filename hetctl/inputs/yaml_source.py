"""YAML files as plain values with their line numbers.

Scalars follow YAML 1.2's core schema instead of PyYAML's 1.1: ``2:00:00``, ``yes`` and ``2026-01-01`` are
text and ``1e-3`` is a number, as users expect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from hetctl.inputs.input_errors import SourceLine, read_text, refusal, shown
from hetctl.model.errors import BadInputError
from hetctl.model.values import dataclass

Location = tuple[str | int, ...]

MOST_VALUES = 200_000
TAG = "tag:yaml.org,2002:"
# In YAML 1.1 2:00:00 is 7200 (base 60), `no` is false, and 1e-3 without a dot is text.
SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    # Tagged so that merge keys are refused; as plain text `<<` would be an unknown key.
    ("merge", r"<<", "<"),
)


@dataclass(frozen=True)
class YamlSource:
    """Mapping read from a file, with the place of each of its values."""

    path: Path
    values: dict[str, Any]
    places: Mapping[Location, SourceLine]

    def place(self, location: Location) -> SourceLine:
        """Return the place of a value; for a missing value, that of the nearest enclosing one."""
        while location not in self.places:
            location = location[:-1]
        return self.places[location]

    def refusal(self, problems: Iterable[tuple[Location, str]]) -> BadInputError:
        """Return one exception for all problems, each as ``FILE:LINE: key: rule``."""
        return refusal((self.place(at), f"{dotted(at)}: {rule}" if at else rule) for at, rule in problems)

    def extending(self, base: YamlSource) -> YamlSource:
        """Add the keys of `base` that this mapping lacks, with their places."""
        kept = {at: place for at, place in base.places.items() if at and at[0] not in self.values}
        return YamlSource(self.path, {**base.values, **self.values}, {**kept, **self.places})


def dotted(location: Location) -> str:
    """Return a location in the form ``members[0].stop.patience``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location).lstrip(".")


def read_yaml(path: Path) -> YamlSource:
    """Read a YAML file that holds one mapping.

    All values are finite JSON values: text, whole numbers of 64 bits, floats, booleans, null,
    lists, and mappings with text keys.

    Raises
    ------
    BadInputError
        If the file is unreadable, not UTF-8, not YAML, not a mapping, or has a key twice.
    """
    text = read_text(path)
    try:
        # Nodes, not values: they have line numbers, and keep a key that is given twice.
        root = yaml.compose(text, Loader=_LineLoader)
        if not isinstance(root, yaml.MappingNode):
            raise refusal([(SourceLine(path, 1), "must be a mapping (key: value)")])
        builder = _Builder(path)
        return YamlSource(path, builder.build(root, ()), builder.places)
    except yaml.YAMLError as error:
        raise refusal([(SourceLine(path, _line_of(error, text)), f"not YAML: {_reason_of(error)}")]) from None
    except RecursionError:
        raise refusal([(SourceLine(path, 1), "nested too deeply")]) from None
    except (ValueError, OverflowError) as error:
        raise refusal([(SourceLine(path, 1), f"not YAML: {error}")]) from None


class _LineLoader(yaml.SafeLoader):
    # An empty table of its own: SafeLoader's has the types of YAML 1.1.
    yaml_implicit_resolvers = {}  # noqa: RUF012


for _name, _pattern, _first in SCALARS:
    # PyYAML looks resolvers up by the first character, and by "" for an empty value, which is null.
    _starts = [*_first, ""] if _name == "null" else list(_first)
    # `\Z` and not `$`, which also matches before a final line break.
    _LineLoader.add_implicit_resolver(TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _starts)


def _line_of(error: yaml.YAMLError, text: str) -> int:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return int(error.problem_mark.line) + 1
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


def _reason_of(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    return str(getattr(error, "reason", error))


def _text(text: str) -> str:
    # Escapes in quotes can produce these. No file name can hold a null, and no UTF-8 file a surrogate.
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("has an invalid character")
    return text


def _integer(text: str) -> int:
    digits = text.lstrip("+-")
    # Python needs quadratic time for the conversion of very many digits, and refuses more than 4300.
    if len(digits) > 20:
        raise ValueError("does not fit into 64 bits")
    # With base 0 Python would refuse leading zeros, as in 007, which YAML permits.
    value = int(text, 0) if digits[:2] in ("0o", "0x") else int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError("does not fit into 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        raise ValueError("is not a finite number")
    return value


MAKERS: dict[str, Callable[[str], Any]] = {
    TAG + "str": _text,
    TAG + "int": _integer,
    TAG + "float": _finite,
    TAG + "bool": lambda text: text.lower() == "true",
    TAG + "null": lambda _: None,
}


@dataclass
class _Builder:
    path: Path
    places: dict[Location, SourceLine] = field(default_factory=dict)

    def build(self, node: yaml.Node, at: Location) -> Any:
        self.places.setdefault(at, self._place(node))
        # Aliases are expanded here: nested ones grow exponentially, from a file of a few lines.
        if len(self.places) > MOST_VALUES:
            raise self._refusal(node, f"must have at most {MOST_VALUES:,} values, with aliases expanded")
        if isinstance(node, yaml.MappingNode) and node.tag == TAG + "map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == TAG + "seq":
            return [self.build(item, (*at, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in MAKERS:
            return self._scalar(node)
        raise self._refusal(node, f"{node.tag.replace(TAG, '!!')} is not supported; write the value out")

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            # PyYAML itself would silently keep the last one.
            if key in values:
                first = self.places[(*at, key)].line
                raise self._refusal(key_node, f"key '{key}' is given twice, first in line {first}")
            self.places[(*at, key)] = self._place(key_node)
            values[key] = self.build(value_node, (*at, key))
        return values

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != TAG + "str":
            word = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            raise self._refusal(node, f"key {shown(word)} must be text; put it in quotes")
        return str(self._scalar(node))

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        try:
            return MAKERS[node.tag](node.value)
        except ValueError as error:
            raise self._refusal(node, f"{shown(node.value)} {error}") from None

    def _place(self, node: yaml.Node) -> SourceLine:
        return SourceLine(self.path, node.start_mark.line + 1)

    def _refusal(self, node: yaml.Node, rule: str) -> BadInputError:
        return refusal([(self._place(node), rule)])
