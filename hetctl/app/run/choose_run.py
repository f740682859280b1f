"""Choice between the newest run of an ensemble, which continues, and another one, which starts."""

from __future__ import annotations

from hetctl.app.project import Project
from hetctl.app.run.changes import differences, refusals
from hetctl.app.run.continue_run import RequestedOptions, is_done, with_input
from hetctl.catalog.stored_runs import RunRecord
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.job import ENDED
from hetctl.model.profile import some_of
from hetctl.model.values import dataclass
from hetctl.storage.run_files import checkpoint_folder
from hetctl.storage.run_state import state_in

ANOTHER = "`hetctl submit --new` starts another run"
MORE = "a larger max_epochs or patience, another target, or more members continue it"
MORE_OF_FAILED = f"a larger --retries, {MORE.removeprefix('a ')}"
MOST_NAMED = 3
"""Members that a message names."""


@dataclass(frozen=True)
class Choice:
    """Choice of a run.

    Parameters
    ----------
    run : str or None
        Run that continues; None: another one starts.
    note : str
        Reason, and how to get the other; empty if there is no choice.
    """

    run: str | None
    note: str = ""


def choose_run(project: Project, ensemble: Ensemble, requested: RequestedOptions) -> Choice:
    """Choose the newest run of an ensemble if it has work left, or gets some by what was edited or given.

    Parameters
    ----------
    ensemble : Ensemble
        The ensemble as its file is now.
    """
    if not project.home.catalog.exists():
        return Choice(None)
    with project.reading() as catalog:
        record = catalog.newest_run(ensemble.name)
    if record is None:
        return Choice(None)
    run = record.spec.run
    if record.state not in ENDED:
        return Choice(run, ANOTHER)
    if obstacle := _obstacle(project, record, ensemble, requested):
        return Choice(None, f"run {run} is {record.state} and does not continue: {obstacle}")
    return Choice(run, f"it was {record.state}, and has more to train now; {ANOTHER}")


def _obstacle(project: Project, record: RunRecord, ensemble: Ensemble, requested: RequestedOptions) -> str:
    """Return why a run that has ended does not continue; empty if it does."""
    spec, folder = record.spec, project.home.run(record.spec.run)
    if not folder.spec.exists():
        return f"its folder {folder.path} is gone"
    try:
        now = with_input(project, spec, ensemble, requested)
    except BadInputError as error:
        return error.message
    if kept := refusals(differences(spec, now), spec.run):
        return "; ".join(kept)
    progress = state_in(folder, now).progress
    if is_done(folder, now):
        failed = any(member.failed for member in progress.values())
        return f"it has nothing left to train; {MORE_OF_FAILED if failed else MORE}"
    trained = [name for name, member in progress.items() if member.active and member.epochs]
    gone = [name for name in trained if not checkpoint_folder(now, name).exists()]
    return f"the checkpoints of {some_of(gone, MOST_NAMED)} are gone" if gone else ""
