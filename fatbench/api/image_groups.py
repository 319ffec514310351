"""Which test images go together: those of one person, writer or video, which are no independent sample."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import SpecError
from fatbench.suite.first_images import first_images

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    GroupsAsked = str | Path | ArrayLike | None  # see `labels_of`; None: images are independent

WRITERS = "writers"


def labels_of(asked: GroupsAsked) -> Callable[[Mapping[str, Any]], ArrayLike] | None:
    """Spec of a cell -> a label for each test image of its data set, in order. None: nothing is asked.

    asked: "writers", those that the data set knows; a text file with a label a line; or the labels (images,).
    SpecError: there are none.
    """
    if asked is None:
        return None
    if isinstance(asked, str) and asked == WRITERS:
        return lambda spec: _writers(json.dumps(spec["data"]), first_images(spec)["data"])
    labels = _of_file(Path(asked)) if isinstance(asked, str | Path) else asked
    return lambda spec: labels


@functools.cache
def _writers(data: str, first: tuple[int | None, int | None]) -> ArrayLike:
    from fatbench import settings
    from fatbench.data.own import load

    known = load(json.loads(data), settings.data_folder(), first)
    if known.test_writers is None:
        raise SpecError(f"groups: data set '{known.name}' does not say whose its test images are: name a file")
    return known.test_writers


def _of_file(file: Path) -> ArrayLike:
    import numpy as np

    try:
        return np.array(file.read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"groups: expected '{WRITERS}' or a text file with a label a line, one for each test image, got '{file}':"
            f" {getattr(error, 'strerror', None) or error}"
        ) from None
