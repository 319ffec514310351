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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pandas import DataFrame

from fatbench.report.contrasts import Difference, of_values
from fatbench.report.numbers import statistics
from fatbench.report.numbers.long import columns
from fatbench.report.numbers.points import Names, Points, comparison_key
from fatbench.report.tables.sheet import Column, Entry, Sheet, as_tuples
from fatbench.store import inputs
from fatbench.store.inputs import Inputs
from fatbench.store.stage_names import parsed

MARK, UNTESTED = "↓", "°"
TITLES = {MARK: "significantly worse than the best", UNTESTED: "not tested"}  # of the marks
LEVEL = 0.05
Images = Callable[[str, str], set[str]]  # (cell, stage) -> the fingerprints of the data that it was measured on
Answered = Mapping[tuple[str, str], Inputs]  # (cell, stage) -> what answered it


class _Kind(NamedTuple):
    """What numbers must have in common to be tested against each other."""

    seeds: tuple[int, ...]
    n: tuple[int, ...]
    precisions: tuple[str, ...]  # of the attacks, one a seed
    images: frozenset[str]  # fingerprints of their data; empty: not known
    versions: tuple[Collection[str], ...] = ()  # of what plug-ins bring and read, where the group has several


WHY = {"seeds": "other seeds", "n": "other test images", "precisions": "attacked in another precision",
       "images": "other images or labels", "versions": "another version of a function or of what it reads"}  # fmt: skip


def mark(
    entries: DataFrame,
    groups: Iterable[tuple[Sequence[int], str]],
    group_name: str,
    images: Images = lambda cell, stage: set(),
    answered: Answered = MappingProxyType({}),
) -> tuple[DataFrame, list[tuple[str, str]]]:
    """(the entries with rank and marks of each comparison group, the footnotes that explain the marks).

    groups: positions among the entries with what is best of them, "max", "min" or "none". group_name: "column", say.
    Numbers of other data, or of other versions of what a plug-in brings or reads, are not tested. Nothing is marked in
    a group of which fewer than two values are measured, or all are the same.
    """
    rows = as_tuples(entries)
    ranks, marks = [*entries["rank"]], [*entries["marks"]]
    any_marked = False
    alone: dict[str, None] = {}  # why nothing is tested in a group, in the order they are met
    outside: dict[str, int] = {}  # why a number is no part of its group -> how many are not
    beside = 0  # numbers of the groups that have such
    for group, best in groups:
        members = [i for i in group if rows[i].mean is not None]
        if best == "none" or len({rows[i].mean for i in members}) < 2:
            continue
        tested, reasons = _testable(rows, members, images, answered)
        if not tested:
            top, _ = _best_of(rows, members, best)
            for i in members:
                if rows[i].mean == rows[top].mean:
                    marks[i] = (*marks[i], UNTESTED)
            alone |= dict.fromkeys(why for i, why in reasons if i != top)
            continue
        for i, why in reasons:
            marks[i] = (*marks[i], UNTESTED)
            outside[why] = outside.get(why, 0) + 1
        beside += len(members) * bool(reasons)
        if len({rows[i].mean for i in tested}) < 2:
            continue
        top, others = _best_of(rows, tested, best)
        worse = _worse(rows, top, others)
        for i in worse:
            ranks[i], marks[i] = "worse", (*marks[i], MARK)
        any_marked |= bool(worse)
        if len(worse) < len(others):  # some number is not worse, so the best is not alone
            for i in tested:
                ranks[i] = ranks[i] or "shared"
            continue
        ranks[top] = "best"
        if len(others) > 1:
            second, beaten = _best_of(rows, others, best)
            if len(_worse(rows, second, beaten)) == len(beaten):
                ranks[second] = "second"
    footnotes = []
    if any_marked:
        meaning = f"{TITLES[MARK]} of the {group_name} (p < {LEVEL:g}, Holm over its K - 1 comparisons)"
        footnotes.append((MARK, f"{meaning}; a number without it is not shown to be worse"))
    texts = [f"the best of its {group_name}, {TITLES[UNTESTED]}: {', '.join(alone)}"] if alone else []
    if outside:
        count = f"{sum(outside.values())} of {beside} numbers"
        texts.append(f"{TITLES[UNTESTED]} and compared with none ({count}): {', '.join(outside)}")
    if texts:
        footnotes.append((UNTESTED, "; ".join(texts)))
    return entries.assign(**columns(("rank", "marks"), [*zip(ranks, marks, strict=True)])), footnotes


def _testable(
    rows: Sequence[Entry], members: Sequence[int], images: Images, answered: Answered
) -> tuple[list[int], list[tuple[int, str]]]:
    """(the most entries that can be tested against each other, of equally many those with most seeds; the others, each
    with why it is none of them); no entries where no two can be.
    """
    kinds = {i: _kind(rows[i], images) for i in members}
    known = Counter(kind.images for kind in kinds.values() if isinstance(kind, _Kind) and kind.images)
    numbering = inputs.Versions()
    versions = {i: _versions(rows[i], answered, numbering) for i in members}
    digests: dict[str, Counter[frozenset[str]]] = {}  # what a plug-in brings or reads -> its digests
    for of_entry in versions.values():
        for name, found in of_entry.items():
            digests.setdefault(name, Counter())[frozenset(found)] += 1
    several = {name: found.most_common(1)[0][0] for name, found in sorted(digests.items()) if len(found) > 1}
    for i, kind in kinds.items():
        if isinstance(kind, _Kind):  # what is not known is taken for what most are
            own_images = kind.images or (known.most_common(1)[0][0] if known else kind.images)
            own = tuple(frozenset(versions[i].get(name, usual)) for name, usual in several.items())
            kinds[i] = kind._replace(images=own_images, versions=own)
    counts = Counter(kind for kind in kinds.values() if isinstance(kind, _Kind))
    chosen = max(counts, key=lambda kind: (counts[kind], len(kind.seeds)), default=None)
    reasons = [
        (i, kind if isinstance(kind, str) else _difference(kind, chosen)) for i, kind in kinds.items() if kind != chosen
    ]
    if chosen is None or counts[chosen] < 2:
        others = [kind for kind in kinds.values() if kind != chosen and isinstance(kind, _Kind)]
        own_reason = _difference(chosen, others[0]) if chosen is not None and others else ""
        return [], [*reasons, *((i, own_reason) for i, kind in kinds.items() if own_reason and kind == chosen)]
    return [i for i, kind in kinds.items() if kind == chosen], reasons


def _difference(kind: _Kind, chosen: _Kind | None) -> str:
    return next((why for name, why in WHY.items() if getattr(kind, name) != getattr(chosen, name, None)), "")


def _kind(entry: Entry, images: Images) -> _Kind | str:
    """What an entry must share with others to be tested, or the reason why it can be tested with none."""
    if len(entry.seeds) < 2:
        return "one seed"
    if len(entry.behind) != len(entry.seeds):
        return "no per-image outcomes"
    fingerprints = frozenset().union(*(images(*stored) for stored in entry.behind))
    if len(fingerprints) > 1:
        return "other images or labels"
    over_clients = bool(entry.outcomes) and all(isinstance(one, statistics.OfClients) for one in entry.outcomes)
    if len(entry.n) > 1 and not over_clients:
        return "other test images"
    n = max(entry.n, default=0)
    # several deployed models answer each image
    if n == 0 or (not over_clients and any(count < n or count % n for _, count in entry.outcomes)):
        return "no per-image outcomes"
    precisions = tuple(parsed(stage).precision for _, stage in entry.behind)
    return "one image" if n == 1 else _Kind(entry.seeds, entry.n, precisions, fingerprints)


def _versions(entry: Entry, answered: Answered, numbering: inputs.Versions) -> dict[str, set[str]]:
    """Function of a plug-in, or what it reads -> the versions behind an entry."""
    digests: dict[str, set[str]] = {}
    for stored in entry.behind:
        known = answered.get(stored, inputs.Inputs())
        for record in known.get("functions") or ():
            for name in record.get("names", ()):
                digests.setdefault(name, set()).add(str(numbering.number(name, record)))
        for name, digest in (known.get("read") or {}).items():
            digests.setdefault(name, set()).add(digest)
    return digests


def _best_of(rows: Sequence[Entry], members: Sequence[int], best: str) -> tuple[int, list[int]]:
    """(the best of those with the most seeds, the others)."""
    most_seeds = max(len(rows[i].seeds) for i in members)
    candidates = [i for i in members if len(rows[i].seeds) == most_seeds]  # one seed may be the luckiest
    top = (min if best == "min" else max)(candidates, key=lambda i: rows[i].mean)
    return top, [i for i in members if i != top]


def _worse(rows: Sequence[Entry], top: int, others: Sequence[int]) -> list[int]:
    """Those that are significantly worse than the best, after Holm's correction."""
    n = rows[top].n[0]
    tests = [statistics.seeds_and_images(rows[top].outcomes, rows[i].outcomes, n) for i in others]
    p_values = statistics.holm([1.0 if test is None else test.p for test in tests])
    return [i for i, p in zip(others, p_values, strict=True) if p < LEVEL]


def marks(entry: Entry) -> list[tuple[str, str]]:
    """(mark, meaning) for each mark beside a number: those of its doubts, then that of its test."""
    meanings = [*entry.marked, *(TITLES[symbol] for symbol in entry.marks[len(entry.marked) :])]
    return list(zip(entry.marks, meanings, strict=True))


# --- what is compared ---------------------------------------------------------------------------------------------


def comparison_groups(
    points: Points, columns: Sequence[Column], entries: DataFrame, unlike_cells: Collection[str]
) -> tuple[list[tuple[list[int], str]], bool, dict[str, None]]:
    """Split the entries of each column into groups that are ranked.

    Returns (groups of positions among the entries with "max", "min" or "none"; whether one column holds several groups;
    the rows that are compared with nothing because their training objective differs).
    """
    groups: dict[tuple[int, Names, str, str], list[int]] = {}  # column, side, data set and attack, objective
    row_names: dict[tuple[int, Names, str, str], str] = {}
    places = zip(*(entries[name] for name in ("row", "group", "column")), strict=True)
    for i, (row, group, column) in enumerate(places):
        cell = next(iter(points.cells_at(row, group, column)), None)  # seeds differ in nothing else
        if cell is None or cell.id in unlike_cells:  # it differs in more than the row's labels
            continue
        side = points.rows[row] if points.table.best_within == "row" else points.groups[group]
        group_id = (column, side, *comparison_key(cell, columns[column].source, points.table))
        groups.setdefault(group_id, []).append(i)
        row_names[group_id] = ", ".join(label for _, label in points.rows[row])
    groups = dict(sorted(groups.items(), key=lambda item: item[0][0]))
    sizes = Counter(group_id[:3] for group_id, members in groups.items() for _ in members)
    uncompared = {
        row_names[group_id]: None
        for group_id, members in groups.items()
        if columns[group_id[0]].best != "none" and len(members) == 1 < sizes[group_id[:3]]
    }
    ranked = [(members, columns[group_id[0]].best) for group_id, members in groups.items()]
    return ranked, len(groups) > len({group_id[:2] for group_id in groups}), uncompared


def paired_comparisons(
    sheet: Sheet, axis: str, against: str, unlike_cells: frozenset[str]
) -> Iterable[tuple[Column, Difference]]:
    """(column, difference) of each label of an axis from one of them, under each heading and at equal other labels.

    unlike_cells: cells that are compared with none, since they differ in more than their labels.
    """
    entries: dict[tuple[Names, int, str], Entry] = {}  # (other labels, column, label) -> entry
    for row in sheet.rows:
        for group, values in zip(sheet.groups, row.values, strict=True):
            key = {**row.key, **group.key}
            other_labels = tuple((name, label) for name, label in key.items() if name != axis)
            entries |= {(other_labels, entry.column, key[axis]): entry for entry in values}
    for (other_labels, column, label), entry in entries.items():
        baseline = entries.get((other_labels, column, against))
        if label == against or baseline is None or not unlike_cells.isdisjoint({*entry.cells, *baseline.cells}):
            continue
        sides = (dict(zip(one.seeds, one.values, strict=True)) for one in (entry, baseline))
        headed = sheet.columns[column]
        difference = of_values((label, against), headed.metric, *sides, labels=dict(other_labels))
        if difference.over_seeds is not None:
            yield headed, difference
