"""Partitions and virtual workers of pipelines: exact, in time, and no slower than the paper's.

Networks are PipeDream's profiles where HETCTL_DATA has them, and made-up ones; GPU types differ by
those of `hetpipe_networks`, as are links and memory. Waves are sent to servers near by (`local`), with D = 0.

    python tests/benchmarks/pipeline_bench.py
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetpipe_networks import FILES, GIB, MEMORY_BYTES, NETWORKS, TIME_RATIOS, cluster, network
from pipeline_exact import least_bottleneck_s
from tables import Figure, Table

from hetctl.methods.pipeline.partition import Partitioner
from hetctl.methods.pipeline.pipeline_plan import PipelineOptions, PipelinePlan, plan
from hetctl.methods.pipeline.stage_costs import UNNAMED, Layer, LayerProfile, PipelineCluster, StageCosts
from hetctl.model.errors import InfeasibleError

SEARCH_S = 2.0

TIMED = {
    "VVRRGGQQ in one node": ("VVRRGGQQ",),
    "VVVV QQQQ": ("VVVV", "QQQQ"),
    "VV RR GG QQ": ("VV", "RR", "GG", "QQ"),
    "VR VG VQ RG": ("VR", "VG", "VQ", "RG"),
    "V R G Q V R G Q": ("V", "R", "G", "Q") * 2,
    "VRGQ VRGQ": ("VRGQ", "VRGQ"),
    "VVR GQ GGQ": ("VVR", "GQ", "GGQ"),
}
CLUSTERS = {
    "VVVV RRRR GGGG QQQQ": ("VVVV", "RRRR", "GGGG", "QQQQ"),
    "VVVV RRRR": ("VVVV", "RRRR"),
    "VVVV RRRR QQQQ": ("VVVV", "RRRR", "QQQQ"),
    "VV QQQQ": ("VV", "QQQQ"),
    "VVVV GGG QQ": ("VVVV", "GGG", "QQ"),
    "VVQQ RRGG": ("VVQQ", "RRGG"),
    "RRRR": ("RRRR",),
    "V R G Q": ("V", "R", "G", "Q"),
    "4 x VVVV, 4 x QQQQ": ("VVVV",) * 4 + ("QQQQ",) * 4,
    "VRGQ RRR GGQQQ VV": ("VRGQ", "RRR", "GGQQQ", "VV"),
}


def made_up(seed: int, layers: int, minibatch_s: float = 0.3) -> LayerProfile:
    """Times are lognormal; activations shrink and weights grow with depth, as in convolutional networks."""
    draw = random.Random(seed)
    seconds = [draw.lognormvariate(0, 1) for _ in range(layers)]
    scale = minibatch_s / sum(seconds)
    return LayerProfile(
        tuple(
            Layer(
                f"l{depth}",
                {UNNAMED: taken * scale / 3},
                {UNNAMED: taken * scale * 2 / 3},
                int(draw.uniform(0.5, 1.5) * 6e9 / layers * (1 - depth / layers)),
                int(draw.uniform(0.5, 1.5) * 6e8 / layers * 2 * depth / layers),
            )
            for depth, taken in enumerate(seconds)
        )
    ).derived(TIME_RATIOS)


@dataclass(frozen=True)
class Case:
    """A network on a cluster, planned in all ways; throughputs in minibatches/s, 0 without room."""

    network: str
    cluster: str
    paper: dict[str, float]
    best: PipelinePlan
    seconds: float

    @property
    def over(self) -> float:
        """The best of the paper's policies over `best`."""
        return max(self.paper.values()) / self.best.throughput


def cases(quick: bool) -> Iterator[Case]:
    """Plan every network on every cluster that has room for it."""
    for title, profile in networks().items():
        for name in [*CLUSTERS][: 3 if quick else None]:
            where = cluster(CLUSTERS[name])
            paper = {policy: _throughput(profile, where, policy) for policy in ("np", "ed", "hd")}
            began = time.perf_counter()
            try:
                best = plan(profile, where, "best", PipelineOptions(seconds=SEARCH_S))
            except InfeasibleError:
                continue
            yield Case(title, name, paper, best, time.perf_counter() - began)


def _throughput(profile: LayerProfile, where: PipelineCluster, policy: str) -> float:
    try:
        return plan(profile, where, policy).throughput
    except InfeasibleError:
        return 0.0


def networks() -> dict[str, LayerProfile]:
    """Return the profiles: measured ones only where there is data."""
    return {"60 layers": made_up(0, 60), "200 layers": made_up(1, 200), **_measured()}


def _measured() -> dict[str, LayerProfile]:
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    if not all((folder / file).exists() for file in FILES):
        return {}
    return {name: network(name, folder) for name in NETWORKS}


def partition_s(layers: int, nodes: tuple[str, ...], in_flight: int) -> float:
    """Return the seconds that one exact partition takes."""
    profile, where = made_up(2, layers), cluster(nodes)
    began = time.perf_counter()
    Partitioner(StageCosts(profile, where), where, in_flight).partition(where.gpus)
    return time.perf_counter() - began


def over_brute_force(seed: int) -> float:
    """Return the bottleneck of a small case over the least one; 1 where there is no room for either."""
    draw = random.Random(seed)
    gpus = [draw.choice("VRGQ") for _ in range(draw.randint(1, 4))]
    nodes = [draw.randrange(3) for _ in gpus]
    rows = [tuple(g for g, n in zip(gpus, nodes, strict=True) if n == node) for node in sorted(set(nodes))]
    where = replace(
        cluster(()),
        nodes=tuple(rows),
        memory_bytes={name: draw.randint(1, 24) * GIB for name in MEMORY_BYTES},
    )
    profile, in_flight = made_up(seed, draw.randint(1, 7)), draw.randint(1, 9)
    exact = least_bottleneck_s(profile, where, where.gpus, in_flight)
    found = Partitioner(StageCosts(profile, where), where, in_flight).bottleneck_s(where.gpus)
    return 1.0 if exact == found else max(found / exact, exact / found)


def table(quick: bool = False) -> Table:
    """All of it."""
    found = list(cases(quick))
    timed = {name: partition_s(200, nodes, in_flight=15) for name, nodes in TIMED.items()}
    small = [over_brute_force(seed) for seed in range(20 if quick else 200)]
    rows = [
        (
            f"{case.network}: {case.cluster}",
            *(f"{case.paper[policy]:.2f}" if case.paper[policy] else "-" for policy in ("np", "ed", "hd")),
            f"{case.best.throughput:.2f}",
            str(len(case.best.virtual_workers)),
            str(case.best.virtual_workers[0].in_flight),
            f"{case.best.bottleneck_s / case.best.lower_bound_s:.3f}",
            f"{case.seconds:.1f}",
        )
        for case in found
    ]
    slowest = max(timed, key=timed.__getitem__)
    gain = statistics.median(1 / case.over for case in found if case.over)
    return Table(
        "Pipelines: minibatches/s by policy",
        ("network and cluster", "np", "ed", "hd", "best", "VWs", "N_m", "over LP bound", "seconds"),
        tuple(rows),
        (
            Figure(
                f"fastest of np, ed, hd over `best`, worst of {len(found)}", max(c.over for c in found), 1.0
            ),
            Figure(f"partition over brute force, worst of {len(small)}", max(small), 1.0),
            Figure(f"seconds for 200 layers on 8 GPUs, slowest ({slowest})", timed[slowest], 1.0),
        ),
        f"'-': too little memory. In the median `best` is {gain:.2f} times the fastest of the paper's"
        " policies.",
    )


def main() -> int:
    """Print the table."""
    print(table("--quick" in sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
