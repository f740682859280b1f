"""A search in a run: which reports count, which trials come next, and when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.methods.automl.grid_random import OneShot
from hetctl.methods.automl.hyperband import Hyperband
from hetctl.methods.automl.optuna_search import OptunaSource
from hetctl.methods.automl.pbt import Pbt
from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.search_parts import parts_of_search
from hetctl.methods.automl.trial_history import Report, Trial, TrialEvent
from hetctl.model.searches import REPORT, TRIAL, SearchBudget, SearchSpec
from hetctl.model.serialization import decode, encode

DONE = "every trial that it asked for is reported"


@dataclass(frozen=True)
class UsedResources:
    """Resources that a run has used: GPU-hours, and seconds since its start."""

    gpu_hours: float
    time_s: float


class SearchRun:
    """A search whose requests and reports are events of a run.

    Attributes
    ----------
    trials : list of Trial
        Trials by number, each with the epochs of its latest request.

    Parameters
    ----------
    parallel : int
        Most trials at a time, unless the search sets it or no request depends on a report.
    events : iterable of (str, mapping)
        Kind and fields of the events so far, in their order.

    Raises
    ------
    BadInputError
        If Optuna is missing, or now draws other configs than those that are recorded.
    """

    def __init__(
        self, search: SearchSpec, parallel: int, events: Iterable[tuple[str, Mapping[str, Any]]] = ()
    ) -> None:
        method, source = parts_of_search(search)
        self._search = search
        self._procedure = Procedure.following(method, source, list(_history(events)))
        # Hyperband and PBT wait at barriers: what they ask for does not depend on the order of reports.
        free = not isinstance(source, OptunaSource) and isinstance(method, OneShot | Hyperband)
        self._most = None if free or isinstance(method, Pbt) else search.parallel or parallel

    @property
    def trials(self) -> list[Trial]:
        """Trials by number, each with the epochs of its latest request."""
        return self._procedure.history.trials

    @property
    def waiting(self) -> tuple[Trial, ...]:
        """Trials that are not reported yet."""
        return self._procedure.history.waiting

    def member_of(self, trial: Trial) -> str:
        """Return the name of the member that is a trial."""
        return self._search.members[trial.number]

    def report(self, trial: Trial, loss: float | None) -> dict[str, Any] | None:
        """Take the result of a trial; return the fields of its event, or None if it does not count."""
        if not self._procedure.tell(Report(trial.number, trial.epochs, loss)):
            return None
        event = self._procedure.history.events[-1]
        return {"member": self.member_of(trial), **_fields(event)}

    def requests(self, resources: UsedResources) -> Iterator[dict[str, Any]]:
        """Yield the fields of the event of each trial that is to be trained now."""
        while not self._limit(resources) and (self._most is None or len(self.waiting) < self._most):
            asked = self._procedure.ask(1)
            if not asked:
                return
            yield {"member": self.member_of(asked[0]), **encode(asked[0])}

    def reason_to_end(self, resources: UsedResources) -> str | None:
        """Return why no trial will come any more; None if some may."""
        if self.waiting:
            return None
        return self._limit(resources) or (DONE if self._procedure.done else None)

    def _limit(self, resources: UsedResources) -> str | None:
        """Return the limit of the search's budget that is reached; None if none is."""
        budget: SearchBudget = self._search.budget
        epochs = self._epochs_asked() if budget.epochs is not None else 0
        reached = (
            (budget.epochs, epochs, "epochs"),
            (budget.gpu_hours, resources.gpu_hours, "GPU-hours"),
            (budget.time_s, resources.time_s, "seconds"),
        )
        for limit, used, unit in reached:
            if limit is not None and used >= limit:
                return f"its budget of {limit:g} {unit} is used up"
        return None

    def _epochs_asked(self) -> int:
        inherited = sum(trial.parent.epochs for trial in self.trials if trial.parent)
        return sum(trial.epochs for trial in self.trials) - inherited


def _history(events: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[TrialEvent]:
    for kind, data in events:
        if kind == TRIAL:
            yield decode(Trial, data)
        elif kind == REPORT:
            yield decode(Report, {**data, "trial": data["number"]})


def _fields(event: TrialEvent) -> dict[str, Any]:
    """Return the fields of a report's event, in which every event names its trial by `number`."""
    fields: dict[str, Any] = encode(event)
    return {"number": fields.pop("trial"), **fields}
