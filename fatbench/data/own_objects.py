"""Images and labels as Python programs hold them, made into a `Dataset` whose test images they are."""

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
    """The first n images of arrays (x, y), a torch Dataset or DataLoader, or a Hugging Face Dataset; ours as it is.

    classes: of one image as the model takes it, how many classes there are. SpecError: none of these.
    """
    if isinstance(source, Dataset):
        return source
    name = "arrays" if isinstance(source, tuple | list) else type(source).__name__.lower()
    if isinstance(getattr(source, "column_names", None), Mapping):
        raise SpecError(f"dataset: it has the splits {', '.join(source.column_names)}: give one of them")
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise SpecError(f"dataset: {EXPECTED}, got {len(source)} things")
        x, y = (_array(array)[:n] for array in source)
    elif hasattr(source, "dataset") and hasattr(source, "batch_size"):  # a DataLoader
        shuffles = type(getattr(source, "sampler", None)).__name__ == "RandomSampler"
        x, y = _items(source.dataset, n) if shuffles else _batches(source, n)
    elif hasattr(source, "__getitem__") or hasattr(source, "__iter__"):
        x, y = _items(source, n)
    else:
        raise SpecError(f"dataset: {EXPECTED}, got a {type(source).__name__}")
    if x.ndim in (3, 4) and y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    x = as_stored(name, "x_test", x)
    model_classes = classes(x[:1] / np.float32(255)) if len(x) else None
    label_classes = int(y.max()) + 1 if y.size and y.dtype.kind in "iu" else None
    noise = np.random.default_rng(0).integers(256, size=(1, *x.shape[1:]), dtype=np.uint8)  # nothing is trained
    return of_arrays(noise, [0], x, y, name=name, classes=model_classes or label_classes)


def _array(value: Any) -> Any:
    """A tensor of any device, or anything like an array, as one."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _items(source: Any, n: int | None) -> tuple[Any, Any]:
    """Of a data set of (image, label), or of {"image": ..., "label": ...}; without a length, of its first ones."""
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        count = len(source) if n is None else min(n, len(source))
        items: Iterable[Any] = (source[position] for position in range(count))
    else:
        items = itertools.islice(source, n)
    pairs = [_pair(item) for item in items]
    return _together(np.stack, [image for image, _ in pairs]), np.asarray([int(label) for _, label in pairs])


def _batches(loader: Any, n: int | None) -> tuple[Any, Any]:
    images, labels, images_read = [], [], 0
    for batch in loader:
        x, y = _pair(batch)
        images.append(x)
        labels.append(np.atleast_1d(y))
        images_read += len(x)
        if n is not None and images_read >= n:
            break
    return _together(np.concatenate, images)[:n], np.concatenate(labels)[:n]


def _together(join: Callable[[Sequence[Any]], Any], images: Sequence[Any]) -> Any:
    """Images as one array. SpecError: there are none, or of several sizes."""
    if not images:
        raise SpecError("dataset: it is empty")
    try:
        return join(images)
    except ValueError:
        shapes = ", ".join(map(str, sorted({image.shape for image in images})[:3]))
        raise SpecError(f"dataset: images of several shapes, {shapes}: resize them to one") from None


def _pair(item: Any) -> tuple[Any, Any]:
    """Image and label, or a batch of both, of a pair or of a row by names. SpecError: it has none."""
    if isinstance(item, Mapping):
        names = [next((name for name in known if name in item), None) for known in COLUMNS]
        if None in names:
            raise SpecError(
                f"dataset: no image and label among {', '.join(item)} (known: {', '.join(sum(COLUMNS, ()))})"
            )
        image, label = (item[name] for name in names)
        image = _array(image)  # of Hugging Face, which gives uint8 as int64
        whole = image.dtype.kind in "iu" and image.size and image.min() >= 0 and image.max() <= 255
        return (image.astype(np.uint8) if whole else image), _array(label)
    if not (isinstance(item, tuple | list) and len(item) >= 2):
        raise SpecError(f"dataset: expected pairs of images and labels, got a {type(item).__name__}")
    return _array(item[0]), _array(item[1])
