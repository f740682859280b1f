"""Measured points by the members of an ensemble that they hold for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hetctl.model.ensemble import Ensemble
from hetctl.model.profile import ProfilePoint
from hetctl.model.rate_shapes import measured_members, shape_digest


class RatePoints:
    """Measured points of an ensemble as it is now.

    A point holds for all members of the shape that was measured. One without a shape, as in an imported table
    or from before there were shapes, holds for the member of its name if that has not changed, and for
    members of the same shape that have no points otherwise.
    """

    def __init__(self, points: Iterable[ProfilePoint], ensemble: Ensemble) -> None:
        members = {member.name: member for member in ensemble.members}
        self._measured = measured_members(ensemble)
        self._shapes = {
            name: shape_digest(member, ensemble.rate_keys) for name, member in self._measured.items()
        }
        self._now = set(self._shapes.values())
        self._of_shape: dict[str, list[ProfilePoint]] = defaultdict(list)
        self._of_member: dict[str, list[ProfilePoint]] = defaultdict(list)
        self._of_alike: dict[str, list[ProfilePoint]] = defaultdict(list)
        for point in points:
            self._of_shape[point.shape].append(point)
            named = members.get(point.member)
            if named is not None and named.fingerprint == point.fingerprint:
                self._of_member[named.name].append(point)
                self._of_alike[shape_digest(named, ensemble.rate_keys)].append(point)

    def of(self, member: str) -> list[ProfilePoint]:
        """Return the newest points that hold for a member, by type and number of GPUs."""
        shape, measured = self._shapes[member], self._measured[member].name
        own = [*self._of_shape.get(shape, ()), *self._of_member.get(measured, ())]
        newest: dict[tuple[str, int], ProfilePoint] = {}
        for point in sorted(own or self._of_alike.get(shape, []), key=lambda point: point.measured_at):
            newest[point.machine.gpu_type, point.gpus] = point
        return [newest[key] for key in sorted(newest)]

    def every(self) -> list[ProfilePoint]:
        """Return the points that hold for any member, each once, in the order of the members."""
        found = {id(point): point for member in self._measured for point in self.of(member)}
        return list(found.values())

    def is_current(self, point: ProfilePoint) -> bool:
        """Return true if a point is of a shape, or of a member, that the ensemble has now."""
        return point.shape in self._now or point in self._of_member.get(point.member, ())
