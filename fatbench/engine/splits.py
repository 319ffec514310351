"""Splits images into clients' and held-out ones. Numpy only, so that a run can be refused before it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fatbench.engine.randomness import numpy_generator
from fatbench.errors import SpecError

if TYPE_CHECKING:
    from numpy import int64, uint8
    from numpy.typing import NDArray

    from fatbench.data import Dataset


@dataclass(frozen=True, eq=False)
class Split:
    """Indices into the data set's training images: `train` and `validation` are disjoint; shards index `train`."""

    train: NDArray[int64]
    validation: NDArray[int64]
    shards: list[NDArray[int64]]  # per client, positions in `train`
    held: list[NDArray[int64]]  # per client, positions in `train` held out from its shard


def split(
    dataset: Dataset,
    seed: int,
    partition: Callable[..., Any],
    train: int | None = None,
    *,
    validation: int = 0,
    client_holdout: float = 0.0,
    train_from: int = 0,
) -> Split:
    """Take the first `train` images after `train_from`, hold `validation` of them out, deal the rest to clients.

    The validation images are the same for every seed and method of a data set; the partition depends on the seed.
    Raises ValueError if these labels cannot be partitioned, or if a client gets no examples.
    """
    labels = dataset.train_labels[train_from:][:train]
    writers = None if dataset.writers is None else dataset.writers[train_from:][:train]
    order = numpy_generator(0, "validation", len(labels)).permutation(len(labels))
    remaining = order[validation:]
    remaining.sort()  # in place; `order[:validation]` is not touched
    shards = partition(
        labels[remaining], numpy_generator(seed, "partition"), None if writers is None else writers[remaining]
    )
    shards_kept, held_out = [], []
    for k, shard in enumerate(shards):
        held_count = int(client_holdout * len(shard))
        shuffled = numpy_generator(seed, "client_holdout", k).permutation(shard) if held_count else shard
        shards_kept.append(shuffled[held_count:])
        held_out.append(shuffled[:held_count])
    if empty_clients := [k for k, shard in enumerate(shards_kept) if len(shard) == 0]:
        raise ValueError(f"partition: clients {empty_clients} have no training examples")
    return Split(remaining + train_from, order[:validation] + train_from, shards_kept, held_out)


def auxiliary_images(
    dataset: Dataset, auxiliary_set: Dataset, train: int | None, n: int | None, train_from: int = 0
) -> NDArray[uint8]:
    """The first n unlabelled images (n, C, H, W) for the server: `auxiliary_set`'s training images.

    If it is the cell's own data set, only images after the clients' `train` ones. Raises SpecError if none is left, if
    their shape differs, or if one of them is in the test set.
    """
    offset = 0 if auxiliary_set is not dataset else train_from + train if train else None
    images = None if offset is None else auxiliary_set.train_images[offset:][:n]
    if images is None or not len(images):
        raise SpecError("auxiliary: all training images are the clients'; set 'train' or name another data set")
    if images.shape[1:] != dataset.shape:
        raise SpecError(f"auxiliary: images of shape {images.shape[1:]}, the clients have {dataset.shape}")
    test = {image.tobytes() for image in dataset.test_images}  # by value: files may repeat an image
    if shared := sum(image.tobytes() in test for image in images):
        raise SpecError(f"auxiliary: {shared} of {len(images)} images are in the test set")
    return images
