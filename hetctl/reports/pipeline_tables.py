"""Pipelines as sections: those in training, their staleness, and the stages in a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hetctl.model.pipelines import PipelineLayout, PipelineStatus, WaveCheck
from hetctl.model.plan import Allocation, Plan
from hetctl.model.profile import some_of
from hetctl.reports.sections import Section, more
from hetctl.reports.units import NONE, device_word, format_bytes, format_percent, format_rate

WAITS = "waits: of first stages, for waves of others (D); idle: bubbles of all stages"
RATES = "rates in samples/s: simulated for the layout, and measured in the last epoch"
MOST_VIOLATIONS = 10
"""Violations of the bounds of staleness that are printed; JSON has all."""
MOST_LAYOUTS = 4
"""Different layouts whose stages are shown."""
MOST_STAGES = 32
"""Stages of a layout that are shown."""
MOST_NAMES = 3
"""Members of a layout that are named."""


def pipeline_sections(pipelines: Sequence[PipelineStatus], *, on_page: bool = False) -> Iterator[Section]:
    """Yield tables with a line for each pipeline; a page also has its rates."""
    rows = []
    for one in pipelines:
        use = one.last.use if one.last else None
        shares = (use.gpu_busy_fraction, use.wave_wait_fraction, use.idle_fraction) if use else (None,) * 3
        rates = (one.predicted_rate, one.last.rate if one.last else None) if on_page else ()
        stage = use.slowest if use else NONE
        figures = (*map(format_rate, rates), stage, *map(format_percent, shares))
        rows.append((one.member, describe_layout(one.layout), *figures))
    if not rows:
        return
    shown = (">rate\npredicted", ">rate\nmeasured") if on_page else ()
    headers = ("member", "layout", *shown, "slowest\nstage", ">busy", ">waits", ">idle")
    notes = [(WAITS, "dim"), *([(RATES, "dim")] if on_page else [])]
    yield Section("Pipelines", headers=headers, rows=rows, fold="member", gap=0, notes=notes)
    if sent := [_bytes(one) for one in pipelines if one.last]:
        parameters = ">\nparameters"
        headers = ("member", ">within nodes:\npasses", parameters, ">between nodes:\npasses", parameters)
        yield Section("Bytes sent in their last epoch", headers=headers, rows=sent, fold="member")


def _bytes(one: PipelineStatus) -> Sequence[str]:
    assert one.last is not None
    links = (one.last.use.within_node, one.last.use.between_nodes)
    return (one.member, *(format_bytes(n) for link in links for n in (link.passes, link.parameters)))


def wave_check_table(checks: Sequence[WaveCheck]) -> Section:
    """Return a table with the staleness of pipelines beside its bounds, and a line for each violation."""
    headers = (
        "\nmember", ">in\nflight", ">\nD", ">mini-\nbatches", ">local\nlargest", ">\nbound",
        ">global\nlargest", ">\nbound", ">viola-\ntions",
    )  # fmt: skip
    rows = []
    for one in checks:
        counts = (one.in_flight, one.distance, one.minibatches, one.local, one.local_bound)
        overall = (NONE, NONE) if one.overall is None else (f"{one.overall}", f"{one.overall_bound}")
        rows.append((one.member, *(f"{n:,}" for n in counts), *overall, f"{len(one.violations):,}"))
    found = [f"{one.member}: {line}" for one in checks for line in one.violations]
    notes = [(line, "") for line in found[:MOST_VIOLATIONS]]
    notes += more(len(found) - MOST_VIOLATIONS, "more")
    return Section(headers=headers, rows=rows, fold="\nmember", notes=notes)


def describe_layout(layout: PipelineLayout) -> str:
    """Return ``2 x 3 stages, 4 in flight, D = 1``; unequal virtual workers have ``3 + 2 stages``."""
    counts = [len(stages) for stages in layout.workers]
    equal = len(set(counts)) == 1
    stages = f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))
    # A single virtual worker waits for no other one.
    distance = f", D = {layout.distance}" if len(counts) > 1 else ""
    return f"{stages} stages, {layout.in_flight} in flight{distance}"


def stage_sections(plan: Plan, device: str) -> Iterator[Section]:
    """Yield a table of the stages of each layout in a plan.

    Parameters
    ----------
    device : str
        Device type of the site: ``gpu`` or ``slot``.
    """
    found = _by_layout(a for planned in plan.rounds for a in planned.allocations)
    for layout, names, allocation in found[:MOST_LAYOUTS]:
        yield _stages(layout, names, allocation, device)
    if notes := more(len(found) - MOST_LAYOUTS):
        yield Section(notes=notes)


def _by_layout(allocations: Iterable[Allocation]) -> list[tuple[PipelineLayout, list[str], Allocation]]:
    """Return each layout with its members, and one of their allocations."""
    found: dict[object, tuple[PipelineLayout, list[str], Allocation]] = {}
    for one in allocations:
        if one.pipeline:
            _, names, _ = found.setdefault((one.pipeline, one.placement), (one.pipeline, [], one))
            names += [one.member] * (one.member not in names)
    return list(found.values())


def _stages(layout: PipelineLayout, names: Sequence[str], allocation: Allocation, device: str) -> Section:
    places = [(place.node, str(gpu)) for place in allocation.placement for gpu in place.gpus]
    rows = [
        (
            *(str(number) if stage == 0 else "", str(stage), f"{plan.first}..{plan.last}"),
            *(*places[plan.rank], f"{plan.held}, recomputed" if plan.recomputes else str(plan.held)),
        )
        for number, stages in enumerate(layout.workers)
        for stage, plan in enumerate(stages)
    ]
    notes = more(len(rows) - MOST_STAGES, "more")
    if any(layout.node_bytes):
        waves = ", waves and parameter servers" if len(layout.workers) > 1 else ""
        most = format_bytes(max(layout.node_bytes))
        notes += [(f"Minibatches on their way{waves} take up to {most} of a node's memory.", "dim")]
    word = device_word(device, 1)
    return Section(
        f"Stages of {some_of(names, MOST_NAMES)}: {describe_layout(layout)}",
        headers=("virtual worker", ">stage", "layers", "node", f">{word}", ">minibatches held"),
        rows=rows[:MOST_STAGES],
        fold="node",
        notes=notes,
    )
