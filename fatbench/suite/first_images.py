"""How many of the first images of its data sets a cell reads: a reader that asks for `first` reads no more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.suite import signatures

First = tuple[int | None, int | None]  # training and test images; None: all


def images_read(train: int | None, test: int | None, train_from: int = 0, auxiliary_n: int | None = 0) -> First:
    """How many of the first training and test images a cell has; None: all.

    auxiliary_n: of the images after its own, which are the server's.
    """
    return (None if not train or auxiliary_n is None else train_from + train + auxiliary_n), test


def first_images(spec: Mapping[str, Any]) -> dict[str, First]:
    """How many training and test images a cell reads of its data set and of the server's, as `images_read`."""
    n, is_same_set = spec.get("auxiliary_n"), spec.get("auxiliary") == spec.get("data")
    train = 1 if "evaluated" in spec else spec.get("train")  # of a model that is only attacked
    own_images = images_read(train, spec.get("test"), spec.get("train_from") or 0, n if is_same_set else 0)
    return {"data": own_images, "auxiliary": own_images if is_same_set else (n, 1)}


def data_key(data: Any, image_counts: First) -> str:
    """By what the database knows what a data set was when it was last read.

    image_counts: the training and test images that were read, of a reader that reads no more: others have other
    digests.
    """
    is_partial = False
    with contextlib.suppress(FatbenchError):  # of a plug-in that is not loaded
        is_partial = "first" in signatures.describe("Data", data["name"]).asks and image_counts != (None, None)
    return json.dumps([data, image_counts] if is_partial else data, sort_keys=True, separators=(",", ":"))


def data_keys(spec: Mapping[str, Any]) -> dict[str, str]:
    """`data_key` of each data set that a cell reads, by the name of the setting."""
    counts_by_setting = first_images(spec)
    return {
        name: data_key(spec[name], counts_by_setting[name]) for name in counts_by_setting if spec.get(name) is not None
    }
