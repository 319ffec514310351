"""Significance marks: decides which numbers of a table are bold and which are marked, in this one place.

Every number of a comparison group, which is a column unless the table says otherwise, is tested against the best of the
group over seeds and images (`statistics.seeds_and_images`). Holm's correction is over the K - 1 tests of the group.
What is significantly worse than the best carries MARK. The best is bold only where all others are, and the second best
has the rank "second" where it is significantly better than the rest. A number without a mark is not shown to be worse.
A group in which one number cannot be tested has no marks: its best carries UNTESTED.

A truly best method is marked, and a bold is wrong, in at most 5 % of columns each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fatbench.report.numbers import statistics
from fatbench.report.numbers.doubts import Outcomes
from fatbench.report.tables.grid import Grid, Value
from fatbench.store.stage_names import parsed

MARK, UNTESTED = "↓", "°"
TITLES = {MARK: "significantly worse than the best", UNTESTED: "not tested"}  # of the marks
LEVEL = 0.05


def mark(
    grid: Grid,
    groups: Iterable[tuple[Sequence[Value], str]],
    outcomes: Outcomes | None,
    group_name: str,
    images: Callable[[str, str], set[str]] = lambda cell, stage: set(),
) -> None:
    """Set rank and marks of the values of each comparison group, and explain the marks in footnotes.

    groups: values with what is best of them, "max", "min" or "none". group_name: "column", say. images: the
    fingerprints of the data that a stage was measured on; numbers of several are not tested. Nothing is marked in a
    group of which fewer than two values are measured, or all are the same.
    """
    any_marked = False
    reasons: dict[str, None] = {}  # in the order they are met
    for group, best in groups:
        values = [value for value in group if value.mean is not None]
        if best == "none" or len({value.mean for value in values}) < 2:
            continue
        top, other_values, tests = _against_best(values, best, outcomes, images)
        untested = [test for test in tests if isinstance(test, str)]
        if untested:  # one value without a test leaves the whole group without marks
            for value in values:
                if value.mean == top.mean:
                    value.marks = (*value.marks, UNTESTED)
            reasons |= dict.fromkeys(untested)
            continue
        worse = _worse(other_values, tests)
        for value in worse:
            value.rank, value.marks = "worse", (*value.marks, MARK)
        any_marked |= bool(worse)
        if len(worse) < len(other_values):  # some number is not worse, so the best is not alone
            for value in values:
                value.rank = value.rank or "shared"
            continue
        top.rank = "best"
        if len(other_values) > 1:
            second, beaten, tests = _against_best(other_values, best, outcomes, images)
            if len(_worse(beaten, tests)) == len(beaten):
                second.rank = "second"
    if any_marked:
        meaning = f"{TITLES[MARK]} of the {group_name} (p < {LEVEL:g}, Holm over its K - 1 comparisons)"
        grid.footnotes.append((MARK, f"{meaning}; a number without it is not shown to be worse"))
    if reasons:
        grid.footnotes.append((UNTESTED, f"the best of its {group_name}, {TITLES[UNTESTED]}: {', '.join(reasons)}"))


def _against_best(
    values: Sequence[Value], best: str, outcomes: Outcomes | None, images: Callable[[str, str], set[str]]
) -> tuple[Value, list[Value], list[float | str]]:
    """The best of those with the most seeds, the others, and the test of each of them against it."""
    most_seeds = max(len(value.seeds) for value in values)
    candidates = [value for value in values if len(value.seeds) == most_seeds]  # one seed may be the luckiest
    top = (min if best == "min" else max)(candidates, key=lambda value: value.mean or 0.0)
    rivals = [value for value in values if value is not top]
    return top, rivals, [_test(top, rival, outcomes, images) for rival in rivals]


def _worse(rivals: Sequence[Value], tests: Sequence[float | str]) -> list[Value]:
    """The rivals that are significantly worse than the best; none where one of them cannot be tested."""
    p_values = [test for test in tests if not isinstance(test, str)]
    if len(p_values) < len(tests):
        return []
    return [rival for rival, corrected in zip(rivals, statistics.holm(p_values), strict=True) if corrected < LEVEL]


def marks(value: Value) -> list[tuple[str, str]]:
    """(mark, meaning) for each mark beside a number: those of its doubts, then that of its test."""
    meanings = [*value.marked, *(TITLES[symbol] for symbol in value.marks[len(value.marked) :])]
    return list(zip(value.marks, meanings, strict=True))


def _test(best: Value, rival: Value, outcomes: Outcomes | None, images: Callable[[str, str], set[str]]) -> float | str:
    """p of the hypothesis that two values are equal, or the reason why they cannot be tested."""
    if best.seeds != rival.seeds:
        return "other seeds"
    if len(best.seeds) < 2:
        return "one seed"
    if outcomes is None or any(len(value.behind) != len(value.seeds) for value in (best, rival)):
        return "no per-image outcomes"
    if len({tuple(parsed(stage).precision for _, stage in value.behind) for value in (best, rival)}) > 1:
        return "attacked in another precision"
    if len(set().union(*(images(*stored) for value in (best, rival) for stored in value.behind))) > 1:
        return "other images or labels"
    outcomes_of_best, outcomes_of_rival = (
        [bits_and_count for stored in value.behind if (bits_and_count := outcomes(*stored))[1]]
        for value in (best, rival)
    )
    n = max(best.n, default=0)
    if {*best.n, *rival.n} != {n}:
        return "other test images"
    # several deployed models answer each image: a count is a multiple of n
    if (
        len(outcomes_of_best) + len(outcomes_of_rival) < 2 * len(best.seeds)
        or n == 0
        or any(count < n or count % n for _, count in (*outcomes_of_best, *outcomes_of_rival))
    ):
        return "no per-image outcomes"
    test = statistics.seeds_and_images(outcomes_of_best, outcomes_of_rival, n)
    return "one image" if test is None else test.p
