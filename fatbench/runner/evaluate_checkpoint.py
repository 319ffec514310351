"""`fatbench evaluate`: attack a saved model outside any suite, with the settings in the model's file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError, SpecError
from fatbench.runner import checkpoints, evaluate_external, own_network, stage
from fatbench.runner.executors import local
from fatbench.runner.run_options import RunOptions
from fatbench.runner.transfer import ModelPair
from fatbench.suite import calls, confounders, external_models, facts
from fatbench.suite.cells import Evaluation, Plan
from fatbench.suite.standard_attacks import DEFAULT_RADIUS


def evaluations(
    file: Path, plan: Plan | None, attacks: Sequence[str], eps: str | None, n: int | None, batch: int
) -> list[Evaluation]:
    """The attacks on the model in a file of a run: those of a suite's plan, else as `external_models` reads them.

    eps: None is the radius of its training. MachineError: the file is unreadable. SpecError: an attack cannot be read,
    or cells of the plan are on other images.
    """
    header = checkpoints.load_model(file, "cpu")[2]
    spec = _settings_of(header, file)
    if plan is None:
        return list(external_models.evaluations(attacks, eps or trained_radius(spec) or DEFAULT_RADIUS, n, batch))
    own_cells = [other_cell for other_cell in plan.cells if other_cell.id == header["cell"]]
    task = evaluate_external.task(replace(plan, cells=own_cells or plan.cells), None, attacks, n=n)
    for key, value in {"data": task.data, "test": task.test, "size": task.size}.items():
        if spec.get(key) != value:
            raise SpecError(f"{key} is {value} there, and {spec.get(key)} of {file.name}", option=f"like {plan.suite}")
    return list(task.evaluations)


def trained_radius(spec: Mapping[str, Any]) -> str | float | None:
    """The Linf radius of a cell's attacks in training and at its monitor; None if there is none, or several."""
    trained = {"algorithm": spec["algorithm"], "monitor": spec.get("monitor")}
    settings_by_path = confounders.leaves(trained)
    radii = {
        value
        for path, value in settings_by_path.items()
        if path.endswith(".eps") and settings_by_path.get(f"{path.removesuffix('eps')}norm", "Linf") == "Linf"
    }
    return radii.pop() if len(radii) == 1 else None


def _settings_of(header: Mapping[str, str], file: Path) -> calls.Call:
    """The settings of the cell whose model is in a file with this header.

    MachineError: it is no file of a run. SpecError: another version of fatbench wrote it.
    """
    if "spec" not in header:
        raise MachineError(f"{file}: has no settings in it; give a model-*.safetensors of a run")
    try:
        return stage.spec_of(header)
    except SpecError as error:
        raise SpecError(
            f"{file}: its settings are those of another version of fatbench ({error}). Python still attacks it:"
            " fatbench.evaluate(fatbench.load_model(NAME), ...)"
        ) from None


def checkpoint(file: Path, evaluations: Sequence[Evaluation], options: RunOptions) -> list[dict[str, Any]]:
    """Attack the model in a file of a run, and return [{"label", "attack", "accuracy", "n", "doubts"}].

    options: only device, precision and data are used.
    """
    specs = [(item, calls.call("Attack", item.attack)) for item in evaluations]
    device = local.slots(options.device, 1)[0]
    import torch

    from fatbench.engine.accuracy import models_of, outcomes_of
    from fatbench.engine.local import load, pixels
    from fatbench.engine.outcomes import Seen, ball
    from fatbench.engine.setup import Runtime, setup

    model, client_tensors, header = checkpoints.load_model(file, device)
    spec = _settings_of(header, file)
    for _, attack in specs:
        facts.refuse(attack, spec, "--attack")
        calls.demand_installed(attack, "--attack")
    pairs = [ModelPair(client, state) for client, state in models_of(model, client_tensors).items()]
    root = settings.data_folder(str(options.data) if options.data else None)
    runtime = Runtime(root, torch.device(device), settings.evaluation_precision(options.precision, [device]))
    ready = setup(runtime, **calls.bind_cell(spec, root))
    _, *shape = pixels(ready.problem, ready.test[0][:1]).shape
    network = load(ready.problem, model)
    own_network.demand_trained_network(file, header, spec["model"], network, shape, ready.classes)
    results = []
    for evaluation, attack in specs:
        images, labels = ready.test[0][: evaluation.n], ready.test[1][: evaluation.n]
        function = calls.build("Attack", attack)
        outcomes = [  # the random starts of the run's own attacks: the same settings give the same number
            outcomes_of(
                ready.problem, pair.judged, images, labels, function,
                ("evaluate", evaluation.id, int(header["round"]), *pair.key), batch=evaluation.batch,
            )
            for pair in pairs
        ]  # fmt: skip
        value = float(torch.cat([item.correct for item in outcomes]).double().mean())
        seen = functools.reduce(Seen.__add__, [item.seen for item in outcomes])
        doubts = {**ready.doubts, **seen.doubts(ball(function))}
        row = {"label": evaluation.label, "attack": attack, "accuracy": value, "n": len(labels), "doubts": doubts}
        results.append(row)
    return results
