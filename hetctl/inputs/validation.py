"""Conversion of values to a pydantic model, with file, line and rule of every problem; rules of names."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from hetctl.inputs.input_errors import shown, suggestion
from hetctl.inputs.yaml_source import Location, YamlSource
from hetctl.model.events import DRIVER

Model = TypeVar("Model", bound=BaseModel)

UNION_MARKS = ("<member>", "<grid>", "<random>")
KEY_MARK = "[key]"
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


@dataclass(frozen=True)
class Matching:
    """Constraint that a whole text matches `pattern`; `rule` states it in words."""

    pattern: str
    rule: str

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
        problems = [_problem(kind, details) for details in error.errors(include_url=False)]
        raise source.refusal(problems) from None


def _problem(kind: type[BaseModel], details: Any) -> tuple[Location, str]:
    *around, last = details["loc"] or [""]
    # Pydantic adds the tags of unions to the location, which the file does not contain.
    around = [key for key in around if key not in UNION_MARKS]
    if details["type"] == "extra_forbidden":
        return (*around, last), f"unknown key '{last}'" + suggestion(
            str(last), _known_keys(kind, around, last)
        )
    location = tuple(around) if last in (KEY_MARK, *UNION_MARKS, "") else (*around, last)
    rule = RULES.get(details["type"], details["msg"]).format(**details.get("ctx", {}))
    value = details["input"]
    says_it_all = details["type"] == "missing" or (
        details["type"] == "value_error" and isinstance(value, dict)
    )
    return location, rule if says_it_all else f"{rule}, got {shown(value)}"


def _known_keys(kind: type[BaseModel], around: list[Any], key: str) -> set[str]:
    """Return the valid keys at the place of an unknown `key`, of all kinds of mapping allowed there."""
    models = [kind]
    for step in around:
        fields = [model.model_fields[step] for model in models if step in model.model_fields]
        # A list index is no field: then the models of the enclosing step still hold.
        models = [model for field in fields for model in _models_in(field.annotation)] or models
    return {name for model in models if key not in model.model_fields for name in model.model_fields}


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
