"""What `make gpu` tries, each item a function of a `Bench` that returns what it found: worst risks first.

A rehearsal (`bench.quick`) does every step with the least of everything, on whatever device there is.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.measure import Bench, fatbench, interleaved, program, ratios, wall
from benchmarks.piece import FOLDER
from benchmarks.rows import AT, PGD7, apart, built, noise_problem
from fatbench.engine.accuracy import accuracy
from fatbench.engine.cohort import train_cohort
from fatbench.engine.gradients import part_of
from fatbench.engine.graphs import Recordings
from fatbench.engine.local import LocalTraining, copy_state, load, pixels
from fatbench.engine.precision import exact, without_kernel
from fatbench.engine.rounds import Problem, Tensors
from fatbench.methods import evasion, objectives
from fatbench.runner.gpu_estimates import path_for
from fatbench.settings import LocalPath, Precision
from fatbench.suite import files

Found = dict[str, Any]
VARIANTS: dict[str, tuple[LocalPath, Precision]] = {  # of a batch of NIN
    "loop fp32": ("loop", "fp32"),
    "loop tf32": ("loop", "tf32"),
    "loop bf16": ("loop", "bf16"),
    "graphs fp32": ("graphs", "fp32"),
    "graphs tf32": ("graphs", "tf32"),
    "graphs bf16": ("graphs", "bf16"),
}
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
SMOKE = "smoke of "  # how items begin that time nothing, and so may run side by side


def smoke(bench: Bench, suite: str) -> Found:
    """Every cell of a suite's smoke preset, and its tables."""
    db = f"{bench.folder}/smoke-{suite}.db"
    program(fatbench("run", "suite", suite, "--smoke", "--device", bench.device.type, "--jobs", "1", "--db", db))
    shown = program(fatbench("report", suite, "--preset", "smoke", "--format", "markdown", "--db", db))
    return {"said": f"{shown.count('### ')} tables"}


def nin(bench: Bench, variant: str) -> Found:
    """One batch of five clients' AT of NIN: seconds, steps of an image a second, where the time goes."""
    path, precision = VARIANTS[variant]
    if precision == "tf32" and not bench.gpu:
        return {"said": "not here: a CPU has no TF32"}
    if path == "graphs" and not bench.gpu:
        return {"said": "not here: a CPU repeats no recorded steps"}
    exact(bench.device, precision)
    clients, batch = (2, 4) if bench.quick else (5, 32)
    width = 8 if bench.quick else 192
    local = LocalTraining(batch=batch, lr=0.01, momentum=0.9, objective=AT)
    on = noise_problem(bench, built("nin", (3, 32, 32), width=width), [batch] * clients, 32, path, precision)
    on = replace(on, recordings=Recordings())
    step = functools.partial(train_cohort, on, copy_state(on.model), range(clients), 0, local)

    wall(bench.device, step)  # kernels are chosen, memory is taken
    seconds = statistics.median(wall(bench.device, step) for _ in range(bench.repeats(5)))
    with torch.profiler.profile(acc_events=True) as profile:  # else torch 2.11 warns that it keeps one cycle
        wall(bench.device, step)
    rate = clients * batch * 11 / seconds
    averages = profile.key_averages()
    times = {one.key: one.self_device_time_total or one.self_cpu_time_total for one in averages}
    calls = sum(one.count for one in averages if "Launch" in one.key)
    largest = ", ".join(f"{key} {us / 1e3:.1f} ms" for key, us in sorted(times.items(), key=lambda t: -t[1])[:5])
    return {
        "said": f"{rate:.0f} steps of an image/s; {calls} launches; {largest}",
        "steps_per_second": rate,
        "seconds": seconds,
    }


def auto(bench: Bench) -> Found:
    """What the path auto takes for NIN on CIFAR-10, beside the times of both paths for large and for small clients."""
    spec = files.load("sfat-cifar10").plan("paper").cells[0].spec
    chosen = path_for(spec) if bench.gpu else "loop"
    local = LocalTraining(batch=32, lr=0.01, momentum=0.9, objective=AT)
    network = built("nin", (3, 32, 32), width=8 if bench.quick else 192)
    start, said = copy_state(network), [f"auto takes {chosen}"]
    if not bench.gpu:
        return {"said": f"{said[0]}; not here: a CPU repeats no recorded steps", "path": chosen}
    for clients, images in ((2, 4), (3, 2)) if bench.quick else ((5, 64), (100, 8)):
        on = replace(noise_problem(bench, network, [images] * clients, 32, "loop"), recordings=Recordings())
        ways = {
            path: functools.partial(train_cohort, replace(on, path=path), start, range(clients), 0, local)
            for path in ("loop", "graphs")
        }
        interleaved(bench.device, ways, 1)  # kernels are chosen, memory is taken
        faster = statistics.median(ratios(interleaved(bench.device, ways, bench.repeats(3))[0], "loop", "graphs"))
        said.append(f"graphs is {faster:.2f} times as fast as loop with {clients} clients of {images} images")
    return {"said": "; ".join(said), "path": chosen}


def recorded(bench: Bench, precision: Precision) -> Found:
    """40 batches of five clients' AT of NIN on the path graphs against loop: time and weights."""
    exact(bench.device, precision)
    clients, batches, batch, width = (2, 5, 4, 8) if bench.quick else (5, 40, 32, 192)
    local = LocalTraining(batch=batch, lr=0.01, momentum=0.9, objective=AT)
    network = built("nin", (3, 32, 32), width=width)
    on = noise_problem(bench, network, [batches * batch] * clients, 32, "loop", precision)
    on = replace(on, recordings=Recordings())
    start, models = copy_state(network), dict[str, list[Tensors]]()

    def round_(path: LocalPath) -> None:
        updates = train_cohort(replace(on, path=path), start, range(clients), 0, local)
        models[path] = [update.model for update in updates]

    round_("loop")  # kernels are chosen, memory is taken
    seconds = {"loop": wall(bench.device, lambda: round_("loop"))}
    if not bench.gpu:
        return {"said": f"loop {seconds['loop']:.2f} s; not here: a CPU repeats no recorded steps"}
    round_("graphs")  # steps are recorded
    seconds["graphs"] = wall(bench.device, lambda: round_("graphs"))
    said = f"{seconds['loop'] / seconds['graphs']:.2f} times as fast; {apart(models, 'loop', 'graphs', start)}"
    return {"said": said, "seconds": seconds}


def same_bytes(bench: Bench) -> Found:
    """ViT-S/16 at 224 trained twice in fp32: are the weights the same to the last bit?"""
    exact(bench.device, "fp32")
    size, depth, batch = (32, 1, 2) if bench.quick else (224, 12, 24)
    inner = functools.partial(evasion.pgd, **{**PGD7, "steps": 1 if bench.quick else 7})
    objective = functools.partial(objectives.mixed_at, attack=inner)
    local = LocalTraining(batch=batch, lr=0.01, momentum=0.9, objective=objective)
    network = built("vit", (3, size, size), patch=16, dim=384, depth=depth, heads=6)
    on = replace(noise_problem(bench, network, [2 * batch] * 2, 32, "loop"), size=size)
    start = copy_state(network)
    try:
        twice = [_digest(update.model for update in train_cohort(on, start, [0, 1], 0, local)) for _ in range(2)]
    except RuntimeError as error:
        if (missing := without_kernel(error)) is None:
            raise
        return {"said": f"no: {missing} has no deterministic kernel", "same": False}
    return {"said": "the same bytes twice" if twice[0] == twice[1] else "NOT the same", "same": twice[0] == twice[1]}


def _digest(models: Iterator[Tensors]) -> str:
    found = hashlib.sha256()
    for model in models:
        for value in model.values():
            found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()


def vit_b_monitor(bench: Bench) -> Found:
    """The monitor on 500 images of ViT-B/16 at 224: the peak of memory, and how many images were taken at once."""
    exact(bench.device, "fp32")
    size, n = (32, 40) if bench.quick else (224, 500)
    shape = {"patch": 16, "dim": 48, "depth": 1, "heads": 4} if bench.quick else {
        "patch": 16, "dim": 768, "depth": 12, "heads": 12,
    }  # fmt: skip
    network = built("vit", (3, size, size), **shape)
    on: Problem = replace(noise_problem(bench, network, [n], 32, "loop"), size=size)
    state, attack = copy_state(network), functools.partial(evasion.pgd, **{**PGD7, "steps": 2})
    if bench.gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = wall(bench.device, lambda: accuracy(on, state, on.images, on.labels, attack, ("monitor",), batch=n))
    part = part_of(pixels(on, on.images), load(on, state))
    peak = torch.cuda.max_memory_allocated(bench.device) / 1e9 if bench.gpu else None
    said = f"{part} images at once, {seconds:.1f} s for {n}" + (f", peak {peak:.1f} GB" if peak is not None else "")
    return {"said": said, "part": part, "peak_gb": peak}


def autoattack(bench: Bench) -> Found:
    """AutoAttack on a model of `make gpu-piece`, 1000 images, or on one of a smoke, a few."""
    folder = bench.folder if bench.quick else FOLDER
    if bench.quick:
        where = ("-k", "dataset=CIFAR-10 and E=1 and method=FAT", "--db", f"{folder}/piece.db")
        program(fatbench("run", "suite", "sfat-local-epochs", "--smoke", *where, "--device", bench.device.type))
    models = sorted(folder.glob("piece-files/*/model-*.safetensors"))
    if not models:
        return {"said": "not here: make gpu-piece trains the model"}
    n = "4" if bench.quick else "1000"
    attack = "{name: fgsm, eps: 8/255}" if bench.quick else "{name: autoattack, eps: 8/255}"
    shown = program(fatbench("evaluate", str(models[-1]), "--attack", attack, "--images", n,
                             "--device", bench.device.type, "--precision", "bf16"))  # fmt: skip
    return {"said": " ".join(shown.split())[:300]}


def items(bench: Bench, suites: int | None = None) -> dict[str, Callable[[Bench], Found]]:
    """Everything by its name, in the order in which it is tried; of the suites only so many."""
    names = [name for name in files.available() if not name.endswith(("-jpeg75", "-jpeg"))][:suites]
    names.sort(key=lambda name: -len(files.load(name).plan("smoke").cells))  # the longest do not begin last
    return {
        **{f"{SMOKE}{name}": functools.partial(smoke, suite=name) for name in names},
        **{f"a batch of NIN, {name}": functools.partial(nin, variant=name) for name in VARIANTS},
        "choice of auto": auto,
        **{f"steps recorded, {bits}": functools.partial(recorded, precision=bits) for bits in PRECISIONS},
        "ViT-S twice": same_bytes,
        "monitor of ViT-B": vit_b_monitor,
        "bench at_nin": functools.partial(_bench, name="at_nin"),
        "bench autoattack": functools.partial(_bench, name="autoattack"),
        "AutoAttack on one model": autoattack,
    }


def _bench(bench: Bench, name: str) -> Found:
    """A row of `make bench`, into its JSON file."""
    from benchmarks import table
    from benchmarks.measure import clock, provenance
    from benchmarks.rows import ROWS

    lines = ROWS[name](bench)
    made = {"row": name, "lines": lines, "seconds": 0.0, "quick": bench.quick, "where": provenance(bench.device),
            "clock": clock(bench.device)}  # fmt: skip
    table.save(bench.folder, bench.device.type, made)
    table.write(bench.folder, bench.device.type, [*ROWS])
    return {"said": "; ".join(f"{line['measured']:.2f} {line['unit']}" for line in lines)}
