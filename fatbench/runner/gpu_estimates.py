"""Estimate how fast a GPU is on which nothing was run yet, from its data sheet and counts of operations and kernels.

A pass of an image, forward or backward, takes as long as its arithmetic or as starting its kernels, whichever is
longer, since the CPU starts them. In a recorded step the GPU does, between them, and both add up:

    loop      seconds = max(operations / (FRACTION * rate), kernels * LAUNCH / images at once)
    graphs    seconds = operations / (FRACTION * rate) + kernels * REPLAY / images at once

The constants were measured on one NVIDIA H200 (results/bench/h200.md) and are assumed for other GPUs. The estimate can
tell an hour from a week. docs/gpu.md has where it is off.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fatbench import settings
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import calls, cost, facts, weights
from fatbench.suite.cells import Cell
from fatbench.suite.duration import Speeds, estimate, kind, network

# The share of the data sheet's rate that NIN, SmallCNN, ResNet18 and ViT-S reached in batches of 24 to 500 images.
FRACTION = {"fp32": 0.25, "tf32": 0.09, "bf16": 0.07}  # measured: 0.19 to 0.45, 0.06 to 0.20, 0.03 to 0.15
LAUNCH = 40e-6  # seconds of the CPU to start a kernel, including PyTorch's overhead; measured: 32 to 56
REPLAY = 5e-6  # seconds of the GPU to start a kernel of a recorded step
OFTEN = 20  # steps of a cell from which on a recording, which costs a few of them, is sure to pay

# Operations per second of dense matrix products, from NVIDIA's data sheets (half of the figures "with sparsity").
GPUS: dict[str, dict[str, float]] = {
    "h200": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    "h100": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},  # SXM
    "a100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "l40s": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12},
    "a10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "l4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12},
    "rtx5090": {"fp32": 104.8e12, "tf32": 104.8e12, "bf16": 209.5e12},
    "rtx4090": {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12},
    "rtx3090": {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12},
}


def path_for(spec: Mapping[str, Any]) -> settings.LocalPath:
    """The path that `auto` stands for on a GPU: "graphs" if steps of a cell repeat often enough to be recorded.

    A recording costs a few steps, and no network's is slower than its steps started one by one (results/bench/h200.md).
    Nothing is timed, so that a cell takes the same path wherever it is run or resumed on a GPU.
    """
    return "graphs" if cost.client_steps(spec) >= OFTEN else "loop"


def known_gpu(gpu: str) -> str | None:
    """The key in `GPUS` of a GPU that its driver calls "NVIDIA A100-SXM4-80GB": "a100". None: it is not there."""
    words = re.split(r"[\s-]", gpu.lower().replace("rtx ", "rtx"))
    return next((word for word in words if word in GPUS), None)


def choices(
    cells: Sequence[Cell],
    gpu: str,
    precision: str,
    attacks: str | None,
    path: str,
    *,
    auto: bool = False,
    gpus: int = 1,
) -> str:
    """Describe in a line the path and precision of a run on this GPU, the reason, and what would be faster.

    gpu: the driver's name for it. attacks: their precision. auto: the precision was chosen by `--precision auto`.
    gpus: how many of them there are. Every cell counts from its beginning, whatever is done of it.
    """
    counts = Counter(path_for(cell.spec) if path == settings.AUTO else path for cell in cells)
    path_text = ", ".join(f"run.path {way} for {n} cells" for way, n in counts.most_common())
    if path == settings.AUTO:
        path_text += " (graphs where steps repeat often enough to be recorded)"
    summary = _precision_options(precision, attacks)
    if auto:
        reason = "training and its monitor" if precision == "tf32" else "training: the GPU is not known to have tf32"
        summary = f"--precision auto ({precision} for {reason}; {attacks or precision} for attacks after training)"
    summary = f"{f'{gpus} x ' if gpus > 1 else ''}{gpu}: {summary}, {path_text}"
    if (name := known_gpu(gpu)) is None:
        return f"{summary}; no estimate of its speed: its data sheet is not known"

    def seconds(bits: str, attacks: str | None) -> float:
        estimated_speeds = speeds(cells, name, bits, attacks, path)
        return estimate(cells, estimated_speeds, lambda cell: (1.0, [(one, 1.0) for one in cell.evaluations])).seconds

    seconds_now = seconds(precision, attacks)
    faster = {
        bits: seconds_taken for bits in GPUS[name] if 0 < (seconds_taken := seconds(bits, None)) < seconds_now / 1.2
    }
    lines = [
        f"{seconds_now / seconds_taken:.1f} times as fast with {_precision_options(bits, None)}"
        for bits, seconds_taken in faster.items()
    ]
    mixed = seconds("bf16", "tf32")
    if 0 < mixed < 0.9 * min([seconds_now, *faster.values()]):
        lines.append(f"{seconds_now / mixed:.1f} times as fast with {_precision_options('bf16', 'tf32')}")
    return summary + (f"; estimated {', '.join(lines)}" if lines else "")


def _precision_options(precision: str, attacks: str | None) -> str:
    return f"--precision {precision}" + (f",{attacks}" if attacks else "")


def speeds(cells: Iterable[Cell], gpu: str, precision: str, attacks: str | None, path: str) -> Speeds:
    """Estimate the speeds of the cells on a GPU, leaving out data sets whose size is not known before they are read.

    precision: "auto" is tf32 with attacks in fp32. attacks: the precision of the evaluation's attacks; None for that of
    training. SpecError: the GPU or the path is not known.
    """
    settings.path(path)
    if gpu not in GPUS:
        raise SpecError(f"no GPU is known as '{gpu}'{did_you_mean(gpu, GPUS)}", option="on")
    if precision == settings.AUTO:
        precision, attacks = "tf32", attacks or "fp32"
    attacks = attacks or precision
    rate, attacking, float32 = (FRACTION[bits] * GPUS[gpu][bits] for bits in (precision, attacks, "fp32"))
    training: dict[str, float] = {}
    passes: dict[str, float] = {}
    monitoring: dict[str, float] = {}
    autoattack: dict[str, float] = {}  # AutoAttack stays in float32 under bf16
    for cell in cells:
        net, spec = network(cell.spec), cell.spec
        if (counts := count(spec)) is None:
            continue
        flops, kernels = counts
        way = path_for(spec) if path == settings.AUTO else path
        training[kind(spec)] = _seconds(flops, rate, kernels / cost.images_at_once(spec), way)
        chunk = min((evaluation.batch for evaluation in cell.evaluations), default=1)
        passes[net] = max(_seconds(flops, attacking, kernels / chunk, "loop"), passes.get(net, 0.0))
        monitoring[net] = max(_seconds(flops, rate, kernels / chunk, "loop"), monitoring.get(net, 0.0))
        if attacks == "bf16":
            autoattack[net] = max(flops / float32, passes[net])
    return Speeds(training=training, passes=passes, autoattack=autoattack, monitoring=monitoring)


def _seconds(operations: float, rate: float, kernels: float, path: str) -> float:
    """Seconds of a pass of an image. kernels: those of a batch, shared among its images. rate: operations a second."""
    arithmetic = operations / rate
    return arithmetic + kernels * REPLAY if path == "graphs" else max(arithmetic, kernels * LAUNCH)


def step_seconds(spec: Mapping[str, Any], gpu: str, precision: str, path: str, images: int) -> float:
    """Seconds that a pass forward and one back of a batch of so many images are estimated to take together."""
    if (counts := count(spec)) is None:
        raise SpecError("the size of the images is not known")
    flops, kernels = counts
    return 2 * images * _seconds(flops, FRACTION[precision] * GPUS[gpu][precision], kernels / images, path)


def count(spec: Mapping[str, Any]) -> tuple[float, float] | None:
    """(operations per image, kernels per batch) of one pass, half an attack step. None: the shape is not known."""
    data = facts.of_data(spec["data"])
    side = spec["size"] or data.side
    if side is None or data.channels is None or data.classes is None:
        return None
    architecture = weights.changed(spec["model"], lambda _: None)  # they do not change the count
    return _count(json.dumps(architecture, sort_keys=True), (data.channels, side, side), data.classes)


@functools.lru_cache(maxsize=64)
def _count(model: str, shape: tuple[int, int, int], classes: int) -> tuple[float, float]:
    import torch
    from torch.nn import functional as F

    from fatbench.engine.counters import Flops
    from fatbench.engine.randomness import forked

    build = calls.build("Model", calls.check("Model", json.loads(model), "model"))
    with forked(0, "model"), torch.device("meta"):  # on "meta", building a network draws no weights
        network: torch.nn.Module = build(shape, classes).requires_grad_(False)
    network = network.to_empty(device="cpu")
    x = torch.zeros(2, *shape, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for two images several threads mostly wait for one another
    try:
        with Flops() as flops:
            torch.autograd.grad(F.cross_entropy(network(x), torch.zeros(2, dtype=torch.int64)), x)
    finally:
        torch.set_num_threads(threads)
    return flops.total / 4, flops.launches / 2
