"""A network's fingerprint in the provenance of a run, and whether two fingerprints are of the same network.

    {"logits": [[0.12, -3.4, ...], ...], "signs": ["+-0+...", ...]}

`logits` has a list for each image, null for numbers that are not finite. `signs` has a text for each image: the sign of
the loss gradient at some of its pixels, "0" if it is within rounding; it is empty for a network without gradient. A
network whose logits differ from pass to pass is just {"random": true}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

CLOSE = 1e-3  # of the largest logit of an image: other kernels and devices differ by less, other networks by more
FLIPPED = 0.02  # of the signs: a unit at the edge of its ReLU may flip a few


def same_answers(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Whether two fingerprints agree within rounding; what either side lacks is not compared."""
    if earlier.get("random", False) != current.get("random", False):
        return False
    compared = (("logits", _same_logits), ("signs", _same_signs))
    return all(compare(earlier[key], current[key]) for key, compare in compared if key in earlier and key in current)


def _same_logits(earlier: Sequence[Sequence[float | None]], current: Sequence[Sequence[float | None]]) -> bool:
    if [len(image) for image in earlier] != [len(image) for image in current]:
        return False
    for pair in zip(earlier, current, strict=True):
        margin = CLOSE * max((abs(value) for value in chain(*pair) if value is not None), default=0.0)
        for a, b in zip(*pair, strict=True):
            if (a is None or b is None) and a is not b:
                return False
            if a is not None and b is not None and abs(a - b) > margin:
                return False
    return True


def _same_signs(earlier: Sequence[str], current: Sequence[str]) -> bool:
    if [len(image) for image in earlier] != [len(image) for image in current]:
        return False
    pairs = [pair for pair in zip("".join(earlier), "".join(current), strict=True) if pair != ("0", "0")]
    return sum(a != b for a, b in pairs) <= FLIPPED * len(pairs)
