"""Check published numbers against their printed tables alone, without training or a database.

    for check in audit(tables):     # a question, its answer, and the rows of the tables behind it
        print(check.question, check.answer, check.rows)

Floor: a network that always says the most frequent class keeps its accuracy under any attack. Order: no attack
leaves more images right than a weaker one. Spread: with the mean m of two runs and one of them, x, the
deviation (over n) of both is |x - m|. Seeds: how many pairs of trainings find a gain with a power of 0.8 (paired t
test, two-sided, 5 %). An accuracy is in points of 100; "printed" is what the paper's table says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
from scipy.special import chdtri, ndtr, stdtrit

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import SpecError
from fatbench.report.numbers.doubts import chance
from fatbench.suite.folders import folders

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100"}  # as the tables write it; SVHN's classes are not equal
CIFAR_10_ONLY = ("fat-transformers-t1", "fat-transformers-t2", "fat-transformers-t3")  # no column says it, captions do
NATURAL = "natural"
ROBUST = ("fgsm", "pgd20", "cw", "aa", "at_robust_acc")
CHAINS = ((NATURAL, "fgsm"), (NATURAL, "pgd20"), (NATURAL, "cw"), ("fgsm", "pgd20"), ("pgd20", "aa"), ("cw", "aa"))
TWICE = ("sfat-t3", "sfat-t21", "niid_")  # means and deviations; single runs of the same settings; their prefix
GAINS = (  # table, column of methods, baseline, method, metrics
    ("sfat-t3", "method", "FAT", "SFAT", (NATURAL, "pgd20", "aa")),
    ("fat-transformers-t2", "aggregator", "FedAvg", "FedWAvg_q10", ("at_robust_acc",)),
    ("fat-transformers-t3", "aggregator", "FedAvg", "FedWAvg_q10", ("at_robust_acc",)),
)
POWER, ALPHA = 0.8, 0.05
MOST_SEEDS = 1000
FEW = 5  # seeds that a paper can afford


@dataclass(frozen=True)
class Check:
    """One question about printed numbers, with its answer."""

    question: str
    answer: str
    rows: pandas.DataFrame


def published() -> dict[str, pandas.DataFrame]:
    """Name -> printed table, of every CSV in `published` beside the suites."""
    files: dict[str, Path] = {}
    for folder in folders():
        for file in sorted((folder / "published").glob("*.csv")):
            files.setdefault(file.stem, file)
    return {name: pandas.read_csv(file, dtype={"method": str}) for name, file in files.items()}


def audit(tables: Mapping[str, pandas.DataFrame], spread: float | None = None) -> list[Check]:
    """Make every check that the tables allow. spread: see `seeds`. SpecError: the spread is not positive."""
    checks = [floor(tables), order(tables), runs(tables), seeds(tables, spread), garbled(tables)]
    return [check for check in checks if check.answer]


def of_results(numbers: pandas.DataFrame) -> list[Check]:
    """Check measured accuracies in the same way. numbers: as `fatbench.results` gives them."""
    accuracies = numbers[(numbers["outcomes"] > 0) & (numbers["n"] > 0) & (numbers["client"] < 0)]
    texts = accuracies["doubts"].str.split("; ").explode()
    doubts = texts[texts != ""].str.replace(r"\b\d+\.?\d*", "N", regex=True).value_counts()
    cells = accuracies.groupby("suite", sort=False).agg(
        cells=("cell", "nunique"), seeds=("seed", "nunique"), images=("n", "min"),
        autoattack=("metric", lambda metric: int((metric == "autoattack").sum())),
    )  # fmt: skip
    return [
        Check(
            "Which accuracies are doubted, and why?", f"{(accuracies['doubts'] != '').sum()} of {len(accuracies)}",
            doubts.rename_axis("doubt").reset_index(name="accuracies"),
        ),
        Check(
            "On how many seeds and images, and under AutoAttack?", f"{int(cells['cells'].sum())} cells",
            cells.reset_index(),
        ),
    ]  # fmt: skip


# --- the checks ---------------------------------------------------------------------------------------------------


def floor(tables: Mapping[str, pandas.DataFrame]) -> Check:
    """Robust accuracies that a constant classifier has, by table and method, where the classes are equal."""
    lines = []
    for name, table in tables.items():
        metrics = [metric for metric in ROBUST if metric in table]
        method = next((column for column in ("aggregator", "method") if column in table), None)
        if method is None or not metrics or ("dataset" not in table and name not in CIFAR_10_ONLY):
            continue
        data = table["dataset"].map(DATA) if "dataset" in table else pandas.Series("cifar10", table.index)
        constant = data.map(_constant)
        for (label, lowest), group in table.groupby([table[method], constant], sort=False):
            values = group[metrics].stack()
            lines.append([name, label, len(values), (values < lowest).sum(), values.mean(), values.max(), lowest])
    heads = ["table", "method", "numbers", "below", "mean", "maximum", "constant"]
    rows = pandas.DataFrame(lines, columns=heads)
    sums = rows.groupby("table", sort=False)[["below", "numbers"]].sum().query("below > 0")
    answer = "; ".join(f"{name}: {line.below} of {line.numbers}" for name, line in sums.iterrows())
    rows = rows[rows["table"].isin(sums.index)].reset_index(drop=True)
    return Check(
        "Which robust accuracies are below that of a network that always says the same class?", answer or "none", rows
    )


def order(tables: Mapping[str, pandas.DataFrame]) -> Check:
    """Rows in which an attack leaves more images right than a weaker one of CHAINS."""
    lines, looked = [], 0
    for name, table in tables.items():
        for weak, strong in CHAINS:
            if weak not in table or strong not in table:
                continue
            pairs = table[[weak, strong]].dropna()
            looked += len(pairs)
            violates = pairs[strong] > pairs[weak]
            for (_, row), (_, printed) in zip(
                pairs[violates].iterrows(), table.loc[pairs.index[violates]].iterrows(), strict=True
            ):
                lines.append([name, _labels(printed), weak, row[weak], strong, row[strong]])
    rows = pandas.DataFrame(lines, columns=["table", "row", "weaker", "its accuracy", "stronger", "its accuracy "])
    return Check("Where does a stronger attack leave more images right?", f"{len(rows)} of {looked} pairs", rows)


def runs(tables: Mapping[str, pandas.DataFrame]) -> Check:
    """Printed deviations that equal |single run - mean|, as those of two runs do, with their spread, by metric.

    spread: the standard deviation (over n - 1) of those two runs, pooled over the rows of CIFAR-10.
    """
    means_name, single_name, prefix = TWICE
    question = "How many runs is a printed deviation of?"
    if means_name not in tables or single_name not in tables:
        return Check(question, "", pandas.DataFrame())
    merged = tables[means_name].merge(
        tables[single_name], on=["dataset", "optimizer", "method"], suffixes=("", " single")
    )
    lines = []
    for metric in (NATURAL, "fgsm", "pgd20", "cw", "aa"):
        distance = (merged[f"{prefix}{metric}"] - merged[metric]).abs()
        equal = (distance - merged[f"{metric}_std"]).abs() < 0.0101  # both are printed to 0.01
        deviations = merged.loc[merged["dataset"] == "CIFAR-10", f"{metric}_std"]
        lines.append([metric, len(merged), int(equal.sum()), math.sqrt(2 * (deviations**2).mean())])
    rows = pandas.DataFrame(lines, columns=["metric", "deviations", "equal", "spread of two runs"])
    total = rows[["equal", "deviations"]].sum()
    return Check(
        question,
        f"{total.equal:.0f} of {total.deviations:.0f} in {means_name} equal |{single_name} - mean| to 0.01: consistent"
        f" with two runs, of which {single_name} prints one",
        rows,
    )


def seeds(tables: Mapping[str, pandas.DataFrame], spread: float | None = None) -> Check:
    """For every printed gain the seeds that find it with a power of 0.8; "-" without a gain or a spread.

    By what the table prints of both methods, taken as deviations of two independent runs, and by `spread`: a standard
    deviation of the difference over paired seeds, in points.
    """
    if spread is not None and not 0 < spread < math.inf:
        raise SpecError(f"the spread over seeds must be a positive number of points, got {spread}")
    lines = []
    for name, column, baseline, method, metrics in GAINS:
        if name not in tables:
            continue
        table = tables[name]
        keys = [key for key in table if key in ("dataset", "optimizer", "model", "head")]
        baseline_rows = table[table[column] == baseline]
        pairs = table[table[column] == method].merge(baseline_rows, on=keys, suffixes=("", " of baseline"))
        for metric in metrics:
            for _, pair in pairs.iterrows():
                gain = pair[metric] - pair[f"{metric} of baseline"]
                deviations = [pair.get(f"{metric}_std{suffix}", math.nan) for suffix in ("", " of baseline")]
                printed = math.hypot(*deviations) * math.sqrt(2)  # of two runs, over n - 1
                seed_counts = [seeds_needed(gain, sd) for sd in (printed, *([] if spread is None else [spread]))]
                lines.append(
                    [
                        name,
                        _labels(pair[keys]),
                        f"{method} - {baseline}",
                        metric,
                        round(gain, 2),
                        round(printed, 2),
                        *seed_counts,
                    ]
                )
    heads = ["table", "row", "gain of", "metric", "points", "printed spread", "seeds by that"]
    heads += [] if spread is None else [f"seeds by {spread:.1f} points"]
    rows = pandas.DataFrame(lines, columns=heads, dtype=object)
    gains = int((rows["points"] > 0).sum())
    answers = []
    for head in heads[6:]:
        numbers = rows[head].dropna()
        few_count = int((numbers <= FEW).sum())
        spread_name = "the printed spread" if head == "seeds by that" else head.removeprefix("seeds by ")
        answers.append(f"{few_count} of {len(numbers)} need at most {FEW} by {spread_name}")
    return Check(f"How many seeds find the {gains} printed gains with a power of 0.8?", "; ".join(answers), rows)


def garbled(tables: Mapping[str, pandas.DataFrame]) -> Check:
    """The numbers noted when the tables were copied: they contradict another table, or look misprinted."""
    lines = [
        [name, _labels(row), row["flag"]]
        for name, table in tables.items() if "flag" in table
        for _, row in table[table["flag"].notna()].iterrows() if len(str(row["flag"])) > 3
    ]  # fmt: skip
    rows = pandas.DataFrame(lines, columns=["table", "row", "note"])
    return Check("Which printed numbers contradict others?", f"{len(rows)} rows", rows)


# --- their parts --------------------------------------------------------------------------------------------------


def seeds_needed(gain: float, sd: float) -> int | None:
    """The least number of pairs with which a two-sided t test at 5 % finds a gain with a power of 0.8, at most 1000.

    None where there is no gain, or no known spread.
    """
    if not (gain > 0 and sd > 0):
        return None
    return 2 + bisect_left(range(2, MOST_SEEDS), POWER, key=lambda n: _power(gain / sd, n))


def _power(effect: float, n: int) -> float:
    """The power of a two-sided t test of n differences whose mean is `effect` standard deviations."""
    t, shift = stdtrit(n - 1, 1 - ALPHA / 2), effect * math.sqrt(n)
    # over the quantiles of the estimated deviation: scipy's noncentral t is NaN where the effect is large
    deviation = np.sqrt(chdtri(n - 1, (np.arange(2000) + 0.5) / 2000) / (n - 1))
    return float(np.mean(ndtr(shift - t * deviation) + ndtr(-shift - t * deviation)))


def _constant(data: object) -> float:
    dataset = CATALOGUE.get(str(data))
    share = None if dataset is None else chance({"name": data}, n=dataset.test)
    return math.nan if share is None else 100 * share


def _labels(row: pandas.Series | Iterable[object]) -> str:
    """The labels of a row: its texts before its first number."""
    labels = []
    for value in row:
        if not isinstance(value, str):
            break
        labels.append(value)
    return ", ".join(labels)
