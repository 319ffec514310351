"""Images and labels as Python programs hold them, made into a `Dataset` whose test images they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fatbench.data import Dataset
from fatbench.data.own import dataset as of_arrays
from fatbench.errors import SpecError

COLUMNS = (("image", "img", "pixel_values"), ("label", "labels", "fine_label"))  # of Hugging Face's data sets
EXPECTED = "expected a name, (x, y), a Dataset or a DataLoader of images and labels"


def dataset(given: Any, n: int | None, classes: Callable[[Any], int | None]) -> Dataset:
    """The first n images of arrays (x, y), a torch Dataset or DataLoader, or a Hugging Face Dataset; ours as it is.

    classes: of one image as the model takes it, how many classes there are. SpecError: none of these.
    """
    if isinstance(given, Dataset):
        return given
    name = "arrays" if isinstance(given, tuple | list) else type(given).__name__.lower()
    if hasattr(given, "column_names"):
        x, y = _columns(given, n)
    elif isinstance(given, tuple | list):
        if len(given) != 2:
            raise SpecError(f"dataset: {EXPECTED}, got {len(given)} things")
        x, y = (_array(part)[:n] for part in given)
    elif hasattr(given, "dataset") and hasattr(given, "batch_size"):  # a DataLoader
        shuffles = type(getattr(given, "sampler", None)).__name__ == "RandomSampler"
        x, y = _items(given.dataset, n) if shuffles else _batches(given, n)
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        x, y = _items(given, n)
    else:
        raise SpecError(f"dataset: {EXPECTED}, got a {type(given).__name__}")
    if x.ndim in (3, 4) and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    known = None if x.ndim != 4 else classes(x[:1] / 255 if x.dtype == np.uint8 else x[:1])
    most = int(y.max()) + 1 if y.size and y.dtype.kind in "iu" else None
    noise = np.random.default_rng(0).integers(256, size=(1, *x.shape[1:]), dtype=np.uint8)  # nothing is trained
    return of_arrays(noise, [0], x, y, name=name, classes=known or most)


def _array(part: Any) -> Any:
    """A tensor of any device, or anything like an array, as one."""
    return part.detach().cpu().numpy() if hasattr(part, "detach") else np.asarray(part)


def _items(given: Any, n: int | None) -> tuple[Any, Any]:
    """Of a data set (image, label) by position."""
    many = len(given) if n is None else min(n, len(given))
    pairs = [_pair(given[position]) for position in range(many)]
    if not pairs:
        raise SpecError("dataset: it is empty")
    return np.stack([image for image, _ in pairs]), np.asarray([int(label) for _, label in pairs])


def _batches(given: Any, n: int | None) -> tuple[Any, Any]:
    images, labels, have = [], [], 0
    for batch in given:
        x, y = _pair(batch)
        images.append(x)
        labels.append(np.atleast_1d(y))
        have += len(x)
        if n is not None and have >= n:
            break
    if not images:
        raise SpecError("dataset: it is empty")
    return np.concatenate(images)[:n], np.concatenate(labels)[:n]


def _pair(item: Any) -> tuple[Any, Any]:
    if not (isinstance(item, tuple | list) and len(item) >= 2):
        raise SpecError(f"dataset: expected pairs of images and labels, got a {type(item).__name__}")
    return _array(item[0]), _array(item[1])


def _columns(given: Any, n: int | None) -> tuple[Any, Any]:
    """Of a Hugging Face data set. SpecError: it has no column of images or of labels."""
    if isinstance(given.column_names, dict):
        raise SpecError(f"dataset: it has the splits {', '.join(given.column_names)}: give one of them")
    found = [next((name for name in names if name in given.column_names), None) for names in COLUMNS]
    if None in found:
        raise SpecError(f"dataset: no columns of images and labels among {', '.join(given.column_names)}")
    many = len(given) if n is None else min(n, len(given))
    rows = [given[position] for position in range(many)]
    if not rows:
        raise SpecError("dataset: it is empty")
    return np.stack([_array(row[found[0]]) for row in rows]), np.asarray([int(row[found[1]]) for row in rows])
