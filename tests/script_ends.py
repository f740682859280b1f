"""The rank's ends of the pipes of a script that trains in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetctl.model.training_settings import PROGRESS_VARIABLE, STOP_VARIABLE


class ScriptEnds:
    """Pipes as a rank makes for its script, by the variables of this process until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._reports, progress = os.pipe()
        stop, self._stop = os.pipe()
        self._open = [self._reports, progress, stop, self._stop]
        os.set_blocking(self._reports, False)
        monkeypatch.setenv(PROGRESS_VARIABLE, str(progress))
        monkeypatch.setenv(STOP_VARIABLE, str(stop))
        monkeypatch.setenv("HETCTL_CHECKPOINT_DIR", str(folder))

    def tell_to_stop(self) -> None:
        os.close(self._stop)
        self._open.remove(self._stop)

    def reports(self) -> list[dict]:
        """Return the reports since the last call."""
        try:
            return [json.loads(line) for line in os.read(self._reports, 2**16).splitlines()]
        except BlockingIOError:
            return []

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
