"""Which numbers of a table cannot be told from the best: marked, and the best is not bold by a hair.

Every value is tested against the best of its group, over seeds and images (`statistics.crossed`); with one seed over
images (McNemar; where several models judge an image, the paired t test). All need the outcomes of each image. Holm's
correction is over all these tests of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fatbench.report.numbers import statistics
from fatbench.report.numbers.measurements import Outcomes
from fatbench.report.tables.grid import Grid, Value

MARK = "≈"
TITLE = "cannot be told from the best"
LEVEL = 0.05
# what a test is over
SEEDS = "seeds and images"
MCNEMAR = "images (exact McNemar test)"
SEVERAL = "images (paired t test of the mean over models)"


def mark(grid: Grid, groups: Iterable[Sequence[Value]], outcomes: Outcomes | None) -> None:
    """Mark what cannot be told from the best of its group, and the best with it; such values are not ranked.

    groups: the values that compete, ranked. A group in which one value cannot be tested keeps its ranks: outcomes
    that are not stored, or seeds that the best lacks.
    """
    if outcomes is None:
        return
    tests: list[tuple[Value, Value, float, str]] = []  # the best, another, p, over what
    for group in groups:
        best = next((value for value in group if value.rank == "best"), None)
        if best is None:
            continue
        others = [value for value in group if value is not best and value.mean is not None]
        found = [(value, _tested(best, value, outcomes)) for value in others]
        if all(test for _, test in found):
            tests += [(best, value, *test) for value, test in found if test]
    tied: list[Value] = []
    for (best, value, _, _), p in zip(tests, statistics.holm([p for _, _, p, _ in tests]), strict=True):
        if p >= LEVEL:
            tied += [best, value]
    for value in {id(value): value for value in tied}.values():
        value.rank = "shared"
        value.marks = (*value.marks, MARK)
    if tied:
        used = {over for *_, over in tests}
        alone = " or ".join(over for over in (MCNEMAR, SEVERAL) if over in used)
        over = ", with one seed over ".join(part for part in (SEEDS if SEEDS in used else "", alone) if part)
        count = f"{len(tests)} comparison{'s' * (len(tests) > 1)}"
        text = f"{TITLE}: p >= {LEVEL:g}, paired over {over}, after Holm's correction over {count}"
        grid.footnotes.append((MARK, text))


def _tested(best: Value, other: Value, outcomes: Outcomes) -> tuple[float, str] | None:
    """p of the two values being one, and over what; None: too little is stored to tell. p of equal outcomes is 1."""
    if best.seeds != other.seeds or len(best.behind) != len(best.seeds) or len(other.behind) != len(other.seeds):
        return None
    a, b = ([outcomes(*place) for place in value.behind] for value in (best, other))
    sizes = {one[1] if one else 0 for one in (*a, *b)}
    n = max(best.n, default=0)
    if {*best.n, *other.n} != {n} or 0 in (n, *sizes) or any(size % n for size in sizes):
        return None
    ours, theirs = [one for one in a if one], [one for one in b if one]
    over = SEEDS if len(ours) > 1 else MCNEMAR if sizes == {n} else SEVERAL
    if ours == theirs:
        return 1.0, over
    if over == MCNEMAR:
        return statistics.images(ours[0], theirs[0]).p, over
    test = statistics.crossed(ours, theirs, n) if over == SEEDS else statistics.over_images(ours[0], theirs[0], n)
    return None if test is None else (test.p, over)
