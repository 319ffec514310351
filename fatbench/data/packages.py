"""Data sets that other packages read: a class of torchvision.datasets, or what the package `datasets` loads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench.data.common import Images, Labels, Loaded, as_labels, eight_bits, fair_order, reason
from fatbench.errors import FatbenchError, MachineError, SpecError, did_you_mean
from fatbench.suite.first_images import First

if TYPE_CHECKING:
    from PIL import Image

EVERY = 5  # of a set that is published in one piece, every fifth image of a class is a test image, as of `digits`


ALL: First = (None, None)


def load_torchvision(
    root: Path,
    dataset: str,
    size: int,
    grey: bool,
    splits: tuple[str, str],
    settings: Mapping[str, Any],
    first: First = ALL,
) -> Loaded:
    """The arrays of a class of torchvision.datasets. SpecError: no such class or setting; MachineError: unreadable.

    first: how many training and test images are decoded, of a class that says its labels without its images.
    """
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
    if taken_settings := [key for key in settings if key in choices[0]]:
        advice = "by train_split and test_split" if taken_settings == ["split"] else "as training and test images"
        raise SpecError(
            f"data: '{taken_settings[0]}' is set here: both parts of torchvision's {dataset} are read, {advice}"
        )
    arguments = {**settings, **({"root": str(root)} if "root" in takes else {})}
    if "loader" in takes:
        arguments.setdefault("loader", _opened)
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in {*arguments, *choices[0]}:
            choices_text = f" ({', '.join(kind.splits)})" if key == "split" and hasattr(kind, "splits") else ""
            raise SpecError(f"data: torchvision's {dataset} needs the setting '{key}'{choices_text}")
    advice = f"to fetch it: python -c \"from torchvision import datasets; datasets.{dataset}('{root}', download=True)\""
    with _of("torchvision", dataset, f" ({advice})" if "download" in takes else ""):
        examples = [kind(**arguments, **choice) for choice in choices]
        labels = None if first == ALL else _labels_of(examples)
        if labels is not None:
            loaded = _of_first(dataset, labels, first, lambda part, rows: _of_class(examples[part], size, grey, rows))
            if loaded is not None:
                return loaded
        splits_read = [_of_class(one, size, grey) for one in examples]
    return _loaded(f"torchvision's {dataset}", splits_read)


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """What a class takes by name, with what it hands on to its bases: EMNIST's `train` is MNIST's."""
    takes: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        own_parameters = inspect.signature(base).parameters.values() if "__init__" in vars(base) else ()
        takes = {
            **{
                parameter.name: parameter
                for parameter in own_parameters
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            },
            **takes,
        }
        if own_parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own_parameters):
            break
    return takes


def _opened(path: str) -> Image.Image:
    """The image of a file in the mode that it has: torchvision's own loader makes 16 bits black and white."""
    from PIL import Image

    with Image.open(path) as image:
        image.load()
    return image


def _of_class(examples: Any, size: int, grey: bool, rows: Iterable[int] | None = None) -> tuple[Images, Labels]:
    """The examples at these rows, None: all."""
    chosen = examples if rows is None else (examples[int(i)] for i in rows)
    images, labels = _arrays(chosen, size, grey)
    return images, labels - _offset(examples)


def _offset(examples: Any) -> int:
    """The lowest label: EMNIST's letters begin at 1."""
    return int((getattr(examples, "classes", None) or [None])[0] == "N/A")


def _labels_of(parts: Sequence[Any]) -> list[Labels] | None:
    """The labels of all examples as torchvision's classes keep them beside the images; None: one does not."""
    found = []
    for examples in parts:
        labels: Any
        pairs = getattr(examples, "_samples", [])
        kept = [getattr(examples, name, None) for name in ("targets", "labels", "_labels")]
        for labels in (*kept, [pair[-1] for pair in pairs if isinstance(pair, tuple)]):
            with suppress(TypeError, ValueError):
                if len(labels) == len(examples):
                    found.append(as_labels(labels) - _offset(examples))
                    break
    return found if len(found) == len(parts) else None


def _of_first(
    source: str, labels: Sequence[Labels], first: First, read: Callable[[int, Any], tuple[Images, Labels]]
) -> Loaded | None:
    """The first training and test images of a set whose `labels` are known by part; None: the images have others.

    read(part, rows): the examples of a part at these rows, in their order.
    """
    arrays = []
    for (split_name, order), n in zip(_in_order(labels), first, strict=True):
        rows = np.arange(len(labels[split_name]))[order][:n]
        arrays.append(read(split_name, rows))
        if not np.array_equal(arrays[-1][1], labels[split_name][rows]):
            return None
    classes = int(max(labels_known.max() for labels_known in labels)) + 1
    return Loaded(Path(source), *arrays[0], *arrays[1], classes, gaps=True)


def load_huggingface(
    dataset: str,
    config: str | None,
    size: int,
    grey: bool,
    splits: tuple[str, str],
    columns: tuple[str, str],
    first: First = ALL,
) -> Loaded:
    """The arrays of a Hugging Face data set: a name of the hub, or a folder that `save_to_disk` wrote. MachineError.

    first: how many training and test images are decoded; the labels are all read, for a fair order.
    """
    try:
        import datasets
    except ImportError:
        raise MachineError("data: huggingface needs a package: pip install datasets") from None
    is_folder = Path(dataset).is_dir()
    with _of("the package datasets", dataset):
        splits_by_name = datasets.load_from_disk(dataset) if is_folder else datasets.load_dataset(dataset, config)
        names = list(splits_by_name)
    for split in splits:
        if split not in names:
            raise SpecError(f"data: {dataset} has no split '{split}'{did_you_mean(split, names)}")
    image, label = columns
    for column in columns:
        if column not in splits_by_name[splits[0]].column_names:
            names = splits_by_name[splits[0]].column_names
            raise SpecError(f"data: {dataset} has no column '{column}'{did_you_mean(column, names)}")
    with _of("the package datasets", dataset):
        arrays_by_split = [splits_by_name[split] for split in splits]

        def read(part: int, rows: Any = None) -> tuple[Images, Labels]:
            chosen = arrays_by_split[part] if rows is None else arrays_by_split[part].select(rows)
            return _arrays(((row[image], row[label]) for row in chosen), size, grey)

        if first != ALL:
            loaded = _of_first(dataset, [np.asarray(part[label]) for part in arrays_by_split], first, read)
            if loaded is not None:
                return loaded
        arrays = [read(0), read(1)]
    return _loaded(dataset, arrays)


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


def _loaded(source: str, arrays_by_split: Sequence[tuple[Images, Labels]]) -> Loaded:
    """All images of a set."""
    (train_images, train_labels), (test_images, test_labels) = (
        (arrays_by_split[split_arrays][0][order], arrays_by_split[split_arrays][1][order])
        for split_arrays, order in _in_order([labels for _, labels in arrays_by_split])
    )
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    return Loaded(Path(source), train_images, train_labels, test_images, test_labels, classes)


def _in_order(labels: Sequence[Labels]) -> list[tuple[int, Any]]:
    """Of training and test images the part they are in, and their index there, so that the first n are a fair sample.

    The one part of a set is cut in two.
    """
    if len(labels) == 1:
        test = np.zeros(len(labels[0]), bool)
        for label in np.unique(labels[0]):
            test[np.flatnonzero(labels[0] == label)[EVERY - 1 :: EVERY]] = True
        rows: list[tuple[int, Any]] = [(0, np.flatnonzero(~test)), (0, np.flatnonzero(test))]
    else:
        rows = [(0, slice(None)), (1, slice(None))]
    orders = [fair_order(labels[part][chosen]) for part, chosen in rows]
    return [
        (part, chosen if order is None else order if isinstance(chosen, slice) else chosen[order])
        for (part, chosen), order in zip(rows, orders, strict=True)
    ]
