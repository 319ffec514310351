"""Questions to printed accuracies, each a function of the long table of `reading`, with formula, source and assumption.

    for question in QUESTIONS:
        answer = question.ask(numbers)
        print(question.title, answer.says, answer.rows)

A question says nothing of how a number came about: `Question.explained` names what could, `Question.settled` what
would tell. p and q are fractions, n test images. A table is one value of (paper, table). Where sampling decides, at
most 5 % of honest tables are asked about (Bonferroni over all that is compared in a table).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
from scipy.special import bdtrc

from fatbench.report.audit.leads import deviations, lead, ranking
from fatbench.report.audit.question import (
    COLUMN,
    LEVEL,
    ROW,
    TABLE,
    WHITE_BOX,
    Answer,
    Question,
    groups,
    head_text,
    is_robust,
    joined,
    lines_of,
    named,
    quantile,
    row_labels,
    size,
    standard_error,
)
from fatbench.report.audit.read_tables import UNPRINTED, radius_value
from fatbench.store.rows import grouped

EXACT = 6  # digits of a number that is stored and not printed
ITERATED = ("pgd", "bim", "mim", "apgd", "cw", "autoattack")
STRONGER = {"fgsm": ("pgd", "bim", "mim", "apgd", "autoattack"), "natural": WHITE_BOX} | dict.fromkeys(
    ("pgd", "bim", "mim", "apgd", "cw", "square", "fab", "deepfool"), ("autoattack",)
)

# --- floor --------------------------------------------------------------------------------------------------------


def floor(numbers: pandas.DataFrame) -> Answer:
    """Robust accuracies of trained networks below those of a network that always says the same class.

    Formula: value < 100 / classes. Source: the most frequent of k classes has at least 1/k of the images, and no attack
    changes a constant answer. Assumes: the number of classes; no sampling, for the bound holds on any test set.
    """
    asked = numbers[is_robust(numbers) & (numbers["role"] != "undefended") & numbers["classes"].gt(1)]
    bound = 100 / asked["classes"]
    below = asked[asked["value"] < bound]
    rows = []
    keys = [*TABLE, "dataset", "method"]
    for key, group in groups(asked.merge(below[keys].drop_duplicates(), on=keys), keys):
        constant = 100 / group["classes"]
        rows.append([*key, len(group), int((group["value"] < constant).sum()), group["value"].max(), constant.iloc[0]])
    heads = ["paper", "table", "data", "method", "numbers", "below", "largest", "constant"]
    return Answer(
        len(asked), len(below), f"{len(below)} of {len(asked)} robust accuracies are below it",
        pandas.DataFrame(rows, columns=heads),
        {at: f"below the {bound[at]:g} % of a constant classifier" for at in below.index},
    )  # fmt: skip


# --- order --------------------------------------------------------------------------------------------------------


def order(numbers: pandas.DataFrame) -> Answer:
    """Rows in which a stronger attack within the same radius leaves more than a weaker one, and the bound that follows.

    Formula: z = (q - p) / sqrt((p (1 - p) + q (1 - q)) / n) of the weaker attack's p and the stronger's q, above the
    quantile of 1 - 0.05 / pairs of the table. Then no robust accuracy of the row is above the least of its attacks.
    Source: an image that a weaker attack breaks is broken within the same radius; doubts.py asks measured numbers the
    same. Assumes: the same network and images; outcomes taken as independent, which widens the error; n = 1,000 where
    no size is known; one radius where none is printed, counted apart.
    """
    lines: list[list[Any]] = []
    marks: dict[Any, str] = {}
    asked = apart = more_count = 0
    for _, table in groups(numbers, TABLE):
        pairs = list(_pairs(table))
        asked, apart = asked + len(pairs), apart + sum(not known for *_, known in pairs)
        limit = quantile(len(pairs))
        for row, weak, strong, _ in pairs:
            more = strong.value - weak.value
            more_count += more > 0
            if more > 0 and more > limit * standard_error(weak.value, strong.value, min(size(weak), size(strong))):
                bound = min(one.value for one in row if one.attack != "natural" and _within(one.radius, strong.radius))
                lines.append([
                    *row_labels(weak), strong.radius, named(weak), weak.value, named(strong), strong.value, bound
                ])  # fmt: skip
                marks[strong.Index] = f"at most {bound:g} %, by the weaker attack of its row"
    heads = ["paper", "table", "row", "radius", "weaker", "leaves", "stronger", "leaves ", "at most"]
    rows = pandas.DataFrame(lines, columns=heads)
    says = f"{len(lines)} of {asked} pairs, beyond sampling ({more_count} at all; {apart} pairs without printed radii)"
    return Answer(asked, len(lines), says, rows, marks)


def _pairs(table: pandas.DataFrame) -> Iterator[tuple[list[Any], Any, Any, bool]]:
    """(row, weaker number, stronger number, whether radii are printed) of every row of a table."""
    lines = zip(lines_of(table), _number_of(table), strict=True)
    rows = grouped(((*(getattr(one, label) for label in ROW), count), one) for one, count in lines)
    for row in rows.values():
        for weak, strong in itertools.permutations(row, 2):
            steps = weak.attack == strong.attack and weak.attack in ITERATED and weak.steps < strong.steps
            if strong.attack not in STRONGER.get(weak.attack, ()) and not steps:
                continue
            if weak.attack == "natural":
                yield row, weak, strong, True
            elif weak.radius == strong.radius == UNPRINTED:
                yield row, weak, strong, False
            elif weak.radius != UNPRINTED and _within(weak.radius, strong.radius):
                nearer = [
                    one for one in row if named(one) == named(strong) and one is not strong
                    and _within(weak.radius, one.radius) and _within(one.radius, strong.radius)
                ]  # fmt: skip
                if not nearer:
                    yield row, weak, strong, True


def _number_of(table: pandas.DataFrame) -> pandas.Series:
    """Tells rows of the same labels apart, such as those of several seeds."""
    return table.groupby([*ROW, "attack", "steps", "radius"], dropna=False).cumcount()


def _within(radius: str, other: str) -> bool:
    """Whether every image within a radius is within the other."""
    return radius == other or radius_value(radius) <= radius_value(other)


# --- grain --------------------------------------------------------------------------------------------------------


def grain(numbers: pandas.DataFrame) -> Answer:
    """Test sizes that all decimals allow, against the one stated (or that of the public test set).

    Formula: 100 k / n rounded, or cut, to the printed digits is the value, for a whole k. Source: GRIM (Brown and
    Heathers 2017). Assumes: one training, or n runs' images where runs are printed; every image counts once.
    """
    lines: list[list[Any]] = []
    marks: dict[Any, str] = {}
    asked = 0
    for key, group in groups(numbers, [*TABLE, "dataset"]):
        printed = group["deviation"].isna() & (group["decimals"] < EXACT)
        values = group[printed & (group["value"] > 0) & (group["value"] < 100)]
        if len(values) < 3:
            continue
        asked += 1
        stated = values["n"].iloc[0] * (values["runs"].fillna(1).iloc[0])
        pairs = values[["value", "decimals"]].drop_duplicates().to_numpy()
        fits = 0 if math.isnan(stated) else int(_fits(pairs, np.array([stated])).sum())
        if not math.isnan(stated) and fits == len(pairs):
            continue
        smallest = _smallest(pairs)
        if math.isnan(stated):
            if smallest:
                lines.append([*key, len(pairs), "not known", "-", smallest, "inferred"])
            continue
        lines.append([*key, len(pairs), f"{stated:.0f}", fits, smallest or "-", "asked"])
        good = _fits(values[["value", "decimals"]].to_numpy(), np.array([stated]))[:, 0]
        marks |= dict.fromkeys(values.index[~good], f"no fraction of {stated:.0f} test images")
    rows = pandas.DataFrame(
        lines, columns=["paper", "table", "data", "numbers", "stated n", "fit it", "smallest n of all", "result"]
    )
    raised = int((rows["result"] == "asked").sum())
    inferred = int((rows["result"] == "inferred").sum())
    says = f"{raised} of {asked} groups do not fit the size of their test set" + (
        f"; of {inferred} without a known size one is inferred" if inferred else ""
    )
    return Answer(asked, raised, says, rows, marks)


def _fits(pairs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Whether each (value, decimals) can be a fraction of each size, rounded or cut."""
    value, unit = pairs[:, :1], 10.0 ** -pairs[:, 1:]
    k = np.ceil((value - unit / 2 - 1e-9) * sizes / 100)  # the first that could be rounded to the value
    return 100 * k / sizes < value + unit - 1e-9


def _smallest(pairs: np.ndarray) -> int | None:
    """The least size that all values fit, unless that many random values would fit it as well (1 in 1,000)."""
    digits = int(pairs[:, 1].max())
    sizes = np.arange(2, 10 ** min(digits + 2, 5))
    fitting = sizes[_fits(pairs, sizes).all(axis=0)] if len(pairs) > 2 else sizes[:0]
    if not len(fitting):
        return None
    chances = np.minimum(1, 2 * fitting[0] / 10 ** (pairs[:, 1] + 2))  # two of the cuts and roundings at most
    return int(fitting[0]) if len(sizes[: fitting[0]]) * float(np.prod(chances)) < 1e-3 else None


# --- equal numbers ------------------------------------------------------------------------------------------------


def equal(numbers: pandas.DataFrame) -> Answer:
    """Three or more equal numbers, row by row or in any order, under two heads or in two papers.

    Formula: P(X >= equal) of Binomial(compared, c) below 0.05 / pairs of columns, with c the chance that two numbers
    are equal: their grain over one point, and at least 0.1 for attacks on the same network, where one may find nothing
    beyond the other. Source: the columns alone. Assumes: other networks differ by a point or more.
    """
    inside = numbers[numbers["value"].between(0, 100, inclusive="neither")]
    columns = [(key, group) for key, group in groups(inside, COLUMN) if group["value"].nunique() > 2]
    sets = [dict(zip(_rows_of(group), group["value"], strict=True)) for _, group in columns]
    values = [{*group["value"]} for _, group in columns]
    pairs = [
        (i, j) for i, j in itertools.combinations(range(len(columns)), 2)
        if _may_be_equal_by_oversight(columns[i][0], columns[j][0])
    ]  # fmt: skip
    lines: list[list[Any]] = []
    marks: dict[Any, str] = {}
    looked = len(pairs)
    for i, j in pairs:
        shared = sorted(values[i] & values[j])
        if len(shared) < 3:
            continue
        (key, first), (other_key, second) = columns[i], columns[j]
        aligned = [row for row in sets[i] if row in sets[j]]
        same = sum(sets[i][row] == sets[j][row] for row in aligned)
        unit = _unit(lines_of(first))
        one_network = key[:4] == other_key[:4]
        chance = max(0.1, 10 * unit) if one_network else min(1.0, 2 * unit)
        by_row = float(bdtrc(same - 1, len(aligned), chance)) if same >= 3 and chance < 1 else 1.0
        compared = len(first) * len(second)
        spread = max(float(np.ptp([*first["value"], *second["value"]])), 1.0)
        by_value = float(bdtrc(len(shared) - 1, compared, min(1.0, 2 * unit / spread))) if not one_network else 1.0
        if min(by_row, by_value) * 2 * looked < LEVEL:
            shown = ", ".join(f"{value:g}" for value in shared[:6])
            lines.append([_place(key), _place(other_key), len(shared), min(len(first), len(second)), shown])
            for group, where in ((first, other_key), (second, key)):
                marks |= {at: f"also in {_place(where)}" for at in group.index[group["value"].isin(shared)]}
    rows = pandas.DataFrame(lines, columns=["column", "and", "equal", "of", "numbers"])
    return Answer(looked, len(lines), f"{len(lines)} of {looked} pairs of columns", rows, marks)


def _rows_of(group: pandas.DataFrame) -> list[tuple[str, int]]:
    seen: Counter[str] = Counter()
    rows = []
    for method in group["method"]:
        rows.append((method.lower(), seen[method]))
        seen[method] += 1
    return rows


def _may_be_equal_by_oversight(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two columns are of two papers, attacks, or radii: others may show the same runs."""
    radii = key[6] != other[6] and UNPRINTED not in (key[6], other[6]) and key[2] == other[2]
    return key[0] != other[0] or str(key[4:6]) != str(other[4:6]) or radii


def _place(key: tuple[Any, ...]) -> str:
    paper, table, dataset, setting, attack, steps, radius = key
    where = f", {joined((dataset, setting))}" if dataset or setting else ""
    return f"{paper} {table}: {head_text(attack, steps, radius)}{where}"


# --- radius -------------------------------------------------------------------------------------------------------


def radius(numbers: pandas.DataFrame) -> Answer:
    """Robust accuracies that are the same at every radius, or rise with it beyond sampling.

    Formula: all equal, where the chance of that (grain over half a point, for each further radius) is below 0.025 /
    series of the table; or z of `order` between two radii, by the pooled error. Source: an image that is broken within
    a radius is broken within a larger one. Assumes: one network; numbers of 0 and 100 may stay.
    """
    lines: list[list[Any]] = []
    marks: dict[Any, str] = {}
    asked = 0
    for _, table in groups(numbers[is_robust(numbers) & (numbers["radius"] != UNPRINTED)], TABLE):
        found = grouped(((*(getattr(one, label) for label in ROW), named(one)), one) for one in lines_of(table))
        series = []
        for key, rows in found.items():
            by_radius = {radius_value(one.radius): one for one in rows if radius_value(one.radius) > 0}
            if len(by_radius) > 1:
                series.append((key, [by_radius[eps] for eps in sorted(by_radius)]))
        asked += len(series)
        limit = quantile(2 * sum(len(rows) - 1 for _, rows in series))  # half of the 5 % for each of the two
        for key, rows in series:
            values, radii = [one.value for one in rows], ", ".join(one.radius for one in rows)
            chance = min(1.0, 2 * _unit(rows)) ** (len(values) - 1)
            still = len({*values}) == 1 and 0 < values[0] < 100 and 2 * chance * len(series) < LEVEL
            rises = any(
                more.value - less.value > limit * standard_error(p := (less.value + more.value) / 2, p, size(less))
                for less, more in itertools.pairwise(rows)  # pooled: were the radius without effect, both are equal
            )
            if still or rises:
                shown = ", ".join(f"{value:g}" for value in values)
                lines.append([*key[:2], joined(key[2:5]), key[5], radii, shown])
                words = f"{'the same at' if still else 'rises over'} radii {radii}"
                marks |= dict.fromkeys((one.Index for one in rows), words)
    answered = pandas.DataFrame(lines, columns=["paper", "table", "row", "attack", "radii", "leaves"])
    return Answer(asked, len(lines), f"{len(lines)} of {asked} series over radii", answered, marks)


def _unit(rows: list[Any]) -> float:
    """The step, in points, in which some numbers can differ."""
    sizes = [one.n for one in rows if not math.isnan(one.n)]
    return max(10.0 ** -max(one.decimals for one in rows), 100 / max(sizes) if sizes else 0.0)


# --- the undefended row -------------------------------------------------------------------------------------------


def undefended(numbers: pandas.DataFrame) -> Answer:
    """Undefended networks that keep more than twice a constant's accuracy under an iterated attack.

    Formula: (p - 2 / classes) / sqrt(p (1 - p) / n) above the quantile of 1 - 0.05 / rows of the table. Source:
    iterated attacks at the usual radii leave undefended networks next to nothing (Athalye et al. 2018). Assumes:
    white-box attacks on all pixels at such a radius, and a role "undefended".
    """
    mine = numbers[(numbers["role"] == "undefended") & numbers["attack"].isin(ITERATED) & numbers["classes"].gt(2)]
    lines = []
    for _, table in groups(mine, TABLE):
        limit = quantile(len(table))
        for one in lines_of(table):
            p, twice = one.value / 100, 2 / one.classes
            if p - twice > limit * math.sqrt(p * (1 - p) / size(one)):
                lines.append([*row_labels(one), named(one), one.radius, one.value, 100 / one.classes])
    rows = pandas.DataFrame(lines, columns=["paper", "table", "row", "attack", "radius", "leaves", "constant"])
    without = sum("undefended" not in {*table["role"]} for _, table in groups(numbers[is_robust(numbers)], TABLE))
    says = f"{len(lines)} of {len(mine)} numbers are above twice a constant's; {without} tables have no undefended row"
    return Answer(len(mine), len(lines), says, rows)


# --- AutoAttack ---------------------------------------------------------------------------------------------------


def autoattack(numbers: pandas.DataFrame) -> Answer:
    """Tables of robust accuracies without AutoAttack. Source: Croce and Hein 2020. Assumes nothing."""
    has = ["autoattack" in {*table["attack"]} for _, table in groups(numbers[is_robust(numbers)], TABLE)]
    return Answer(len(has), has.count(False), f"{sum(has)} of {len(has)} tables with robust accuracies have it")


QUESTIONS = (
    Question(
        "floor", "Which robust accuracies are below a network that always says the same class?", floor,
        "a test set that is not the public one; another number of classes; a training that failed",
        "the number of images of each class, and the outcome of each image",
    ),
    Question(
        "order", "Where does a stronger attack leave more than a weaker one of the same radius?", order,
        "other radii or step sizes behind a head; gradients that are masked; an attack on one client's features only",
        "radius, step size and steps of each column. In the authors' favour: by the least of each row a lead may grow",
    ),
    Question(
        "grain", "Are the decimals fractions of the test set's size?", grain,
        "the last incomplete batch left out; a subset; means over several runs",
        "the number of test images, and of runs",
    ),
    Question(
        "equal", "Which numbers stand under two heads, or in two papers?", equal,
        "runs that both tables share; one column copied under another head",
        "which run each column is of",
    ),
    Question(
        "radius", "Which robust accuracies do not fall with the radius?", radius,
        "a step size that was not scaled with the radius; an attack that does not take the radius",
        "the settings of the attack at each radius",
    ),
    Question(
        "undefended", "What does the attack leave of an undefended network?", undefended,
        "a small radius, few steps, or a threat model in which only some features are attacked",
        "the same attack on a standard network of the literature",
    ),
    Question(
        "lead", "Which leads are within the test set's own error?", lead,
        "the number of test images alone", "the outcome of each image of both methods: a paired test is finer",
    ),
    Question(
        "deviations", "Are there deviations, of how many runs, and how many seeds would find the leads?", deviations,
        "", "the numbers of every run",
    ),
    Question(
        "autoattack", "Is there AutoAttack?", autoattack, "", "a column of AutoAttack, or the released weights",
    ),
    Question(
        "ranking", "Does the best method change with the attack?", ranking,
        "methods that mask gradients from one attack; attacks of different radii",
        "an adaptive attack on the methods that change places",
    ),
)  # fmt: skip
