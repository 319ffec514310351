"""Makes images and labels of a running program the test images of a `Dataset`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fatbench.data import Dataset
from fatbench.data.own import dataset as of_arrays
from fatbench.data.own import images as as_stored
from fatbench.errors import SpecError

COLUMNS = (("image", "img", "pixel_values"), ("label", "labels", "fine_label"))  # of Hugging Face's data sets
EXPECTED = "expected a name, (x, y), a Dataset or a DataLoader of images and labels"


def dataset(source: Any, n: int | None, classes: Callable[[Any], int | None]) -> Dataset:
    """The first n images of arrays (x, y), a torch Dataset or DataLoader, or a Hugging Face Dataset.

    A fatbench `Dataset` is returned unchanged. classes: gives the model's number of classes for one image. Raises
    SpecError for anything else.
    """
    if isinstance(source, Dataset):
        return source
    name = "arrays" if isinstance(source, tuple | list) else type(source).__name__.lower()
    if isinstance(getattr(source, "column_names", None), Mapping):
        raise SpecError(f"dataset: pass one of its splits: {', '.join(source.column_names)}")
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise SpecError(f"dataset: {EXPECTED}, got {len(source)} values")
        x, y = (_as_array(array)[:n] for array in source)
    elif hasattr(source, "dataset") and hasattr(source, "batch_size"):  # a DataLoader
        shuffles = type(getattr(source, "sampler", None)).__name__ == "RandomSampler"
        x, y = _read_items(source.dataset, n) if shuffles else _read_batches(source, n)
    elif hasattr(source, "__getitem__") or hasattr(source, "__iter__"):
        x, y = _read_items(source, n)
    else:
        raise SpecError(f"dataset: {EXPECTED}, got a {type(source).__name__}")
    if x.ndim in (3, 4) and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    x = as_stored(name, "x_test", x)
    model_classes = classes(x[:1] / np.float32(255)) if len(x) else None
    label_classes = int(y.max()) + 1 if y.size and y.dtype.kind in "iu" else None
    noise = np.random.default_rng(0).integers(
        256, size=(1, *x.shape[1:]), dtype=np.uint8
    )  # stands in for training images, of which none are used
    return of_arrays(noise, [0], x, y, name=name, classes=model_classes or label_classes)


def _as_array(value: Any) -> Any:
    """A tensor on any device, or anything like an array, as a numpy array."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _read_items(source: Any, n: int | None) -> tuple[Any, Any]:
    """The first n of a data set of (image, label) or {"image": ..., "label": ...}, with or without a length."""
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        count = len(source) if n is None else min(n, len(source))
        items: Iterable[Any] = (source[position] for position in range(count))
    else:
        items = itertools.islice(source, n)
    pairs = [_image_and_label(item) for item in items]
    return _join(np.stack, [image for image, _ in pairs]), np.asarray([int(label) for _, label in pairs])


def _read_batches(loader: Any, n: int | None) -> tuple[Any, Any]:
    images, labels, images_read = [], [], 0
    for batch in loader:
        x, y = _image_and_label(batch)
        images.append(x)
        labels.append(np.atleast_1d(y))
        images_read += len(x)
        if n is not None and images_read >= n:
            break
    return _join(np.concatenate, images)[:n], np.concatenate(labels)[:n]


def _join(join: Callable[[Sequence[Any]], Any], images: Sequence[Any]) -> Any:
    """Images as one array. Raises SpecError if there are none, or of several sizes."""
    if not images:
        raise SpecError("dataset: no images")
    try:
        return join(images)
    except ValueError:
        shapes = ", ".join(map(str, sorted({image.shape for image in images})[:3]))
        raise SpecError(f"dataset: images of several shapes, {shapes}: resize them to the same") from None


def _image_and_label(item: Any) -> tuple[Any, Any]:
    """(image, label), or a batch of both, from a pair or a mapping. Raises SpecError for anything else."""
    if isinstance(item, Mapping):
        names = [next((name for name in choices if name in item), None) for choices in COLUMNS]
        if None in names:
            raise SpecError(
                f"dataset: no image and label among {', '.join(item)} (known: {', '.join(sum(COLUMNS, ()))})"
            )
        image, label = (item[name] for name in names)
        image = _as_array(image)  # Hugging Face returns uint8 as int64
        has_bytes = image.dtype.kind in "iu" and image.size and image.min() >= 0 and image.max() <= 255
        return (image.astype(np.uint8) if has_bytes else image), _as_array(label)
    if not (isinstance(item, tuple | list) and len(item) >= 2):
        raise SpecError(f"dataset: expected pairs of images and labels, got a {type(item).__name__}")
    return _as_array(item[0]), _as_array(item[1])
