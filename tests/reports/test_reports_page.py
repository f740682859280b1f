"""Pages of runs: what is on them, and that a browser can read them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib
import pytest
from pipelined_run import status as pipeline

from hetctl.model.cost import Cost
from hetctl.model.run_results import Difference, MemberResult, RunComparison, RunLine, RunSummary
from hetctl.model.run_status import (
    BalanceHistory,
    BalancePoint,
    Comparison,
    MemberRate,
    OnCluster,
    RunStatus,
    TimeShares,
)
from hetctl.reports.run_charts import HOURS, TIME, best_so_far
from hetctl.reports.run_page import render_comparison, render_page
from hetctl.reports.status_table import status_sections
from hetctl.reports.style import COLOURS, colours_of, ink_on

MakeRun = Callable[..., RunStatus]
VOID = {"meta", "br", "link", "img", "input"}


class Outline(HTMLParser):
    """Checks that tags nest, and keeps texts by the element they stand in."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.figures: list[str | None] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in VOID else [tag]
        self.figures += [dict(attrs).get("aria-label")] if tag == "figure" else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is opened."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data.strip())


def history(member: str, points: int = 3) -> BalanceHistory:
    found = tuple(BalancePoint(100.0 + i, (32 + i, 32 - i), 0.3 - 0.01 * i, 0.25) for i in range(points))
    return BalanceHistory(member, ("n1:0", "<n2>:0"), found, 0.29, 0.58)


@pytest.fixture(scope="module")
def plain(make_run: MakeRun) -> str:
    """The page of a run of which nothing but its training is known."""
    return render_page(make_run())


@pytest.fixture(scope="module")
def full(make_run: MakeRun) -> tuple[RunStatus, str]:
    """A run of which much is known, and its page."""
    run = make_run()
    mlp, cnn = (replace(one, gpu_seconds=900.0, samples_per_epoch=1437) for one in run.members)
    clusters = (OnCluster(1, 4, 200.0, 160.0), OnCluster(2, 8, 150.0, 75.0))
    run = replace(
        run,
        members=(
            replace(mlp, config={"units": 8}, rates=(MemberRate(1, None, 593.0, 593.0, 1300.0),)),
            replace(cnn, config={"units": 64, "kind": "cnn"}),
        ),
        tasks=(replace(run.tasks[0], exit_code=137), *run.tasks[1:]),
        comparison=Comparison("independent", 214.0, 180.0, 166, clusters, 2),
        shares=(TimeShares("mlp", 10, 60, 20, 5, 3, 2), TimeShares("cnn", 1, 2, 3, 4, 5, 6)),
        warnings=("odd",),
    )
    return run, render_page(run)


def without_curves(run: RunStatus) -> RunStatus:
    """Return a run whose page has no learning curves, which take most of the time."""
    return replace(run, history={})


def test_every_member_round_and_figure_appears(make_run: MakeRun) -> None:
    names = tuple(f"net-{i:02d}" for i in range(9))
    outline = Outline(render_page(make_run(names, rounds=7)))
    assert len(outline.figures) == 5
    for name in names:
        assert name in outline.texts["td"]
        assert name in outline.texts["li"]
        assert any(title.startswith(f"{name} · round 6 · slot") for title in outline.texts["title"])
    assert {str(r) for r in range(7)} <= set(outline.texts["text"])
    assert {str(r) for r in range(7)} <= set(outline.texts["td"])


def test_a_member_has_its_config_and_hours_on_the_page_alone(full: tuple[RunStatus, str]) -> None:
    run, page = full
    assert {"units=8", "0.250"} <= set(Outline(page).texts["td"])
    assert not {"config", ">hours"} & {
        header for section in status_sections(run, 200) for header in section.headers
    }


def test_the_page_opens_with_the_key_figures_of_the_run(full: tuple[RunStatus, str]) -> None:
    outline = Outline(full[1])
    assert outline.texts["b"] == ["5:00 min", "4:39 min", "80 %", "2 of 2", "0.91"]
    assert {"7 % too short", "best val_accuracy", "cnn"} <= set(outline.texts["span"])
    # Of two members, in the chart for wide pages and in that for narrow ones.
    assert outline.texts["text"].count("-10 %") == 4
    assert any("3:34 min" in text and "166" in text for text in outline.texts["p"])
    assert "odd" in outline.texts["p"]


def test_the_page_shows_what_other_clusters_would_take(full: tuple[RunStatus, str]) -> None:
    outline = Outline(full[1])
    assert any("predicted" in text and "more than 2 slots" in text for text in outline.texts["p"])
    assert {"1 x 4 GPUs", "1:15 min · fluid · 2.00 times as fast"} <= set(outline.texts["text"])


def test_curves_are_drawn_over_each_axis_that_is_known(plain: str, full: tuple[RunStatus, str]) -> None:
    assert Outline(plain).texts["label"] == ["epochs", "time", "slot-hours"]
    outline = Outline(full[1])
    assert outline.texts["label"] == ["epochs", "time", "samples", "slot-hours"]
    assert {"samples", "slot-hours of training", "epoch"} <= set(outline.texts["text"])


def test_the_time_of_members_is_divided(full: tuple[RunStatus, str]) -> None:
    outline = Outline(full[1])
    assert {"mlp · waiting for data 20 s, 20 %", "cnn · evaluation 4.0 s, 19 %"} <= set(
        outline.texts["title"]
    )
    assert {"start, imports", "waiting for checkpoints"} <= set(outline.texts["li"])


def test_members_of_other_configs_have_a_chart_of_them(full: tuple[RunStatus, str]) -> None:
    outline = Outline(full[1])
    assert "Configs" in outline.texts["h2"]
    assert "configs and best val_accuracy" in outline.figures


def test_profiled_and_seen_rates_are_both_shown(full: tuple[RunStatus, str]) -> None:
    assert {"593", "1,300"} <= set(Outline(full[1]).texts["td"])


def test_references_inside_figures_lead_somewhere(full: tuple[RunStatus, str]) -> None:
    page = full[1]
    wanted = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
    assert wanted <= set(re.findall(r'id="([^"]+)"', page))
    assert "137" in page
    assert "<pattern" in page


def test_places_on_the_axes_are_sums_over_epochs(make_run: MakeRun) -> None:
    """Epochs of 5 s end at 5, 10, .. s; each member has one slot."""
    run = make_run()
    line = best_so_far(run, "val_accuracy", "max", TIME)
    best = max(member.best or 0.0 for member in run.members)
    assert line[0][0] == 5.0
    assert line[-1] == (30.0, pytest.approx(best))
    assert [value for _, value in line] == sorted(value for _, value in line)
    assert best_so_far(run, "val_accuracy", "max", HOURS)[-1][0] == pytest.approx(2 * 6 * 5 / 3600)
    assert len(best_so_far(run, "loss", "max", TIME)) == 2
    # On shared slots, of which each had a half.
    shared = {name: [replace(e, gpus=0) for e in history] for name, history in run.history.items()}
    rows = tuple(replace(member, gpu_seconds=0.5 * 6 * 5) for member in run.members)
    divided = replace(run, history=shared, members=rows)
    assert best_so_far(divided, "val_accuracy", "max", HOURS)[-1][0] == pytest.approx(6 * 5 / 3600)


def test_each_cell_has_its_header_for_narrow_screens(full: tuple[RunStatus, str]) -> None:
    cells = re.findall("<td[^>]*>", full[1])
    assert cells
    assert [cell for cell in cells if 'data-label="' not in cell] == []


def test_runs_stand_side_by_side(make_run: MakeRun) -> None:
    runs = [replace(make_run(), run=name) for name in ("one", "<two>")]
    results = RunSummary(2, 2, 0, "val_accuracy", "max", 0.91, "cnn", 1e9, 480.0, Cost(0.2, 0.2, 0.2), None)
    lines = tuple(RunLine(run.run, "digits", "local", "finished", 1e9, results) for run in runs)
    both = (MemberResult("mlp", "val_accuracy", "max", 0.9, 6, 6, 30.0, 30.0), None)
    compared = RunComparison(lines, (Difference("seed", (), (7, 8)),), {"mlp": both})
    outline = Outline(render_comparison(runs, compared))
    assert {"one", "<two>", "seed"} <= {*outline.texts["td"], *outline.texts["th"]}
    assert outline.texts["h2"].count("Best so far") == 1
    assert {"Learning curves of one", "Learning curves of <two>"} <= set(outline.texts["h2"])
    assert outline.figures.count("best val_accuracy so far over time, by run") == 1


def test_what_users_wrote_is_escaped_everywhere(make_run: MakeRun) -> None:
    evil = "<img src=x onerror=alert(1)>\"&'$x^2$"
    run = make_run((evil, "good"))
    log = (evil, f"\x1b[31m{evil}")
    failed = replace(run.members[0], state="failed", reason=evil, log_tail=log, log=evil)
    page = render_page(
        replace(run, run=evil, ensemble=evil, site=evil, reason=evil, members=(failed, run.members[1]))
    )
    outline = Outline(page)
    assert "<img" not in page
    assert "\x1b" not in page
    assert evil in outline.texts["h1"]
    assert evil in outline.texts["td"]
    assert evil in outline.texts["text"]
    assert outline.texts["pre"] == [f"{evil}\n{evil}\n{evil}"]


def test_names_that_look_like_svg_stay_as_they_are(make_run: MakeRun) -> None:
    name = 'net L 1.23456 x="0.98765"'
    run = without_curves(make_run((name,), rounds=1))
    assert name in Outline(render_page(run)).texts["text"]


def test_equal_runs_give_equal_pages_without_network(
    make_run: MakeRun, plain: str, full: tuple[RunStatus, str]
) -> None:
    before = dict(matplotlib.rcParams)
    assert plain == render_page(make_run())
    assert dict(matplotlib.rcParams) == before
    page = full[1]
    assert re.search("http|<script [^>]*src|<link|@import|fetch|import[ (]", page) is None
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


@pytest.mark.parametrize("names", [(), ("only",)])
def test_a_run_without_rounds_has_a_page_without_figures(make_run: MakeRun, names: tuple[str, ...]) -> None:
    run = replace(make_run(names, rounds=0), state="queued", measured_s=0.0, gpus=4)
    assert Outline(render_page(run)).figures == []


def test_a_running_run_shows_open_tasks(make_run: MakeRun) -> None:
    run = make_run()
    tasks = tuple(replace(s, end_s=None, exit_code=None) if s.round == 2 else s for s in run.tasks)
    rounds = (*run.rounds[:2], replace(run.rounds[2], end_s=None, ended_by=None))
    members = tuple(replace(member, state="training", reason=None) for member in run.members)
    running = replace(run, state="running", tasks=tasks, rounds=rounds, members=members, measured_s=250.0)
    outline = Outline(render_page(running))
    assert len(outline.figures) == 4
    assert any("round 2 · slot 0 of node-0 · 50 s · running" in title for title in outline.texts["title"])
    assert any("4:10 min" in text and "90 %" in text for text in outline.texts["p"])


def test_a_member_on_gpus_that_are_not_neighbours_has_two_bars(make_run: MakeRun) -> None:
    run = without_curves(make_run(("a", "b", "c"), rounds=1))
    wide = replace(run.tasks[0], gpus=(0, 2))
    page = render_page(replace(run, tasks=(wide, run.tasks[1])))
    shape = page[page.index("<title>a · round 0") :]
    path = re.search(r' d="([^"]+)"', shape)
    assert path is not None
    assert path.group(1).count("M") == 2


def idle_rows(page: str) -> int:
    path = re.search(r'<path d="([^"]+)"[^>]* style="fill: #eef0f3"', page)
    assert path is not None
    return path.group(1).count("M")


def test_idle_time_is_painted_where_a_job_held_gpus(make_run: MakeRun) -> None:
    run = without_curves(make_run(("a", "b"), rounds=2))
    assert idle_rows(render_page(run)) == 2
    assert idle_rows(render_page(replace(run, gpus=5))) == 5
    rounds = (run.rounds[0], replace(run.rounds[1], job=1))
    moved = tuple(replace(task, node="other") if task.round == 1 else task for task in run.tasks)
    assert idle_rows(render_page(replace(run, rounds=rounds, tasks=moved))) == 4


def test_the_page_of_a_large_run_stays_small(make_run: MakeRun) -> None:
    run = make_run(tuple(f"member-{i:03d}" for i in range(200)), rounds=100)
    page = render_page(run)
    assert len(page) < 3_000_000
    assert "160 more" in page
    assert all(f"member-{i:03d}</td>" in page for i in range(200))


def test_colours_repeat_after_twenty_and_text_on_them_reads() -> None:
    colours = list(colours_of(map(str, range(25))).values())
    assert len(set(colours[:20])) == 20
    assert colours[20:] == colours[:5]
    assert {ink_on(colour) for colour in COLOURS} == {"#22262e", "#ffffff"}


def test_of_many_balanced_members_six_are_drawn(make_run: MakeRun) -> None:
    members = ("one", *(f"m{i}" for i in range(8)))
    histories = tuple(history(name, points) for name, points in zip(members, (1, *[3] * 8), strict=True))
    page = render_page(replace(without_curves(make_run()), balances=histories))
    assert "one 2.00 (0.29 s instead of 0.58 s), m0 2.00" in page
    assert "&lt;n2&gt;:0 · 32 samples at first, 30 at last" in page
    assert "m4: samples of each worker" in page
    assert "m5: samples of each worker" not in page


def test_stages_of_pipelines_are_drawn_and_their_bytes_listed(make_run: MakeRun, plain: str) -> None:
    assert "Pipelines" not in plain
    run = without_curves(make_run(("mlp", "<cnn>")))
    page = render_page(replace(run, pipelines=(pipeline("mlp"), pipeline("<cnn>", trained=False))))
    outline = Outline(page)
    assert outline.figures[1] == "shares of time of mlp, by stage"
    assert {"forward", "backward", "waiting for waves", "idle"} <= set(outline.texts["li"])
    assert "n1:0 · waiting for waves 1.0 s, 10 %" in outline.texts["title"]
    assert "1.1 · n2:1 · layers 3..6" in outline.texts["text"]
    cells = outline.texts["td"]
    at = cells.index("2 x 2 stages, 3 in flight, D = 1")
    assert cells[at + 1 : at + 7] == ["100", "80.0", "n1:1", "80 %", "20 %", "32 %"]
    assert cells[cells.index("3.7 KiB") :][:4] == ["3.7 KiB", "5 B", "8 B", "100 B"]


def test_pipelines_are_drawn_after_their_first_epoch(make_run: MakeRun) -> None:
    names = tuple(f"m{i}" for i in range(8))
    run = without_curves(make_run(names))
    assert render_page(replace(run, pipelines=tuple(map(pipeline, names)))).count("by stage") == 6
    page = render_page(replace(run, pipelines=(pipeline("m0", trained=False),)))
    assert "by stage" not in page
    assert "Bytes sent" not in page


def test_a_metric_without_any_value_has_no_chart(make_run: MakeRun, plain: str) -> None:
    run = make_run()
    assert "training loss" in Outline(plain).texts["text"]
    history = {
        name: tuple(replace(e, metrics={"val_accuracy": e.metrics["val_accuracy"]}) for e in epochs)
        for name, epochs in run.history.items()
    }
    assert "training loss" not in Outline(render_page(replace(run, history=history))).texts["text"]
