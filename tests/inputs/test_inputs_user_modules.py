"""The framework of users' functions is found without running them."""

from __future__ import annotations

import pytest

from hetctl.inputs.user_modules import framework_of
from hetctl.model.ensemble import Functions


@pytest.mark.parametrize(
    ("modules", "framework"),
    [
        ({"nets": "import torch.nn as nn"}, "pytorch"),
        ({"nets": "from keras import layers"}, "tensorflow"),
        ({"nets": "import tensorflow as tf"}, "tensorflow"),
        ({"nets": "def model_fn(config):\n    import torch"}, "pytorch"),
        ({"nets": "from layers import block", "layers": "from torch import nn\nimport nets"}, "pytorch"),
        ({"nets": "import torch, keras"}, "tensorflow"),
        ({"nets": "import numpy"}, "tensorflow"),
        ({"nets": "import torch\nraise SystemExit"}, "pytorch"),
        ({"nets": "import torch ("}, "tensorflow"),
        ({}, "tensorflow"),
    ],
)
def test_it_is_the_one_that_the_module_of_model_fn_imports(modules, framework, tmp_path):
    (tmp_path / "data.py").write_text("import keras")
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert framework_of(Functions("data:input_fn", "nets:model_fn"), tmp_path) == framework
