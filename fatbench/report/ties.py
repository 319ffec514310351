"""Which numbers of a table cannot be told from the best: marked, and the best is not bold by a hair.

Every value is tested against the best of its contest, over seeds and images (`statistics.crossed`); with one seed over
images (McNemar). Both need the verdicts of each image. Holm's correction is over all these tests of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fatbench.report import statistics
from fatbench.report.grid import Grid, Value
from fatbench.report.numbers import Outcomes

MARK = "≈"
TITLE = "cannot be told from the best"
LEVEL = 0.05


def mark(grid: Grid, contests: Iterable[Sequence[Value]], outcomes: Outcomes | None) -> None:
    """Mark what cannot be told from the best of its contest, and the best with it; such values are not ranked.

    contests: the values that compete, ranked. A contest in which one value cannot be tested keeps its ranks: verdicts
    that are not stored, several models on each image with one seed alone, or seeds that the best lacks.
    """
    if outcomes is None:
        return
    tests: list[tuple[Value, Value, float]] = []  # the best, another, p
    for contest in contests:
        best = next((value for value in contest if value.rank == "best"), None)
        if best is None:
            continue
        others = [value for value in contest if value is not best and value.mean is not None]
        ps = [_p(best, value, outcomes) for value in others]
        if None not in ps:
            tests += [(best, value, p) for value, p in zip(others, ps, strict=True) if p is not None]
    tied: list[Value] = []
    for (best, value, _), p in zip(tests, statistics.holm([p for *_, p in tests]), strict=True):
        if p >= LEVEL:
            tied += [best, value]
    for value in {id(value): value for value in tied}.values():
        value.rank = "shared"
        value.marks = (*value.marks, MARK)
    if tied:
        several = any(len(value.seeds) > 1 for value in tied)
        over = "seeds and images" if several else "images (exact McNemar test)"
        count = f"{len(tests)} comparison{'s' * (len(tests) > 1)}"
        text = f"{TITLE}: p >= {LEVEL:g}, paired over {over}, after Holm's correction over {count}"
        grid.footnotes.append((MARK, text))


def _p(best: Value, other: Value, outcomes: Outcomes) -> float | None:
    """p of the two values being one; None: too little is stored to tell. Values without a difference have p = 1."""
    if best.seeds != other.seeds or len(best.behind) != len(best.seeds) or len(other.behind) != len(other.seeds):
        return None
    a, b = ([outcomes(*place) for place in value.behind] for value in (best, other))
    sizes = {one[1] if one else 0 for one in (*a, *b)}
    n = max(best.n, default=0)
    if {*best.n, *other.n} != {n} or 0 in (n, *sizes) or any(size % n for size in sizes):
        return None
    ours, theirs = [one for one in a if one], [one for one in b if one]
    if ours == theirs:
        return 1.0
    if len(ours) == 1:
        return statistics.images(ours[0], theirs[0]).p if sizes == {n} else None
    test = statistics.crossed(ours, theirs, n)
    return None if test is None else test.p
