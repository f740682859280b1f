"""Published JSON Schemas; ``python -m hetctl.inputs.json_schemas`` regenerates them."""

from __future__ import annotations

import json
from pathlib import Path

from hetctl.inputs.ensemble_file import ensemble_schema
from hetctl.inputs.site_file import site_schema

SCHEMAS = {"ensemble.schema.json": ensemble_schema, "site.schema.json": site_schema}


def schema_text(name: str) -> str:
    """Return the text of a published schema according to the current models."""
    return json.dumps(SCHEMAS[name](), indent=2) + "\n"


if __name__ == "__main__":
    for _name in SCHEMAS:
        Path(__file__).with_name(_name).write_text(schema_text(_name), encoding="utf-8")
