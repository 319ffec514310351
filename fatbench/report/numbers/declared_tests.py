"""The comparisons that a suite declares in its section `tests`: a family, corrected as a whole.

    found = run(suite.tests[0], plan, measured(store, cells, "last").__getitem__)
    print(as_text(found, suite.tests[0], plan, "last"))

A comparison is one contrast under one metric at one combination of the other axes' labels. What cannot be tested counts
in the family with p = 1, so that leaving a cell out never makes another result significant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fatbench.report.numbers import statistics
from fatbench.report.numbers.compare import (
    FLOOR,
    LEVEL,
    Measured,
    at_floor,
    over,
    p_text,
    plain,
    points_up,
    sentence,
    signed,
    too_few,
)
from fatbench.report.numbers.provenance import attacked_in
from fatbench.report.numbers.statistics import SeedsAndImages
from fatbench.store.selection import WORDS
from fatbench.suite import confounders
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.contrasts import Contrast, Tests


@dataclass(frozen=True)
class Declared:
    """One comparison of the family."""

    name: str  # of the contrast
    contrast: Contrast
    row: str  # labels of the other axes
    metric: str
    cells: frozenset[str] = frozenset()  # ids, of every seed
    n: int = 0  # test images
    seeds: tuple[int, ...] = ()  # those that all cells have
    precisions: tuple[str, ...] = ()  # of the attacks, one a seed
    test: SeedsAndImages | None = None
    with_images: bool = False  # False: without per-image outcomes, about these images alone
    grouped: bool = False  # whether images go together in groups
    floor: bool = False  # whether no accuracy of it is above a constant classifier's
    why: str = ""  # it cannot be tested
    corrected: float = 1.0  # p after Holm's correction over the family

    @property
    def over(self) -> str:
        """What `test` takes as drawn at random."""
        return over(self.test, self.with_images, self.grouped)


Side = tuple[tuple[str, ...], str]  # labels of the other axes, label
SideMetric = tuple[Side, str]  # side, metric


def run(tests: Tests, plan: Plan, of: Callable[[str], Mapping[str, Measured]]) -> list[Declared]:
    """The whole family, in the order of the suite. of: a cell's evaluations, see `compare.measured`."""
    metrics = tests.metrics or plan.metrics()
    inside = [cell for cell in plan.cells if all(cell.key.get(axis) in labels for axis, labels in tests.where.items())]
    varying = [axis for axis in _axes(plan) if len({cell.key.get(axis) for cell in inside}) > 1]
    found: list[Declared] = []
    for name, contrast in tests.contrasts.items():
        cells: dict[Side, dict[int, Cell]] = {}  # -> seed -> cell
        rows: dict[tuple[str, ...], None] = {}  # labels of the other axes
        means: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}  # and without that of `mean_over` -> with it
        apart: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}  # and without that of `between` -> 1 or -1
        others = [axis for axis in varying if axis != contrast.axis]
        for cell in inside:
            row = tuple(cell.key[axis] for axis in others if axis in cell.key)
            cells.setdefault((row, cell.key.get(contrast.axis, "")), {})[int(cell.spec["seed"])] = cell
            rows[row] = None
            if tests.mean_over in others:
                rest = tuple(cell.key[axis] for axis in others if axis in cell.key and axis != tests.mean_over)
                means.setdefault(rest, {})[row] = None
            for axis, (first, second) in tests.between.items():
                if (label := cell.key.get(axis)) in (first, second):
                    rest = tuple(cell.key[one] for one in others if one in cell.key and one != axis)
                    apart.setdefault(rest, {})[row] = 1.0 if label == first else -1.0
        groups = [(", ".join(row), {row: 1.0}) for row in rows]
        for rest, of_it in means.items():
            groups.append((", ".join((*rest, f"mean over {tests.mean_over}")), dict.fromkeys(of_it, 1 / len(of_it))))
        if tests.between:
            said = " - ".join(*tests.between.values())
            groups = [(", ".join((*rest, said)), of_it) for rest, of_it in apart.items() if len(of_it) == 2]
        crossed = any(metric for _, metric in contrast.weights)
        for where, group in groups:
            for metric in [""] if crossed else metrics:
                said = metric or ", ".join(dict.fromkeys(own for _, own in contrast.weights))
                weights = {
                    ((row, label), own or metric): weight * part
                    for (label, own), weight in contrast.weights.items()
                    for row, part in group.items()
                }
                ids = frozenset(cell.id for side, _ in weights for cell in cells.get(side, {}).values())
                found.append(_tested(Declared(name, contrast, where, said, ids), weights, cells, of))
    ps = statistics.holm([1.0 if one.test is None else one.test.p for one in found])
    return [replace(one, corrected=p) for one, p in zip(found, ps, strict=True)]


def _axes(plan: Plan) -> list[str]:
    return list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))


def _tested(
    one: Declared,
    weights: Mapping[SideMetric, float],
    cells: Mapping[Side, Mapping[int, Cell]],
    of: Callable[[str], Mapping[str, Measured]],
) -> Declared:
    """The comparison with its test, or with why there is none."""
    measured: dict[SideMetric, dict[int, Measured]] = {}
    for side, metric in weights:
        if side not in cells:
            return replace(one, why=f"{side[1]} is not in this preset")
        names = {each.id for cell in cells[side].values() for each in cell.evaluations if each.label == metric}
        if len(names) != 1:
            return replace(one, why=f"{metric} is {'not one attack' if names else 'not evaluated in this preset'}")
        (name,) = names
        measured[side, metric] = {seed: known for seed, cell in cells[side].items() if (known := of(cell.id).get(name))}
    compared = list({side: next(iter(cells[side].values())) for side, _ in weights}.values())
    if unlike := confounders.sentences(confounders.confounders(compared[::-1])):
        return replace(one, why=f"not compared: {'; '.join(unlike)}")
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in measured.values()))))
    if len(seeds) < 2:
        return replace(one, seeds=seeds, why="fewer than two seeds are measured of every cell")
    used = {side_metric: [by_seed[seed] for seed in seeds] for side_metric, by_seed in measured.items()}
    sizes = {each.n for every in used.values() for each in every}
    attacks = {each.id for (side, metric) in weights for cell in cells[side].values() for each in cell.evaluations
               if each.label == metric}  # fmt: skip
    if len(sizes) > 1 or len(attacks) > len({metric for _, metric in weights}):
        return replace(one, seeds=seeds, why="the cells were not evaluated by the same attack on the same images")
    if any(len({every[s].precision for every in used.values()}) > 1 for s in range(len(seeds))):
        return replace(one, seeds=seeds, why="the cells of a seed were attacked in different precisions")
    data = {json.dumps(each.inputs.get("data")) for every in used.values() for each in every if each.inputs.get("data")}
    if len(data) > 1:
        return replace(one, seeds=seeds, why="the cells were measured on other images or labels")
    (n,) = sizes
    floor = at_floor(each for every in used.values() for each in every)
    one = replace(
        one, n=n, seeds=seeds, floor=floor, precisions=tuple(each.precision for each in next(iter(used.values())))
    )
    bits = {side_metric: [each.outcomes for each in every if each.outcomes] for side_metric, every in used.items()}
    if all(len(every) == len(seeds) for every in bits.values()):
        groups = next(iter(used.values()))[0].groups
        test = statistics.contrast([(weight, bits[each]) for each, weight in weights.items()], n, groups)
        return replace(one, test=test, with_images=True, grouped=groups is not None, why="" if test else "one image")
    differences = [sum(w * used[side_metric][s].value for side_metric, w in weights.items()) for s in range(len(seeds))]
    return replace(one, test=statistics.over_seeds(differences, n, max(map(abs, weights.values()))))


def headline(
    families: Iterable[Tests], plan: Plan, of: Callable[[str], Mapping[str, Measured]]
) -> tuple[Declared, str] | None:
    """The comparison that a suite is quoted with, and what it comes to in a sentence; None: none, or not measured."""
    quoted = (_quoted(tests, run(tests, plan, of)) for tests in families if tests.headline is not None)
    return next((one for one in quoted if one is not None), None)


def _quoted(tests: Tests, found: Sequence[Declared]) -> tuple[Declared, str] | None:
    """The comparison of a family that its suite is quoted with, in a sentence."""
    name, metric, row = tests.headline or ("", "", "")
    for one in found:
        if (one.name, one.metric) == (name, metric) and row in ("", one.row) and one.test is not None:
            where, seeds = f"{one.row}: " if one.row else "", len(one.seeds)
            told = sentence(sides(one), metric, one.test.mean, seeds, one.test, one.corrected, one.floor)
            return one, where + told
    return None


def sides(one: Declared) -> tuple[str, str] | str:
    """(label, the other) of a difference of two; else the contrast's name."""
    if not one.contrast.of_two:
        return one.name
    first, second = (label for (label, _), _ in sorted(one.contrast.weights.items(), key=lambda item: -item[1]))
    return first, second


def shown(found: Sequence[Declared], only: Collection[str] | None) -> Sequence[Declared]:
    """The comparisons that one of these cells is part of; `only` None: all."""
    return found if only is None else [one for one in found if not one.cells.isdisjoint(only)]


def as_json(found: Sequence[Declared], margin: float | None, family: int) -> list[dict[str, Any]]:
    """Each comparison as plain data: fractions in [0, 1], unrounded. family: of how many they are."""
    return [
        {
            "contrast": one.name,
            "weights": [{"label": label, "metric": metric or one.metric, "weight": weight}
                        for (label, metric), weight in one.contrast.weights.items()],
            "row": one.row, "metric": one.metric, "n": one.n, "seeds": list(one.seeds),
            "precisions": list(one.precisions),
            "test": None if one.test is None else {"over": one.over, **plain(one.test, margin, family, one.floor)},
            "not_tested": one.why or None, "p_holm": one.corrected,
        }
        for one in found
    ]  # fmt: skip


def as_text(
    found: Sequence[Declared],
    tests: Tests,
    plan: Plan,
    select: str,
    only: Collection[str] | None = None,
    seeds: Collection[int] = (),
) -> str:
    """The answer, one line a comparison, and what the columns and contrasts are.

    only: ids of cells, see `shown`. seeds: those of the preset; a test at fewer is said to be one.
    """
    count = f"{len(found)} comparison{'s' * (len(found) != 1)}"
    family = f"suite {plan.suite}, preset {plan.preset}: family '{tests.family}'"
    if not found:
        return f"{family} is of points of the grid that are not in this preset\n"
    some = shown(found, only)
    if not some:
        return f"{family}: none of its {count} matches the filter\n"
    table, alike = _table(some, tests.margin, len(found))
    lines = [
        answer(found),
        f"{family}, as the suite declares it",
        *([quoted[1]] if (quoted := _quoted(tests, found)) else []),
        *([f"{len(some)} of them match the filter"] if len(some) < len(found) else []),
        *([tests.note] if tests.note else []),
        "",
        *table.splitlines(),
        "",
        *([f"of all: {'; '.join(alike)}"] if alike else []),
        f"points with the 95 % interval; checkpoint: {WORDS[select]}; what cannot be tested counts with p = 1",
        f"found: a true difference of this size, with a power of about 0.8, after Holm over {len(found)} (without)",
        *([f"--: {FLOOR}"] if any(one.floor for one in some) else []),
    ]
    formulas = {name: _formula(contrast) for name, contrast in tests.contrasts.items()}
    lines += [f"{name} = {formula}" for name, formula in formulas.items() if name != formula]
    if tested := [one.seeds for one in found if one.test is not None]:
        lines += too_few(min(map(len, tested)))
        if not all(set(seeds) <= set(each) for each in tested):
            lines.append(
                f"not all {len(seeds)} seeds of the preset are tested: testing again as more arrive rejects too often"
            )
    return "\n".join(lines) + "\n"


def answer(found: Sequence[Declared]) -> str:
    """ "2 of 9 comparisons significant after Holm's correction"."""
    significant = sum(one.test is not None and one.corrected < LEVEL for one in found)
    count = f"{significant or 'none'} of {len(found)} comparison{'s' * (len(found) != 1)}"
    return f"{count} significant after Holm's correction (p < {LEVEL:g})"


def _table(found: Sequence[Declared], margin: float | None, family: int) -> tuple[str, list[str]]:
    """(a line a comparison, what stands in no column because it is alike in all)."""
    from tabulate import tabulate

    rows = [{"comparison": one.name, "where": one.row, "evaluated": one.metric, **_told(one, margin, family)}
            for one in found]  # fmt: skip
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    alike = [name for name in ("over", "images", "seeds") if len(rows) > 1 and len({row[name] for row in rows}) == 1]
    table = tabulate(
        [[row[name] for name in columns if name not in alike] for row in rows],
        [name for name in columns if name not in alike],
        tablefmt="simple", disable_numparse=True,
    )  # fmt: skip
    return table, [f"{name} {rows[0][name]}" for name in alike if rows[0][name]]


def _told(one: Declared, margin: float | None, family: int) -> dict[str, str]:
    """What a comparison comes to, by column."""
    test = one.test
    columns = ("points", "at most", "p (Holm)", "found", "over", "images", "seeds", "not tested")
    if test is None:
        return {**dict.fromkeys(columns, ""), "p (Holm)": "1", "not tested": one.why}
    seeds = ", ".join(map(str, one.seeds)) + attacked_in(one.seeds, one.precisions)
    most = "--" if one.floor else f"{100 * test.at_most:.2f}"
    if margin is not None and not one.floor and test.at_most <= margin / 100:
        most += f", within ±{margin:g}"
    found = f"{points_up(test.detectable(LEVEL / family))} ({points_up(test.detectable())})"
    texts = (
        f"{signed(test.mean)} ({signed(test.low)} to {signed(test.high)})", most,
        p_text(one.corrected), found, one.over, f"{one.n}", seeds, "",
    )  # fmt: skip
    return dict(zip(columns, texts, strict=True))


def _formula(contrast: Contrast) -> str:
    """ "0.5 SFAT + 0.5 SFAT (released) - 0.5 FAT - 0.5 FAT shrunk"."""
    terms = []
    for (label, metric), weight in sorted(contrast.weights.items(), key=lambda item: item[1] < 0):
        size = "" if abs(weight) == 1 else f"{abs(weight):.3g} "
        terms.append(f"{'-' if weight < 0 else '+'} {size}{label}{f' under {metric}' if metric else ''}")
    return " ".join(terms).removeprefix("+ ")
