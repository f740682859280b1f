"""Conditions under which members can be planned: GPUs of a job, hops, and parameters divided among GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import COMMAND, Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import DATA_PARALLEL, HOPPER, PIPELINE
from hetctl.model.run import CACHED, LOCKSTEP, NONE
from hetctl.model.site import MEMBERS, NODES, Cluster, Site
from hetctl.model.training_settings import ON
from hetctl.scheduling.planners.heterogeneous import most_for_one


def refuse_wide_members(members: Iterable[Member], cluster: Cluster, *, mix_types: bool) -> None:
    """Refuse members that train on no fewer GPUs than one of them can have.

    Parameters
    ----------
    mix_types : bool
        True if a member may have GPUs of several types at once.

    Raises
    ------
    InfeasibleError
        If there is one.
    """
    most = most_for_one(cluster.nodes, mix_types=mix_types)
    for member in members:
        if member.min_gpus > most:
            key = "gpus" if member.min_gpus == member.max_gpus else "min_gpus"
            raise InfeasibleError(
                f"{key} of {member.name} is {member.min_gpus}; of the {cluster.gpus} of a job it can have at"
                f" most {most}",
                "ask for more with --gpus, choose another site, or lower it in the ensemble file",
            )


def refuse_without_hops(
    ensemble: Ensemble, site: Site, sharing: str, allowed: Iterable[str] = (NONE,)
) -> None:
    """Refuse data that members cannot visit by partitions, and jobs that start their ranks otherwise.

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
            "add `partitions` to the ensemble file (`hetctl partition` makes them)",
        ),
        (
            ensemble.reads_partitions,
            f"ranks cannot read the partitions of ensemble {ensemble.name}: these have no paths",
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


def refuse_modes_of_sharded(ensemble: Ensemble, mode: str | None, balance: str) -> None:
    """Refuse modes and balancing that do not go with `shard`.

    Raises
    ------
    BadInputError
        If they do not.
    """
    sharded = [member.name for member in ensemble.members if member.shard]
    rules = (
        (mode not in (HOPPER, PIPELINE), f"--mode {mode}", "use --mode data-parallel or auto"),
        (balance != ON, f"--balance {ON}", "use --balance auto or off"),
    )
    for holds, what, hint in rules:
        if sharded and not holds:
            raise BadInputError(
                f"{sharded[0]} has `shard: true` in the ensemble file, which does not go with {what}",
                f"{hint}, or leave out `shard`",
            )


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


def refuse_commands(ensemble: Ensemble, reason: str, hint: str) -> None:
    """Refuse an ensemble of commands.

    Raises
    ------
    BadInputError
        If it is one.
    """
    if ensemble.framework == COMMAND:
        raise BadInputError(f"the members of ensemble {ensemble.name} are commands: {reason}", hint)


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
