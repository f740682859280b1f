"""Samples that are neither arrays nor pairs, as data of ``input_fn``.

`Collated` is a dataset of mappings, or of samples of several lengths, with the function that makes batches.
"""

from hetctl.runtime.data.collated import Collated

__all__ = ["Collated"]
