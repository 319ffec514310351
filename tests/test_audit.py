"""What published numbers can bear, against counts by other code and closed forms."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path

import pandas
import pytest
from statsmodels.stats.power import TTestPower

from fatbench.cli.app import main
from fatbench.errors import SpecError
from fatbench.report import audit

PUBLISHED = Path(__file__).parent.parent / "suites" / "published"


def lines(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_floor_counts_what_the_files_print() -> None:
    """By the csv module: those below 10 of CIFAR-10's ten equal classes."""
    (rows,) = [check.rows for check in audit.audit(audit.published()) if "same class" in check.question]
    for table in ("fat-transformers-t1", "fat-transformers-t2", "fat-transformers-t3"):
        below = Counter(row["aggregator"] for row in lines(table) if float(row["at_robust_acc"]) < 10)
        mine = rows[rows["table"] == table]
        assert dict(zip(mine["method"], mine["below"], strict=True)) == {m: below[m] for m in mine["method"]}
        assert set(below) <= set(mine["method"])
    assert rows.groupby("table")["below"].sum().to_dict() == {
        "fat-transformers-t1": 6, "fat-transformers-t2": 14, "fat-transformers-t3": 57,
    }  # fmt: skip


def test_a_printed_deviation_is_that_of_two_runs() -> None:
    means, single = lines("sfat-t3"), {tuple(row[k] for k in row)[:3]: row for row in lines("sfat-t21")}
    equal = 0
    for row in means:
        other = single[tuple(row[k] for k in row)[:3]]
        for metric in ("natural", "fgsm", "pgd20", "cw", "aa"):
            apart = abs(float(other[f"niid_{metric}"]) - float(row[metric]))
            equal += abs(apart - float(row[f"{metric}_std"])) < 0.0101
    (check,) = [check for check in audit.audit(audit.published()) if "deviation" in check.question]
    assert check.rows["equal"].sum() == equal == 86 and check.rows["deviations"].sum() == 5 * len(means) == 90
    cifar = [float(row["pgd20_std"]) for row in means if row["dataset"] == "CIFAR-10"]
    of_pgd = check.rows.set_index("metric").loc["pgd20", "spread of two runs"]
    assert of_pgd == pytest.approx(math.sqrt(sum(2 * std**2 for std in cifar) / 6))


def test_the_power_behind_the_seeds_is_that_of_statsmodels() -> None:
    for effect, n in ((0.3, 20), (0.5, 34), (0.8, 15), (1.5, 6), (2.0, 2)):
        assert audit._power(effect, n) == pytest.approx(TTestPower().power(effect, n, 0.05), abs=5e-4)
    assert (audit.seeds_needed(1.0, 2.0), audit.seeds_needed(1.0, 1.0)) == (34, 10)  # Cohen's tables
    assert audit.seeds_needed(54.0, 1.0) == 2 and audit._power(54.0, 2) > 0.99


def test_what_is_no_gain_or_has_no_spread_needs_no_seeds() -> None:
    assert audit.seeds_needed(-1.0, 1.0) is audit.seeds_needed(1.0, math.nan) is audit.seeds_needed(1.0, 0.0) is None
    assert audit.seeds_needed(0.001, 1.0) == audit.MOST_SEEDS


def test_an_attack_that_leaves_more_right_than_a_weaker_one_is_named() -> None:
    table = pandas.DataFrame({"dataset": ["CIFAR-10", "SVHN"], "method": ["A", "B"], "natural": [50.0, 60.0],
                              "pgd20": [30.0, 40.0], "cw": [30.0, 61.0], "aa": [31.0, math.nan]})  # fmt: skip
    rows = audit.order({"t": table}).rows
    assert rows[["row", "weaker", "stronger"]].values.tolist() == [
        ["SVHN, B", "natural", "cw"], ["CIFAR-10, A", "pgd20", "aa"], ["CIFAR-10, A", "cw", "aa"],
    ]  # fmt: skip


def test_a_spread_that_is_none_is_refused() -> None:
    for spread in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(SpecError, match="spread"):
            audit.seeds(audit.published(), spread)


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fatbench", "audit", "--spread", "2.6", "--format", "json"])
    with pytest.raises(SystemExit) as end:
        main()
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert end.value.code in (None, 0)
    assert [check["answer"] for check in checks] == [one.answer for one in audit.audit(audit.published(), 2.6)]
    assert checks[0]["rows"][0]["table"] == "fat-transformers-t1"


def test_measured_accuracies_are_asked_the_same() -> None:
    numbers = pandas.DataFrame({
        "suite": ["s"] * 4, "cell": ["a", "a", "b", "b"], "seed": [0, 0, 1, 1], "n": [10] * 4, "client": [-1] * 4,
        "metric": ["natural", "autoattack"] * 2, "outcomes": [10, 10, 10, 0], "value": [0.5] * 4,
        "doubts": ["", "training diverged in round 4; attacked in bf16", "training diverged in round 7", "x"],
    })  # fmt: skip
    doubted, measured = audit.of_results(numbers)
    assert doubted.answer == "2 of 3"
    assert doubted.rows.values.tolist() == [["training diverged in round N", 2], ["attacked in bf16", 1]]
    assert measured.rows.to_dict("records") == [{"suite": "s", "cells": 2, "seeds": 2, "images": 10, "autoattack": 1}]
