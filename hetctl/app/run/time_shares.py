"""Parts of the time that members spend in tasks, from their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetctl.model.run_status import MemberStatus, TimeShares
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import RunFolder

KINDS = ("first_step", "epoch")


def time_shares(folder: RunFolder, members: Sequence[MemberStatus]) -> tuple[TimeShares, ...]:
    """Return the parts of the members' time, of those that have finished an epoch in rounds."""
    return tuple(_shares(folder, members))


def _shares(folder: RunFolder, members: Sequence[MemberStatus]) -> Iterator[TimeShares]:
    for member in members:
        if not member.measured_s:
            continue
        events = list(read_events(folder.events_of(member.member), KINDS))
        startup_s = sum(event.record.startup_s for event in events if event.kind == "first_step")
        # A member that resumes reports its last epoch again.
        epochs = {(e.record.epoch, e.record.finished_at): e for e in events if e.kind == "epoch"}.values()
        trained_s = sum(event.record.duration_s for event in epochs)
        if not trained_s:
            continue

        data_s, evaluate_s, save_s = (
            sum(float(event.data.get(name) or 0.0) for event in epochs)
            for name in ("data_s", "evaluate_s", "save_s")
        )
        known_s = startup_s + trained_s + evaluate_s + save_s
        yield TimeShares(
            member.member,
            startup_s=startup_s,
            steps_s=max(0.0, trained_s - data_s),
            data_s=data_s,
            evaluate_s=evaluate_s,
            save_s=save_s,
            rest_s=max(0.0, member.measured_s - known_s),
        )
