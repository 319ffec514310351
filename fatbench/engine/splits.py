"""Splits images into clients' and held-out ones. Numpy only, so that a run can be refused before it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy

from fatbench.engine.randomness import numpy_generator
from fatbench.errors import SpecError
from fatbench.suite.types import count_of, rounded_down

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
    unseen: int = 0  # the last ones of the clients, which never train
    doubts: Mapping[str, float] = field(default_factory=dict)  # about the partition: {doubt: how many images}


def split(
    dataset: Dataset,
    seed: int,
    partition: Callable[..., Any],
    train: int | None = None,
    *,
    validation: int = 0,
    client_holdout: float = 0.0,
    train_from: int = 0,
    unseen: float = 0.0,
) -> Split:
    """Take the first `train` images after `train_from`, hold `validation` of them out, deal the rest to clients.

    unseen: so many clients, or a fraction of them, are drawn that never train, and get the last numbers.

    The validation images are the same for every seed and method of a data set; the partition depends on the seed.
    Raises ValueError if these labels cannot be partitioned, or if the partition gives what `dealt` refuses.
    """
    labels = dataset.train_labels[train_from:][:train]
    writers = None if dataset.writers is None else dataset.writers[train_from:][:train]
    order = numpy_generator(0, "validation", len(labels)).permutation(len(labels))
    remaining = order[validation:]
    remaining.sort()  # in place; `order[:validation]` is not touched
    shards = dealt(
        partition(
            labels[remaining], numpy_generator(seed, "partition"), None if writers is None else writers[remaining]
        ),
        len(remaining),
    )
    shards_kept, held_out = [], []
    for k, shard in enumerate(shards):
        held_count = rounded_down(client_holdout * len(shard))
        shuffled = numpy_generator(seed, "client_holdout", k).permutation(shard) if held_count else shard
        shards_kept.append(shuffled[held_count:])
        held_out.append(shuffled[:held_count])
    unseen_count = count_of(unseen, len(shards))
    if unseen and not 0 < unseen_count < len(shards):
        raise ValueError(f"unseen: {unseen:g} of {len(shards)} clients: at least one must be unseen, and one train")
    unseen_clients = numpy_generator(seed, "unseen").permutation(len(shards))[:unseen_count]
    numbers = [*sorted({*range(len(shards))} - {*unseen_clients.tolist()}), *sorted(unseen_clients.tolist())]
    shards_kept, held_out = [shards_kept[k] for k in numbers], [held_out[k] for k in numbers]
    counts = {**repeated(shards), "clients have no images": sum(len(shard) == 0 for shard in shards_kept)}
    doubts = {doubt: float(count) for doubt, count in counts.items() if count}
    return Split(remaining + train_from, order[:validation] + train_from, shards_kept, held_out, unseen_count, doubts)


def written_images(dataset: Dataset, parts: Split, test: int | None) -> list[NDArray[int64]]:
    """Of each client the test images of the writers whose training images it has; none where nobody knows writers."""
    if dataset.writers is None or dataset.test_writers is None:
        return [numpy.zeros(0, numpy.int64) for _ in parts.shards]
    by_client = (numpy.concatenate([*pair]) for pair in zip(parts.shards, parts.held, strict=True))
    return [
        numpy.flatnonzero(numpy.isin(dataset.test_writers[:test], dataset.writers[parts.train[own]]))
        for own in by_client
    ]


def dealt(shards: Any, examples: int) -> list[NDArray[int64]]:
    """What a partition returned, as an int64 array of indices a client; lists, tensors and whole floats are taken.

    Raises ValueError for an index that is no whole number from 0 to `examples` - 1.
    """
    if isinstance(shards, Mapping) or not hasattr(shards, "__iter__"):
        raise ValueError(f"partition: expected a list with the indices of each client, got a {type(shards).__name__}")
    indices_by_client = []
    for k, shard in enumerate(shards):
        try:
            indices = numpy.asarray(shard)
        except ValueError:  # lists of unequal length
            raise ValueError(f"partition: client {k}: expected a list of indices, got a list of lists") from None
        if indices.ndim != 1 or indices.dtype.kind not in "iuf":  # of an empty list, numpy makes floats
            raise ValueError(f"partition: client {k}: expected a list of indices, got {indices.dtype} {indices.shape}")
        exists = (indices >= 0) & (indices < examples) & (indices == numpy.floor(indices))
        if not exists.all():
            raise ValueError(
                f"partition: client {k}: index {indices[~exists][0]} is none of the {examples} training examples, 0 to "
                f"{examples - 1}"
            )
        indices_by_client.append(indices.astype(numpy.int64))
    if not indices_by_client:
        raise ValueError("partition: there is no client")
    return indices_by_client


def repeated(shards: Sequence[NDArray[int64]]) -> dict[str, int]:
    """How many images a partition deals twice, in words: to one client, and to several."""
    distinct = [numpy.unique(shard, return_counts=True) for shard in shards]
    of_clients = numpy.unique(numpy.concatenate([images for images, _ in distinct]), return_counts=True)[1]
    return {
        "training images are dealt to a client twice": sum(int((counts > 1).sum()) for _, counts in distinct),
        "training images are dealt to several clients": int((of_clients > 1).sum()),
    }


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
