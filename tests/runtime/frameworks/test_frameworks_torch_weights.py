"""Weights of pipelines and compiled modules, as files for plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.frameworks.stage_network import SavedNetwork
from hetctl.runtime.frameworks.torch_parts import pack
from hetctl.runtime.worker.user_functions import UserFunctions

pytestmark = pytest.mark.training
MEMBER = Member("m")
X, Y = torch.zeros(1, 4).numpy(), torch.zeros(1, dtype=torch.int64).numpy()


def nested(_config):
    inner = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh())
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), inner, torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()}


def written(arrays, file, model_fn=nested):
    saved = SavedNetwork(MEMBER, arrays, None, lambda: model_fn({}), lambda: (X, Y))
    load_framework("pytorch").write_weights(saved, file)
    return torch.load(file, weights_only=True)


def test_the_stages_of_a_pipeline_become_one_module(tmp_path):
    framework = load_framework("pytorch")
    framework.prepare((0,), None, 5)
    chain = framework.chain(MEMBER, UserFunctions(None, nested, None))
    arrays = {}
    for layers in (range(2), range(2, len(chain.layers))):
        arrays |= chain.build(layers, (X, Y)).save()
    state = written(arrays, tmp_path / "m.pt")
    framework.prepare((0,), None, 5)
    expected = nested({})["model"].state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    nested({})["model"].load_state_dict(state)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_compiled_module_is_written_as_the_module_inside(tmp_path):
    module = torch.nn.Linear(3, 2)
    arrays = pack({"model": torch.compile(module).state_dict(), "optimizer": {}})
    assert list(written(arrays, tmp_path / "m.pt")) == ["weight", "bias"]


def test_what_is_no_tensor_does_not_go_into_safetensors(tmp_path):
    arrays = pack({"model": {"weight": torch.ones(2), "steps": 3}, "optimizer": {}})
    with pytest.raises(BadInputError, match="steps"):
        written(arrays, tmp_path / "m.safetensors")
    assert written(arrays, tmp_path / "m.pt")["steps"] == 3
