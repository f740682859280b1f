"""The user's functions, imported from the ensemble file's folder: their arguments and results.

``evaluate_fn`` gets the outputs of a network for the validation samples, with their targets, of all ranks.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import zip_longest
from typing import Any, SupportsFloat

import numpy as np

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.interpreter import without_collections
from hetctl.model.values import dataclass

Batch = tuple[Any, Any]
"""Outputs and targets, with as many rows as samples; outputs may be a mapping or a tuple of arrays."""
Share = Sequence[Batch | None]
"""A rank's batches; None for a chunk of which it has no sample."""


@dataclass(frozen=True)
class UserFunctions:
    """Functions of CEREBRO's API (section 3); None for the framework's own ``train_fn``.

    ``input_fn`` takes `Ensemble.data` and, for partitioned data, the path of a partition.
    """

    input_fn: Callable[..., Any]
    model_fn: Callable[[dict[str, Any]], Any]
    train_fn: Callable[..., Any] | None
    evaluate_fn: Callable[..., Any] | None = None


TRAIN_PARAMETERS = "(data, model, optimizer, config) or (data, model, optimizer, config, context)"
CONTEXT = "context"
FEWEST, MOST = 4, 5
"""Numbers of arguments of a ``train_fn``: without and with a context."""


def load_functions(ensemble: Ensemble) -> UserFunctions:
    """Import the functions of an ensemble; its folder becomes the first of the module path.

    Raises
    ------
    BadInputError
        If a module or a function is missing.
    """
    if ensemble.folder not in sys.path:
        sys.path.insert(0, ensemble.folder)
    named = ensemble.functions
    train_fn, evaluate_fn = (_load(name) if name else None for name in (named.train_fn, named.evaluate_fn))
    if train_fn is not None:
        takes_context(train_fn)
    return UserFunctions(_load(named.input_fn), _load(named.model_fn), train_fn, evaluate_fn)


def takes_context(train_fn: Callable[..., Any]) -> bool:
    """Return true if a ``train_fn`` has a fifth parameter, for the context.

    Parameters with a default do not count, except one with the name `CONTEXT`.

    Raises
    ------
    BadInputError
        If it takes another number of arguments.
    """
    try:
        parameters = inspect.signature(train_fn).parameters.values()
    except ValueError:  # Some functions not written in Python have no signature.
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [p for p in parameters if p.kind in positional]
    count = sum(p.default is inspect.Parameter.empty or p.name == CONTEXT for p in own)
    is_open = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if count in (FEWEST, MOST) or (is_open and count < FEWEST):
        return count == MOST
    name = getattr(train_fn, "__name__", type(train_fn).__name__)
    raise BadInputError(f"train_fn {name} takes {count} arguments", f"define it as {name}{TRAIN_PARAMETERS}")


def training_loss(result: Any) -> float:
    """Return the mean training loss in a ``train_fn``'s result.

    Raises
    ------
    BadInputError
        If the result has another form.
    """
    value = result.get("loss") if isinstance(result, Mapping) else result
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BadInputError(
            f"train_fn returned {result!r}",
            'return the mean training loss, or a mapping with the key "loss"',
        ) from None


def _load(reference: str) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    try:
        with without_collections():
            module = importlib.import_module(module_name)
        function = getattr(module, name)
    except ModuleNotFoundError as error:
        raise TransientInputError(f"{reference}: {error}") from None
    except AttributeError:
        raise BadInputError(f"{reference}: module {module_name} defines no {name}") from None
    if not callable(function):
        raise BadInputError(f"{reference} is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def whole_metrics(
    evaluate_fn: Callable[..., Any],
    shares: Sequence[Share],
    config: Mapping[str, Any],
    others: Collection[str],
) -> tuple[dict[str, float], Batch]:
    """Return the ``val_*`` metrics that ``evaluate_fn`` computes, and the predictions of all ranks.

    Parameters
    ----------
    evaluate_fn : callable
        Function of outputs, targets and config that returns metrics by name.
    others : collection of str
        Names of the metrics of ``model_fn``.

    Raises
    ------
    BadInputError
        If ``evaluate_fn`` returns anything but numbers by name, or a name already in use, or if the
        shapes of rows differ between batches.
    """
    try:
        outputs, targets = joined(shares)
    except ValueError as error:
        raise BadInputError(
            f"batches of validation samples have outputs or targets of several shapes: {error}",
            "pad all to one length in collate_fn, or use metrics of model_fn instead of evaluate_fn",
        ) from None
    returned = evaluate_fn(outputs, targets, dict(config))
    if not isinstance(returned, Mapping):
        raise _not_metrics(f"{type(returned).__name__} instead of a mapping")
    try:
        found = {f"val_{name}": float(value) for name, value in returned.items()}
    except (TypeError, ValueError) as error:
        raise _not_metrics(f"{returned!r}: {error}") from None
    if both := sorted(found.keys() & set(others)):
        raise _not_metrics(f"{', '.join(both)}, which model_fn has as well")
    return found, (outputs, targets)


def _not_metrics(problem: str) -> BadInputError:
    return BadInputError(
        f"evaluate_fn returned {problem}", 'return a mapping of names to numbers, such as {"auc": 0.93}'
    )


class KeptState(UserDict[str, Any]):
    """State of a ``train_fn`` by name, saved in checkpoints beside the network's.

    Values are plain values and arrays, or objects with ``state_dict()`` and ``load_state_dict()``. An
    object's saved state waits for an object of that name; until then the name is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        """Put in a value, or an object, which takes over its waiting state."""
        if name in self._waiting:
            if not _is_object(value):
                raise BadInputError(
                    f"context.state[{name!r}] is {type(value).__name__}, but the checkpoint has the state of "
                    "an object with state_dict() there",
                    "put in an object of the same class, or start a new run with `hetctl submit --new`",
                )
            value.load_state_dict(self._waiting.pop(name))
        super().__setitem__(name, value)

    def save(self) -> dict[str, Any]:
        """Return the state of all objects, and all values."""
        objects = {name: entry.state_dict() for name, entry in self.items() if _is_object(entry)}
        values = {name: entry for name, entry in self.items() if not _is_object(entry)}
        return {"objects": {**self._waiting, **objects}, "values": values}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Replace all values and the states of present objects; other objects must be put in again."""
        present = {name: entry for name, entry in self.items() if name in saved["objects"]}
        self.data, self._waiting = dict(saved["values"]), dict(saved["objects"])
        self.update(present)


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
        Objects with these names in the result of ``model_fn``; None if there are none.
    epoch : int
        Epoch in training, from 1.
    step : int
        Number of the member's batch in training, from 1, counted over all epochs and stops.
    metrics : mapping of str to float
        Results of the last finished epoch; empty before.
    reported : dict of str to float
        Metrics that were reported since the last step.
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
    reported: dict[str, float] = field(default_factory=dict)
    _callbacks: list[Callable[[], Any]] = field(default_factory=list)

    def on_epoch_end(self, callback: Callable[[], Any]) -> None:
        """Call a function before the evaluation, if the epoch ends with this call of ``train_fn``."""
        self._callbacks.append(callback)

    def report(self, **metrics: SupportsFloat) -> None:
        """Report metrics within an epoch, by which a search may end the trial; those of rank 0 count."""
        self.reported |= {name: float(value) for name, value in metrics.items()}

    def begin(self, epoch: int) -> None:
        """Prepare for a call of ``train_fn``, which sets its callbacks anew."""
        self.epoch = epoch
        self._callbacks.clear()

    def end_epoch(self) -> None:
        """Call the callbacks, in order."""
        for callback in self._callbacks:
            callback()

    def save(self) -> dict[str, Any]:
        """Return the state for a member's checkpoints."""
        return {"step": self.step, "metrics": dict(self.metrics), "state": self.state.save()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `save` returned."""
        self.step, self.metrics = saved["step"], saved["metrics"]
        self.state.restore(saved["state"])


def _is_object(entry: Any) -> bool:
    return hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")


class Predictions:
    """Outputs and targets of this rank's validation samples in one evaluation.

    Parameters
    ----------
    arrays_of : callable
        Function that returns the outputs of a batch as arrays.
    at_once : bool
        Convert the outputs of each batch at once, because the device has no memory for all, or uses it again.

    Attributes
    ----------
    samples : int
        Validation samples of the group.
    most_bytes : float
        Bytes of all samples above which none are kept; 0: none are.
    """

    def __init__(self, arrays_of: Callable[[Any], Any], *, at_once: bool) -> None:
        self._arrays_of, self._at_once = arrays_of, at_once
        self.samples, self.most_bytes = 0, 0.0
        self._share: list[Batch | None] | None = None

    def begin(self) -> None:
        """Forget the last evaluation: another one begins."""
        self._share = [] if self.most_bytes else None

    def add(self, outputs: Any, targets: Any) -> None:
        """Add a batch; the memory of the targets may be used again."""
        if self._share is None:
            return
        rows = np.array(targets)
        if not any(self._share):
            size = sum(array.nbytes for array in _arrays_in((self._arrays_of(outputs), rows)))
            if self.samples * size > self.most_bytes * len(rows):
                self._share = None
                return
        self._share.append((self._arrays_of(outputs) if self._at_once else outputs, rows))

    def skip(self) -> None:
        """Note that this rank has no sample of a chunk."""
        if self._share is not None:
            self._share.append(None)

    def taken(self) -> Share | None:
        """Return this rank's batches, once; None if they were too large, or none were to be kept."""
        share, self._share = self._share, None
        if share is None or self._at_once:
            return share
        return [batch and (self._arrays_of(batch[0]), batch[1]) for batch in share]


def joined(shares: Sequence[Share]) -> Batch:
    """Return the rows of all ranks in the order of the samples.

    Raises
    ------
    ValueError
        If the shapes of rows differ between batches.
    """
    # Each chunk of samples is divided among the ranks in order.
    batches = [batch for chunk in zip_longest(*shares) for batch in chunk if batch is not None]
    outputs, targets = _rows_of(batches)
    return outputs, targets


def lone_array(outputs: Any) -> Any:
    """Return the only array of outputs, or the one named ``logits``; None if there are several others."""
    while isinstance(outputs, Mapping | tuple | list):
        if isinstance(outputs, Mapping) and "logits" in outputs:
            return outputs["logits"]
        if len(outputs) != 1:
            return None
        (outputs,) = outputs.values() if isinstance(outputs, Mapping) else outputs
    return outputs


def _rows_of(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts, which share one structure."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _rows_of([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_rows_of(pieces) for pieces in zip(*parts, strict=True))
    return np.concatenate(parts)


def _arrays_in(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for part in value:
            yield from _arrays_in(part)
    else:
        yield value
