"""Weights of a member's epoch that were written for use without hetctl, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetctl.model.ensemble import Member
from hetctl.model.training_progress import EpochResult
from hetctl.model.values import dataclass

BEST, LAST = "best", "last"
"""Epochs that may be asked for in place of a number."""


@dataclass(frozen=True)
class Exported:
    """A file or folder with the weights of a member.

    Parameters
    ----------
    path : str
        The file or, of a command whose checkpoint is a folder, the folder.
    epoch : int
        Number of the epoch.
    best_epoch : int or None
        Best epoch whose checkpoint is kept.
    kept : tuple of int
        Epochs whose checkpoints are kept.
    bytes : int
        Size.
    note : str
        What has to be known to load it; empty if nothing has.
    history : sequence of EpochResult
        Finished epochs of the member.
    framework, data, functions
        Framework, argument of ``input_fn``, and functions by their names in the ensemble file.
    code : str
        Digest of the user's modules; empty for commands.
    revision : str
        Revision of the ensemble's folder when the run was submitted, as Git describes it; empty: not known.
    versions : mapping of str to str
        Versions of the packages by which it was written.
    """

    run: str
    member: Member
    path: str
    epoch: int
    best_epoch: int | None
    kept: tuple[int, ...]
    bytes: int
    note: str
    history: Sequence[EpochResult]
    framework: str
    data: str | None
    functions: Mapping[str, str]
    code: str
    revision: str
    versions: Mapping[str, str]
