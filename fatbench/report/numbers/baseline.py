"""Differences of methods from the baseline of their suite, for forest plots and leaderboards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import NothingMatched
from fatbench.report.numbers.compare import Comparison, Pair, compare, sentence
from fatbench.report.numbers.measurements import Measurement
from fatbench.suite import confounders
from fatbench.suite.cells import Plan
from fatbench.suite.model import Key


@dataclass(frozen=True)
class Difference:
    """One label against the baseline under one evaluation, at the same other labels."""

    where: Key  # labels of the other axes in which the differences are not alike: {"split": "Non-IID"}
    label: str
    baseline: str
    cells: frozenset[str]  # of the label
    comparison: Comparison

    @property
    def row(self) -> str:
        """The labels of `where`, joined: "Non-IID"."""
        return ", ".join(self.where.values())

    def sentence(self) -> str:
        """The conclusion: "SFAT and FAT differ by at most 0.8 points under PGD-20 (95 %, 5 seeds)"."""
        comparison = self.comparison
        p = 1.0 if comparison.test is None else comparison.test.p
        both_labels = (self.label, self.baseline)
        return sentence(
            both_labels,
            comparison.metric,
            comparison.difference,
            len(comparison.seeds),
            comparison.test,
            p,
            comparison.floor,
        )


def differences(
    plan: Plan, numbers_of: Callable[[str], Mapping[str, Measurement]], metrics: Sequence[str] = ()
) -> list[Difference]:
    """All labels of the baseline's axis against it, at each combination of other labels that has it.

    numbers_of: a cell's evaluations, see `compare.measured_numbers`. Empty where the suite names no baseline.
    """
    if plan.baseline is None:
        return []
    axis, baseline = plan.baseline
    cells_by_row: dict[
        tuple[tuple[str, str], ...], dict[str, dict[int, str]]
    ] = {}  # other labels -> label -> seed -> cell
    for cell in plan.cells:
        other_labels = tuple((name, label) for name, label in cell.key.items() if name != axis)
        cells_by_row.setdefault(other_labels, {}).setdefault(cell.key.get(axis, ""), {})[int(cell.spec["seed"])] = (
            cell.id
        )
    uncompared_cells = confounders.uncompared_cells(confounders.against(plan.cells, plan.baseline))
    all_differences = []
    for other_labels, labels in cells_by_row.items():
        baseline_cells = labels.get(baseline, {})
        for label, label_cells in labels.items():
            pairs = [
                Pair("", seed, label_cells[seed], baseline_cells[seed])
                for seed in label_cells
                if seed in baseline_cells
            ]
            if label == baseline or not pairs or not uncompared_cells.isdisjoint(label_cells.values()):
                continue
            try:
                compared = compare(pairs, numbers_of, numbers_of)
            except NothingMatched:  # the two have no evaluation in common
                continue
            cells = frozenset(label_cells.values())
            all_differences += [
                Difference(dict(other_labels), label, baseline, cells, item)
                for item in compared
                if not metrics or item.metric in metrics
            ]
    shared = set.intersection(*(set(item.where.items()) for item in all_differences)) if all_differences else set()
    return [
        replace(item, where={name: label for name, label in item.where.items() if (name, label) not in shared})
        for item in all_differences
    ]
