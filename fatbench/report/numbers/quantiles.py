"""Many clients in few numbers: the least, the quartiles and the largest."""

from __future__ import annotations

from collections.abc import Sequence

MANY = 50  # clients from which they are not shown one by one


def five(values: Sequence[float]) -> dict[str, float]:
    """The name of each quantile -> its value, interpolated linearly between two of at least one.

    >>> five([4.0, 0.0, 1.0, 2.0, 3.0])
    {'least': 0.0, '25 %': 1.0, 'median': 2.0, '75 %': 3.0, 'largest': 4.0}
    """
    ordered = sorted(values)

    def quantile(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    names = ("least", "25 %", "median", "75 %", "largest")
    return dict(zip(names, map(quantile, (0, 0.25, 0.5, 0.75, 1)), strict=True))
