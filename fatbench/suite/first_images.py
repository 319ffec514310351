"""How many of the first images of its data sets a cell reads: a reader that asks for `first` reads no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

First = tuple[int | None, int | None]  # training and test images; None: all


def wanted(train: int | None, test: int | None, train_from: int = 0, auxiliary_n: int | None = 0) -> First:
    """How many of the first training and test images a cell has; None: all.

    auxiliary_n: of the images after its own, which are the server's.
    """
    return (None if not train or auxiliary_n is None else train_from + train + auxiliary_n), test


def first_images(spec: Mapping[str, Any]) -> dict[str, First]:
    """How many training and test images a cell reads of its data set and of the server's, as `wanted`."""
    n, same = spec.get("auxiliary_n"), spec.get("auxiliary") == spec.get("data")
    train = 1 if "evaluated" in spec else spec.get("train")  # of a model that is only attacked
    own = wanted(train, spec.get("test"), spec.get("train_from") or 0, n if same else 0)
    return {"data": own, "auxiliary": own if same else (n, 1)}
