"""How fast a GPU would be that nothing was run on: its rates are read, operations and kernels counted.

An image pass takes as long as its arithmetic or as starting its kernels, whichever is longer:

    seconds = max(operations / (FRACTION * rate), kernels * LAUNCH / images at once)

Neither constant was measured on a GPU. It is arithmetic, to tell an hour from a week.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn import functional as F

from fatbench import settings
from fatbench.engine.counters import Flops
from fatbench.engine.randomness import forked
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import calls, cost, facts
from fatbench.suite.cells import Plan
from fatbench.suite.duration import Speeds, kind, network

FRACTION = 0.3  # of the rate of matrix products that a network reaches
LAUNCH = 7e-6  # seconds of the host to start a kernel

# Operations a second of dense matrix products, from NVIDIA's data sheets (with sparsity they print twice as many).
GPUS: dict[str, dict[str, float]] = {
    "h200": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    "h100": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},  # SXM
    "a100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "l40s": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12},
    "a10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "l4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12},
}


def speeds(plan: Plan, gpu: str, precision: str, path: str) -> Speeds:
    """What the plan's cells would take there; of cells whose data set says no size before it is read, nothing.

    SpecError: no GPU is known by this name, or no such path.
    """
    settings.path(path)
    if gpu not in GPUS:
        raise SpecError(f"--on: no GPU is known as '{gpu}'{did_you_mean(gpu, GPUS)} (known: {', '.join(GPUS)})")
    rate, float32 = FRACTION * GPUS[gpu][precision], FRACTION * GPUS[gpu]["fp32"]
    training: dict[str, float] = {}
    passes: dict[str, float] = {}
    autoattack: dict[str, float] = {}  # which bf16 leaves in float32
    counted: dict[str, tuple[float, float] | None] = {}
    for cell in plan.unique():
        place, spec = network(cell.spec), cell.spec
        if place not in counted:
            counted[place] = count(spec)
        if (found := counted[place]) is None:
            continue
        flops, kernels = found
        batch = cost.local(spec["algorithm"]).get("batch") or 1
        at_once = batch * facts.cohort(spec) if path in settings.STACKED else batch
        training[kind(spec)] = max(flops / rate, kernels * LAUNCH / at_once)
        chunk = min((one.batch for one in cell.evaluations), default=1)
        passes[place] = max(flops / rate, kernels * LAUNCH / chunk, passes.get(place, 0.0))
        if precision == "bf16":
            autoattack[place] = max(flops / float32, passes[place])
    return Speeds(training=training, passes=passes, autoattack=autoattack)


def count(spec: Mapping[str, Any]) -> tuple[float, float] | None:
    """(operations of one image, kernels of one batch) of a pass: half of an attack's step. None: no shape is known."""
    data = facts.of_data(spec["data"])
    side = spec["size"] or data.side
    if None in (side, data.channels, data.classes):
        return None
    shape = cast(tuple[int, int, int], (data.channels, side, side))
    without = {key: value for key, value in spec["model"].items() if key != "weights"}  # they change no count
    build = calls.build("Model", calls.check("Model", without, "model"))
    with forked(0, "model"):
        made: torch.nn.Module = build(shape, data.classes).requires_grad_(False)
        x = torch.zeros(2, *shape, requires_grad=True)
        with Flops() as counted:
            torch.autograd.grad(F.cross_entropy(made(x), torch.zeros(2, dtype=torch.int64)), x)
    return counted.total / 4, counted.launches / 2
