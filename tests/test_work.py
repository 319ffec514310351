"""What an algorithm's plan and log say of its work, against hooks on the network and calls of the optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from fatbench.engine import experiment, measures, optimizers
from fatbench.engine.local import pixels
from fatbench.engine.setup import Runtime, setup
from fatbench.methods.algorithms import fedsgd
from fatbench.suite import calls, cells, cost, facts, files
from fatbench.suite.entry import Entry, Unknown

Spec = dict[str, Any]


def of_suite(suite: str, algorithm: str, **changes: Any) -> Spec:
    """A smoke cell without what only looks at it, from random weights."""
    plan = files.load(suite).plan("smoke")
    spec = next(cell.spec for cell in plan.cells if cell.spec["algorithm"]["name"] == algorithm)
    changed = merge(spec["algorithm"], changes)
    given = {key: value for key, value in changed.items() if value is not None}
    model = {**spec["model"], **({"weights": None} if "weights" in spec["model"] else {})}
    few = {"train": min(spec["train"], 120), "monitor": None, "diagnostic": None}
    return cells.canonical({**spec, **few, "model": model, "algorithm": given})


def merge(under: Spec, over: Spec) -> Spec:
    """`local` is changed key by key, other settings are replaced."""
    return {**under, **over, **({"local": {**under["local"], **over["local"]}} if "local" in over else {})}


def leaves(network: nn.Module, x: Tensor) -> list[nn.Module]:
    """The layers with weights, in the order in which a pass reaches them."""
    order: list[nn.Module] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: order.append(module))
        for module in network.modules()
        if [*module.parameters(recurse=False)] and not [*module.children()]
    ]
    with torch.no_grad():
        network.eval()(x)
    for hook in hooks:
        hook.remove()
    return order


def batch_size(x: Tensor) -> int:
    """The images of a batch (B, ...), times the clients over which vmap runs, whose dimension it hides."""
    size = len(x)
    while functorch.is_functorch_wrapped_tensor(x):
        inner = functorch.get_unwrapped(x)
        size *= inner.shape[functorch.maybe_get_bdim(x)] if functorch.is_batchedtensor(x) else 1
        x = inner
    return size


def counted(spec: Spec, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], Counter[str]]:
    """(what really happens, what the log says): steps, and images forward and backward."""
    bound = calls.bind_cell(spec, root)
    ready = setup(Runtime(root, torch.device("cpu"), path="loop"), **bound)
    real: Counter[str] = Counter()

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        images = batch_size(inputs[0])
        real["forward"] += images
        if output.requires_grad:
            output.register_hook(lambda gradient: real.update({"backward": images}))

    model = ready.problem.model
    x = pixels(ready.problem, ready.problem.images[:2])
    inverted = spec["algorithm"]["name"] == "gradient_inversion" or spec["diagnostic"] is not None
    if spec["algorithm"]["name"] in ("fedvkd", "fedgkt"):
        parts = [model.get_submodule("extractor"), model.get_submodule("server")]
        hooked = [leaves(parts[0], x)[0], leaves(parts[1], parts[0].eval()(x))[0]]
    else:
        hooked = [leaves(model, x)[-1 if inverted else 0]]  # an inversion may read no gradient of the first layer
    hooks = [layer.register_forward_hook(hook) for layer in hooked]
    clients_steps = {"sgd": optimizers.sgd} if inverted else optimizers.OPTIMIZERS  # an inversion's Adam is no client's

    def counting(step: Any) -> Any:
        def counted_step(*given: Any, **more: Any) -> Any:
            real["steps"] += 1
            return step(*given, **more)

        return counted_step

    for name, step in dict(clients_steps).items():
        monkeypatch.setitem(optimizers.OPTIMIZERS, name, counting(step))
    monkeypatch.setattr(fedsgd, "_upload", counting(fedsgd._upload))  # a client's step is a gradient for the server's
    monkeypatch.setattr(measures, "footprint", lambda *given, **more: {})
    log: Counter[str] = Counter()
    try:
        for _, numbers in experiment.experiment(ready, ready.initial, **bound):
            for number in numbers:
                if number.client < 0:
                    log[number.metric] += number.value  # type: ignore[assignment]
    finally:
        for one in hooks:
            one.remove()
    said = {
        "steps": log["gradient_steps"] + log["server_steps"],
        "forward": log["forward"] + log["server_forward"],
        "backward": log["backward"] + log["server_backward"],
    }
    return real, Counter(said)


@pytest.mark.parametrize(
    ("suite", "algorithm", "changes"),
    [
        ("fat-baselines", "fedavg", {}),
        ("fat-baselines", "fedavg", {"aggregator": {"name": "afl", "gamma": 0.01}}),
        ("fat-baselines", "fedavg", {"local": {"warmup": {"name": "standard"}, "warmup_rounds": 1}}),
        ("fat-baselines", "fedavg", {"name": "scaffold"}),
        ("fat-baselines", "fedavg", {"name": "fednova"}),
        ("fat-baselines", "fedavg", {"name": "fedgate"}),
        ("fat-baselines", "fedavg", {"name": "fedbn"}),
        ("fat-baselines", "fedavg", {"name": "fedper"}),
        ("fat-baselines", "fedavg", {"name": "fltrust", "root": 20, "aggregator": None}),
        ("fat-baselines", "fedavg_mixed", {}),
        ("fat-baselines", "fedrbn", {}),
        ("adfl-cifar10", "fedavg_validated", {}),
        ("privacy-robust", "centralized", {}),
        ("fat-bounds", "local_only", {}),
        ("privacy-updates", "gradient_inversion", {"batch": 4}),
        ("privacy-updates", "gradient_inversion", {"batch": 4, "inversion": {"name": "simulated", "iterations": 3}}),
        ("april-masks", "gradient_inversion", {}),
        ("april-masks", "gradient_inversion", {"inversion": {"name": "april_opt", "steps": 3}, "observed_rounds": 2}),
        ("privacy-updates", "gradient_inversion", {"inversion": {"name": "matching", "steps": 3}}),
        ("april-learning", "fedsgd", {}),
        (
            "april-learning",
            "fedsgd",
            {
                "name": "dsgd",
                "aggregator": {"name": "uniform"},
                "momentum": 0.9,
                "steps": 3,
                **dict.fromkeys(("defence", "optimizer", "count", "sampling", "delta")),
            },
        ),
        ("fedvkd-cifar10", "fedvkd", {}),
        ("fedvkd-cifar10", "fedgkt", {}),
        ("fedvkd-cifar10", "fedaux", {"pretrain_epochs": 1}),
    ],
)
def test_plan_and_log_are_what_is_counted(
    suite: str, algorithm: str, changes: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = of_suite(suite, algorithm, **changes)
    real, log = counted(spec, tmp_path, monkeypatch)
    plan = cost.training(spec)
    assert plan is not None and min(real.values()) > 0
    for what, planned in (("steps", plan.gradient_steps), ("forward", plan.forward), ("backward", plan.backward)):
        assert log[what] == pytest.approx(real[what], rel=0.01, abs=1), f"log, {what}"  # one image is tried first
        assert planned == pytest.approx(real[what], rel=0.05, abs=1), f"plan, {what}"  # clients of average size


@pytest.mark.parametrize(
    ("suite", "algorithm"),
    [
        ("privacy-protocols", "fedsgd"),
        ("privacy-protocols", "fedavg"),
        ("privacy-protocols", "fedgkt"),
        ("privacy-members", "fedavg"),
        ("fedvkd-cifar10", "fedvkd"),
        ("fedvkd-cifar10", "fedavg"),
    ],
)
def test_the_plan_counts_what_a_diagnostic_adds(
    suite: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [cell.spec for cell in files.load(suite).plan("smoke").cells]
    with_it = [spec for spec in specs if spec["algorithm"]["name"] == algorithm and spec["diagnostic"]][-1]
    without = {**with_it, "diagnostic": None, "diagnostic_every": None}
    seen, planned = [], []
    for spec in (with_it, without):
        real, _ = counted(spec, tmp_path, monkeypatch)
        work = cost.training(spec)
        assert work is not None
        seen.append((real["forward"], real["backward"]))
        planned.append((work.forward, work.backward))
    added = [tuple(a - b for a, b in zip(*of, strict=True)) for of in (seen, planned)]
    assert added[0][0] > 0 and added[1] == pytest.approx(added[0], rel=0.05)


def test_work_that_a_diagnostic_leaves_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `passes` it adds none, also with an inversion in its settings; an unknown fact makes the work unknown."""
    spec = next(cell.spec for cell in files.load("privacy-protocols").plan("smoke").cells if cell.spec["train"] == 48)
    without = cost.monitoring({**spec, "diagnostic": None})
    with monkeypatch.context() as patched:
        patched.setattr(calls, "entry", lambda _signature: Entry(len))
        assert cost.monitoring(spec) == without

    def unknown(_cell: facts.Facts) -> float:
        raise Unknown("client_images")

    monkeypatch.setattr(facts.Facts, "client_images", property(unknown))
    assert cost.training(spec) is None
