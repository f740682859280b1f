"""What jsrun asks of the daemon: a part of the job's nodes for each resource set."""

from __future__ import annotations

from dataclasses import dataclass

from .client import RefusedError


@dataclass
class Step:
    """The resource sets of one jsrun, each as (host, cores, gpus)."""

    job: str
    sets: list


class Steps:
    """The steps of all jobs; they hold their parts for as long as their connections are open."""

    def __init__(self, daemon) -> None:
        self._daemon = daemon
        self._held = {}
        self._waiting = {}

    def claim(self, connection, job, sets, per_host):
        """Return where the sets are, or None if they have to wait.

        Parameters
        ----------
        sets : list of [cores, gpus]
            How many, of each set.
        """
        request = job, sets, per_host
        if self._place(*request, busy=[]) is None:
            raise RefusedError(
                "Error: the job's nodes cannot hold the requested resource sets: "
                f"{len(sets)} of {sets[0]} with {per_host or 'any number'} per host."
            )
        found = self._try(connection, request)
        if found is None:
            self._waiting[connection] = request
        return found

    def serve_waiting(self) -> None:
        """Give those that wait what has become free."""
        for connection, request in list(self._waiting.items()):
            found = self._try(connection, request)
            if found is not None:
                del self._waiting[connection]
                self._daemon.answer(connection, {"answer": found})

    def release(self, connection) -> None:
        self._held.pop(connection, None)
        self._waiting.pop(connection, None)

    def _try(self, connection, request):
        job = request[0]
        busy = [one for step in self._held.values() if step.job == job for one in step.sets]
        found = self._place(*request, busy=busy)
        if found is not None:
            self._held[connection] = Step(job, found)
        return found

    def _place(self, job, sets, per_host, busy):
        jobs = [one for one in self._daemon.matching(job) if one.state in ("RUN", "UNKWN")]
        if not jobs:
            raise RefusedError("Error initializing RM connection. Exiting.")
        shares = jobs[0].shares
        found = []
        for cores, gpus in sets:
            one = self._room(shares, cores, gpus, per_host, [*busy, *found], found)
            if one is None:
                return None
            found.append(one)
        return found

    def _room(self, shares, cores, gpus, per_host, busy, ours):
        for host, share in shares.items():
            taken = [one for one in busy if one[0] == host]
            free_cores = [c for c in share.cores if all(c not in one[1] for one in taken)]
            free_gpus = [g for g in share.gpus if all(g not in one[2] for one in taken)]
            room = len(free_cores) >= cores and len(free_gpus) >= gpus
            if room and not (per_host and sum(one[0] == host for one in ours) >= per_host):
                return [host, free_cores[:cores], free_gpus[:gpus]]
        return None
