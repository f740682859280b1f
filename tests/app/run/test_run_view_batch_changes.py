"""Changes of a member's global batch, by its epochs."""

from hetctl.app.run.view import batch_changes
from hetctl.model.ensemble import Member
from hetctl.model.run_status import BatchChange
from hetctl.model.training_progress import EpochHistory, EpochResult


def epochs(*sizes):
    return EpochHistory.of(
        EpochResult(number, {}, 1.0, gpus, 0.0, batch_size=batch)
        for number, (gpus, batch) in enumerate(sizes, start=1)
    )


def test_more_gpus_and_smaller_batches_change_the_global_batch():
    found = batch_changes(Member("m"), epochs((1, 32), (1, 32), (2, 32), (4, 16), (1, None), (1, 16)))
    assert found == (BatchChange(3, 32, 64, 2), BatchChange(6, 64, 16, 1))


def test_a_given_global_batch_does_not_change():
    assert batch_changes(Member("m", global_batch_size=64), epochs((1, 32), (2, 32), (2, 16))) == ()
