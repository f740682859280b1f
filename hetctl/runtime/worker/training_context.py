"""Context of a ``train_fn``: the place of its rank, and state that is kept with the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from hetctl.model.errors import BadInputError


class KeptState(MutableMapping[str, Any]):
    """State of a ``train_fn`` by name, which checkpoints contain beside the network's own.

    Values are plain values and arrays, or objects with ``state_dict()`` and ``load_state_dict()``. The saved
    state of an object waits until an object is put in under its name, which is missing until then.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Return a value or an object; KeyError if there is none."""
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Put in a value, or an object, which takes over the state that waits for it."""
        if name in self._waiting:
            self._load(name, value)
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        """Delete a value or an object; KeyError if there is none."""
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._entries)

    def save(self) -> dict[str, Any]:
        """Return the state of all objects, and all values."""
        objects = {name: entry.state_dict() for name, entry in self._entries.items() if _is_object(entry)}
        values = {name: entry for name, entry in self._entries.items() if not _is_object(entry)}
        return {"objects": {**self._waiting, **objects}, "values": values}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replace all values, and the state of objects that are there; others are to be put in again."""
        present = {name: entry for name, entry in self._entries.items() if name in saved["objects"]}
        self._entries, self._waiting = dict(saved["values"]), dict(saved["objects"])
        self.update(present)

    def _load(self, name: str, value: Any) -> None:
        if not _is_object(value):
            raise BadInputError(
                f"context.state[{name!r}] is {type(value).__name__}, but the checkpoint has the state of an "
                "object with state_dict() there",
                "put in an object of the same class, or start a new run with `hetctl submit --new`",
            )
        value.load_state_dict(self._waiting.pop(name))


@dataclass
class TrainingContext:
    """Fifth argument of a ``train_fn``; the same object in all its calls for a network.

    Parameters
    ----------
    rank, size : int
        Number of this rank in the member's group, from 0, and number of its ranks.
    device : Any
        Device of the model, as the framework names it.
    scheduler, loss_scale : Any
        Objects of these names among the parts that ``model_fn`` returned; None if there are none.
    epoch : int
        Epoch in training, from 1.
    step : int
        Number of the member's batch in training, from 1, counted over all epochs and stops.
    metrics : mapping of str to float
        Results of the last finished epoch; empty before.
    """

    rank: int
    size: int
    device: Any
    scheduler: Any = None
    loss_scale: Any = None
    epoch: int = 0
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: KeptState = field(default_factory=KeptState)
    _callbacks: list[Callable[[], Any]] = field(default_factory=list)

    def on_epoch_end(self, callback: Callable[[], Any]) -> None:
        """Have a function called if the epoch ends with this call of ``train_fn``, before it is evaluated."""
        self._callbacks.append(callback)

    def begin(self, epoch: int) -> None:
        """Prepare for a call of ``train_fn``, which sets its callbacks anew."""
        self.epoch = epoch
        self._callbacks.clear()

    def end_epoch(self) -> None:
        """Call the callbacks, in order."""
        for callback in self._callbacks:
            callback()

    def save(self) -> dict[str, Any]:
        """Return what travels with a member's checkpoints."""
        return {"step": self.step, "metrics": dict(self.metrics), "state": self.state.save()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `save` returned."""
        self.step, self.metrics = saved["step"], saved["metrics"]
        self.state.restore(saved["state"])


def _is_object(entry: Any) -> bool:
    return hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")
