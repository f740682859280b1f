"""Terminal output about the partitions that were made."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from rich.console import RenderableType
from rich.text import Text

from hetctl.model.ensemble import Partitions
from hetctl.model.partition_manifest import PartitionFile
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import format_bytes

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
