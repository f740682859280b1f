"""HetPipe's Figures 3 to 6 and Table 4, simulated, and pipelines over their slowest stages.

    python tests/benchmarks/hetpipe_bench.py [DATA_FOLDER]      (or HETCTL_DATA)

Networks and speeds are derived and fitted, as `hetpipe_networks` says. The paper's numbers, where its text
has them, stand beside the simulated ones.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from hetpipe_networks import (
    ALL_REDUCE,
    BATCH,
    CONTEXT_BYTES,
    FILES,
    GIB,
    LINKS,
    NETWORKS,
    PLENTY,
    SERVER_BYTES_PER_S,
    cluster,
    network,
    random_network,
)
from tables import Figure, Table

from hetctl.methods.pipeline.partition import Cut, Partitioner
from hetctl.methods.pipeline.pipeline_plan import POLICIES, PipelineOptions, PipelinePlan, plan
from hetctl.methods.pipeline.stage_costs import Group, LayerProfile, PipelineCluster, StageCosts, bytes_alone
from hetctl.methods.pipeline.stages import VirtualWorker, virtual_worker
from hetctl.methods.pipeline.throughput import PipelineRun, run_waves
from hetctl.methods.pipeline.transfers import Waves, traffic_of
from hetctl.methods.pipeline.wsp import Bounds
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
PAPER_ED = {
    "VGG-19": ("530", "572", "606", "103", "< 339", "< 339"),
    "ResNet-152": ("516", "538", "580", "298", "about 415", "about 415"),
}
"""What section 8.3 says of ED with local servers on each of `SETS` but the first, and of ED and HD."""
FITTED = {("VGG-19", 1), ("VGG-19", 4), ("ResNet-152", 1)}
"""Networks and numbers of nodes whose throughput in Table 4 is an input, besides all of Horovod."""
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

ORDER = "VRGQ"
"""Of the GPUs in a virtual worker, as the paper's Table 3 names them."""
VARIED_WAVES = 96


@dataclass(frozen=True)
class Assumed:
    """What the paper does not tell, or not by number."""

    inter_bytes_per_s: float = 1 / LINKS.inter_s_per_byte
    context_gib: float = CONTEXT_BYTES / GIB
    server_bytes_per_s: float = SERVER_BYTES_PER_S
    in_order: bool = False

    def on(self, nodes: Sequence[str]) -> PipelineCluster:
        """Return the cluster with these nodes."""
        gpus = cluster(nodes)
        return replace(
            gpus,
            links=replace(LINKS, inter_s_per_byte=1 / self.inter_bytes_per_s),
            context_bytes=dict.fromkeys(gpus.memory_bytes, round(self.context_gib * GIB)),
            server_bytes_per_s=self.server_bytes_per_s,
        )


ASSUMED = {
    "as in Table 4": Assumed(),
    "links between nodes of 2 GB/s": Assumed(inter_bytes_per_s=2e9),
    "links of 1.5 GB/s": Assumed(inter_bytes_per_s=1.5e9),
    "links of 1 GB/s": Assumed(inter_bytes_per_s=1e9),
    "servers that add 2.5 GB/s": Assumed(server_bytes_per_s=2.5e9),
    "2 GiB for TensorFlow": Assumed(context_gib=2.0),
    "GPUs in the paper's order": Assumed(in_order=True),
    "that order, 1 GiB for TensorFlow": Assumed(in_order=True, context_gib=1.0),
}


class Varies(NamedTuple):
    """How the passes of virtual workers vary: noise of each, and the last virtual worker's mean time."""

    noise: float = 0.0
    slower: float = 1.0


VARIATIONS = {
    "equal": Varies(),
    "noise of 0.1": Varies(noise=0.1),
    "noise of 0.3": Varies(noise=0.3),
    "one slower by 5 %": Varies(slower=1.05),
    "one slower by 10 %": Varies(slower=1.1),
    "one slower by 20 %": Varies(slower=1.2),
    "one slower by 30 %": Varies(slower=1.3),
}


class Varying(tuple[float, float]):
    """Seconds of the passes of a stage, drawn anew whenever they are read."""

    def __new__(cls, seconds: tuple[float, float], worker: int, varies: Varies, draw: random.Random) -> Self:
        """Keep the times of the passes of a virtual worker's stage."""
        self = super().__new__(cls, seconds)
        self.mean = varies.slower if worker == len(NODES) - 1 else 1.0
        self.noise, self.draw = varies.noise, draw
        return self

    def _factor(self) -> float:
        return self.mean * self.draw.lognormvariate(0.0, self.noise)

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at) * self._factor()

    def __iter__(self) -> Iterator[float]:
        factor = self._factor()
        return iter([seconds * factor for seconds in super().__iter__()])


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
            reached = planned.simulated(COUNT).throughput / limit
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
        equal[-1] += "*" * ((name, len(NODES)) in FITTED)
        rows += [(name, _data_parallel(name, NODES), *equal, *best), ("paper", *PAPER_4[name])]
    header = ("network", "data-parallel*", "np", "ed", "hd", "ed, local", "best", "best, local")
    return _table(
        "HetPipe, Figure 4: images/s of four nodes, by policy", header, rows, f"{IN_BRACKETS} *: inputs."
    )


def table_4(_quick: bool = False) -> Table:
    """Return the throughput as nodes with slower GPUs are added; one node alone is one virtual worker."""
    rows = []
    for name in _networks():
        equal = [
            _replayed(name, nodes, "ed" if nodes[1:] else "np", LOCAL) + "*" * ((name, len(nodes)) in FITTED)
            for nodes in SETS
        ]
        rows += [
            (name, "data-parallel*", *(_data_parallel_on_all(name, nodes) for nodes in SETS)),
            ("", "paper: Horovod", *PAPER_TABLE_4[name, "Horovod"]),
            ("", "ed, local", *equal),
            ("", "paper: ed, local", *PAPER_TABLE_4[name, "ed, local"]),
            ("", "best, local", *(_best(name, nodes, LOCAL) for nodes in SETS)),
        ]
    title = "HetPipe, Table 4: images/s as whimpy GPUs are added"
    note = f"{IN_BRACKETS} *: inputs, since speeds and links were fitted to the paper's numbers below them."
    return _table(title, ("network", "method", "4 V", "+ 4 R", "+ 4 Q", "+ 4 G"), rows, note)


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


def causes(quick: bool = False) -> Table:
    """Return Table 4 and Figure 4 under other assumptions about what the paper does not tell."""
    rows = []
    for name in _networks():
        rows.append((name, "paper", *PAPER_ED[name]))
        for label, assumed in list(ASSUMED.items())[: 2 if quick else None]:
            rows.append(("", label, *_under(name, assumed)))
    header = ("network", "assumed", "+ 4 R", "+ 4 Q", "+ 4 G", "MB", "ed", "hd")
    note = (
        "Images/s with `ed, local` on 8, 12 and 16 GPUs, and with `ed` and `hd` on 16. MB: data between "
        "nodes for a minibatch on 16 GPUs. The order of GPUs in a virtual worker is that of the paper's "
        "Table 3, where otherwise the best one is taken."
    )
    return _table("HetPipe: images/s under other assumptions", header, rows, note)


def _under(name: str, assumed: Assumed) -> Iterator[str]:
    for nodes in SETS[1:]:
        gpus, waves = assumed.on(nodes), Waves(0, LOCAL)
        planned = _planned(name, nodes, "ed", waves, gpus, in_order=assumed.in_order)
        run = planned.simulated(COUNT)
        yield f"{BATCH * run.throughput:.0f}"
    yield f"{_crossing_bytes(planned, _networks()[name]) / 1e6:.0f}"
    for policy in ("ed", "hd"):
        gpus, waves = assumed.on(NODES), Waves(0, ROUND_ROBIN)
        planned = _planned(name, NODES, policy, waves, gpus, in_order=assumed.in_order)
        yield f"{BATCH * planned.simulated(COUNT).throughput:.0f}"


def _crossing_bytes(planned: PipelinePlan, profile: LayerProfile) -> int:
    """Return the bytes that a minibatch of the first virtual worker sends between nodes, both ways."""
    neighbours = pairwise(planned.virtual_workers[0].stages)
    return sum(2 * profile.layers[a.last].activation_bytes for a, b in neighbours if a.node != b.node)


def in_order(profile: LayerProfile, gpus: PipelineCluster, group: Group, in_flight: int) -> VirtualWorker:
    """Return the best partition over GPUs in this order, each with a stage; by dynamic programming.

    Raises
    ------
    InfeasibleError
        If there is none that fits into memory.
    """
    costs, count = StageCosts(profile, gpus, recompute=False), len(profile.layers)
    receive = [np.zeros(count + 1), *(costs.receive_s[int(a[0] == b[0])] for a, b in pairwise(group))]
    least, begins = np.where(np.arange(count + 1) == 0, 0.0, np.inf), []
    for at, gpu in enumerate(group):
        after = receive[at + 1] if at + 1 < len(group) else receive[0]
        seconds = costs.compute_s(gpus.type_of(gpu), len(group) - 1 - at, in_flight)
        slowest = np.maximum(least[:-1, None], seconds + receive[at][:-1, None] + after[None, 1:])
        begins.append(slowest.argmin(axis=0))
        least = np.append(np.inf, slowest.min(axis=0))
    if np.isinf(least[-1]):
        raise InfeasibleError("no partition in this order fits")
    cuts, last = [], count - 1
    for gpu, begin in zip(reversed(group), reversed(begins), strict=True):
        cuts.append(Cut(int(begin[last]), last, gpu))
        last = cuts[-1].first - 1
    return virtual_worker(profile, gpus, costs, cuts[::-1], in_flight)


def variation(quick: bool = False) -> Table:
    """Return what waiting D = 4 leaves if virtual workers vary, by how they do."""
    kinds = list(VARIATIONS.items())[: 2 if quick else None] if _networks() else []
    rows = [_varied_row(*kind) for kind in kinds]
    rows = [("paper", "", "", "0.62"), *rows] if _networks() else []
    header = ("virtual workers", "images/s, D = 0", "images/s, D = 4", "waiting over D = 0")
    note = (
        f"VGG-19 on 16 GPUs with `ed, local`, {VARIED_WAVES} waves. Noise is lognormal, drawn for each pass."
    )
    return _table("HetPipe: waiting with D = 4 if virtual workers vary", header, rows, note)


def _varied_row(label: str, varies: Varies) -> tuple[str, ...]:
    rates, waits = zip(*(_varied(varies, distance) for distance in (0, 4)), strict=True)
    return (label, *(f"{BATCH * rate:.0f}" for rate in rates), f"{waits[1] / waits[0]:.2f}")


def _varied(varies: Varies, distance: int) -> tuple[float, float]:
    """Return minibatches/s, and the mean share of the time for which a virtual worker waits."""
    planned, draw = _planned("VGG-19", NODES, "ed", Waves(distance, LOCAL)), random.Random(0)
    inputs = [
        one._replace(passes=tuple(Varying(seconds, number, varies, draw) for seconds in one.passes))
        for number, one in enumerate(planned.pipelines)
    ]
    runs = run_waves(inputs, Bounds(planned.in_flight, distance), VARIED_WAVES)
    count = VARIED_WAVES * planned.in_flight
    end_s = max(run.completed_s[count - 1] for run in runs)
    waited_s = [sum(end - begin for begin, end in run.waits_s if end <= end_s) for run in runs]
    return len(runs) * count / end_s, statistics.fmean(waited_s) / end_s


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
    planned = PipelinePlan((gpus.gpus,), (worker,), traffic_of([worker], profile, gpus, LOCAL), COUNT)
    return f"{BATCH * planned.simulated(COUNT).throughput:.0f}"


def _replayed(name: str, nodes: Sequence[str], policy: str, placement: str) -> str:
    waves = Waves(0, placement)
    planned = _planned(name, nodes, policy, waves)
    return _shown(planned, planned.simulated(COUNT))


def _planned(
    name: str,
    nodes: Sequence[str],
    policy: str,
    waves: Waves,
    gpus: PipelineCluster | None = None,
    *,
    in_order: bool = False,
) -> PipelinePlan:
    """Return a plan with the paper's number of minibatches in flight, or with as many as fit."""
    gpus = gpus or cluster(nodes)
    for number in range(IN_FLIGHT[name][len(nodes) - 1], 0, -1):
        with suppress(InfeasibleError):
            options = PipelineOptions(number, waves=waves, recompute=False)
            planned = plan(_networks()[name], gpus, policy, options)
            return _reordered(planned, _networks()[name], gpus, waves) if in_order else planned
    raise InfeasibleError(f"{name} does not fit {nodes}")


def _reordered(
    planned: PipelinePlan, profile: LayerProfile, gpus: PipelineCluster, waves: Waves
) -> PipelinePlan:
    """Return the same virtual workers with their GPUs in the order of `ORDER`."""
    workers = []
    for worker in planned.virtual_workers:
        group = sorted(
            ((stage.node, stage.gpu) for stage in worker.stages), key=lambda g: ORDER.index(gpus.type_of(g))
        )
        workers.append(in_order(profile, gpus, tuple(group), worker.in_flight))
    traffic = traffic_of(workers, profile, gpus, waves.ps_placement)
    return replace(planned, virtual_workers=tuple(workers), traffic=traffic)


def _best(name: str, nodes: Sequence[str], placement: str) -> str:
    profile, gpus, waves = _networks()[name], cluster(nodes), Waves(0, placement)
    planned = plan(profile, gpus, "best", PipelineOptions(waves=waves, recompute=False))
    return _shown(planned, planned.simulated(COUNT))


def _shown(planned: PipelinePlan, run: PipelineRun) -> str:
    return f"{BATCH * run.throughput:.0f} ({sum(worker.in_flight for worker in planned.virtual_workers)})"


def _waits(name: str, nodes: Sequence[str], distance: int) -> tuple[float, float, float]:
    """Return the time over data-parallel's, the share of it that is waiting, and the idle share of that."""
    waves = Waves(distance, LOCAL)
    planned = _planned(name, nodes, "ed", waves)
    run = planned.simulated(COUNT + 4 * distance)
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
    for section in (table, figure_3, figure_4, table_4, figures_5_and_6, causes, variation):
        print(f"{section()}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
