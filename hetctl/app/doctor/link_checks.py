"""Findings from all-reduces: the speed of a site's links, and GPUs that do not use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetctl.model.check_result import CheckResult, CheckStatus
from hetctl.model.frameworks import FRAMEWORKS
from hetctl.model.site import Site
from hetctl.runtime.driver.probe import ProbeEnd
from hetctl.runtime.frameworks import NCCL
from hetctl.runtime.worker.all_reduce import AllReduce, RankTime

SPEED, LINKS = "all-reduce", "GPU links"
MEBIBYTE = 2**20
NOT_DIRECT = (
    "ranks must see all GPUs of the node: check --gpu-bind and CUDA_VISIBLE_DEVICES, and NCCL_P2P_DISABLE"
)


def link_findings(
    site: Site, end: ProbeEnd, speeds: Sequence[AllReduce], ranks: Sequence[RankTime], error_tail: str
) -> Iterator[CheckResult]:
    """Yield findings from all-reduces; none for a single GPU, or if ranks did not start.

    Parameters
    ----------
    speeds, ranks
        Speeds and times of all groups that ended without error.
    error_tail : str
        Last lines of the log of the last group.
    """
    if end.exit_code != 0 or end.ranks == 1:
        return
    yield speed_finding(end, speeds, error_tail)
    if speeds and site.device == "gpu":
        yield from detour_findings(speeds, ranks)


def speed_finding(end: ProbeEnd, speeds: Sequence[AllReduce], error_tail: str) -> CheckResult:
    """Return a finding on the all-reduce speed of the groups."""
    if not end.groups:
        choices = " or ".join(" with ".join(entry.packages) for entry in FRAMEWORKS.values())
        found = "not measured: the Python of the nodes has no framework that trains on several GPUs"
        return CheckResult(SPEED, CheckStatus.WARNING, found, f"install {choices}, as docs/install.md says")
    seen = f"bus bandwidth {_listed(speeds)}" if speeds else "nothing measured"
    last = end.groups[-1]
    if last.exit_code != 0:
        ending = "hung" if last.exit_code is None else f"ended with exit code {last.exit_code}"
        found = f"{seen}; the {end.framework} group on {', '.join(last.nodes)} {ending}"
        return CheckResult(
            SPEED, CheckStatus.FAILED, found, f"check `network` and `environment`: {error_tail}"
        )
    size = speeds[0].size_bytes // MEBIBYTE
    return CheckResult(
        SPEED, CheckStatus.OK, f"{seen} ({end.framework} over {speeds[0].backend}, {size} MiB)"
    )


def detour_findings(speeds: Sequence[AllReduce], ranks: Sequence[RankTime]) -> Iterator[CheckResult]:
    """Warn about GPUs of a node that communicate through the node's memory."""
    first = speeds[0]
    if first.backend != NCCL:
        found = f"GPUs exchange through host memory ({_listed(speeds)}): {first.framework} goes over "
        yield CheckResult(
            LINKS, CheckStatus.WARNING, found + first.backend, FRAMEWORKS[first.framework].nccl_fix
        )
        return
    between = next((speed for speed in speeds if len(speed.nodes) > 1), None)
    for within in (speed for speed in speeds if speed is not between):
        here = [rank for rank in ranks if rank.node == within.nodes[0]]
        if found := _detour(within, between, here):
            yield CheckResult(LINKS, CheckStatus.WARNING, found, NOT_DIRECT)


def _detour(within: AllReduce, between: AllReduce | None, ranks: Sequence[RankTime]) -> str:
    """Return which GPUs of a node do not communicate directly, with the evidence; "" if none."""
    node = within.nodes[0]
    compared = f"{_number(within)} GB/s" + (f", and {_number(between)} between nodes" if between else "")
    if cut_off := sorted({rank.gpu for rank in ranks if rank.unreached}):
        numbers = ", ".join(map(str, cut_off))
        return f"GPUs {numbers} of node {node} exchange through host memory ({compared})"
    linked = all(rank.links for rank in ranks)
    # Over NVLink the GPUs of a node exchange faster than nodes do.
    if linked and between and within.bus_gb_per_s <= between.bus_gb_per_s:
        return f"GPUs of node {node} have NVLink, and exchange no faster than nodes do ({compared})"
    return ""


def _listed(speeds: Sequence[AllReduce]) -> str:
    places = (f"within {speed.nodes[0]}" if len(speed.nodes) == 1 else "between nodes" for speed in speeds)
    return ", ".join(f"{_number(speed)} GB/s {place}" for speed, place in zip(speeds, places, strict=True))


def _number(speed: AllReduce) -> str:
    return f"{speed.bus_gb_per_s:.3g}"
