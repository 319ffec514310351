"""Makes images and labels of a running program the test images of a `Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatbench.data import Dataset
from fatbench.data.own import as_array, join
from fatbench.data.own import dataset as of_arrays
from fatbench.data.own import images as as_stored
from fatbench.errors import SpecError

COLUMNS = (("image", "img", "pixel_values"), ("label", "labels", "fine_label"))  # of Hugging Face's data sets
EXPECTED = "expected a name, (x, y), a Dataset or a DataLoader of images and labels"
AGAIN = 64  # images that are read twice, and must be the same
Arrays = tuple[NDArray[Any], NDArray[Any]]  # images and their labels


def dataset(source: Any, n: int | None, classes: Callable[[Any], int | None]) -> Dataset:
    """The first n images of arrays (x, y), a torch Dataset or DataLoader, or a Hugging Face Dataset.

    A fatbench `Dataset` is returned unchanged. A DataLoader gives the images of its Dataset in their order: `shuffle`
    and `drop_last` change nothing. classes: gives the model's number of classes for one image. Raises SpecError for
    anything else, and for images that are others when they are read again.
    """
    if isinstance(source, Dataset):
        return source
    name = "arrays" if isinstance(source, tuple | list) else type(source).__name__.lower()
    if isinstance(getattr(source, "column_names", None), Mapping):
        raise SpecError(f"dataset: pass one of its splits: {', '.join(source.column_names)}")
    if isinstance(source, tuple | list):
        if len(source) != 2:
            raise SpecError(f"dataset: {EXPECTED}, got {len(source)} values")
        x, y = (
            np.atleast_1d(as_array(name, axis, array))[:n]
            for axis, array in zip(("x_test", "y_test"), source, strict=True)
        )
    elif all(hasattr(source, attribute) for attribute in ("dataset", "batch_size", "__iter__")):  # a DataLoader
        x, y = _read(_batches_of(source), n)
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        x, y = _read(lambda: _single(source[row] for row in range(len(source))), n)
    elif hasattr(source, "__iter__"):
        once = iter(source)
        x, y = _read(lambda: _single(source), n, repeatable=once is not source)
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
    if (x == noise).all(axis=(1, 2, 3)).any():  # images that somebody drew in the same way
        noise = 255 - noise
    return of_arrays(noise, [0], x, y, name=name, classes=model_classes or label_classes)


def _read(batches: Callable[[], Iterable[Arrays]], n: int | None, *, repeatable: bool = True) -> Arrays:
    """The first n images and labels of batches, which are read from the beginning at each call.

    Raises SpecError if there are none, if they have several shapes, or if the second reading gives others.
    """
    read: list[Arrays] = []
    count = 0
    for batch in batches():
        read.append(batch)
        count += len(batch[0])
        if n is not None and count >= n:
            break
    if not read:
        raise SpecError("dataset: no images")
    compared = 0
    for batch, again in zip(read, batches() if repeatable else (), strict=False):
        pairs = [(a, b) for a, b in zip(batch, again, strict=True) if a.dtype.kind != "O"]
        if any(a.shape != b.shape or a.tobytes() != b.tobytes() for a, b in pairs):
            raise SpecError(
                "dataset: its images are others when they are read again: leave out random transforms and samplers"
            )
        compared += len(again[0])
        if compared >= AGAIN:
            break
    x, y = (
        join("dataset", axis, arrays)
        for axis, arrays in zip(("images", "labels"), zip(*read, strict=True), strict=True)
    )
    return x[:n], y[:n]


def _single(items: Iterable[Any]) -> Iterator[Arrays]:
    """Items (image, label) or {"image": ..., "label": ...} as batches of one."""
    for item in items:
        image, label = _image_and_label(item)
        yield image[None], label[None]


def _batches_of(loader: Any) -> Callable[[], Iterator[Arrays]]:
    """Reads a DataLoader in batches; what its sampler shuffles, in the order of its Dataset.

    Raises SpecError if it leaves images out or draws others each time.
    """
    sampler = getattr(loader, "sampler", None)
    drawn: Any = getattr(loader, "batch_sampler", None) or sampler if loader.batch_size is None else sampler
    of_torch = getattr(type(loader).__iter__, "__module__", "").startswith("torch.utils.data")
    if not (of_torch and hasattr(drawn, "__len__")):  # it iterates in a way of its own, or reads a stream
        if getattr(loader, "drop_last", False):
            raise SpecError("dataset: this loader leaves images out: give drop_last=False")
        return lambda: map(_batch, loader)
    rows, again = ([row for rows in drawn for row in np.atleast_1d(rows).tolist()] for _ in range(2))
    if rows != again:
        rows = sorted(rows)
        if rows != sorted(again) or len({*rows}) != len(rows):
            raise SpecError(f"dataset: its {type(drawn).__name__} draws other images each time: give the Dataset")
    if loader.batch_size is None and drawn is sampler:  # it collates nothing
        return lambda: _single(loader.collate_fn(loader.dataset[row]) for row in rows)

    def batches() -> Iterator[Arrays]:
        size = loader.batch_size or AGAIN
        for start in range(0, len(rows), size):
            yield _batch(loader.collate_fn([loader.dataset[row] for row in rows[start : start + size]]))

    return batches


def _batch(collated: Any) -> Arrays:
    x, y = map(np.atleast_1d, _image_and_label(collated))
    return x, y


def _image_and_label(item: Any) -> Arrays:
    """(image, label), or a batch of both, from a pair or a mapping. Raises SpecError for anything else."""
    if isinstance(item, Mapping):
        names = [next((name for name in choices if name in item), None) for choices in COLUMNS]
        if None in names:
            raise SpecError(
                f"dataset: no image and label among {', '.join(item)} (known: {', '.join(sum(COLUMNS, ()))})"
            )
        image, label = (as_array("dataset", str(name), item[name]) for name in names)
        # Hugging Face returns uint8 as int64
        if image.dtype == np.int64 and image.size and image.min() >= 0 and image.max() <= 255:
            image = image.astype(np.uint8)
        return image, label
    if not (isinstance(item, tuple | list) and len(item) >= 2):
        raise SpecError(f"dataset: expected pairs of images and labels, got a {type(item).__name__}")
    image, label = (as_array("dataset", axis, value) for axis, value in zip(("image", "label"), item, strict=False))
    if label.ndim >= 2 and label.ndim > image.ndim:
        raise SpecError("dataset: expected pairs (image, label), got (label, image)")
    return image, label
