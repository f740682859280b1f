"""Refusal of what searches, and members with code of their own, do not support; whether a search goes on."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.events import Event
from hetctl.model.run import LOCKSTEP
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
