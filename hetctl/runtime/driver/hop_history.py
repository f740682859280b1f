"""Earlier visits of a run, from its events, and the states from which its members continue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from pathlib import PurePath

from hetctl.methods.hopper.hop_events import HopProgress
from hetctl.model.ensemble import Member
from hetctl.model.events import Event
from hetctl.model.run import RunSpec
from hetctl.model.values import dataclass
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState, visit_in
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder


@dataclass(frozen=True)
class RecordedVisits:
    """Visits in a run's events, all of which count.

    Parameters
    ----------
    numbers : mapping of str to set of int
        Numbers of the visits, by member.
    newest : int
        Number of the newest visit, even if it does not count; -1 if there was none.
    saved : mapping of str to set of int
        Newest visits in written checkpoints, by member; -1 for a checkpoint before any visit.
    """

    numbers: Mapping[str, Set[int]]
    newest: int
    saved: Mapping[str, Set[int]]

    def of(self, member: str) -> Set[int]:
        """Return the numbers of a member's visits."""
        return self.numbers.get(member, frozenset())

    def has_saved(self, member: str) -> bool:
        """Return true if a member has written a checkpoint from which it may continue."""
        return any(number < 0 or number in self.of(member) for number in self.saved.get(member, ()))


def recorded_visits(folder: RunFolder) -> RecordedVisits:
    """Return the visits in the events of a run."""
    return _recorded(events_in(folder))


def _recorded(events: Iterable[Event]) -> RecordedVisits:
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    saved: defaultdict[str, set[int]] = defaultdict(set)
    newest = -1
    for event in events:
        if event.kind in ("visit", "visit_lost"):
            newest = max(newest, event.record.number)
        if event.kind == "visit":
            numbers[event.source].add(event.record.number)
        elif event.kind == "visits_undone":
            numbers[event.source].difference_update(event.record.numbers)
        elif event.kind == "checkpoint":
            saved[event.source].add(visit_in(PurePath(event.record.path).stem))
    return RecordedVisits(numbers, newest, saved)


def newest_states(
    spec: RunSpec, members: Iterable[str], recorded: RecordedVisits
) -> dict[str, TrainingState]:
    """Return the state of each member's newest checkpoint in the events, or of a fresh network.

    Checkpoints without an event are left out: a node that was given up may have saved an undone visit, or the
    driver may have died before it recorded the visit, which is then repeated.

    A member that has lost all its checkpoints does not begin anew: its state names the missing visit, and the
    rank that is to continue from it fails with an error that says so.
    """
    folders = {name: CheckpointFolder(checkpoint_folder(spec, name)) for name in members}
    return {name: _newest(name, folder, recorded) for name, folder in folders.items()}


def _newest(member: str, folder: CheckpointFolder, recorded: RecordedVisits) -> TrainingState:
    visits = recorded.of(member)

    def is_known(state: TrainingState) -> bool:
        return state.visit < 0 or state.visit in visits or folder.is_of_parent(state)

    state = folder.newest_state(is_known)
    if state == TrainingState() and recorded.has_saved(member):
        return TrainingState(visit=max(visits, default=0))
    return state


def drop_leftovers(spec: RunSpec, members: Iterable[str]) -> None:
    """Delete incomplete checkpoints of killed ranks; no rank may be writing states of these members."""
    for name in members:
        CheckpointFolder(checkpoint_folder(spec, name)).drop_unfinished()


def progress_of(folder: RunFolder, spec: RunSpec, member: Member) -> HopProgress:
    """Return the progress of a trial that joins the hops, from its events and its newest checkpoint."""
    assert spec.ensemble.partitions is not None
    recorded = _recorded(read_events(folder.events_of(member.name)))
    state = newest_states(spec, [member.name], recorded)[member.name]
    return hop_progress(member, state, spec.ensemble.partitions.count)


def next_number(spec: RunSpec, members: Iterable[str], recorded: RecordedVisits) -> int:
    """Return a number that no visit has, in events or in checkpoints."""
    folders = (CheckpointFolder(checkpoint_folder(spec, name)) for name in members)
    return max((recorded.newest, *(folder.newest_visit() for folder in folders))) + 1


def hop_progress(member: Member, state: TrainingState, partitions: int) -> HopProgress:
    """Return the progress of a member in a state."""
    history = tuple(epoch.metrics[member.stop.metric] for epoch in state.epochs)
    if len(state.visited) == partitions and not state.evaluating:
        return HopProgress(member, history, evaluating=True, visit=state.visit)
    return HopProgress(member, history, state.evaluating, state.visited, state.visit)
