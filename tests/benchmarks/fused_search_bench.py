"""CPU seconds in which ASHA reaches a loss when its trials train fused, over those one after the other.

A slot of one core works for the search either way, by the program of a rank: with fused trials each that ends
makes room for the one that the search asks for next. Both have the same configs.

    python tests/benchmarks/fused_search_bench.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fused_bench import BATCH, SHORT, assignment
from stage_memory_bench import in_a_process
from tables import Figure, Table

from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.model.ensemble import Member, StopRule
from hetctl.model.searches import SearchSpec, Trial
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.fused import train_fused
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.training import train
from hetctl.scheduling.fusing import FUSE_LIMIT
from hetctl.storage.event_files import read_events

TRIALS, SEEDS, UNITS = 64, 20, 64
RUNGS = FIRST, ETA, LAST = 1, 4, 16
SPACE = {"learning_rate": {"log_uniform": [1e-5, 1e-1]}}
NO_RESOURCES = UsedResources(0.0, 0.0)


def table(quick: bool = False) -> Table:
    """Compare both, seed by seed."""
    found = []
    for seed in range(2 if quick else SEEDS):
        found.append(in_a_process(both, seed))
        print(seed, *found[-1], flush=True)
    ratios = [fused_s / alone_s for alone_s, fused_s, _ in found]
    rows = tuple(
        (str(seed), f"{loss:.3f}", f"{alone_s:.2f}", f"{fused_s:.2f}", f"{fused_s / alone_s:.2f}")
        for seed, (alone_s, fused_s, loss) in enumerate(found)
    )
    return Table(
        f"ASHA of {TRIALS} small perceptrons on one core, fused",
        ("seed", "loss", "one after the other, CPU s", "fused, CPU s", "ratio"),
        rows,
        (Figure("fused over one after the other, median", statistics.median(ratios), 0.5),),
        f"Perceptrons of {UNITS} units, {FIRST} to {LAST} epochs, one in {ETA} goes on. Until the loss that"
        " both reach; each trial is built, evaluated and saved.",
    )


@dataclass
class Slot:
    """A slot that works for a search, and when it reported which loss.

    Parameters
    ----------
    reports : list of (float, float)
        CPU seconds and loss of each report.
    """

    folder: Path
    search: SearchRun
    fused: bool
    began: float = 0.0
    reports: list[tuple[float, float]] = field(default_factory=list)
    queue: deque[Assignment] = field(default_factory=deque)

    def run(self) -> list[tuple[float, float]]:
        """Train until the search asks for nothing more; return the reports."""
        with ExitStack() as keep:
            binding = Binding("localhost", 0, None, (0,))
            context = WorkerContext(binding, keep, send=self._hear, arrived=self._next)
            self._request()
            # Once for all trials, either way.
            context.load_data(self.queue[0].task.training.ensemble, Sharing())
            self.began = time.process_time()
            while self.queue:
                one = self.queue.popleft()
                (train_fused if self.fused else train)(one, context)
                if not self.fused:
                    self._report(one.task.name)
        return self.reports

    def _next(self) -> Assignment | None:
        return self.queue.popleft() if self.queue else None

    def _hear(self, **message: object) -> None:
        if message.get("done"):
            assert not message["code"], message
            self._report(str(message["member"]))

    def _report(self, name: str) -> None:
        events = read_events(self.folder / "events" / f"{name}.jsonl")
        *_, last = (event for event in events if event.kind == "epoch")
        loss = last.data["metrics"]["val_loss"]
        self.reports.append((time.process_time() - self.began, loss))
        self.search.report(self.search.trials[int(name[1:])], [loss])
        self._request()

    def _request(self) -> None:
        for request in self.search.requests(NO_RESOURCES):
            self.queue.append(self._assignment(self.search.trials[request["number"]]))

    def _assignment(self, trial: Trial) -> Assignment:
        stop = StopRule(patience=999, max_epochs=trial.epochs)
        config = {"units": UNITS, "steps": SHORT["steps"], **trial.config}
        member = Member(f"m{trial.number}", config, BATCH, trial.number, stop)
        return assignment(str(self.folder), member, fused=self.fused, seat=1)


def both(seed: int) -> tuple[float, float, float]:
    """Return the seconds one after the other and fused to a loss, and the loss."""
    reached = []
    for fused in (False, True):
        names = tuple(f"m{number}" for number in range(TRIALS))
        settings = {"trials": TRIALS, "min_epochs": FIRST, "eta": ETA}
        search = SearchSpec("asha", names, SPACE, LAST, settings, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            for part in ("events", "logs"):
                (Path(folder) / part).mkdir()
            reached.append(Slot(Path(folder), SearchRun(search, FUSE_LIMIT if fused else 1), fused).run())
    target = max(min(loss for _, loss in reports) for reports in reached)
    alone_s, fused_s = (next(at for at, loss in reports if loss <= target) for reports in reached)
    return alone_s, fused_s, target


if __name__ == "__main__":
    print(table(quick="--quick" in sys.argv[1:]))
