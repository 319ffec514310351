"""Methods against the baseline that their suite names: what a forest plot and a leaderboard's column show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import NothingMatched
from fatbench.report.numbers.compare import Comparison, Measured, Pair, compare, sentence
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
        """Those labels alone: "Non-IID"."""
        return ", ".join(self.where.values())

    def sentence(self) -> str:
        """What it comes to: "SFAT and FAT differ by at most 0.8 points under PGD-20 (95 %, 5 seeds)"."""
        one = self.comparison
        p = 1.0 if one.test is None else one.test.p
        who = (self.label, self.baseline)
        return sentence(who, one.metric, one.difference, len(one.seeds), one.test, p, one.floor)


def differences(
    plan: Plan, of: Callable[[str], Mapping[str, Measured]], metrics: Sequence[str] = ()
) -> list[Difference]:
    """All labels of the baseline's axis against it, at each combination of other labels that has it.

    of: see `compare.measured`. Empty where the suite names no baseline.
    """
    if plan.baseline is None:
        return []
    axis, baseline = plan.baseline
    found: dict[tuple[tuple[str, str], ...], dict[str, dict[int, str]]] = {}  # other labels -> label -> seed -> cell
    for cell in plan.cells:
        others = tuple((name, label) for name, label in cell.key.items() if name != axis)
        found.setdefault(others, {}).setdefault(cell.key.get(axis, ""), {})[int(cell.spec["seed"])] = cell.id
    unlike = confounders.apart(confounders.against(plan.cells, plan.baseline))
    made = []
    for others, labels in found.items():
        theirs = labels.get(baseline, {})
        for label, mine in labels.items():
            pairs = [Pair("", seed, mine[seed], theirs[seed]) for seed in mine if seed in theirs]
            if label == baseline or not pairs or not unlike.isdisjoint(mine.values()):
                continue
            try:
                compared = compare(pairs, of, of)
            except NothingMatched:
                continue
            cells = frozenset(mine.values())
            made += [
                Difference(dict(others), label, baseline, cells, one)
                for one in compared
                if not metrics or one.metric in metrics
            ]
    shared = set.intersection(*(set(one.where.items()) for one in made)) if made else set()
    return [
        replace(one, where={name: label for name, label in one.where.items() if (name, label) not in shared})
        for one in made
    ]
