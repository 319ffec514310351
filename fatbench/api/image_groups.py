"""Groups of test images that are not independent: those of one person, writer or video."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import SpecError
from fatbench.suite.facts import first_images

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    GroupsAsked = str | Path | ArrayLike | None  # see `labels_of`; None: images are independent

WRITERS = "writers"


def labels_of(groups: GroupsAsked) -> Callable[[Mapping[str, Any]], ArrayLike] | None:
    """A function: spec of a cell -> the group's label of each test image, in order. None: images are independent.

    groups: "writers", those that the data set knows; a text file with a label a line; or the labels (images,).
    SpecError: the file cannot be read, or the data set knows no writers.
    """
    if groups is None:
        return None
    if isinstance(groups, str) and groups == WRITERS:
        return lambda spec: _writers(json.dumps(spec["data"]), first_images(spec)["data"])
    labels = _read_labels(Path(groups)) if isinstance(groups, str | Path) else groups
    return lambda spec: labels


@functools.cache  # data is JSON: a cache needs hashable arguments
def _writers(data: str, first_counts: tuple[int | None, int | None]) -> ArrayLike:
    from fatbench import settings
    from fatbench.data.own import load

    dataset = load(json.loads(data), settings.data_folder(), first_counts)
    if dataset.test_writers is None:
        raise SpecError(f"data set '{dataset.name}' has no writer labels: give a file of them", option="groups")
    return dataset.test_writers


def _read_labels(file: Path) -> ArrayLike:
    import numpy as np

    try:
        return np.array(file.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"groups: expected '{WRITERS}' or a text file with a label a line, one for each test image, got '{file}':"
            f" {getattr(error, 'strerror', None) or error}"
        ) from None
