"""When a flotilla has freed so many GPUs that all of it is planned anew."""

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
    """Say whether all training of a round stops (FLEET, section 4.3.2, "Training").

    The paper stops a flotilla as soon as fewer than alpha * M GPUs are not released. Two things
    differ: M is what this round was given, not the whole cluster, since a round that cannot fill the
    cluster would otherwise stop at once; and nothing stops where planning anew can change nothing,
    because nobody waits and each member holds all the GPUs it may.

    Parameters
    ----------
    active : mapping of str to int
        GPUs by member, for the members of the round that have neither converged nor failed; one that
        left because its next epoch would not fit the wall-clock limit has released nothing.
    allocated : int
        GPUs that the round was given when it started.
    waiting : bool
        Whether members outside the round still need training.
    max_gpus : mapping of str to int
        The most GPUs that each active member may hold.
    """
    if not active or sum(active.values()) >= alpha * allocated:
        return False
    return waiting or any(gpus < max_gpus[member] for member, gpus in active.items())
