from __future__ import annotations

import fnmatch
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hetctl.inputs.site_file import SiteFile, detect_site, find_site, list_sites, trace_site
from hetctl.model.errors import BadInputError
from hetctl.model.site import (
    Cluster,
    InterNode,
    IntraNode,
    NetworkInterfaces,
    NodeLinks,
    Queue,
    Site,
    SiteKey,
    Timeouts,
)

SHIPPED = [
    *("flux", "frontier", "lassen", "local", "lsf", "lumi", "pbs", "perlmutter"),
    *("slurm", "slurm-docker", "summit", "summitdev"),
]
EXTENDING = {
    **dict.fromkeys(("clariden", "daint", "delta", "deltaai", "isambard-ai", "jupiter"), "srun"),
    **dict.fromkeys(("juwels-booster", "leonardo", "lonestar6", "marenostrum5", "roihu", "snellius"), "srun"),
    **dict.fromkeys(("stampede3", "vista"), "srun"),
    "tuolumne": "flux",
    **dict.fromkeys(("aurora", "polaris"), "mpiexec"),
}
"""Machines whose files have what differs from their batch system's, with their launchers."""
KEYS = [field.name.removesuffix("_s") for field in fields(SiteFile) if field.name not in ("name", "extends")]
TEXT = """\
batch_system: slurm
launcher: srun
nodes: 4
gpus_per_node: 4
cores_per_node: 8
memory_per_node: 512GB
queues:
  - {name: main, max_nodes: 4, max_wall: 2:00:00}
"""


def read_site(path: Path) -> Site:
    return find_site(str(path), project=None, home=None)


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


def read(folder: Path, text: str) -> Site:
    return read_site(write(folder, "s", text))


def refused(folder: Path, text: str, name: str = "s") -> str:
    with pytest.raises(BadInputError) as caught:
        read_site(write(folder, name, text))
    return caught.value.message.replace(f"{folder}/", "")


def test_a_site_file_is_read_in_seconds_and_bytes(tmp_path: Path):
    site = read(tmp_path, TEXT + "  - {name: long, max_wall: 90m}\nqueue: long\nenvironment: {A: 'x y'}\n")
    assert (site.name, site.memory_per_node, site.gpus) == ("s", 512 * 10**9, 16)
    assert site.queues == (Queue("main", 4, 7200), Queue("long", None, 5400))
    assert site.queue == "long"
    assert site.environment == {"A": "x y"}
    assert read(tmp_path, TEXT.replace("512GB", "1024")).memory_per_node == 1024


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("launcher: srun\n", "", "s.yaml:1: launcher: is required"),
        ("launcher", "launchr", "s.yaml:2: launchr: unknown key 'launchr'; did you mean 'launcher'?"),
        (
            "srun",
            "prun",
            "s.yaml:2: launcher: must be 'local', 'srun', 'mpirun', 'mpiexec', 'flux'",
        ),
        ("nodes: 4\ngpus", "nodes: 0\ngpus", "s.yaml:3: nodes: must be at least 1, got 0"),
        ("512GB", "512G", "s.yaml:6: memory_per_node: '512G' is not a size such as 512GB, 480GiB or bytes"),
        ("512GB", "0", "s.yaml:6: memory_per_node: 0 is not a size such as"),
        ("2:00:00", "90", "s.yaml:8: queues[0].max_wall: '90' is not a duration such as 2h, 90m, 1h30m or "),
        ("2:00:00", "90", "write 90s, 90m or 90h, got 90"),
        ("2:00:00", "0s", "s.yaml:8: queues[0].max_wall: duration '0s' must be longer than 0 s, got '0s'"),
        ("name: main", "name: a b", "s.yaml:8: queues[0].name: must be one word"),
        ("name: main", 'name: "a\\nb"', "s.yaml:8: queues[0].name: must be one word"),
        ("name: main", "name: -p", "s.yaml:8: queues[0].name: must be one word"),
    ],
)
def test_a_wrong_site_file_is_refused_at_its_line(tmp_path: Path, old: str, new: str, message: str):
    assert old in TEXT
    assert message in refused(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('account: "a\\nb"', "account: must be one word"),
        ('account: "a\\0b"', "'a\\x00b' has an invalid character"),
        (
            'directives: ["-x\\n#SBATCH -y"]',
            "directives[0]: must be one line of options for the batch system",
        ),
        (
            'directives: ["#SBATCH -y"]',
            "directives[0]: must be one line of options for the batch system, without",
        ),
        ('setup: ["a\\rb"]', "setup[0]: must be one line of text"),
        ('setup: ["a\\n"]', "setup[0]: must be one line of text"),
        ('setup: ["a\\u2028b"]', "setup[0]: must be one line of text"),
        ('environment: {A: "a\\nb"}', "environment.A: must be one line of text"),
        ("environment: {A: 1}", "environment.A: must be text (put it in quotes), got 1"),
        ("environment: {A-B: x}", "environment.A-B: must be the name of an environment variable, got 'A-B'"),
        ('python: "a\\nb"', "python: must be one line of text"),
        ("mpi: pmix;ls", "mpi: must be one word"),
        ("template: ../x.j2", "template: must be the file name of a template, NAME.j2, got '../x.j2'"),
        ("submit_by: mail", "submit_by: must be 'file' or 'stdin', got 'mail'"),
        ("device: cpu", "device: must be 'gpu' or 'slot', got 'cpu'"),
        ("max_per_gpu: 17", "s.yaml:9: max_per_gpu: must be 'auto' or 1 to 16, got 17"),
        ("queue: 3", "s.yaml:9: queue: must be text (put it in quotes), or a list, got 3"),
        ("queue: [main, 3]", "s.yaml:9: queue[1]: must be text (put it in quotes), got 3"),
        ("max_queued_jobs: 0", "max_queued_jobs: must be at least 1, got 0"),
        ("queue: mian", "queue: must be one of the queues, got 'mian'; did you mean 'main'?"),
        ("extends: [x]", "extends: must be text (put it in quotes), got ['x']"),
        ("extends: slrm", "extends: unknown site 'slrm'; did you mean 'slurm'?"),
        ("extends: ./none.yaml", "none.yaml: cannot be read: No such file or directory"),
    ],
)
def test_refusals_of_further_keys(tmp_path: Path, line: str, message: str):
    problem = refused(tmp_path, f"{TEXT}{line}\n")
    assert message in problem
    assert problem.startswith(("s.yaml:9: ", "none.yaml: "))


def test_bins_of_one_queue_rise(tmp_path: Path):
    bins = "  - {name: main, max_nodes: 8}\n  - {name: main}\n"
    assert len(read(tmp_path, TEXT + bins).queues) == 3
    assert "s.yaml:7: queues: entries of queue 'main' must have rising max_nodes" in refused(
        tmp_path, TEXT + "  - {name: main, max_nodes: 4}\n"
    )


def test_a_file_name_that_is_no_name_of_a_site_is_refused(tmp_path: Path):
    assert refused(tmp_path, TEXT, "a b") == (
        "a b.yaml: the file's name is the site's, which must be 1 to 64 of A-Z a-z 0-9 . _ - and "
        "start with a letter or digit"
    )


def test_precedence_project_then_user_then_shipped(tmp_path: Path):
    project, home = tmp_path / "project", tmp_path / "home"
    assert find_site("slurm", project=project, home=home).nodes == 4
    user = write(home / ".config/hetctl/site-configs", "slurm", TEXT.replace("nodes: 4\n", "nodes: 5\n", 1))
    assert find_site("slurm", project=project, home=home).nodes == 5
    own = write(project / "site-configs", "slurm", TEXT.replace("nodes: 4\n", "nodes: 6\n", 1))
    assert find_site("slurm", project=project, home=home).nodes == 6
    assert find_site(str(user), project=project, home=home).nodes == 5
    sites = dict(list_sites(project=project, home=home))
    assert sites["slurm"] == own
    assert sorted(sites) == sorted([*SHIPPED, *EXTENDING])
    assert sites["local"].name == "local.yaml"


def test_an_unknown_site_is_refused_with_the_known_ones(tmp_path: Path):
    with pytest.raises(BadInputError, match="unknown site 'sumit'; did you mean 'summit'"):
        find_site("sumit", project=tmp_path, home=tmp_path)
    with pytest.raises(
        BadInputError, match=f"unknown site 'zzz'; known: {', '.join(sorted([*SHIPPED, *EXTENDING]))}"
    ):
        find_site("zzz", project=None, home=None)


def test_extending_keeps_what_is_not_overridden(tmp_path: Path):
    folder = tmp_path / "site-configs"
    write(folder, "base", TEXT + "account: them\nenvironment: {A: x}\n")
    write(folder, "mine", "extends: base\naccount: me\nnodes: 9\n")
    write(folder, "slurm", "extends: slurm\naccount: own\n")
    mine = find_site("mine", project=tmp_path, home=None)
    assert (mine.name, mine.account, mine.nodes, mine.environment) == ("mine", "me", 9, {"A": "x"})
    assert find_site("slurm", project=tmp_path, home=None).account == "own"
    assert find_site("slurm", project=tmp_path, home=None).mpi == "pmix"


def test_problems_of_an_extended_file_name_that_file(tmp_path: Path):
    write(tmp_path, "base", TEXT.replace("nodes: 4\n", "nodes: 0\n", 1))
    problems = refused(tmp_path, "extends: ./base.yaml\naccount: 3\n")
    assert problems.splitlines() == [
        "base.yaml:3: nodes: must be at least 1, got 0",
        "s.yaml:2: account: must be text (put it in quotes), got 3",
    ]


def test_site_files_that_extend_each_other_are_refused(tmp_path: Path):
    folder = tmp_path / "site-configs"
    write(folder, "a", "extends: b\n")
    write(folder, "b", "\nextends: a\n")
    write(folder, "c", "extends: ./c.yaml\n")
    with pytest.raises(BadInputError, match=r"b\.yaml:2: extends: site 'a' extends itself"):
        find_site("a", project=tmp_path, home=None)
    with pytest.raises(BadInputError, match=r"c\.yaml:1: extends: forms a cycle with .*c\.yaml"):
        find_site("c", project=tmp_path, home=None)


@pytest.fixture(scope="module")
def shipped() -> list[Site]:
    return [find_site(name, project=None, home=None) for name in (*SHIPPED, *EXTENDING)]


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("login12.frontier", "frontier"),
        ("login01.frontier.olcf.ornl.gov", "frontier"),
        ("login29.chn.perlmutter.nersc.gov", "perlmutter"),
        ("lumi-uan03.csc.fi", "lumi"),
        ("lassen708", "lassen"),
        ("lassen.llnl.gov", "lassen"),
        ("login3.summit.olcf.ornl.gov", "summit"),
        ("summitdev-login1", "summitdev"),
        ("login1.summitdev.olcf.ornl.gov", "summitdev"),
        ("slurmctld", "slurm-docker"),
        ("login1.crusher.olcf.ornl.gov", None),
        ("login01.othermachine.nersc.gov", None),
        ("uan01", None),
        ("login1.vista.tacc.utexas.edu", "vista"),
        ("daint-ln002", "daint"),
        ("aurora-uan-0010", "aurora"),
        ("polaris-login-02.hsn.cm.polaris.alcf.anl.gov", "polaris"),
        ("laptop", None),
    ],
)
def test_detection_by_host_name(host: str, site: str | None, shipped: list[Site]):
    assert detect_site(host, shipped) == site
    fitting = [one for one in shipped if any(fnmatch.fnmatch(host, p) for p in one.host_patterns)]
    assert len(fitting) == (site is not None)


def test_every_key_is_traced_to_its_file_and_line(tmp_path: Path):
    base = write(tmp_path / "site-configs", "base", TEXT)
    mine = write(tmp_path / "site-configs", "mine", "extends: base\n\naccount: me\nnodes: 9\n")
    site, keys = trace_site("mine", project=tmp_path, home=None)
    assert site == find_site("mine", project=tmp_path, home=None)
    assert [key.key for key in keys] == [*KEYS, "extends"]
    by_name = {key.key: key for key in keys}
    assert by_name["account"] == SiteKey("account", "me", str(mine), 3)
    assert by_name["nodes"] == SiteKey("nodes", 9, str(mine), 4)
    assert by_name["memory_per_node"] == SiteKey("memory_per_node", "512GB", str(base), 6)
    assert by_name["mpi"] == SiteKey("mpi", None)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sites_write_and_comment_every_key(name: str):
    path = dict(list_sites(project=None, home=None))[name]
    lines = path.read_text().splitlines()
    assert set(yaml.safe_load(path.read_text())) == set(KEYS)
    assert read_site(path) == find_site(name, project=None, home=None)
    for key in KEYS:
        (at,) = [number for number, line in enumerate(lines) if line.startswith(f"{key}:")]
        assert lines[at - 1].startswith("#"), key


@pytest.mark.parametrize("name", EXTENDING)
def test_machines_have_their_own_sizes_and_a_source_for_each_key(name: str):
    path = dict(list_sites(project=None, home=None))[name]
    text = path.read_text()
    first, *paragraphs = text.split("\n\n")
    assert "https://" in first
    assert "extends: " in first
    for paragraph in paragraphs:
        lines = paragraph.strip().splitlines()
        assert (lines[0][0], lines[-1][0] != "#") == ("#", True), paragraph
    site, keys = trace_site(name, project=None, home=None)
    placeholders = {key.key for key in keys if key.file and Path(key.file).stem == site.batch_system}
    sized = {"nodes", "gpus_per_node", "cores_per_node", "memory_per_node", "queues", "queue", "mpi"}
    assert not placeholders & sized
    assert site.launcher == EXTENDING[name]
    assert site.queue in {None, *(queue.name for queue in site.queues)}


BINS = {
    "summit": [
        ("batch", 45, 2),
        ("batch", 91, 6),
        ("batch", 921, 12),
        ("batch", 2764, 24),
        ("batch", 4608, 24),
    ],
    "frontier": [
        *(("batch", 91, 2), ("batch", 183, 6), ("batch", 1881, 12), ("batch", 5644, 12), ("batch", 9472, 12)),
        ("extended", 64, 24),
    ],
    "lumi": [("standard-g", 1024, 48), ("small-g", 4, 72), ("dev-g", 32, 3)],
    "summitdev": [("batch", 54, 4)],
    "vista": [("gh", 64, 48), ("gh-dev", 8, 2)],
    "clariden": [("normal", None, 24), ("debug", 1, 1.5), ("debug", 2, 0.75)],
    "polaris": [
        *(("debug", 2, 1), ("debug-scaling", 10, 1), ("prod", 24, 3), ("prod", 99, 6), ("prod", 496, 24)),
        *(("preemptable", 10, 72), ("capacity", 4, 168)),
    ],
    "roihu": [("gpumedium", 1, 36), ("gpularge", 10, 36), ("gputest", 2, 0.25)],
}


@pytest.mark.parametrize("name", BINS)
def test_queues_are_those_of_the_guides(name: str):
    queues = find_site(name, project=None, home=None).queues
    assert [(queue.name, queue.max_nodes, queue.max_wall_s / 3600) for queue in queues] == BINS[name]


@pytest.mark.parametrize(
    ("name", "nodes", "gpus", "cores", "variable"),
    [
        ("summit", 4608, 6, 7, "CUDA_VISIBLE_DEVICES"),
        ("summitdev", 54, 4, 5, "CUDA_VISIBLE_DEVICES"),
        ("lassen", 256, 4, 10, "CUDA_VISIBLE_DEVICES"),
        ("frontier", 9472, 8, 7, "ROCR_VISIBLE_DEVICES"),
        ("lumi", 2978, 8, 7, "ROCR_VISIBLE_DEVICES"),
        ("perlmutter", 1536, 4, 32, "CUDA_VISIBLE_DEVICES"),
        ("vista", 600, 1, 72, "CUDA_VISIBLE_DEVICES"),
        ("daint", 1022, 4, 72, "CUDA_VISIBLE_DEVICES"),
        ("leonardo", 3456, 4, 8, "CUDA_VISIBLE_DEVICES"),
        ("jupiter", 5884, 4, 72, "CUDA_VISIBLE_DEVICES"),
        ("aurora", 3000, 12, 8, "ZE_AFFINITY_MASK"),
        ("polaris", 496, 4, 8, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_nodes_are_those_of_the_guides(name: str, nodes: int, gpus: int, cores: int, variable: str):
    site = find_site(name, project=None, home=None)
    assert (site.nodes, site.gpus_per_node, site.cores_per_gpu) == (nodes, gpus, cores)
    assert site.visible_devices == variable


TYPES = """
node_types:
  - {gpu_type: V100, nodes: 2, hosts: ["a*"]}
  - {gpu_type: P100, nodes: 1, hosts: [b1, b2]}
"""


def test_a_site_may_have_several_types_of_gpu(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text("extends: slurm-docker\nnodes: 3\ngpus_per_node: 4\n" + TYPES)
    site = read_site(tmp_path / "mixed.yaml")
    assert [site.type_of(name) for name in ("a7", "b2", "c")] == ["V100", "P100", None]
    assert [node.gpu_type for node in Cluster.at(site, 12).nodes] == ["V100", "V100", "P100"]
    assert [len(node.gpus) for node in Cluster.at(site, 9).nodes] == [4, 4, 1]
    assert [node.gpu_type for node in Cluster.at(site, 6).nodes] == ["V100", "V100"]


def test_two_kinds_of_node_may_have_one_type_of_gpu(tmp_path: Path) -> None:
    alike = TYPES.replace("P100", "V100")
    (tmp_path / "mixed.yaml").write_text("extends: slurm-docker\nnodes: 3\ngpus_per_node: 4\n" + alike)
    nodes = Cluster.at(read_site(tmp_path / "mixed.yaml"), 12).nodes
    assert [(node.gpu_type, len(node.gpus)) for node in nodes] == [("V100", 4)] * 3


def test_nodes_of_all_types_must_add_up(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text("extends: slurm-docker\nnodes: 5\ngpus_per_node: 4\n" + TYPES)
    with pytest.raises(BadInputError, match=r"mixed.yaml:\d+: node_types: must add up to nodes \(5\), got 3"):
        read_site(path)


@pytest.mark.parametrize(
    ("text", "control", "gloo"),
    [
        ("", (), ()),
        ("network: {}", (), ()),
        (
            "network: {control: [hsn*, ib0, eth0.100], gloo: ['ib[0-3]']}",
            ("hsn*", "ib0", "eth0.100"),
            ("ib[0-3]",),
        ),
    ],
)
def test_network_interfaces_are_names_or_patterns(tmp_path: Path, text: str, control, gloo):
    assert read(tmp_path, f"{TEXT}{text}\n").network == NetworkInterfaces(control, gloo)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hsn0", "network: must be a mapping"),
        ("{control: hsn0}", "network.control: must be a list"),
        ("{controll: []}", "network.controll: unknown key 'controll'; did you mean 'control'?"),
        ("{gloo: ['']}", "network.gloo[0]: must be the name of a network interface"),
        ("{gloo: [^lo]}", "network.gloo[0]: must be the name of a network interface"),
        ("{gloo: [eth0, 'hsn0,hsn1']}", "network.gloo[1]: must be the name of a network interface"),
        ("{gloo: [interface-too-long]}", "(at most 15 characters) or a pattern such as hsn*"),
        ("{gloo: [7]}", "network.gloo[0]: must be text"),
    ],
)
def test_refusals_of_network_interfaces(tmp_path: Path, value: str, message: str):
    problem = refused(tmp_path, f"{TEXT}network: {value}\n")
    assert problem.startswith("s.yaml:9: ")
    assert message in problem


@pytest.mark.parametrize(
    ("text", "timeouts"),
    [
        ("", Timeouts()),
        ("timeouts: {}", Timeouts()),
        ("timeouts: {hang: null}", Timeouts()),
        ("timeouts: {hang: 1h, silence: 45s}", Timeouts(hang_s=3600.0, silence_s=45.0)),
        (
            "timeouts: {hang: 10s, meeting: 10s, samples: 5s, lockstep: 1s}",
            Timeouts(10.0, 10.0, samples_s=5.0, lockstep_s=1.0),
        ),
    ],
)
def test_timeouts_that_are_not_given_have_their_defaults(tmp_path: Path, text: str, timeouts):
    assert read(tmp_path, f"{TEXT}{text}\n").timeouts == timeouts


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hang", "15", "timeouts.hang: '15' is not a duration such as 2h, 90m, 1h30m or 2:00:00; write 15s"),
        ("hang", "0s", "timeouts.hang: duration '0s' must be longer than 0 s"),
        ("hang", "5s", "timeouts.hang: must be at least 10s, since a heartbeat comes every 2s, got 5s"),
        ("silence", "9s", "timeouts.silence: must be at least 10s, since a heartbeat comes every 2s, got 9s"),
        ("meeting", "20m", "timeouts.meeting: must be at most hang, which is 15m, got 20m"),
        ("samples", "16m", "timeouts.samples: must be at most hang, which is 15m, got 16m"),
        ("lockstep", "1h", "timeouts.lockstep: must be at most hang, which is 15m, got 1h"),
        ("hangs", "1h", "timeouts.hangs: unknown key 'hangs'; did you mean 'hang'?"),
    ],
)
def test_timeouts_that_contradict_each_other_are_refused(tmp_path: Path, key: str, value: str, message: str):
    assert f"s.yaml:10: {message}" in refused(tmp_path, f"{TEXT}timeouts:\n  {key}: {value}\n")


def test_a_hang_shorter_than_waits_of_ranks_is_refused(tmp_path: Path):
    problem = refused(tmp_path, f"{TEXT}timeouts: {{hang: 4m, meeting: 5m}}\n")
    assert problem.splitlines() == [
        "s.yaml:9: timeouts.meeting: must be at most hang, which is 4m, got 5m",
        "s.yaml:9: timeouts.samples: must be at most hang, which is 4m, got 10m",
    ]


@pytest.mark.parametrize("name", ["perlmutter", "frontier", "lumi"])
def test_sites_with_slingshot_use_it(name: str):
    site = find_site(name, project=None, home=None)
    plugin = site.network.plugin
    assert site.network == NetworkInterfaces(("hsn*",), ("hsn*",), bytes_per_s=100e9, plugin=plugin)
    assert plugin in site.setup
    sockets = site.environment["NCCL_SOCKET_IFNAME"].split(",")
    assert all(fnmatch.fnmatch(interface, "hsn*") for interface in sockets)
    # With it NCCL fails where a job has one node, or the plugin is missing.
    assert "NCCL_NET" not in site.environment
    # alt_read needs the driver property rdzv_get_en at 0, which a job gets by this option.
    wants = site.environment.get("FI_CXI_RDZV_PROTO") == "alt_read"
    assert wants == ("--network=disable_rdzv_get" in site.directives)


LINKS = """
gpu_memory: 16GB
links:
  intra_node: {bytes_per_s: 16.0e9, scaling: 0.7}
  inter_node: {points: [[1.0e6, 0.001], [2.0e6, 0.0015]]}
"""


def test_memory_and_links_of_gpus_are_optional(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("extends: slurm-docker\n")
    bare = read_site(tmp_path / "bare.yaml")
    assert (bare.gpu_memory, bare.memory_of("V100"), bare.links) == (None, None, None)
    types = TYPES.replace("[b1, b2]}", "[b1, b2], gpu_memory: 12GiB}")
    (tmp_path / "full.yaml").write_text("extends: slurm-docker\nnodes: 3\ngpus_per_node: 4\n" + types + LINKS)
    site = read_site(tmp_path / "full.yaml")
    assert [site.memory_of(name) for name in ("V100", "P100", None)] == [16 * 10**9, 12 * 2**30, 16 * 10**9]
    assert site.links == NodeLinks(
        IntraNode(16.0e9, scaling=0.7), InterNode(points=((1.0e6, 0.001), (2.0e6, 0.0015)))
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((", scaling: 0.7", ""), "full.yaml:5: links.intra_node: must have either scaling or points"),
        (("2.0e6", "1.0e6"), "full.yaml:6: links.inter_node.points: must be of at least two sizes"),
        (("0.001", "-1"), "full.yaml:6: links.inter_node.points[0][1]: must be greater than 0"),
        (("16GB", "0"), "full.yaml:3: gpu_memory: "),
        (("  intra_node", "  intra"), "full.yaml:5: links.intra: unknown key 'intra'; did you mean"),
    ],
)
def test_links_that_say_too_little_are_refused(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "full.yaml"
    path.write_text("extends: slurm-docker\n" + LINKS.replace(*change))
    with pytest.raises(BadInputError) as caught:
        read_site(path)
    assert message in str(caught.value)
