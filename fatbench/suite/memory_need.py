"""The memory that a cell needs, counted from the suite alone, so that a shortage is reported before the run."""

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


def need(spec: Mapping[str, Any]) -> MemoryNeed | None:
    """The memory need of a canonical cell; None if the size of its data set or its network is unknown."""
    data, size = facts.of_data(spec["data"]), cost.parameters(spec)
    if not (data.train and data.side and data.channels) or size is None:
        return None
    work = cost.training(spec) or Work()
    image_counts = images_read(spec["train"], spec["test"], spec["train_from"])
    if not _reads_first_only(spec["data"]):
        image_counts = (None, None)
    images = (image_counts[0] or data.train) + (image_counts[1] or data.test or 0)
    optimizer = cost.local(spec["algorithm"])
    # copies of the weights that the optimizer keeps: two of Adam, one of SGD with momentum
    moments = 2 if optimizer.get("optimizer", "sgd") != "sgd" else float(optimizer.get("momentum") or 0) > 0
    return MemoryNeed(
        data=images * data.channels * data.side**2,
        network=4 * size * (COPIES + moments),
        uploads=work.bytes_up / spec["algorithm"]["rounds"],
        state=max(0.0, work.disk - 4 * size),
    )


def _reads_first_only(data: Mapping[str, Any]) -> bool:
    return "first" in call("Data", data).signature.asks


def largest(specs: Iterable[Mapping[str, Any]]) -> MemoryNeed | None:
    """The largest known memory need; None if none is known."""
    memory_needs = [memory_need for spec in specs if (memory_need := need(spec)) is not None]
    return max(memory_needs, key=lambda memory_need: memory_need.total, default=None)


def in_words(memory_need: MemoryNeed) -> str:
    """The text "data 0.16 GB, network 0.34 GB, uploads 0.86 GB", without parts of 0 bytes."""
    size_by_name = {
        "data": memory_need.data,
        "network": memory_need.network,
        "uploads": memory_need.uploads,
        "state of clients": memory_need.state,
    }
    return ", ".join(f"{name} {_gigabytes(size)}" for name, size in size_by_name.items() if size)


def line(specs: Iterable[Mapping[str, Any]], workers: int = 1, threshold: float = 0.0) -> str | None:
    """A line with the largest need of a worker and the free memory; None if unknown or below `threshold` bytes."""
    memory_need = largest(specs)
    if memory_need is None or memory_need.total < threshold:
        return None
    free_bytes = available_memory()
    free_text = f"; {_gigabytes(free_bytes)} are free here" if free_bytes < float("inf") else ""
    is_in_file = memory_need.uploads > IN_MEMORY * free_bytes
    # each worker has its own network and uploads; all share the data
    own_bytes = memory_need.total - memory_need.data - (memory_need.uploads if is_in_file else 0)
    shortage = (
        f": not enough for {workers} workers" if workers > 1 and own_bytes * workers > free_bytes >= own_bytes else ""
    )
    shortage = ": not enough" if own_bytes > free_bytes else shortage
    on_disk = " (uploads in a file, on a CPU)" if is_in_file else ""
    return f"memory of a worker, without activations: {in_words(memory_need)}{on_disk}{free_text}{shortage}"


def of_cell(spec: Mapping[str, Any]) -> str:
    """The memory need of a cell in brackets, for a message; empty if unknown."""
    try:
        memory_need = need(spec)
    except FatbenchError:
        return ""
    return "" if memory_need is None else f" ({in_words(memory_need)})"


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
