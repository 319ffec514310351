"""The number of images that a cell reads of its data sets: a reader that asks for `first` reads no more."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.suite import signatures

First = tuple[int | None, int | None]  # training and test images; None: all


def images_read(train: int | None, test: int | None, train_from: int = 0, auxiliary_n: int | None = 0) -> First:
    """(training images, test images) that a cell reads from the beginning of its data set; None for all.

    auxiliary_n: the number of images after its own, which the server uses.
    """
    return (None if not train or auxiliary_n is None else train_from + train + auxiliary_n), test


def first_images(spec: Mapping[str, Any]) -> dict[str, First]:
    """{"data": ..., "auxiliary": ...}: the counts of `images_read` for the cell's data set and the server's."""
    n, is_same_set = spec.get("auxiliary_n"), spec.get("auxiliary") == spec.get("data")
    train = 1 if "evaluated" in spec else spec.get("train")  # an external model is only attacked
    own_images = images_read(train, spec.get("test"), spec.get("train_from") or 0, n if is_same_set else 0)
    return {"data": own_images, "auxiliary": own_images if is_same_set else (n, 1)}


def data_key(data: Any, image_counts: First) -> str:
    """The key under which the database remembers the content of a data set when it was last read.

    image_counts: the images that were read; part of the key only if the reader stops after them, for then the digest
    depends on them.
    """
    is_partial = False
    with contextlib.suppress(FatbenchError):  # the reader is of a plug-in that is not loaded
        is_partial = "first" in signatures.describe("Data", data["name"]).asks and image_counts != (None, None)
    return json.dumps([data, image_counts] if is_partial else data, sort_keys=True, separators=(",", ":"))


def data_keys(spec: Mapping[str, Any]) -> dict[str, str]:
    """{"data": key, "auxiliary": key} of the data sets that a cell reads, see `data_key`."""
    counts_by_setting = first_images(spec)
    return {
        name: data_key(spec[name], counts_by_setting[name]) for name in counts_by_setting if spec.get(name) is not None
    }
