"""Containers in which agents run, and so all processes that train; the driver runs outside.

hetctl itself comes from outside: its folder is bound, and PYTHONPATH names it. Any image with a framework
will thus do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path

from hetctl.model.site import CONTAINER_ENGINES, Container, Site
from hetctl.model.values import dataclass

PACKAGE = Path(__file__).resolve().parents[2]
"""Folder of this hetctl."""
NVIDIA, AMD = "nvidia", "amd"


@dataclass(frozen=True)
class Engine:
    """Command line of a container engine, in the order of its words.

    Parameters
    ----------
    command : tuple of str
        Words up to the options below.
    bind, workdir : str
        Options up to their values: ``PATH:PATH``, and the working directory.
    joined : bool
        True if one option has all binds, separated by commas.
    read_only : str
        End of a bind that is read only.
    gpus : mapping of str to tuple of str
        Options by which GPUs of a vendor are seen inside; none where they are without.
    image : str
        Option up to the image; empty if the image is a word of its own.
    end : tuple of str
        Words between the image and the command.
    """

    command: tuple[str, ...]
    bind: str
    workdir: str
    joined: bool = False
    read_only: str = ":ro"
    gpus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    image: str = ""
    end: tuple[str, ...] = ()


# https://apptainer.org/docs/user/latest/cli/apptainer_exec.html
_APPTAINER = Engine(("apptainer", "exec"), "--bind=", "--pwd=", gpus={NVIDIA: ("--nv",), AMD: ("--rocm",)})
# Network, memory and processes are the node's: ranks connect to those of other nodes, and share memory.
_PODMAN = ("run", "--rm", "--network=host", "--ipc=host", "--pid=host")
ENGINES: Mapping[str, Engine] = {
    "apptainer": _APPTAINER,
    # https://docs.sylabs.io/guides/latest/user-guide/cli/singularity_exec.html
    "singularity": Engine(("singularity", "exec"), "--bind=", "--pwd=", gpus=_APPTAINER.gpus),
    # https://docs.podman.io/en/latest/markdown/podman-run.1.html; GPUs by the Container Device Interface
    # (https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html), or by
    # https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html.
    "podman": Engine(
        ("podman", *_PODMAN, "--env-host", "--security-opt=label=disable"),
        "--volume=",
        "--workdir=",
        gpus={
            NVIDIA: ("--device=nvidia.com/gpu=all",),
            AMD: ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"),
        },
    ),
    # https://docs.nersc.gov/development/containers/podman-hpc/overview/
    "podman-hpc": Engine(
        ("podman-hpc", *_PODMAN, "--env-host"), "--volume=", "--workdir=", gpus={NVIDIA: ("--gpu",)}
    ),
    # https://docs.nersc.gov/development/containers/shifter/how-to-use/
    "shifter": Engine(
        ("shifter",),
        "--volume=",
        "--workdir=",
        read_only="",
        gpus={NVIDIA: ("--module=gpu",)},
        image="--image=",
    ),
    # Options of srun, which come last before the command (https://github.com/NVIDIA/pyxis).
    "pyxis": Engine(
        (), "--container-mounts=", "--container-workdir=", joined=True, image="--container-image="
    ),
    # https://hpc.github.io/charliecloud/ch-run.html; --write makes the folders that are bound.
    "charliecloud": Engine(("ch-run", "--write"), "--bind=", "--cd=", read_only="", end=("--",)),
}
assert tuple(ENGINES) == CONTAINER_ENGINES


def package_link(folder: Path) -> Path:
    """Return the link to hetctl's package, below the folder that PYTHONPATH names in containers."""
    return folder / "python" / PACKAGE.name


def project_of(folder: Path) -> Path:
    """Return the project's folder, with the ensemble file and its modules, of one as in `node_command`."""
    home = folder.parents[1]
    return home.parent if home.name == ".hetctl" else home


def node_command(site: Site, folder: Path, python: str, *words: str) -> tuple[str, ...]:
    """Return the command line of a Python on a node, in the site's container if it has one.

    Parameters
    ----------
    folder : Path
        Folder of the run, of a profiling job or of a test: two levels below ``$HETCTL_HOME``.
    python : str
        Interpreter outside of containers.
    words : str
        Arguments of the interpreter.
    """
    if site.container is None:
        return (python, *words)
    # Modules of the user outside of this process's choice must not come before those of the image.
    path = f"PYTHONPATH={package_link(folder).parent}"
    inside = ("env", path, "PYTHONNOUSERSITE=1", site.container.python, *words)
    return (*_prefix(site.container, folder), *inside)


def _prefix(container: Container, folder: Path) -> Iterator[str]:
    engine, project = ENGINES[container.engine], project_of(folder)
    binds = [f"{project}:{project}", f"{PACKAGE}:{PACKAGE}{engine.read_only}"]
    binds += [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    yield from engine.command
    yield from [engine.bind + ",".join(binds)] if engine.joined else [engine.bind + bind for bind in binds]
    yield engine.workdir + str(project)
    yield from engine.gpus.get(container.gpus, ())
    yield from container.options
    yield engine.image + container.image
    yield from engine.end
