"""Which numbers of a table are bold and which are marked: the one place where that is decided.

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
    of: str,
    images: Callable[[str, str], set[str]] = lambda cell, stage: set(),
) -> None:
    """Set rank and marks of the values of each comparison group, and say in footnotes what the marks mean.

    groups: values with what is best of them, "max", "min" or "none". of: what a group is, "column". images: the
    fingerprints of the data that a stage was measured on; numbers of several are not tested. Nothing is marked in a
    group of which fewer than two values are measured, or all are the same.
    """
    marked = False
    reasons: dict[str, None] = {}  # in the order they are met
    for group, best in groups:
        values = [value for value in group if value.mean is not None]
        if best == "none" or len({value.mean for value in values}) < 2:
            continue
        top, others, tests = _against_best(values, best, outcomes, images)
        untested = [test for test in tests if isinstance(test, str)]
        if untested:
            for value in values:
                if value.mean == top.mean:
                    value.marks = (*value.marks, UNTESTED)
            reasons |= dict.fromkeys(untested)
            continue
        worse = _worse(others, tests)
        for value in worse:
            value.rank, value.marks = "worse", (*value.marks, MARK)
        marked |= bool(worse)
        if len(worse) < len(others):
            for value in values:
                value.rank = value.rank or "shared"
            continue
        top.rank = "best"
        if len(others) > 1:
            second, rest, tests = _against_best(others, best, outcomes, images)
            if len(_worse(rest, tests)) == len(rest):
                second.rank = "second"
    if marked:
        said = f"{TITLES[MARK]} of the {of} (p < {LEVEL:g}, Holm over its K - 1 comparisons)"
        grid.footnotes.append((MARK, f"{said}; a number without it is not shown to be worse"))
    if reasons:
        grid.footnotes.append((UNTESTED, f"the best of its {of}, {TITLES[UNTESTED]}: {', '.join(reasons)}"))


def _against_best(
    values: Sequence[Value], best: str, outcomes: Outcomes | None, images: Callable[[str, str], set[str]]
) -> tuple[Value, list[Value], list[float | str]]:
    """The best of those with the most seeds, the others, and the test of each of them against it."""
    most = max(len(value.seeds) for value in values)
    able = [value for value in values if len(value.seeds) == most]  # one seed may be the luckiest
    top = (min if best == "min" else max)(able, key=lambda value: value.mean or 0.0)
    others = [value for value in values if value is not top]
    return top, others, [_test(top, other, outcomes, images) for other in others]


def _worse(others: Sequence[Value], tests: Sequence[float | str]) -> list[Value]:
    """Those that are significantly worse; none where one of them cannot be tested."""
    p = [test for test in tests if not isinstance(test, str)]
    if len(p) < len(tests):
        return []
    return [other for other, corrected in zip(others, statistics.holm(p), strict=True) if corrected < LEVEL]


def marks(value: Value) -> list[tuple[str, str]]:
    """The marks beside a number, each with what it means: those of its doubts, then that of its test."""
    meanings = [*value.marked, *(TITLES[mark] for mark in value.marks[len(value.marked) :])]
    return list(zip(value.marks, meanings, strict=True))


def _test(best: Value, other: Value, outcomes: Outcomes | None, images: Callable[[str, str], set[str]]) -> float | str:
    """p of the two values being one, or why it cannot be known."""
    if best.seeds != other.seeds:
        return "other seeds"
    if len(best.seeds) < 2:
        return "one seed"
    if outcomes is None or any(len(value.behind) != len(value.seeds) for value in (best, other)):
        return "no per-image outcomes"
    if len({tuple(parsed(stage).precision for _, stage in value.behind) for value in (best, other)}) > 1:
        return "attacked in another precision"
    if len(set().union(*(images(*stored) for value in (best, other) for stored in value.behind))) > 1:
        return "other images or labels"
    a, b = ([found for stored in value.behind if (found := outcomes(*stored))] for value in (best, other))
    n = max(best.n, default=0)
    if {*best.n, *other.n} != {n}:
        return "other test images"
    if len(a) + len(b) < 2 * len(best.seeds) or n == 0 or any(count < n or count % n for _, count in (*a, *b)):
        return "no per-image outcomes"
    test = statistics.seeds_and_images(a, b, n)
    return "one image" if test is None else test.p
