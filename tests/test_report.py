"""Report: numbers to grids to six formats. A synthetic suite and synthetic numbers; golden files for the text formats.

FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_report.py writes the golden files anew; look at the difference.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import measured
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.measure import Measurement

from fatbench import report
from fatbench.engine.rounds import Number
from fatbench.errors import SpecError
from fatbench.report.formats import html, latex, latex_text, markdown, records, terminal
from fatbench.report.numbers import doubts, stored, table_facts
from fatbench.report.numbers.long import frame
from fatbench.report.numbers.points import combined
from fatbench.report.numbers.sources import EVERY, Source
from fatbench.report.pairs import measured_numbers
from fatbench.report.tables import number_format
from fatbench.report.tables.entries import sheets
from fatbench.report.tables.sheet import Column, Entry, Sheet, sorted_by
from fatbench.runner import progress
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.facts import data_keys
from fatbench.suite.files import Suite

GOLDEN = Path(__file__).parent / "golden"
EXTENSIONS = {"markdown": "md", "latex": "tex"}

SUITE = """\
name: tiny
title: A suite for the report's tests
seeds: [6, 7]
base:
  data: {name: cifar10}
  validation: 1000
  partition: {name: shah, clients: 5, skew: 2}
  model: {name: nin}
  algorithm:
    name: fedavg
    rounds: 3
    local:
      epochs: 1
      batch: 32
      lr: 0.01
      objective: {name: at, attack: {name: pgd, eps: 8/255, step: 2/255, steps: 10}}
    aggregator: {name: samples}
  monitor: {name: pgd, eps: 8/255, step: 2/255, steps: 20}
axes:
  split:
    Non-IID: {}
    IID: {partition: {name: iid, clients: 5}}
  method:
    FAT: {}
    "SFAT_2 & 50% #1": {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}
    Uniform: {algorithm: {aggregator: {name: uniform}}}
grid:
  exclude: [{when: {split: IID, method: Uniform}, reason: the same as FAT on equal shards}]
evaluate:
  checkpoints: [last, best-test]
  attacks:
    natural: {name: natural}
    fgsm: {name: fgsm, eps: 8/255}
    pgd20: {name: pgd, eps: 8/255, step: 2/255, steps: 20}
    autoattack: {name: autoattack, eps: 8/255}
presets:
  paper: {}
  smoke:
    note: nothing but a check that everything runs
    seeds: [6]
    overrides: [{set: {algorithm: {rounds: 1}}}]
    evaluate: {n: 10, attacks: {autoattack: null}}
tables:
  - id: T1
    title: Accuracy of FAT & co. (100%)
    rows: [method]
    across: [split]
    values: {natural: natural, PGD-20: pgd20, AA: autoattack}
    best: {natural: max, PGD-20: max, AA: none}
    published:
      file: published/tiny.csv
      select: last
      match: {dataset: CIFAR-10}
      rows: {method: method}
      labels: {Non-IID: niid, IID: iid, "SFAT_2 & 50% #1": SFAT}
      values: {natural: "{split}_natural", PGD-20: "{split}_pgd20"}
      std: {PGD-20: "{split}_pgd20_std"}
    note: One of two tables.
  - id: T2
    title: What training logged
    where: {split: Non-IID, method: [FAT, Uniform]}
    rows: [method]
    values:
      {drift 2: "train:drift_post@2", drift: train:drift_post, client 1: "train:train_accuracy[1]", gap: gap:pgd20}
    best: {drift 2: min, drift: min, gap: min}
"""
PUBLISHED = """\
dataset,method,niid_natural,iid_natural,niid_pgd20,niid_pgd20_std,iid_pgd20,flag
CIFAR-10,FAT,57.45,69.35,32.58,0.01,37.43,
CIFAR-10,SFAT,63.44,67.43,37.17,0.03,,iid_natural is 68.43 in another table
CIFAR-100,FAT,1,2,3,4,5,
"""
ODD = "SFAT_2 & 50% #1"


def build(
    suite: Suite, plan: Plan, rows: Any, select: Any = "last", published: bool = True, **stored: Any
) -> list[Sheet]:
    """The tables of a suite, filled with these measurements."""
    return sheets(suite.tables, plan, measured.numbers(plan, list(rows), select, **stored), published=published)


def filled(
    suite: Suite, values: Values | None = None, preset: str = "paper", *, seeds: Any = None, best: int = 2, **more: Any
) -> list[Sheet]:
    """The tables of a preset, filled with these accuracies and what training logs."""
    plan = suite.plan(preset, seeds=seeds)
    return build(suite, plan, rows_of(plan, VALUES if values is None else values, best=best), **more)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return written(tmp_path_factory.mktemp("suites"))


def written(folder: Path, text: str = SUITE, published: str = PUBLISHED) -> Suite:
    """A suite and its published numbers, written to a folder and read."""
    (folder / "published").mkdir(exist_ok=True)
    (folder / "published" / "tiny.csv").write_text(published)
    (folder / "tiny.yaml").write_text(text)
    return files.load(str(folder / "tiny.yaml"))


def without_published(text: str) -> str:
    return re.sub(r"    published:\n(      .*\n)+", "", text)


PROVENANCE = {
    "device": "NVIDIA H200", "precision": "fp32", "commit": "1a2b3c4d5e" * 4, "dirty": False,
    "data": {"name": "cifar10", "variant": "jpeg75", "fingerprint": "ab" * 32}, "versions": {"torch": "2.15.0"},
}  # fmt: skip
VERSIONS = {"autoattack": "pyautoattack 0.2.0"}

Values = dict[tuple[str, str, int], dict[str, float]]  # (split, method, seed) -> metric -> accuracy


def number(cell: Cell, stage: str, metric: str, round: int, value: float, n: int, client: int = -1) -> dict[str, Any]:
    said = dict(PROVENANCE)
    if stage != "train":
        said["attack"] = VERSIONS.get(metric, "fatbench 0.1.0")
    row = {"cell": cell.id, "stage": stage, "metric": metric, "round": round, "client": client, "value": value, "n": n}
    return {**row, "provenance": said}


def rows_of(plan: Plan, values: Values, *, best: int = 2) -> list[dict[str, Any]]:
    """Rows as the store would give them: evaluations at the last round, and PGD-20 at round `best`, 0.01 above."""
    rows = []
    for cell in plan.unique():
        rounds = cell.spec["algorithm"]["rounds"]
        mine = values.get((cell.key["split"], cell.key["method"], cell.spec["seed"]))
        if mine is None:
            continue
        for round in range(1, rounds + 1):
            rows.append(number(cell, "train", "monitor", round, 0.3 + 0.1 * (round == best), 1000))
            rows.append(number(cell, "train", "drift_post", round, 10.0 + round, 0))
            rows.append(number(cell, "train", "train_accuracy", round, 0.5, 900, client=1))
        for evaluation in cell.evaluations:
            if evaluation.label in mine:
                n = evaluation.n or 10_000
                value = mine[evaluation.label]
                rows.append(number(cell, evaluation.stage(rounds), evaluation.label, rounds, value, n))
                if evaluation.label == "pgd20" and best < rounds:
                    rows.append(number(cell, evaluation.stage(best), "pgd20", best, value + 0.01, n))
    return rows


def accuracies(natural: float, pgd20: float, autoattack: float | None = None) -> dict[str, float]:
    values = {"natural": natural, "fgsm": (natural + pgd20) / 2, "pgd20": pgd20}
    return values if autoattack is None else {**values, "autoattack": autoattack}


# Chosen so that each mean is exact: FAT natural 0.58 and 0.59 have mean 0.585, std 0.01/sqrt(2) = 0.00707.
VALUES: Values = {
    ("Non-IID", "FAT", 6): accuracies(0.58, 0.33, 0.30),
    ("Non-IID", "FAT", 7): accuracies(0.59, 0.32, 0.29),
    ("Non-IID", ODD, 6): accuracies(0.64, 0.37, 0.33),
    ("Non-IID", ODD, 7): accuracies(0.62, 0.36, 0.31),
    ("Non-IID", "Uniform", 6): accuracies(0.64, 0.31),
    ("Non-IID", "Uniform", 7): accuracies(0.62, 0.31),
    ("IID", "FAT", 6): accuracies(0.70, 0.40),
}


@pytest.fixture(scope="module")
def paper(tiny: Suite) -> list[Sheet]:
    return filled(tiny)


def at(grid: Sheet, method: str, heading: str, split: str = "") -> Entry:
    row = next(row for row in grid.rows if row.key["method"] == method)
    group = next(i for i, group in enumerate(grid.groups) if group.label == split)
    column = next(i for i, column in enumerate(grid.columns) if column.heading == heading)
    return row.values[group][column]


def notes(grid: Sheet) -> dict[str, str]:
    return dict(grid.notes)


# --- the grid ----------------------------------------------------------------------------------------------------


def test_mean_spread_and_difference(paper: list[Sheet]) -> None:
    """By hand: (0.58 + 0.59)/2 = 0.585; deviations 0.005, ddof 1: sqrt(2 * 0.005^2 / 1); published 57.45 %."""
    value = at(paper[0], "FAT", "natural", "Non-IID")
    assert value.mean == pytest.approx(0.585, abs=1e-12)
    assert value.std == pytest.approx(0.00707106781, abs=1e-10)
    assert (value.seeds, value.wanted, value.n) == ((6, 7), 2, (10_000,))
    assert value.published == pytest.approx(0.5745)
    assert value.difference == pytest.approx(0.0105, abs=1e-12)
    assert at(paper[0], "FAT", "PGD-20", "Non-IID").published_std == pytest.approx(0.0001)


def test_what_is_missing_or_not_planned_is_said(paper: list[Sheet]) -> None:
    """IID: FAT has one seed and lacks AA, SFAT all three, Uniform is not planned; Non-IID: Uniform lacks AA."""
    value = at(paper[0], "FAT", "natural", "IID")
    assert (value.mean, value.std, value.seeds, value.partial) == (0.70, None, (6,), "1 of 2 seeds")
    missing, excluded = at(paper[0], ODD, "natural", "IID"), at(paper[0], "Uniform", "natural", "IID")
    assert (missing.planned, missing.mean, missing.published) == (True, None, pytest.approx(0.6743))
    assert (excluded.planned, excluded.published) == (False, None)
    assert notes(paper[0])["missing"] == "5 of 15 numbers have not been measured yet (--)"
    assert notes(paper[0])["not run"] == "the same as FAT on equal shards"
    said = "2 of 15 numbers average fewer seeds than planned: [1/2] means 1 of 2 seeds"
    assert notes(paper[0])["incomplete"].startswith(said)


def marks(grid: Sheet, column: int = 0) -> list[str]:
    """The marks of the first group's values under a heading. No outcomes are stored here: ° is at the best, not tested;
    what is decided where they are: test_significance.py.
    """
    assert not any(value.rank for value in grid.all())
    return ["".join(mark for mark in row.values[0][column].marks if mark == "°") for row in grid.rows]


def test_equal_numbers_are_both_the_best(paper: list[Sheet]) -> None:
    """natural: SFAT and Uniform both 0.63, FAT 0.585; PGD-20: 0.365, 0.325, 0.31; AA is not compared."""
    assert marks(paper[0], 0) == ["", "°", "°"]
    assert marks(paper[0], 1) == ["", "°", ""]
    assert marks(paper[0], 2) == ["", "", ""]
    assert "°" not in at(paper[0], "FAT", "natural", "IID").marks  # alone in its column


@pytest.mark.parametrize("best, expected", [("max", ["", "", "°"]), ("min", ["°", "", ""]), ("none", [""] * 3)])
def test_best_is_the_largest_or_the_smallest(tmp_path: Path, best: str, expected: list[str]) -> None:
    """On unrounded means: 0.31000 and 0.31001 print alike and only one is best."""
    chosen = written(tmp_path, SUITE.replace("PGD-20: max", f"PGD-20: {best}"))
    values = {("Non-IID", m, 6): accuracies(0.6, v) for m, v in (("FAT", 0.3), (ODD, 0.31), ("Uniform", 0.31001))}
    assert marks(filled(chosen, values, seeds=[6])[0], 1) == expected


def test_sources(paper: list[Sheet]) -> None:
    """Drift is 10 + round: 12 after round 2, 13 after the last of 3. PGD-20 is 0.01 higher at the best round."""
    grid = paper[1]
    assert [row.key["method"] for row in grid.rows] == ["FAT", "Uniform"]
    assert at(grid, "FAT", "drift 2").mean == 12
    assert at(grid, "FAT", "drift").mean == 13
    assert at(grid, "FAT", "client 1").mean == 0.5
    assert at(grid, "FAT", "gap").mean == pytest.approx(0.01)
    assert [column.unit for column in grid.columns] == ["plain", "plain", "percent", "percent"]
    assert not any(value.rank or "°" in value.marks for value in grid.all())  # both rows are the same everywhere


@pytest.mark.parametrize("best, pgd20", [(1, 0.335), (2, 0.335), (3, 0.325)])
def test_best_test_takes_the_round_of_the_best_monitor(tiny: Suite, best: int, pgd20: float) -> None:
    """FAT's PGD-20 is 0.325 at the last round; 0.01 more at an earlier best round; the same where the best is last."""
    grid = filled(tiny, best=best, select="best-test")[0]
    assert at(grid, "FAT", "PGD-20", "Non-IID").mean == pytest.approx(pgd20)
    assert notes(grid)["checkpoint"] == "best on the test set, as the papers select it"
    known = {(cell.id, "best-test"): 3 for cell in tiny.plan("paper").cells}
    told = filled(tiny, best=best, select="best-test", rounds=known)[0]
    assert at(told, "FAT", "PGD-20", "Non-IID").mean == pytest.approx(0.325)


def test_no_published(tiny: Suite) -> None:
    grids = filled(tiny, published=False)
    assert not any(grid.has_published for grid in grids)
    assert not any("57.45" in report.render(grids, name) for name in report.FORMATS)


def test_an_accuracy_by_class_is_a_fraction_with_the_class_in_brackets(tmp_path: Path) -> None:
    """natural_class of class 3 is 0.25 after the last round, as a per cent."""
    found = written(tmp_path, SUITE.replace('"train:train_accuracy[1]"', '"train:natural_class[3]"'))
    plan = found.plan("paper", seeds=[6])
    of_class = {3: 0.25, 2: 0.75}
    rows = [number(c, "train", "natural_class", 3, v, 100, client=k) for c in plan.cells for k, v in of_class.items()]
    grid = build(found, plan, rows)[1]
    assert at(grid, "FAT", "client 1").mean == 0.25
    assert next(column for column in grid.columns if column.heading == "client 1").unit == "percent"


def test_an_empty_database_gives_empty_tables(tiny: Suite) -> None:
    grids = report.build_tables(tiny, tiny.plan("paper"), None)
    assert [grid.id for grid in grids] == ["T1", "T2"]
    assert all(value.mean is None for grid in grids for value in grid.all())
    for name in report.FORMATS:
        assert report.render(grids, name).endswith("\n")


def test_points_lumped_together_are_refused(tmp_path: Path) -> None:
    bad = written(tmp_path, SUITE.replace("    across: [split]\n", "").replace('"{split}_', '"niid_'))
    with pytest.raises(SpecError) as error:
        build(bad, bad.plan("paper"), [])
    said = "table T1: a row holds more than one point of the grid: name the axis split in 'rows', 'across' or 'where'"
    assert str(error.value) == said


def test_published_mistakes(tmp_path: Path) -> None:
    bad = written(tmp_path, published=PUBLISHED.replace("method,", "Method,", 1))
    with pytest.raises(SpecError, match=r"tiny.csv: there is no column 'method' \(the columns: dataset, Method, "):
        build(bad, bad.plan("paper"), [])
    written(tmp_path, published=PUBLISHED + "CIFAR-10,FAT,1,2,3,4,5,\n")
    with pytest.raises(SpecError, match=r"published/tiny.csv:5: the labels of line 2 again: FAT"):
        build(bad, bad.plan("paper"), [])


def test_a_published_flag_marks_the_column_it_names(paper: list[Sheet]) -> None:
    assert at(paper[0], ODD, "natural", "IID").published_mark == "a"
    assert at(paper[0], ODD, "natural", "Non-IID").published_mark == ""
    assert paper[0].footnotes == [
        ("a", "as published: iid_natural is 68.43 in another table"),
        ("°", "the best of its column, not tested: no per-image outcomes"),
    ]


def test_a_published_number_that_a_constant_has_is_marked(tmp_path: Path) -> None:
    """CIFAR-10 has ten classes of 1,000 test images each: 9.58 % is below a network that always says the same."""
    low = written(tmp_path, published=PUBLISHED.replace("32.58", "9.58"))
    grid = build(low, low.plan("paper"), [])[0]
    value = at(grid, "FAT", "PGD-20", "Non-IID")
    assert (value.published_flag, value.published_mark) == ("not above a constant classifier, 10 %", "a")
    assert at(grid, "FAT", "natural", "Non-IID").published_flag == ""


def test_a_published_number_that_is_asked_about_is_marked(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    """A paper's table with its YAML file: PGD-20 leaves more than no attack; `check` counts it, the table marks it."""
    suite = written(tmp_path, published=PUBLISHED.replace("32.58", "62.58"))
    description = tmp_path / "published" / "tiny.yaml"
    description.write_text("paper: tiny\nread: here\ntables: [{file: tiny.csv, table: 1, radius: 8/255}]\n")
    grid = build(suite, suite.plan("paper"), [])[0]
    asked = "at most 62.58 %, by the weaker attack of its row"
    assert at(grid, "FAT", "PGD-20", "Non-IID").published_flag == asked
    assert ("a", f"as published: {asked}") in grid.footnotes
    assert at(grid, ODD, "PGD-20", "Non-IID").published_flag == ""
    code, text, _ = run("check", str(tmp_path / "tiny.yaml"))
    assert code == 0 and "asked about in tiny.csv: 3 of its numbers (fatbench audit " in text
    description.write_text("name: tiny.csv\ntables: []\n")  # a suite, say
    assert at(build(suite, suite.plan("paper"), [])[0], "FAT", "PGD-20", "Non-IID").published_flag == ""


def test_unequal_classes_have_a_constant_too() -> None:
    """CelebA's classes are two, whatever their shares: a constant has at least half."""
    suite = files.load("sfat-celeba")
    values = [value for grid in build(suite, suite.plan("paper"), []) for value in grid.all()]
    flags = {value.published_flag: value.published < 0.5 for value in values if value.published is not None}
    assert flags == {"not above a constant classifier, 50 %": True, "": False}


def test_rows_on_other_data_are_not_compared(tmp_path: Path) -> None:
    """An accuracy on SVHN is no better than one on CIFAR-10: each data set has its own best."""
    text = SUITE.replace(SPLIT, "SVHN: {data: {name: svhn, variant: jpeg75}}")
    text = text.replace("split: IID", "split: SVHN").replace("    across: [split]\n", "")
    two = written(tmp_path, without_published(text.replace("    rows: [method]\n", "    rows: [split, method]\n", 1)))
    values = {**VALUES, ("SVHN", "FAT", 6): accuracies(0.9, 0.5), ("SVHN", ODD, 6): accuracies(0.8, 0.6)}
    assert marks(filled(two, values)[0]) == ["", "°", "°", "°", ""]


SPLIT = "IID: {partition: {name: iid, clients: 5}}"
APART = {
    "partition": SPLIT,
    "clients": "IID: {partition: {clients: 10}}",
    "training": "IID: {algorithm: {local: {objective: {attack: {steps: 7}}}}}",
    "data": "IID: {data: {name: svhn, variant: jpeg75}}",
}


@pytest.mark.parametrize("what", APART)
def test_rows_that_do_not_compete_have_a_best_each(what: str, tmp_path: Path) -> None:
    """natural: FAT 0.585, SFAT and Uniform 0.63 in one group; FAT 0.70 and SFAT 0.60 in the other. 0.63 stays best."""
    text = SUITE.replace(SPLIT, APART[what]).replace("    across: [split]\n", "")
    text = without_published(text.replace("    rows: [method]\n", "    rows: [split, method]\n", 1))
    values = {**VALUES, ("IID", ODD, 6): accuracies(0.6, 0.6)}
    grid = filled(written(tmp_path, text), values)[0]
    assert marks(grid) == ["", "°", "°", "°", ""]
    every = "significantly better than every other measured number of a column"
    competing = "data, partition, clients, training objective and test attack"
    assert notes(grid)["marks"] == f"nothing is bold: no number is shown to be {every} with the same {competing}"
    if what != "data":
        shown = "    rows: [split, method]\n"
        text = text.replace(shown, f"{shown}    compare_across: [split, method]\n")
        together = filled(written(tmp_path, text), values)[0]
        assert marks(together) == ["", "°", "°", "", ""]  # 0.70 is of fewer seeds
        assert notes(together)["marks"].endswith(every)


def test_a_reduced_preset_shows_no_difference_to_what_is_published(tiny: Suite) -> None:
    """0.58 measured and 0.5745 published: +0.55 points in the preset paper, nothing in smoke, in any format."""
    grids = filled(tiny, preset="smoke", best=1)
    value = at(grids[0], "FAT", "natural", "Non-IID")
    assert (value.mean, value.published, value.difference) == (0.58, 0.5745, None)
    said = "published/tiny.csv, last round; no difference shown: the settings are not the paper's"
    assert notes(grids[0])["published"] == said
    for name in report.FORMATS:
        text = report.render(grids, name)
        assert "0.55" not in text and ("57.45" in text or "0.5745" in text), name
    assert "difference." not in report.render(grids, "terminal")


@pytest.mark.parametrize(
    "said, select, difference, note",
    [
        ("best-test", "last", None,
         "best round on the test set; no difference shown: ours are of another round (--select best-test shows it)"),
        ("best-test", "best-test", 0.325 + 0.01 - 0.3258,
         "best round on the test set; difference = measured - published, in points"),
        ("last", "best-test", None,
         "last round; no difference shown: ours are of another round (--select last shows it)"),
        ("best-val", "last", None,
         "best round by held-out validation; no difference shown: ours are of another round"),
        ("unknown", "last", None, "round not stated; no difference shown"),
        (None, "best-test", None, "round not stated; no difference shown"),
    ],
)  # fmt: skip
def test_a_difference_is_of_the_same_round(
    tmp_path: Path, said: str | None, select: str, difference: float | None, note: str
) -> None:
    """PGD-20 of FAT: 0.325 in the last round, 0.335 in the best; published 0.3258. In every format."""
    found = written(tmp_path, SUITE.replace("      select: last\n", f"      select: {said}\n" if said else ""))
    grids = filled(found, select=select)
    value = at(grids[0], "FAT", "PGD-20", "Non-IID")
    assert value.difference == (None if difference is None else pytest.approx(difference, abs=1e-12))
    assert notes(grids[0])["published"] == f"published/tiny.csv, {note}"
    for name in report.FORMATS:
        text = report.render(grids, name).replace("$", "")
        printed = "0.0092" if name in ("csv", "json") else "+0.92"
        assert (printed in text) == (difference is not None), name
        shown = (said or "unknown") if name in ("csv", "json") else note.split(";")[0]
        assert shown in " ".join(text.split()), name


def test_what_will_never_be_measured_has_a_mark_of_its_own(tiny: Suite) -> None:
    """drift_post of a training that is done and has not logged it is n/a; before that it is missing."""
    plan = tiny.plan("paper")
    rows = [row for row in rows_of(plan, VALUES) if row["metric"] != "drift_post"]
    for trained in (False, True):
        grid = build(tiny, plan, rows, trained=frozenset(cell.id for cell in plan.cells if trained))[1]
        value = at(grid, "FAT", "drift")
        assert (value.never, value.wanted) == (trained, 0 if trained else 2)
        said = "4 of 8 numbers are neither evaluated nor logged in this preset (n/a)"
        assert notes(grid).get("not there") == (said if trained else None)
        assert ("missing" in notes(grid)) != trained
        for name in ("markdown", "html", "terminal"):
            assert ("n/a" in report.render([grid], name)) == trained, name
        assert re.search("left out: .*drift", report.render([grid], "latex"))
    best = build(tiny, plan, [], select="best-val")[0]  # the suite evaluates last and best-test
    assert all(value.never for value in best.all() if value.planned)


def test_a_number_after_a_named_round_is_compared_at_any_checkpoint(tmp_path: Path) -> None:
    """Drift after round 2 is 12, and 11.5 is published: 0.5 apart, whatever --select; after the last, only of last."""
    columns = "{a: train:drift_post@2, b: train:drift_post}"
    text = SUITE.replace("{natural: natural, PGD-20: pgd20, AA: autoattack}", columns)
    text = re.sub(r"    best: \{natural.*\n", "", text).replace("select: last", "select: best-test")
    theirs = "      values: {a: x, b: x}\n      unit: plain\n"
    text = re.sub(r"      values: \{natural: .*\n      std: .*\n", theirs, text)
    grid = filled(written(tmp_path, text, "dataset,method,x\nCIFAR-10,FAT,11.5\n"), select="best-test")[0]
    assert [at(grid, "FAT", heading, "Non-IID").difference for heading in "ab"] == [0.5, None]
    said = "published/tiny.csv, best round on the test set; difference = measured - published, of the same round"
    assert notes(grid)["published"] == said


def test_other_images_have_no_difference(tmp_path: Path) -> None:
    found = written(tmp_path, SUITE.replace("data: {name: cifar10}", "data: {name: cifar10, variant: jpeg75}"))
    grid = filled(found)[0]
    assert at(grid, "FAT", "natural", "Non-IID").difference is None
    assert notes(grid)["published"].endswith("no difference shown: the settings are not the paper's")


# --- radii, and the clients' own accuracies ----------------------------------------------------------------------

SWEPT = SUITE.replace("pgd20: {name: pgd, eps: 8/255, step", "pgd20: {name: pgd, eps: [2/255, 8/255], step").replace(
    "autoattack: {name: autoattack, eps: 8/255}", "autoattack: {name: autoattack, norm: L2, eps: 0.5}"
)


def test_a_list_of_radii_is_a_stage_and_a_column_each(tmp_path: Path) -> None:
    """The stage of 8/255 is the one that the attack alone would have but for its name; headings name the radius."""
    found = written(tmp_path, SWEPT)
    plan = found.plan("paper")
    assert plan.metrics() == ["natural", "fgsm", "pgd20_2_255", "pgd20_8_255", "autoattack"]
    assert [e.attack["eps"] for e in plan.cells[0].evaluations if e.sweep == "pgd20"] == ["2/255", "8/255"]
    values = {
        ("Non-IID", method, 6): {"natural": 0.6, "pgd20_2_255": 0.5, "pgd20_8_255": value}
        for method, value in (("FAT", 0.3), (ODD, 0.4))
    }
    grid = filled(found, values)[0]
    assert [(column.heading, column.metric, column.best) for column in grid.columns] == [
        ("natural", "natural", "max"), ("PGD-20 2/255", "pgd20_2_255", "max"), ("PGD-20 8/255", "pgd20_8_255", "max"),
        ("AA", "autoattack", "none"),
    ]  # fmt: skip
    assert at(grid, "FAT", "PGD-20 2/255", "Non-IID").mean == 0.5
    assert marks(grid, 2) == ["", "°", ""]
    assert "pgd(eps=" not in notes(grid)["attack code"]
    assert "PGD-20 2/255 = pgd(eps=2/255, step=2/255, steps=20); PGD-20 8/255 = pgd(eps=8/255" in notes(grid)["attacks"]
    assert notes(grid)["attacks"].endswith("AA = autoattack(eps=0.5, norm=L2)")
    assert "PGD-20 2/255" in report.render([grid], "latex")


def test_a_column_over_several_evaluations(tmp_path: Path) -> None:
    """The images that both leave right: 3 of 5 and 3 of 5, but 2 of 5. A list of radii is all of them; a cell that
    lacks one of the evaluations has no number.
    """
    columns = "{Radii: all:natural+pgd20, Both: all:natural+pgd20_8_255, Clean: natural}"
    text = SWEPT.replace("{natural: natural, PGD-20: pgd20, AA: autoattack}", columns)
    text = without_published(re.sub(r"    best: \{natural.*\n", "", text))
    values = {("Non-IID", "FAT", 6): {"natural": 0.6, "pgd20_2_255": 0.5, "pgd20_8_255": 0.4},
              ("Non-IID", ODD, 6): {"natural": 0.6, "pgd20_8_255": 0.4}}  # fmt: skip
    bits = {"natural": (0b11100, 5), "pgd20_2_255": (0b00110, 5), "pgd20_8_255": (0b01110, 5)}
    outcomes = lambda cell, stage: bits[stage.rpartition("-")[0]]  # noqa: E731
    grid = filled(written(tmp_path, text), values, outcomes=outcomes)[0]
    shown = {heading: at(grid, "FAT", heading, "Non-IID").mean for heading in ("Radii", "Both", "Clean")}
    assert shown == {"Radii": 0.2, "Both": 0.4, "Clean": 0.6}
    assert at(grid, ODD, "Radii", "Non-IID").mean is None
    assert at(grid, ODD, "Both", "Non-IID").mean == 0.4
    assert [column.metric for column in grid.columns][:2] == ["all:natural+pgd20", "all:natural+pgd20_8_255"]
    assert any(text.startswith("Radii and Both: images that are") for _, text in grid.notes)
    assert "pgd20_2_255 = pgd(eps=2/255" in notes(grid)["attacks"]
    for name in report.FORMATS:
        assert report.render([grid], name)


PRIORS = """\
  - id: P
    title: Every client
    rows: [method]
    across: [split]
    values:
      mean: prior_mean:pgd20
      PGD-20, worst: prior_worst:pgd20
      client 3: "prior:pgd20[3]"
      client 99: "prior:pgd20[99]"
"""


@pytest.mark.parametrize("stored", [False, True])
def test_statistics_over_the_clients_own_accuracies(tmp_path: Path, stored: bool) -> None:
    """a = 0.0, 0.1, ..., 0.9: mean 0.45, worst 0."""
    found = written(tmp_path, SUITE + PRIORS)
    plan = found.plan("paper", seeds=[6])
    rows = rows_of(plan, {("Non-IID", "FAT", 6): accuracies(0.6, 0.45), ("IID", "FAT", 6): accuracies(0.6, 0.5)})
    for cell in plan.cells:
        if cell.key["method"] == "FAT":
            stage = next(e for e in cell.evaluations if e.label == "pgd20").stage(3)
            clients = 10 if cell.key["split"] == "Non-IID" else 11
            rows += [number(cell, stage, "prior_accuracy", 3, k / 10, 10_000, k) for k in range(clients)]
    if stored:
        with filled_store(tmp_path, plan, rows) as store:
            grid = report.build_tables(found, plan, store)[2]
    else:
        grid = build(found, plan, rows)[2]
    headings = ["mean", "PGD-20, worst", "client 3", "client 99"]
    said = [at(grid, "FAT", heading, "Non-IID").mean for heading in headings]
    assert said == pytest.approx([0.45, 0.0, 0.3, None])
    assert [column.metric for column in grid.columns][:2] == ["prior_mean:pgd20", "prior_worst:pgd20"]
    assert all(column.unit == "percent" for column in grid.columns)
    assert "weighted by its own fraction of each class" in notes(grid)["clients"]
    assert notes(grid)["clients"].startswith("all columns: ")
    assert notes(grid)["checkpoint"] == "last round (3)"
    assert at(grid, "Uniform", "mean", "Non-IID").mean is None


# --- several suites in one table ---------------------------------------------------------------------------------


def test_cells_of_several_suites_in_one_table(tmp_path: Path) -> None:
    """tiny and a copy whose FAT has another learning rate: SFAT is one cell of both, FAT two."""
    two = written(tmp_path, SUITE)
    text = without_published(SUITE).replace("name: tiny", "name: other")
    (tmp_path / "other.yaml").write_text(text.replace("FAT: {}", "FAT: {algorithm: {local: {lr: 0.5}}}"))
    other = files.load(str(tmp_path / "other.yaml"))
    parts = [(two, two.plan("paper", [6], "split=Non-IID")), (other, other.plan("paper", [6], "split=Non-IID"))]
    chosen, plan = combined(parts, ["suite", "method"], ["split", "natural", "pgd20"])
    assert (chosen.name, plan.preset, len(plan.cells)) == ("tiny + other", "paper", 6)
    of = {cell.key["suite"]: cell for cell in plan.cells if cell.key["method"] == "FAT"}
    natural = {"tiny": 0.5, "other": 0.6}
    rows = [number(of[s], of[s].evaluations[0].stage(3), "natural", 3, value, 10) for s, value in natural.items()]
    grid = build(chosen, plan, rows)[0]
    assert [tuple(row.key.values()) for row in grid.rows][::3] == [("tiny", "FAT"), ("other", "FAT")]
    assert [group.label for group in grid.groups] == ["Non-IID"]
    assert [column.heading for column in grid.columns] == ["natural", "PGD-20"]
    assert [row.values[0][0].mean for row in grid.rows] == [0.5, None, None, 0.6, None, None]
    assert marks(grid)[::3] == ["", "°"]
    _, plan = combined([(two, two.plan("paper", [6])), (two, two.plan("paper", [6]))], ["split", "method"], [])
    assert len(plan.cells) == 5  # what two suites share is there once


# --- headings with a condition, rows that compete, paired tests --------------------------------------------------

CONDITIONED = """\
  - id: C
    title: Two splits in one row
    rows: [method]
    values:
      skewed: {source: natural, where: {split: Non-IID}}
      even: {source: natural, where: {split: IID}}
      even, PGD-20: {source: pgd20, where: {split: [IID]}}
    published:
      file: published/tiny.csv
      select: last
      match: {dataset: CIFAR-10}
      rows: {method: method}
      labels: {Non-IID: niid, IID: iid, "SFAT_2 & 50% #1": SFAT}
      values: {skewed: "{split}_natural", even: iid_natural}
"""


def test_a_condition_is_part_of_the_key_in_json_and_csv(tmp_path: Path) -> None:
    grid = filled(written(tmp_path, SUITE[: SUITE.index("  - id: T1")] + CONDITIONED))[0]
    table = json.loads(report.render([grid], "json"))["tables"][0]
    assert [row["key"] for row in table["rows"][:2]] == [
        {"method": "FAT", "split": "Non-IID"}, {"method": "FAT", "split": "IID"},
    ]  # fmt: skip
    assert [set(row["measured"]) for row in table["rows"][:2]] == [{"natural"}, {"natural", "pgd20"}]
    assert [row["measured"]["natural"]["mean"] for row in table["rows"][:2]] == [pytest.approx(0.585), 0.70]
    assert table["columns"][1] == {
        "heading": "even", "metric": "natural", "where": {"split": ["IID"]}, "unit": "fraction", "best": "max",
    }  # fmt: skip
    lines = list(csv.DictReader(io.StringIO(report.render([grid], "csv"))))
    assert [(row["split"], row["heading"], row["metric"]) for row in lines[:3]] == [
        ("Non-IID", "skewed", "natural"), ("IID", "even", "natural"), ("IID", "even, PGD-20", "pgd20"),
    ]  # fmt: skip
    assert len(lines) == 2 * 3 + 1
    for name in ("markdown", "latex", "html", "terminal"):
        assert "even, PGD-20" in report.render([grid], name)


def test_the_groups_of_a_row_compete(tmp_path: Path) -> None:
    """natural, seed 6: FAT 0.58 skewed and 0.70 even, SFAT 0.64 and nothing: SFAT wins its column and no row."""
    across, within = "    across: [split]\n", "    best_within: row\n"
    texts = [across, f"{across}{within}    compare_across: [split]\n", f"{across}{within}"]
    column, row, apart = (filled(written(tmp_path, SUITE.replace(across, one)), seeds=[6])[0] for one in texts)
    assert not any(value.marks for value in apart.all())  # two partitions: nothing to compete with in any row
    assert [at(column, "FAT", "natural", split).marks for split in ("Non-IID", "IID")] == [(), ()]
    assert at(column, ODD, "natural", "Non-IID").marks == ("°",)
    assert [at(row, "FAT", "natural", split).marks for split in ("Non-IID", "IID")] == [(), ("°",)]
    assert at(row, ODD, "natural", "Non-IID").marks == ()  # alone in its row
    said = "nothing is bold: no number is shown to be significantly better than every other measured number of a"
    assert (notes(column)["marks"], notes(row)["marks"]) == (f"{said} column", f"{said} row under the same heading")
    assert row.footnotes[-1] == ("°", "the best of its row, not tested: one seed")


def test_paired_differences_stand_under_the_table_and_in_json(tmp_path: Path) -> None:
    """SFAT - FAT on skewed shards: seeds 6 and 7 differ by 0.06 and 0.03, mean 0.045, std 0.03 / sqrt 2 = 0.0212.

    t = 0.045 / 0.015 = 3 with one degree of freedom: p = 1 - 2 atan(3) / pi = 0.205. Wilcoxon of two differences of one
    sign: 2 of 4 patterns, p = 0.5. On even shards only FAT has a number.
    """
    text = SUITE.replace("    across: [split]\n", "    across: [split]\n    paired: {axis: method, against: FAT}\n")
    found = written(tmp_path, text)
    grid = filled(found)[0]
    shown = [text for what, text in grid.notes if what == "paired"]
    assert shown[0] == (
        "differences between runs of the same seed, mean ± sample standard deviation (ddof 1); p of the paired t test"
        " and of Wilcoxon's signed-rank test, two-sided, not corrected for 5 comparisons"
    )
    assert shown[1] == f"Non-IID: {ODD} - FAT, natural: +4.50 ± 2.12 points, n = 2, t test p = 0.20, Wilcoxon p = 0.50"
    assert shown[3] == f"Non-IID: {ODD} - FAT, AA: +2.50 ± 0.71 points, n = 2, t test p = 0.13, Wilcoxon p = 0.50"
    assert len(shown) == 1 + 5  # Uniform has no AA
    tests = json.loads(report.render([grid], "json"))["tables"][0]["paired"]
    assert len(tests) == 5
    assert {
        "key": {"split": "Non-IID"}, "label": ODD, "against": "FAT", "metric": "natural", "n": 2, "seeds": [6, 7],
        "mean": pytest.approx(0.045), "std": pytest.approx(0.03 / math.sqrt(2)),
        "t_p": pytest.approx(1 - 2 * math.atan(3) / math.pi), "wilcoxon_p": 0.5,
    }.items() <= tests[0].items()  # fmt: skip
    for name in ("markdown", "latex", "html", "terminal"):
        assert "Wilcoxon" in report.render([grid], name, "full")
        assert name == "html" or "0 of 5 paired t tests" in report.render([grid], name, "short")
    one = filled(found, seeds=[6])
    assert "paired" not in notes(one[0]) and "paired" not in json.loads(report.render(one, "json"))["tables"][0]


# --- checks of the numbers themselves ----------------------------------------------------------------------------


def test_consistency_rule() -> None:
    """n = 10000, p = 0.30: independent bound 3 sqrt(2 * 0.3 * 0.7 / 10000) = 0.01944."""
    weak = (0.30, 10_000)
    assert not doubts.violated(weak, (0.319, 10_000))
    assert doubts.violated(weak, (0.3200, 10_000))
    assert not doubts.violated(weak, (0.28, 10_000))
    # The same difference of 100 images, paired: 110 against 10 is 100 > 3 sqrt(120) = 32.9; 1000 against 900 is not.
    assert doubts.violated(weak, (0.31, 10_000), (110, 10))
    assert not doubts.violated(weak, (0.31, 10_000), (1000, 900))
    assert not doubts.violated((0.3, 0), (0.9, 0))


def test_outcomes_are_joined_and_compared_bit_by_bit() -> None:
    """Images 0..9 in two chunks of 6 and 4: bits 110100 0011 and 010111 0000: only strong: 4, 5; only weak: 0, 8, 9."""
    weak = stored.join_chunks([(6, 4, bytes([0b00110000])), (0, 6, bytes([0b11010000]))])
    strong = stored.join_chunks([(0, 6, bytes([0b01011100])), (6, 4, bytes([0b00000000]))])
    assert weak == (0b1101000011, 10)
    assert doubts.discordant(weak, strong) == (2, 3)
    assert doubts.discordant(weak, (0, 9)) is None
    with pytest.raises(ValueError, match="outcomes have a gap at image 6"):
        stored.join_chunks([(0, 6, b"\0"), (7, 1, b"\0")])


def test_violations_become_flags_with_their_seeds(tiny: Suite) -> None:
    values = {**VALUES, ("Non-IID", "FAT", 7): {**accuracies(0.59, 0.32), "autoattack": 0.40}}
    grids = filled(tiny, values)
    text = "autoattack exceeds pgd20 by more than 3 standard errors (seed 7)"
    value = at(grids[0], "FAT", "AA", "Non-IID")
    assert (value.doubts, value.marks) == ((text,), ("†",))
    assert ("†", text) in grids[0].footnotes
    assert notes(grids[0])["checks"].startswith("no attack may leave more images right than a weaker one does")
    assert at(grids[0], "FAT", "PGD-20", "Non-IID").doubts == ()
    for name in ("markdown", "csv", "json", "html", "terminal"):
        assert text in " ".join(report.render(grids, name).split())
    assert r"{\scriptsize \textdagger{}}" in report.render(grids, "latex")

    paired = {"pgd20": (0b1111, 4), "autoattack": (0b1111, 4)}  # the stored outcomes are what counts
    outcomes = lambda cell, stage: paired.get(stage.split("-")[0], (0, 0))  # noqa: E731
    assert not any(v.doubts for v in filled(tiny, values, outcomes=outcomes)[0].all())


def test_stored_flags_and_zero_gradients(tiny: Suite) -> None:
    plan = tiny.plan("paper")
    cell = next(c for c in plan.cells if c.key == {"split": "Non-IID", "method": "FAT"} and c.spec["seed"] == 6)
    natural, pgd20 = (next(e for e in cell.evaluations if e.label == label).stage(3) for label in ("natural", "pgd20"))
    rows = [
        *rows_of(plan, VALUES),
        number(cell, pgd20, "doubt_black_box_beats_white_box", 3, 1.0, 0),
        number(cell, pgd20, "doubt_not_raised", 3, 0.0, 0),
        number(cell, natural, "zero_gradients", 3, 0.02, 10_000),
    ]
    directional = number(cell, natural, "directional", 3, 0.5, 8)  # half of the images are no doubt yet
    grid = build(tiny, plan, [*rows, directional])[0]
    dead = f"{doubts.WORDS['gradient']} (seed 6)"
    found = {heading: at(grid, "FAT", heading, "Non-IID") for heading in ("natural", "PGD-20", "AA")}
    assert {heading: (value.doubts, value.marks) for heading, value in found.items()} == {
        "natural": ((), ()), "PGD-20": (("black box beats white box (seed 6)", dead), ("†", "‡")),
        "AA": ((dead,), ("‡",)),
    }  # fmt: skip
    grid = build(tiny, plan, [*rows, number(cell, natural, "directional", 3, 0.625, 8)])[0]
    (_, astray) = at(grid, "FAT", "AA", "Non-IID").doubts
    assert astray.startswith("gradients do not follow the loss, on 62% of the images tried: ")
    assert at(grid, "FAT", "natural", "Non-IID").doubts == ()


# --- where numbers come from -------------------------------------------------------------------------------------


def test_notes_say_where_numbers_come_from(paper: list[Sheet]) -> None:
    assert (
        "MIXED" not in notes(paper[0])
        and {
            "suite": "tiny, preset paper",
            "data": "CIFAR-10, variant jpeg75: not the published files; n = 10000 test images",
            "checkpoint": "last round (3)",
            "seeds": "6, 7; mean ± sample standard deviation over seeds (ddof 1)",
            "machine": "NVIDIA H200, fp32",
            "code": "commit 1a2b3c4d5e; torch 2.15.0",
            "attacks": "PGD-20 = pgd(eps=8/255, step=2/255, steps=20); AA = autoattack(eps=8/255)",
            "attack code": "natural, PGD-20: fatbench 0.1.0; AA: pyautoattack 0.2.0",
            "note": "One of two tables.",
        }.items()
        <= notes(paper[0]).items()
    )


MIXTURES: list[tuple[dict[str, Any], str]] = [
    ({"device": "cpu (x)"}, "device: NVIDIA H200 (6 cells); cpu (x) (1 cell)"),
    ({"precision": "bf16"}, "precision: fp32 (6 cells); bf16 (1 cell)"),
    ({"dirty": True}, "code: commit 1a2b3c4d5e (6 cells); commit 1a2b3c4d5e with uncommitted changes (1 cell)"),
    ({"commit": "release 0.2"}, "code: commit 1a2b3c4d5e (6 cells); release 0.2 (1 cell)"),
    ({"data": {**PROVENANCE["data"], "variant": None, "fingerprint": "cd" * 32}},
     "cifar10 files: published [cdcdcdcd], jpeg75 [abababab]"),
    ({"versions": {"torch": "2.11.0"}}, "packages: torch 2.11.0, 2.15.0"),
    ({"attack": "fatbench 9"}, "PGD-20 attack: fatbench 0.1.0, fatbench 9"),
]  # fmt: skip


@pytest.mark.parametrize("change, said", MIXTURES, ids=[next(iter(change)) for change, _ in MIXTURES])
def test_mixed_provenance_is_said(tiny: Suite, change: dict[str, Any], said: str) -> None:
    """One cell of seven was made otherwise: every fact that differs has its own line, in every format."""
    plan = tiny.plan("paper")
    rows = rows_of(plan, VALUES)
    for row in rows:
        if row["cell"] == plan.cells[0].id and (row["stage"] != "train" or "attack" not in change):
            row["provenance"] = {**row["provenance"], **change}
    grids = build(tiny, plan, rows)
    assert said in [text for what, text in grids[0].notes if what == "MIXED"]
    plain = re.sub(r"\\([_#&%])", r"\1", re.sub(r"\s+", " ", report.render(grids, "markdown")))
    assert f"*MIXED*: {said}" in plain
    assert json.loads(report.render(grids, "json"))["tables"][0]["mixed"]


def test_training_on_other_machines_and_other_numbers_of_images_are_said(tiny: Suite) -> None:
    plan = tiny.plan("paper")
    rows = rows_of(plan, VALUES)
    next(row for row in rows if row["metric"] == "natural")["n"] = 500
    for row in rows:
        if row["stage"] == "train":
            row["provenance"] = {**row["provenance"], "precision": "bf16"}
    grid = build(tiny, plan, rows)[0]
    precision = "precision: fp32 (natural, PGD-20, AA of 7 cells); bf16 (training of 7 cells)"
    mixed = {text for what, text in grid.notes if what == "MIXED"}
    assert mixed == {precision, "natural test images of cifar10: 500, 10000"}
    images = "500 and 10000 for natural, 10000 for PGD-20, AA"
    assert notes(grid)["data"] == f"CIFAR-10, variant jpeg75: not the published files; test images: {images}"


# --- formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXTENSIONS)
@pytest.mark.parametrize("preset", ["paper", "smoke"])
def test_golden(tiny: Suite, preset: str, name: str) -> None:
    text = report.render(filled(tiny, preset=preset), name)
    file = GOLDEN / f"report_{preset}.{EXTENSIONS[name]}"
    if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", report.FORMATS)
def test_a_reduced_preset_is_labelled_in_every_format(tiny: Suite, name: str) -> None:
    grids = filled(tiny, preset="smoke")
    text = report.render(grids, name)
    label = "SMOKE PRESET - not comparable with published numbers"
    assert text.count(label) >= len(grids) == 2
    assert all(grid.title.endswith(f"[{label}]") for grid in grids)
    if name == "csv":
        assert all(row["label"] == label and row["preset"] == "smoke" for row in csv.DictReader(io.StringIO(text)))
    if name == "json":
        assert all(label in table["title"] for table in json.loads(text)["tables"])
    assert "SMOKE" not in report.render(build(tiny, tiny.plan("paper"), []), name)


def test_attacks_that_were_added_to_a_preset_have_columns(tiny: Suite, tmp_path: Path) -> None:
    """`run --attack cw,autoattack` on one cell of smoke, which has neither; T1 has a heading for AutoAttack alone."""
    plan = tiny.plan("smoke", attacks=("cw", "autoattack"))
    values = {("Non-IID", "FAT", 6): {**accuracies(0.58, 0.33, 0.3), "cw": 0.32}}
    with filled_store(tmp_path, plan, rows_of(plan, values)) as store:
        found = progress.with_stored_attacks(tiny, tiny.plan("smoke"), store)
        grid = report.build_tables(tiny, found, store)[0]
        assert progress.with_stored_attacks(tiny, plan, store) is plan
    assert [column.heading for column in grid.columns] == ["natural", "PGD-20", "AA", "CW"]
    assert [at(grid, "FAT", heading, "Non-IID").mean for heading in ("AA", "CW")] == [0.3, 0.32]
    assert not at(grid, "Uniform", "CW", "Non-IID").planned  # it was added to the other cell
    states = {(one.cell.key["method"], one.stages) for one in progress.cells_of(found, None)}
    assert {("FAT", 6), ("Uniform", 4)} <= states


def test_a_round_that_the_preset_does_not_reach_is_left_out_and_said(tiny: Suite, tmp_path: Path) -> None:
    """Smoke has one round, the column asks for the second. A table of such columns alone is left out, and said."""
    grid = build(tiny, tiny.plan("smoke"), [])[1]
    assert [column.heading for column in grid.columns] == ["drift", "client 1", "gap"]
    assert notes(grid)["left out"] == "drift 2: training ends after round 1 in this preset"
    assert notes(grid)["missing"] == "6 of 6 numbers have not been measured yet (--)"
    text = re.sub(r"values:\n +\{drift 2.*", 'values: {drift 2: "train:drift_post@2"}', SUITE)
    only = written(tmp_path, text.replace("    best: {drift 2: min, drift: min, gap: min}\n", ""))
    assert [grid.id for grid in build(only, only.plan("smoke"), [])] == ["T1"]
    said = "suite tiny, table T2 is left out of preset smoke: training ends after round 1 in this preset"
    assert report.left_out(only, only.plan("smoke")) == [said]
    assert report.left_out(only, only.plan("paper")) == []


def test_json_is_as_promised(paper: list[Sheet]) -> None:
    content = json.loads(report.render(paper, "json"))
    table = content["tables"][0]
    assert (content["schema_version"], table["id"], table["title"]) == (1, "T1", "Accuracy of FAT & co. (100%)")
    assert len(table["rows"]) == 5  # the excluded point is no row
    row, missing = (
        next(row for row in table["rows"] if row["key"] == {"method": method, "split": split})
        for method, split in (("FAT", "Non-IID"), (ODD, "IID"))
    )
    numbers = {key: row["measured"]["pgd20"][key] for key in ("mean", "std", "seeds", "n")}
    std = pytest.approx(statistics.stdev([0.33, 0.32]))
    assert numbers == {"mean": pytest.approx(0.325), "std": std, "seeds": [6, 7], "n": 10_000}
    assert [row["published"]["pgd20"][key] for key in ("mean", "std")] == pytest.approx([0.3258, 0.0001])
    assert row["doubts"] == []
    assert {"mean": None, "std": None, "seeds": [], "n": None}.items() <= missing["measured"]["pgd20"].items()
    drift = content["tables"][1]["rows"][0]["measured"]
    assert set(drift) == {"drift_post@2", "drift_post", "train_accuracy[1]", "gap:pgd20"}


def test_csv_has_a_line_a_number(paper: list[Sheet]) -> None:
    """Of 15 digits at most: 0.325 - 0.3258 is -0.0007999999999999674 in binary; JSON keeps it."""
    text = report.render(paper, "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 5 * 3 + 2 * 4
    line, missing = (
        next(r for r in rows if (r["method"], r["split"], r["metric"]) == (method, split, "natural"))
        for method, split in (("FAT", "Non-IID"), (ODD, "IID"))
    )
    assert [float(line[key]) for key in ("mean", "difference")] == pytest.approx([0.585, 0.0105])
    assert {
        "suite": "tiny", "table": "T1", "heading": "natural", "seeds": "6;7", "n": "10000", "preset": "paper",
        "variant": "jpeg75", "checkpoint": "last",
    }.items() <= line.items()  # fmt: skip
    assert (missing["mean"], missing["seeds"], missing["published"]) == ("", "", "0.6743")
    assert ",0.3258,0.0001,last,-0.0008," in text and not re.search(r"\d\.\d*00000\d|\d\.\d*99999", text)
    assert "-0.0007999999999999674" in report.render(paper, "json")


@pytest.mark.parametrize(
    "values, digits",
    [
        ([(2.0, None), (3.0, None)], 0), ([(2.0, 0.0), (30.0, 1.0)], 0),  # counts
        ([(3.0, 1.4142)], 3), ([(2.5, None), (30.0, None)], 2), ([(1.0, None), (0.5, None)], 3), ([(0.0, None)], 2),
        ([], 2), ([(0.25, None)], 4), ([(0.01, None)], 6), ([(1234.5, 0.5)], 0),
    ],
)  # fmt: skip
def test_counts_have_no_digits_after_the_point(values: list[tuple[float, float | None]], digits: int) -> None:
    assert number_format.decimals(*zip(*values, (None, None), strict=True)) == digits


def printable(grids: list[Sheet]) -> set[str]:
    """Every decimal that may stand in a table: means, spreads, published, differences, as printed."""
    allowed = set()
    groups = ((grid.columns, group) for grid in grids for row in grid.rows for group in row.values)
    for column, value in (pair for columns, group in groups for pair in zip(columns, group, strict=True)):
        scale = 100 if column.unit == "percent" else 1
        for x in (value.mean, value.std, value.published, value.published_std, value.difference):
            if x is not None and column.digits:
                allowed.add(f"{abs(scale * x):.{column.digits}f}")
    return allowed


class Cells(HTMLParser):
    """The text of all table cells of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.text = False, ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside |= tag == "td"

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.text += f" {data}"


def body_of(name: str, text: str) -> str:
    """The bodies of the tables alone."""
    if name == "latex":
        return " ".join(re.findall(r"\\midrule(.*?)\\bottomrule", text, re.DOTALL))
    if name == "markdown":
        return " ".join(line for line in text.splitlines() if line.startswith("|"))
    if name == "html":
        parser = Cells()
        parser.feed(text)
        return parser.text
    return " ".join(part.split("dim:")[0].split("suite:")[0] for part in re.split(r"\n(?=T\d  )", text))


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1))
def test_every_number_printed_is_in_the_data(tiny: Suite, seed: int) -> None:
    """Whatever was measured: no decimal stands in a table that no value rounds to, and no value is left out."""
    R = random.Random(seed)
    values = {
        (split, method, s): accuracies(R.random(), R.random(), R.random())
        for split in ("Non-IID", "IID") for method in ("FAT", ODD, "Uniform") for s in (6, 7) if R.random() < 0.7
    }  # fmt: skip
    grids = filled(tiny, values)
    allowed = printable(grids)
    for name in ("markdown", "latex", "html", "terminal"):
        found = set(re.findall(r"\d+\.\d+", body_of(name, report.render(grids, name))))
        assert found == allowed, name


AWKWARD = r"a_b & 5% #1 {x} ~ ^ \\ $ | <i> *b* `c` ε K̂ 漢"


# --- each format's own ways --------------------------------------------------------------------------------------


def test_escaping() -> None:
    assert latex.escape("a_b & 5% #1 {x} ~ ^ $") == r"a\_b \& 5\% \#1 \{x\} \textasciitilde{} \textasciicircum{} \$"
    assert latex.escape("\\ | < >") == r"\textbackslash{} \textbar{} \textless{} \textgreater{}"
    assert latex.escape("ε ≤ K̂ ± é 漢 ﬁ") == r"$\varepsilon$ $\leq$ $\hat{K}$ $\pm$ é 漢 fi"
    assert latex_text.printable("é 漢 ± ﬁ") == (r"é ? $\pm$ fi", ["漢"])
    assert markdown.escape("a_b | *c* <i> & #1") == r"a\_b \| \*c\* \<i\> &amp; \#1"


def awkward(tmp_path: Path) -> list[Sheet]:
    """The paper grids with every text replaced by one full of special characters."""
    text = without_published(SUITE).replace(ODD, "odd").replace("Accuracy of FAT & co. (100%)", "TITLE")
    return [
        replace(
            grid, name=AWKWARD, axes=[AWKWARD], entries=grid.entries.assign(**{f"axis:{AWKWARD}": AWKWARD}),
            notes=[*grid.notes, (AWKWARD, AWKWARD)], footnotes=[*grid.footnotes, ("†", AWKWARD)],
        )
        for grid in filled(written(tmp_path, text), preset="smoke")
    ]  # fmt: skip


def test_special_characters_in_every_format(tmp_path: Path) -> None:
    grids = awkward(tmp_path)
    page = report.render(grids, "html")
    assert "<i>" not in page and "&lt;i&gt;" in page
    assert AWKWARD in report.render(grids, "terminal").replace("\n", " ")
    assert AWKWARD in [row[AWKWARD] for row in csv.DictReader(io.StringIO(report.render(grids, "csv")))]
    cells = [line.replace(r"\|", "") for line in report.render(grids, "markdown").splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in cells[: len(grids[0].rows) + 2]}) == 1  # no label opened a column


needs_latex = pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
DOCUMENT = """\
\\documentclass{article}
\\usepackage[a4paper,margin=2.5cm]{geometry}
\\usepackage{booktabs,graphicx}
\\begin{document}
\\input{table.tex}
\\end{document}
"""
COLUMNS = DOCUMENT.replace(r"class{", r"class[twocolumn,letterpaper]{").replace(
    "a4paper,margin=2.5cm", "textwidth=487pt,textheight=650pt,columnsep=19pt"
)


def compiled(fragment: str, folder: Path, document: str = DOCUMENT) -> str:
    """What pdflatex says; the test fails where it does not compile."""
    (folder / "table.tex").write_text(fragment, encoding="utf-8")
    (folder / "main.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, said[-2000:]
    return said


@pytest.mark.nightly
@needs_latex
def test_latex_compiles_and_fits_also_with_special_characters(tiny: Suite, tmp_path: Path) -> None:
    said = compiled(report.render(filled(tiny, preset="smoke"), "latex"), tmp_path)
    assert "Overfull" not in said and "too large" not in said
    assert "Missing character" not in compiled(report.render(awkward(tmp_path), "latex"), tmp_path)


def big(folder: Path, rows: int, headings: int) -> list[Sheet]:
    """A table with so many rows and headings, each with a published number, in two groups."""
    text = re.sub(r'    "SFAT.*\n', "", SUITE[: SUITE.index("tables:")])
    more = "".join(f"    m{i}: {{algorithm: {{local: {{epochs: {i + 2}}}}}}}\n" for i in range(rows - 2))
    text = text.replace("    Uniform:", f"{more}    Uniform:")
    values, columns, stds = (
        ", ".join(f"column {i}: {what}" for i in range(headings))
        for what in ("pgd20", '"{split}_pgd20"', "niid_pgd20_std")
    )
    text += f"""\
tables:
  - id: big
    title: Big
    rows: [method]
    across: [split]
    values: {{{values}}}
    published: {{file: published/tiny.csv, select: last, match: {{dataset: CIFAR-10}},
      labels: {{Non-IID: niid, IID: iid}}, values: {{{columns}}}, std: {{{stds}}}}}
"""
    published = "\n".join(PUBLISHED.splitlines()[:2]) + "\n"  # one row, for every method
    found = written(folder, text, published)
    here = {(cell.key["split"], cell.key["method"]) for cell in found.plan("paper").cells}
    return filled(found, {(s, m, seed): accuracies(0.6, 0.3) for s, m in here for seed in (6, 7)})


@pytest.mark.parametrize(
    "rows, headings, width, floats, below",
    [
        (3, 1, "article", 1, False),
        (3, 2, "article", 1, False),
        (3, 5, "text", 1, True),
        (3, 5, "column", 1, True),
        (60, 2, "column", 9, True),
        (60, 2, "beamer", 15, False),
    ],
)
def test_latex_layouts(tmp_path: Path, rows: int, headings: int, width: str, floats: int, below: bool) -> None:
    """One float a table, but where a page is too short: then a caption and a label each; every number is there once."""
    (grid,) = big(tmp_path, rows, headings)
    text = report.render([grid], "latex", width=width)
    assert text.startswith(f"% width: {width}; needs \\usepackage{{booktabs,graphicx}}\n")
    kind = {"text": "table*", "beamer": "frame"}.get(width, "table")
    assert text.count(rf"\begin{{{kind}}}") == text.count(r"\begin{tabular}") == floats
    assert r"\quad{\scriptsize\,paper}" in text
    assert (r" & {\scriptsize 32.58} & {\scriptsize\,$\pm$0.01}" in text) != below
    assert (latex.TOO_MANY in text) == (headings == 5 and width == "column")
    labels = re.findall(r"\\label{(.*?)}", text)
    assert len(labels) == len(set(labels)) == (0 if width == "beamer" else floats) and "addtocounter" not in text
    body = body_of("latex", text)
    assert len(re.findall(r"\d\d\.\d\d", body)) > sum(v.mean is not None for v in grid.all())
    if shutil.which("pdflatex") and width != "beamer":
        said = compiled(text, tmp_path, DOCUMENT if width == "article" else COLUMNS)
        assert (latex.TOO_MANY in text or "Overfull" not in said) and "too large" not in said


def test_latex_says_which_letters_it_loses(paper: list[Sheet]) -> None:
    """What Unicode takes apart is printed in parts; a letter without parts is a question mark, named in the head."""
    letters = {"½": r"\,1/2", "1½": r"1\,1/2", "x²": "x$^{2}$", "10⁻³": "10$^{-}$$^{3}$", "ﬁ": "fi", "µ": r"$\mu$",
               "K‑1": "K-1", "‖ℓ‖": r"$\|$$\ell$$\|$", "é": "é", "№": "No"}  # fmt: skip
    for written, printed in letters.items():
        assert latex_text.printable(latex.escape(written)) == (printed, [])
    assert latex_text.printable(latex.escape("中 ệ")) == ("? e", ["中", "\u0323", "\u0302"])
    text = report.render([replace(paper[0], name="中文", notes=[("note", "文")] * 4)], "latex", "full")
    assert '% no glyph in pdfLaTeX, printed as "?": 中 文\n' in text and r"\caption{??." in text
    assert text.count(r"\textit{Note}: ?") == 3 and text.count("% Note: 文") == 1  # a comment keeps its letters
    assert text.index("% Note") < text.index(r"\end{table}")
    assert "no glyph" not in report.render(paper, "latex")


def test_latex_says_in_the_caption_what_no_column_needs(tiny: Suite) -> None:
    """A label that all rows share; a row and a heading without numbers. Sorted: the best first; no such column."""
    values = {("Non-IID", "FAT", 6): accuracies(0.4, 0.3), ("Non-IID", "Uniform", 6): accuracies(0.6, 0.5)}
    grid = filled(tiny, values, published=False)[0]
    text = report.render([grid], "latex")
    assert "Without numbers and left out: " in text and latex.escape(ODD) in text.split(r"\label")[0]
    assert latex.escape(ODD) not in body_of("latex", text)
    (order,) = sorted_by([grid], grid.columns[0].heading)
    assert [row.values[0][0].mean for row in order.rows][:2] == [0.6, 0.4]
    with pytest.raises(SpecError, match="no table has a column 'pgd2O'"):
        sorted_by([grid], "pgd2O")


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("headings", [1, 3, 6])
def test_terminal_fits_and_keeps_every_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, headings: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    grids = big(tmp_path, 3, headings)
    text = report.render(grids, "terminal")
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    planned = sum(value.planned for value in grids[0].all())
    assert text.count("30.00") == planned
    assert text.count("32.58 ±0.01") + text.count("37.43 ±0.01") == planned
    wide = Console(width=10_000)
    for block in terminal._layout(grids[0], width)[1]:
        assert block.width() == Measurement.get(wide, wide.options, block.table(0)).maximum


class Tags(HTMLParser):
    """Checks that every tag that is opened is closed, and notes what is fetched."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.fetched += [tag] * (tag == "script")
        self.fetched += [url for name, url in attrs if name in ("src", "href") and not url.startswith(("#", "data:,"))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_well_formed_page_that_fetches_nothing(paper: list[Sheet]) -> None:
    text = report.render(paper, "html")
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and tags.fetched == []
    assert "url(" not in text and "@import" not in text and "://" not in text
    assert "prefers-color-scheme: dark" in text


OTHER_ATTACK = "may be of another attack or other images: the stored pgd{} does not give the hash in its stage's name"


# --- from the database -------------------------------------------------------------------------------------------


def fill(store: Store, plan: Plan, rows: list[dict[str, Any]], record: Callable[[Cell], dict[str, Any]]) -> None:
    """Put rows into a database as the engine would: a run a stage, done."""
    for cell in plan.unique():
        store.add_cell(cell.id, cell.spec)
        mine = [row for row in rows if row["cell"] == cell.id]
        for stage in dict.fromkeys(row["stage"] for row in mine):
            here = [row for row in mine if row["stage"] == stage]
            attack = next((e.attack for e in cell.evaluations if stage.startswith(f"{e.id}")), None)
            by = {"preset": "paper", **here[0]["provenance"]}
            run = store.claim(cell.id, stage, suite="tiny", total=0, provenance=by, settings=attack)
            numbers = [Number(r["metric"], r["value"], r["round"], r["n"], r["client"]) for r in here]
            own = [(r["value"], r["n"]) for r in here if (r["metric"], r["client"]) == (parsed(stage).metric, -1)]
            whole = [(round(value * n), n) for value, n in own if n and value * n == pytest.approx(round(value * n))]
            bits = [(0, n, (int("1" * right or "0", 2) << -n % 8).to_bytes((n + 7) // 8)) for right, n in whole]
            done = bits[0][1] if bits else max(r["round"] for r in here)
            store.commit(run, numbers=numbers, round=done, record=record(cell), outcomes=bits[0] if bits else None)
            store.finish(run)


@contextmanager
def filled_store(folder: Path, plan: Plan, rows: list[dict[str, Any]], **record: Any) -> Iterator[Store]:
    with Store.open(str(folder / "test.db"), create=True) as store:
        fill(store, plan, rows, lambda cell: record)
        yield store


@pytest.mark.parametrize("select", ["last", "best-test"])
@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["record", "series"])
def test_the_database_gives_the_same_tables(tiny: Suite, tmp_path: Path, select: Any, recorded: bool) -> None:
    """What is read from a database is what `build` makes of the rows; the best round is recorded or searched."""
    plan = tiny.plan("paper")
    rows = rows_of(plan, VALUES)
    record = {"best-test": {"round": 2, "value": 0.4}} if recorded else {}
    with filled_store(tmp_path, plan, rows, **record) as store:
        found = report.build_tables(tiny, plan, store, select=select)
        images = {"outcomes": stored.outcomes([cell.id for cell in plan.unique()], store)}
        every = build(tiny, plan, store.measurements(), select, runs=store.runs(), **images)
        expected = build(tiny, plan, rows, select, **images)
        compared = measured_numbers(store, [cell.id for cell in plan.cells], select)
        framed = frame(store, plan).set_index(["cell", "stage", "metric", "client"])["value"]
        behind = [pair for grid in found for v in grid.all() for pair in zip(v.behind, v.values, strict=False)]
        for (cell, stage), value in behind:  # a table, `compare` and the frame have one number, also of the best round
            metric, evaluation, *_ = parsed(stage)
            assert compared[cell][evaluation].value == value == framed[cell, stage, metric, -1]
        assert behind
    for name in ("markdown", "json", "csv"):
        assert report.render(found, name) == report.render(expected, name)
        assert report.render(every, name) == report.render(expected, name)


def test_tables_and_compare_read_the_precision_of_most_cells(tiny: Suite, tmp_path: Path) -> None:
    """PGD-20 in bfloat16 in all cells, in float32 in all but two, with more numbers beside it: cells are counted."""
    plan = tiny.plan("paper")
    rows = rows_of(plan, VALUES, best=3)
    of_pgd20 = [row for row in rows if row["metric"] == "pgd20"]
    bf16 = [{**row, "stage": row["stage"].replace("@", ".bf16@"), "value": row["value"] - 0.02} for row in of_pgd20]
    beside = [{**row, "metric": name} for row in of_pgd20[2:] for name in ("chance", "seconds", "forward")]
    rows = [row for row in rows if row not in of_pgd20[:2]] + bf16 + beside
    with filled_store(tmp_path, plan, rows) as store:
        grids = report.build_tables(tiny, plan, store)
        compared = measured_numbers(store, [cell.id for cell in plan.cells], "last")
    behind = [pair for pair in (pair for grid in grids for v in grid.all() for pair in v.behind) if "pgd20" in pair[1]]
    assert behind and all(".bf16@" in stage for _, stage in behind)
    assert all(compared[cell][parsed(stage).evaluation].stage == stage for cell, stage in behind)


def test_a_run_that_failed_counts_where_it_left_numbers(tiny: Suite, tmp_path: Path) -> None:
    """Training failed on machine A after round 1 and went on on B; on C it failed at once. A and B made the numbers.

    Another cell failed and was not run again: it is named under the tables that it belongs to.
    """
    plan = tiny.plan("paper")
    mended, broken = plan.cells[:2]
    final = mended.evaluations[0]
    with Store.open(str(tmp_path / "test.db"), create=True) as store:
        for cell, device, rounds in ((mended, "A", [1]), (mended, "C", []), (mended, "B", [2, 3]), (broken, "B", [])):
            store.add_cell(cell.id, cell.spec)
            by = {"device": device, "commit": "abc0" * 10}
            run = store.claim(cell.id, "train", suite="tiny", total=3, provenance=by, retry_failed=True)
            for round in rounds:
                store.commit(run, numbers=[Number("train_loss", 1.0, round, 10)], round=round)
            if rounds == [2, 3]:
                store.finish(run)
            else:
                store.fail(run, "out of memory")
        run = store.claim(mended.id, final.stage(3), suite="tiny", total=0, provenance=by)
        store.finish(run, [Number(final.label, 0.5, 3, 10_000)])
        grid = report.build_tables(tiny, plan, store)[0]
    assert at(grid, "FAT", "natural", "Non-IID").mean == 0.5
    assert notes(grid)["MIXED"] == "device: B (training, natural of 1 cell); A (training of 1 cell)"
    assert notes(grid)["failed"] == f"1 cell: {broken.id} (see fatbench show CELL --log)"
    assert len(notes(grid)) == len(grid.notes)  # each of them once


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (lambda attack: attack, None),
        (lambda attack: {**attack, "eps": "1/25500000"}, OTHER_ATTACK.format("(eps=1/25500000, step=2/255, steps=20)")),
        (lambda attack: None, "the settings of its attack are not recorded"),
    ],
)
def test_paired_outcomes_are_read_from_the_database(
    tiny: Suite, tmp_path: Path, attack: Callable[[dict[str, Any]], Any], said: str | None
) -> None:
    """Marked where the settings that are stored are not those that the suite asks for.

    12 of 16 images against 4 of 16: more than 3 sigma if independent (0.5 > 0.46), but 8 of 8 discordant is
    8 < 3 sqrt(8) = 8.49 paired, so that there is no flag.
    """
    plan = tiny.plan("paper")
    cell = plan.cells[0]
    fgsm, pgd20 = (next(e for e in cell.evaluations if e.label == label) for label in ("fgsm", "pgd20"))
    assert doubts.violated((4 / 16, 16), (12 / 16, 16))
    with Store.open(str(tmp_path / "test.db"), create=True) as store:
        store.add_cell(cell.id, cell.spec)
        for evaluation, bits in ((fgsm, 0xF000), (pgd20, 0xFFF0)):
            weak = evaluation.attack if evaluation.label == "fgsm" else attack(evaluation.attack)
            stage = evaluation.stage(3)
            run = store.claim(cell.id, stage, suite="tiny", total=16, provenance={}, settings=weak)
            store.commit(run, round=16, outcomes=(0, 16, bits.to_bytes(2, "big")))
            store.finish(run, [Number(evaluation.label, bits.bit_count() / 16, 3, 16)])
        grid = report.build_tables(tiny, plan, store)[0]
    value = at(grid, "FAT", "PGD-20", "Non-IID")
    assert (value.mean, value.doubts) == (0.75, () if said is None else (said,))


def test_the_preset_with_most_cells_is_shown(tiny: Suite, tmp_path: Path) -> None:
    """A pilot of one cell in the first preset hides nothing; of as many cells the first is shown."""
    paper, smoke = tiny.plan("paper").unique(), tiny.plan("smoke").unique()
    assert 1 < len(smoke) < len(paper)
    with Store.open(str(tmp_path / "test.db"), create=True) as store:
        for stored_cells, shown in ((paper[:1], "paper"), (smoke, "smoke"), (paper, "paper")):
            for cell in stored_cells:
                store.add_cell(cell.id, cell.spec)
            assert progress.preset_run(tiny, store) == shown


def test_rows_stand_in_blocks_of_the_first_axis_of_rows(tmp_path: Path) -> None:
    """The suite's axes are split, then method: of a table by method, then split, every method's rows stand together."""
    text = without_published(SUITE).replace("rows: [method]\n    across: [split]\n", "rows: [method, split]\n")
    grid = build(suite := written(tmp_path, text), suite.plan("paper"), [])[0]
    methods = [row.key["method"] for row in grid.rows]
    assert methods == sorted(methods, key=methods.index) and len({*methods}) < len(methods)


def test_what_was_computed_with_other_images_says_so_in_every_view(tiny: Suite, tmp_path: Path) -> None:
    """The newest run has read other images: no image is hashed for that, and an unknown fingerprint is no change."""
    plan = tiny.plan("paper")
    known = "computed with other images or labels [abababab], now [cdcdcdcd]"
    with filled_store(tmp_path, plan, rows_of(plan, VALUES)) as store:
        before = [v for grid in report.build_tables(tiny, plan, store) for v in grid.all()]
        assert not any("changed" in v.codes for v in before)
        keys = {key for cell in plan.cells for key in data_keys(cell.spec).values()}
        store.record_data(dict.fromkeys(keys, "cd" * 32))
        grids = report.build_tables(tiny, plan, store)
        numbers = frame(store, plan)
    measured_entries = [v for grid in grids for v in grid.all() if v.mean is not None]
    assert measured_entries and all(known in v.doubts for v in measured_entries if v.behind)
    assert all("changed" in v.codes for grid in grids[:1] for v in grid.all() if v.mean is not None)
    for name in ("markdown", "csv", "json", "latex", "html", "terminal"):
        text = report.render(grids, name).replace("{}", "").replace("\n", " ")
        assert "other images or labels" in " ".join(text.split()), name
    accuracies_of = numbers[numbers["stage"] != "train"]
    assert len(accuracies_of) and accuracies_of["doubts"].str.contains("now [cdcdcdcd]", regex=False).all()


def test_numbers_of_a_database_that_cannot_be_are_marked(tiny: Suite, tmp_path: Path) -> None:
    """Nobody imported them: no outcomes, 0.999 of 40 images, a device without a commit."""
    plan = tiny.plan("paper")
    cell = plan.cells[0]
    evaluations = [next(e for e in cell.evaluations if e.label == label) for label in ("fgsm", "pgd20")]
    none, never = "no outcome of each image is stored", "no accuracy that 40 images can give"
    tries: dict[Any, tuple[str, ...]] = {  # value, outcomes, device, commit -> doubts
        (0.999, False, None, None): (none, never),
        (0.5, False, None, None): (none,),
        (0.5, True, "cpu", None): ("the commit of its code is not recorded",),
        (0.5, True, "cpu", "abc0" * 10): (),
        (0.5, True, None, None): (),
    }
    for number, ((value, outcomes, device, commit), expected) in enumerate(tries.items()):
        with Store.open(str(tmp_path / f"{number}.db"), create=True) as store:
            store.add_cell(cell.id, cell.spec)
            for one in evaluations:
                by = {"device": device, "commit": commit}
                run = store.claim(cell.id, one.stage(3), suite="tiny", total=40, provenance=by, settings=one.attack)
                store.commit(run, round=40, outcomes=(0, 40, b"\xf0" * 5) if outcomes else None)
                store.finish(run, [Number(one.label, value, 3, 40)])
            shown = at(report.build_tables(tiny, plan, store)[0], "FAT", "PGD-20", "Non-IID")
        assert shown.doubts == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("pgd20", Source("pgd20", "evaluation", "pgd20", -1, None)),
        ("gap:pgd20", Source("gap:pgd20", "gap", "pgd20", -1, None)),
        ("train:drift_post@10", Source("train:drift_post@10", "train", "drift_post", -1, 10)),
        ("train:train_accuracy[0]", Source("train:train_accuracy[0]", "train", "train_accuracy", 0, None)),
        ("train:weight[*]", Source("train:weight[*]", "train", "weight", EVERY, None)),
        ("all:pgd20+cw", Source("all:pgd20+cw", "all", "pgd20+cw", -1, None)),
        ("artifact:adfl_cross", Source("artifact:adfl_cross", "artifact", "adfl_cross", -1, None)),
    ],
)
def test_source_syntax(text: str, expected: Source) -> None:
    assert Source.parse(text) == expected


def test_the_settings_of_every_attack_stand_under_the_table(tmp_path: Path) -> None:
    """Where points of the grid differ in an attack, both are named; where not: what `paper` says."""
    strong = "  overrides: [{when: {method: FAT}, set: {attacks: {pgd20: {eps: 4/255, start: none}}}}]\n"
    suite = written(tmp_path, SUITE.replace("\nevaluate:\n", f"\nevaluate:\n{strong}"))
    (grid, _) = build(suite, suite.plan("paper"), [])
    weak = "pgd(eps=4/255, step=2/255, steps=20, start=none)"
    assert notes(grid)["attacks"] == (
        f"PGD-20 = {weak} or pgd(eps=8/255, step=2/255, steps=20); AA = autoattack(eps=8/255)"
    )
    assert [spec["eps"] for spec in grid.attacks["pgd20"]] == ["4/255", "8/255"]


def test_footers_do_not_tell_in_which_order_files_were_imported() -> None:
    runs = [
        (cell, table_facts.origin({"device": device, "commit": commit, "attack": attack, "versions": {"torch": torch},
                                  "data": {"name": "digits", "variant": None, "fingerprint": commit}}))
        for cell, device, commit, attack, torch in (
            ("a", "cpu", "b2", "z 2", "2.9"), ("b", "cuda", "a1", "a 1", "2.10"), ("c", "cuda", "c3", "a 1", "2.10"),
        )
    ]  # fmt: skip
    notes = []
    for order in (runs, runs[::-1]):
        facts = table_facts.Facts((cell, "digits", "pgd20", 10, "pgd20-1@1", origin) for cell, origin in order)
        notes.append([*facts.notes()])
    assert notes[0] == notes[1]
    assert dict(notes[0])["machine"].startswith("2 devices") and facts.mixed()["device"].startswith("cuda (")


def test_what_no_paper_prints_is_called_a_formula_in_every_format(tmp_path: Path) -> None:
    """The expected number of updates of Eq. 13: computed, for the paper prints the wrong exponent and no numbers."""
    suite = files.load("april-learning")
    plan = suite.plan("paper", where="start=pretrained")
    grids = list(report.build_tables(suite.with_tables(["updates"]), plan, None))
    [row] = [row for row in grids[0].rows if row.key["defence"] == "R = 0.8"]
    assert row.values[0][0].published == pytest.approx(1.43e-05) and row.values[0][0].formula
    assert [what for what, _ in grids[0].notes if what in ("published", "formula")] == ["formula"]
    printed = [markdown.render(grids), latex.render(grids), html.fragment(grids), terminal.render(grids)]
    for text in printed:
        assert "formula" in text.lower() and not re.search(r"pub\.|[Pp]aper: |the paper's number|published:", text)
    lines = [line for line in csv.DictReader(io.StringIO(records.render_csv(grids))) if line["defence"] == "R = 0.8"]
    assert [line["published"] for line in lines] == [""] * 5
    assert [line["formula"] for line in lines] == ["1.43e-05", "", "", "0.01887", "6.7232"]
    found = json.loads(records.render_json(grids))["tables"][0]["rows"]
    assert not any(one["published"] for one in found)
    [formula] = [one["formula"] for one in found if one["key"]["defence"] == "R = 0.8"]
    assert formula["updated_rounds"] == 6.7232


GAINS = """\
  - id: G
    title: What a method gains
    where: {split: Non-IID}
    rows: [method]
    values: {natural: natural, gain: {source: natural, minus: {method: FAT}}}
    published:
      file: published/gains.csv
      select: last
      rows: {method: who, series: what}
      values: {gain: low}
      to: {gain: high}
"""
UNIFORM = {  # 0.02 and 0.04 above FAT of the same seed
    ("Non-IID", "FAT", 6): {"natural": 0.50}, ("Non-IID", "FAT", 7): {"natural": 0.60},
    ("Non-IID", "Uniform", 6): {"natural": 0.52}, ("Non-IID", "Uniform", 7): {"natural": 0.64},
}  # fmt: skip


def gains(tmp_path: Path, values: Values, where: str | None = None, text: str = "") -> Sheet:
    (tmp_path / "published").mkdir(exist_ok=True)
    (tmp_path / "published" / "gains.csv").write_text("who,what,low,high\nUniform,gain,1.5,2\nUniform,natural,9,9\n")
    suite = written(tmp_path, SUITE + (text or GAINS))
    plan = suite.plan("paper", where=where)
    return build(suite, plan, rows_of(plan, values))[-1]


def test_a_column_of_differences_with_the_interval_of_their_mean(tmp_path: Path) -> None:
    """Mean 0.03, t(1) = 12.7062, standard deviation 0.0141421 and half of 10,000 images: from -0.0975 to 0.1575. The
    baseline's row has none.
    """
    grid = gains(tmp_path, UNIFORM)
    value = at(grid, "Uniform", "gain")
    assert (value.mean, *value.values) == pytest.approx((0.03, 0.02, 0.04))
    assert value.interval == pytest.approx((0.03 - 0.127511, 0.03 + 0.127511), abs=1e-6)
    assert not at(grid, "FAT", "gain").planned and at(grid, "FAT", "natural").mean == pytest.approx(0.55)
    assert (value.published, value.published_most) == pytest.approx((0.015, 0.02)) and value.difference is None
    assert value.rank == "" and at(grid, "Uniform", "natural").published is None
    assert notes(grid)["differences"] == (
        "gain: minus method FAT, seed by seed; in brackets the 95 % interval of the mean, Student's t"
    )
    said = "+3.00 (-9.75 to +15.75) | +1.50 to +2.00"
    assert said in markdown.render([grid])
    for text in (latex.render([grid]), html.fragment([grid]), terminal.render([grid])):
        assert re.search(r"\+\$?3\.00", text) and "15.75" in text
    [line] = [one for one in csv.DictReader(io.StringIO(records.render_csv([grid]))) if one["mean"] == "0.03"]
    assert (line["heading"], line["metric"], line["published_most"]) == ("gain", "natural minus FAT", "0.02")
    assert (float(line["low"]), float(line["high"])) == pytest.approx((-0.097511, 0.157511), abs=1e-6)
    rows = {one["key"]["method"]: one for one in json.loads(records.render_json([grid]))["tables"][0]["rows"]}
    assert set(rows["Uniform"]["measured"]) == {"natural", "natural minus FAT"}


def test_a_column_of_shares_lies_between_two_labels(tmp_path: Path) -> None:
    """FAT is 0 %, Uniform 100 %, SFAT a quarter of the way; where one of the three lacks a seed the others' count."""
    values = {**UNIFORM, ("Non-IID", ODD, 6): {"natural": 0.505}, ("Non-IID", ODD, 7): {"natural": 0.61}}
    shares = GAINS.partition("    published")[0].replace("minus: {method: FAT}", "share: {method: [FAT, Uniform]}")
    for rows, seeds in ((values, (6, 7)), ({k: v for k, v in values.items() if k != ("Non-IID", "FAT", 7)}, (6,))):
        grid = gains(tmp_path, rows, text=shares)
        found = at(grid, ODD, "gain")
        assert (found.mean, found.seeds) == (pytest.approx(0.25), seeds)
        assert at(grid, "FAT", "gain").mean == 0 and at(grid, "Uniform", "gain").mean == 1
        assert "from FAT (0 %) to Uniform (100 %)" in notes(grid)["shares"]
        line = next(line for line in markdown.render([grid]).splitlines() if line.startswith("| SFAT"))
        assert line.split("|")[3].split()[0] == "25.00"


def test_differences_need_the_same_seed_and_a_baseline(tmp_path: Path) -> None:
    one_seed = {key: value for key, value in UNIFORM.items() if key != ("Non-IID", "FAT", 7)}
    value = at(gains(tmp_path, one_seed), "Uniform", "gain")
    assert (value.mean, value.interval, value.seeds, value.wanted) == (pytest.approx(0.02), None, (6,), 2)
    assert not at(gains(tmp_path, UNIFORM, "method=Uniform"), "Uniform", "gain").planned
    agree = at(gains(tmp_path, {**UNIFORM, ("Non-IID", "Uniform", 7): {"natural": 0.62}}), "Uniform", "gain")
    half = 12.7062 * 0.00005 / 2**0.5
    assert agree.interval == pytest.approx((0.02 - half, 0.02 + half), abs=1e-7)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("minus: {method: FAT}", "minus: {methd: FAT}", r"minus: .*no axis is named 'methd'|no axis is named 'methd'"),
        ("minus: {method: FAT}", "minus: {method: [FAT, Uniform]}", "method: expected one label, got FAT, Uniform"),
        ("minus: {method: FAT}", "share: {method: FAT}", "expected two labels of one axis, from and to"),
        ("minus: {method: FAT}", "minus: {method: FAT}, share: {method: [FAT, Uniform]}", "either a difference"),
    ],
)
def test_a_column_of_differences_names_one_baseline(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        gains(tmp_path, {}, text=GAINS.replace(old, new))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (100 * 0.98125, 2, "98.13"),  # a tie that a float holds exactly, which format() rounds to even
        (72.64999999999999, 1, "72.7"),  # 72.65 as a mean of five numbers has it
        (72.649, 1, "72.6"),
        (-0.125, 2, "-0.13"),
        (-0.0001, 2, "0.00"),
        (1e100, 2, f"{1e100:.2f}"),
        (math.nan, 2, "nan"),
    ],
)
def test_numbers_are_rounded_half_up(value: float, digits: int, text: str) -> None:
    assert number_format.rounded(value, digits) == text


@pytest.mark.parametrize(
    ("value", "published", "number", "difference", "direction"),
    [
        (50_272_000.0, 1_272_000.0, "50,272,000", "+49,000,000", "worse"),
        (9_999.7, None, "10,000", "", ""),  # it is what is printed that counts
        (9_999.0, None, "9999", "", ""),  # four digits are read without help
        (-12_345.6, -12_345.8, "-12,346", "+0", ""),
        (math.inf, None, "inf", "", ""),
    ],
)
def test_long_counts_are_printed_in_thousands(
    value: float, published: float | None, number: str, difference: str, direction: str
) -> None:
    """Bytes, gradient steps and passes: nobody counts the digits of 50272000."""
    column = Column("bytes up", Source.parse("train:bytes_up"), "bytes_up", best="min", unit="plain", digits=0)
    entry = number_format.with_texts(measured.entries({"mean": value, "published": published}), [column]).iloc[0]
    assert (entry.number, entry.delta, entry.direction) == (number, difference, direction)
