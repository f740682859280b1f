"""What a user of the cluster does, from nothing to nine trained networks; run on the login container."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

SITE = ("--site", "slurm-docker")
NODES = {"c1", "c2"}
PATIENCE_S = 1200
OVER = ("finished", "failed", "cancelled", "stopped")


def main() -> None:
    """Take the digits example through every command, then ask hetctl and Slurm what became of it."""
    print(output("sinfo", "--version"), flush=True)
    hetctl("init", "digits", "--example", "digits", cwd=None)
    hetctl("profile", *SITE)
    hetctl("plan", *SITE)
    hetctl("submit", *SITE)
    status = wait_for_the_end()
    hetctl("status")
    jobs = accounted_jobs()
    troubles = [*members_in_trouble(status), *nodes_in_trouble(status), *jobs_in_trouble(status, jobs)]
    if troubles:
        sys.exit("\n".join(f"story: {trouble}" for trouble in troubles))
    print(f"all {len(status['members'])} members converged; all {len(jobs)} jobs COMPLETED", flush=True)


def hetctl(*arguments: str, cwd: str | None = "digits") -> None:
    """Run a command as one would by hand; a failure ends the story."""
    print(f"\n$ hetctl {' '.join(arguments)}", flush=True)
    subprocess.run(("hetctl", *arguments), cwd=cwd, check=True)


def wait_for_the_end() -> dict[str, Any]:
    """Ask for the run's status until it is over, and return the last answer."""
    end = time.monotonic() + PATIENCE_S
    while (status := ask_status())["state"] not in OVER:
        if time.monotonic() > end:
            sys.exit(f"story: the run is still {status['state']} after {PATIENCE_S} s")
        time.sleep(5)
    return status


def ask_status() -> dict[str, Any]:
    """Return what ``hetctl status --json`` prints."""
    answer: dict[str, Any] = json.loads(output("hetctl", "status", "--json", cwd="digits"))
    return answer


def accounted_jobs() -> dict[str, str]:
    """Return what ``sacct`` says of each job, by id, as soon as none is in the queue."""
    end = time.monotonic() + 60
    while (jobs := sacct()) and any(state in ("PENDING", "RUNNING", "COMPLETING") for state in jobs.values()):
        if time.monotonic() > end:
            break
        time.sleep(1)
    return jobs


def sacct() -> dict[str, str]:
    """Print the table of this user's jobs, and return their states by id."""
    columns = "--format=JobID,JobName%40,State%20,ExitCode,Elapsed,NNodes,NodeList"
    print(f"\n$ sacct -X {columns}\n{output('sacct', '-X', columns)}", flush=True)
    rows = output("sacct", "-X", "--noheader", "--parsable2", "--format=JobID,State").split()
    return dict(row.split("|", 1) for row in rows)


def output(*command: str, cwd: str | None = None) -> str:
    """Return what a command prints; a failure ends the story."""
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def members_in_trouble(status: dict[str, Any]) -> list[str]:
    """Name the members that have not converged."""
    members = status["members"]
    missing = [] if members else ["the run has no members"]
    return missing + [
        f"{member['member']} is {member['state']}: {member['reason']}"
        for member in members
        if member["state"] != "converged"
    ]


def nodes_in_trouble(status: dict[str, Any]) -> list[str]:
    """Name the nodes on which no member trained."""
    trained = {task["node"] for task in status["tasks"]}
    return [f"no member trained on {node}" for node in sorted(NODES - trained)]


def jobs_in_trouble(status: dict[str, Any], jobs: dict[str, str]) -> list[str]:
    """Name the jobs that have not completed, and those of the run that Slurm does not know."""
    unknown = [job["batch_id"] for job in status["jobs"] if job["batch_id"] not in jobs]
    return [f"sacct does not know job {job}" for job in unknown] + [
        f"job {job} is {state}" for job, state in jobs.items() if state != "COMPLETED"
    ]


if __name__ == "__main__":
    main()
