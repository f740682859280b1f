"""Networks with several named inputs train as one does that gets them as one array."""

from contextlib import ExitStack

import numpy as np
import pytest
from tiny_networks import ENSEMBLES, seed_all

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.runtime.data.batches import Batches, validation_batches
from hetctl.runtime.data.input_pipeline import Sharing, open_pipeline
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.user_functions import load_functions

pytestmark = pytest.mark.training
NAMES = {"tensorflow": "keras", "pytorch": "torch"}


def results(framework, kind, train_fn=None):
    """The losses of two epochs, and the results of an evaluation."""
    name = NAMES[framework]
    own = f"halves:{name}_train_fn" if train_fn else None
    functions = Functions("halves:input_fn", f"halves:{name}_model_fn", own)
    loaded = load_functions(Ensemble("halves", framework, functions, (), str(ENSEMBLES)))
    member = Member("m", {"named": kind != "whole"}, 32, 5, StopRule(metric="val_loss", max_epochs=2))
    training, validation = as_sources(loaded.input_fn(kind))
    with ExitStack() as stack:
        loader = open_pipeline(training, Sharing(), stack)(Stream(len(training), 32, 5))
        held_out = open_pipeline(validation, Sharing(), stack, "validation")(
            Stream(len(validation), 32, UNSHUFFLED)
        )
        stack.callback(loader.close)
        stack.callback(held_out.close)
        seed_all(framework, 5)
        network = load_framework(framework).build(member, loaded, Group(), loader.sample)
        losses = [network.train(Batches(loader, epoch, 0, Group(), lambda: False)) for epoch in (1, 2)]
        return losses, network.evaluate(validation_batches(held_out, 2, lambda: None))


# Batches of datasets are views of memory that preprocessors write.
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("framework", NAMES)
def test_named_inputs_give_the_losses_of_one_array(framework):
    losses, scores = results(framework, "whole")
    for kind in ("arrays", "dataset"):
        found, evaluated = results(framework, kind)
        assert found == pytest.approx(losses, rel=1e-6)
        assert evaluated == pytest.approx(scores, rel=1e-6)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("framework", NAMES)
def test_a_train_fn_gets_a_mapping(framework):
    losses, _ = results(framework, "whole", train_fn=True)
    found, _ = results(framework, "arrays", train_fn=True)
    assert found == pytest.approx(losses, rel=1e-6)
    assert np.isfinite(losses).all()
