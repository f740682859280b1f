"""Weights of a checkpoint as a plain ``state_dict``, in files that PyTorch loads without hetctl."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks.packed_state import within
from hetctl.runtime.frameworks.stage_network import LAYER, SavedNetwork
from hetctl.runtime.frameworks.torch_chain import layer_paths
from hetctl.runtime.frameworks.torch_parts import parts_of, unpack

COMPILED = "_orig_mod."
"""Prefix of the names in a module that ``torch.compile`` returned."""

State = dict[str, Any]


def write_weights(saved: SavedNetwork, file: Path) -> str:
    """Write the module's state into a file with the ending ``.pt`` or ``.safetensors``.

    Raises
    ------
    BadInputError
        If safetensors is not installed, or the state has values that such a file cannot hold.
    """
    state = {name.removeprefix(COMPILED): value for name, value in _state_of(saved).items()}
    if file.suffix == ".pt":
        torch.save(state, file)
    else:
        _write_safetensors(state, file)
    return ""


def _state_of(saved: SavedNetwork) -> State:
    if saved.is_pipeline:
        return _of_stages(saved)
    state: State = unpack(saved.arrays)["model"]
    return state if saved.shards is None else _with_shards(state, saved.shards)


def _of_stages(saved: SavedNetwork) -> State:
    """Return the state of a sequential module from those of its layers; ``model_fn`` gives their names."""
    model = parts_of(saved.build(), saved.member.name).model
    state: State = {}
    for layer, path in enumerate(layer_paths(model)):
        own = unpack(within(saved.arrays, LAYER.format(layer)))
        state |= {f"{path}.{name}": value for name, value in own["model"].items()}
    return state


def _with_shards(state: State, folder: Path) -> State:
    """Return a state with whole tensors from the files of all ranks."""
    # Its packages take a second: only networks in parts need them.
    from hetctl.runtime.frameworks.torch_sharded import SHARD, CheckedReader, read_shards

    metadata = CheckedReader(folder).read_metadata().state_dict_metadata
    divided = {name for name, value in state.items() if isinstance(value, Mapping) and SHARD in value}
    shards = {
        f"model/{name}": torch.empty(metadata[f"model/{name}"].size, dtype=getattr(torch, state[name][SHARD]))
        for name in divided
    }
    with warnings.catch_warnings():
        # That one process reads what a group wrote.
        warnings.simplefilter("ignore")
        read_shards(shards, folder, alone=True)
    return {name: shards.get(f"model/{name}", value) for name, value in state.items()}


def _write_safetensors(state: State, file: Path) -> None:
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise BadInputError(
            f"{file.name} needs the package safetensors, which is not installed",
            "`pip install safetensors`, or name a file that ends with .pt",
        ) from None
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise BadInputError(
            f"the state has values that are no tensors: {', '.join(others)}", "name a file that ends with .pt"
        )
    save_file({name: value.contiguous() for name, value in state.items()}, file, {"format": "pt"})
