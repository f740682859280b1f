"""Command lines of container engines, each as its manual has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.cluster.launchers import ResourceSet
from hetctl.cluster.launchers.agents import agents_step
from hetctl.cluster.launchers.container import ENGINES, PACKAGE, node_command
from hetctl.model.site import CONTAINER_ENGINES, Container, Queue, Site

SITE = Site("s", "slurm", "srun", 4, 4, 8, 2**33, (Queue("main"),))
RUN = Path("/p/.hetctl/runs/digits-001")
P, H = "/p:/p", f"{PACKAGE}:{PACKAGE}"
COMMANDS = {
    "apptainer": f"apptainer exec --bind={P} --bind={H}:ro --bind=/d:/data --pwd=/p --nv -x img",
    "singularity": f"singularity exec --bind={P} --bind={H}:ro --bind=/d:/data --pwd=/p --nv -x img",
    "podman": "podman run --rm --network=host --ipc=host --pid=host --env-host --security-opt=label=disable"
    f" --volume={P} --volume={H}:ro --volume=/d:/data --workdir=/p --device=nvidia.com/gpu=all -x img",
    "podman-hpc": "podman-hpc run --rm --network=host --ipc=host --pid=host --env-host"
    f" --volume={P} --volume={H}:ro --volume=/d:/data --workdir=/p --gpu -x img",
    "shifter": f"shifter --volume={P} --volume={H} --volume=/d:/data --workdir=/p --module=gpu"
    " -x --image=img",
    "pyxis": f"--container-mounts={P},{H}:ro,/d:/data --container-workdir=/p -x --container-image=img",
    "charliecloud": f"ch-run --write --bind={P} --bind={H} --bind=/d:/data --cd=/p -x img --",
}
INSIDE = (f"PYTHONPATH={RUN}/python", "PYTHONNOUSERSITE=1", "python3", "-m", "agent")


@pytest.mark.parametrize("engine", CONTAINER_ENGINES)
def test_a_command_runs_in_the_container(engine: str) -> None:
    container = Container("img", engine, binds=("/d:/data",), options=("-x",))
    found = node_command(replace(SITE, container=container), RUN, "/outside/python", "-m", "agent")
    assert found == (*COMMANDS[engine].split(), "env", *INSIDE)


def test_amd_gpus_and_none_are_seen_as_asked() -> None:
    def options(engine: str, gpus: str) -> set[str]:
        container = Container("img", engine, gpus=gpus)
        return set(node_command(replace(SITE, container=container), RUN, "python"))

    assert options("apptainer", "amd") - options("apptainer", "none") == {"--rocm"}
    assert options("podman", "amd") - options("podman", "none") == set(ENGINES["podman"].gpus["amd"])


def test_agents_of_a_step_are_in_the_container_and_srun_is_not() -> None:
    container = Container("/i/torch.sif", "apptainer", python="/opt/conda/bin/python")
    site = replace(SITE, container=container)
    address = RUN / "job-0000.driver.json"
    step = agents_step(site, "agents", [ResourceSet("n1", (0,))], address, ("pytorch",), "/outside/python")
    at = step.argv.index("apptainer")
    assert (step.argv[0], step.argv[at - 1]) == ("srun", "--unbuffered")
    assert "/outside/python" not in step.argv
    assert step.argv[step.argv.index("/i/torch.sif") + 1 :][:4] == (
        "env",
        INSIDE[0],
        INSIDE[1],
        "/opt/conda/bin/python",
    )


def test_without_a_container_the_python_of_the_job_runs_alone() -> None:
    assert node_command(SITE, RUN, "/p/python", "-m", "agent") == ("/p/python", "-m", "agent")
