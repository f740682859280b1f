"""Refusals of what hetctl does not do with members that are commands."""

from __future__ import annotations

from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.run import CACHED, LOCKSTEP


def refuse_commands(ensemble: Ensemble, why: str, hint: str) -> None:
    """Refuse an ensemble of commands.

    Raises
    ------
    BadInputError
        If it is one.
    """
    if ensemble.framework == COMMAND:
        raise BadInputError(f"the members of ensemble {ensemble.name} are commands: {why}", hint)


def refuse_modes_of_commands(ensemble: Ensemble, mode: str, sharing: str) -> None:
    """Refuse modes and sharing in which hetctl itself would have to train the members of an ensemble.

    Raises
    ------
    BadInputError
        If they are commands, and the mode or the sharing needs more.
    """
    if mode != DATA_PARALLEL:
        refuse_commands(ensemble, f"they cannot train in mode {mode}", f"use --mode {DATA_PARALLEL}")
    if sharing == LOCKSTEP:
        refuse_commands(ensemble, "they read their samples themselves", f"use --sharing {CACHED}")
