"""Refusals of what searches, members with own code, and commands do not support; the end of a search."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.events import Event
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.model.searches import SEARCH_ENDED


def refuse_sharing_of_searches(ensemble: Ensemble, sharing: str) -> None:
    """Refuse sharing in which members cannot arrive while others train.

    Raises
    ------
    BadInputError
        If the ensemble has a search, and its members were to share samples so.
    """
    if ensemble.search is not None and sharing == LOCKSTEP:
        raise BadInputError(
            f"ensemble {ensemble.name} has a search, whose trials cannot share samples in lockstep",
            "use --sharing cached",
        )


def refuse_lockstep_of_codes(ensemble: Ensemble, sharing: str) -> None:
    """Refuse lockstep of members with code of their own: node leaders read the ensemble's data.

    Raises
    ------
    BadInputError
        If there are such members, and all were to train in lockstep.
    """
    if sharing == LOCKSTEP and any(member.code for member in ensemble.members):
        raise BadInputError(
            f"members of ensemble {ensemble.name} have framework, functions or data of their own, and cannot"
            " share samples in lockstep",
            "use --sharing cached",
        )


def search_goes_on(ensemble: Ensemble, events: Iterable[Event]) -> bool:
    """Return true if the ensemble has a search that may still ask for trials."""
    return ensemble.search is not None and not any(event.kind == SEARCH_ENDED for event in events)


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
