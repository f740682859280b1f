"""Samples that are neither arrays nor pairs, as data of ``input_fn``.

`Collated` is a dataset of mappings, or of samples of several lengths, with the function that makes batches.
`Shards` are files of samples, or parts of a stream, that are read from their beginning to their end.
"""

from hetctl.runtime.data.named_arrays import Collated
from hetctl.runtime.data.shards import Shards

__all__ = ["Collated", "Shards"]
