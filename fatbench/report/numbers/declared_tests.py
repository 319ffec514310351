"""The comparisons that a suite declares in its section `tests`: a family, corrected as a whole.

    comparisons = run(suite.tests[0], plan, measured(store, cells, "last").__getitem__)
    print(as_text(comparisons, suite.tests[0], plan, "last"))

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
    at_floor,
    drawn_at_random,
    p_text,
    points_up,
    sentence,
    signed,
    test_as_dict,
    too_few,
)
from fatbench.report.numbers.measurements import Measurement
from fatbench.report.numbers.provenance import attacked_in
from fatbench.report.numbers.statistics import SeedsAndImages
from fatbench.store.selection import WORDS
from fatbench.suite import confounders
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.contrasts import Contrast, Tests
from fatbench.suite.seeds import seeds_text


@dataclass(frozen=True)
class DeclaredComparison:
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
    why: str = ""  # the reason why it cannot be tested
    corrected: float = 1.0  # p after Holm's correction over the family

    @property
    def over(self) -> str:
        """The random effects of `test`, in words: "seeds and images"."""
        return drawn_at_random(self.test, self.with_images, self.grouped)


Side = tuple[tuple[str, ...], str]  # labels of the other axes, label
SideMetric = tuple[Side, str]  # side, metric


def run(tests: Tests, plan: Plan, numbers_of: Callable[[str], Mapping[str, Measurement]]) -> list[DeclaredComparison]:
    """Test the whole family, in the order of the suite.

    numbers_of: a cell's evaluations, see `compare.measured_numbers`.
    """
    metrics = tests.metrics or plan.metrics()
    chosen_cells = [
        cell for cell in plan.cells if all(cell.key.get(axis) in labels for axis, labels in tests.where.items())
    ]
    varying = [axis for axis in _axes(plan) if len({cell.key.get(axis) for cell in chosen_cells}) > 1]
    declared: list[DeclaredComparison] = []
    for name, contrast in tests.contrasts.items():
        cells: dict[Side, dict[int, Cell]] = {}  # -> seed -> cell
        rows: dict[tuple[str, ...], None] = {}  # labels of the other axes
        means: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}  # and without that of `mean_over` -> with it
        signs_by_row: dict[
            tuple[str, ...], dict[tuple[str, ...], float]
        ] = {}  # and without that of `between` -> 1 or -1
        other_axes = [axis for axis in varying if axis != contrast.axis]
        for cell in chosen_cells:
            row = tuple(cell.key[axis] for axis in other_axes if axis in cell.key)
            cells.setdefault((row, cell.key.get(contrast.axis, "")), {})[int(cell.spec["seed"])] = cell
            rows[row] = None
            if tests.mean_over in other_axes:
                rest_of_row = tuple(
                    cell.key[axis] for axis in other_axes if axis in cell.key and axis != tests.mean_over
                )
                means.setdefault(rest_of_row, {})[row] = None
            for axis, (first_label, second_label) in tests.between.items():
                if (label := cell.key.get(axis)) in (first_label, second_label):
                    rest_of_row = tuple(cell.key[entry] for entry in other_axes if entry in cell.key and entry != axis)
                    signs_by_row.setdefault(rest_of_row, {})[row] = 1.0 if label == first_label else -1.0
        groups = [(", ".join(row), {row: 1.0}) for row in rows]
        for rest_of_row, members in means.items():
            groups.append(
                (", ".join((*rest_of_row, f"mean over {tests.mean_over}")), dict.fromkeys(members, 1 / len(members)))
            )
        if tests.between:
            metric_text = " - ".join(*tests.between.values())
            groups = [
                (", ".join((*rest_of_row, metric_text)), members)
                for rest_of_row, members in signs_by_row.items()
                if len(members) == 2
            ]
        names_metrics = any(metric for _, metric in contrast.weights)
        for row_text, group in groups:
            for metric in [""] if names_metrics else metrics:
                metric_text = metric or ", ".join(dict.fromkeys(own_metric for _, own_metric in contrast.weights))
                weights = {
                    ((row, label), own_metric or metric): weight * row_weight
                    for (label, own_metric), weight in contrast.weights.items()
                    for row, row_weight in group.items()
                }
                ids = frozenset(cell.id for side, _ in weights for cell in cells.get(side, {}).values())
                declared.append(
                    _test_declared(
                        DeclaredComparison(name, contrast, row_text, metric_text, ids), weights, cells, numbers_of
                    )
                )
    p_values = statistics.holm([1.0 if entry.test is None else entry.test.p for entry in declared])
    return [replace(entry, corrected=p) for entry, p in zip(declared, p_values, strict=True)]


def _axes(plan: Plan) -> list[str]:
    return list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))


def _test_declared(
    declared: DeclaredComparison,
    weights: Mapping[SideMetric, float],
    cells: Mapping[Side, Mapping[int, Cell]],
    numbers_of: Callable[[str], Mapping[str, Measurement]],
) -> DeclaredComparison:
    """The comparison with its test, or with the reason why it cannot be tested."""
    numbers_by_side: dict[SideMetric, dict[int, Measurement]] = {}
    for side, metric in weights:
        if side not in cells:
            return replace(declared, why=f"{side[1]} is not in this preset")
        names = {entry.id for cell in cells[side].values() for entry in cell.evaluations if entry.label == metric}
        if len(names) != 1:
            return replace(declared, why=f"{metric} is {'not one attack' if names else 'not evaluated in this preset'}")
        (name,) = names
        numbers_by_side[side, metric] = {
            seed: number for seed, cell in cells[side].items() if (number := numbers_of(cell.id).get(name))
        }
    compared = list({side: next(iter(cells[side].values())) for side, _ in weights}.values())
    if confounder_sentences := confounders.sentences(confounders.confounders(compared[::-1])):
        return replace(declared, why=f"not compared: {'; '.join(confounder_sentences)}")
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in numbers_by_side.values()))))
    if len(seeds) < 2:
        return replace(declared, seeds=seeds, why="fewer than two seeds are measured of every cell")
    used_numbers = {side_metric: [by_seed[seed] for seed in seeds] for side_metric, by_seed in numbers_by_side.items()}
    sizes = {entry.n for side_numbers in used_numbers.values() for entry in side_numbers}
    attacks = {entry.id for (side, metric) in weights for cell in cells[side].values() for entry in cell.evaluations
               if entry.label == metric}  # fmt: skip
    if len(sizes) > 1 or len(attacks) > len({metric for _, metric in weights}):
        return replace(declared, seeds=seeds, why="the cells were not evaluated by the same attack on the same images")
    if any(len({side_numbers[s].precision for side_numbers in used_numbers.values()}) > 1 for s in range(len(seeds))):
        return replace(declared, seeds=seeds, why="the cells of a seed were attacked in different precisions")
    data = {
        json.dumps(entry.inputs.get("data"))
        for side_numbers in used_numbers.values()
        for entry in side_numbers
        if entry.inputs.get("data")
    }
    if len(data) > 1:
        return replace(declared, seeds=seeds, why="the cells were measured on other images or labels")
    (n,) = sizes
    floor = at_floor(entry for side_numbers in used_numbers.values() for entry in side_numbers)
    declared = replace(
        declared,
        n=n,
        seeds=seeds,
        floor=floor,
        precisions=tuple(entry.precision for entry in next(iter(used_numbers.values()))),
    )
    bits = {
        side_metric: [entry.outcomes for entry in side_numbers if entry.outcomes]
        for side_metric, side_numbers in used_numbers.items()
    }
    if all(len(side_numbers) == len(seeds) for side_numbers in bits.values()):
        groups = next(iter(used_numbers.values()))[0].groups
        test = statistics.contrast([(weight, bits[entry]) for entry, weight in weights.items()], n, groups)
        return replace(
            declared, test=test, with_images=True, grouped=groups is not None, why="" if test else "one image"
        )
    differences = [
        sum(w * used_numbers[side_metric][s].value for side_metric, w in weights.items()) for s in range(len(seeds))
    ]
    return replace(declared, test=statistics.over_seeds(differences, n, max(map(abs, weights.values()))))


def headline(
    families: Iterable[Tests], plan: Plan, numbers_of: Callable[[str], Mapping[str, Measurement]]
) -> tuple[DeclaredComparison, str] | None:
    """(the comparison that a suite is quoted with, its conclusion); None without one, or before it is measured."""
    quoted = (_quoted(tests, run(tests, plan, numbers_of)) for tests in families if tests.headline is not None)
    return next((candidate for candidate in quoted if candidate is not None), None)


def _quoted(tests: Tests, declared_tests: Sequence[DeclaredComparison]) -> tuple[DeclaredComparison, str] | None:
    """The comparison of a family that its suite is quoted with, in a sentence."""
    name, metric, row = tests.headline or ("", "", "")
    for declared in declared_tests:
        if (
            (declared.name, declared.metric) == (name, metric)
            and row in ("", declared.row)
            and declared.test is not None
        ):
            row_text, seeds = f"{declared.row}: " if declared.row else "", len(declared.seeds)
            statement = sentence(
                sides(declared), metric, declared.test.mean, seeds, declared.test, declared.corrected, declared.floor
            )
            return declared, row_text + statement
    return None


def sides(declared: DeclaredComparison) -> tuple[str, str] | str:
    """(larger label, smaller label) of a difference between two labels; else the contrast's name."""
    if not declared.contrast.of_two:
        return declared.name
    larger, smaller = (label for (label, _), _ in sorted(declared.contrast.weights.items(), key=lambda item: -item[1]))
    return larger, smaller


def comparisons_of(
    declared_tests: Sequence[DeclaredComparison], cell_ids: Collection[str] | None
) -> Sequence[DeclaredComparison]:
    """The comparisons that use one of these cells; `cell_ids` None: all comparisons."""
    return (
        declared_tests
        if cell_ids is None
        else [declared for declared in declared_tests if not declared.cells.isdisjoint(cell_ids)]
    )


def as_json(declared_tests: Sequence[DeclaredComparison], margin: float | None, family: int) -> list[dict[str, Any]]:
    """Each comparison as plain data: fractions in [0, 1], unrounded. family: of how many they are."""
    return [
        {
            "contrast": declared.name,
            "weights": [
                {"label": label, "metric": metric or declared.metric, "weight": weight}
                for (label, metric), weight in declared.contrast.weights.items()
            ],
            "row": declared.row,
            "metric": declared.metric,
            "n": declared.n,
            "seeds": list(declared.seeds),
            "precisions": list(declared.precisions),
            "test": None
            if declared.test is None
            else {"over": declared.over, **test_as_dict(declared.test, margin, family, declared.floor)},
            "not_tested": declared.why or None,
            "p_holm": declared.corrected,
        }
        for declared in declared_tests
    ]


def as_text(
    declared_tests: Sequence[DeclaredComparison],
    tests: Tests,
    plan: Plan,
    select: str,
    cell_ids: Collection[str] | None = None,
    seeds: Collection[int] = (),
) -> str:
    """The family as text: the answer, a line for each comparison, then the columns and contrasts explained.

    cell_ids: ids of cells, see `comparisons_of`. seeds: those of the preset; a test at fewer is said to be one.
    """
    count = f"{len(declared_tests)} comparison{'s' * (len(declared_tests) != 1)}"
    family = f"suite {plan.suite}, preset {plan.preset}: family '{tests.family}'"
    if not declared_tests:
        return f"{family} is of points of the grid that are not in this preset\n"
    shown_tests = comparisons_of(declared_tests, cell_ids)
    if not shown_tests:
        return f"{family}: none of its {count} matches the filter\n"
    table, common_facts = _table(shown_tests, tests.margin, len(declared_tests))
    lines = [
        answer(declared_tests),
        f"{family}, as the suite declares it",
        *([quoted[1]] if (quoted := _quoted(tests, declared_tests)) else []),
        *([f"{len(shown_tests)} of them match the filter"] if len(shown_tests) < len(declared_tests) else []),
        *([tests.note] if tests.note else []),
        "",
        *table.splitlines(),
        "",
        *([f"of all: {'; '.join(common_facts)}"] if common_facts else []),
        f"points with the 95 % interval; checkpoint: {WORDS[select]}; what cannot be tested counts with p = 1",
        "found: a true difference of this size, with a power of about 0.8, after Holm over "
        f"{len(declared_tests)} (without)",
        *([f"--: {FLOOR}"] if any(declared.floor for declared in shown_tests) else []),
    ]
    formulas = {name: _formula(contrast) for name, contrast in tests.contrasts.items()}
    lines += [f"{name} = {formula}" for name, formula in formulas.items() if name != formula]
    if tested := [declared.seeds for declared in declared_tests if declared.test is not None]:
        lines += too_few(min(map(len, tested)))
        if not all(set(seeds) <= set(tested_seeds) for tested_seeds in tested):
            lines.append(
                f"not all {len(seeds)} seeds of the preset are tested: testing again as more arrive rejects too often"
            )
    return "\n".join(lines) + "\n"


def answer(declared_tests: Sequence[DeclaredComparison]) -> str:
    """The answer in a phrase: "2 of 9 comparisons significant after Holm's correction"."""
    significant = sum(declared.test is not None and declared.corrected < LEVEL for declared in declared_tests)
    count = f"{significant or 'none'} of {len(declared_tests)} comparison{'s' * (len(declared_tests) != 1)}"
    return f"{count} significant after Holm's correction (p < {LEVEL:g})"


def _table(declared_tests: Sequence[DeclaredComparison], margin: float | None, family: int) -> tuple[str, list[str]]:
    """(a table with a line for each comparison, the facts that are equal in all and have no column)."""
    from tabulate import tabulate

    rows = [
        {
            "comparison": declared.name,
            "where": declared.row,
            "evaluated": declared.metric,
            **_columns_of(declared, margin, family),
        }
        for declared in declared_tests
    ]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    common_columns = [
        name for name in ("over", "images", "seeds") if len(rows) > 1 and len({row[name] for row in rows}) == 1
    ]
    table = tabulate(
        [[row[name] for name in columns if name not in common_columns] for row in rows],
        [name for name in columns if name not in common_columns],
        tablefmt="simple", disable_numparse=True,
    )  # fmt: skip
    return table, [f"{name} {rows[0][name]}" for name in common_columns if rows[0][name]]


def _columns_of(declared: DeclaredComparison, margin: float | None, family: int) -> dict[str, str]:
    """The texts of a comparison, by column."""
    test = declared.test
    columns = ("points", "at most", "p (Holm)", "found", "over", "images", "seeds", "not tested")
    if test is None:
        return {**dict.fromkeys(columns, ""), "p (Holm)": "1", "not tested": declared.why}
    seeds = seeds_text(declared.seeds) + attacked_in(declared.seeds, declared.precisions)
    at_most = "--" if declared.floor else f"{100 * test.at_most:.2f}"
    if margin is not None and not declared.floor and test.at_most <= margin / 100:
        at_most += f", within ±{margin:g}"
    detectable = f"{points_up(test.detectable(LEVEL / family))} ({points_up(test.detectable())})"
    texts = (
        f"{signed(test.mean)} ({signed(test.low)} to {signed(test.high)})", at_most,
        p_text(declared.corrected), detectable, declared.over, f"{declared.n}", seeds, "",
    )  # fmt: skip
    return dict(zip(columns, texts, strict=True))


def _formula(contrast: Contrast) -> str:
    """A contrast as a formula: "0.5 SFAT + 0.5 SFAT (released) - 0.5 FAT - 0.5 FAT shrunk"."""
    terms = []
    for (label, metric), weight in sorted(contrast.weights.items(), key=lambda item: item[1] < 0):
        size = "" if abs(weight) == 1 else f"{abs(weight):.3g} "
        terms.append(f"{'-' if weight < 0 else '+'} {size}{label}{f' under {metric}' if metric else ''}")
    return " ".join(terms).removeprefix("+ ")
