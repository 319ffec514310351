"""How much memory a cell takes, counted from the suite alone: said before it is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fatbench.errors import FatbenchError
from fatbench.settings import available_memory
from fatbench.suite import cost, facts
from fatbench.suite.calls import call
from fatbench.suite.entry import Work
from fatbench.suite.first_images import images_read

IN_MEMORY = 1 / 8  # of the free memory: uploads of a round that take more lie in a file, where training is on a CPU
COPIES = 4  # of a network: the global one, the next, the one that trains, and its gradients


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of a worker. Activations are no part of it; a set of image files is mapped and may be larger."""

    data: float = 0
    network: float = 0
    uploads: float = 0
    state: float = 0

    @property
    def total(self) -> float:
        return self.data + self.network + self.uploads + self.state


def need(spec: Mapping[str, Any]) -> MemoryNeed | None:
    """What a canonical cell takes; None: its data set or its network does not say its size."""
    data, size = facts.of_data(spec["data"]), cost.parameters(spec)
    if not (data.train and data.side and data.channels) or size is None:
        return None
    work = cost.training(spec) or Work()
    image_counts = images_read(spec["train"], spec["test"], spec["train_from"]) if _asks(spec["data"]) else (None, None)
    images = (image_counts[0] or data.train) + (image_counts[1] or data.test or 0)
    optimizer = cost.local(spec["algorithm"])
    moments = 2 if optimizer.get("optimizer", "sgd") != "sgd" else float(optimizer.get("momentum") or 0) > 0
    return MemoryNeed(
        data=images * data.channels * data.side**2,
        network=4 * size * (COPIES + moments),
        uploads=work.bytes_up / spec["algorithm"]["rounds"],
        state=max(0.0, work.disk - 4 * size),
    )


def _asks(data: Mapping[str, Any]) -> bool:
    return "first" in call("Data", data).signature.asks


def largest(specs: Iterable[Mapping[str, Any]]) -> MemoryNeed | None:
    """That of the cell that takes most; None: of none it is known."""
    needs = [memory_need for spec in specs if (memory_need := need(spec)) is not None]
    return max(needs, key=lambda one: one.total, default=None)


def in_words(memory_need: MemoryNeed) -> str:
    """ "data 0.16 GB, network 0.34 GB, uploads 0.86 GB, state of clients 0 GB"; parts of nothing are left out."""
    size_by_name = {
        "data": memory_need.data,
        "network": memory_need.network,
        "uploads": memory_need.uploads,
        "state of clients": memory_need.state,
    }
    return ", ".join(f"{name} {_gigabytes(size)}" for name, size in size_by_name.items() if size)


def line(specs: Iterable[Mapping[str, Any]], workers: int = 1, threshold: float = 0.0) -> str | None:
    """What a worker takes at most and what is free, in a line; None: it is not known, or less than `threshold`
    bytes.
    """
    memory_need = largest(specs)
    if memory_need is None or memory_need.total < threshold:
        return None
    free_bytes = available_memory()
    free_text = f"; {_gigabytes(free_bytes)} are free here" if free_bytes < float("inf") else ""
    filed = memory_need.uploads > IN_MEMORY * free_bytes
    own_bytes = (
        memory_need.total - memory_need.data - (memory_need.uploads if filed else 0)
    )  # what workers do not share
    shortage = (
        f": not enough for {workers} workers" if workers > 1 and own_bytes * workers > free_bytes >= own_bytes else ""
    )
    shortage = ": not enough" if own_bytes > free_bytes else shortage
    on_disk = " (uploads in a file, on a CPU)" if filed else ""
    return f"memory of a worker, without activations: {in_words(memory_need)}{on_disk}{free_text}{shortage}"


def of_cell(spec: Mapping[str, Any]) -> str:
    """For a message: what a cell needs, in words; empty where it is not known."""
    try:
        memory_need = need(spec)
    except FatbenchError:
        return ""
    return "" if memory_need is None else f" ({in_words(memory_need)})"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
