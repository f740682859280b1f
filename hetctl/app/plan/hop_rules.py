"""Conditions under which members can hop in real jobs."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.run import NONE
from hetctl.model.site import MEMBERS, NODES, Site


def refuse_without_hops(
    ensemble: Ensemble, site: Site, sharing: str, allowed: Iterable[str] = (NONE,)
) -> None:
    """Refuse data that members cannot visit part by part, and jobs that start their ranks otherwise.

    Parameters
    ----------
    sharing : str
        Sharing of data, as in `RunSpec`.
    allowed : iterable of str
        Ways of sharing that go with hops.

    Raises
    ------
    BadInputError
        If a condition is not met.
    """
    rules = (
        (
            ensemble.partitions is not None,
            f"ensemble {ensemble.name} has no partitions, over which members could hop",
            "add `partitions` to the ensemble file (`hetctl partition` makes parts)",
        ),
        (
            ensemble.reads_partitions,
            f"ranks cannot read the partitions of ensemble {ensemble.name}: it is not said where they are",
            "add `path` or `file` to `partitions` in the ensemble file",
        ),
        (
            site.launch != MEMBERS,
            f"members cannot hop with --launch {MEMBERS}, which starts each of them in its own step",
            f"use --launch {NODES}",
        ),
        (
            sharing in allowed,
            f"members that hop cannot share samples: sharing is {sharing}",
            "leave out --sharing, or use --sharing none",
        ),
    )
    for holds, message, hint in rules:
        if not holds:
            raise BadInputError(message, hint)
