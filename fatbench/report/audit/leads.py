"""Questions to leads: are they beyond the test set's error, would seeds find them, does another attack turn them?"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from typing import Any

import numpy as np
import pandas

from fatbench.report.audit.question import (
    COLUMN,
    TABLE,
    WHITE_BOX,
    Answer,
    groups,
    head_text,
    is_robust,
    joined,
    lines_of,
    named,
    quantile,
    size,
    standard_error,
)
from fatbench.report.numbers.statistics import found_shift
from fatbench.store.rows import grouped

PAIRED_IMAGES = 6  # the least with which an exact McNemar test finds p < 0.05, all one way
MOST_SEEDS = 1000


def leads(numbers: pandas.DataFrame) -> pandas.DataFrame:
    """The best proposed method over the best other, in each column of robust accuracies; without roles, the best two.

    Columns: those of COLUMN, method, other, value, below, gain (points), n, deviation of each, runs.
    """
    robust = numbers[is_robust(numbers)]
    columns = grouped(
        ((*(getattr(one, label) for label in COLUMN[:5]), named(one), one.radius), one)
        for one in lines_of(robust if len(robust) else numbers) if one.role not in ("undefended", "ablation")
    )  # fmt: skip
    lines = []
    for rows in columns.values():
        rows.sort(key=lambda one: -one.value)
        ours = next((one for one in rows if one.role == "proposed"), rows[0])
        others = [one for one in rows if one is not ours and (one.role != "proposed" or ours.role != "proposed")]
        if others:
            a, b = ours, others[0]
            lines.append([
                *(getattr(a, label) for label in COLUMN), a.method, b.method, a.value, b.value,
                round(a.value - b.value, 6), a.n, a.deviation, b.deviation, a.runs,
            ])  # fmt: skip
    heads = [*COLUMN, "proposed", "baseline", "value", "below", "gain", "n", "deviation", "deviation ", "runs"]
    return pandas.DataFrame(lines, columns=heads)


def lead(numbers: pandas.DataFrame) -> Answer:
    """Leads that the test set alone leaves open.

    Formula: gain <= 1.96 sqrt((p (1 - p) + q (1 - q)) / n), unpaired at 95 %; paired at its most optimistic, fewer than
    6 images all one way (exact McNemar: 2 / 2^6 = 0.031). Source: McNemar 1947. Assumes: n; one number a method. A lead
    within the unpaired error may be beyond a paired one.
    """
    found = leads(numbers)
    ahead = found[found["gain"] > 0]
    sized = ahead[ahead["n"].notna()]
    errors = [1.96 * standard_error(one.value, one.below, one.n) for one in lines_of(sized)]
    images = (sized["gain"] / 100 * sized["n"]).round(3)
    open_, paired = sized[sized["gain"] <= errors], int((images < PAIRED_IMAGES).sum())
    rows = sized.assign(error=errors, images=images.round().astype(int))[sized["gain"] <= errors]
    shown = [*COLUMN[:5], "proposed", "value", "baseline", "below", "gain", "error", "images"]
    says = (
        f"{len(ahead)} of {len(found)} columns lead; {len(open_)} of {len(sized)} leads are within the test set's error"
        f" ({paired} even if all images that differ favour the method)"
    )
    return Answer(len(sized), len(open_), says, rows[shown].reset_index(drop=True))


# --- deviations and seeds -----------------------------------------------------------------------------------------


def deviations(numbers: pandas.DataFrame, spread: float | None = None) -> Answer:
    """How many numbers have a deviation, of how many runs, and how many seeds find each lead with a power of 0.8.

    Formula: paired t test, two-sided at 5 %, with the deviation of the difference sqrt(a^2 + b^2) of the printed ones,
    and with `spread` in points; |single run - mean| equals the deviation (over n) of two runs. Source: Cohen 1988.
    Assumes: the printed deviation is that of single runs; where numbers of the same paper show that it is of two runs
    over n, it is taken as sqrt(2) times itself. Needs a table with deviations.
    """
    with_deviation = numbers["deviation"].notna()
    # deviations beside the mean and a single run of the same labels in another table
    keys = ["paper", "dataset", "setting", "method", "attack", "steps"]
    both = numbers[with_deviation].merge(numbers[~with_deviation], on=keys, suffixes=("", "_single"))
    both = both[both["table"] != both["table_single"]]
    apart = (both["value_single"] - both["value"]).abs() - both["deviation"]
    of_two, compared = int((apart.abs() < 0.0101).sum()), len(both)  # all are printed to 0.01
    factor = math.sqrt(2) if compared and of_two > compared / 2 else 1.0
    found = leads(numbers).query("gain > 0").copy()
    sds = np.hypot(found["deviation"].astype(float), found["deviation "].astype(float)) * factor
    found["sd"] = sds if spread is None else spread
    found["seeds"] = [seeds_needed(gain, sd) for gain, sd in zip(found["gain"], found["sd"], strict=True)]
    rows = found[found["seeds"].notna()][[*COLUMN[:5], "proposed", "baseline", "gain", "sd", "seeds"]]
    many = int((rows["seeds"] > 5).sum())
    runs = sorted({*numbers["runs"].dropna().astype(int)})
    of_runs = ", ".join(map(str, runs)) or "not printed"
    says = f"{int(with_deviation.sum())} of {len(numbers)} numbers have a deviation; runs: {of_runs}"
    if compared:
        says += f"; {of_two} of {compared} deviations equal |single run - mean| to 0.01, as those of two runs do"
    if len(rows):
        says += f"; {many} of {len(rows)} leads need more than 5 seeds of each for a power of 0.8"
    return Answer(len(numbers), len(numbers) - int(with_deviation.sum()), says, rows.reset_index(drop=True))


def seeds_needed(gain: float, sd: float) -> int | None:
    """The least number of pairs with which a two-sided t test at 5 % finds a gain with a power of 0.8, at most 1000.

    None where there is no gain, or no known spread.
    """
    if not (gain > 0 and sd > 0):
        return None
    return 2 + bisect_left(range(2, MOST_SEEDS), True, key=lambda n: found_shift(n) <= gain / sd * math.sqrt(n))


def ranking(numbers: pandas.DataFrame) -> Answer:
    """Columns of one setting whose best methods differ, both beyond sampling.

    Formula: the best of each attack is above the best of the other by more than the error of `order`, at 0.05 over
    twice the pairs of columns. Source: as `order`. Assumes: n = 1,000 where no size is known. Undefended rows are left
    out.
    """
    lines: list[list[str]] = []
    asked = other = 0
    robust = numbers[numbers["attack"].isin(WHITE_BOX) & (numbers["role"] != "undefended")]
    for _, table in groups(robust, TABLE):
        pairs = []
        for _, group in groups(table, ["dataset", "setting"]):
            columns: dict[str, dict[str, Any]] = {}  # head -> method -> its number
            for one in lines_of(group):
                columns.setdefault(head_text(one.attack, one.steps, one.radius), {})[one.method] = one
            for (a, first), (b, second) in itertools.combinations(columns.items(), 2):
                both = [method for method in first if method in second]
                if len(both) > 1:
                    pairs.append((a, first, b, second, both))
        asked, limit = asked + len(pairs), quantile(2 * len(pairs))
        for a, first, b, second, both in pairs:
            best, other_best = (max((of[name].value, name) for name in both)[1] for of in (first, second))
            gains = [
                (of[more].value, of[less].value, size(of[more]))
                for of, more, less in ((first, best, other_best), (second, other_best, best))
            ]
            if any(more <= less for more, less, _ in gains):
                continue
            other += 1
            if all(more - less > limit * standard_error(less, more, n) for more, less, n in gains):
                one = first[best]
                lines.append([one.paper, one.table, joined((one.dataset, one.setting)), a, best, b, other_best])
    rows = pandas.DataFrame(lines, columns=["paper", "table", "setting", "attack", "best", "attack ", "best "])
    says = f"{len(lines)} of {asked} pairs of columns, beyond sampling ({other} at all)"
    return Answer(asked, len(lines), says, rows)
