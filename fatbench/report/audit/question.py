"""What every question shares: its answer, its words, and the sampling error of accuracies in points of 100."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas
from scipy.special import ndtri

from fatbench.report.audit.read_tables import UNPRINTED

WHITE_BOX = ("fgsm", "pgd", "bim", "mim", "apgd", "cw", "square", "fab", "deepfool", "autoattack", "robust")
TABLE = ["paper", "table"]
ROW = ["paper", "table", "dataset", "setting", "method"]
COLUMN = ["paper", "table", "dataset", "setting", "attack", "steps", "radius"]
LEVEL = 0.05
UNKNOWN_N = 1000  # test images where no size is known: fewer than any public set here has


@dataclass(frozen=True)
class Answer:
    """What a question finds: of how many it was asked, which fall to it, in one sentence and in rows.

    places: labels of the numbers, as in the long table, that fall to it.
    """

    asked: int
    raised: int
    says: str
    rows: pandas.DataFrame = field(default_factory=pandas.DataFrame)
    places: Mapping[Any, str] = field(default_factory=dict)  # label of a number -> its mark in words


@dataclass(frozen=True)
class Question:
    """A question to the authors of a table."""

    name: str
    title: str
    ask: Callable[[pandas.DataFrame], Answer]
    explained: str = ""
    settled: str = ""


def standard_error(p: float, q: float, n: float) -> float:
    """Of the difference of two accuracies, in points, as if on two samples of n images."""
    p, q = p / 100, q / 100
    return 100 * math.sqrt((p * (1 - p) + q * (1 - q)) / n)


def quantile(count: int) -> float:
    """The one-sided normal quantile at 5 % over `count` comparisons."""
    return float(-ndtri(LEVEL / max(count, 1)))


def is_robust(numbers: pandas.DataFrame) -> pandas.Series:
    """Which numbers are under an attack."""
    return ~numbers["attack"].isin(["natural", "unnamed"])


def size(row: Any) -> float:
    """The test images of a number, or fewer than any public set here has."""
    return UNKNOWN_N if math.isnan(row.n) else row.n


def named(row: Any) -> str:
    """Its attack and steps."""
    return head_text(row.attack, row.steps, UNPRINTED)


def joined(labels: tuple[str, ...]) -> str:
    """Labels with commas."""
    return ", ".join(filter(None, labels))


def row_labels(row: Any) -> list[str]:
    """Paper, table, and the other labels as one."""
    return [row.paper, row.table, joined((row.dataset, row.setting, row.method))]


def head_text(attack: str, steps: float, radius: str) -> str:
    """An attack, its steps and its radius: pgd-20 (8/255)."""
    steps_text = "" if math.isnan(steps) else f"-{steps:.0f}"
    return f"{attack}{steps_text}" + ("" if radius == UNPRINTED else f" ({radius})")


def groups(numbers: pandas.DataFrame, labels: Sequence[str]) -> list[tuple[tuple[Any, ...], pandas.DataFrame]]:
    """The numbers by these labels, in their order; a missing label is one, too."""
    return [(tuple(key), group) for key, group in numbers.groupby(list(labels), sort=False, dropna=False)]


def lines_of(numbers: pandas.DataFrame) -> list[Any]:
    """The numbers as named tuples."""
    return list(numbers.itertuples())
