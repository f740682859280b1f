"""Refusal of what searches do not support, and whether one goes on."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.events import Event
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.run import LOCKSTEP
from hetctl.model.search_spec import SEARCH_ENDED


def refuse_modes_of_searches(ensemble: Ensemble, mode: str, sharing: str) -> None:
    """Refuse modes and sharing in which members cannot arrive while a run goes on.

    Raises
    ------
    BadInputError
        If the ensemble has a search, and the mode or the sharing is one of these.
    """
    if ensemble.search is None:
        return
    if mode != DATA_PARALLEL:
        raise BadInputError(
            f"ensemble {ensemble.name} has a search, whose trials cannot train in mode {mode}",
            f"use --mode {DATA_PARALLEL}",
        )
    if sharing == LOCKSTEP:
        raise BadInputError(
            f"ensemble {ensemble.name} has a search, whose trials cannot share samples in lockstep",
            "use --sharing cached",
        )


def search_goes_on(ensemble: Ensemble, events: Iterable[Event]) -> bool:
    """Return true if the ensemble has a search that may still ask for trials."""
    return ensemble.search is not None and not any(event.kind == SEARCH_ENDED for event in events)
