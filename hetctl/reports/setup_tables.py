"""Terminal output about what runs need: sites, the results of `doctor`, and partitions of the data."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.ensemble import Partitions
from hetctl.model.hops import PartitionFile
from hetctl.model.site import Site, SiteKey
from hetctl.reports.style import ruled_table
from hetctl.reports.units import device_word, format_bytes, printable

STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "bold red"}


def sites_table(sites: Iterable[tuple[Site, str]]) -> RenderableType:
    """Return a table of sites with the paths of their files."""
    rows = (
        (
            *(site.name, site.batch_system, str(site.nodes)),
            f"x {site.gpus_per_node} {device_word(site.device, site.gpus_per_node)}",
            *(site.launcher, where),
        )
        for site, where in sites
    )
    return ruled_table(("site", "batch", ">nodes", "", "launcher", "where"), rows, gap=1, fold="where")


def keys_table(keys: Sequence[SiteKey]) -> RenderableType:
    """Return a table of a site's keys with their sources, and a list of the files."""
    files = list(dict.fromkeys(key.file for key in keys if key.file))
    marks = {file: f"[{number}]" for number, file in enumerate(files, start=1)}
    rows = ((key.key, Text(_place(key, marks), "dim"), _value(key)) for key in keys)
    table = ruled_table(("key", "where", "value"), rows, gap=1, fold="value")
    notes = [Text(f"{marks[file]} {printable(file)}", "dim", overflow="fold") for file in files]
    return Group(table, Text(), *notes)


def check_table(site: str, cases: Sequence[str]) -> RenderableType:
    """Return a line that a site is valid, with the rendered cases."""
    return Text.assemble(
        (f"site {printable(site)} is valid", "green"), f"; rendered for it: {', '.join(cases)}"
    )


def doctor_table(site: str, checks: Sequence[CheckResult]) -> RenderableType:
    """Return a table of the checks of a site, with fixes below those that need one."""
    title = f"site {printable(site)}"
    rows = ((one.name, Text(one.status.value, STYLES[one.status]), _message(one)) for one in checks)
    table = ruled_table(("check", "status", title), rows, gap=1, fold=title)
    return Group(table, Text(), _summary(checks))


def _message(check: CheckResult) -> Text:
    fix = f"\nto fix: {printable(check.hint)}" if check.hint else ""
    return Text.assemble(printable(check.message), (fix, "dim"))


def _summary(checks: Sequence[CheckResult]) -> Text:
    counts = {status: sum(check.status is status for check in checks) for status in CheckStatus}
    return Text(", ".join(f"{count} {status.value}" for status, count in counts.items()))


def _place(key: SiteKey, marks: Mapping[str, str]) -> str:
    if key.measured_at is not None:
        return f"measured {time.strftime('%Y-%m-%d', time.localtime(key.measured_at))}"
    return f"{marks[key.file]}:{key.line}" if key.file else "default"


def _value(key: SiteKey) -> str:
    return key.value if isinstance(key.value, str) else json.dumps(key.value)


DIGITS = 12
"""Digits of a digest that are shown."""


def partition_files_table(partitions: Sequence[PartitionFile], written: Collection[int]) -> RenderableType:
    """Return a table of the partitions; those that were there already are marked as kept."""
    rows = (
        (
            str(number),
            f"{partition.samples:,}",
            f"{partition.validation_samples:,}",
            format_bytes(partition.bytes),
            Text(partition.sha256[:DIGITS], "dim"),
            Text("written", "green") if number in written else Text("kept", "dim"),
        )
        for number, partition in enumerate(partitions)
    )
    return ruled_table((">partition", ">samples", ">validation", ">size", "sha256", ""), rows, gap=1)


def ensemble_lines(samples: int, partitions: Partitions) -> str:
    """Return the lines of an ensemble file with which it trains on the partitions."""
    # A JSON text is a YAML text too, whatever characters the path has.
    values = {"path": json.dumps(partitions.path, ensure_ascii=False)}
    if partitions.source:
        source = json.dumps(partitions.source, ensure_ascii=False)
        values = {"source": source, **values, "replicas": str(partitions.replicas)}
    lines = "".join(f"\n  {key}: {value}" for key, value in values.items())
    return f"samples_per_epoch: {samples}\npartitions:\n  count: {partitions.count}{lines}"
