"""The doctor: what it decides, and what it says of this machine and of a real Slurm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from workbench import new_project

from hetctl.batch import BATCH_SYSTEMS
from hetctl.batch.facts import NodeFacts, QueueFacts
from hetctl.core.finding import Blame, Finding, Outcome
from hetctl.core.site import Queue, Site
from hetctl.files.site_model import SiteModel
from hetctl.launchers import LAUNCHERS
from hetctl.runner.doctor import BATCH_CHECKS, Examination
from hetctl.runner.folder_findings import ability_finding, filesystem_of, place_finding
from hetctl.runner.probing import job_findings
from hetctl.runner.site_findings import (
    COMMANDS,
    HELPFUL,
    NO_LAUNCHER,
    account_finding,
    command_findings,
    node_finding,
    queue_finding,
)
from hetctl.runtime.probe import ProbeEnd, RankReport

OK, WARNING, FAILED = Outcome.OK, Outcome.WARNING, Outcome.FAILED
SITE = Site("lab", "slurm", "srun", 4, 2, 8, 6000 * 2**20, (Queue("main", 4, 3600), Queue("long", 2, None)))
END = ProbeEnd(("n1", "n2"), 4, 0, 0, (2, 2))


def test_the_tables_hold_every_batch_system_and_launcher():
    assert set(COMMANDS) == set(HELPFUL) == set(BATCH_CHECKS) == set(BATCH_SYSTEMS)
    assert NO_LAUNCHER in LAUNCHERS
    assert set(LAUNCHERS) == set(SiteModel.model_fields["launcher"].annotation.__args__)


def test_commands_that_are_missing_are_the_batch_systems_business():
    there = {"sbatch", "squeue", "scancel", "scontrol", "srun", "sacctmgr"}
    found = list(command_findings(SITE, lambda name: f"/usr/bin/{name}" if name in there else None))
    assert [(one.check, one.outcome) for one in found] == [
        ("commands", FAILED),
        ("command sacct", WARNING),
        ("launcher", OK),
    ]
    assert found[0].found == "not on the PATH of this machine: sinfo"
    assert found[0].blame is Blame.BATCH_SYSTEM


@pytest.mark.parametrize(
    ("name", "facts", "outcome", "words"),
    [
        ("main", QueueFacts(True, 4, 3600), OK, "4 nodes for 1h"),
        ("main", QueueFacts(True), OK, "any nodes for any time"),
        ("main", None, FAILED, "slurm has none of this name"),
        ("main", QueueFacts(True, 3, 3600), FAILED, "takes 3 nodes, but the site file says 4"),
        ("main", QueueFacts(True, 4, 1800), FAILED, "takes 30m, but the site file says 1h"),
        ("main", QueueFacts(False, 4, 3600), WARNING, "closed"),
        ("long", QueueFacts(True, 2, 7200), WARNING, "takes 2h, but the site file says no limit"),
        ("long", None, WARNING, "none of this name"),
    ],
)
def test_queues(name, facts, outcome, words):
    finding = queue_finding(SITE, name, name == "main", facts)
    assert finding.outcome is outcome
    assert words in finding.found
    assert bool(finding.fix) == (outcome is not OK)


@pytest.mark.parametrize(
    ("groups", "outcome"),
    [
        ((NodeFacts(4, 8, 6000, 2),), OK),
        ((NodeFacts(2, 8, 6000, 2), NodeFacts(2, 64, 90000, 8)), OK),
        ((NodeFacts(3, 8, 6000, 2), NodeFacts(9, 8, 6000, 1)), WARNING),
        ((NodeFacts(4, 8, 5999, 2),), FAILED),
        ((NodeFacts(4, 7, 6000, 2),), FAILED),
        ((NodeFacts(4, 8, 6000, 0),), FAILED),
        ((), WARNING),
    ],
)
def test_nodes(groups, outcome):
    assert node_finding(SITE, "main", groups).outcome is outcome


def test_a_site_with_slots_needs_no_gpus():
    assert node_finding(replace(SITE, device="slot"), "main", [NodeFacts(4, 8, 6000, 0)]).outcome is OK


@pytest.mark.parametrize(
    ("account", "accounts", "outcome"),
    [(None, [], OK), ("ml", ["ml", "x"], OK), ("ml", ["x"], FAILED), ("ml", [], WARNING)],
)
def test_accounts(account, accounts, outcome):
    assert account_finding(account, accounts).outcome is outcome


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw - lustre 10.0.0.1@tcp:/fs rw
31 30 0:41 / /scratch/my\\040disk rw - tmpfs tmpfs rw
broken
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ann", "ext4"),
        ("/scratch", "lustre"),
        ("/scratch/a/b", "lustre"),
        ("/scratchy", "ext4"),
        ("/scratch/my disk/x", "tmpfs"),
    ],
)
def test_the_innermost_mount_counts(tmp_path, path, kind):
    assert filesystem_of(type(tmp_path)(path), MOUNTS) == kind
    assert filesystem_of(type(tmp_path)(path), "") == "unknown"


def test_only_a_shared_folder_is_well_placed(tmp_path):
    assert place_finding(SITE, tmp_path, "lustre").outcome is OK
    assert place_finding(SITE, tmp_path, "nfs4").outcome is OK
    assert place_finding(SITE, tmp_path, "tmpfs").outcome is WARNING
    assert place_finding(replace(SITE, batch_system="local"), tmp_path, "tmpfs").outcome is OK


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    assert ability_finding(tmp_path / "not" / "yet").outcome is OK
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links_is_found_out(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    finding = ability_finding(tmp_path)
    assert (finding.outcome, finding.found) == (FAILED, f"{tmp_path} cannot link (Operation not supported)")
    assert list(tmp_path.iterdir()) == []


def reports(*visible):
    return [RankReport(f"n{1 + rank // 2}", rank % 2, each, (0,)) for rank, each in enumerate(visible)]


ALL = reports("0,1", "0,1", "0,1", "0,1")


@pytest.mark.parametrize(
    ("end", "seen", "outcomes"),
    [
        (END, ALL, {"launch": OK, "MPI": OK, "GPUs": OK}),
        (END, reports(None, None, None, None), {"launch": OK, "MPI": OK, "GPUs": OK}),
        (END, reports("0", "1", "0", "1"), {"launch": OK, "MPI": OK, "GPUs": FAILED}),
        (END, reports("", "", "", ""), {"launch": OK, "MPI": OK, "GPUs": FAILED}),
        (replace(END, mpi_sizes=(1, 1)), ALL, {"launch": OK, "MPI": FAILED, "GPUs": OK}),
        (replace(END, mpi_sizes=(0, 0)), ALL, {"launch": OK, "MPI": WARNING, "GPUs": OK}),
        (replace(END, mpi_sizes=(2,)), ALL, {"launch": OK, "MPI": FAILED, "GPUs": OK}),
        (replace(END, leaders_exit_code=1), ALL, {"launch": OK, "MPI": FAILED, "GPUs": OK}),
        (END, ALL[:2], {"launch": FAILED, "MPI": OK, "GPUs": OK}),
        (END, [], {"launch": FAILED, "MPI": OK}),
        (replace(END, exit_code=None), ALL, {"launch": FAILED, "MPI": OK, "GPUs": OK}),
    ],
)
def test_what_ranks_and_leaders_see(end, seen, outcomes):
    found = {one.check: one.outcome for one in job_findings(SITE, end, seen, "srun: error: x", "")}
    assert found == outcomes


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([Finding("a", OK, ""), Finding("b", WARNING, "")], None),
        ([Finding("a", WARNING, ""), Finding("b", FAILED, "", "", Blame.BATCH_SYSTEM)], 4),
        ([Finding("a", FAILED, ""), Finding("b", FAILED, "", "", Blame.BATCH_SYSTEM)], 2),
    ],
)
def test_the_first_failure_gives_the_exit_code(findings, code):
    failure = Examination("lab", tuple(findings)).failure
    assert (failure.exit_code if failure else None) == code


def outcomes_of(result):
    return {one["check"]: one["outcome"] for one in result.json["findings"]}


@pytest.fixture
def project(tmp_path):
    return new_project(tmp_path / "project")


def test_this_machine_is_well(project):
    before = project.tree()
    result = project.here("doctor", "--json", HETCTL_SITE="local")
    assert result.code == 0
    assert set(outcomes_of(result).values()) <= {"ok", "warning"}
    assert result.json["site"] == "local"
    assert project.tree() == before


def test_a_batch_system_that_is_elsewhere(project):
    result = project.here("doctor", "--json", "--site", "summit", PATH="/nowhere:/usr/bin:/bin")
    assert result.code == 4
    assert outcomes_of(result)["commands"] == "failed"
    assert result.json["error"]["kind"] == "batch-system"


def test_a_wrong_site_file_is_refused_as_a_whole(project):
    (project.path / "lab.yaml").write_text("extends: slurm\nnodes: none\n")
    result = project.here("doctor", "--json", "--site", "./lab.yaml")
    assert result.code == 2
    assert "lab.yaml:2: nodes: must be a whole number" in result.json["error"]["message"]


RIGHT = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 6000MiB
queues: [{name: main, max_nodes: 4, max_wall: 1h}, {name: urgent, max_nodes: 4, max_wall: 1h}]
queue: main
"""


@pytest.mark.slurm
class TestOnSlurm:
    """On a real cluster, whose accounting knows no accounts."""

    @pytest.fixture
    def examine(self, slurm_cluster, project):
        def examine(site, *arguments, **environment):
            (project.path / "lab.yaml").write_text(site)
            environment = {**slurm_cluster.environment(), **environment}
            return project.hetctl("doctor", "--json", "--site", "./lab.yaml", *arguments, **environment)

        return examine

    def test_a_right_site_file(self, examine):
        result = examine(RIGHT, "--job")
        assert result.code == 0, result.stdout
        outcomes = outcomes_of(result)
        assert {
            outcomes.pop(name) for name in ("shared folder", "package tensorflow", "package horovod")
        } <= {*("ok", "warning")}
        assert set(outcomes.values()) == {"ok"}, result.stdout
        assert outcomes.keys() >= {
            *(
                "commands",
                "batch system",
                "queue main",
                "queue urgent",
                "nodes of main",
                "account",
                "dry run",
            ),
            *("job", "launch", "MPI", "GPUs"),
        }
        launch = next(one for one in result.json["findings"] if one["check"] == "launch")
        assert launch["found"] == "4 of 4 ranks, by agents that srun started: 2 on n1, 2 on n2"

    @pytest.mark.parametrize(
        ("old", "new", "check", "words"),
        [
            ("main", "mian", "queue mian", "slurm has none of this name"),
            ("nodes: 4, max_wall: 1h}, {", "nodes: 5, max_wall: 1h}, {", "queue main", "takes 4 nodes"),
            ("gpus_per_node: 2", "gpus_per_node: 8", "nodes of main", "none has 8 cores"),
            ("6000MiB", "9000MiB", "nodes of main", "none has 8 cores, 9000 MiB"),
        ],
    )
    def test_a_wrong_site_file(self, examine, old, new, check, words):
        result = examine(RIGHT.replace(old, new))
        assert result.code == 2, result.stdout
        finding = next(one for one in result.json["findings"] if one["outcome"] == "failed")
        assert finding["check"] == check
        assert words in finding["found"]
        assert finding["fix"]

    def test_what_only_slurm_itself_refuses(self, examine):
        result = examine(RIGHT + "directives: [--constraint=nonesuch]\n")
        assert result.code == 4, result.stdout
        assert [name for name, outcome in outcomes_of(result).items() if outcome == "failed"] == ["dry run"]

    def test_a_controller_that_is_away(self, examine, tmp_path):
        conf = tmp_path / "slurm.conf"
        conf.write_text("ClusterName=gone\nSlurmctldHost=localhost\nSlurmctldPort=1\nAuthType=auth/none\n")
        result = examine(RIGHT, SLURM_CONF=str(conf))
        assert result.code == 4, result.stdout
        assert outcomes_of(result)["batch system"] == "failed"
