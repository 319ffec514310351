"""Check that a plug-in's network is the one that was trained: a model's file has the network's outputs for noise.

The weights alone do not tell: they may fit another network too. Noise needs no data set, so a file can be checked
wherever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import MachineError
from fatbench.store import inputs
from fatbench.store.answers import same_answers
from fatbench.suite import calls, plugins

if TYPE_CHECKING:
    from torch import nn

    from fatbench.engine.rounds import Problem, Tensors

Shape = Sequence[int]  # (C, H, W)


def in_header(spec: Mapping[str, Any], problem: Problem, state: Tensors) -> dict[str, str]:
    """The entry in the header of a model's file for a plug-in's network with this state; {} for fatbench's own.

    Also {} if nothing is trained: an algorithm that inverts gradients has no model to keep.
    """
    if not state or not _names(spec["model"]):
        return {}
    from fatbench.engine.local import load

    channels, *sides = problem.images.shape[1:]
    shape = (channels, *(sides if problem.size is None else (problem.size, problem.size)))
    return {"answers": json.dumps(_to_noise(load(problem, state), shape, problem.classes))}


def demand_trained_network(
    file: Path,
    header: Mapping[str, str],
    model: Mapping[str, Any],
    network: nn.Module,
    shape: Shape,
    classes: int,
    trained_with: Iterable[Mapping[str, Any]] = (),
) -> None:
    """Raise MachineError if a plug-in's network, with the weights of this file, is not the one that was trained.

    model: the network's settings. trained_with: records of the plug-ins of its training, for files whose header has no
    outputs.
    """
    names = _names(model)
    trained_records = _records_of(names, trained_with)
    loaded_records = [record for name in names if (record := plugins.loaded_version({"names": [name]})) is not None]
    if "answers" in header:
        if same_answers(json.loads(header["answers"]), _to_noise(network, shape, classes)):
            return
    elif not trained_records or inputs.same_functions(trained_records, _records_of(names, loaded_records)):
        return
    trained, loaded = (
        ", ".join(sorted({inputs.describe(record) for record in records}))
        for records in (trained_records, loaded_records)
    )
    raise MachineError(
        f"{file}: {model['name']} of {loaded} is not the network that was trained{f' ({trained})' if trained else ''}:"
        " the same weights give another network. Restore the plug-in, or train the cell again"
    )


def _names(model: Mapping[str, Any]) -> list[str]:
    """The functions of plug-ins that a network's settings call: ["model mine"]."""
    return [name for _, name in plugins.used_plugins(calls.call("Model", model))]


def _records_of(names: Iterable[str], records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of plug-ins, reduced to these functions."""
    return [
        {**record, "names": own_names, "reached": {name: record["reached"][name] for name in own_names}}
        if "reached" in record
        else {**record, "names": own_names}
        for record in records
        if (own_names := [name for name in names if name in record.get("names", ())])
    ]


def _to_noise(network: nn.Module, shape: Shape, classes: int) -> dict[str, Any]:
    import torch

    from fatbench.engine.answers import IMAGES, answers
    from fatbench.engine.precision import ieee

    device = next((value.device for value in network.state_dict().values()), torch.device("cpu"))
    noise = torch.rand(IMAGES, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    with ieee(device):
        return answers(network, noise, torch.arange(IMAGES, device=device) % classes)
