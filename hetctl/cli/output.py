"""Output of commands: one JSON object, or text and tables, or a file that the user names."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.serialization import encode

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
AS_JSON = "hetctl.json"
"""Key under which a command's context has its ``--json``."""


def _remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    context.meta[AS_JSON] = value


json_option = click.option(
    "--json", "as_json", is_flag=True, expose_value=False, callback=_remember, help="Print one JSON object."
)
"""Option ``--json``, which `show` obeys."""


def as_json() -> bool:
    """Return true if the present command was given ``--json``."""
    return bool(click.get_current_context().meta.get(AS_JSON))


def show(value: Any, shown: Any, failure: HetctlError | None = None) -> None:
    """Print a result on stdout: as one JSON object with ``--json``, else as text.

    Parameters
    ----------
    shown : str, list or callable
        Line, table or list of these, or the function of `value` that makes them: only if they are printed.
    failure : HetctlError or None
        Partial failure; the command ends with its exit code.
    """
    if as_json():
        _print_json(value, failure)
    else:
        seen = shown(value) if callable(shown) else shown
        for part in seen if isinstance(seen, list) else [seen]:
            # Rich would break long lines of plain texts.
            click.echo(part) if isinstance(part, str) else console().print(part)
    if failure and as_json():
        # The failure was printed with the result.
        raise click.exceptions.Exit(failure.exit_code)
    if failure:
        raise failure


def _print_json(value: Any, failure: HetctlError | None) -> None:
    body = encode(value)
    keys: Mapping[str, Any] = body if isinstance(body, Mapping) else {"items": body}
    error = {"error": _error(failure.kind, failure.message, failure.hint)} if failure else {}
    # NaN and Infinity are not JSON: better an error here than in the program that reads it.
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **error, **keys}, indent=2, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises
    ------
    BadInputError
        If it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot write {path}: {error.strerror}") from None


def console() -> Console:
    """Return the console on stdout; files and pipes get 120 columns."""
    from rich.console import Console

    # Rich would take 80 columns for a pipe and fold names that programs search for.
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False)


def fail(kind: str, message: str, hint: str, code: int, *, as_json: bool) -> int:
    """Report a failure and return its exit code."""
    if as_json:
        error = _error(kind, message, hint)
        try:
            click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}, indent=2))
        except OSError:
            # If stdout takes no JSON, such as a file on a full disk, stderr gets a text.
            _discard(1)
        else:
            return code
    click.echo(f"hetctl: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    return code


def report_interruption(failure: HetctlError, *, as_json: bool) -> int:
    """Report an interruption by a signal, if stdout and stderr are still open; return the exit code."""
    try:
        fail(failure.kind, failure.message, failure.hint, failure.exit_code, as_json=as_json)
        sys.stdout.flush()
    except OSError:
        _discard(1, 2)
    return failure.exit_code


def _discard(*streams: int) -> None:
    """Discard what is written to streams: Python would fail again when it flushes them at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _error(kind: str, message: str, hint: str) -> dict[str, str]:
    return {"kind": kind, "message": message, "hint": hint}
