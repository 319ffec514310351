"""The rows of the benchmark's table: each a function of a `Bench` that returns its lines.

Goals are by kind of device, "cpu" for two cores and "cuda" for a GPU of the H200's class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyautoattack
import torch
from torch import Tensor

from benchmarks import counters, many, plain
from benchmarks.measure import (
    Bench,
    amx,
    child,
    cores,
    cost,
    fatbench,
    interleaved,
    line,
    matrix_rate,
    program,
    ratios,
    wall,
)
from fatbench import models
from fatbench.data import digits
from fatbench.engine.accuracy import accuracy, natural
from fatbench.engine.cohort import train_cohort
from fatbench.engine.graphs import Recordings
from fatbench.engine.local import LocalTraining, copy_state, load, pixels
from fatbench.engine.precision import forward
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Tensors
from fatbench.methods import evasion, objectives, packages
from fatbench.settings import LocalPath, Precision

Lines = list[dict[str, Any]]

PGD7: dict[str, Any] = {"eps": 8 / 255, "step": 2 / 255, "steps": 7}
PGD10: dict[str, Any] = {**PGD7, "steps": 10}
AT = functools.partial(objectives.at, attack=functools.partial(evasion.pgd, **PGD10))
TUNED = "torchattacks, channels innermost, freed memory kept"
NOISE = "same batches, noise and dropout masks"


def noise_problem(
    bench: Bench, network: torch.nn.Module, sizes: list[int], side: int, path: LocalPath, precision: str = "fp32"
) -> Problem:
    """Clients with `sizes` images of noise: for times, which do not depend on what is in an image."""
    total = sum(sizes)
    g = generator(0, "bench")
    images = torch.randint(0, 256, (total, 3, side, side), dtype=torch.uint8, generator=g).to(bench.device)
    labels = torch.randint(0, 10, (total,), generator=g).to(bench.device)
    shards = list(torch.arange(total, device=bench.device).split(sizes))
    return Problem(network.to(bench.device), images, labels, shards, 10, 0, bench.device, precision, path)  # type: ignore[arg-type]


def built(name: str, shape: tuple[int, int, int], **settings: Any) -> torch.nn.Module:
    """A registered model with 10 classes, the same weights each time."""
    with forked(0, "model"):
        network: torch.nn.Module = models.MODELS[name](shape, 10, **settings)
    return network


# --- training -----------------------------------------------------------------------------------------------------


def at_nin(bench: Bench) -> Lines:
    """One AT round of NIN: 5 clients, PGD-10, batch 32."""
    clients, batches = (1, 1) if bench.quick else (5, 20 if bench.gpu else 1)
    cohort = list(range(clients))
    local = LocalTraining(batch=32, lr=0.01, momentum=0.9, objective=AT)
    network = built("nin", (3, 32, 32))
    on = noise_problem(bench, network, [32 * batches] * clients, 32, "reference")
    start = copy_state(network)  # on the device, where the problem has put it
    theirs = _as_people(on)
    innermost = replace(theirs, model=copy.deepcopy(theirs.model).to(memory_format=torch.channels_last))
    ways: dict[str, Problem] = {"reference": on, "loop": replace(on, path="loop")}
    ways["bf16"] = replace(on, path="loop", precision="bf16")
    if bench.gpu:
        ways["graphs"] = replace(on, path="graphs", recordings=Recordings())
        ways["bf16"] = replace(ways["graphs"], precision="bf16", recordings=Recordings())

    def release() -> list[Tensors]:
        return plain.train(theirs, start, cohort, local, lambda noise: plain.pgd(noise, **PGD10))

    def tuned(precision: Precision) -> list[Tensors]:
        attack = plain.torchattacks_pgd(innermost.model, **PGD10)
        with forward(bench.device, precision):
            return plain.train(innermost, start, cohort, local, lambda _: attack)

    def ours(name: str) -> list[Tensors]:
        return [update.model for update in train_cohort(ways[name], start, cohort, 0, local)]

    acts: dict[str, Callable[[], list[Tensors]]] = {"plain": release}
    acts |= {"tuned": lambda: tuned("fp32"), "tuned bf16": lambda: tuned("bf16")}
    acts |= {name: functools.partial(ours, name) for name in ways if name != "reference" or bench.quick}
    seconds, results = interleaved(bench.device, acts, bench.repeats(3), theirs="plain")
    operations = counters.flops(functools.partial(ours, "loop"))
    steps = clients * batches * 32 * 11  # of PGD and the update
    work = f"AT round, NIN, {clients} clients, PGD-10, batch 32, {batches} batches each"
    best = "graphs" if bench.gpu else "loop"
    rate = {name: steps / statistics.median(times) for name, times in seconds.items()}

    def note(name: str) -> str:
        said = f"{rate[name]:.0f} steps of an image/s against {rate['plain']:.0f}"
        said += f"; {NOISE}: {apart(results, 'plain', name, start)}"
        said += f"; {_most(bench, operations, name, statistics.median(seconds['plain']))}"
        idle = name == "bf16" and not bench.gpu and not amx()
        return f"{said}; the goal of 5x is for a CPU with AMX, which this one has not" if idle else said

    bf16 = {"cpu": 5.0 if amx() else None, "cuda": 10.0}
    return [
        line(f"{work}, fp32", "the plain loop", {"cpu": 1.9, "cuda": None}, ratios(seconds, "plain", best),
             note=note(best)),
        line(f"{work}, bf16", "the plain loop, fp32", bf16, ratios(seconds, "plain", "bf16"), note=note("bf16")),
        line(f"{work}, fp32", TUNED, {}, ratios(seconds, "tuned", best)),
        line(f"{work}, bf16", f"{TUNED}, under autocast", {}, ratios(seconds, "tuned bf16", "bf16")),
    ]  # fmt: skip


def _most(bench: Bench, operations: int, name: str, against: float) -> str:
    """The ratio to `against` seconds that so many operations would have at the rate of a large matrix product.

    A yardstick, no bound: counted are also the products with zeros around an image, which kernels leave out.
    """
    rate = matrix_rate(bench.device, "bf16" if name == "bf16" else "fp32")
    return (
        f"at the {rate / 1e9:.0f} GFLOP/s of a large matrix product here it would be {against * rate / operations:.2f}x"
    )


def apart(results: Mapping[str, list[Tensors]], a: str, b: str, start: Tensors) -> str:
    """How far two sets of clients' weights are apart, as a fraction of how far training moved them."""

    def flat(tensors: Tensors) -> Tensor:
        return torch.cat([value.double().flatten() for value in tensors.values()])

    begin = flat(start)
    pairs = [(flat(one), flat(other)) for one, other in zip(results[a], results[b], strict=True)]
    fraction = max(float((one - other).norm() / (one - begin).norm()) for one, other in pairs)
    return f"weights differ by {fraction:.1g} of what training changed"


def at_vit(bench: Bench) -> Lines:
    """One AT round of ViT-S/16 at 224: PGD-7 on half of every batch."""
    import timm

    clients, batch, batches = (1, 2, 1) if bench.quick else (5, 24, 4) if bench.gpu else (1, 4, 1)
    cohort = list(range(clients))
    inner = functools.partial(evasion.pgd, **PGD7)
    local = LocalTraining(
        batch=batch, lr=0.01, momentum=0.9, objective=functools.partial(objectives.mixed_at, attack=inner, ratio=0.5)
    )
    network = built("vit", (3, 224, 224), patch=16, dim=384, depth=12, heads=6)
    theirs = timm.create_model("vit_small_patch16_224", num_classes=10)
    start, start_theirs = copy_state(network), copy_state(theirs)
    sizes = [batch * batches] * clients
    on = replace(noise_problem(bench, network, sizes, 32, "loop"), size=224)
    other = replace(noise_problem(bench, theirs, sizes, 32, "reference"), size=224)
    low = replace(on, precision="bf16")

    def people(precision: Precision) -> None:
        attack = plain.torchattacks_pgd(theirs, **PGD7)
        with forward(bench.device, precision):
            plain.train(other, start_theirs, cohort, local, lambda _: attack, ratio=0.5)

    def ours(problem: Problem) -> None:
        train_cohort(problem, start, cohort, 0, local)

    acts: dict[str, Callable[[], None]] = {"plain": lambda: people("fp32"), "plain bf16": lambda: people("bf16")}
    acts |= {"fp32": lambda: ours(on), "bf16": lambda: ours(low)}
    seconds, _ = interleaved(bench.device, acts, bench.repeats(3), theirs="plain")
    operations = counters.flops(acts["fp32"])
    work = f"AT round, ViT-S/16 at 224, {clients} clients, PGD-7, ratio 0.5, batch {batch}, {batches} batches each"
    against = "timm + torchattacks, fp32"
    images = clients * batches * batch

    def note(name: str) -> str:
        rate = images / statistics.median(seconds[name])
        return f"{rate:.2f} images/s; {_most(bench, operations, name, statistics.median(seconds['plain']))}"

    lines = [
        line(f"{work}, fp32", against, {"cpu": 1.4, "cuda": None}, ratios(seconds, "plain", "fp32"), note=note("fp32")),
        line(f"{work}, bf16", against, {"cpu": None, "cuda": 4.0}, ratios(seconds, "plain", "bf16"), note=note("bf16")),
        line(f"{work}, bf16", "timm + torchattacks under autocast", {}, ratios(seconds, "plain bf16", "bf16")),
    ]
    if bench.gpu:
        rate = operations / statistics.median(seconds["bf16"]) / matrix_rate(bench.device, "bf16")
        lines.append(line(f"{work}, bf16", "a large bf16 matrix product", {"cuda": 40.0}, [100 * rate], "%"))
    return lines


def operations(bench: Bench) -> Lines:
    """Operations of a batch of AT; tests/test_counters.py gates them."""
    lines = []
    for name, lean in (("nin", 625), ("resnet18", 1651)):
        on = noise_problem(bench, built(name, (1, 8, 8), width=6), [], 8, "loop")
        on = replace(on, images=torch.zeros(96, 1, 8, 8, dtype=torch.uint8), labels=torch.arange(96) % 10)
        on = replace(on, images=on.images.to(bench.device), labels=on.labels.to(bench.device))
        every, launches, syncs = counters.per_batch(counters.cohort_batches(on, AT))
        note = f"{every} operations with views and autograd's own detaches; {syncs} host synchronisations (goal 0)"
        goals = dict.fromkeys(("cpu", "cuda"), float(lean))
        lines.append(line(f"kernel launches of an AT batch, PGD-10, {name}", "a lean eager loop", goals, [launches],
                          "launches", note))  # fmt: skip
    return lines


# --- evaluation ---------------------------------------------------------------------------------------------------


def _victim(
    bench: Bench, side: int, width: int, train: int, local: LocalTraining
) -> tuple[Problem, Tensors, Tensor, Tensor]:
    """A SmallCNN trained on `train` of scikit-learn's digits: (problem, its state, the other images, their labels)."""
    dataset = digits(Path())
    network = built("small_cnn", (1, side, side), width=width).to(bench.device)
    split = [(dataset.test_images, dataset.train_images), (dataset.test_labels, dataset.train_labels)]
    images, labels = (torch.cat([torch.from_numpy(part) for part in parts]).to(bench.device) for parts in split)
    rest = len(labels) - train
    shard = torch.arange(rest, len(labels), device=bench.device)
    on = Problem(network, images, labels, [shard], 10, 0, bench.device, "fp32", "loop", side)
    (update,) = train_cohort(on, copy_state(network), [0], 0, local)
    return on, update.model, images[:rest], labels[:rest]


def _as_people(on: Problem) -> Problem:
    """The problem with a network of its own, laid out as torch does it: ours leaves channels innermost."""
    return replace(on, path="reference", model=copy.deepcopy(on.model).to(memory_format=torch.contiguous_format))


def pgd_cw_fgsm(bench: Bench) -> Lines:
    """PGD-20 + CW + FGSM of one checkpoint, against torchattacks one after another.

    Of two, because what early stopping saves depends on how many images fall, and when: one of which about half are
    right unattacked and a quarter withstand PGD-20, as of CIFAR-10 at 8/255 after federated adversarial training, and
    one that is right more often and withstands FGSM.
    """
    return [*_evaluation(bench, 1, 16), *_evaluation(bench, 2, 32)]


def _evaluation(bench: Bench, epochs: int, radius: int) -> Lines:
    """Of a network trained so many epochs with FGSM, in a ball of radius / 255."""
    eps = radius / 255
    fast = functools.partial(evasion.fgsm, eps=eps)
    local = LocalTraining(
        epochs=epochs, batch=32, lr=0.02, momentum=0.9, objective=functools.partial(objectives.at, attack=fast)
    )
    on, state, images, labels = _victim(bench, 32, 64, 64 if bench.quick else 480, local)
    n = 8 if bench.quick else 1000 if bench.gpu else 64
    images, labels = images[:n], labels[:n]
    step = eps / 4
    loop = load(_as_people(on), state)

    def theirs() -> list[float]:
        import torchattacks

        loop.eval()
        x = pixels(replace(on, path="reference"), images)
        three = (
            torchattacks.PGD(loop, eps=eps, alpha=step, steps=20),
            plain.margin_pgd(loop, eps=eps, step=step, steps=30),
            torchattacks.FGSM(loop, eps=eps),
        )
        with forked(0, "bench"):
            attacked = [loop(attack(x, labels)).argmax(1) for attack in three]
        return [float((predicted == labels).double().mean()) for predicted in attacked]

    def ours(early_stop: bool, precision: str) -> list[float]:
        settings: dict[str, Any] = {"eps": eps, "step": step, "early_stop": early_stop}
        three = (
            functools.partial(evasion.pgd, steps=20, **settings),
            functools.partial(evasion.cw, steps=30, **settings),
            functools.partial(evasion.fgsm, eps=eps),
        )
        how = replace(on, precision=precision)  # type: ignore[arg-type]
        return [
            float(accuracy(how, state, images, labels, attack, ("bench", i))[0].double().mean())
            for i, attack in enumerate(three)
        ]

    ways = {f"{way} {p}": (way == "early stop", p) for way in ("early stop", "last step") for p in ("fp32", "bf16")}
    acts: dict[str, Callable[[], list[float]]] = {"theirs": theirs}
    acts |= {name: functools.partial(ours, *way) for name, way in ways.items()}
    seconds, robust = interleaved(bench.device, acts, bench.repeats(3), theirs="theirs")
    unattacked = 100 * float(accuracy(on, state, images, labels, natural, ("bench",))[0].double().mean())
    trained = f"trained {epochs} epoch{'s' * (epochs > 1)} with FGSM, eps {radius}/255"
    work = f"PGD-20 + CW + FGSM, {n} digits at 32x32, SmallCNN of width 64 {trained}"

    def one(name: str, what: str, goals: dict[str, float | None]) -> dict[str, Any]:
        shown = ["/".join(f"{100 * value:.1f}" for value in robust[key]) for key in (name, "theirs")]
        note = f"accuracies {shown[0]} % against {shown[1]} % at the last step, {unattacked:.1f} % unattacked"
        return line(
            f"{work}, {what}", "torchattacks, one after another", goals, ratios(seconds, "theirs", name), note=note
        )

    return [
        one("early stop fp32", "early stop, fp32", {"cpu": 3.0, "cuda": None}),
        one("early stop bf16", "early stop, bf16 confirmed by fp32", {"cpu": 6.0, "cuda": 6.0}),
        one("last step fp32", "last step (the papers'), fp32", {}),
        one("last step bf16", "last step (the papers'), bf16", {}),
    ]


def autoattack(bench: Bench) -> Lines:
    """AutoAttack standard, against the package as it is: on a CPU of as many images as fit into a few minutes."""
    # under bf16 it is what it is under fp32
    goals = {"fp32": {}, "tf32": AA_GOALS} if bench.gpu else {"fp32": AA_GOALS}
    return _autoattack(bench, 2 if bench.quick else 500 if bench.gpu else 100, goals)


def autoattack_1000(bench: Bench) -> Lines:
    """On 1,000 images, whatever it takes: more than half an hour on a CPU. By name only."""
    return _autoattack(bench, 2 if bench.quick else 1000, {"fp32": AA_GOALS})


AA_GOALS: dict[str, float | None] = {"cpu": 1.5, "cuda": 2.0}


def _package_itself(model: torch.nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, eps: float) -> Tensor:
    """AutoAttack as its package runs it: nothing fused, no query left out, and FAB has the gradients of weights too."""
    adversary = pyautoattack.AutoAttack(
        model,
        norm="Linf",
        eps=eps,
        seed=int(torch.randint(2**31, (1,), generator=generator, device=generator.device)),
        version="standard",
        device=x.device,
    )
    adversary.verbose = False
    with contextlib.redirect_stdout(io.StringIO()):
        attacked: Tensor = adversary.run_standard_evaluation(x.contiguous(), y, batch_size=len(x))[0]
    return attacked


def _autoattack(bench: Bench, n: int, goals: dict[str, dict[str, float | None]]) -> Lines:
    on, state, images, labels = _victim(
        bench, 16, 32, 797, LocalTraining(epochs=4, batch=32, lr=0.05, momentum=0.9, objective=objectives.standard)
    )
    batch = n if bench.gpu else min(n // 2, 100)  # a GPU takes as long for all as for a hundred
    eps = 16 / 255  # about a third withstand: the time is theirs
    by: dict[str, Callable[..., Tensor]] = {name: functools.partial(packages.autoattack, eps=eps) for name in goals}
    by["package"] = functools.partial(_package_itself, eps=eps)
    ways = {"package": _as_people(on)} | {name: replace(on, precision=name) for name in goals}  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    right: dict[str, list[Tensor]] = {name: [] for name in ways}

    def one(name: str, first: int) -> Tensor:
        part = slice(first, first + batch)
        bits, _ = accuracy(ways[name], state, images[part], labels[part], by[name], ("bench", first), batch=batch)
        return bits

    for first in range(0, n, batch):  # the parts take turns, as repeats would
        acts = {name: functools.partial(one, name, first) for name in ways}
        took, outcomes = interleaved(bench.device, acts, 1, theirs="package")
        for name in ways:
            seconds[name] += took[name]
            right[name].append(outcomes[name])
    bits = {name: torch.cat(parts) for name, parts in right.items()}

    def note(name: str) -> str:
        differ = int((bits[name] != bits["package"]).sum())
        robust = [100 * float(bits[key].double().mean()) for key in (name, "package")]
        return f"robust {robust[0]:.1f} % against {robust[1]:.1f} %, {differ} of {n} outcomes differ"

    work = f"AutoAttack standard, {n:,} digits at 16x16 in batches of {batch}, SmallCNN of width 32, eps 16/255"
    return [
        line(f"{work}, {name}", "the package as it is", goals[name], ratios(seconds, "package", name), note=note(name))
        for name in goals
    ]


# --- the program --------------------------------------------------------------------------------------------------


def cells(bench: Bench) -> Lines:
    """A table of small cells with as many workers as cores, against one after another."""
    file = many.table_suite(bench.folder / "bench-cells.yaml", seeds=1 if bench.quick else 3)
    jobs = 16 if bench.gpu else min(2, cores())
    number = 3 if bench.quick else 9
    seconds: dict[str, list[float]] = {"one": [], "many": []}
    for _ in range(bench.repeats(2)):
        for name, workers in (("one", 1), ("many", jobs)):
            seconds[name].append(wall(bench.device, functools.partial(many.run, bench, file, workers)))
    rate = 3600 * number / statistics.median(seconds["many"])
    note = f"wall time; {rate:.0f} cells an hour, starting the program included"
    work = f"{number} cells of FAT, SFAT, Re-SFAT on digits, --jobs {jobs}"
    return [line(work, "--jobs 1", {"cpu": 1.3, "cuda": 4.0}, ratios(seconds, "one", "many"), note=note)]


CELL = textwrap.dedent(
    """
    import json, resource, sys, time, torch
    torch.set_num_threads(1)
    (clients, cohort, each, side), device, model = map(int, sys.argv[1:5]), sys.argv[5], json.loads(sys.argv[6])
    def resident(line):  # MB; what getrusage calls the peak begins with that of the process that started this one
        try:
            text = open("/proc/self/status").read()
            return int(text.partition(line + ":")[2].split()[0]) / 1024
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before = resident("VmRSS")
    from fatbench.engine import memory
    from fatbench.suite import calls
    from fatbench.engine.precision import exact
    from fatbench.engine.rounds import Problem, State
    memory.keep_freed_memory()
    exact(torch.device(device), "fp32")
    pgd = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 1}  # more steps take no more memory
    algorithm = calls.build("Algorithm", calls.check("Algorithm", {
        "name": "fedavg", "rounds": 1, "participation": cohort / clients, "aggregator": {"name": "samples"}, "local":
        {"epochs": 1, "batch": 32, "lr": 0.01, "momentum": 0.9, "objective": {"name": "at", "attack": pgd}}}))
    network = calls.build("Model", calls.check("Model", model))((3, side, side), 10).to(device)
    images = torch.full((50_000, 3, 32, 32), 1, dtype=torch.uint8, device=device)
    labels = torch.arange(50_000, device=device) % 10
    shards = [torch.arange(each, device=device) + each * k for k in range(clients)]
    state = State(0, {name: value.clone() for name, value in network.state_dict().items()})
    on = Problem(network, images, labels, shards, 10, 0, torch.device(device), "fp32", "loop", side)
    clock = time.process_time if device == "cpu" else time.perf_counter
    begin = clock()
    for result in algorithm(on, state): pass
    if device != "cpu": torch.cuda.synchronize()
    seconds = clock() - begin
    megabytes = resident("VmHWM") - before if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps({"megabytes": megabytes, "seconds": seconds}))
    """
)


def cell(
    bench: Bench, clients: int, cohort: int, each: int = 32, side: int = 32, model: dict[str, Any] | None = None
) -> dict[str, float]:
    """Peak memory over the import of torch (on a GPU: of the device), and seconds, of a round of AT in a new process.

    Of NIN, or what else `model` names, on 50,000 images at 32x32 seen at `side`; each client of the cohort trains on
    `each`, one batch.
    """
    numbers = (str(number) for number in (clients, cohort, each, side))
    found: dict[str, float] = child(CELL, *numbers, bench.device.type, json.dumps(model or {"name": "nin"}))
    return found


def memory(bench: Bench) -> Lines:
    """Peak memory of a NIN cell on 50,000 images, and of one with a hundred times the clients.

    Several runs in turn: what the allocator holds differs by a tenth from one run of the same program to the next.
    """
    pairs = [[cell(bench, clients, 5)["megabytes"] for clients in (5, 500)] for _ in range(bench.repeats(5))]
    few, several = zip(*pairs, strict=True)
    more = 100 * (statistics.median(several) / statistics.median(few) - 1)
    work = "peak memory of a NIN cell, 50,000 images, 5 clients a round"
    lines = [
        line(f"{work}, of 5", "the import of torch", {"cpu": 1500.0}, few, "MB"),
        line(f"{work}, of 500", "the import of torch", {"cpu": 1500.0}, several, "MB"),
        line("the same, medians compared", "5 clients", {"cpu": 5.0}, [more], "% more"),
    ]
    if bench.gpu:
        cohort = cell(bench, 50, 50)["megabytes"]
        lines.append(line("peak memory of a NIN cohort of 50", "-", {"cuda": 8192.0}, [cohort], "MB"))
    batch = 1 if bench.quick else 24
    vit = cell(bench, 5, 1, batch, 224, VIT_B)["megabytes"]
    lines.append(line(f"peak memory of AT, ViT-B/16 at 224, batch {batch}", "-", {"cuda": 16384.0}, [vit], "MB",
                      "the images in memory included"))  # fmt: skip
    return lines


VIT_B = {"name": "vit", "patch": 16, "dim": 768, "depth": 12, "heads": 12}


def command_line(bench: Bench) -> Lines:
    """--help, plan of the largest suite, report of 10,000 cells."""
    sizes = (10, 2, 5) if bench.quick else (100, 10, 10)
    number = math.prod(sizes)
    file, db = many.database(bench.folder, *sizes)
    largest = many.largest()
    commands = {
        "fatbench --help": (0.3, fatbench("--help")),
        f"fatbench plan suite {largest}": (3.0, fatbench("plan", "suite", largest)),
        f"fatbench report of {number:,} cells": (
            5.0, fatbench("report", str(file), "--db", db, "--format", "markdown", "-c", "report.published=none")),
    }  # fmt: skip
    lines = []
    for work, (goal, command) in commands.items():
        times = [cost(bench.device, functools.partial(program, command)) for _ in range(bench.repeats(5))]
        lines.append(line(work, "-", {"cpu": goal}, times, "s", note="CPU time"))
    return lines


ROWS: dict[str, Callable[[Bench], Lines]] = {
    "at_nin": at_nin,
    "at_vit": at_vit,
    "operations": operations,
    "pgd_cw_fgsm": pgd_cw_fgsm,
    "autoattack": autoattack,
    "autoattack_1000": autoattack_1000,
    "cells": cells,
    "memory": memory,
    "command_line": command_line,
}
BY_HAND = {"autoattack_1000"}  # run only where they are asked for
