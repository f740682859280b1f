"""Numbers of GPUs on which a member may train, after it ran out of memory on some."""

from __future__ import annotations

from collections.abc import Collection


def gpus_left(
    least: int, most: int, unfit: Collection[int], fitting: Collection[int]
) -> tuple[int, int] | None:
    """Return the least and the largest number of GPUs on which a member may train; None if none is left.

    Where its memory was enough on fewer GPUs, it may try half of those on which it was not. Else a GPU's part
    has to be smaller, and it may try twice as many. It so takes few starts to find a number that fits.

    Parameters
    ----------
    least, most : int
        Numbers of GPUs that it may have otherwise.
    unfit, fitting : collection of int
        Numbers of GPUs on which its memory was not enough, and was enough.
    """
    for gpus in sorted({*unfit}.difference(fitting)):
        fewer = [count for count in fitting if least <= count < gpus]
        more = [count for count in fitting if gpus < count <= most]
        if fewer:
            most = min(most, max(gpus // 2, *fewer))
        elif least <= gpus:
            least = max(gpus + 1, min(2 * gpus, most, *more))
    return (least, most) if least <= most else None
