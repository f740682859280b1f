"""Conditions under which members can hop in real jobs."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import DATA_PARALLEL
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
    refuse_hops_by_launch(site)
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
            ensemble.functions.evaluate_fn is None,
            f"{ensemble.functions.evaluate_fn} needs the predictions of all validation samples at once, but "
            "members that hop are evaluated on one partition after another",
            f"leave out functions.evaluate_fn, or use --mode {DATA_PARALLEL}",
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


def refuse_hops_by_launch(site: Site) -> None:
    """Refuse jobs with a step for each member.

    A visit takes seconds, as does a step with its import of the framework; and the states of members that
    hop are kept by agents that stay, one on each node.

    Raises
    ------
    BadInputError
        If the site has such jobs.
    """
    if site.launch == MEMBERS:
        raise BadInputError(
            f"members cannot hop with --launch {MEMBERS} at site {site.name}: each visit would wait for a"
            " step of its own and an import of the framework, and no agent would stay to keep their states",
            f"use --launch {NODES}, or --mode {DATA_PARALLEL}",
        )
