"""docs/results.md: a part of it computed again, and the orders that the papers' tables have."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import capes
import fleet
import pytest
import replay

PAGE = (Path(__file__).parents[4] / "docs/results.md").read_text(encoding="utf-8")
OWN, LOCKSTEP = "each member at its own pace", "every member of a flotilla at the slowest one's pace"
FIXED = ("fixed-8", "fixed-4", "fixed-2", "fixed-1")


def table(title: str) -> dict[str, dict[str, float]]:
    """Return the first number of each cell of the table whose heading ends so, by row and column."""
    found = re.search(rf"^### [^\n]*{re.escape(title)}\n+(?:[^|#]*\n)?(\|.*?)(?:\n\n|\Z)", PAGE, re.M | re.S)
    assert found, f"docs/results.md has no table {title}"
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    (_, *columns), _, *rows = lines
    return {
        name: {c: float(cell.split()[0]) for c, cell in zip(columns, cells, strict=True) if cell}
        for name, *cells in rows
    }


def rounded(value: float, digits: int) -> object:
    """Return the tolerance of a number on the page; another machine may differ in the last bit."""
    return pytest.approx(value, abs=0.51 * 10**-digits)


@pytest.mark.parametrize(("pace", "gpus"), [(OWN, 160), (LOCKSTEP, 20), (OWN, 60)])
def test_speedups_are_what_the_page_says(pace: str, gpus: int) -> None:
    row = table(pace)[str(gpus)]
    for planner in replay.SHARING:
        mean = statistics.fmean(replay.speedups(planner, gpus, replay.SEEDS, pace == LOCKSTEP))
        assert row[planner] == rounded(mean, 2), planner


def test_ratios_and_waiting_times_are_what_the_page_says() -> None:
    results = [replay.run("fluid", 20, seed) for seed in replay.SEEDS]
    ratios = [result.ratio for result in results]
    row = table("work known, 12 to 16 epochs")["20"]
    assert row["fluid"] == rounded(statistics.median(ratios), 4)
    assert row["fluid, worst"] == rounded(max(ratios), 4)
    waited = table("seconds that a GPU waits")["20"]["fluid"]
    assert waited == rounded(statistics.fmean(map(replay.idle_s, results)), 0)


def test_flotillas_and_running_lengths_are_what_the_page_says() -> None:
    results = [replay.run("flotilla", 160, seed) for seed in replay.SEEDS]
    row = table("total time of `flotilla`, and flotillas")["160"]
    assert row["flotillas"] == rounded(statistics.fmean(result.rounds for result in results), 0)
    assert row["seconds"] == rounded(statistics.fmean(result.makespan_s for result in results), 0)
    lengths = table("seconds that a network runs, 80 GPUs")
    first = replay.spread(replay.run("flotilla", 80, replay.SEEDS[0]), 0)
    assert tuple(lengths["flotilla 0, an input"].values())[:2] == tuple(rounded(value, 0) for value in first)


@pytest.mark.parametrize("strategy", ["doubling", *FIXED])
def test_hours_without_contention_are_what_the_page_says(strategy: str) -> None:
    hours = [capes.run(strategy, "none", seed).mean_jct_s / 3600 for seed in replay.SEEDS]
    assert hour_rows()[strategy]["none"] == rounded(statistics.fmean(hours), 2)


def hour_rows() -> dict[str, dict[str, float]]:
    return table("mean hours from arrival to completion")


def test_planners_come_in_the_order_of_fleets_figures() -> None:
    rows = table(OWN)
    assert list(rows) == [str(gpus) for gpus in fleet.SIZES]
    assert all(row["fluid"] > row["flotilla"] > row["flotilla-local"] for row in rows.values())
    gains = [row["flotilla"] for row in rows.values()]
    assert gains == sorted(gains)
    assert 1 <= gains[0] < 1.12
    assert gains[-1] > 1.92
    for gpus, row in rows.items():
        few = int(gpus) < fleet.MEMBERS
        assert (row["flotilla-local"] < 1) == (int(gpus) <= 100)
        assert row["homogeneous"] < 0.8 if few else row["homogeneous"] == pytest.approx(1.0, abs=0.01)


def test_one_lockstep_round_of_homogeneous_nears_the_baseline() -> None:
    rows = {int(gpus): row for gpus, row in table(LOCKSTEP).items()}
    assert [gpus for gpus, row in rows.items() if row["homogeneous"] > 0.95] == [100, 120, 140, 160]
    assert statistics.median(row["flotilla"] for row in rows.values()) < 1.12
    assert all(row["flotilla-local"] >= row["flotilla"] - 0.02 for gpus, row in rows.items() if gpus >= 80)


def test_flotilla_waits_least_of_the_papers_methods() -> None:
    for row in table("seconds that a GPU waits").values():
        assert row["flotilla"] == min(row[planner] for planner in (replay.BASELINE, *replay.SHARING))


def test_lengths_differ_little_within_a_flotilla() -> None:
    deviations = {name: row["standard deviation"] for name, row in table("runs, 80 GPUs").items()}
    within = [deviation for name, deviation in deviations.items() if name.startswith("flotilla ")]
    assert len(within) == replay.SPREAD_FLOTILLAS
    assert max(within) < min(deviations["independent, an input"], deviations["flotilla-local"]) / 4


def test_fluid_is_near_the_bound_on_the_page() -> None:
    for epochs in ("12 to 16", "10 to 40"):
        rows = table(f"work known, {epochs} epochs").values()
        assert max(row["fluid"] for row in rows) <= 1.03
        assert max(row["fluid, worst"] for row in rows) <= 1.05
        assert min(min(row.values()) for row in rows) >= 1


def test_doubling_is_at_or_below_every_fixed_number_of_gpus() -> None:
    rows = hour_rows()
    for column in capes.CONTENTION:
        assert rows["doubling"][column] <= min(rows[fixed][column] for fixed in FIXED), column


def test_hours_without_contention_agree_with_the_paper() -> None:
    rows = hour_rows()
    paper = dict(zip(("doubling", *FIXED), (1.40, 1.40, 2.2, 3.8, 6.3), strict=True))
    assert {name: rows[name]["none"] for name in paper} == pytest.approx(paper, rel=0.05)


def test_every_section_has_one_place_in_the_text() -> None:
    import bench
    import results

    found = re.findall(r"^\$(\w+)$", results.TEXT.read_text(encoding="utf-8"), re.M)
    assert sorted(found) == sorted(name.replace("-", "_") for name in bench.SECTIONS)


def test_the_page_is_its_text_around_its_tables() -> None:
    import results

    assert results.filled(results.TEXT.read_text(encoding="utf-8"), results.tables_of(PAGE)) == PAGE
