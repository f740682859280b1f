"""The doctor: what it decides, and what it says of this machine and of a real Slurm."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from workbench import new_project

from hetctl.app.doctor.doctor import Examination, packages_of_nodes
from hetctl.app.doctor.probe_job import gpu_check, job_checks, link_checks
from hetctl.app.doctor.site_checks import (
    ability_check,
    account_check,
    command_checks,
    filesystem_of,
    node_check,
    own_gpu_check,
    place_check,
    podman_check,
    purge_check,
    queue_check,
)
from hetctl.app.project import Project
from hetctl.cluster.batch.base import SubmissionInDoubtError
from hetctl.cluster.batch.queues import NodeClass, QueueFacts
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain
from hetctl.model.errors import DamagedFileError
from hetctl.model.interpreter import load_entry
from hetctl.model.job import JobState, JobStatus
from hetctl.model.site import Purge, Queue, Site
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.storage.probe_files import AllReduce, GroupEnd, ProbeEnd, RankReport, RankTime, StartCost

OK, WARNING, FAILED = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.FAILED
SITE = Site("lab", "slurm", "srun", 4, 2, 8, 6000 * 2**20, (Queue("main", 4, 3600), Queue("long", 2, None)))
END = ProbeEnd(("n1", "n2"), 4, 0, 0, (2, 2))


def test_packages_of_all_frameworks_are_looked_for() -> None:
    uses = packages_of_nodes()
    assert uses.keys() >= {"hetctl", "tensorflow", "horovod", "torch", "mpi4py"}
    assert uses["torch"] == "members with framework pytorch need it"
    assert uses["horovod"] == "members with framework tensorflow get one GPU each without it"


def test_every_batch_system_has_its_queries():
    for entry in BATCH_SYSTEMS.values():
        assert callable(load_entry(entry.checks))


H100 = "NVIDIA H100 80GB HBM3"
GPUS_HERE = {
    "unknown": ("gpu", 2, [], []),
    "all": ("gpu", 2, [H100, H100], [(OK, f"2 x {H100}")]),
    "too few": ("gpu", 2, [H100], [(FAILED, f"this machine has 1 x {H100}, the site file says 2 GPUs")]),
    "unused": (
        *("slot", 2, [H100]),
        [(WARNING, f"slots are shares of the cores: no rank sees the GPUs of this machine (1 x {H100})")],
    ),
}


@pytest.mark.parametrize(("device", "gpus", "names", "results"), GPUS_HERE.values(), ids=GPUS_HERE)
def test_gpus_of_this_machine_are_compared_with_its_site(device, gpus, names, results):
    site = replace(SITE, device=device, gpus_per_node=gpus)
    assert [(one.status, one.message) for one in own_gpu_check(site, names)] == results


def test_podman_must_not_copy_an_image_for_each_start():
    assert [podman_check(name).status for name in ("overlay", "", "vfs")] == [OK, OK, WARNING]
    assert "storage.conf" in podman_check("vfs").hint


def test_the_purge_of_the_projects_folder_is_told(tmp_path):
    purge = Purge(10, (f"{tmp_path}/*",))
    assert "nobody has used for 10 days" in purge_check(purge, tmp_path / "project").message
    assert "is not in" in purge_check(purge, tmp_path.parent).message


def test_missing_commands_are_blamed_on_the_batch_system():
    there = {"sbatch", "squeue", "scancel", "scontrol", "srun", "sacctmgr"}
    found = list(command_checks(SITE, lambda name: f"/usr/bin/{name}" if name in there else None))
    assert [(one.name, one.status) for one in found] == [
        ("commands", FAILED),
        ("command sacct", WARNING),
        ("launcher", OK),
    ]
    assert found[0].message == "not on the PATH of this machine: sinfo"
    assert found[0].fault_domain is FaultDomain.BATCH_SYSTEM


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
def test_a_queue_smaller_than_the_site_file_says_is_found(name, facts, outcome, words):
    check = queue_check(SITE, name, name == "main", facts)
    assert check.status is outcome
    assert words in check.message
    assert bool(check.hint) == (outcome is not OK)


@pytest.mark.parametrize(
    ("groups", "outcome"),
    [
        ((NodeClass(4, 8, 6000, 2),), OK),
        ((NodeClass(2, 8, 6000, 2), NodeClass(2, 64, 90000, 8)), OK),
        ((NodeClass(3, 8, 6000, 2), NodeClass(9, 8, 6000, 1)), WARNING),
        ((NodeClass(4, 8, 5999, 2),), FAILED),
        ((NodeClass(4, 7, 6000, 2),), FAILED),
        ((NodeClass(4, 8, 6000, 0),), FAILED),
        ((), WARNING),
    ],
)
def test_nodes_smaller_than_the_site_file_says_are_found(groups, outcome):
    assert node_check(SITE, "main", groups).status is outcome


def test_a_site_with_slots_needs_no_gpus():
    assert node_check(replace(SITE, device="slot"), "main", [NodeClass(4, 8, 6000, 0)]).status is OK


@pytest.mark.parametrize(
    ("account", "accounts", "outcome"),
    [(None, [], OK), ("ml", ["ml", "x"], OK), ("ml", ["x"], FAILED), ("ml", [], WARNING)],
)
def test_an_account_that_the_user_lacks_is_found(account, accounts, outcome):
    assert account_check(account, accounts).status is outcome


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
    assert place_check(SITE, tmp_path, "lustre").status is OK
    assert place_check(SITE, tmp_path, "nfs4").status is OK
    assert place_check(SITE, tmp_path, "tmpfs").status is WARNING
    assert place_check(replace(SITE, batch_system="local"), tmp_path, "tmpfs").status is OK


def test_a_folder_is_tried_and_left_as_it_was(tmp_path):
    assert ability_check(tmp_path / "not" / "yet").status is OK
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_links_is_found_out(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", refuse)
    check = ability_check(tmp_path)
    assert (check.status, check.message) == (FAILED, f"{tmp_path} cannot link (Operation not supported)")
    assert list(tmp_path.iterdir()) == []


def reports(*visible):
    return [RankReport(f"n{1 + rank // 2}", rank % 2, each, (0,)) for rank, each in enumerate(visible)]


ALL = reports("0,1", "0,1", "0,1", "0,1")


MIG = ("MIG-c1", "MIG-84", "MIG-a0", "MIG-20")


@pytest.mark.parametrize(
    ("gpu_type", "visible", "status"),
    [("A100-1g.10gb", MIG, OK), ("A100", MIG, WARNING), ("A100-1g.10gb", ("MIG-c1",) * 4, FAILED)],
)
def test_ranks_see_a_mig_device_each(gpu_type, visible, status):
    site = replace(SITE, gpu_type=gpu_type)
    assert gpu_check(site, reports(*visible)).status == status


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
    found = {one.name: one.status for one in job_checks(SITE, end, seen, "srun: error: x", "")}
    assert found == outcomes


def test_an_archive_is_advised_where_many_nodes_would_wait_longer_than_they_unpack():
    seen = [replace(rank, start=StartCost(5.0, 3.0, 40_000, 10.0)) for rank in ALL]

    def start(**keys):
        site = replace(SITE, **keys)
        return next(one for one in job_checks(site, END, seen, "", "") if one.name == "start")

    # Two nodes wait for 2 s, twenty for up to 20 s.
    assert [start(nodes=nodes).status for nodes in (4, 10, 11)] == [OK, OK, WARNING]
    assert "jobs of 10 nodes and more" in start(nodes=11).hint
    assert start(nodes=11, stage="env.tar.zst").status == OK


def test_ranks_off_the_cores_of_their_gpus_are_found():
    seen = [replace(rank, cores=(8 * rank.gpu, 8 * rank.gpu + 1)) for rank in ALL]
    right, wrong = (replace(SITE, gpu_cores=cores) for cores in (("0-7", "8-15"), ("8-15", "0-7")))
    (check,) = (one for one in job_checks(right, END, seen, "", "") if one.name == "GPU cores")
    assert check.status == OK
    (check,) = (one for one in job_checks(wrong, END, seen, "", "") if one.name == "GPU cores")
    assert (check.status, check.message) == (FAILED, "n1 runs GPU 0 on 0-1, not on 8-15; 3 more")


def speed(gb_per_s, *nodes, backend="nccl", framework="pytorch"):
    return AllReduce(framework, backend, nodes, 2 * len(nodes), 64 * 2**20, 0.01, gb_per_s)


def times(unreached=((), ()), links=(None, None), node="n1"):
    """What the two ranks of a node found."""
    return [
        RankTime(f"all-reduce-{node}", node, gpu, "nccl", 64 * 2**20, 0.01, unreached[gpu], links[gpu])
        for gpu in (0, 1)
    ]


MEASURED = replace(
    END,
    framework="pytorch",
    groups=(
        GroupEnd("all-reduce-n1", ("n1",), 0),
        GroupEnd("all-reduce-n2", ("n2",), 0),
        GroupEnd("all-reduce", ("n1", "n2"), 0),
    ),
)
FAST = (speed(231.4, "n1"), speed(230, "n2"), speed(24, "n1", "n2"))
SLOW = (speed(3.1, "n1"), *FAST[1:])
LINKED = [*times(links=(4, 4)), *times(links=(4, 4), node="n2")]


def judged(speeds, ranks, end=MEASURED, site=SITE):
    return [
        (one.name, one.status, one.message, one.hint)
        for one in link_checks(site, end, speeds, ranks, "what it said")
    ]


WELL = ("all-reduce", OK, "bus bandwidth 231 GB/s within n1, 230 GB/s within n2, 24 GB/s between nodes")


@pytest.mark.parametrize("ranks", [LINKED, times() + times(node="n2"), times(links=(4, 0))])
def test_links_that_are_used_are_well(ranks):
    ((check, outcome, found, _),) = judged(FAST, ranks)
    assert (check, outcome, found) == (*WELL[:2], f"{WELL[2]} (pytorch over nccl, 64 MiB)")


@pytest.mark.parametrize(
    ("speeds", "ranks", "found"),
    [
        (
            SLOW,
            times(unreached=((1,), (0,))),
            "GPUs 0, 1 of node n1 exchange through host memory (3.1 GB/s, and 24 between nodes)",
        ),
        (
            SLOW[:1],
            times(unreached=((1,), (0,))),
            "GPUs 0, 1 of node n1 exchange through host memory (3.1 GB/s)",
        ),
        (
            SLOW,
            LINKED,
            "GPUs of node n1 have NVLink, and exchange no faster than nodes do"
            " (3.1 GB/s, and 24 between nodes)",
        ),
    ],
)
def test_gpus_without_a_direct_link_are_named_with_a_fix(speeds, ranks, found):
    _, (check, outcome, words, fix) = judged(speeds, ranks)
    assert (check, outcome, words) == ("GPU links", WARNING, found)
    assert all(name in fix for name in ("--gpu-bind", "CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE"))


@pytest.mark.parametrize(
    ("speeds", "ranks"),
    [
        (SLOW, times()),  # no NVLink is known of
        (SLOW, times(links=(4, 0))),  # one GPU has none in use
        (SLOW[:1], LINKED),  # nothing to compare with
    ],
)
def test_slow_links_are_not_blamed_on_what_is_not_known(speeds, ranks):
    assert [check for check, *_ in judged(speeds, ranks)] == ["all-reduce"]


def test_a_network_at_the_speed_of_tcp_fails_and_names_the_missing_line():
    load = "module load rccl-net-plugin"
    fast, slow = (replace(SITE.network, bytes_per_s=each, plugin=load) for each in (100e9, 200e9))
    assert [check for check, *_ in judged(FAST, times(), site=replace(SITE, network=fast))] == ["all-reduce"]
    site = replace(SITE, network=slow)
    _, (check, outcome, found, fix) = judged(FAST, times(), site=site)
    assert (check, outcome, fix) == ("network", FAILED, f"add to `setup`: {load}")
    assert found == "24 GB/s between nodes whose network has 200: collectives go over TCP"
    _, (*_, fix) = judged(FAST, times(), site=replace(site, setup=(load,)))
    assert load not in fix


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_gloo_is_a_warning_between_gpus_and_fine_between_slots(framework):
    speeds = (speed(0.91, "n1", backend="gloo", framework=framework),)
    _, (check, outcome, found, fix) = judged(speeds, [])
    assert (check, outcome, fix) == ("GPU links", WARNING, FRAMEWORKS[framework].nccl_fix)
    assert found == f"GPUs exchange through host memory (0.91 GB/s within n1): {framework} goes over gloo"
    assert [check for check, *_ in judged(speeds, [], site=replace(SITE, device="slot"))] == ["all-reduce"]


@pytest.mark.parametrize(("code", "ending"), [(None, "hung"), (1, "ended with exit code 1")])
def test_a_group_that_does_not_form_fails_with_its_own_message(code, ending):
    end = replace(MEASURED, groups=(MEASURED.groups[0], GroupEnd("all-reduce-n2", ("n2",), code)))
    ((check, outcome, found, fix),) = judged(FAST[:1], times(), end)
    assert (check, outcome) == ("all-reduce", FAILED)
    assert found == f"bus bandwidth 231 GB/s within n1; the pytorch group on n2 {ending}"
    assert "what it said" in fix


def test_nodes_without_a_framework_for_groups_are_a_warning():
    ((check, outcome, found, fix),) = judged((), [], END)
    assert (check, outcome, found.partition(":")[0]) == ("all-reduce", WARNING, "not measured")
    assert "tensorflow with horovod or torch" in fix


@pytest.mark.parametrize(
    "end", [replace(END, ranks=1), replace(END, exit_code=1), replace(END, exit_code=None)]
)
def test_nothing_is_said_of_one_gpu_or_if_ranks_did_not_start(end):
    assert judged((), [], end) == []


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([CheckResult("a", OK, ""), CheckResult("b", WARNING, "")], None),
        ([CheckResult("a", WARNING, ""), CheckResult("b", FAILED, "", "", FaultDomain.BATCH_SYSTEM)], 4),
        ([CheckResult("a", FAILED, ""), CheckResult("b", FAILED, "", "", FaultDomain.BATCH_SYSTEM)], 2),
    ],
)
def test_the_first_failure_gives_the_exit_code(checks, code):
    failure = Examination("lab", tuple(checks)).failure
    assert (failure.exit_code if failure else None) == code


def outcomes_of(result):
    return {one["name"]: one["status"] for one in result.json["checks"]}


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


def test_commands_of_setup_that_fail_are_named(project):
    (project.path / "lab.yaml").write_text('extends: local\nsetup: [". /nowhere/activate", "true; false"]\n')
    checks = project.here("doctor", "--json", "--site", "./lab.yaml").json["checks"]
    found = [(one["status"], one["message"]) for one in checks if one["name"] == "setup"]
    assert [status for status, _ in found] == ["warning", "warning"]
    assert ". /nowhere/activate (exit code 1)" in found[0][1]
    assert "No such file or directory" in found[0][1]
    assert found[1][1] == "false (exit code 1): no output"
    (project.path / "lab.yaml").write_text("extends: local\nsetup: ['cd /']\n")
    good = project.here("doctor", "--json", "--site", "./lab.yaml")
    assert outcomes_of(good)["setup"] == "ok"


def test_a_batch_system_that_is_elsewhere(project):
    result = project.here("doctor", "--json", "--site", "summit", PATH="/nowhere:/usr/bin:/bin")
    assert result.code == 4
    assert outcomes_of(result)["commands"] == "failed"
    assert result.json["error"]["kind"] == "batch-system"


def test_a_missing_archive_of_the_environment_is_named(project):
    (project.path / "lab.yaml").write_text(SLOTS + "stage: env.tar\n")
    assert project.here("doctor", "--json", "--site", "./lab.yaml").code == 2
    (project.path / "env.tar").touch()
    assert outcomes_of(project.here("doctor", "--json", "--site", "./lab.yaml"))["stage"] == "ok"


def test_a_wrong_site_file_is_refused_as_a_whole(project):
    (project.path / "lab.yaml").write_text("extends: slurm\nnodes: none\n")
    result = project.here("doctor", "--json", "--site", "./lab.yaml")
    assert result.code == 2
    assert "lab.yaml:2: nodes: must be a whole number" in result.json["error"]["message"]


SLOTS = "extends: local\ngpus_per_node: 2\ncores_per_node: 2\n"


@pytest.mark.training
def test_two_slots_of_this_machine_all_reduce(project):
    """In TensorFlow; PyTorch does on Slurm."""
    framework = "tensorflow"
    (project.path / "lab.yaml").write_text(SLOTS)
    result = project.here("doctor", "--json", "--site", "./lab.yaml", "--job", "--framework", framework)
    assert result.code == 0, result.stdout
    assert outcomes_of(result)["all-reduce"] == "ok"
    assert "GPU links" not in outcomes_of(result)
    (group,) = result.json["all_reduce"]
    seconds, gb_per_s = group.pop("median_s"), group.pop("bus_gb_per_s")
    size = 8 * 2**20
    assert group == {
        **{"framework": framework, "backend": "gloo", "nodes": ["localhost"]},
        **{"gpus": 2, "bytes": size},
    }
    assert gb_per_s == pytest.approx(size / seconds / 1e9)


@pytest.mark.training
def test_a_group_that_cannot_meet_says_why(project):
    (project.path / "lab.yaml").write_text(SLOTS + "network: {gloo: [nonesuch0]}\n")
    result = project.here("doctor", "--json", "--site", "./lab.yaml", "--job", "--framework", "pytorch")
    assert result.code == 2, result.stdout
    check = next(one for one in result.json["checks"] if one["name"] == "all-reduce")
    assert check["message"].startswith(
        "nothing measured; the pytorch group on localhost ended with exit code"
    )
    assert "network.gloo of the site file names nonesuch0" in check["hint"]
    assert result.json["all_reduce"] == []


class Finished:
    """A batch system whose jobs are over at once, and leave what is no result."""

    def __init__(self, doubt=None):
        self.doubt, self.submitted, self.cancelled = doubt, [], []

    def find(self, names):
        return {name: f"id of {name}" for name in names}

    def submit(self, request):
        self.submitted.append(request)
        (request.script.parent / "end.json").write_text("{")
        if self.doubt:
            raise self.doubt
        return "1"

    def statuses(self, ids):
        return dict.fromkeys(ids, JobStatus(JobState.FINISHED))

    def cancel(self, ids):
        self.cancelled += ids


@pytest.mark.parametrize("doubt", [None, SubmissionInDoubtError("no answer")])
def test_a_damaged_result_of_a_job_is_named(project, monkeypatch, doubt):
    batch = Finished(doubt)
    monkeypatch.setattr(Project, "batch_system", lambda *_: batch)
    result = project.here("doctor", "--job", "--json", HETCTL_SITE="local")
    (request,) = batch.submitted
    assert result.code == DamagedFileError.exit_code
    assert f"{request.script.parent}/end.json is damaged" in result.error["message"]
    assert "run `hetctl doctor --job` again" in result.error["hint"]
    assert batch.cancelled == [f"id of {request.name}" if doubt else "1"]
    assert not request.script.parent.exists()


def test_jobs_of_killed_commands_are_cancelled(project, monkeypatch):
    batch = Finished()
    monkeypatch.setattr(Project, "batch_system", lambda *_: batch)
    old, young = (project.home.path / f"doctor-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    project.here("doctor", "--job", HETCTL_SITE="local")
    assert "id of hetctl-doctor-old" in batch.cancelled
    assert "id of hetctl-doctor-young" not in batch.cancelled
    assert (old.exists(), young.exists()) == (False, True)


def test_a_framework_goes_with_a_job(project):
    result = project.here("doctor", "--framework", "pytorch")
    assert result.code == 2
    assert "--framework requires --job" in result.stderr


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
            return project.here("doctor", "--json", "--site", "./lab.yaml", *arguments, **environment)

        return examine

    def test_a_right_site_file(self, examine):
        result = examine(RIGHT, "--job", "--framework", "pytorch")
        assert result.code == 0, result.stdout
        outcomes = outcomes_of(result)
        assert {
            outcomes.pop(name) for name in ("shared folder", "package tensorflow", "package horovod")
        } <= {*("ok", "warning")}
        # The cluster's GPUs are no real ones.
        assert outcomes.pop("GPU links") == "warning"
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
            *("job", "launch", "MPI", "GPUs", "all-reduce"),
        }
        launch = next(one for one in result.json["checks"] if one["name"] == "launch")
        assert launch["message"] == "4 of 4 ranks, by agents that srun started: 2 on n1, 2 on n2"
        groups = [(group["nodes"], group["gpus"]) for group in result.json["all_reduce"]]
        assert groups == [(["n1"], 2), (["n2"], 2), (["n1", "n2"], 4)]
        assert all(group["bus_gb_per_s"] > 0 for group in result.json["all_reduce"])

    @pytest.mark.parametrize(
        ("old", "new", "check", "words"),
        [
            ("main", "mian", "queue mian", "slurm has none of this name"),
            ("nodes: 4, max_wall: 1h}, {", "nodes: 5, max_wall: 1h}, {", "queue main", "takes 4 nodes"),
            ("gpus_per_node: 2", "gpus_per_node: 8", "nodes of main", "none has 8 cores"),
            ("6000MiB", "33000MiB", "nodes of main", "none has 8 cores, 33000 MiB"),
        ],
    )
    def test_a_wrong_site_file(self, examine, old, new, check, words):
        result = examine(RIGHT.replace(old, new))
        assert result.code == 2, result.stdout
        failed = next(one for one in result.json["checks"] if one["status"] == "failed")
        assert failed["name"] == check
        assert words in failed["message"]
        assert failed["hint"]

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
