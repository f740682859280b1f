"""HetPipe's Figures 3 and 4 and Table 4, simulated, and pipelines over their slowest stages.

    python tests/benchmarks/hetpipe_bench.py [DATA_FOLDER]      (or HETCTL_DATA)

All of it is derived, as `hetpipe_networks` says: compare rows with each other, not with the paper's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hetpipe_networks import BATCH, FILES, LINKS, NETWORKS, PLENTY, cluster, network, random_network
from tables import Figure, Table

from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.partition import Partitioner
from hetctl.methods.pipeline.pipeline_plan import POLICIES, PipelineOptions, PipelinePlan, Waves, plan
from hetctl.methods.pipeline.simulate import simulate_plan
from hetctl.methods.pipeline.stage_costs import StageCosts
from hetctl.methods.pipeline.stages import virtual_worker
from hetctl.methods.pipeline.sync_cost import LOCAL, ROUND_ROBIN
from hetctl.model.errors import InfeasibleError

WORKERS = (("VVVV",), ("RRRR",), ("GGGG",), ("QQQQ",), ("V", "R", "G", "Q"), ("VV", "QQ"), ("RR", "GG"))
"""The virtual workers of the paper's Table 3, by node."""
NODES = ("VVVV", "RRRR", "GGGG", "QQQQ")
SETS = (("VVVV",), ("VVVV", "RRRR"), ("VVVV", "RRRR", "QQQQ"), NODES)
"""Of nodes, in the paper's Table 4."""
NUMBERS = range(1, 8)
"""Of minibatches in flight in a virtual worker."""
RANDOM_NETWORKS = 10
COUNT = 32
"""Of waves in a simulation."""

DERIVED = "Derived from PipeDream's profiles of VGG-16 and ResNet-50, and from data sheets; batches of 32."
IN_BRACKETS = "In brackets: minibatches in flight in all virtual workers, as many as are best."


def table(quick: bool = False) -> Table:
    """Hold simulated pipelines against their slowest stages."""
    count = 2 if quick else RANDOM_NETWORKS
    named = [*_networks().items(), *((f"random {seed}", random_network(seed)) for seed in range(count))]
    rows, worst = [], 0.0
    for name, profile in named:
        gpus, waves = cluster(NODES, PLENTY), Waves(0, LOCAL)
        cells = []
        for policy in POLICIES:
            planned = plan(profile, gpus, policy, PipelineOptions(waves=waves))
            limit = len(planned.virtual_workers) / planned.bottleneck_s
            reached = simulate_plan(planned, profile, gpus, waves, COUNT).throughput / limit
            worst = max(worst, 1 / reached)
            cells.append(f"{reached:.3f} ({planned.in_flight})")
        rows.append((name, *cells))
    return Table(
        "Pipelines: simulated throughput over the limit of the slowest stage",
        ("network", *POLICIES),
        tuple(rows),
        (Figure("limit of the slowest stage over simulated throughput, worst", worst, 1 / 0.95),),
        "HetPipe's four nodes, with memory for enough minibatches in flight: in brackets, how many in each "
        f"virtual worker. {DERIVED} Random ones are of 60 layers.",
    )


def figure_3(quick: bool = False) -> Table:
    """Return the throughput of the paper's virtual workers, each alone, over N_m."""
    numbers = NUMBERS[:: 3 if quick else 1]
    rows = [
        (name, "".join(nodes), *(_alone(profile, nodes, number) for number in numbers))
        for name, profile in _networks().items()
        for nodes in WORKERS
    ]
    title = "HetPipe, Figure 3: images/s of a virtual worker, by minibatches in flight"
    return _table(title, ("network", "GPUs", *map(str, numbers)), rows, "-: no memory for so many.")


def figure_4(_quick: bool = False) -> Table:
    """Return the throughput of the whole cluster by policy."""
    columns = [(policy, ROUND_ROBIN) for policy in POLICIES] + [("ed", LOCAL), ("best", LOCAL)]
    rows = [
        (name, _data_parallel(name, NODES), *(_fastest(name, NODES, *column) for column in columns))
        for name in _networks()
    ]
    header = ("network", "data-parallel", *POLICIES, "ed, local", "best, local")
    return _table("HetPipe, Figure 4: images/s of four nodes, by policy", header, rows, IN_BRACKETS)


def table_4(_quick: bool = False) -> Table:
    """Return the throughput as nodes with slower GPUs are added; one node alone is one virtual worker."""
    rows = []
    for name in _networks():
        equal = [_fastest(name, nodes, "ed" if nodes[1:] else "np", LOCAL) for nodes in SETS]
        best = [_fastest(name, nodes, "best", LOCAL) for nodes in SETS]
        rows.append((name, "data-parallel", *(_data_parallel(name, nodes) for nodes in SETS)))
        rows += [(name, "ed, local", *equal), (name, "best, local", *best)]
    title = "HetPipe, Table 4: images/s as whimpy GPUs are added"
    return _table(title, ("network", "method", "4 V", "+ 4 R", "+ 4 Q", "+ 4 G"), rows, IN_BRACKETS)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Table:
    if not rows:
        return Table(title, (), (), note=f"Not run: HETCTL_DATA names no folder with {' and '.join(FILES)}.")
    return Table(title, header, tuple(rows), note=f"{DERIVED} {note}")


@cache
def _networks() -> dict[str, LayerProfile]:
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    there = all((folder / file).is_file() for file in FILES)
    return {name: network(name, folder) for name in NETWORKS} if there else {}


def _alone(profile: LayerProfile, nodes: Sequence[str], in_flight: int) -> str:
    """Return the images/s of one virtual worker with all GPUs, whose own waves cost nothing."""
    gpus = cluster(nodes)
    costs = StageCosts(profile, gpus)
    try:
        cuts = Partitioner(costs, gpus, in_flight).partition(gpus.gpus)
    except InfeasibleError:
        return "-"
    worker = virtual_worker(profile, gpus, costs, cuts, in_flight)
    planned = PipelinePlan("np", (worker,), worker.bottleneck_s, worker.bottleneck_s, 1 / worker.period_s)
    return f"{BATCH * simulate_plan(planned, profile, gpus, Waves(COUNT, LOCAL), COUNT).throughput:.0f}"


def _fastest(name: str, nodes: Sequence[str], policy: str, placement: str) -> str:
    profile, gpus, waves = _networks()[name], cluster(nodes), Waves(0, placement)
    planned = plan(profile, gpus, policy, PipelineOptions(waves=waves))
    rate = simulate_plan(planned, profile, gpus, waves, COUNT).throughput
    return f"{BATCH * rate:.0f} ({sum(worker.in_flight for worker in planned.virtual_workers)})"


def _data_parallel(name: str, nodes: Sequence[str]) -> str:
    """Return the images/s of an all-reduce over all GPUs that hold the network, after each minibatch.

    The slowest one sets the pace; the ring goes over each node's link once, and overlaps nothing.
    """
    profile, gpus = _networks()[name], cluster(nodes)
    costs = StageCosts(profile, gpus)
    times = [float(costs.compute_s(gpus.type_of(gpu), 1)[0, -1]) for gpu in gpus.gpus]
    seconds = [time_s for time_s in times if time_s < float("inf")]
    sent = 2 * (len(seconds) - 1) / len(seconds) * float(profile.parameter_bytes.sum())
    step_s = max(seconds) + LINKS.seconds(sent, same_node=len(nodes) == 1)
    return f"{BATCH * len(seconds) / step_s:.0f} ({len(seconds)})"


def main() -> int:
    """Print all tables."""
    if len(sys.argv) > 1:
        os.environ["HETCTL_DATA"] = sys.argv[1]
    for section in (table, figure_3, figure_4, table_4):
        print(f"{section()}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
