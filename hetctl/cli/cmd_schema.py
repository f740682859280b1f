"""``hetctl schema``."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("kind", type=click.Choice(["ensemble", "site"]))
def command(kind: str) -> None:
    """Print the JSON Schema of ensemble or site files, for checks in editors.

    \b
    Example: hetctl schema ensemble > ensemble.schema.json
    """
    from hetctl.inputs.ensemble_file import ensemble_schema
    from hetctl.inputs.site_file import site_schema

    schemas = {"ensemble": ensemble_schema, "site": site_schema}
    click.echo(json.dumps(schemas[kind](), indent=2))
