"""An agent: forks ranks, forwards messages between them and the driver, and reports their ends."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hetctl.cluster.launchers.nodes import NODE_VARIABLES, STEP_DEVICES
from hetctl.model.events import EXIT_CODES, ExitReason
from hetctl.model.serialization import decode, encode
from hetctl.model.site import HEARTBEAT_EVERY_S, LEASE_SHARE
from hetctl.runtime.agent.binding import GPU, VISIBLE_DEVICES, binding_of
from hetctl.runtime.agent.energy import EnergyMeter
from hetctl.runtime.agent.gpus import gpus_of_node, visible_gpus
from hetctl.runtime.agent.messages import (
    COMMAND,
    ENDED,
    ENERGY,
    FETCH,
    FETCHED,
    FORGET,
    FROM,
    OVERUSE,
    SHUTDOWN,
    SIGNAL,
    STAGED,
    START,
    STATES,
    TO,
    AgentAssignment,
    AgentFacts,
    GpuFacts,
    Overuse,
)
from hetctl.runtime.agent.rank_memory import MemoryWatch, oom_kills, remove_shared_files
from hetctl.runtime.agent.rank_template import RankEvent, Serve, Template
from hetctl.runtime.agent.state_store import StateStore
from hetctl.runtime.data.partition_folder import Staging, path_on_node
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.transport import Address, Connection, JobIdentity
from hetctl.runtime.worker.scripts.warm_start import WarmPythons
from hetctl.storage.processes import Process

END_S = 10.0
"""Seconds in which killed ranks end; a rank that waits for a disk or a GPU may take longer."""
POLL_S = 0.01
CANCEL_PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0, *(30.0,) * 20)
"""Pauses after attempts to cancel a job; after ten minutes success is unlikely."""
DEVICE_VARIABLES = (*sorted(VISIBLE_DEVICES), *STEP_DEVICES)
"""Variables with the GPUs that a batch system has given to a step."""


def facts_of_this_node(step: str) -> AgentFacts:
    """Return the facts that the driver needs of this node, and the agent's step."""
    gpus = (GpuFacts(gpu.uuid, gpu.name, gpu.cores) for gpu in visible_gpus(gpus_of_node(), os.environ))
    return AgentFacts(
        step=step,
        host=socket.gethostname(),
        variables=_values_of(NODE_VARIABLES),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        gpus=tuple(gpus),
        devices=_values_of(DEVICE_VARIABLES),
    )


def _values_of(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


Join = Callable[[AgentFacts], tuple[Connection, AgentAssignment]]
"""Function that connects to the driver and returns the connection and the driver's answer."""


class TemplateEndedError(ConnectionError):
    """The template process has ended, and with it all ranks."""


class Agent:
    """Process that runs the ranks of one resource set: a node, or a member's part of one.

    Parameters
    ----------
    join : callable
        Function that connects to the driver.
    step : str
        Name of the step that started the agent.
    frameworks : sequence of str
        Frameworks, each for a template of its own; if empty, one template imports none.
    preload : callable
        Function that imports a framework in its template; for None, nothing.
    serve, pythons
        Same as in `Template`; the first one, from which ranks of commands come, has the Pythons.
    identity : JobIdentity or None
        Identity of the job, for its store of states; None if the job is on this machine alone.
    """

    def __init__(
        self,
        join: Join,
        step: str,
        frameworks: Sequence[str],
        preload: Callable[[str | None], None],
        serve: Serve,
        pythons: WarmPythons,
        identity: JobIdentity | None = None,
    ) -> None:
        # Fork them before the GPUs' management library is loaded; they import while the agent connects.
        names = tuple(frameworks) or (None,)
        self._templates = {
            name: Template(partial(preload, name), serve, pythons if name == names[0] else None)
            for name in names
        }
        self._importing = set(self._templates)
        self._facts = facts_of_this_node(step)
        self._driver, self._assignment = join(self._facts)
        self._ranks: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._commands: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._next_heartbeat = 0.0
        self._heard_at = time.monotonic()
        self._released = False
        # The counter includes kills in the control group before this agent.
        self._oom_kills = oom_kills()
        of_node = self._assignment.gpus_of_node
        self._memory = MemoryWatch(self._assignment.memory_per_gpu, len(self._assignment.gpus), of_node)
        seen = visible_gpus(gpus_of_node(), os.environ) if self._assignment.device == GPU else ()
        self._energy = EnergyMeter(self._assignment.gpus, seen, of_node)
        self._overuse: dict[int, Overuse] = {}
        stage = self._assignment.stage
        self._staging = Staging(self._assignment.node, stage) if stage else None
        self._bytes_staged = 0
        order, node = self._assignment.store, self._assignment.node
        self._store = StateStore(order.run_key, node, order.control, identity) if order else None
        # GPUs and frameworks of ranks to fork after staging; None once it is done.
        self._to_start: dict[int, str | None] | None = {} if stage else None

    def run(self) -> bool:
        """Run until the driver releases the agent or is lost; all that the agent began ends with its process.

        Returns
        -------
        bool
            False if the driver was lost.

        Raises
        ------
        TemplateEndedError
            If all ranks were lost.
        """
        self._selector.register(self._driver, selectors.EVENT_READ, self._receive_from_driver)
        for name, template in self._templates.items():
            self._selector.register(
                template, selectors.EVENT_READ, partial(self._receive_from_template, name)
            )
        if self._staging:
            self._selector.register(self._staging, selectors.EVENT_READ, self._start_staged)
        if self._store:
            self._selector.register(self._store, selectors.EVENT_READ, self._report_fetched)
        try:
            self._serve_driver()
        except TemplateEndedError:
            raise
        except ConnectionError:
            pass
        finally:
            self._end()
        return self._released

    def _serve_driver(self) -> None:
        # Messages may have arrived with the assignment.
        self._receive_from_driver()
        while not self._released:
            self._send_heartbeat()
            silent_s = time.monotonic() - self._heard_at
            if silent_s > LEASE_SHARE * self._assignment.lease_s:
                # As after a lost connection: its ranks end, since another agent may begin.
                raise ConnectionError(f"no heartbeat of the driver for {silent_s:.0f} s")
            for key, _ in self._selector.select(self._next_heartbeat - time.monotonic()):
                key.data()

    def _end(self) -> None:
        """End all that it began: the next agent here must find free GPUs and an unused store."""
        ranks: list[Process] = []
        for pid in self._pids.values():
            with suppress(OSError):
                ranks.append(Process.of(pid))
        for template in self._templates.values():
            template.close()
        if self._staging:
            self._staging.end()
        if self._store:
            self._store.close()
        limit = time.monotonic() + END_S
        while any(rank.alive for rank in ranks) and time.monotonic() < limit:
            time.sleep(POLL_S)
        for rank in ranks:
            remove_shared_files(rank.pid)

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_EVERY_S
            used_j = self._energy.used_j()
            self._driver.send({ENERGY: list(used_j.items())} if used_j else {})
            # Ranks that wait for partitions live as long as staging goes on.
            if self._staging and self._staging.bytes_read > self._bytes_staged:
                self._bytes_staged = self._staging.bytes_read
                for gpu in self._to_start or ():
                    self._driver.send({FROM: {}, "gpu": gpu})
            self._watch_memory()

    def _watch_memory(self) -> None:
        """End the rank that uses others' memory; one at a time, until its memory is free."""
        if not self._overuse and (found := self._memory.check(self._pids, self._commands)):
            gpu, overuse = found
            self._overuse[gpu] = overuse
            log_line(
                f"ending the rank on GPU {gpu}: it uses {overuse.peak} bytes, its share is {overuse.share}"
            )
            self._signal(gpu, signal.SIGKILL)

    def _receive_from_driver(self) -> None:
        for message in self._driver.arrived():
            self._heard_at = time.monotonic()
            if START in message:
                self._start(message["gpu"], message[START])
            elif SHUTDOWN in message:
                self._released = True
            elif SIGNAL in message:
                self._signal(message["gpu"], message[SIGNAL])
            elif self._store and FETCH in message:
                self._store.fetch(message[FETCH], decode(Address, message["address"]))
            elif self._store and FORGET in message:
                self._store.forget(message[FORGET])
            elif TO in message:
                self._pass_on(message["gpu"], message[TO])

    def _start_staged(self) -> None:
        """Report the staged partitions, and fork the ranks that waited for them."""
        assert self._staging
        self._selector.unregister(self._staging)
        self._driver.send({STAGED: encode(self._staging.result())})
        waiting, self._to_start = self._to_start or {}, None
        self._report_store()
        for gpu, framework in waiting.items():
            self._start(gpu, framework)

    def _report_store(self) -> None:
        """Report where other agents get this node's states, and the node's partitions.

        Do so once ranks can begin: members would wait here for imports instead of visiting other nodes.
        """
        is_ready = not self._importing and self._to_start is None
        if self._store and is_ready and (order := self._assignment.store):
            paths = list(map(path_on_node, order.partitions))
            # This user may have no access to other nodes' partitions, which is no error.
            here = [number for number, path in enumerate(paths) if os.access(path, os.R_OK)]
            self._driver.send({STATES: encode(self._store.address), "partitions": here})

    def _report_fetched(self) -> None:
        assert self._store
        for result in self._store.fetched():
            self._driver.send({FETCHED: encode(result)})

    def _start(self, gpu: int, framework: str | None) -> None:
        if self._to_start is not None:
            self._to_start[gpu] = framework
            return
        # A rank without a framework may come from any template.
        template = self._templates.get(framework) or next(iter(self._templates.values()))
        binding = binding_of(self._assignment, gpu, self._facts)
        agent_end, rank_end = socket.socketpair()
        # The template gets a duplicate (unix(7), SCM_RIGHTS). While this one is open, the rank's end does not
        # show.
        with rank_end:
            template.fork(binding, rank_end)
        rank = self._ranks[gpu] = Connection(agent_end)
        self._selector.register(rank, selectors.EVENT_READ, lambda: self._receive_from_rank(gpu, rank))

    def _signal(self, gpu: int, number: int) -> None:
        if self._to_start and gpu in self._to_start:
            del self._to_start[gpu]
            self._driver.send({ENDED: 128 + number, "gpu": gpu, OVERUSE: None})
        elif pid := self._pids.get(gpu):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.Signals(number))

    def _pass_on(self, gpu: int, message: Any) -> None:
        """Forward a message to a rank; the rank's end will report a closed connection."""
        if rank := self._ranks.get(gpu):
            with suppress(ConnectionError):
                rank.send(message)

    def _receive_from_rank(self, gpu: int, rank: Connection) -> None:
        """Forward a rank's messages; a rank that closes its connection is about to end."""
        try:
            for message in rank.arrived():
                if COMMAND in message:
                    self._commands[gpu] = message[COMMAND]
                self._driver.send({FROM: message, "gpu": gpu})
        except ConnectionResetError:
            self._forget(gpu, rank)

    def _forget(self, gpu: int, rank: Connection) -> None:
        self._selector.unregister(rank)
        rank.close()
        del self._ranks[gpu]

    def _receive_from_template(self, framework: str | None) -> None:
        event = self._templates[framework].receive()
        if not event:
            raise TemplateEndedError("a template process has ended, and with it its ranks")
        if not isinstance(event, RankEvent):
            self._importing.remove(framework)
            self._report_store()
            return
        if event.exit_code is None:
            self._pids[event.gpu] = event.pid
            return
        remove_shared_files(self._pids.pop(event.gpu))
        self._commands.pop(event.gpu, None)
        if rank := self._ranks.get(event.gpu):
            # First the rank's last messages.
            self._receive_from_rank(event.gpu, rank)
        if rank := self._ranks.get(event.gpu):
            self._forget(event.gpu, rank)
        overuse = self._overuse.pop(event.gpu, None)
        exit_code = self._final_exit_code(event.exit_code, overuse)
        self._driver.send({ENDED: exit_code, "gpu": event.gpu, OVERUSE: encode(overuse)})

    def _final_exit_code(self, exit_code: int, overuse: Overuse | None) -> int:
        """Return the exit code, replaced if the kernel or this agent killed the rank for its memory."""
        if exit_code != 128 + signal.SIGKILL:
            return exit_code
        # The kernel does not tell which process it chose: a SIGKILL and a rise of the group's count must do.
        before, self._oom_kills = self._oom_kills, oom_kills()
        return EXIT_CODES[ExitReason.OUT_OF_MEMORY] if overuse or self._oom_kills > before else exit_code


def end_orphaned_job(cancel: Sequence[str], patience_s: float) -> None:
    """End the job if its script, whose node may be lost, does not end it and this process with it.

    Repeat a refused command: the batch system may be busy with the loss of the node.

    Parameters
    ----------
    cancel : sequence of str
        Command that ends the job; empty if agents must not end it.
    """
    # Compute nodes may lack the batch system's commands.
    if not cancel or shutil.which(cancel[0]) is None:
        return
    # Agents ignore SIGTERM, but now the batch system is to end this process by it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(patience_s)
    for pause_s in CANCEL_PAUSES_S:
        if subprocess.run(cancel, check=False).returncode == 0:
            return
        time.sleep(pause_s)
