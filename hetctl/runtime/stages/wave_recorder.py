"""Log of a rank of a pipeline: the weights that its minibatches met, a line for each wave."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetctl.model.pipelines import WaveRecord
from hetctl.model.serialization import encode
from hetctl.runtime.best_effort_io import log_line
from hetctl.storage.atomic_io import make_private_folder


class WaveRecorder:
    """Writer of the log; training goes on if the disk is full.

    Parameters
    ----------
    log : Path
        File that grows from one round to the next.
    """

    def __init__(self, log: Path, round_index: int) -> None:
        self._log, self._round = log, round_index
        self._begin = self._repair()

    def write(self, record: WaveRecord) -> None:
        """Append a record."""
        line, self._begin = self._begin + json.dumps(encode(replace(record, round=self._round))) + "\n", ""
        try:
            make_private_folder(self._log.parent)
            with self._log.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            log_line(f"{self._log.name} lacks a wave: {error}")

    def _repair(self) -> str:
        """Return what ends an incomplete line of a process that was killed."""
        with suppress(OSError):
            if not self._log.read_bytes().endswith(b"\n"):
                return "\n"
        return ""
