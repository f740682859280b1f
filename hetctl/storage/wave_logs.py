"""Reader of the logs of pipelines: the weights that minibatches met, one file for each member and rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hetctl.model.serialization import decode
from hetctl.model.wave_record import WaveRecord
from hetctl.storage.paths import RunFolder


def read_waves(folder: RunFolder, member: str) -> Iterator[WaveRecord]:
    """Yield the records of all ranks of a member; incomplete or corrupt lines are skipped."""
    for log in sorted(folder.waves.glob("*.jsonl")):
        name, _, rank = log.stem.rpartition("-")
        if name == member and rank.isdigit():
            yield from _records_of(log)


def _records_of(log: Path) -> Iterator[WaveRecord]:
    with log.open("rb") as lines:
        for line in lines:
            # A rank that was killed may leave half a line.
            with suppress(ValueError, RecursionError):
                record = decode(WaveRecord, json.loads(line))
                if len(record.completed) == len(record.pulled):
                    yield record
