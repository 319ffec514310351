"""The cost of a run, counted from the suite alone: image passes, gradient steps, bytes, disk.

Nothing is run. The entries of functions give the counts (`fatbench.suite.entry`), and tests compare these with hooks on
the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.settings import available_memory
from fatbench.suite import calls, facts
from fatbench.suite.calls import call
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.entry import AlgorithmEntry, Passes, Unknown, Work, ask, passes
from fatbench.suite.facts import images_read
from fatbench.suite.types import number, rounded_down


def local(algorithm: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a client's training: those under `local`, or the algorithm's own `batch` and `objective`.

    A wrapper has those of the algorithm inside it.
    """
    if "local" in algorithm or "batch" in algorithm:
        return algorithm.get("local") or algorithm
    inner = [value for value in algorithm.values() if isinstance(value, Mapping) and "rounds" in value]
    return local(inner[0]) if inner else algorithm


def images_at_once(spec: Mapping[str, Any]) -> int:
    """Images in a batch of a client of average size, which may have fewer images than a batch takes."""
    batch = local(spec["algorithm"]).get("batch")
    total = facts.training_images(spec)
    if not total:
        return batch or 1
    images = (total - spec["validation"]) * (1 - float(number(spec["client_holdout"])))
    client_images = max(1, round(images / (spec["partition"].get("clients") or 1)))
    return min(batch or client_images, client_images)


def client_steps(spec: Mapping[str, Any]) -> int:
    """Steps of all clients in all rounds with whole batches; one an epoch if only files tell the number of images."""
    training, images = local(spec["algorithm"]), facts.training_images(spec)
    epochs = int(spec["algorithm"]["rounds"]) * facts.cohort(spec) * int(training.get("epochs") or 1)
    clients = int(spec["partition"].get("clients") or 1)
    batches = (images - spec["validation"]) // (clients * images_at_once(spec)) if images else 1
    return epochs * max(1, batches)


def epochs_in_round(start: int, factor: float, period: int, round: int) -> int:
    """Local epochs of a round, counted from 0: max(1, floor(start factor^floor(round / period)))."""
    return max(1, rounded_down(start * factor ** (round // period)))


def attack_passes(attack: Mapping[str, Any]) -> Passes:
    """The passes of one image under an attack."""
    return passes(call("Attack", attack).bound)


def training(spec: Mapping[str, Any]) -> Work | None:
    """The work of training a cell, its monitor included; None if the size of the data set, or the work, is unknown."""
    algorithm = call("Algorithm", spec["algorithm"])
    entry = calls.entry(algorithm.signature)
    while getattr(entry, "work", None) is None and algorithm.wrapped_call is not None:
        algorithm = algorithm.wrapped_call
        entry = calls.entry(algorithm.signature)
    if not isinstance(entry, AlgorithmEntry) or entry.work is None:
        return None
    try:
        work: Work = ask(entry.work, algorithm.bound, facts.Facts(spec))
        return work + monitoring(spec)
    except Unknown:
        return None


def deploys(spec: Mapping[str, Any]) -> int:
    """The number of models that are attacked after a round: one, or one a client."""
    is_one_per_client = call("Algorithm", spec["algorithm"]).signature.entry.get("deploys", False)
    return (facts.trained_clients(spec) or 1) if is_one_per_client else 1


def monitoring(spec: Mapping[str, Any]) -> Work:
    """The work of the monitor, and of the diagnostic beside it, while a cell trains. Unknown: a fact of the cell is."""
    if spec.get("monitor") is None:
        return Work()
    data = facts.of_data(spec["data"])
    rounds, every = int(spec["algorithm"]["rounds"]), int(spec.get("monitor_every") or 1)
    monitored_rounds = math.ceil(rounds / every)
    sets = (spec.get("test") or data.test or 0, spec.get("validation"))  # imported cells may lack what has a default
    monitored_images = sum(min(n, spec.get("monitor_n") or n) for n in sets if n)
    monitor_passes = attack_passes(spec["monitor"])
    dealt = (facts.training_images(spec) or 0) - (spec.get("validation") or 0)
    held_out = float(number(spec.get("client_holdout") or 0)) * dealt
    images = monitored_rounds * monitored_images * models_watched(spec) + monitored_rounds * held_out
    spent = images * Passes(monitor_passes.forward + 2, monitor_passes.backward)
    diagnostic = call("Diagnostic", spec["diagnostic"]) if spec.get("diagnostic") else None
    if diagnostic is not None and calls.entry(diagnostic.signature).passes is not None:
        diagnosed_rounds = math.ceil(rounds / math.lcm(every, int(spec.get("diagnostic_every") or 1)))
        spent += diagnosed_rounds * passes(diagnostic.bound, facts.Facts(spec))
    return Work(forward=spent.forward, backward=spent.backward)


def models_watched(spec: Mapping[str, Any]) -> float:
    """The average number of models that the monitor attacks in a round: one, or those of all clients seen so far."""
    clients, rounds = facts.trained_clients(spec) or 1, int(spec["algorithm"]["rounds"])
    if deploys(spec) == 1:
        return 1.0
    # a client has not taken part in any of t + 1 rounds with chance unseen_chance^(t + 1)
    unseen_chance = 1 - facts.cohort(spec) / clients
    return sum(clients * (1 - unseen_chance ** (t + 1)) for t in range(rounds)) / rounds


def evaluation(spec: Mapping[str, Any], evaluations: Iterable[Evaluation], checkpoints: int) -> Work | None:
    """The work of attacking the models of so many rounds; AutoAttack counts as if every image survived."""
    available = spec["test"] or facts.of_data(spec["data"]).test
    if not available:
        return None
    items = [*evaluations]
    on_test = _evaluation([item for item in items if not item.on], available, checkpoints * deploys(spec))
    return on_test + sum((_on_clients(spec, item, checkpoints) for item in items if item.on), Work())


def _on_clients(spec: Mapping[str, Any], item: Evaluation, checkpoints: int) -> Work:
    """The work of an attack on the own images of clients of average size: `n` of each at most."""
    clients = spec["partition"].get("clients") or 1
    total = float(number(spec["client_holdout"])) * ((facts.training_images(spec) or 0) - spec["validation"])
    if item.on.startswith("writers"):
        total = spec["test"] or facts.of_data(spec["data"]).test or 0
    images = clients * rounded_down(min(total / clients, item.n or math.inf))
    return _evaluation([replace(item, n=None)], images, checkpoints)


def _evaluation(evaluations: Iterable[Evaluation], available: int, models: int) -> Work:
    """The work of attacking so many models on so many images at most."""
    work = Work()
    for item in evaluations:
        n = min(available, item.n or available) * (item.origin.clients or 1 if item.origin else 1)
        passes_each = attack_passes(item.attack)
        work += Work(
            forward=models * n * (passes_each.forward + 1), backward=models * n * passes_each.backward, disk=n / 8
        )
    return work


def parameters(spec: Mapping[str, Any]) -> float | None:
    """The number of a model's parameters; None if its entry gives none or the shape of images is unknown."""
    try:
        count = facts.Facts(spec).parameters
    except Unknown:
        return None
    return None if math.isnan(count) else count


def cell_work(cell: Cell, plan: Plan) -> Work | None:
    """The work of training one cell and of all its evaluations; None if unknown."""
    train = training(cell.spec)
    test = evaluation(cell.spec, cell.evaluations, len(plan.checkpoints))
    return None if train is None or test is None else train + test


def total(works: Iterable[Work | None]) -> Work:
    """The sum of all known works."""
    result = Work()
    for work in works:
        if work is not None:
            result += work
    return result


# --- memory ------------------------------------------------------------------------------------------------------

IN_MEMORY = 1 / 8  # of free memory: on a CPU, uploads of a round that need more are kept in a file
COPIES = 4  # of a network: the global one, the next one, the one in training, and its gradients


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a worker needs, without activations; image files are mapped, so a data set may be larger."""

    data: float = 0
    network: float = 0
    uploads: float = 0
    state: float = 0

    @property
    def total(self) -> float:
        return self.data + self.network + self.uploads + self.state


def memory_of(spec: Mapping[str, Any]) -> MemoryNeed | None:
    """The memory need of a canonical cell; None if the size of its data set or its network is unknown."""
    data, size = facts.of_data(spec["data"]), parameters(spec)
    if not (data.train and data.side and data.channels) or size is None:
        return None
    work = training(spec) or Work()
    is_read_whole = "first" not in call("Data", spec["data"]).signature.asks
    train, test = (None, None) if is_read_whole else images_read(spec["train"], spec["test"], spec["train_from"])
    images = (train or data.train) + (test or data.test or 0)
    optimizer = local(spec["algorithm"])
    # copies of the weights that the optimizer keeps: two of Adam, one of SGD with momentum
    moments = 2 if optimizer.get("optimizer", "sgd") != "sgd" else float(optimizer.get("momentum") or 0) > 0
    return MemoryNeed(
        data=images * data.channels * data.side**2,
        network=4 * size * (COPIES + moments),
        uploads=work.bytes_up / spec["algorithm"]["rounds"],
        state=max(0.0, work.disk - 4 * size),
    )


def _memory_in_words(memory: MemoryNeed) -> str:
    """The text "data 0.16 GB, network 0.34 GB, uploads 0.86 GB", without parts of 0 bytes."""
    names = {"data": "data", "network": "network", "uploads": "uploads", "state": "state of clients"}
    return ", ".join(f"{name} {_gigabytes(size)}" for key, name in names.items() if (size := getattr(memory, key)))


def memory_line(specs: Iterable[Mapping[str, Any]], workers: int = 1, threshold: float = 0.0) -> str | None:
    """A line with the largest need of a worker and the free memory; None if unknown or below `threshold` bytes."""
    known = [memory for spec in specs if (memory := memory_of(spec)) is not None]
    memory = max(known, key=lambda memory: memory.total, default=None)
    if memory is None or memory.total < threshold:
        return None
    free_bytes = available_memory()
    free_text = f"; {_gigabytes(free_bytes)} are free here" if free_bytes < float("inf") else ""
    is_in_file = memory.uploads > IN_MEMORY * free_bytes
    # each worker has its own network and uploads; all share the data
    own_bytes = memory.total - memory.data - (memory.uploads if is_in_file else 0)
    shortage = (
        f": not enough for {workers} workers" if workers > 1 and own_bytes * workers > free_bytes >= own_bytes else ""
    )
    shortage = ": not enough" if own_bytes > free_bytes else shortage
    on_disk = " (uploads in a file, on a CPU)" if is_in_file else ""
    return f"memory of a worker, without activations: {_memory_in_words(memory)}{on_disk}{free_text}{shortage}"


def memory_text(spec: Mapping[str, Any]) -> str:
    """The memory need of a cell in brackets, for a message; empty if unknown."""
    try:
        memory = memory_of(spec)
    except FatbenchError:
        return ""
    return "" if memory is None else f" ({_memory_in_words(memory)})"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
