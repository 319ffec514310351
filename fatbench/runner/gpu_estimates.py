"""How fast a GPU would be that nothing was run on: its rates are read, operations and kernels counted.

An image pass takes as long as its arithmetic or as starting its kernels, whichever is longer:

    seconds = max(operations / (FRACTION * rate), kernels * LAUNCH / images at once)

The constants are of one NVIDIA H200 (results/bench/h200.md); for other GPUs they are taken to be the same. It is
arithmetic, to tell an hour from a week, and whether steps are better recorded (`--path auto`).
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fatbench import settings
from fatbench.engine.counters import Flops
from fatbench.engine.randomness import forked
from fatbench.errors import SpecError, did_you_mean
from fatbench.suite import calls, cost, facts
from fatbench.suite.cells import Cell
from fatbench.suite.duration import Speeds, estimate, kind, network

# Of the rate of matrix products: what NIN, SmallCNN, ResNet18 and ViT-S reached in batches of 24 to 500 images.
FRACTION = {"fp32": 0.25, "tf32": 0.09, "bf16": 0.07}  # 0.19 to 0.45, 0.06 to 0.20, 0.03 to 0.15
LAUNCH = 40e-6  # seconds of the host to start a kernel of the network, and what PyTorch does around it: 32 to 56
REPLAYED = 5e-6  # seconds of the GPU to start a kernel of a recorded step

# Operations a second of dense matrix products, from NVIDIA's data sheets (with sparsity they print twice as many).
GPUS: dict[str, dict[str, float]] = {
    "h200": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},
    "h100": {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12},  # SXM
    "a100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "l40s": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12},
    "a10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "l4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12},
}


def path_for(spec: Mapping[str, Any], precision: str, gpu: str | None) -> settings.LocalPath:
    """The path that `auto` stands for on a GPU that its driver calls `gpu`, "NVIDIA H200"; None: on a CPU.

    "graphs" where starting the kernels of one client's batch takes longer than their arithmetic; on a CPU, and for data
    of unknown shape, "loop". A GPU that is not in `GPUS` counts as the slowest there. It is counted, not timed, so the
    same cell takes the same path whenever it is run or resumed on a GPU of this kind.
    """
    if gpu is None or (counts := count(spec)) is None:
        return "loop"
    name = listed(gpu)
    rate = GPUS[name][precision] if name else min(rates[precision] for rates in GPUS.values())
    flops, kernels = counts
    return "graphs" if kernels * LAUNCH > cost.images_at_once(spec) * flops / (FRACTION[precision] * rate) else "loop"


def listed(gpu: str) -> str | None:
    """The name in `GPUS` of what its driver calls "NVIDIA H200" or "NVIDIA A100-SXM4-80GB"; None: it is not there."""
    return next((word for word in re.split(r"[\s-]", gpu.lower()) if word in GPUS), None)


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
    """What a run on this GPU begins with, in a line: its path and precision, why, and what would be faster.

    gpu: as its driver calls it; attacks: --attack-precision; auto: the precision was chosen, not asked for; gpus: how
    many there are of it. Every cell is counted from its beginning.
    """
    counts = Counter(path_for(cell.spec, precision, gpu) if path == settings.AUTO else path for cell in cells)
    path_text = ", ".join(f"--path {way} for {n} cells" for way, n in counts.most_common())
    if path == settings.AUTO:
        path_text += " (graphs where starting the kernels takes longer than they compute)"
    summary = _precision_options(precision, attacks)
    if auto:
        reason = "training and its monitor" if precision == "tf32" else "training: the GPU is not known to have tf32"
        summary = f"--precision auto ({precision} for {reason}; {attacks or precision} for attacks after training)"
    summary = f"{f'{gpus} x ' if gpus > 1 else ''}{gpu}: {summary}, {path_text}"
    if (name := listed(gpu)) is None:
        return f"{summary}; how fast it is, is not known"

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
    return f"--precision {precision}" + (f" --attack-precision {attacks}" if attacks else "")


def speeds(cells: Iterable[Cell], gpu: str, precision: str, attacks: str | None, path: str) -> Speeds:
    """What the cells would take there; of cells whose data set says no size before it is read, nothing.

    precision: auto is tf32 with attacks in fp32. attacks: the precision of the evaluation's attacks; None: as training.
    SpecError: no GPU is known by this name, or no such path.
    """
    settings.path(path)
    if gpu not in GPUS:
        raise SpecError(f"--on: no GPU is known as '{gpu}'{did_you_mean(gpu, GPUS)} (known: {', '.join(GPUS)})")
    if precision == settings.AUTO:
        precision, attacks = "tf32", attacks or "fp32"
    attacks = attacks or precision
    rate, attacking, float32 = (FRACTION[bits] * GPUS[gpu][bits] for bits in (precision, attacks, "fp32"))
    training: dict[str, float] = {}
    passes: dict[str, float] = {}
    monitoring: dict[str, float] = {}
    autoattack: dict[str, float] = {}  # which bf16 leaves in float32
    for cell in cells:
        net, spec = network(cell.spec), cell.spec
        if (counts := count(spec)) is None:
            continue
        flops, kernels = counts
        way = path_for(spec, precision, gpu) if path == settings.AUTO else path
        launch = REPLAYED if way == "graphs" else LAUNCH
        training[kind(spec)] = max(flops / rate, kernels * launch / cost.images_at_once(spec))
        chunk = min((evaluation.batch for evaluation in cell.evaluations), default=1)
        passes[net] = max(flops / attacking, kernels * LAUNCH / chunk, passes.get(net, 0.0))
        monitoring[net] = max(flops / rate, kernels * LAUNCH / chunk, monitoring.get(net, 0.0))
        if attacks == "bf16":
            autoattack[net] = max(flops / float32, passes[net])
    return Speeds(training=training, passes=passes, autoattack=autoattack, monitoring=monitoring)


def count(spec: Mapping[str, Any]) -> tuple[float, float] | None:
    """(operations of one image, kernels of one batch) of a pass: half of an attack's step. None: no shape is known."""
    data = facts.of_data(spec["data"])
    side = spec["size"] or data.side
    if side is None or data.channels is None or data.classes is None:
        return None
    architecture = {key: value for key, value in spec["model"].items() if key != "weights"}  # they change no count
    return _count(json.dumps(architecture, sort_keys=True), (data.channels, side, side), data.classes)


@functools.lru_cache(maxsize=64)
def _count(model: str, shape: tuple[int, int, int], classes: int) -> tuple[float, float]:
    build = calls.build("Model", calls.check("Model", json.loads(model), "model"))
    with forked(0, "model"), torch.device("meta"):  # no weights are drawn
        network: torch.nn.Module = build(shape, classes).requires_grad_(False)
    network = network.to_empty(device="cpu")
    x = torch.zeros(2, *shape, requires_grad=True)
    with Flops() as flops:
        torch.autograd.grad(F.cross_entropy(network(x), torch.zeros(2, dtype=torch.int64)), x)
    return flops.total / 4, flops.launches / 2
