from __future__ import annotations

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers import LAUNCHERS, Step

GPUS = Site("s", "lsf", "mpirun", 4, 4, 8, 2**36, (Queue("q"),), environment={"KEY": "a b"})
SLOTS = Site("s", "lsf", "mpirun", 4, 2, 4, 2**36, (Queue("q"),), device="slot")


def step(site: Site, *placement: Placement) -> Step:
    gpus = sum(len(place.gpus) for place in placement)
    return LAUNCHERS["mpirun"](site, Allocation("m", gpus, DATA_PARALLEL, 1.0, placement), ("python", "x"))


def test_each_node_runs_a_program_of_its_own_with_its_own_gpus() -> None:
    found = step(GPUS, Placement("n1", (1, 3)), Placement("n2", (0,)))
    common = ("env", "PYTHONUNBUFFERED=1", "KEY=a b")
    assert found.argv == (
        *("mpirun", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"),
        *("-np", "2", "--host", "n1:2", *common, "CUDA_VISIBLE_DEVICES=1,3", "python", "x", ":"),
        *("-np", "1", "--host", "n2:1", *common, "CUDA_VISIBLE_DEVICES=0", "python", "x"),
    )
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "blaunch"


def test_a_single_rank_goes_where_it_was_placed() -> None:
    found = step(SLOTS, Placement("n2", (1,)))
    assert found.argv[5:9] == ("-np", "1", "--host", "n2:1")
    assert "HETCTL_CORES=2,3" in found.argv
