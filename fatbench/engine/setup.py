"""Makes a cell ready to run: reads its data, holds images out, deals the rest to clients, builds its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fatbench.engine import memory, microbatch
from fatbench.engine.cohort import Availability
from fatbench.engine.graphs import Recordings
from fatbench.engine.inject import requested_arguments
from fatbench.engine.malicious import Malicious, deal
from fatbench.engine.mapped import images_on_device, in_memory
from fatbench.engine.precision import exact
from fatbench.engine.randomness import forked
from fatbench.engine.rounds import Problem, State
from fatbench.engine.splits import auxiliary_images, split, written_images
from fatbench.settings import LocalPath, Precision
from fatbench.suite.facts import First, images_read

if TYPE_CHECKING:
    from fatbench.data import Dataset


@dataclass(frozen=True)
class Runtime:
    """Where and how a cell runs, which is no part of its identity."""

    data: Path
    device: torch.device
    precision: Precision = "fp32"
    path: LocalPath = "loop"
    microbatch: int | None = None
    strict: bool = True  # False: use any kernel if none is deterministic


@dataclass(frozen=True)
class Setup:
    """A cell ready to run: the problem, its initial state, the images to measure on."""

    problem: Problem
    initial: State
    test: tuple[Tensor, Tensor]  # (n, C, H, W) uint8, (n,) int64
    validation: tuple[Tensor, Tensor] | None
    held: list[Tensor]  # per client: indices of its held-out fraction; those that never train are the last
    classes: int
    data: dict[str, Any]  # {"data" or "auxiliary": {"name", "variant", "fingerprint"}}: goes into the provenance
    weights: dict[str, str] | None = None  # of the initial model: {"source", "digest"}; goes there, too
    doubts: Mapping[str, float] = field(default_factory=dict)  # about data and partition: {doubt: how many}
    written: list[Tensor] = field(default_factory=list)  # per client: the test images of its training images' writers
    note: str = ""  # the same, with names of files


def setup(
    runtime: Runtime,
    *,
    seed: int,
    data: Callable[..., Any],
    partition: Callable[..., Any],
    model: Callable[..., Any],
    train: int | None = None,
    train_from: int = 0,
    test: int | None = None,
    validation: int = 0,
    client_holdout: float = 0.0,
    unseen: float = 0.0,
    size: int | None = None,
    augment: Callable[..., Any] | None = None,
    auxiliary: Callable[..., Any] | None = None,
    auxiliary_n: int | None = None,
    malicious: Malicious | None = None,
    availability: Availability | None = None,
    **_: Any,
) -> Setup:
    """Read the data, hold images out, partition the rest and initialise the model.

    Raises MachineError if data are missing or damaged, SpecError for unusable auxiliary images, and ValueError if the
    data cannot be split.
    """
    exact(runtime.device, runtime.precision, runtime.strict)
    if runtime.device.type == "cpu":
        memory.keep_freed_memory()
    shared = auxiliary is not None and (auxiliary.func, auxiliary.keywords) == (data.func, data.keywords)  # type: ignore[attr-defined]
    dataset = _read_data(data, runtime.data, images_read(train, test, train_from, auxiliary_n if shared else 0))
    parts = split(
        dataset, seed, partition, train, validation=validation, client_holdout=client_holdout, train_from=train_from,
        unseen=unseen,
    )  # fmt: skip

    def tensors(part_name: str, images: Any, labels: Any, indices: Any) -> tuple[Tensor, Tensor]:
        part_images, classes = images_on_device(runtime.device, images, indices), torch.from_numpy(labels[indices])
        return part_images if part_name == "train" else in_memory(part_images), classes.to(runtime.device, torch.int64)

    def on_device(shards: list[Any]) -> list[Tensor]:
        return [torch.from_numpy(shard).to(runtime.device, torch.int64) for shard in shards]

    images, labels = tensors("train", dataset.train_images, dataset.train_labels, parts.train)
    shards = on_device(parts.shards[: len(parts.shards) - parts.unseen])
    if malicious is not None:
        images, labels = deal(malicious, shards, images, labels, dataset.classes, seed)
    network = network_of(
        runtime, seed, model, dataset.shape if size is None else (dataset.shape[0], size, size), dataset.classes
    )
    data_facts = {"data": _data_facts(dataset)}
    unlabelled = None
    if auxiliary is not None:
        auxiliary_set = dataset if shared else _read_data(auxiliary, runtime.data, (auxiliary_n, 1))
        data_facts["auxiliary"] = _data_facts(auxiliary_set)
        unlabelled = images_on_device(
            runtime.device, auxiliary_images(dataset, auxiliary_set, train, auxiliary_n, train_from), slice(None)
        )
    held_out = tensors("validation", dataset.train_images, dataset.train_labels, parts.validation)
    problem = Problem(
        network, images, labels, shards, dataset.classes, seed, runtime.device, runtime.precision, runtime.path, size,
        augment, unlabelled, malicious, availability,
        Recordings() if runtime.path == "graphs" else None,
        held_out if validation else None,
    )  # fmt: skip
    start = {name: value.detach().clone() for name, value in network.state_dict().items()}
    return Setup(
        problem=problem,
        initial=State(0, start),
        test=tensors("test", dataset.test_images, dataset.test_labels, slice(test)),
        validation=problem.held_out,
        held=on_device(parts.held),
        written=on_device(written_images(dataset, parts, test)),
        classes=dataset.classes,
        data=data_facts,
        weights=next((vars(part)["pretrained"] for part in network.modules() if "pretrained" in vars(part)), None),
        doubts={**dataset.doubts, **parts.doubts},
        note=dataset.note,
    )


def _data_facts(dataset: Dataset) -> dict[str, Any]:
    return {"name": dataset.name, "variant": dataset.variant, "fingerprint": dataset.fingerprint}


def network_of(
    runtime: Runtime, seed: int, model: Callable[..., Any], shape: tuple[int, int, int], classes: int
) -> torch.nn.Module:
    """A cell's initial network, on the device."""
    with forked(seed, "model"):
        network: torch.nn.Module = model(shape, classes)
    if not type(network).__module__.startswith("fatbench.") and _changes_images(network, shape, seed):
        network.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(), *inputs[1:]))
    if runtime.microbatch is not None:
        microbatch.bound(network, runtime.microbatch)
    return network.to(runtime.device)


def _changes_images(network: torch.nn.Module, shape: tuple[int, int, int], seed: int) -> bool:
    """Whether a plug-in's network changes its images in place: the next pass over them would be over others."""
    images = torch.full((2, *shape), 0.5)
    modes = [(module, module.training) for module in network.modules()]
    try:
        with torch.no_grad(), forked(seed, "images"):
            network.eval()(images)
    except Exception:  # the first round says what is wrong with it
        return False
    finally:
        for module, training in modes:
            module.training = training
    return bool(images._version) or not bool((images == 0.5).all())  # `images.data` has no version


def _read_data(reader: Callable[..., Any], root: Path, counts: First) -> Any:
    """The data set; a reader that asks for `first` reads only the first training and test images."""
    return reader(root, **requested_arguments(reader, {"first": lambda: counts}))
