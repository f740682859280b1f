"""A member's epochs as TensorBoard shows them, where the package is installed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hetctl.core.layout import make_private_folder
from hetctl.core.profile import EpochResult

VERSION = "brain.Event:2"
"""Of TensorBoard's files, said in the first record of each."""


class Board:
    """Appends to an event file of this process's own; TensorBoard puts a folder's files together.

    Parameters
    ----------
    folder : Path
        `RunFolder.board_of` the member.
    samples : int
        Of an epoch.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self._folder = folder
        self._samples = samples
        self._records: Any = None

    def show(self, result: EpochResult) -> None:
        """Add an epoch; without TensorBoard, do nothing.

        Raises
        ------
        OSError
            If the disk is full or read-only.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
        except ImportError:
            return
        rate = self._samples / max(result.seconds, 1e-9)
        values = {**result.metrics, "samples/s": rate, "gpus": result.gpus}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        records = self._opened(Event)
        event = Event(wall_time=result.finished_at, step=result.epoch, summary=summary)
        records.write(event.SerializeToString())
        records.flush()

    def _opened(self, event: Any) -> Any:
        if self._records is None:
            from tensorboard.summary.writer.record_writer import RecordWriter

            make_private_folder(self._folder)
            path = self._folder / f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}.{os.getpid()}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._records = RecordWriter(os.fdopen(descriptor, "wb"))
            self._records.write(event(wall_time=time.time(), file_version=VERSION).SerializeToString())
        return self._records
