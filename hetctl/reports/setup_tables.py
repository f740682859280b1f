"""Sections for the setup of runs: sites, the results of `doctor`, and partitions of the data."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Sequence

from rich.text import Text

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.ensemble import Partitions
from hetctl.model.hops import PartitionFile
from hetctl.model.site import Site, SiteKey
from hetctl.reports.sections import Section
from hetctl.reports.units import device_word, format_bytes, printable

STYLES = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "bold red"}
DIGITS = 12
"""Digits of a digest that are shown."""


def sites_table(sites: Iterable[tuple[Site, str]]) -> Section:
    """Return a table of sites with the paths of their files."""
    rows = [
        (
            *(site.name, site.batch_system, str(site.nodes)),
            f"x {site.gpus_per_node} {device_word(site.device, site.gpus_per_node)}",
            *(site.launcher, where),
        )
        for site, where in sites
    ]
    headers = ("site", "batch", ">nodes", "", "launcher", "where")
    return Section(headers=headers, rows=rows, fold="where")


def keys_table(keys: Sequence[SiteKey]) -> Section:
    """Return a table of a site's keys with their sources, and a list of the files."""
    files = dict.fromkeys(key.file for key in keys if key.file)
    marks = {file: f"[{number}]" for number, file in enumerate(files, start=1)}

    def place(key: SiteKey) -> str:
        if key.measured_at is not None:
            return f"measured {time.strftime('%Y-%m-%d', time.localtime(key.measured_at))}"
        return f"{marks[key.file]}:{key.line}" if key.file else "default"

    rows = [
        (key.key, Text(place(key), "dim"), key.value if isinstance(key.value, str) else json.dumps(key.value))
        for key in keys
    ]
    notes = [("", ""), *((f"{marks[file]} {file}", "dim") for file in files)]
    return Section(headers=("key", "where", "value"), rows=rows, fold="value", notes=notes)


def doctor_table(site: str, checks: Sequence[CheckResult]) -> Section:
    """Return a table of the checks of a site, with fixes below those that need one."""
    title = f"site {printable(site)}"
    rows = [
        (
            one.name,
            Text(one.status.value, STYLES[one.status]),
            Text.assemble(
                printable(one.message), (f"\nto fix: {printable(one.hint)}" if one.hint else "", "dim")
            ),
        )
        for one in checks
    ]
    counts = {status: sum(check.status is status for check in checks) for status in CheckStatus}
    summary = ", ".join(f"{count} {status.value}" for status, count in counts.items())
    notes = [("", ""), (summary, "")]
    return Section(headers=("check", "status", title), rows=rows, fold=title, notes=notes)


def partition_files_table(partitions: Sequence[PartitionFile], written: Collection[int]) -> Section:
    """Return a table of the partitions; those that were there already are marked as kept."""
    rows = [
        (
            str(number),
            f"{partition.samples:,}",
            f"{partition.validation_samples:,}",
            format_bytes(partition.bytes),
            Text(partition.sha256[:DIGITS], "dim"),
            Text("written", "green") if number in written else Text("kept", "dim"),
        )
        for number, partition in enumerate(partitions)
    ]
    return Section(headers=(">partition", ">samples", ">validation", ">size", "sha256", ""), rows=rows)


def ensemble_lines(samples: int, partitions: Partitions) -> str:
    """Return the lines by which an ensemble file names the partitions."""
    # A JSON text is a YAML text too, whatever characters the path has.
    values = {"path": json.dumps(partitions.path, ensure_ascii=False)}
    if partitions.source:
        source = json.dumps(partitions.source, ensure_ascii=False)
        values = {"source": source, **values, "replicas": str(partitions.replicas)}
    lines = "".join(f"\n  {key}: {value}" for key, value in values.items())
    return f"samples_per_epoch: {samples}\npartitions:\n  count: {partitions.count}{lines}"
