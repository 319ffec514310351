"""`fatbench evaluate`: attack a saved model outside any suite, with the settings its file carries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError, SpecError
from fatbench.runner import checkpoints, own_network, stage
from fatbench.runner.executors import local
from fatbench.runner.run_options import RunOptions
from fatbench.suite import calls, facts, foreign


def checkpoint(
    file: Path, attacks: Sequence[str], n: int | None, batch: int, options: RunOptions
) -> list[dict[str, Any]]:
    """Accuracy under each attack of a model file written by a run: [{"label", "attack", "accuracy", "n", "doubts"}].

    options: device, precision and data count.

    An attack is a name, or YAML such as "{name: pgd, eps: 8/255, step: 2/255, steps: 20}". SpecError, MachineError.
    """
    specs = [(text, calls.check("Attack", _read(text), "--attack")) for text in attacks]
    device = local.slots(options.device, 1)[0]
    import torch

    from fatbench.engine.accuracy import judged, models_of
    from fatbench.engine.local import load, pixels
    from fatbench.engine.outcomes import Seen, ball
    from fatbench.engine.setup import Runtime, setup

    model, own, header = checkpoints.load_model(file, device)
    if "spec" not in header:
        raise MachineError(f"{file}: no settings in it; give a model-*.safetensors of a run")
    spec = stage.spec_of(header)
    for _, attack in specs:
        facts.refuse(attack, spec, "--attack")
        foreign.check(attack, "--attack")
    root = settings.data_folder(str(options.data) if options.data else None)
    runtime = Runtime(root, torch.device(device), settings.precision(options.precision, [device]))
    ready = setup(runtime, **calls.bind_cell(spec, root))
    _, *shape = pixels(ready.problem, ready.test[0][:1]).shape
    network = load(ready.problem, model)
    own_network.demand_same(file, header, spec["model"], network, shape, ready.classes)
    images, labels = ready.test[0][:n], ready.test[1][:n]
    results = []
    for text, attack in specs:
        function = calls.build("Attack", attack)
        found = [
            judged(ready.problem, one, images, labels, function, ("evaluate", text), batch=batch)
            for one in models_of(model, own).values()
        ]
        value = float(torch.cat([one.correct for one in found]).double().mean())
        doubts = {**ready.doubts, **functools.reduce(Seen.__add__, [one.seen for one in found]).doubts(ball(function))}
        row = {"label": attack["name"], "attack": attack, "accuracy": value, "n": len(labels), "doubts": doubts}
        results.append(row)
    return results


def _read(text: str) -> Any:
    """An attack as the command line gives it: a name or a YAML mapping."""
    if not text.lstrip().startswith("{"):
        return text
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise SpecError(
            f"--attack: cannot read '{text}' as a YAML mapping such as {{name: fgsm, eps: 8/255}}"
        ) from None
