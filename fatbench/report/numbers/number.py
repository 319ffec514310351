"""The shape of every stored number, as the one reader (`cell_rows`) gives it."""

from __future__ import annotations

from typing import NamedTuple

from fatbench.store.stage_names import parsed


class Number(NamedTuple):
    """One stored number."""

    cell: str
    stage: str  # "train", or an evaluation
    round: int
    client: int  # -1: about no single client or class
    metric: str
    value: float
    n: int  # test images behind it; 0: none
    run: int = 0  # the run that measured it
    created: str = ""

    @property
    def is_accuracy(self) -> bool:
        """Whether it is the result of an evaluation, over all images and models."""
        return self.client == -1 and self.metric == parsed(self.stage).metric
