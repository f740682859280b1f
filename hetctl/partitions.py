"""Partitions as data of ``input_fn(data, path)``.

A partition of ``hetctl partition`` is a NumPy archive (``.npz``) without compression, with the arrays ``x``,
``y``, ``x_validation`` and ``y_validation``. ``numpy.load`` reads it, too, but into memory.
"""

from hetctl.runtime.data.partition_files import read

__all__ = ["read"]
