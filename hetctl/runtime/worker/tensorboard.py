"""Epochs of a member as TensorBoard events, if the package is installed."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hetctl.model.errors import is_transient
from hetctl.model.pipelines import StageReport, pipeline_use
from hetctl.model.training_progress import EpochResult, RankShare
from hetctl.runtime.job_logs import log_line
from hetctl.storage.atomic_io import make_private_folder

VERSION = "brain.Event:2"
"""Version of TensorBoard's files, in the first record of each."""
HEADER = struct.Struct("<QI")
"""Header of a record: the length of its content, and the length's checksum."""
FOOTER_BYTES = 4
"""Bytes of a record's footer: the checksum of its content."""

Figures = Callable[[int], Mapping[str, float]]
"""Function that returns further scalars of an epoch by their tags."""


def rank_figures(ranks: Sequence[RankShare]) -> Mapping[str, float]:
    """Return the batches and step times of the ranks of a balanced group."""
    sizes = {f"batch/{rank.worker}": float(rank.batch) for rank in ranks}
    return sizes | {f"step_s/{rank.worker}": rank.step_s for rank in ranks}


def stage_figures(stages: Sequence[StageReport]) -> Mapping[str, float]:
    """Return how a pipeline's stages share their time, and their bytes between nodes."""
    use = pipeline_use(stages)
    sent = use.between_nodes
    return {
        "pipeline/busy": use.gpu_busy_fraction,
        "pipeline/wave_wait": use.wave_wait_fraction,
        "pipeline/idle": use.idle_fraction,
        "pipeline/bytes_between_nodes": float(sent.passes + sent.parameters),
    }


class TensorBoardWriter:
    """Writer that appends to the single file of a member, across the processes that train it.

    Parameters
    ----------
    path : Path
        File that `tensorboard_file` returns for the folder of the member's checkpoints.
    samples : int
        Samples of an epoch.
    figures : Figures
        Scalars of the group's ranks or stages.
    """

    def __init__(self, path: Path, samples: int, figures: Figures = lambda _: {}) -> None:
        self._path = path
        self._samples = samples
        self._figures = figures
        self._records: Any = None

    def show(self, result: EpochResult) -> None:
        """Add an epoch; do nothing if TensorBoard cannot be imported.

        Raises
        ------
        OSError
            If the disk is full.
        """
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
        except Exception:
            # Besides ImportError, protobuf raises an error of its own for versions that do not match.
            return
        rate = self._samples / max(result.duration_s, 1e-9)
        values = {**result.metrics, "samples/s": rate, "gpus": result.gpus, **self._figures(result.epoch)}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        event = Event(wall_time=result.finished_at, step=result.epoch, summary=summary)
        try:
            records = self._opened(Event)
            records.write(event.SerializeToString())
            records.flush()
        except OSError as error:
            # The events have the epoch; the next opening repairs the file.
            self._records = None
            if not is_transient(error):
                raise
            log_line(f"{self._path.name} lacks an epoch: {error}")

    def _opened(self, event: Any) -> Any:
        if self._records is None:
            from tensorboard.summary.writer.record_writer import RecordWriter

            make_private_folder(self._path.parent)
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+b")
            file.truncate(whole := _whole_records(file))
            self._records = RecordWriter(file)
            if not whole:
                self._records.write(event(wall_time=time.time(), file_version=VERSION).SerializeToString())
        return self._records


def _whole_records(file: BinaryIO) -> int:
    """Return the bytes of complete records: TensorBoard stops reading at a truncated one."""
    size, end = os.fstat(file.fileno()).st_size, 0
    while end + HEADER.size <= size:
        file.seek(end)
        length, _ = HEADER.unpack(file.read(HEADER.size))
        record = HEADER.size + length + FOOTER_BYTES
        if not length or end + record > size:
            break
        end += record
    return end
