"""Parts for your own training loop: images and labels, their partition, the aggregation of uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
from numpy import int64
from numpy.typing import ArrayLike, NDArray

from fatbench import settings
from fatbench.api.asking import Plugins, known_choice, plugged
from fatbench.errors import SpecError, whole
from fatbench.suite import calls

if TYPE_CHECKING:
    from torch import Tensor, nn

Upload = TypeVar("Upload")  # a vector, a list of arrays, or a state dict
SPLITS = ("train", "test")


def load_data(
    dataset: str | Mapping[str, Any],
    split: str = "train",
    *,
    data_folder: str | Path | None = None,
    plugins: Plugins = (),
) -> tuple[Tensor, Tensor]:
    """Images (N, C, H, W), floats in [0, 1], and labels (N,), int64, of the split that suites and `evaluate` use.

    dataset: a name, or a mapping as in a suite. Train on this "train" and evaluate on this "test": other packages split
    some sets otherwise, scikit-learn's digits not at all. SpecError: no such set; MachineError: its files are not here
    (`fatbench fetch NAME`).

    >>> import fatbench
    >>> x, y = fatbench.load_data("digits", "test")
    >>> x.shape, y.shape
    (torch.Size([355, 1, 8, 8]), torch.Size([355]))
    """
    import torch

    from fatbench.data.own import load

    known_choice("split", split, SPLITS)
    with plugged(plugins):
        spec = calls.check("Data", dataset, "dataset")
    data = load(spec, settings.data_folder(None if data_folder is None else str(data_folder)))
    images, labels = (
        (data.train_images, data.train_labels) if split == "train" else (data.test_images, data.test_labels)
    )
    return torch.from_numpy(images.copy()).float().div_(255), torch.from_numpy(labels.copy())


def partition(
    labels: ArrayLike, how: str = "dirichlet", *, clients: int, seed: int = 0, writers: ArrayLike | None = None,
    plugins: Plugins = (), **settings: Any,
) -> list[NDArray[int64]]:  # fmt: skip
    """The images of each client: disjoint arrays of positions in `labels`.

    labels (N,): the class of each image, whole numbers. how: any partition of a suite file, "iid", ..., see `names`;
    settings as there, alpha=0.5. writers (N,): whose image each is, for partitions by writer. seed: of the draws.
    SpecError: no such partition or setting, or the images cannot be dealt so.

    >>> import fatbench
    >>> [len(part) for part in fatbench.partition([0, 1] * 50, "iid", clients=4)]
    [25, 25, 25, 25]
    """
    from fatbench.engine.randomness import numpy_generator
    from fatbench.engine.splits import dealt

    label_array = numpy.asarray(labels)
    if label_array.ndim != 1 or label_array.dtype.kind not in "iu" or (label_array < 0).any():
        smallest = f", the smallest {label_array.min()}" if label_array.dtype.kind in "iu" and label_array.size else ""
        got = f"{label_array.dtype} {label_array.shape}{smallest}"
        raise SpecError(f"labels: expected whole numbers (N,) from 0 on, got {got}")
    with plugged(plugins):
        spec = calls.check("Partition", {"name": how, "clients": clients, **settings}, "partition")
        deal = calls.build("Partition", spec)
    writer_array = None if writers is None else numpy.asarray(writers)
    if writer_array is not None and writer_array.shape != label_array.shape:
        raise SpecError(f"writers: expected one for each of {len(label_array)} labels, got {writer_array.shape}")
    draws = numpy_generator(whole("seed", seed), "partition")
    try:
        return dealt(deal(label_array.astype(numpy.int64), draws, writer_array), len(label_array))
    except ValueError as error:
        raise SpecError(f"partition: {str(error).removeprefix('partition: ')}") from error


def aggregate(
    how: str,
    uploads: Sequence[Upload],
    *,
    sizes: Sequence[int] | None = None,
    losses: Sequence[float] | None = None,
    broadcast: Upload | None = None,
    round: int = 1,
    rounds: int = 2,
    memory: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    plugins: Plugins = (),
    **settings: Any,
) -> Upload:
    """Aggregate the clients' uploads to the next model, with an aggregator of fatbench; it has the type of an upload.

    how: any aggregator of a suite file, "samples" (FedAvg), "sfat", "krum", ..., see `names`; settings as there.
    uploads: for each client a vector (a tensor or an array, of any shape), or its state dict after training, which may
    be a list of arrays in the order of `model`, as in Flower.
    sizes: examples of each client, at least 1; default: equal. losses: mean training loss of each, by which SFAT ranks
    them. broadcast: the model that the round began with; default: the mean of the uploads, for aggregators that bear
    malicious clients their median. These leave uploads out that are not finite. round, rounds: this round's number,
    from 0, and how many there are; some aggregators are plain FedAvg in round 0. memory: for aggregators that remember,
    the same dictionary in every round, which they change. model: the network of the state dicts, which tells parameters
    from buffers; default: by names. SpecError: no such aggregator or setting, uploads that do not fit each other, too
    few of them, or an argument that is missing.

    >>> import torch, fatbench
    >>> fatbench.aggregate("trimmed_mean", [torch.tensor([value]) for value in (1.0, 2.0, 3.0, 90.0)], byzantine=1)
    tensor([2.5000])
    """
    from fatbench.engine import own_uploads

    round, rounds = whole("round", round), whole("rounds", rounds, 1)
    with plugged(plugins):
        spec = calls.check("Aggregator", {"name": how, **settings}, "aggregate")
        aggregator = calls.build("Aggregator", spec)
    try:
        next_model: Upload = own_uploads.aggregate(
            aggregator, uploads, sizes=sizes, losses=losses, broadcast=broadcast, round=round, rounds=rounds,
            memory=memory, model=model,
        )  # fmt: skip
    except ValueError as error:
        raise SpecError(f"aggregate: {error}") from error
    return next_model
