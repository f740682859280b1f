"""A story on the stand-in for PBS, as it was on OpenPBS: doctor, profile, a chain, a limit, a lost node."""

from __future__ import annotations

import os
import signal
import time

from one_driver import problems
from workbench import pretending_project, processes_on, states, wait_for

from hetctl.app.project import Waits
from hetctl.storage.progress_fold import events_in

EPOCHS = 6
SITE = """\
extends: polaris
device: slot
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 2GB
gpu_type: null
gpu_cores: []
network: {}
queues: [{name: workq, max_nodes: 2, max_wall: 1h}]
queue: workq
request: {}
directives: []
setup: ["export PATH={path}"]
environment: {}
timeouts: {lease: 15s}
"""


def ensemble(gates):
    config = f"epochs: {EPOCHS}, held_after: 2, until: {gates}/{{name}}"
    members = "".join(
        f"  - {{name: {name}, max_gpus: {gpus}, config: {{{config.replace('{name}', name)}}}}}\n"
        for name, gpus in (("a", 2), ("b", 1), ("c", 1))
    )
    return (
        "name: trio\nframework: tensorflow\nfunctions: {input_fn: nets:input_fn, model_fn: nets:model_fn}\n"
        f"stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {EPOCHS}}}\nmembers:\n{members}"
    )


def test_a_chain_goes_on_after_a_limit_and_without_a_lost_node(start_pbs, tmp_path):
    cluster = start_pbs(hosts={"x1": (2, 0), "x2": (2, 0)}, kill_s=30.0)
    environment = {**cluster.environment(), "HETCTL_SITE": "lab"}
    quick = Waits(run_poll_s=0.1, profile_poll_s=0.1)
    project = pretending_project(tmp_path, ensemble(tmp_path), environment=environment, waits=quick)
    (project.path / "site-configs").mkdir()
    (project.path / "site-configs" / "lab.yaml").write_text(SITE.replace("{path}", environment["PATH"]))

    doctor = project.here("doctor", "--json")
    checks = {check["name"]: check["status"] for check in doctor.json["checks"]}
    assert [checks[name] for name in ("batch system", "queue workq", "nodes of PBS")] == ["ok"] * 3
    assert project.here("profile", "--json").code == 0
    submitted = project.here("submit", "--gpus", "4", "--time", "10m", "--chain", "3")
    assert submitted.code == 0, submitted
    first, *waiting = ids = [job["id"] for job in cluster.ask("jobs")][1:]
    assert len(ids) == 3
    assert [letter(cluster, job) for job in waiting] == ["H", "H"]

    wait_for(lambda: len(project.epochs()) == 3)
    (started,) = (job["started"] for job in cluster.ask("jobs") if job["id"] == first)
    cluster.ask("limit", job=first, minutes=(time.time() - started) / 60)
    wait_for(lambda: letter(cluster, ids[1]) == "R")
    log = project.home.run("trio-001").job(1).log
    wait_for(lambda: log.exists() and "on x2" in log.read_text())
    wait_for(lambda: list(states(project).values()).count("training") == 3)
    for pid in processes_on(project.path, "x2"):
        os.kill(pid, signal.SIGKILL)
    for name in "abc":
        (tmp_path / name).touch()
    wait_for(project.is_over)

    assert project.epochs() == {name: list(range(1, EPOCHS + 1)) for name in "abc"}
    events = events_in(project.home.run("trio-001"))
    assert problems(events, epochs=dict.fromkeys("abc", EPOCHS)) == []
    wait_for(lambda: [letter(cluster, job) for job in ids] == ["F"] * 3)
    # The third was not needed: it was deleted before it began.
    assert [field(cluster, job, "Exit_status") for job in ids] == ["0", "0", ""]


def letter(cluster, job):
    return field(cluster, job, "job_state")


def field(cluster, job, name):
    """Return an attribute of a job as qstat prints it; empty if it has none."""
    text = cluster.run("qstat", "-x", "-f", f"{job}.standin").stdout
    return text.partition(f"    {name} = ")[2].partition("\n")[0]
