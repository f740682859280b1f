"""Members that need more GPUs than a job has."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Member
from hetctl.model.errors import InfeasibleError
from hetctl.model.site import Cluster
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
