"""Data sets of plug-ins: makes arrays a `Dataset`, and turns errors in a plug-in's function into one message."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatbench.data import Dataset
from fatbench.data.common import Images, Labels, Loaded, eight_bits, find_doubts, finish, reason
from fatbench.errors import FatbenchError, MachineError, SpecError
from fatbench.suite import calls, facts
from fatbench.suite.facts import First

PALETTES = ("P", "PA")
GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes without colour
ROUNDINGS = 8  # units of rounding that floats may leave [0, 1] by, after normalising and back


def dataset(
    x: Any,
    y: Any,
    x_test: Any,
    y_test: Any,
    *,
    name: str,
    classes: int | None = None,
    writers: tuple[Any, Any] | None = None,
) -> Dataset:
    """A data set of arrays or tensors, for a plug-in's table DATASETS.

    x, x_test: images (N, C, H, W), (N, H, W, C) or (N, H, W), uint8 or floats in [0, 1] up to rounding, which are
    rounded to 1/255. y, y_test: the class of each, 0 to classes - 1. classes: by default the largest label plus one.
    writers: the person behind each training and each test image. Raises SpecError for any other arrays.

    >>> import numpy, fatbench
    >>> mine = fatbench.dataset(numpy.zeros((4, 8, 8)), [0, 1, 2, 1], numpy.ones((2, 8, 8)), [0, 2], name="mine")
    >>> mine.shape, mine.classes, int(mine.test_images.max())
    ((1, 8, 8), 3, 255)
    """
    train_images, labels = images(name, "x", x), _labels(name, "y", y)
    test_images, test_labels = images(name, "x_test", x_test), _labels(name, "y_test", y_test)
    if train_images.shape[1:] != test_images.shape[1:]:
        raise SpecError(f"{name}: x has images of {_size(train_images)}, x_test of {_size(test_images)}")
    for axes, a, b in (("x, y", train_images, labels), ("x_test, y_test", test_images, test_labels)):
        if len(a) != len(b) or not len(a):
            raise SpecError(f"{name}: {axes}: {len(a)} images and {len(b)} labels")
    largest = int(max(labels.max(), test_labels.max()))
    classes_not_given = classes is None
    classes = largest + 1 if classes is None else classes
    smallest = int(min(labels.min(), test_labels.min()))
    if smallest < 0:
        raise SpecError(f"{name}: labels begin at 0, the smallest is {smallest}")
    if largest >= classes:
        raise SpecError(f"{name}: labels must be 0 to {classes - 1}, the largest is {largest}")
    if classes_not_given and not (labels == 0).any():
        raise SpecError(f"{name}: y: labels begin at 0, the smallest is {labels.min()} (classes={classes} allows it)")
    train_writers, test_writers = writers or (None, None)
    loaded = Loaded(
        Path(name), train_images, labels, test_images, test_labels, classes,
        writers=None if train_writers is None else _labels(name, "writers", train_writers),
        test_writers=None if test_writers is None else _labels(name, "writers", test_writers),
        gaps=not classes_not_given,
    )  # fmt: skip
    return finish(name, None, loaded)


def as_array(name: str, axis: str, values: Any) -> NDArray[Any]:
    """Tensors on any device, images of Pillow, anything like an array, or a list of these, as a numpy array.

    An image of Pillow becomes uint8 (H, W) or (H, W, 3). Raises SpecError for what is no array.
    """
    try:
        if hasattr(values, "detach"):
            tensor = values.detach().cpu()
            return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # numpy has none
        if hasattr(values, "getbands"):
            pixels = np.asarray(eight_bits(values, "L" if values.mode in GREY else "RGB"))
            is_grey = values.mode in PALETTES and (pixels == pixels[..., :1]).all()
            return pixels[..., 0] if is_grey else pixels
        if isinstance(values, list | tuple) and values and {"shape", "getbands"} & {*dir(values[0])}:
            return join(name, axis, [as_array(name, axis, value)[None] for value in values])
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # such as nested lists of several lengths
        raise SpecError(f"{name}: {axis}: {reason(error)}") from None


def join(name: str, axis: str, batches: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Batches as one array; grey images among coloured ones (H, W, 3) get three channels.

    Raises SpecError for several shapes.
    """
    if any(batch.ndim == 4 and batch.shape[3] == 3 for batch in batches):
        batches = [np.repeat(batch[..., None], 3, axis=3) if batch.ndim == 3 else batch for batch in batches]
    try:
        return np.concatenate(batches)
    except ValueError:
        shapes = ", ".join(map(str, sorted({batch.shape[1:] for batch in batches})[:3]))
        raise SpecError(f"{name}: {axis} of several shapes, {shapes}: give all the same") from None


def images(name: str, axis: str, values: Any) -> Images:
    """Images as uint8 (N, C, H, W). Raises SpecError for what `dataset` does not accept."""
    array = as_array(name, axis, values)
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim != 4:
        raise SpecError(f"{name}: {axis}: expected images (N, C, H, W), (N, H, W, C) or (N, H, W), got {array.shape}")
    if array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.dtype.kind == "f":
        rounding = ROUNDINGS * float(np.finfo(array.dtype).eps)
        if np.isnan(array).any():
            raise SpecError(f"{name}: {axis}: {int(np.isnan(array).sum())} values are NaN")
        if not (array.size and array.min() >= -rounding and array.max() <= 1 + rounding):
            raise SpecError(f"{name}: {axis}: floats must be in [0, 1]; pixels of 0 to 255 are given as uint8")
        array = (array.clip(0, 1) * 255).round()
    elif array.dtype != np.uint8:
        raise SpecError(f"{name}: {axis}: expected uint8, or floats in [0, 1], got {array.dtype}")
    return np.ascontiguousarray(array.astype(np.uint8))


def _labels(name: str, axis: str, labels: Any) -> Labels:
    array = as_array(name, axis, labels)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        advice = " (of one-hot labels, give the argmax)" if array.ndim == 2 and array.shape[1] > 1 else ""
        raise SpecError(f"{name}: {axis}: expected integers (N,), got {array.dtype} {array.shape}{advice}")
    return array.astype(np.int64)


def _size(images: Images) -> str:
    return "x".join(map(str, images.shape[1:]))


def load(spec: Mapping[str, Any], root: Path, first: First = (None, None)) -> Dataset:
    """The data set of a canonical mapping.

    first: the number of training and test images wanted; a reader that cannot read fewer returns all. Raises SpecError,
    with the line, for an error in a plug-in's function or a wrong result.
    """
    signature = calls.call("Data", spec).signature
    plugin = signature.plugin
    try:
        reader = calls.build("Data", spec)
        loaded = reader(root, first) if "first" in signature.asks else reader(root)
    except FatbenchError:
        raise
    except MemoryError as error:
        data = facts.of_data(spec)
        has_size = data.train and data.side and data.channels
        size = (data.train or 0) + (data.test or 0)
        size_text = f", {size:,} images, {size * data.channels * data.side**2 / 1e9:.2g} GB" if has_size else ""  # type: ignore
        raise MachineError(f"data: {spec['name']}{size_text}: out of memory ({reason(error)})") from None
    except Exception as error:
        if plugin is None:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == plugin]
        line = f":{lines[-1]}" if lines else ""
        is_below_root = isinstance(error, FileNotFoundError) and Path(str(error.filename)).is_relative_to(root)
        hint = "; --data names another folder" if is_below_root else ""
        reason_text = f"{type(error).__name__}: {reason(error)}{hint}"
        raise SpecError(f"data: {spec['name']}: {plugin}{line}: {reason_text}") from error
    if not isinstance(loaded, Dataset):
        raise SpecError(
            f"data: {spec['name']} returned a {type(loaded).__name__}, not a Dataset; fatbench.dataset(...) makes one"
        )
    if plugin is not None:  # it may have built its Dataset without `finish`
        return replace(loaded, doubts=find_doubts(f"data: {spec['name']}: {plugin}", loaded))
    return loaded
