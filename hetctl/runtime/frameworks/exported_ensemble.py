"""Predictions of an ensemble, whose weights hetctl has written into the folder of this module.

It needs NumPy and the framework of the networks, and not hetctl::

    from predict import predict_fn

    probabilities = predict_fn(x)

``ensemble.json`` beside it has the members with their weights; ``code`` has the modules that build them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
LEAST = 1e-12
"""Smallest probability whose logarithm is taken."""


def predict_fn(x: Any, batch_size: int = 256) -> Any:
    """Return the probabilities of classes, or the values, that the ensemble predicts: a row for each sample.

    Parameters
    ----------
    x : array or mapping of str to array
        Samples as ``input_fn`` returns them.
    """
    ensemble, members = _loaded()
    parts = [_rows(x, slice(start, start + batch_size)) for start in range(0, _count(x), batch_size)]
    total = sum(
        weight * FORMS[form](np.concatenate([np.asarray(network(part)) for part in parts]))
        for weight, form, network in members
    )
    if ensemble["temperature"] is not None:
        total = _softmax(np.log(np.maximum(total, LEAST)) / ensemble["temperature"])
    return total


@cache
def _loaded() -> tuple[dict[str, Any], list[tuple[float, str, Callable[[Any], Any]]]]:
    """Return the ensemble, and weight, form of outputs, and network of each member."""
    ensemble = json.loads((FOLDER / "ensemble.json").read_text(encoding="utf-8"))
    sys.path.insert(0, str(FOLDER / "code"))
    members = [
        (one["weight"], one["form"], LOADERS[one["framework"]](_built(one), FOLDER / one["file"]))
        for one in ensemble["members"]
    ]
    return ensemble, members


def _built(one: Mapping[str, Any]) -> Any:
    """Call ``model_fn`` of a member with its config."""
    module, _, name = one["model_fn"].partition(":")
    return getattr(importlib.import_module(module), name)(one["config"])


def _pytorch(parts: Any, file: Path) -> Callable[[Any], Any]:
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = getattr(parts["model"], "_orig_mod", parts["model"])
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    model.to(device).eval()

    def tensor(array: Any) -> Any:
        values = torch.as_tensor(np.asarray(array))
        kind = torch.get_default_dtype() if values.is_floating_point() else values.dtype
        return values.to(device, kind)

    def run(x: Any) -> Any:
        with torch.no_grad():
            outputs = model({k: tensor(v) for k, v in x.items()} if isinstance(x, Mapping) else tensor(x))
        return _lone(outputs).float().cpu().numpy()

    return run


def _tensorflow(model: Any, file: Path) -> Callable[[Any], Any]:
    is_loaded = False

    def run(x: Any) -> Any:
        nonlocal is_loaded
        if not is_loaded:
            # A model without fixed shapes takes them from its first samples.
            model(_rows(x, slice(1)), training=False)
            model.load_weights(file)
            is_loaded = True
        return np.asarray(_lone(model(x, training=False)))

    return run


LOADERS = {"pytorch": _pytorch, "tensorflow": _tensorflow}


def _lone(outputs: Any) -> Any:
    """Return the only output, or the one named ``logits``."""
    while isinstance(outputs, Mapping | tuple | list):
        if isinstance(outputs, Mapping):
            outputs = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
        else:
            outputs = outputs[0]
    return outputs


def _rows(x: Any, rows: slice) -> Any:
    return {name: array[rows] for name, array in x.items()} if isinstance(x, Mapping) else x[rows]


def _count(x: Any) -> int:
    return len(next(iter(x.values())) if isinstance(x, Mapping) else x)


def _flat(outputs: Any) -> Any:
    return outputs.reshape(len(outputs), -1).astype(np.float64)


def _softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _of_logits(outputs: Any) -> Any:
    rows = _flat(outputs)
    return _both(1 / (1 + np.exp(-rows))) if rows.shape[1] == 1 else _softmax(rows)


def _both(upper: Any) -> Any:
    """Return the probabilities of both classes, of one column as it is if there are more classes."""
    return np.hstack([1 - upper, upper]) if upper.shape[1] == 1 else upper


FORMS: dict[str, Callable[[Any], Any]] = {
    "logits": _of_logits,
    "probabilities": lambda outputs: _both(_flat(outputs)),
    "values": _flat,
}
