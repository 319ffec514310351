"""One seed's number as a side of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fatbench.report.numbers.doubts import Doubt
from fatbench.report.numbers.statistics import ImageOutcomes
from fatbench.store.inputs import Inputs
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.report.numbers.statistics import Groups

NO_INPUTS: Inputs = {}


@dataclass(slots=True)  # a comparison of ten thousand cells makes fifty thousand
class Measurement:
    """One seed's accuracy with all that is known of it."""

    value: float
    n: int  # test images
    outcomes: ImageOutcomes | None = (
        None  # of every image, by each model that is deployed; None: not stored, or not read
    )
    doubts: tuple[Doubt, ...] = ()
    stage: str = ""  # of the evaluation
    inputs: Inputs = field(default_factory=lambda: NO_INPUTS)  # what answered it, see `fatbench.store.inputs`
    groups: Groups | None = field(default=None, compare=False)  # of its images; None: each is its own

    @property
    def precision(self) -> str:
        """The precision of the attack."""
        return parsed(self.stage).precision
