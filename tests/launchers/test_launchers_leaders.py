"""How the leaders of nodes are started beside the ranks, and ranks one by one."""

from __future__ import annotations

from pathlib import Path

from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Queue, Site
from hetctl.launchers.leaders import LEADERS
from hetctl.launchers.seats import gpus_of, rank_command, seat_of

COMMAND = ("python", "-m", "hetctl.runtime.exchange", "round.json")


def site(launcher: str, **changes: object) -> Site:
    values = {"nodes": 4, "gpus_per_node": 4, "cores_per_node": 8, "memory_per_node": 2**33}
    queues = (Queue("main"),)
    return Site("s", "slurm", launcher, queues=queues, **{**values, **changes})  # type: ignore[arg-type]


def test_srun_starts_one_on_each_node_although_ranks_hold_all_of_it() -> None:
    found = LEADERS["srun"](site("srun", mpi="pmix"), ("n2", "n1"), COMMAND)
    assert found.argv == (
        *("srun", "--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"),
        *("--gres=none", "--nodelist=n2,n1", "--kill-on-bad-exit=1", "--unbuffered", "--mpi=pmix"),
        *COMMAND,
    )


def test_mpirun_starts_one_program_on_each_node_in_the_order_of_the_nodes() -> None:
    found = LEADERS["mpirun"](site("mpirun", environment={"A": "b c"}), ("n2", "n1"), COMMAND)
    each = ("env", "PYTHONUNBUFFERED=1", "A=b c", *COMMAND)
    assert found.argv[-len(each) * 2 - 9 :] == (
        *("-np", "1", "--host", "n2:1", *each),
        *(":", "-np", "1", "--host", "n1:1", *each),
    )
    assert found.environment["OMPI_MCA_plm_rsh_agent"] == "blaunch"


def test_ranks_have_a_gpu_and_a_name_each_in_the_order_of_the_placement() -> None:
    placement = (Placement("n2", (1, 3)), Placement("n1", (0,)))
    gpus = list(gpus_of(Allocation("m", 3, DATA_PARALLEL, 1.0, placement)))
    assert gpus == [("n2", 1), ("n2", 3), ("n1", 0)]
    seats = [seat_of(gpu) for gpu in gpus]
    assert [seat.member for seat in seats] == ["rank-n2-1", "rank-n2-3", "rank-n1-0"]
    assert [seat.placement for seat in seats] == [(Placement(node, (gpu,)),) for node, gpu in gpus]
    command = rank_command(gpus[1], Path("/runs/r/round-0000"), "gpu", "python")
    assert command[3:] == ("/runs/r/round-0000/crew.json", "--seat", "rank-n2-3", "--device", "gpu")
