"""Hosts and jobs, and which job fits where: no process is started here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

UNFINISHED = ("PEND", "PSUSP", "RUN", "USUSP", "UNKWN")


@dataclass
class Host:
    name: str
    cores: int
    gpus: int
    open: bool = True
    reachable: bool = True


@dataclass
class Share:
    """The part of a host that a job holds."""

    cores: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass
class Job:
    number: int
    index: int
    request: dict
    script: str
    environment: dict
    cwd: str
    umask: int
    state: str = "PEND"
    submitted: float = field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    shares: dict[str, Share] = field(default_factory=dict)
    exit_code: int | None = None
    reason: str = ""
    ending: str = ""
    signals: list = field(default_factory=list)
    process: object = None
    events: list = field(default_factory=list)
    hidden: str = ""

    @property
    def id(self) -> str:
        return f"{self.number}[{self.index}]" if self.index else str(self.number)

    @property
    def name(self) -> str:
        return self.request["name"]

    @property
    def full_name(self) -> str:
        return f"{self.name}[{self.index}]" if self.index else self.name

    def note(self, text: str) -> None:
        self.events.append((time.time(), text))


def free_on(host: Host, jobs) -> Share:
    """Return what no unfinished job holds of a host."""
    shares = [j.shares[host.name] for j in jobs if j.state in UNFINISHED and host.name in j.shares]
    cores = {core for share in shares for core in share.cores}
    gpus = {gpu for share in shares for gpu in share.gpus}
    return Share(
        tuple(core for core in range(host.cores) if core not in cores),
        tuple(gpu for gpu in range(host.gpus) if gpu not in gpus),
    )


def place(request, hosts, jobs):
    """Return the shares of a job that fits now, by host; None if it does not."""
    free = {
        host.name: free_on(host, jobs)
        for host in hosts
        if host.open and host.reachable and host.name not in request["avoid"]
    }
    sizes = {host.name: host for host in hosts}
    if request["nnodes"]:
        whole = [n for n, f in free.items() if len(f.cores) == sizes[n].cores]
        chosen = {name: free[name] for name in whole[: request["nnodes"]]}
        return chosen if len(chosen) == request["nnodes"] else None
    slots = request["slots"] or 1
    tile = slots if request["one_host"] else request["ptile"]
    shares = {}
    for name, share in free.items():
        want = min(tile or len(share.cores), slots)
        if want and len(share.cores) >= want and len(share.gpus) >= request["gpus"] and slots:
            shares[name] = Share(share.cores[:want], share.gpus[: request["gpus"]])
            slots -= want
    return None if slots else shares


def fits_empty(request, hosts) -> bool:
    """Whether a job would ever fit."""
    return place(request, [Host(h.name, h.cores, h.gpus) for h in hosts], []) is not None


def met(condition, jobs) -> bool | None:
    """Whether a dependency is met; None if it never will be."""
    word, target = condition
    found = [job for job in jobs if target in (job.id, str(job.number), job.name)]
    states = {job.state for job in found}
    if word == "started":
        return "PEND" not in states
    if states & set(UNFINISHED):
        return False
    wanted = {"ended": {"DONE", "EXIT"}, "done": {"DONE"}, "exit": {"EXIT"}}[word]
    return True if states <= wanted else None
