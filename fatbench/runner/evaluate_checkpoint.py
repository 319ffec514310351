"""`fatbench evaluate`: attack a saved model outside any suite, with the settings in the model's file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError
from fatbench.runner import checkpoints, own_network, stage
from fatbench.runner.executors import local
from fatbench.runner.run_options import RunOptions
from fatbench.suite import calls, external_models, facts, foreign


def checkpoint(
    file: Path, attacks: Sequence[str], n: int | None, batch: int, options: RunOptions, eps: str = "8/255"
) -> list[dict[str, Any]]:
    """Attack the model in a file of a run, and return [{"label", "attack", "accuracy", "n", "doubts"}].

    attacks: as `external_models.evaluations` reads them. options: only device, precision and data are used.
    """
    specs = [
        (item.label, calls.call("Attack", item.attack))
        for item in external_models.evaluations(list(attacks), eps, n, batch)
    ]
    device = local.slots(options.device, 1)[0]
    import torch

    from fatbench.engine.accuracy import models_of, outcomes_of
    from fatbench.engine.local import load, pixels
    from fatbench.engine.outcomes import Seen, ball
    from fatbench.engine.setup import Runtime, setup

    model, client_tensors, header = checkpoints.load_model(file, device)
    if "spec" not in header:
        raise MachineError(f"{file}: has no settings in it; give a model-*.safetensors of a run")
    spec = stage.spec_of(header)
    for _, attack in specs:
        facts.refuse(attack, spec, "--attack")
        foreign.check(attack, "--attack")
    root = settings.data_folder(str(options.data) if options.data else None)
    runtime = Runtime(root, torch.device(device), settings.evaluation_precision(options.precision, [device]))
    ready = setup(runtime, **calls.bind_cell(spec, root))
    _, *shape = pixels(ready.problem, ready.test[0][:1]).shape
    network = load(ready.problem, model)
    own_network.demand_trained_network(file, header, spec["model"], network, shape, ready.classes)
    images, labels = ready.test[0][:n], ready.test[1][:n]
    results = []
    for label, attack in specs:
        function = calls.build("Attack", attack)
        outcomes = [
            outcomes_of(ready.problem, item, images, labels, function, ("evaluate", label), batch=batch)
            for item in models_of(model, client_tensors).values()
        ]
        value = float(torch.cat([item.correct for item in outcomes]).double().mean())
        doubts = {
            **ready.doubts,
            **functools.reduce(Seen.__add__, [item.seen for item in outcomes]).doubts(ball(function)),
        }
        row = {"label": label, "attack": attack, "accuracy": value, "n": len(labels), "doubts": doubts}
        results.append(row)
    return results
