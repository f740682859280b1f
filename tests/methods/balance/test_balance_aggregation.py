import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.aggregation import scale_factors, weighted_mean, weights
from hetctl.model.errors import BadInputError


def gradients_of(samples, targets, model):
    """Return the gradient of the squared error by sample, of shape (samples, features)."""
    return 2 * (samples @ model - targets)[:, None] * samples


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_uneven_batches_give_the_gradient_of_the_whole_batch(batches, seed):
    # Equation 7: 1/X sum_i |B_i| g_i = 1/X sum over all samples, for any loss that is a mean over samples.
    draw = np.random.default_rng(seed)
    total = sum(batches)
    by_sample = gradients_of(draw.normal(size=(total, 5)), draw.normal(size=total), draw.normal(size=5))
    parts = np.split(by_sample, np.cumsum(batches)[:-1])
    means = [part.mean(axis=0) for part in parts]
    np.testing.assert_allclose(weighted_mean(means, batches), by_sample.mean(axis=0), rtol=1e-9, atol=1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_scaled_gradients_may_be_averaged_plainly(batches, seed):
    gradients = np.random.default_rng(seed).normal(size=(len(batches), 3))
    scaled = scale_factors(batches)[:, None] * gradients
    np.testing.assert_allclose(scaled.mean(axis=0), weighted_mean(list(gradients), batches), atol=1e-12)


def test_a_plain_mean_of_uneven_batches_is_biased():
    means = [np.array([1.0]), np.array([0.0])]
    assert np.mean(means) == 0.5
    assert weighted_mean(means, [1, 9]) == pytest.approx([0.1])


def test_weights_of_equal_batches_are_equal():
    assert weights([8, 8, 8, 8]) == pytest.approx([0.25] * 4)
    assert scale_factors([8, 8, 8, 8]) == pytest.approx([1.0] * 4)


def test_gradients_may_have_any_shape():
    assert weighted_mean([np.ones((2, 3)), np.zeros((2, 3))], [1, 3]) == pytest.approx(np.full((2, 3), 0.25))


@pytest.mark.parametrize("batches", [[], [0, 0], [4, -1]])
def test_batches_that_weigh_nothing_are_refused(batches):
    with pytest.raises(BadInputError):
        weights(batches)
