"""What a rank is told to do, and what it is told of the driver."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.codec import decode, encode
from hetctl.core.layout import write_json
from hetctl.runtime.group import Place
from hetctl.runtime.wire import Address

TRAIN, MEASURE, PROBE, ALL_REDUCE = "train", "measure", "probe", "all-reduce"


@dataclass(frozen=True)
class Task:
    """What the ranks of one group do together.

    Parameters
    ----------
    kind : str
        `TRAIN`, `MEASURE`, `PROBE` or `ALL_REDUCE`.
    folder : str
        Of the round, or of the profiling job.
    name : str
        Of the member, or of the point; it names event file and log.
    """

    kind: str
    folder: str
    name: str

    @property
    def events(self) -> Path:
        """Folder of event files."""
        return Path(self.folder) / "events"

    @property
    def log(self) -> Path:
        """Where the output of all ranks goes."""
        return Path(self.folder) / "logs" / f"{self.name}.log"


@dataclass(frozen=True)
class Assignment:
    """A task for one rank.

    Parameters
    ----------
    launched_at : float
        When it was given out, in seconds since the epoch; the rank may have had to be started first.
    own_step : bool
        Whether the rank is one of a step that was started for this task.
    """

    task: Task
    place: Place
    launched_at: float
    own_step: bool = False


@dataclass(frozen=True)
class Stop:
    """The end of a task for the ranks of its group: they leave with a checkpoint.

    Parameters
    ----------
    key : str
        Of the group, as in its `Place`: the message may come when a rank has gone on to another task.
    """

    key: str
    reason: str


def write_address(path: Path, address: Address) -> None:
    """Write where ranks find the driver, for the owner alone: it holds the key."""
    write_json(path, encode(address))


def read_address(path: Path) -> Address:
    """Read where the driver is."""
    return decode(Address, json.loads(path.read_text(encoding="utf-8")))
