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
from fatbench.store.inputs import Inputs
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
    trained = [{**r, "names": own} for r in trained_with if (own := [n for n in names if n in r.get("names", ())])]
    current = plugins.records(plugins.loaded(names))
    if "answers" in header:
        earlier, now = Inputs(answers=json.loads(header["answers"])), Inputs(answers=_to_noise(network, shape, classes))
    else:
        earlier, now = Inputs(functions=trained or None), Inputs(functions=current)
    if not names or not earlier.differ(now):
        return
    was, loaded = (", ".join(sorted({inputs.describe(record) for record in side})) for side in (trained, current))
    raise MachineError(
        f"{file}: {model['name']} of {loaded} is not the network that was trained{f' ({was})' if was else ''}:"
        " the same weights give another network. Restore the plug-in, or train the cell again"
    )


def _names(model: Mapping[str, Any]) -> list[str]:
    """The functions of plug-ins that a network's settings call: ["model mine"]."""
    return [name for _, name in plugins.used_plugins(calls.call("Model", model))]


def _to_noise(network: nn.Module, shape: Shape, classes: int) -> dict[str, Any]:
    """What the network answers to noise, which is the same on every machine."""
    import torch

    from fatbench.engine.answers import IMAGES, answers
    from fatbench.engine.precision import ieee

    device = next((value.device for value in network.state_dict().values()), torch.device("cpu"))
    noise = torch.rand(IMAGES, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    with ieee(device):
        return answers(network, noise, torch.arange(IMAGES, device=device) % classes)
