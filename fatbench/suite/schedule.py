"""What many GPUs would make of a plan: how long, how idle, and how often they write to the database."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

STAGE = 3  # transactions of a stage beside its commits: claimed, described, finished
SQLITE = (
    20.0  # writes a second up to which a SQLite file on a local disk is no bottleneck; docs/clusters.md has figures
)


@dataclass(frozen=True)
class Length:
    """What is left of one cell."""

    training: float  # seconds
    attacks: float  # seconds
    rounds: int  # to train
    chunks: int  # of images to attack, each committed
    stages: int

    def writes(self, checkpoint_seconds: float) -> float:
        """Transactions: training commits after a round, at most once in so many seconds, and at its end."""
        commits = min(float(self.rounds), self.training / checkpoint_seconds) if checkpoint_seconds > 0 else self.rounds
        return STAGE * self.stages + math.ceil(commits) + self.chunks


@dataclass(frozen=True)
class Schedule:
    """Cells on workers that each take the next one of the plan as soon as they are free, as `fatbench run` does."""

    gpus: int
    seconds: float  # from the first cell's start to the last one's end
    idle: float  # fraction of the GPUs' time in which they have nothing to do
    writes: float  # a second, over the whole time
    longest: float  # seconds of the longest cell: no number of GPUs is faster


def schedule(cells: Sequence[Length], gpus: int, checkpoint_seconds: float) -> Schedule:
    """The schedule of cells in this order."""
    lengths = [cell.training + cell.attacks for cell in cells]
    free_at = [0.0] * min(gpus, len(cells))
    for seconds in lengths:
        heapq.heapreplace(free_at, free_at[0] + seconds)
    end = max(free_at, default=0.0)
    busy, writes = sum(lengths), sum(cell.writes(checkpoint_seconds) for cell in cells)
    return Schedule(
        gpus, end, 1 - busy / (gpus * end) if end else 0.0, writes / end if end else 0.0, max(lengths, default=0.0)
    )
