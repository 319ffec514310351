"""Data sets that other packages read: classes of torchvision.datasets, and the package `datasets`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench.data import catalogue
from fatbench.data.common import (
    Images,
    Labels,
    Loaded,
    Missing,
    as_labels,
    eight_bits,
    fair_order,
    holdings,
    parsing,
    reason,
)
from fatbench.errors import FatbenchError, MachineError, SpecError, did_you_mean
from fatbench.suite.facts import First

if TYPE_CHECKING:
    from PIL import Image

PARTS = {"train", "training", "test", "testing", "val", "valid", "validation"}  # folders that are no classes
EVERY = 5  # without published splits, every fifth image of a class is a test image, as in `digits`


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
    """The arrays of a class of torchvision.datasets.

    first: the number of training and test images to decode, if the class gives labels without decoding images. Raises
    SpecError for an unknown class or setting, and MachineError if it cannot be read.
    """
    from torchvision import datasets

    if dataset not in datasets.__all__:
        raise SpecError(f"torchvision has no data set '{dataset}'{did_you_mean(dataset, datasets.__all__)}")
    dataset_class = getattr(datasets, dataset)
    class_parameters = _parameters(dataset_class)
    if unknown := [key for key in settings if key not in class_parameters]:
        raise SpecError(
            f"torchvision's {dataset} has no setting '{unknown[0]}'{did_you_mean(unknown[0], class_parameters)}"
        )
    choices: tuple[dict[str, Any], ...] = ({},)
    if "train" in class_parameters:
        choices = ({"train": True}, {"train": False})
    elif "split" in class_parameters:
        choices = ({"split": splits[0]}, {"split": splits[1]})
    folder = Path(root, Path(str(settings.get("root", ""))).expanduser())
    if "root" in settings and not folder.is_dir():
        found = "; ".join(["", *holdings(folder.parent)])
        raise Missing(
            f"data: torchvision's {dataset}: no such folder: {folder} (a relative root is below --data){found}"
        )
    if taken_settings := [key for key in settings if key in choices[0]]:
        advice = "by train_split and test_split" if taken_settings == ["split"] else "as training and test images"
        raise SpecError(
            f"data: do not set '{taken_settings[0]}': both parts of torchvision's {dataset} are read, {advice}"
        )
    arguments = {**settings, **({"root": str(folder)} if "root" in class_parameters else {})}
    if "loader" in class_parameters:  # of ImageFolder and its kind
        arguments.setdefault("loader", _open_image)
    for key, parameter in class_parameters.items():
        if parameter.default is parameter.empty and key not in {*arguments, *choices[0]}:
            choices_text = (
                f" ({', '.join(dataset_class.splits)})" if key == "split" and hasattr(dataset_class, "splits") else ""
            )
            raise SpecError(f"data: torchvision's {dataset} needs the setting '{key}'{choices_text}")
    advice = (
        f"to fetch it: python -c \"from torchvision import datasets; datasets.{dataset}('{folder}', download=True)\""
    )
    with _errors_of_package("torchvision", dataset, f" ({advice})" if "download" in class_parameters else ""):
        examples = [dataset_class(**arguments, **choice) for choice in choices]
        unread: list[Path] = []
        if dataset in ("ImageFolder", "DatasetFolder"):  # it reads all of one folder
            if {*map(str.lower, examples[0].classes)} <= PARTS:
                raise SpecError(
                    f"data: torchvision's {dataset} would take the parts {', '.join(examples[0].classes)} of {folder}"
                    f" as classes: {{name: image_folder, path: {folder}, size: {size}}} reads train and test"
                )
            unread = catalogue.unread_files(folder, [Path(file) for file, _ in examples[0].samples])
        # the order that makes the first n a fair sample needs all labels
        labels = None if first == ALL else _labels_of(examples)
        loaded = None
        if labels is not None:
            loaded = _load_first(
                dataset, labels, first, lambda part, rows: _class_arrays(examples[part], size, grey, rows)
            )
        if loaded is None:
            splits_read = [_class_arrays(split_examples, size, grey) for split_examples in examples]
            loaded = _load_all(f"torchvision's {dataset}", splits_read)
    return replace(loaded, unread=unread)


def _parameters(dataset_class: type) -> dict[str, inspect.Parameter]:
    """The named parameters of a class and, if it passes on **kwargs, of its bases: EMNIST's `train` is MNIST's."""
    parameters_by_name: dict[str, inspect.Parameter] = {}
    for base in dataset_class.__mro__:
        own_parameters = inspect.signature(base).parameters.values() if "__init__" in vars(base) else ()
        parameters_by_name = {
            **{
                parameter.name: parameter
                for parameter in own_parameters
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            },
            **parameters_by_name,
        }
        # without **kwargs, what its bases take cannot be given
        if own_parameters and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own_parameters):
            break
    return parameters_by_name


def _open_image(path: str) -> Image.Image:
    """A file's image in its own mode; torchvision's loader would turn 16 bits into black and white."""
    from PIL import Image

    with parsing(Path(path), "an image"), Image.open(path) as image:
        image.load()
    return image


def _class_arrays(examples: Any, size: int, grey: bool, rows: Iterable[int] | None = None) -> tuple[Images, Labels]:
    """The arrays of the examples at `rows`; None: all."""
    chosen = examples if rows is None else (examples[int(i)] for i in rows)
    images, labels = _arrays(chosen, size, grey)
    return images, labels - _offset(examples)


def _offset(examples: Any) -> int:
    """The lowest label: EMNIST's letters start at 1."""
    return int((getattr(examples, "classes", None) or [None])[0] == "N/A")


def _labels_of(parts: Sequence[Any]) -> list[Labels] | None:
    """The labels of all parts, as torchvision's classes store them beside the images; None if one does not."""
    labels_by_part = []
    for examples in parts:
        labels: Any
        pairs = getattr(examples, "_samples", [])  # (file, ..., label)
        attributes = [getattr(examples, name, None) for name in ("targets", "labels", "_labels")]
        for labels in (*attributes, [pair[-1] for pair in pairs if isinstance(pair, tuple)]):
            with suppress(TypeError, ValueError):
                if len(labels) == len(examples):
                    labels_by_part.append(as_labels(labels) - _offset(examples))
                    break
    return labels_by_part if len(labels_by_part) == len(parts) else None


def _load_first(
    source: str, labels: Sequence[Labels], first: First, read: Callable[[int, Any], tuple[Images, Labels]]
) -> Loaded | None:
    """The first training and test images of a set whose labels are known by part; None if the images have others.

    read(part, rows): the examples of a part at these rows, in this order.
    """
    arrays = []
    for (split_name, order), n in zip(_fair_splits(labels), first, strict=True):
        rows = np.arange(len(labels[split_name]))[order][:n]
        arrays.append(read(split_name, rows))
        if not np.array_equal(arrays[-1][1], labels[split_name][rows]):
            return None  # a transform of the class changes labels: its stored ones say nothing of the order
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
    """The arrays of a Hugging Face data set: a name on the hub, or a folder written by `save_to_disk`.

    first: the number of training and test images to decode; all labels are read, for a fair order. Raises MachineError
    if it cannot be read, and SpecError for an unknown split or column.
    """
    try:
        import datasets
    except ImportError:
        raise MachineError("data: huggingface needs the package datasets: pip install datasets") from None
    is_folder = Path(dataset).is_dir()
    with _errors_of_package("the package datasets", dataset):
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
    with _errors_of_package("the package datasets", dataset):
        arrays_by_split = [splits_by_name[split] for split in splits]

        def read(part: int, rows: Any = None) -> tuple[Images, Labels]:
            chosen = arrays_by_split[part] if rows is None else arrays_by_split[part].select(rows)
            return _arrays(((row[image], row[label]) for row in chosen), size, grey)

        if first != ALL:
            loaded = _load_first(dataset, [np.asarray(part[label]) for part in arrays_by_split], first, read)
            if loaded is not None:
                return loaded
        arrays = [read(0), read(1)]
    return _load_all(dataset, arrays)


@contextmanager
def _errors_of_package(package: str, dataset: str, hint: str = "") -> Iterator[None]:
    """Raise one clear message for any error of another package."""
    try:
        yield
    except FatbenchError:
        raise
    except Exception as error:
        raise MachineError(f"data: {package} cannot read {dataset}: {reason(error)}{hint}") from None


def _arrays(examples: Iterable[tuple[Any, Any]], size: int, grey: bool) -> tuple[Images, Labels]:
    """Examples as arrays (N, C, size, size) and (N,). Raises ValueError for a label that is no integer."""
    from PIL import Image

    images, labels = [], []
    for image, label in examples:
        pil_image = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
        pil_image = eight_bits(pil_image, "L" if grey else "RGB")
        if pil_image.size != (size, size):
            pil_image = pil_image.resize((size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(pil_image)
        images.append(pixels[None] if grey else pixels.transpose(2, 0, 1))
        if int(label) != label:  # such as a score, or a box
            raise ValueError(f"a label is {label!r}, not the number of a class")
        labels.append(int(label))
    return np.ascontiguousarray(np.stack(images)), np.array(labels, np.int64)


def _load_all(source: str, arrays_by_split: Sequence[tuple[Images, Labels]]) -> Loaded:
    """All training and test images of a set."""
    (train_images, train_labels), (test_images, test_labels) = (
        (arrays_by_split[part][0][order], arrays_by_split[part][1][order])
        for part, order in _fair_splits([labels for _, labels in arrays_by_split])
    )
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    return Loaded(Path(source), train_images, train_labels, test_images, test_labels, classes)


def _fair_splits(labels: Sequence[Labels]) -> list[tuple[int, Any]]:
    """[(part, index)] of the training and of the test images, in an order whose first n are a fair sample.

    A set with only one part is split in two.
    """
    if len(labels) == 1:
        test = np.zeros(len(labels[0]), bool)
        for label in np.unique(labels[0]):
            test[np.flatnonzero(labels[0] == label)[EVERY - 1 :: EVERY]] = True
        if not test.any():
            raise ValueError(f"every {EVERY}th image of a class is a test image, and no class has {EVERY}")
        rows: list[tuple[int, Any]] = [(0, np.flatnonzero(~test)), (0, np.flatnonzero(test))]
    else:
        rows = [(0, slice(None)), (1, slice(None))]
    # None: the labels are mixed already
    orders = [fair_order(labels[part][chosen]) for part, chosen in rows]
    return [
        (part, chosen if order is None else order if isinstance(chosen, slice) else chosen[order])
        for (part, chosen), order in zip(rows, orders, strict=True)
    ]
