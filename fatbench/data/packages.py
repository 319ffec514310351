"""Data sets that other packages read: a class of torchvision.datasets, or what the package `datasets` loads."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench.data.common import Images, Labels, Loaded, eight_bits, fair_order, reason
from fatbench.errors import FatbenchError, MachineError, SpecError, did_you_mean
from fatbench.suite.first_images import First

if TYPE_CHECKING:
    from PIL import Image

EVERY = 5  # of a set that is published in one piece, every fifth image of a class is a test image, as of `digits`


def load_torchvision(
    root: Path, dataset: str, size: int, grey: bool, splits: tuple[str, str], settings: Mapping[str, Any]
) -> Loaded:
    """The arrays of a class of torchvision.datasets. SpecError: no such class or setting; MachineError: unreadable."""
    from torchvision import datasets

    if dataset not in datasets.__all__:
        raise SpecError(f"torchvision has no data set '{dataset}'{did_you_mean(dataset, datasets.__all__)}")
    kind = getattr(datasets, dataset)
    takes = _parameters(kind)
    if unknown := [key for key in settings if key not in takes]:
        raise SpecError(f"torchvision's {dataset} has no setting '{unknown[0]}'{did_you_mean(unknown[0], takes)}")
    choices: tuple[dict[str, Any], ...] = ({},)
    if "train" in takes:
        choices = ({"train": True}, {"train": False})
    elif "split" in takes:
        choices = ({"split": splits[0]}, {"split": splits[1]})
    if chosen := [key for key in settings if key in choices[0]]:
        how = "by train_split and test_split" if chosen == ["split"] else "as training and test images"
        raise SpecError(f"data: '{chosen[0]}' is set here: both parts of torchvision's {dataset} are read, {how}")
    given = {**settings, **({"root": str(root)} if "root" in takes else {})}
    if "loader" in takes:
        given.setdefault("loader", _opened)
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in {*given, *choices[0]}:
            known = f" ({', '.join(kind.splits)})" if key == "split" and hasattr(kind, "splits") else ""
            raise SpecError(f"data: torchvision's {dataset} needs the setting '{key}'{known}")
    how = f"to fetch it: python -c \"from torchvision import datasets; datasets.{dataset}('{root}', download=True)\""
    with _of("torchvision", dataset, f" ({how})" if "download" in takes else ""):
        parts = [_of_class(kind(**given, **choice), size, grey) for choice in choices]
    return _loaded(f"torchvision's {dataset}", parts)


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """What a class takes by name, with what it hands on to its bases: EMNIST's `train` is MNIST's."""
    takes: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        own = inspect.signature(base).parameters.values() if "__init__" in vars(base) else ()
        takes = {**{one.name: one for one in own if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}, **takes}
        if own and not any(one.kind is one.VAR_KEYWORD for one in own):
            break
    return takes


def _opened(path: str) -> Image.Image:
    """The image of a file in the mode that it has: torchvision's own loader makes 16 bits black and white."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
    return image


def _of_class(examples: Any, size: int, grey: bool) -> tuple[Images, Labels]:
    images, labels = _arrays(examples, size, grey)
    names = getattr(examples, "classes", None) or [None]
    return images, labels - 1 if names[0] == "N/A" else labels  # EMNIST's letters begin at 1


def load_huggingface(
    dataset: str,
    config: str | None,
    size: int,
    grey: bool,
    splits: tuple[str, str],
    columns: tuple[str, str],
    first: First = (None, None),
) -> Loaded:
    """The arrays of a Hugging Face data set: a name of the hub, or a folder that `save_to_disk` wrote. MachineError.

    first: how many training and test images are decoded; the labels are all read, for a fair order.
    """
    try:
        import datasets
    except ImportError:
        raise MachineError("data: huggingface needs a package: pip install datasets") from None
    here = Path(dataset).is_dir()
    with _of("the package datasets", dataset):
        found = datasets.load_from_disk(dataset) if here else datasets.load_dataset(dataset, config)
        known = list(found)
    for split in splits:
        if split not in known:
            raise SpecError(f"data: {dataset} has no split '{split}'{did_you_mean(split, known)}")
    image, label = columns
    for column in columns:
        if column not in found[splits[0]].column_names:
            known = found[splits[0]].column_names
            raise SpecError(f"data: {dataset} has no column '{column}'{did_you_mean(column, known)}")
    with _of("the package datasets", dataset):
        pairs = [found[split] for split in splits]
        if first != (None, None):
            labels = [np.asarray(split[label]) for split in pairs]
            pairs = [_first_rows(split, known, n) for split, known, n in zip(pairs, labels, first, strict=True)]
        parts = [_arrays(((row[image], row[label]) for row in split), size, grey) for split in pairs]
    if first == (None, None):
        return _loaded(dataset, parts)
    (train_images, train_labels), (test_images, test_labels) = parts
    classes = int(max(known.max() for known in labels)) + 1
    return Loaded(Path(dataset), train_images, train_labels, test_images, test_labels, classes, gaps=True)


def _first_rows(split: Any, labels: Labels, n: int | None) -> Any:
    """The first n rows of a split, None: all, in an order in which they are a fair sample."""
    order = fair_order(labels)
    return split.select((np.arange(len(labels)) if order is None else order)[:n])


@contextmanager
def _of(package: str, dataset: str, hint: str = "") -> Iterator[None]:
    """One message of whatever another package raises."""
    try:
        yield
    except FatbenchError:
        raise
    except Exception as error:
        raise MachineError(f"data: {package} cannot read {dataset}: {reason(error)}{hint}") from None


def _arrays(examples: Iterable[tuple[Any, Any]], size: int, grey: bool) -> tuple[Images, Labels]:
    """Examples as arrays (N, C, size, size) and (N,). ValueError: something that is no image or no class."""
    from PIL import Image

    images, labels = [], []
    for image, label in examples:
        picture = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
        picture = eight_bits(picture, "L" if grey else "RGB")
        if picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(picture)
        images.append(pixels[None] if grey else pixels.transpose(2, 0, 1))
        if int(label) != label:
            raise ValueError(f"a label is {label!r}, not the number of a class")
        labels.append(int(label))
    return np.ascontiguousarray(np.stack(images)), np.array(labels, np.int64)


def _loaded(where: str, parts: Sequence[tuple[Images, Labels]]) -> Loaded:
    """Both parts, or the one part cut in two, each in an order whose first n are a fair sample."""
    if len(parts) == 1:
        images, labels = parts[0]
        test = np.zeros(len(labels), bool)
        for label in np.unique(labels):
            test[np.flatnonzero(labels == label)[EVERY - 1 :: EVERY]] = True
        parts = [(images[~test], labels[~test]), (images[test], labels[test])]
    (train_images, train_labels), (test_images, test_labels) = (
        part if (order := fair_order(part[1])) is None else (part[0][order], part[1][order]) for part in parts
    )
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    return Loaded(Path(where), train_images, train_labels, test_images, test_labels, classes)
