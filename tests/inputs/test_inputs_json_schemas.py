from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest

from hetctl.inputs.json_schemas import SCHEMAS, schema_text


def properties(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        for value in schema.values():
            yield from properties(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_published_schema_is_that_of_the_models(name: str):
    published = resources.files("hetctl.inputs").joinpath(name).read_text(encoding="utf-8")
    assert published == schema_text(name), "run: python -m hetctl.inputs.json_schemas"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_is_described(name: str):
    found = list(properties(SCHEMAS[name]()))
    assert len(found) > 15
    assert [key for key, field in found if not field.get("description")] == []
