"""Significance marks: decides which numbers of a table are bold and which are marked, in this one place.

Every number of a comparison group, which is a column unless the table says otherwise, is tested against the best of the
group over seeds and images (`statistics.seeds_and_images`). Holm's correction is over the K - 1 tests of the group.
What is significantly worse than the best carries MARK. The best is bold only where all others are, and the second best
has the rank "second" where it is significantly better than the rest. A number without a mark is not shown to be worse.
A number that cannot be tested beside the others stands outside: it carries UNTESTED, and the others are a group without
it. Those are the most numbers of the same seeds, images and precision. Where no two are, the best carries UNTESTED.

A truly best method is marked, and a bold is wrong, in at most 5 % of columns each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fatbench.report.numbers import statistics
from fatbench.report.numbers.doubts import Outcomes
from fatbench.report.tables.grid import Grid, Value
from fatbench.store.stage_names import parsed

MARK, UNTESTED = "↓", "°"
TITLES = {MARK: "significantly worse than the best", UNTESTED: "not tested"}  # of the marks
LEVEL = 0.05


class _Kind(NamedTuple):
    """What numbers must have in common to be tested against each other."""

    seeds: tuple[int, ...]
    n: tuple[int, ...]
    precisions: tuple[str, ...]  # of the attacks, one a seed
    images: frozenset[str]  # fingerprints of their data; empty: not known


WHY = {"seeds": "other seeds", "n": "other test images", "precisions": "attacked in another precision",
       "images": "other images or labels"}  # fmt: skip


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
    alone: dict[str, None] = {}  # why nothing is tested in a group, in the order they are met
    outside: dict[str, int] = {}  # why a number is no part of its group -> how many are not
    beside = 0  # numbers of the groups that have such
    for group, best in groups:
        values = [value for value in group if value.mean is not None]
        if best == "none" or len({value.mean for value in values}) < 2:
            continue
        tested, reasons = _testable(values, outcomes, images)
        if not tested:
            top, _ = _best_of(values, best)
            for value in values:
                if value.mean == top.mean:
                    value.marks = (*value.marks, UNTESTED)
            alone |= dict.fromkeys(why for value, why in reasons if value is not top)
            continue
        for value, why in reasons:
            value.marks = (*value.marks, UNTESTED)
            outside[why] = outside.get(why, 0) + 1
        beside += len(values) * bool(reasons)
        if len({value.mean for value in tested}) < 2:
            continue
        top, others = _best_of(tested, best)
        worse = _worse(top, others, outcomes)
        for value in worse:
            value.rank, value.marks = "worse", (*value.marks, MARK)
        any_marked |= bool(worse)
        if len(worse) < len(others):  # some number is not worse, so the best is not alone
            for value in tested:
                value.rank = value.rank or "shared"
            continue
        top.rank = "best"
        if len(others) > 1:
            second, beaten = _best_of(others, best)
            if len(_worse(second, beaten, outcomes)) == len(beaten):
                second.rank = "second"
    if any_marked:
        meaning = f"{TITLES[MARK]} of the {group_name} (p < {LEVEL:g}, Holm over its K - 1 comparisons)"
        grid.footnotes.append((MARK, f"{meaning}; a number without it is not shown to be worse"))
    texts = [f"the best of its {group_name}, {TITLES[UNTESTED]}: {', '.join(alone)}"] if alone else []
    if outside:
        count = f"{sum(outside.values())} of {beside} numbers"
        texts.append(f"{TITLES[UNTESTED]} and compared with none ({count}): {', '.join(outside)}")
    if texts:
        grid.footnotes.append((UNTESTED, "; ".join(texts)))


def _testable(
    values: Sequence[Value], outcomes: Outcomes | None, images: Callable[[str, str], set[str]]
) -> tuple[list[Value], list[tuple[Value, str]]]:
    """(the most values that can be tested against each other, of equally many those with most seeds; the others, each
    with why it is none of them); no values where no two can be.
    """
    kinds: list[_Kind | str] = [_kind(value, outcomes, images) for value in values]
    known = Counter(kind.images for kind in kinds if isinstance(kind, _Kind) and kind.images)
    if known:  # what is not known is taken for what most are
        kinds = [
            kind if isinstance(kind, str) or kind.images else kind._replace(images=known.most_common(1)[0][0])
            for kind in kinds
        ]
    counts = Counter(kind for kind in kinds if isinstance(kind, _Kind))
    chosen = max(counts, key=lambda kind: (counts[kind], len(kind.seeds)), default=None)
    reasons = [
        (value, kind if isinstance(kind, str) else _difference(kind, chosen))
        for value, kind in zip(values, kinds, strict=True)
        if kind != chosen
    ]
    if chosen is None or counts[chosen] < 2:
        others = [kind for kind in kinds if kind != chosen and isinstance(kind, _Kind)]
        own = _difference(chosen, others[0]) if chosen is not None and others else ""
        return [], [
            *reasons,
            *((value, own) for value, kind in zip(values, kinds, strict=True) if own and kind == chosen),
        ]
    return [value for value, kind in zip(values, kinds, strict=True) if kind == chosen], reasons


def _difference(kind: _Kind, chosen: _Kind | None) -> str:
    return next((why for name, why in WHY.items() if getattr(kind, name) != getattr(chosen, name, None)), "")


def _kind(value: Value, outcomes: Outcomes | None, images: Callable[[str, str], set[str]]) -> _Kind | str:
    """What a value must share with others to be tested, or the reason why it can be tested with none."""
    if len(value.seeds) < 2:
        return "one seed"
    if outcomes is None or len(value.behind) != len(value.seeds):
        return "no per-image outcomes"
    fingerprints = frozenset().union(*(images(*stored) for stored in value.behind))
    if len(fingerprints) > 1:
        return "other images or labels"
    if len(value.n) > 1:
        return "other test images"
    n = max(value.n, default=0)
    counts = [outcomes(*stored)[1] for stored in value.behind]
    if n == 0 or any(count < n or count % n for count in counts):  # several deployed models answer each image
        return "no per-image outcomes"
    precisions = tuple(parsed(stage).precision for _, stage in value.behind)
    return "one image" if n == 1 else _Kind(value.seeds, value.n, precisions, fingerprints)


def _best_of(values: Sequence[Value], best: str) -> tuple[Value, list[Value]]:
    """(the best of those with the most seeds, the others)."""
    most_seeds = max(len(value.seeds) for value in values)
    candidates = [value for value in values if len(value.seeds) == most_seeds]  # one seed may be the luckiest
    top = (min if best == "min" else max)(candidates, key=lambda value: value.mean or 0.0)
    return top, [value for value in values if value is not top]


def _worse(top: Value, others: Sequence[Value], outcomes: Outcomes | None) -> list[Value]:
    """Those that are significantly worse than the best, after Holm's correction."""
    assert outcomes is not None  # or nothing could be tested
    bits = [[outcomes(*stored) for stored in value.behind] for value in (top, *others)]
    tests = [statistics.seeds_and_images(bits[0], of_other, top.n[0]) for of_other in bits[1:]]
    p_values = statistics.holm([1.0 if test is None else test.p for test in tests])
    return [other for other, p in zip(others, p_values, strict=True) if p < LEVEL]


def marks(value: Value) -> list[tuple[str, str]]:
    """(mark, meaning) for each mark beside a number: those of its doubts, then that of its test."""
    meanings = [*value.marked, *(TITLES[symbol] for symbol in value.marks[len(value.marked) :])]
    return list(zip(value.marks, meanings, strict=True))
