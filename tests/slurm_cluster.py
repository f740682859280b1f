"""A throw-away Slurm cluster on this machine: several nodes with fake GPUs, and accounting.

Run it by hand with ``python tests/slurm_cluster.py FOLDER``; it stays up until Ctrl-C. All its state
lies in FOLDER. It needs Debian's packages slurmctld, slurmd, slurm-client, munge, slurmdbd,
slurm-wlm-mysql-plugin and mariadb-server, but neither root nor systemd.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DAEMONS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd")
PROGRAMS = ("munge", "munged", "mariadb", "mariadb-install-db", *DAEMONS[1:-1], "sacct", "sbatch", "srun")
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
USER = pwd.getpwuid(os.geteuid()).pw_name
LONGEST_FOLDER = 60
"""Characters; Unix sockets lie below the folder, and their paths must have fewer than 108."""

SLURM_CONF = """\
ClusterName=hetctl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
# PMIx keeps its sockets here, so nodes must not share it.
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
# CPUs, memory and GPUs are declared, not found: no cgroups, no binding.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,requeue_delay=0
PriorityType=priority/basic
# Jobs of the partition "urgent" end those of "main" that are in their way.
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
# Short timers, so that tests of failures are short.
InactiveLimit=0
KillWait=2
CompleteWait=0
WaitTime=0
MessageTimeout=10
TCPTimeout=2
SlurmctldTimeout=10
SlurmdTimeout=5
UnkillableStepTimeout=120
ReturnToService=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd_port}
# The daemon's munge socket; without it clients would ask the machine's own.
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
JobCompType=jobcomp/none
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory_mb} Gres=gpu:{gpus} State=UNKNOWN
{node_lines}
PartitionName=DEFAULT Nodes={node_list} State=UP MaxTime=INFINITE DefaultTime=10 DefMemPerCPU=100
PartitionName=main Default=YES PriorityTier=1
PartitionName=urgent PriorityTier=9
"""

NODE_LINE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={slurmdbd_port}
SlurmUser={user}
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadb_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""

GRANT = """\
create database slurm_acct_db;
create user slurm@127.0.0.1 identified by 'slurm';
grant all on slurm_acct_db.* to slurm@127.0.0.1;
"""

LAB = """\
extends: slurm
nodes: 4
gpus_per_node: 2
cores_per_node: 8
memory_per_node: 24000MiB
queues: [{name: main, max_nodes: 4, max_wall: 1h}]
"""


class ClusterError(RuntimeError):
    """The cluster did not come up, or a node is not what the caller thinks."""


class SlurmCluster:
    """A Slurm cluster whose daemons are children of this process.

    Parameters
    ----------
    folder : Path
        Absolute, short (see `LONGEST_FOLDER`) and the cluster's own: `start` empties it.
    gpus, cpus, memory_mb : int
        Of each node, fake all of them. Agents look at each rank's memory while this machine uses nearly as
        much as a node of the site has.
    """

    def __init__(
        self, folder: Path, *, nodes: int = 4, gpus: int = 2, cpus: int = 8, memory_mb: int = 32000
    ) -> None:
        if len(str(folder)) > LONGEST_FOLDER:
            raise ClusterError(f"{folder}: longer than {LONGEST_FOLDER} characters, too long for sockets")
        self.folder = folder
        self.nodes = tuple(f"n{index}" for index in range(1, nodes + 1))
        self.gpus, self.cpus, self.memory_mb = gpus, cpus, memory_mb
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def conf(self) -> Path:
        """The file that ``SLURM_CONF`` names."""
        return self.folder / "etc/slurm.conf"

    def environment(self) -> dict[str, str]:
        """Return what a process needs in its environment to use the cluster, MPI included.

        The nodes share one /dev/shm, so Open MPI must not use shared memory between them; they also
        share the machine's few cores, so a waiting rank must not spin.
        """
        return {
            "SLURM_CONF": str(self.conf),
            "OMPI_MCA_btl": "self,tcp",
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def lab(self, folder: Path, keys: str = "") -> dict[str, str]:
        """Describe the cluster to a project as its site, with more keys; return its environment."""
        sites = folder / "site-configs"
        sites.mkdir(parents=True, exist_ok=True)
        (sites / "lab.yaml").write_text(LAB + keys)
        return {**self.environment(), "HETCTL_SITE": "lab"}

    def start(self) -> None:
        """Bring all daemons up, in about five seconds; whatever an earlier start left is ended first."""
        if self.folder.exists() and any(self.folder.iterdir()) and not self.conf.exists():
            raise ClusterError(f"{self.folder}: holds something else than a cluster; choose an empty folder")
        end_processes(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self._make_folders()
            self._start_guard()
            ports = self._write_configuration()
            self._start_munge()
            self._start_accounting(ports["mariadb_port"])
            self._start_slurm()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every daemon, step and task of the cluster; its state is thrown away, so at once."""
        end_processes(self.folder)
        for daemon in self._daemons.values():
            if daemon.stdin:
                daemon.stdin.close()
            daemon.wait()
        self._daemons.clear()

    def crash_node(self, name: str) -> None:
        """Make a node lose power: its slurmd, its steps and all their tasks are gone at once.

        The controller is told, as it would take it about 25 seconds to find out.
        """
        daemon = self._daemons.pop(f"slurmd.{name}", None)
        if daemon is None:
            raise ClusterError(f"node {name!r} is not up")
        daemon.kill()
        daemon.wait()
        _kill_until_gone(lambda: _processes_of_node(self.folder, name))
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=crashed")

    def boot_node(self, name: str) -> None:
        """Start a crashed node again; Slurm takes it back within seconds."""
        if name not in self.nodes or f"slurmd.{name}" in self._daemons:
            raise ClusterError(f"node {name!r} is no crashed node of {', '.join(self.nodes)}")
        self._start_node(name)
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def suspend_node(self, name: str) -> None:
        """Let a node stand still with all its processes; the controller counts it as lost."""
        for pid in _processes_of_node(self.folder, name):
            os.kill(pid, signal.SIGSTOP)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=suspended")

    def wake_node(self, name: str, *, cut_off: bool = False) -> None:
        """Let a node go on; `cut_off`: without its daemons, which would end what it has of lost jobs."""
        for pid in _processes_of_node(self.folder, name):
            if not (cut_off and _is_daemon_with(pid, f"{self.folder}/")):
                os.kill(pid, signal.SIGCONT)
        if not cut_off:
            self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def stop_controller(self) -> None:
        """End slurmctld; it comes back with `start_controller` and what it has saved."""
        controller = self._daemons.pop("slurmctld")
        controller.terminate()
        controller.wait()

    def start_controller(self) -> None:
        """Start slurmctld again."""
        self._spawn("slurmctld", "slurmctld", "-D")
        self._wait_for("scontrol", "ping")

    def run(self, *argv: str, seconds: float = 60, **environment: str) -> str:
        """Run a command against the cluster and return its output; `ClusterError` if it fails."""
        done = subprocess.run(
            argv,
            env={**os.environ, "PATH": SEARCH_PATH, **self.environment(), **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _make_folders(self) -> None:
        for name in ("etc", "log", "state", "spool", "munge", "mysql"):
            (self.folder / name).mkdir(parents=True)
        for path in (self.folder, self.folder / "munge"):
            # Whatever the umask: munge refuses a socket that others cannot reach.
            path.chmod(0o755)
        for name in self.nodes:
            (self.folder / "tmp" / name).mkdir(parents=True)
            (self.folder / "spool" / name).mkdir()
        (self.folder / "dev").mkdir()
        for index in range(self.gpus):
            # A GPU must be a character device; a link to one will do.
            (self.folder / f"dev/gpu{index}").symlink_to("/dev/null")

    def _write_configuration(self) -> dict[str, int]:
        host = socket.gethostname().split(".")[0]
        first, second, third, *node_ports = _free_ports(3 + len(self.nodes))
        ports = {"slurmctld_port": first, "slurmdbd_port": second, "mariadb_port": third}
        values = {
            **ports,
            "folder": self.folder,
            "host": host,
            "user": USER,
            "cpus": self.cpus,
            "gpus": self.gpus,
            "memory_mb": self.memory_mb,
            "node_list": ",".join(self.nodes),
            "node_lines": "\n".join(
                NODE_LINE.format(name=name, host=host, port=port)
                for name, port in zip(self.nodes, node_ports, strict=True)
            ),
        }
        self.conf.write_text(SLURM_CONF.format(**values))
        devices = f"{self.folder}/dev/gpu[0-{self.gpus - 1}]"
        (self.folder / "etc/gres.conf").write_text(
            f"NodeName={','.join(self.nodes)} Name=gpu File={devices}\n"
        )
        # Nothing uses cgroups, but slurmd loads the plugin; this one does not look for a mounted /sys.
        (self.folder / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        slurmdbd_conf = self.folder / "etc/slurmdbd.conf"
        slurmdbd_conf.touch(mode=0o600)
        slurmdbd_conf.write_text(SLURMDBD_CONF.format(**values))
        return ports

    def _start_guard(self) -> None:
        """Start a process that cleans up as soon as this one is gone, even if by SIGKILL."""
        self._daemons["guard"] = subprocess.Popen(
            [sys.executable, __file__, "--guard", str(self.folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{what}-file={folder}/{what}" for what in ("key", "pid", "log", "seed")]
        self._spawn("munged", "munged", "--foreground", f"--socket={folder}/socket", *files)
        self._wait_for("munge", "-n", "-S", f"{folder}/socket")

    def _start_accounting(self, port: int) -> None:
        folder = self.folder / "mysql"
        options = (
            "--no-defaults",
            f"--user={USER}",
            f"--datadir={folder}/data",
            # A server that starts deletes the temporary tables in its folder, also those of others.
            f"--tmpdir={folder}",
            "--innodb-log-file-size=8M",
            "--innodb-buffer-pool-size=32M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-flush-method=nosync",
            "--skip-name-resolve",
        )
        self.run("mariadb-install-db", *options, "--auth-root-authentication-method=normal", "--skip-test-db")
        listen = (f"--socket={folder}/socket", "--bind-address=127.0.0.1", f"--port={port}")
        self._spawn("mariadbd", "mariadbd", *options, *listen, f"--pid-file={folder}/pid")
        client = ("mariadb", "--no-defaults", "--user=root", f"--socket={folder}/socket", "-e")
        self._wait_for(*client, "select 1")
        self.run(*client, GRANT)
        self._spawn("slurmdbd", "slurmdbd", "-D")
        self._wait_for("sacctmgr", "--noheader", "show", "cluster")
        self.run("sacctmgr", "--immediate", "add", "cluster", "hetctl")

    def _start_slurm(self) -> None:
        self._spawn("slurmctld", "slurmctld", "-D", "-i")
        for name in self.nodes:
            self._start_node(name)
        self._wait_for("scontrol", "ping")
        self._wait_until(self.all_idle, "all nodes are idle")

    def _start_node(self, name: str) -> None:
        self._spawn(f"slurmd.{name}", "slurmd", "-D", "-N", name)

    def all_idle(self) -> bool:
        """Say whether every node is up and free."""
        states = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split()
        return states == ["idle"] * len(self.nodes)

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.folder / f"log/{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PATH": SEARCH_PATH, "SLURM_CONF": str(self.conf)},
                start_new_session=True,
            )

    def _wait_for(self, *argv: str) -> None:
        def succeeds() -> bool:
            with contextlib.suppress(ClusterError):
                self.run(*argv)
                return True
            return False

        self._wait_until(succeeds, " ".join(argv))

    def _wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > end:
                cause = f"died: {', '.join(dead)}" if dead else f"not within {seconds:g} s"
                raise ClusterError(f"waiting for {what!r}: {cause}\n{self._log_tails(dead)}")
            time.sleep(0.05)

    def _log_tails(self, names: Sequence[str], lines: int = 8) -> str:
        logs = [self.folder / f"log/{name}.out" for name in names or self._daemons]
        tails = [
            (log.stem, log.read_text(errors="replace").splitlines()[-lines:]) for log in logs if log.exists()
        ]
        return "\n".join(f"{name}: {line}" for name, tail in tails for line in tail)


def missing_programs() -> list[str]:
    """Name the programs of the cluster that are not installed here."""
    return [program for program in PROGRAMS if shutil.which(program, path=SEARCH_PATH) is None]


def cluster_processes(folder: Path) -> list[int]:
    """Return the ids of all processes that run for the cluster in `folder`, whoever started them."""
    return [pid for pid in _pids() if _task_variables(pid, folder) or _is_daemon_with(pid, f"{folder}/")]


def end_processes(folder: Path) -> None:
    """Kill all that runs for the cluster in `folder`."""
    _kill_until_gone(lambda: cluster_processes(folder))


def _kill_until_gone(find: Callable[[], Sequence[int]]) -> None:
    while found := find():
        # All are stopped before any is killed: what outlives another may act on its end, as nothing does on a
        # node without power. An agent would report its ranks as killed, and the watcher that srun forks would
        # end the step on all nodes. Parents have lower numbers. They are stopped first and killed last: the
        # kernel wakes a stopped child whose parent ends (SIGHUP, SIGCONT), and srun then ends its step.
        for number, pids in ((signal.SIGSTOP, sorted(found)), (signal.SIGKILL, sorted(found, reverse=True))):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.02)


def _processes_of_node(folder: Path, name: str) -> list[int]:
    log, variable = f"{folder}/log/slurmd.{name}.log", f"SLURMD_NODENAME={name}"
    return [pid for pid in _pids() if variable in _task_variables(pid, folder) or _is_daemon_with(pid, log)]


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _task_variables(pid: int, folder: Path) -> set[str]:
    """Return the environment of a process inside a job of the cluster; empty for any other process."""
    try:
        variables = set(Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"))
    except OSError:
        return set()
    inside_job = any(variable.startswith("SLURM_JOB_ID=") for variable in variables)
    return variables if inside_job and f"SLURM_CONF={folder}/etc/slurm.conf" in variables else set()


def _is_daemon_with(pid: int, path: str) -> bool:
    """Say whether a process is a daemon of a cluster that has a file at or below `path` open.

    Daemons overwrite their environment when they set their title, so only their files tell.
    """
    process = Path(f"/proc/{pid}")
    try:
        # Debian names them slurmd-wlm and so on.
        if (process / "exe").readlink().name.removesuffix("-wlm") not in DAEMONS:
            return False
        return any(str(link.readlink()).startswith(path) for link in (process / "fd").iterdir())
    except OSError:
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [int(item.getsockname()[1]) for item in sockets]


def _run_by_hand(folder: Path) -> None:
    cluster = SlurmCluster(folder)
    cluster.start()
    for name, value in cluster.environment().items():
        print(f"export {name}={value}", flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        cluster.stop()


def _guard(folder: Path) -> None:
    sys.stdin.read()
    end_processes(folder)


if __name__ == "__main__":
    if sys.argv[1] == "--guard":
        _guard(Path(sys.argv[2]))
    else:
        _run_by_hand(Path(sys.argv[1]).resolve())
