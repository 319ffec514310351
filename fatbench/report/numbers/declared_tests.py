"""The comparisons that a suite declares in its section `tests`: one family, corrected as a whole.

    found = run(suite.tests, plan, functools.partial(measured, store, select="last"))
    print(as_text(found, suite.tests, plan, "last"))

A comparison is one contrast under one metric at one combination of the other axes' labels. What cannot be tested counts
in the family with p = 1, so that leaving a cell out never makes another result significant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fatbench.report.numbers import statistics
from fatbench.report.numbers.compare import Measured, conclusion, plain, signed, too_few
from fatbench.report.numbers.statistics import SeedsAndImages
from fatbench.store.selection import WORDS
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.contrasts import Contrast, Tests


@dataclass(frozen=True)
class Declared:
    """One comparison of the family."""

    name: str  # of the contrast
    contrast: Contrast
    row: str  # labels of the other axes
    metric: str
    n: int = 0  # test images
    seeds: tuple[int, ...] = ()  # those that all cells have
    test: SeedsAndImages | None = None
    with_images: bool = False  # False: without per-image outcomes, about these images alone
    why: str = ""  # it cannot be tested
    corrected: float = 1.0  # p after Holm's correction over the family

    @property
    def over(self) -> str:
        return "seeds and images" if self.with_images else "seeds, these images"


Place = tuple[str, str]  # label, metric


def run(tests: Tests, plan: Plan, of: Callable[[str], Mapping[str, Measured]]) -> list[Declared]:
    """The whole family, in the order of the suite. of: a cell's evaluations, see `compare.measured`."""
    metrics = tests.metrics or plan.metrics()
    varying = [axis for axis in _axes(plan) if len({cell.key.get(axis) for cell in plan.cells}) > 1]
    found: list[Declared] = []
    for name, contrast in tests.contrasts.items():
        rows: dict[tuple[str, ...], dict[str, dict[int, Cell]]] = {}  # labels of other axes -> label -> seed
        for cell in plan.cells:
            row = tuple(cell.key[axis] for axis in varying if axis != contrast.axis and axis in cell.key)
            label = cell.key.get(contrast.axis, "")
            rows.setdefault(row, {}).setdefault(label, {})[int(cell.spec["seed"])] = cell
        crossed = any(metric for _, metric in contrast.weights)
        for row, cells in rows.items():
            for metric in [""] if crossed else metrics:
                said = metric or ", ".join(dict.fromkeys(own for _, own in contrast.weights))
                weights = {(label, own or metric): weight for (label, own), weight in contrast.weights.items()}
                found.append(_tested(Declared(name, contrast, ", ".join(row), said), weights, cells, of))
    ps = statistics.holm([1.0 if one.test is None else one.test.p for one in found])
    return [replace(one, corrected=p) for one, p in zip(found, ps, strict=True)]


def _axes(plan: Plan) -> list[str]:
    return list(dict.fromkeys(axis for cell in plan.cells for axis in cell.key))


def _tested(
    one: Declared,
    weights: Mapping[Place, float],
    cells: Mapping[str, Mapping[int, Cell]],
    of: Callable[[str], Mapping[str, Measured]],
) -> Declared:
    """The comparison with its test, or with why there is none."""
    measured: dict[Place, dict[int, Measured]] = {}
    for label, metric in weights:
        if label not in cells:
            return replace(one, why=f"{label} is not in this preset")
        names = {each.id for cell in cells[label].values() for each in cell.evaluations if each.label == metric}
        if len(names) != 1:
            return replace(one, why=f"{metric} is {'not one attack' if names else 'not evaluated in this preset'}")
        (name,) = names
        measured[label, metric] = {
            seed: known for seed, cell in cells[label].items() if (known := of(cell.id).get(name))
        }
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in measured.values()))))
    if len(seeds) < 2:
        return replace(one, seeds=seeds, why="fewer than two seeds are measured of every cell")
    used = {place: [by_seed[seed] for seed in seeds] for place, by_seed in measured.items()}
    sizes = {each.n for every in used.values() for each in every}
    attacks = {each.id for (label, metric) in weights for cell in cells[label].values() for each in cell.evaluations
               if each.label == metric}  # fmt: skip
    if len(sizes) > 1 or len(attacks) > len({metric for _, metric in weights}):
        return replace(one, seeds=seeds, why="the cells were not evaluated by the same attack on the same images")
    (n,) = sizes
    one = replace(one, n=n, seeds=seeds)
    bits = {place: [each.outcomes for each in every if each.outcomes] for place, every in used.items()}
    if all(len(every) == len(seeds) for every in bits.values()):
        test = statistics.contrast([(weight, bits[place]) for place, weight in weights.items()], n)
        return replace(one, test=test, with_images=True, why="" if test else "one image")
    differences = [sum(w * used[place][s].value for place, w in weights.items()) for s in range(len(seeds))]
    return replace(one, test=statistics.over_seeds(differences, n, max(map(abs, weights.values()))))


def as_json(found: Sequence[Declared], margin: float | None) -> list[dict[str, Any]]:
    """Each comparison as plain data: fractions in [0, 1], unrounded."""
    return [
        {
            "contrast": one.name,
            "weights": [{"label": label, "metric": metric or one.metric, "weight": weight}
                        for (label, metric), weight in one.contrast.weights.items()],
            "row": one.row, "metric": one.metric, "n": one.n, "seeds": list(one.seeds),
            "test": None if one.test is None else {"over": one.over, **plain(one.test, margin)},
            "not_tested": one.why or None, "p_holm": one.corrected,
        }
        for one in found
    ]  # fmt: skip


def as_text(found: Sequence[Declared], tests: Tests, plan: Plan, select: str) -> str:
    """The family as a heading, what each contrast is, and a block for each comparison."""
    count = f"{len(found)} comparison{'s' * (len(found) != 1)}"
    lines = [
        f"suite {plan.suite}, preset {plan.preset}: family '{tests.family}' of {count}, as the suite declares it",
        f"Holm's correction is over all {len(found)}; what cannot be tested counts with p = 1",
        f"checkpoint: {WORDS[select]}; differences are in points",
    ]
    lines += [f"{name} = {_formula(contrast)}" for name, contrast in tests.contrasts.items()]
    if tested := [len(one.seeds) for one in found if one.test is not None]:
        lines += too_few(min(tested))
    for one in found:
        lines += ["", *_block(one, tests.margin, len(found))]
    return "\n".join(lines) + "\n"


def _formula(contrast: Contrast) -> str:
    """ "0.5 SFAT + 0.5 SFAT (released) - 0.5 FAT - 0.5 FAT shrunk"."""
    terms = []
    for (label, metric), weight in sorted(contrast.weights.items(), key=lambda item: item[1] < 0):
        size = "" if abs(weight) == 1 else f"{abs(weight):.3g} "
        terms.append(f"{'-' if weight < 0 else '+'} {size}{label}{f' under {metric}' if metric else ''}")
    return " ".join(terms).removeprefix("+ ")


def _block(one: Declared, margin: float | None, family: int) -> Iterable[str]:
    where = f"{one.name}, {one.row + ', ' if one.row else ''}{one.metric}"
    if one.test is None:
        yield f"{where}: not tested, counts with p = 1: {one.why}"
        return
    yield f"{where} ({one.n} images, seeds {', '.join(map(str, one.seeds))}): {signed(one.test.mean)}"
    yield from (
        f"  {line}"
        for line in conclusion(one.test, one.over, margin, one.corrected, family, of_two=one.contrast.of_two)
    )
