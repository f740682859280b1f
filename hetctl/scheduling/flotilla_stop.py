"""Stop rule of flotillas: the share of released GPUs at which a round is stopped and planned again."""

from __future__ import annotations

from collections.abc import Mapping


def should_stop(
    active: Mapping[str, int],
    allocated: int,
    alpha: float,
    *,
    waiting: bool,
    max_gpus: Mapping[str, int],
) -> bool:
    """Return true if all training of a round has to stop (FLEET, section 4.3.2, "Training").

    The paper stops a flotilla as soon as fewer than alpha * M GPUs are not released. There are two
    differences. M is the number of GPUs given to this round, not the whole cluster: a round that cannot
    fill the cluster would otherwise stop at once. And the round continues if a new plan could change
    nothing, because no member waits and each one holds all the GPUs it may.

    Parameters
    ----------
    active : mapping of str to int
        GPUs by member, for the members of the round that have neither converged nor failed; one that
        left because its next epoch would not fit the wall-clock limit has released nothing.
    allocated : int
        GPUs that the round was given when it started.
    waiting : bool
        True if members outside the round still need training.
    max_gpus : mapping of str to int
        Largest number of GPUs that each active member may hold.
    """
    if not active or sum(active.values()) >= alpha * allocated:
        return False
    return waiting or any(gpus < max_gpus[member] for member, gpus in active.items())
