"""A story on the stand-ins for PBS and Flux: doctor, profile, a chain, a limit, and a lost node."""

from __future__ import annotations

import os
import signal
import time

import pytest
from one_driver import problems
from workbench import pretending_project, processes_on, states, wait_for

from hetctl.app.project import Waits
from hetctl.storage.progress_fold import events_in

EPOCHS = 6
WAITS = "Job dependency condition not satisfied;"
LIMIT = "TERM_RUNLIMIT: job killed after reaching LSF run time limit"
OWNER = "TERM_OWNER: job killed by owner"
SITE = """\
extends: {extends}
device: slot
nodes: 2
gpus_per_node: 2
cores_per_node: 2
memory_per_node: 2GB
gpu_type: null
gpu_cores: []
network: {}
queues: [{name: {queue}, max_nodes: 2, max_wall: 1h}]
queue: {queue}
request: {}
directives: []
setup: ["export PATH={path}"]
environment: {}
timeouts: {lease: 15s}
"""
# The site, checks of the doctor, and the end of a job at its limit: PBS starts with TERM, Flux with ALRM.
SYSTEMS = {
    "pbs": ("polaris", ("batch system", "queue workq", "nodes of PBS"), ("DONE", "")),
    "flux": ("flux", ("batch system", "queue batch"), ("EXIT", LIMIT)),
}


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


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_chain_goes_on_after_a_limit_and_without_a_lost_node(system, request, tmp_path):
    extends, healthy, at_limit = SYSTEMS[system]
    start = request.getfixturevalue(f"start_{system}")
    cluster = start(hosts={"x1": (2, 0), "x2": (2, 0)}, kill_s=30.0)
    environment = {**cluster.environment(), "HETCTL_SITE": "lab"}
    quick = Waits(run_poll_s=0.1, profile_poll_s=0.1)
    project = pretending_project(tmp_path, ensemble(tmp_path), environment=environment, waits=quick)
    (project.path / "site-configs").mkdir()
    site = SITE.replace("{extends}", extends).replace("{queue}", cluster.queue)
    (project.path / "site-configs" / "lab.yaml").write_text(site.replace("{path}", environment["PATH"]))

    doctor = project.here("doctor", "--json")
    checks = {check["name"]: check["status"] for check in doctor.json["checks"]}
    assert {checks[name] for name in healthy} == {"ok"}
    assert project.here("profile", "--json").code == 0
    submitted = project.here("submit", "--gpus", "4", "--time", "10m", "--chain", "3")
    assert submitted.code == 0, submitted
    first, second, _ = ids = [job["id"] for job in cluster.ask("jobs")][1:]
    assert [job["fields"]["pend_reason"] for job in cluster.ask("jobs")][2:] == [WAITS] * 2

    wait_for(lambda: len(project.epochs()) == 3)
    (started,) = (job["started"] for job in cluster.ask("jobs") if job["id"] == first)
    cluster.ask("limit", job=first, minutes=(time.time() - started) / 60)
    wait_for(lambda: ends(cluster)[second] == ("RUN", ""))
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
    wait_for(lambda: not {"PEND", "RUN"} & {state for state, _ in ends(cluster).values()})
    # The third was not needed: it was deleted before it began.
    assert [ends(cluster)[job] for job in ids] == [at_limit, ("DONE", ""), ("EXIT", OWNER)]


def ends(cluster):
    """Return state and reason of each job by the daemon."""
    fields = {job["id"]: job["fields"] for job in cluster.ask("jobs")}
    return {job: (each["stat"], each["exit_reason"]) for job, each in fields.items()}
