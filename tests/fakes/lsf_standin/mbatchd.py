"""The daemon takes jobs, starts them where they fit, and ends them: ``python -m lsf_standin.mbatchd``.

It ends with the process that started it, and so does everything that its jobs started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from . import cluster
from .client import RefusedError
from .steps import Steps

TICK_S = 0.03
LIMIT = "TERM_RUNLIMIT: job killed after reaching LSF run time limit"
OWNER = "TERM_OWNER: job killed by owner"
EXTERNAL = "TERM_EXTERNAL_SIGNAL: job killed by a signal external to LSF"
PR_SET_PDEATHSIG = 1


class Mbatchd:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = json.loads((folder / "settings.json").read_text())
        self.hosts = [cluster.Host(name, *size) for name, size in self.settings["hosts"].items()]
        self.jobs: list[cluster.Job] = []
        self.steps = Steps(self)
        self.next_number = 101
        self.stopped = False
        self.asking = None
        self.selector = selectors.DefaultSelector()
        (folder / "spool").mkdir(exist_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        self.selector.register(listener, selectors.EVENT_READ, self.accept)

    def serve(self) -> None:
        while not self.stopped:
            for key, _ in self.selector.select(TICK_S):
                key.data(key.fileobj)
            self.tick()
        for job in self.jobs:
            self.kill(job, signal.SIGKILL)

    def accept(self, listener) -> None:
        connection, _ = listener.accept()
        self.selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self, connection) -> None:
        """Read one request; a request is one line, and comes whole or not at all."""
        data = b""
        with contextlib.suppress(OSError):
            connection.settimeout(5)
            while not data.endswith(b"\n") and (part := connection.recv(1 << 16)):
                data += part
        if not data.endswith(b"\n"):
            self.forget(connection)
            return
        self.asking = connection
        request = json.loads(data)
        try:
            answer = getattr(self, f"on_{request.pop('operation')}")(**request)
        except RefusedError as error:
            answer = {"refused": str(error)}
        else:
            answer = None if answer is LATER else {"answer": answer}
        if answer is not None:
            self.answer(connection, answer)

    def answer(self, connection, answer) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def forget(self, connection) -> None:
        self.selector.unregister(connection)
        self.steps.release(connection)
        connection.close()

    # What the commands ask.

    def on_settings(self):
        return self.settings

    def on_set(self, **settings):
        self.settings.update(settings)

    def on_submit(self, request, **parts):
        for word, target in request["depends"]:
            if not any(target in (job.id, str(job.number), job.name) for job in self.jobs):
                raise RefusedError(f"{word}({target}): No matching job found. Job not submitted.")
        number = self.next_number
        self.next_number += 1
        for index in range(request["first"], request["last"] + 1):
            job = cluster.Job(number, index, request, **parts)
            job.state = "PSUSP" if request["held"] else "PEND"
            job.note(f"Submitted from host <login>, to Queue <{request['queue']}>, CWD <{job.cwd}>;")
            self.jobs.append(job)
        return number

    def on_jobs(self):
        return [self.described(job) for job in self.jobs]

    def on_kill(self, job, signal_name=None):
        found = self.matching(job)
        if not found:
            raise RefusedError(f"Job <{job}>: No matching job found")
        alive = [j for j in found if j.state in cluster.UNFINISHED]
        if not alive:
            raise RefusedError(f"Job <{job}>: Job has already finished")
        for one in alive:
            if signal_name:
                self.kill(one, getattr(signal, f"SIG{signal_name}"))
            else:
                self.end(one, OWNER)

    def on_end(self, job, reason):
        """Whatever a site may do to a job: LSF's word for it says what."""
        for one in self.matching(job):
            self.end(one, reason)

    def on_limit(self, job, minutes):
        """Give a job another run limit, as its owner may with ``bmod -W`` and a site at any time."""
        for one in self.matching(job):
            one.request = {**one.request, "run_limit_min": minutes}

    def on_requeue(self, job):
        for one in self.matching(job):
            one.ending = "requeue"
            self.kill(one, signal.SIGKILL)

    def on_hide(self, job, where):
        """Lose a job: from ``bjobs``, or from ``everything``."""
        for one in self.matching(job):
            one.hidden = where

    def on_host(self, name, **state):
        """Close a host, or cut it off: its jobs go on, but nobody knows."""
        (host,) = (host for host in self.hosts if host.name == name)
        for key, value in state.items():
            setattr(host, key, value)

    def on_step(self, **request):
        return self.steps.claim(self.asking, **request) or LATER

    def matching(self, job):
        return [one for one in self.jobs if job in (one.id, str(one.number))]

    # What goes on by itself.

    def tick(self) -> None:
        for job in self.jobs:
            if job.state in ("RUN", "UNKWN"):
                self.watch(job)
        self.steps.serve_waiting()
        for job in self.jobs:
            if job.state == "PEND" and self.may_start(job):
                shares = cluster.place(job.request, self.hosts, self.jobs)
                if shares:
                    self.start(job, shares)

    def may_start(self, job) -> bool:
        at_once = job.request["at_once"]
        mates = [one for one in self.jobs if one.number == job.number and one.state == "RUN"]
        if at_once and len(mates) >= at_once:
            return False
        return all(cluster.met(condition, self.jobs) for condition in job.request["depends"])

    def watch(self, job) -> None:
        reachable = all(host.reachable for host in self.hosts if host.name in job.shares)
        job.state = "RUN" if reachable else "UNKWN"
        if job.process.poll() is not None:
            if reachable:
                self.finish(job, job.process.returncode)
            return
        now, request = time.time(), job.request
        if request["run_limit_min"] and not job.ending:
            left = self.left(job)
            near = request["warning"] and left <= request["warning_min"] * self.settings["minute_s"]
            if near and not job.reason:
                job.reason = "warned"
                self.kill(job, getattr(signal, f"SIG{request['warning']}"))
            if left <= 0:
                self.end(job, LIMIT, first=self.settings["limit_signals"])
        while job.signals and job.signals[0][0] <= now:
            self.kill(job, job.signals.pop(0)[1])

    def left(self, job) -> float:
        """Return what is left until a job's limit, in seconds."""
        return job.started + job.request["run_limit_min"] * self.settings["minute_s"] - time.time()

    def end(self, job, reason, first=()) -> None:
        """End a job by several signals with pauses: INT, TERM and KILL as LSF does."""
        if job.state in ("PEND", "PSUSP"):
            job.reason, job.ending = reason, reason
            self.over(job, "EXIT", None)
        elif not job.ending:
            job.ending = reason
            names = (*first, *self.settings["kill_signals"])
            pause = self.settings["kill_s"]
            job.signals = [(time.time() + n * pause, signal.Signals[name]) for n, name in enumerate(names)]

    def finish(self, job, status) -> None:
        self.kill(job, signal.SIGKILL)  # whatever it left running
        job.signals = []
        if job.ending == "requeue":
            job.state, job.shares, job.ending, job.started = "PEND", {}, "", None
            job.note("Pending: Requeued job is waiting for rescheduling;")
            return
        code = status if status >= 0 else 128 - status
        ended_by_limit = job.ending == LIMIT and code == 0  # it left in time
        reason = "" if ended_by_limit else job.ending or (EXTERNAL if status < 0 else "")
        job.reason = reason
        self.over(job, "EXIT" if code or reason else "DONE", code)

    def over(self, job, state, code) -> None:
        job.state, job.exit_code, job.ended = state, code, time.time()
        cpu = "The CPU time used is 0.1 seconds"
        if state == "DONE":
            job.note(f"Done successfully. {cpu};")
        else:
            if code is not None:
                job.note(f"Exited with exit code {code}. {cpu};")
            job.note(f"Completed <exit>{'; ' + job.reason if job.reason else ''};")
        if job.request["output"] and job.started:
            self.report(job)

    def report(self, job) -> None:
        how = "Successfully completed." if job.state == "DONE" else f"Exited with exit code {job.exit_code}."
        lines = [f"{'-' * 60}", f"Sender: LSF System <lsfadmin@{next(iter(job.shares))}>"]
        lines += [f"Subject: Job {job.id}: <{job.full_name}> in cluster <standin>", "", job.reason, how, ""]
        with contextlib.suppress(OSError), self.path(job, "output").open("a") as file:
            file.write("\n".join(lines))

    # Processes.

    def start(self, job, shares) -> None:
        job.shares, job.started, job.state, job.reason = shares, time.time(), "RUN", ""
        names = "> <".join(shares)
        job.note(f"Dispatched {sum(len(s.cores) for s in shares.values())} Task(s) on Host(s) <{names}>;")
        spool = self.folder / "spool" / f"{job.number}.{job.index}"
        spool.write_text(job.script if job.script.startswith("#!") else f"#!/bin/sh\n{job.script}\n")
        spool.chmod(0o700)
        output = self.open(job, "output")
        errors = self.open(job, "errors") if job.request["errors"] else output
        try:
            job.process = subprocess.Popen(
                [str(spool)],
                cwd=job.request["cwd"] or job.cwd,
                env=self.environment(job),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                preexec_fn=prepare,
                umask=job.umask,
            )
        except OSError as error:
            output.write(f"{error}\n".encode())
            job.process = subprocess.Popen(["sh", "-c", "exit 127"])
        finally:
            output.close()
            errors.close()
        job.note(f"Starting (Pid {job.process.pid});")

    def open(self, job, kind):
        if not job.request[kind]:
            return Path(os.devnull).open("ab")
        path = self.path(job, kind)
        mode = os.O_TRUNC if kind == "output" and job.request["overwrite"] else os.O_APPEND
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666 & ~job.umask)
        except OSError:
            file = os.open(os.devnull, os.O_WRONLY)
        return os.fdopen(file, "ab")

    def path(self, job, kind) -> Path:
        name = job.request[kind].replace("%J", str(job.number)).replace("%I", str(job.index))
        return Path(job.cwd, name)

    def environment(self, job):
        hosts = [name for name, share in job.shares.items() for _ in share.cores]
        launch = self.settings["launch_host"]
        if launch:
            hosts.insert(0, launch)
        file = self.folder / "spool" / f"{job.number}.{job.index}.hostfile"
        file.write_text("".join(f"{host}\n" for host in hosts))
        first = next(iter(job.shares.values()))
        gpus = {} if launch or not first.gpus else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, first.gpus))}
        inherited = {k: v for k, v in job.environment.items() if not k.startswith(("LSB_", "JSM_"))}
        return {
            **inherited,
            **gpus,
            "LSB_JOBID": str(job.number),
            "LSB_JOBINDEX": str(job.index),
            "LSB_JOBNAME": job.full_name,
            "LSB_QUEUE": job.request["queue"],
            "LSB_DJOB_HOSTFILE": str(file),
            "LSB_HOSTS": " ".join(hosts),
            "LSB_MCPU_HOSTS": " ".join(f"{host} {hosts.count(host)}" for host in dict.fromkeys(hosts)),
            "LSB_BATCH_JID": job.id,
            "LSF_STANDIN": str(self.folder),
            "LSF_STANDIN_HOST": hosts[0],
        }

    def kill(self, job, number) -> None:
        """Signal all processes of a job, which are known by what they were started with."""
        marks = {f"LSF_STANDIN={self.folder}", f"LSB_JOBID={job.number}", f"LSB_JOBINDEX={job.index}"}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marks <= set(path.read_bytes().decode(errors="replace").split("\0")):
                    os.kill(int(path.parent.name), number)

    def described(self, job):
        """Say of a job what bjobs and bhist may tell."""
        hosts = ":".join(f"{len(share.cores)}*{name}" for name, share in job.shares.items())
        if hosts and self.settings["launch_host"]:
            hosts = f"{self.settings['launch_host']}:{hosts}"
        over = job.state in ("DONE", "EXIT")
        shown = over and job.exit_code is not None and not self.settings["empty_exit_code"]
        return {
            "id": job.id, "number": job.number, "hidden": job.hidden, "events": job.events,
            "started": job.started,
            "limit_s": (job.request["run_limit_min"] or 0) * self.settings["minute_s"],
            "fields": {
                "jobid": str(job.number), "jobindex": str(job.index), "stat": job.state,
                "job_name": job.full_name, "queue": job.request["queue"], "user": "tester",
                "proj_name": job.request["project"], "exec_host": hosts, "from_host": "login",
                "exit_code": str(job.exit_code) if shown and job.exit_code else "",
                "exit_reason": job.reason if over else "",
                "pend_reason": self.why_pending(job), "time_left": self.time_left(job),
            },
        }  # fmt: skip

    def time_left(self, job) -> str:
        """Return hours and whole minutes; L is for a limit, which is not an estimate."""
        if job.state != "RUN" or not job.request["run_limit_min"]:
            return ""
        minutes = max(0, int(self.left(job) / self.settings["minute_s"]))
        return f"{minutes // 60}:{minutes % 60} L"

    def why_pending(self, job) -> str:
        if job.state != "PEND":
            return ""
        if any(not cluster.met(condition, self.jobs) for condition in job.request["depends"]):
            return "Job dependency condition not satisfied;"
        if not cluster.fits_empty(job.request, self.hosts):
            return "There are no suitable hosts for the job;"
        return "Job's requirements for resource reservation not satisfied;"


LATER = object()
"""The answer comes when there is one."""


def prepare() -> None:
    """Start a job with signals as a login shell has them."""
    for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def main() -> int:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        return 1
    daemon = Mbatchd(Path(os.environ["LSF_STANDIN"]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(daemon, "stopped", True))
    daemon.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
