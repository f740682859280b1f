"""Size and time of jobs: the user's values within the limits of the queues, and chosen ones for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetctl.app.profile.catalog_profiles import member_profiles
from hetctl.app.project import Project
from hetctl.inputs.quantities import format_duration
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.job import JobSize, JobSizeOption
from hetctl.model.run import Budget
from hetctl.model.site import Cluster, Site
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import active_workloads
from hetctl.scheduling.fusing import fused_shape
from hetctl.scheduling.job_size import QueueBin, best_of, bins_of, grace_of, job_sizes
from hetctl.scheduling.planners.base import Options, options_from
from hetctl.scheduling.planners.heterogeneous import most_for_one

DEFAULT_WALL_S = 2 * 3600
DEVICES = {"gpu": "GPUs", "slot": "slots"}


@dataclass(frozen=True)
class JobSizeChoice:
    """Size of a run's jobs, and the other sizes considered, if any."""

    size: JobSize
    chosen: JobSizeOption | None = None
    job_sizes: tuple[JobSizeOption, ...] = ()


def job_size(site: Site, gpus: int | None, wall_s: int | None, queue_name: str | None) -> JobSize:
    """Return the size in the first queue that accepts it; by default the whole site for at most two hours.

    Raises
    ------
    BadInputError
        If the site has no such queue.
    InfeasibleError
        If no queue accepts so many nodes for so long.
    """
    bins = _bins(site, queue_name)
    wanted = gpus or bins[0].most_nodes * site.gpus_per_node
    _refuse_more_than_all(site, wanted)
    nodes = -(-wanted // site.gpus_per_node)
    for b in bins:
        wall = wall_s or min(DEFAULT_WALL_S, b.queue.max_wall_s or DEFAULT_WALL_S)
        if b.takes(nodes, wall):
            return JobSize(b.queue, wanted, nodes, wall, grace_of(wall))
    raise _refusal(site, bins, nodes, wall_s or DEFAULT_WALL_S)


def _bins(site: Site, queue_name: str | None) -> list[QueueBin]:
    name = queue_name or next(iter(site.wanted_queues), None)
    found = tuple(queue for queue in site.queues if name in (None, queue.name))
    if not found:
        names = ", ".join(dict.fromkeys(queue.name for queue in site.queues))
        raise BadInputError(f"site {site.name} has no queue {name!r}", f"choose one of: {names}")
    return bins_of(site, found)


def _refuse_more_than_all(site: Site, gpus: int) -> None:
    if gpus > site.gpus:
        raise InfeasibleError(
            f"{gpus} {DEVICES[site.device]} are more than the {site.gpus} of site {site.name}",
            "lower --gpus, or choose another site",
        )


def _refusal(site: Site, bins: Sequence[QueueBin], nodes: int, wall_s: int) -> InfeasibleError:
    limits = []
    for b in bins:
        least = f"{b.least_nodes} to " if b.least_nodes > 1 else ""
        taken = f"{least}{b.queue.max_nodes} nodes" if b.queue.max_nodes else "any nodes"
        time = format_duration(b.queue.max_wall_s) if b.queue.max_wall_s else "any time"
        limits.append(f"{b.queue.name} takes {taken} for {time}")
    return InfeasibleError(
        f"no queue of site {site.name} takes {nodes} nodes for {format_duration(wall_s)}:"
        f" {'; '.join(limits)}",
        "lower --gpus or --time, or choose a queue with --queue",
    )


def sizing(
    project: Project,
    ensemble: Ensemble,
    site: Site,
    gpus: int | None,
    wall_s: int | None,
    queue_name: str | None,
    budget: Budget,
    sharing: str,
    options: Mapping[str, Any],
) -> JobSizeChoice:
    """Choose the size by the profile; without a profile, the whole site for at most two hours.

    Parameters
    ----------
    gpus, wall_s, queue_name : int or str or None
        User's values; None leaves one to the job planner.
    options : mapping of str to Any
        Options of the planner, which tell who shares a GPU or trains fused.

    Raises
    ------
    BadInputError
        If the site has no such queue.
    InfeasibleError
        If no queue accepts such a job, or a member needs more GPUs than it has.
    """
    # The plan refuses members that would mix types.
    refuse_wide_members(ensemble.members, Cluster.at(site, gpus or site.gpus), mix_types=True)
    members = _members(project, ensemble, site, sharing, options_from(options))
    if not members or (gpus and wall_s):
        return JobSizeChoice(job_size(site, gpus, wall_s, queue_name))
    bins = _bins(site, queue_name)
    if gpus is not None:
        _refuse_more_than_all(site, gpus)
    nodes = -(-(gpus or 1) // site.gpus_per_node)
    if not any(b.takes(nodes if gpus else b.least_nodes, wall_s or 0) for b in bins):
        raise _refusal(site, bins, nodes, wall_s or 0)
    searched, before = _as_searched(ensemble, members, gpus or site.gpus)
    found = job_sizes(site, bins, searched, gpus, wall_s, before)
    chosen = best_of(found, budget)
    return JobSizeChoice(chosen.size, chosen, tuple(found))


def _members(
    project: Project, ensemble: Ensemble, site: Site, sharing: str, options: Options
) -> Sequence[Workload]:
    """Return the members as workloads; nothing if a rate of one is unknown."""
    if not project.home.catalog.exists():
        return ()
    with project.reading() as catalog:
        found = member_profiles(catalog, ensemble, site)
    # A guess would choose a size that the run then keeps.
    if not all(profile.has_rates for profile in found):
        return ()
    known = {profile.member: profile for profile in found}
    installed = ensemble.as_installed(site.other_python, one_gpu=site.has_mig)
    return active_workloads(
        *(installed, known, {}, site.gpus),
        terms=GpuTerms.at(site, options.max_per_gpu),
        fuses=lambda member: fused_shape(member, ensemble, site.launch, sharing, options),
    )


def _as_searched(
    ensemble: Ensemble, members: Sequence[Workload], gpus: int
) -> tuple[Sequence[Workload], Mapping[str, float]]:
    """Return the members, trials with all that a search trains of them, and the samples of their parents."""
    if ensemble.search is None:
        return members, {}
    # Imported here since most ensembles have no search.
    from hetctl.app.simulated_search import likely_search

    search = likely_search(ensemble, members, gpus)
    if search is None:
        return members, {}
    lengths = {one.name: one.samples_per_epoch or 0 for one in members if one.name in search.trials}
    others = [one for one in members if one.name not in ensemble.trials]
    trained = [
        one.with_left(float(search.epochs(one.name) * lengths[one.name]))
        for one in members
        if one.name in lengths
    ]
    return [*others, *trained], {
        name: float(search.inherited(name) * samples) for name, samples in lengths.items()
    }


def refuse_wide_members(members: Iterable[Member], cluster: Cluster, *, mix_types: bool) -> None:
    """Refuse members that need more GPUs than one member can have.

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
