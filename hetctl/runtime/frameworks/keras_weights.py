"""Weights of a checkpoint of Keras, in files that Keras loads without hetctl."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.keras_chain import assign_layers
from hetctl.runtime.frameworks.keras_model import assign_all, compiled_model
from hetctl.runtime.frameworks.keras_network import make_variables, numbered
from hetctl.runtime.frameworks.stage_network import SavedNetwork

CODE = "__lambda__"
"""Class of a Python function inside a file of Keras, which is stored as code."""
WEIGHTS = ".weights.h5"


def write_weights(saved: SavedNetwork, file: Path) -> str:
    """Write the model into a ``.keras`` file, or its weights into ``.weights.h5``; see `Framework`.

    Raises
    ------
    BadInputError
        If ``model_fn`` builds another network, or a ``.keras`` file would need the user's code.
    """
    model = compiled_model(saved.build(), saved.member.name)
    if not model.built:
        make_variables(model, *saved.sample())
    model.optimizer.build(model.trainable_variables)
    if saved.is_pipeline:
        assign_layers(model, saved.arrays)
    else:
        of_model, of_optimizer = (
            {name: array for name, array in saved.arrays.items() if name.startswith(owner)}
            for owner in ("model/", "optimizer/")
        )
        assign_all(numbered("model", model), of_model)
        # Those of the optimizer only if it has the same ones.
        with suppress(BadInputError):
            assign_all(numbered("optimizer", model.optimizer), of_optimizer)
    if file.name.endswith(WEIGHTS):
        model.save_weights(file)
        return "load it into the model of model_fn: model.load_weights(FILE)"
    model.save(file)
    return _needs_of(file)


def _needs_of(file: Path) -> str:
    """Return how to load a ``.keras`` file; BadInputError if its layers need the user's code."""
    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"))
    compiled_with = config.pop("compile_config", None)
    if layers := sorted(set(_own_classes(config))):
        raise BadInputError(
            f"a .keras file of this model loads only with your own code: {', '.join(layers)}",
            f"name a file that ends with {WEIGHTS}, which loads into the model of your model_fn",
        )
    if others := sorted(set(_own_classes(compiled_with))):
        return f"load it with compile=False, or with your own code: {', '.join(others)}"
    return ""


def _own_classes(config: Any) -> Iterator[str]:
    """Yield the classes and functions in a configuration that Keras does not have."""
    if isinstance(config, Mapping):
        module, name = config.get("module"), config.get("class_name")
        is_function = name == "function"
        if name == CODE:
            yield "a lambda"
        elif isinstance(name, str) and not is_function and module is not None and not _is_of_keras(module):
            yield f"{module}.{name}"
        elif is_function and not _is_of_keras(str(module or "")):
            yield str(config.get("config"))
        for value in config.values():
            yield from _own_classes(value)
    elif isinstance(config, list):
        for value in config:
            yield from _own_classes(value)


def _is_of_keras(module: str) -> bool:
    return module.split(".")[0] == "keras"
