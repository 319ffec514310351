"""The schedule of a plan on many GPUs: its duration, idle time, and writes to the database."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

STAGE = 3  # transactions of a stage besides its commits: claim, description, end
# writes per second up to which a SQLite file on a local disk is no bottleneck; docs/clusters.md has figures
SQLITE = 20.0


@dataclass(frozen=True)
class RemainingWork:
    """The remaining work of one cell."""

    training: float  # seconds
    attacks: float  # seconds
    rounds: int  # to train
    chunks: int  # of images to attack, each committed
    stages: int

    def writes(self, checkpoint_seconds: float) -> float:
        """The number of transactions; training commits at its end and at most every `checkpoint_seconds`."""
        commits = min(float(self.rounds), self.training / checkpoint_seconds) if checkpoint_seconds > 0 else self.rounds
        return STAGE * self.stages + math.ceil(commits) + self.chunks


@dataclass(frozen=True)
class Schedule:
    """A plan on workers that take the next cell as soon as they are free, as in `fatbench run`."""

    gpus: int
    seconds: float  # from the first cell's start to the last one's end
    idle: float  # fraction of the GPUs' time without work
    writes: float  # per second, averaged over the whole time
    longest: float  # seconds of the longest cell, a lower bound for any number of GPUs


def schedule(cells: Sequence[RemainingWork], gpus: int, checkpoint_seconds: float) -> Schedule:
    """The schedule of cells taken in this order."""
    lengths = [cell.training + cell.attacks for cell in cells]
    free_at = [0.0] * min(gpus, len(cells))  # a heap: when each GPU is free next
    for seconds in lengths:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    end = max(free_at, default=0.0)
    busy, writes = sum(lengths), sum(cell.writes(checkpoint_seconds) for cell in cells)
    return Schedule(
        gpus, end, 1 - busy / (gpus * end) if end else 0.0, writes / end if end else 0.0, max(lengths, default=0.0)
    )
