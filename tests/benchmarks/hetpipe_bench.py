"""HetPipe's Figures 3 to 6 and Table 4, simulated, and pipelines over their slowest stages.

    python tests/benchmarks/hetpipe_bench.py [DATA_FOLDER]      (or HETCTL_DATA)

Networks and speeds are derived and fitted, as `hetpipe_networks` says. The paper's numbers, where its text
has them, stand beside the simulated ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hetpipe_networks import ALL_REDUCE, BATCH, FILES, NETWORKS, PLENTY, cluster, network, random_network
from tables import Figure, Table

from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.partition import Partitioner
from hetctl.methods.pipeline.pipeline_plan import POLICIES, PipelineOptions, PipelinePlan, Waves, plan
from hetctl.methods.pipeline.simulate import PipelineRun, simulate_plan
from hetctl.methods.pipeline.stage_costs import StageCosts, bytes_alone
from hetctl.methods.pipeline.stages import virtual_worker
from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import LOCAL, ROUND_ROBIN

WORKERS = (("VVVV",), ("RRRR",), ("GGGG",), ("QQQQ",), ("V", "R", "G", "Q"), ("VV", "QQ"), ("RR", "GG"))
"""The virtual workers of the paper's Table 3, by node."""
NODES = ("VVVV", "RRRR", "GGGG", "QQQQ")
SETS = (("VVVV",), ("VVVV", "RRRR"), ("VVVV", "RRRR", "QQQQ"), NODES)
"""Of nodes, in the paper's Table 4."""
NUMBERS = range(1, 8)
"""Of minibatches in flight in a virtual worker."""
IN_FLIGHT = {"VGG-19": (5, 4, 5, 5), "ResNet-152": (5, 5, 6, 7)}
"""Minibatches in flight of each virtual worker in the paper's Table 4, on each of its `SETS`."""
DISTANCES = (0, 4, 32)
RANDOM_NETWORKS = 10
COUNT = 32
"""Of waves in a simulation."""

PAPER_4: dict[str, tuple[str, ...]] = {
    "VGG-19": ("339 (16)", "< 339", "< 339", "< 339", "606 (20)", "", ""),
    "ResNet-152": ("415 (12)", "< 415", "about 415", "about 415", "580 (28)", "", ""),
}
PAPER_TABLE_4: dict[tuple[str, str], tuple[str, ...]] = {
    ("VGG-19", "Horovod"): ("164", "205", "265", "339"),
    ("VGG-19", "ed, local"): ("300 (5)", "530 (16)", "572 (20)", "606 (20)"),
    ("ResNet-152", "Horovod"): ("233", "353", "415", "X"),
    ("ResNet-152", "ed, local"): ("256 (5)", "516 (20)", "538 (24)", "580 (28)"),
}
PAPER_6: dict[tuple[str, int, int], tuple[str, ...]] = {
    ("ResNet-152", 3, 0): ("0.65", "", ""),
    ("ResNet-152", 4, 0): ("0.61", "", ""),
    ("VGG-19", 4, 0): ("0.71", "1", "0.18"),
    ("VGG-19", 4, 4): ("0.51", "0.62", "0.18"),
    ("VGG-19", 4, 32): ("0.53", "", ""),
}
"""Time to an accuracy over Horovod's, waiting over that with D = 0, and idle time over waiting: by network,
nodes and D. The paper gives the last two without naming the network."""

DERIVED = "PipeDream's profiles of VGG-16 and ResNet-50, made deeper; speeds fitted to the paper's Table 4."
IN_BRACKETS = (
    "In brackets: minibatches in flight in all virtual workers, each with as many as in the paper's Table 4"
    " or, if these do not fit, as many as do. Behind data-parallel: GPUs that hold the network. X: not all."
)


def table(quick: bool = False) -> Table:
    """Hold simulated pipelines against their slowest stages."""
    count = 2 if quick else RANDOM_NETWORKS
    named = [*_networks().items(), *((f"random {seed}", random_network(seed)) for seed in range(count))]
    rows, worst = [], 0.0
    for name, profile in named:
        gpus, waves = cluster(NODES, PLENTY), Waves(0, LOCAL)
        cells = []
        for policy in POLICIES:
            planned = plan(profile, gpus, policy, PipelineOptions(waves=waves, recompute=False))
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
    """Return the throughput of the whole cluster by policy, under the paper's."""
    columns = [*((policy, ROUND_ROBIN) for policy in ("np", "ed", "hd")), ("ed", LOCAL)]
    rows = []
    for name in _networks():
        equal = [_replayed(name, NODES, *column) for column in columns]
        best = [_best(name, NODES, placement) for placement in (ROUND_ROBIN, LOCAL)]
        rows += [(name, _data_parallel(name, NODES), *equal, *best), ("paper", *PAPER_4[name])]
    header = ("network", "data-parallel", "np", "ed", "hd", "ed, local", "best", "best, local")
    return _table("HetPipe, Figure 4: images/s of four nodes, by policy", header, rows, IN_BRACKETS)


def table_4(_quick: bool = False) -> Table:
    """Return the throughput as nodes with slower GPUs are added; one node alone is one virtual worker."""
    rows = []
    for name in _networks():
        equal = [_replayed(name, nodes, "ed" if nodes[1:] else "np", LOCAL) for nodes in SETS]
        rows += [
            (name, "data-parallel", *(_data_parallel_on_all(name, nodes) for nodes in SETS)),
            ("", "paper: Horovod", *PAPER_TABLE_4[name, "Horovod"]),
            ("", "ed, local", *equal),
            ("", "paper: ed, local", *PAPER_TABLE_4[name, "ed, local"]),
            ("", "best, local", *(_best(name, nodes, LOCAL) for nodes in SETS)),
        ]
    title = "HetPipe, Table 4: images/s as whimpy GPUs are added"
    return _table(title, ("network", "method", "4 V", "+ 4 R", "+ 4 Q", "+ 4 G"), rows, IN_BRACKETS)


def figures_5_and_6(_quick: bool = False) -> Table:
    """Return times over data-parallel's, and how long virtual workers wait, by clock distance."""
    rows = []
    for name in _networks():
        for count in (3, 4):
            waited = [_waits(name, SETS[count - 1], distance) for distance in DISTANCES]
            for distance, (ratio, waiting, idle) in zip(DISTANCES, waited, strict=True):
                ours = (f"{ratio:.2f}", f"{waiting / waited[0][1]:.2f}", f"{idle:.2f}")
                paper = PAPER_6.get((name, count, distance), ("", "", ""))
                rows.append((f"{name}, {4 * count} GPUs", str(distance), *ours, *paper))
    named = ("time over data-parallel's", "waiting over D = 0", "idle of waiting")
    header = ("network, ed with local servers", "D", *named, *(f"paper: {what}" for what in named))
    return _table("HetPipe, Figures 5 and 6: waiting by clock distance", header, rows, "Times of an epoch.")


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
    costs = StageCosts(profile, gpus, recompute=False)
    try:
        cuts = Partitioner(costs, gpus, in_flight).partition(gpus.gpus)
    except InfeasibleError:
        return "-"
    worker = virtual_worker(profile, gpus, costs, cuts, in_flight)
    planned = PipelinePlan("np", (worker,), worker.bottleneck_s, worker.bottleneck_s, 1 / worker.period_s)
    return f"{BATCH * simulate_plan(planned, profile, gpus, Waves(COUNT, LOCAL), COUNT).throughput:.0f}"


def _replayed(name: str, nodes: Sequence[str], policy: str, placement: str) -> str:
    waves = Waves(0, placement)
    planned = _planned(name, nodes, policy, waves)
    return _shown(planned, simulate_plan(planned, _networks()[name], cluster(nodes), waves, COUNT))


def _planned(name: str, nodes: Sequence[str], policy: str, waves: Waves) -> PipelinePlan:
    """Return a plan with the paper's number of minibatches in flight, or with as many as fit."""
    for number in range(IN_FLIGHT[name][len(nodes) - 1], 0, -1):
        with suppress(InfeasibleError):
            return plan(
                _networks()[name],
                cluster(nodes),
                policy,
                PipelineOptions(number, waves=waves, recompute=False),
            )
    raise InfeasibleError(f"{name} does not fit {nodes}")


def _best(name: str, nodes: Sequence[str], placement: str) -> str:
    profile, gpus, waves = _networks()[name], cluster(nodes), Waves(0, placement)
    planned = plan(profile, gpus, "best", PipelineOptions(waves=waves, recompute=False))
    return _shown(planned, simulate_plan(planned, profile, gpus, waves, COUNT))


def _shown(planned: PipelinePlan, run: PipelineRun) -> str:
    return f"{BATCH * run.throughput:.0f} ({sum(worker.in_flight for worker in planned.virtual_workers)})"


def _waits(name: str, nodes: Sequence[str], distance: int) -> tuple[float, float, float]:
    """Return the time over data-parallel's, the share of it that is waiting, and the idle share of that."""
    waves = Waves(distance, LOCAL)
    planned = _planned(name, nodes, "ed", waves)
    run = simulate_plan(planned, _networks()[name], cluster(nodes), waves, COUNT + 4 * distance)
    waiting, idle = run.waiting_fraction, run.idle_fraction
    ratio = _all_reduced(name, nodes)[0] / (BATCH * run.throughput)
    return ratio, waiting, idle / waiting if waiting else 0.0


def _data_parallel(name: str, nodes: Sequence[str]) -> str:
    rate, gpus = _all_reduced(name, nodes)
    return f"{rate:.0f} ({gpus})"


def _data_parallel_on_all(name: str, nodes: Sequence[str]) -> str:
    rate, gpus = _all_reduced(name, nodes)
    return f"{rate:.0f} ({gpus})" if gpus == sum(map(len, nodes)) else "X"


def _all_reduced(name: str, nodes: Sequence[str]) -> tuple[float, int]:
    """Return images/s of data-parallel training on all GPUs that hold the network, and their number.

    As in Horovod, the gradients of a layer are reduced as soon as the slowest GPU has them, beside the
    backward passes of the layers before it, one tensor after another.
    """
    profile, where = _networks()[name], cluster(nodes)
    types = [
        kind for kind in map(where.type_of, where.gpus) if bytes_alone(profile) <= where.free_bytes[kind]
    ]
    share = 2 * (len(types) - 1) / len(types)
    bytes_per_s = ALL_REDUCE["several nodes" if len(nodes) > 1 else "one node"]
    slowest = max(set(types), key=lambda kind: float(profile.forward_s(kind).sum()))
    computed_s, reduced_s = float(profile.forward_s(slowest).sum()), 0.0
    backward = zip(profile.backward_s(slowest)[::-1], profile.parameter_bytes[::-1], strict=True)
    for backward_s, size in backward:
        computed_s += backward_s
        reduced_s = max(reduced_s, computed_s) + share * size / bytes_per_s if size else reduced_s
    return BATCH * len(types) / max(computed_s, reduced_s), len(types)


def main() -> int:
    """Print all tables."""
    if len(sys.argv) > 1:
        os.environ["HETCTL_DATA"] = sys.argv[1]
    for section in (table, figure_3, figure_4, table_4, figures_5_and_6):
        print(f"{section()}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
