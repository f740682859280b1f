"""Functions for a script that hetctl trains as a member: `report` and `should_stop`.

It needs nothing but the standard library, and outside of a run it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from typing import SupportsFloat

from hetctl.model.script_variables import PROGRESS_VARIABLE, STOP_VARIABLE


def report(
    *, epoch: int, samples: int | None = None, seconds: float | None = None, **metrics: SupportsFloat
) -> None:
    """Report a finished epoch, after its checkpoint was written; reports of ranks other than 0 are ignored.

    Parameters
    ----------
    epoch : int
        Number of the epoch, from 1; it goes on counting after a restart.
    samples : int or None
        Training samples of the epoch, of all ranks together. None: no rate is derived.
    seconds : float or None
        Seconds in which they were trained; None: those since the last report.
    **metrics
        Metrics of the epoch, with that of the stop rule.
    """
    if (descriptor := _descriptor(PROGRESS_VARIABLE)) is None:
        return
    said = {"epoch": epoch, "samples": samples, "seconds": seconds}
    line = {key: value for key, value in said.items() if value is not None}
    text = json.dumps(line | {name: float(value) for name, value in metrics.items()})
    # The rank reads no more once it has ended, and it ends the script with it.
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{text}\n".encode())


def should_stop() -> bool:
    """Return true once the script has to write a checkpoint and exit; it is started again later."""
    if (descriptor := _descriptor(STOP_VARIABLE)) is None:
        return False
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))


def _descriptor(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None
