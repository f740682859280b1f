"""Checkpoints of pipelines: each stage of the first virtual worker writes its part in the background."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping

from hetctl.model.serialization import decode, encode
from hetctl.runtime.frameworks.stage_network import Tensor
from hetctl.runtime.stages.tensor_mail import Parcel, TensorMail, receive
from hetctl.runtime.worker.checkpoint import (
    ArrayFile,
    BackgroundWriter,
    CheckpointFolder,
    OnSaved,
    TrainingState,
)

PART = "part"
"""Kind of the parcel that says that a stage has written its part."""


class PartSaver(BackgroundWriter):
    """Writer of the part of this rank; on rank 0 it completes the checkpoint when all parts exist.

    Waiting there raises LostPeerError if the rank of another part has ended.

    Parameters
    ----------
    box : queue of Parcel
        Queue of the parcels of the kind `PART`, on rank 0.
    part, parts : int
        Number of this rank's part, and of all: stages of the first virtual worker.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        mail: TensorMail,
        box: queue.SimpleQueue[Parcel],
        part: int,
        parts: int,
    ) -> None:
        super().__init__()
        self._folder, self._mail, self._box = folder, mail, box
        self._part, self._parts = part, parts
        self._written: dict[tuple[int, ...], dict[int, ArrayFile]] = {}

    def save(self, arrays: Mapping[str, Tensor], state: TrainingState, report: OnSaved) -> None:
        """Write this rank's arrays, which must not change any more, once the previous ones are written.

        Parameters
        ----------
        report : callable
            Function called on rank 0, in another thread, when the checkpoint is complete.

        Raises
        ------
        OSError
            If the previous part could not be written.
        """
        self.wait()
        self._begin(self._write, dict(arrays), state, report)

    def _write(self, arrays: Mapping[str, Tensor], state: TrainingState, report: OnSaved) -> None:
        began = time.perf_counter()
        file = self._folder.save_part(arrays, state, self._part)
        self._mail.send(0, PART, order=list(state.order), part=self._part, file=encode(file))
        if self._mail.rank != 0:
            return
        manifest = self._folder.join_parts(self._all_parts(state.order), state)
        report(manifest, time.perf_counter() - began)

    def _all_parts(self, order: tuple[int, ...]) -> list[ArrayFile]:
        """Wait for the parts of a checkpoint; other stages may be ahead by one."""
        while len(self._written.get(order, ())) < self._parts:
            parcel = receive(self._box)
            assert parcel is not None
            fields = parcel.fields
            files = self._written.setdefault(tuple(fields["order"]), {})
            files[fields["part"]] = decode(ArrayFile, fields["file"])
        files = self._written.pop(order)
        return [files[part] for part in sorted(files)]


class NoSaver:
    """Saver of the ranks of other virtual workers than the first: they have the same weights."""

    is_busy = False

    def save(self, arrays: Mapping[str, Tensor], state: TrainingState, report: OnSaved) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
