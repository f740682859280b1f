"""Models of files, derived from the types of their values; errors with file, line and rule; names."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from hetctl.inputs.input_errors import shown, suggestion
from hetctl.inputs.quantities import format_duration, parse_bytes, parse_duration
from hetctl.inputs.yaml_source import Location, YamlSource, dotted
from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER
from hetctl.model.file_keys import DURATION, SIZE, Key, Limits, Pattern
from hetctl.model.serialization import decode

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

UNION_MARKS = ("<member>", "<grid>", "<random>")
TYPE = re.compile(r"str|int|float|bool|.+\[.+\]")
"""Types of a union, which pydantic adds to places as it does the marks above: str, list[str], .."""
KEY_MARK = "[key]"
NUMBERS = re.compile(r", (\d+),[\d, ]+ or (\d+)$")
RULES = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text (put it in quotes)",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "finite_number": "must be a finite number",
    "json_invalid": "is not JSON",
    "literal_error": "must be {expected}",
    "too_short": "must have at least {min_length}",
    "too_long": "must have at most {max_length}",
    "string_too_short": "must not be empty",
    "value_error": "{error}",
}


class Strict(BaseModel):
    """Model that accepts only its own keys, and only values of exactly their types."""

    # Without strict, pydantic converts "3" to 3 and 1.0 to 1: a typing error in a file would pass silently.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Matching(Pattern):
    """Pattern that pydantic checks."""

    def check(self, text: str) -> str:
        """Return the text; ValueError with the rule if it does not match."""
        # Python's own engine: pydantic's has no look-ahead, which the pattern of member names uses.
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(self.rule)
        return text

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(kind))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^({self.pattern})$"}


def converting(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Return a conversion of a file's values whose errors name the rule and the next step."""

    def convert(value: Any) -> Any:
        try:
            return parse(value)
        except BadInputError as error:
            raise ValueError(f"{error.message}; {error.hint}".rstrip("; ")) from None

    return BeforeValidator(convert)


def under(key: str) -> BeforeValidator:
    """Return a conversion of a plain value to a mapping with the value under `key`."""
    return BeforeValidator(lambda given: given if isinstance(given, dict) else {key: given})


def _duration(value: Any) -> int:
    if value is None:
        raise PydanticUseDefault
    # As text, even for a number in YAML, so that the message says which unit is missing.
    return parse_duration(str(value))


_WRITTEN = {
    DURATION: (
        converting(_duration),
        WithJsonSchema({"type": ["string", "null"], "examples": ["2h", "90m", "2:00:00"]}),
    ),
    SIZE: (
        converting(parse_bytes),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["512GB"]}
        ),
    ),
}


@functools.cache
def model_of(kind: type) -> type[Strict]:
    """Return the model of a file or a mapping in it; its keys are the fields of a dataclass with a `Key`."""
    hints = typing.get_type_hints(kind, include_extras=True)
    keys = {
        field.name: _key_of(field, hints[field.name])
        for field in dataclasses.fields(kind)
        if isinstance(getattr(hints[field.name], "__metadata__", (None,))[-1], Key)
    }
    meaning = (kind.__doc__ or "").partition("\n")[0]
    made: Any = create_model(f"{kind.__name__}Model", __base__=Strict, __doc__=meaning, **keys)  # type: ignore[call-overload]
    return typing.cast(type[Strict], made)


def _key_of(field: dataclasses.Field[Any], hint: Any) -> tuple[Any, FieldInfo]:
    key: Key = hint.__metadata__[-1]
    how: dict[str, Any] = {"description": key.description}
    kind: Any = Literal[key.choices] if key.choices else _in_file(hint)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if key.form == DURATION:
        how["alias"] = field.name.removesuffix("_s")
    if null := key.null or (key.form == DURATION and default is not None and format_duration(default)):
        how["description"] += f"; null: {null}."
        kind, default = kind | None, None
    if default is None or isinstance(default, (str, int, float)):
        how["default"] = default
    elif dataclasses.is_dataclass(default):
        how["default_factory"] = model_of(typing.cast(type, type(default)))
    elif default is not dataclasses.MISSING:
        how["default_factory"] = list if default == () else type(default)
    return kind, Field(**how)


def _in_file(hint: Any) -> Any:
    """Return a field's type in a file: a list for a tuple, a model for a dataclass."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return model_of(typing.cast(type, hint))
    if origin is Annotated:
        marks = [mark for one in hint.__metadata__ for mark in _marks_of(one)]
        return Annotated[(_in_file(hint.__origin__), *marks)]
    inner = [_in_file(one) for one in typing.get_args(hint)]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, inner)
    if origin not in (Mapping, tuple):
        return hint
    kind = types.GenericAlias(dict, tuple(inner)) if origin is Mapping else types.GenericAlias(list, inner[0])
    length = Field(min_length=len(inner), max_length=len(inner))
    return kind if origin is Mapping or inner[-1] is ... else Annotated[(kind, length)]


def _marks_of(mark: Any) -> Iterator[Any]:
    """Yield the pydantic form of a mark."""
    if isinstance(mark, Pattern):
        yield Matching(*mark)
    elif isinstance(mark, Limits):
        yield Field(**mark.limits)
        yield from _WRITTEN.get(mark.form, ())
    else:
        yield mark


def validate(kind: type[Model], source: YamlSource) -> Model:
    """Check all values of a file against a model.

    Raises
    ------
    BadInputError
        If the file has errors, with a line for each: ``FILE:LINE: key: rule, got value``.
    """
    try:
        return kind.model_validate(source.values)
    except ValidationError as error:
        raise source.refusal(_problems(kind, error)) from None


def rules_of(kind: type[BaseModel], error: ValidationError) -> list[str]:
    """Return what is wrong with values, each as ``key: rule, got value``."""
    return [f"{dotted(at)}: {rule}" if at else rule for at, rule in _problems(kind, error)]


def value_of(kind: type[T], model: Any, **more: Any) -> T:
    """Return a dataclass from the model of its keys in a file and from the fields that no file has."""
    return decode(kind, {**model.model_dump(exclude_unset=True, exclude_none=True), **more})


def _problems(kind: type[BaseModel], error: ValidationError) -> Iterator[tuple[Location, str]]:
    """Yield each place with what is wrong there; a union's with the rules of all its types."""
    found: dict[tuple[Location, int], dict[str, str]] = defaultdict(dict)
    for number, details in enumerate(error.errors(include_url=False)):
        is_one_of = any(TYPE.fullmatch(str(key)) for key in details["loc"])
        location, rule, value = _problem(kind, details)
        found[location, -1 if is_one_of else number][rule] = value
    inside = {location[:depth] for location, _ in found for depth in range(len(location))}
    for (location, _), rules in found.items():
        first, *others = rules
        # A value of one type with an error inside is not to be of another type.
        if location not in inside:
            either = (first, *(rule.removeprefix("must be ") for rule in others))
            yield location, ", or ".join(either) + rules[first]


def _problem(kind: type[BaseModel], details: Any) -> tuple[Location, str, str]:
    """Return the place of a problem, the rule, and what the message says of the value."""
    *around, last = details["loc"] or [""]
    # The file does not contain them.
    around = [key for key in around if key not in UNION_MARKS and not TYPE.fullmatch(str(key))]
    if details["type"] == "extra_forbidden":
        known = _known_keys(kind, around, last)
        return (*around, last), f"unknown key '{last}'", suggestion(str(last), known)
    is_mark = last in (KEY_MARK, *UNION_MARKS, "") or TYPE.fullmatch(str(last))
    rule = RULES.get(details["type"], details["msg"]).format(**details.get("ctx", {}))
    value = details["input"]
    says_it_all = details["type"] == "missing" or (
        details["type"] == "value_error" and isinstance(value, dict)
    )
    location = tuple(around) if is_mark else (*around, last)
    return location, NUMBERS.sub(r" or \1 to \2", rule), "" if says_it_all else f", got {shown(value)}"


def _known_keys(kind: type[BaseModel], around: list[Any], key: str) -> set[str]:
    """Return the valid keys at the place of an unknown `key`, of all kinds of mapping allowed there."""
    models = [kind]
    for step in around:
        fields = [field for model in models for name, field in _keys(model) if name == step]
        # A list index is no field: the enclosing models still hold.
        models = [model for field in fields for model in _models_in(field.annotation)] or models
    found = [{name for name, _ in _keys(model)} for model in models]
    return {name for names in found if key not in names for name in names}


def _keys(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return [(field.alias or name, field) for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


NAME_RULE = "must be 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit"
MEMBER_RULE = f"{NAME_RULE}; '{DRIVER}' is reserved"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A member's events lie in a file of its name, beside `driver.jsonl`.
MEMBER_NAME = re.compile(rf"(?!{DRIVER}$){SAFE_NAME.pattern}")

SafeName = Annotated[str, Matching(SAFE_NAME.pattern, NAME_RULE)]
MemberName = Annotated[str, Matching(MEMBER_NAME.pattern, MEMBER_RULE)]
