"""Parts of partitioned data as data of ``input_fn(data, path)``.

A part that ``hetctl partition`` writes is a NumPy archive (``.npz``) without compression, with the arrays
``x``, ``y``, ``x_validation`` and ``y_validation``. ``numpy.load`` reads it, too, but into memory.
"""

from hetctl.runtime.data.part_files import read

__all__ = ["read"]
