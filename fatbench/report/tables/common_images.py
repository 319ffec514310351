"""Accuracies on the images that all attacks of a table share, from the stored outcomes of each image.

An attack takes the first n test images, so the common ones are those of the attack with the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from fatbench.report.numbers.doubts import Doubt
from fatbench.report.numbers.measurements import Measurement, Numbers, Source
from fatbench.report.tables.grid_points import TablePoints

if TYPE_CHECKING:
    from fatbench.suite.cells import Cell

WHICH = ("all", "common")
NOT_CUT = Doubt("not_cut")


class OnCommonImages(Numbers):
    """The numbers of a table, each attack's on the images that every attack of the table took."""

    def __init__(self, numbers: Numbers, cells_by_point: TablePoints, sources: Mapping[str, Source]) -> None:
        vars(self).update(vars(numbers))  # the same numbers: only what is found differs
        self.all_outcomes, self.outcomes = numbers.outcomes, self._outcomes
        self._cut_outcomes: dict[tuple[str, str], tuple[int, int]] = {}  # (cell, stage) -> (bits, count)
        self.shared_counts: dict[str, int] = {}  # data set -> number of images that all attacks have
        for cells_by_heading in cells_by_point.values():
            for heading, cells in cells_by_heading.items():
                for cell in cells:
                    number = numbers.find(cell, sources[heading]) if _of_images(sources[heading]) else None
                    if number is not None and number.n:
                        data = repr(cell.spec["data"])
                        self.shared_counts[data] = min(number.n, self.shared_counts.get(data, number.n))

    def find(self, cell: Cell, source: Source) -> Measurement | None:
        number = super().find(cell, source)
        image_count = self.shared_counts.get(repr(cell.spec["data"]), 0)
        if number is None or not _of_images(source) or not 0 < image_count < number.n:
            return number
        bits, total = (self.all_outcomes and self.all_outcomes(cell.id, number.stage)) or (0, 0)
        cut = first_outcomes((bits, total), number.n, image_count) if total else (0, 0)
        self._cut_outcomes[cell.id, number.stage] = cut
        if not total:
            return replace(number, doubts=(*number.doubts, NOT_CUT))
        return replace(number, value=cut[0].bit_count() / cut[1], n=image_count)

    def _outcomes(self, cell: str, stage: str) -> tuple[int, int]:
        if (cell, stage) in self._cut_outcomes:
            return self._cut_outcomes[cell, stage]
        return (self.all_outcomes and self.all_outcomes(cell, stage)) or (0, 0)


def _of_images(source: Source) -> bool:
    return source.stage == "evaluation" and source.client == -1


def first_outcomes(outcomes: tuple[int, int], n: int, image_count: int) -> tuple[int, int]:
    """Cut outcomes (bits, count) of several deployed models to the first `image_count` of their n images."""
    bits, total = outcomes
    first_bits = 0
    for end in range(total - n, -1, -n):  # the first model's images are in the highest bits
        first_bits = first_bits << image_count | (bits >> end + n - image_count) & (1 << image_count) - 1
    return first_bits, total // n * image_count
