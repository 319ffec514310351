"""Which numbers of a table are bold or marked: by hand on small outcomes, and the same in every format."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measured
import numpy as np
import pytest

from fatbench import report
from fatbench.report.numbers import statistics
from fatbench.report.site import drilldown
from fatbench.report.tables import significance
from fatbench.report.tables.sheet import as_tuples
from fatbench.store.stages import Store
from fatbench.suite import files

RESULTS = Path(__file__).parent.parent / "results"
N = 500


def first(right: int, n: int = N) -> tuple[int, int]:
    """Outcomes of n images of which the first `right` are right."""
    return ((1 << right) - 1) << (n - right), n


def group(rights: list[list[int]], n: int = N) -> list[dict[str, Any]]:
    """An entry a method, with so many right images at each seed, and the outcomes behind it."""
    return [
        {
            "mean": float(np.mean(row)) / n,
            "seeds": tuple(range(len(row))),
            "n": (n,),
            "behind": tuple((f"m{m}-{s}", "e") for s in range(len(row))),
            "outcomes": tuple(first(right, n) for right in row),
        }
        for m, row in enumerate(rights)
    ]


def decided(*groups: list[dict[str, Any]], best: str = "max") -> tuple[list[list[str]], list[tuple[str, str]]]:
    """Of each entry "B" if it is bold, else its marks; and the footnotes."""
    marked, footnotes = marked_of(*groups, best=best)
    assert all((entry.rank in ("worse", "second")) == ("↓" in entry.marks) for entries in marked for entry in entries)
    shown = [["B" if entry.rank == "best" else "".join(entry.marks) for entry in entries] for entries in marked]
    return shown, footnotes


def marked_of(*groups: list[dict[str, Any]], best: str = "max", **how: Any) -> tuple[list[list[Any]], Any]:
    """The entries of each group with rank and marks; and the footnotes."""
    ends = [*itertools.accumulate(map(len, groups))]
    places = [(range(end - len(group), end), best) for end, group in zip(ends, groups, strict=True)]
    entries, footnotes = significance.mark(measured.entries(*itertools.chain(*groups)), places, "column", **how)
    rows = as_tuples(entries)
    return [[rows[i] for i in at] for at, _ in places], footnotes


CLEAR, CLOSE = [400, 405, 398], [395, 402, 401]
LOW = [100, 104, 99]


def test_bold_only_where_all_others_are_significantly_below() -> None:
    three = group([LOW, CLEAR, [200, 206, 197]])
    shown, notes = decided(three)
    assert shown == [["↓", "B", "↓"]]
    assert [entry.rank for entry in marked_of(three)[0][0]] == ["worse", "best", "second"]
    assert decided(group([LOW, CLEAR, CLOSE])) == ([["↓", "", ""]], notes)
    ((mark, said),) = notes
    assert mark == "↓" and "worse than the best of the column (p < 0.05, Holm over its K - 1" in said
    assert decided(group([LOW, CLEAR, CLOSE]), best="min") == ([["B", "↓", "↓"]], notes)
    assert decided(group([LOW, CLEAR, CLOSE]), best="none") == ([["", "", ""]], [])


def test_numbers_of_other_images_or_labels_are_not_tested() -> None:
    (entries,), notes = marked_of(group([LOW, CLEAR]), images=lambda cell, stage: {cell.partition("-")[0]})
    assert [entry.rank for entry in entries] == ["", ""] and entries[1].marks == ("°",)
    assert notes == [("°", "the best of its column, not tested: other images or labels")]


def test_numbers_of_two_versions_of_what_a_function_reads_are_not_tested() -> None:
    """Half a table was computed again after an edit: the best of it is not marked."""
    entries = group([LOW, CLEAR])
    answered = {place: {"read": {"cfg.json of mine.py": place[0][:2] * 16}} for e in entries for place in e["behind"]}
    (marked,), notes = marked_of(entries, answered=answered)
    assert [entry.rank for entry in marked] == ["", ""] and marked[1].marks == ("°",)
    assert notes == [("°", "the best of its column, not tested: another version of a function or of what it reads")]
    same = {place: {"read": {"cfg.json of mine.py": "aa"}} for place in answered}
    assert [entry.rank for entry in marked_of(entries, answered=same)[0][0]] == ["worse", "best"]


def test_equal_numbers() -> None:
    """Two of the highest are never bold; where all are the same there is no best, and of one number neither. Such a
    column does not end the table.
    """
    assert decided(group([LOW, CLEAR, CLEAR]))[0] == [["↓", "", ""]]
    assert decided(group([CLEAR, CLEAR])) == ([["", ""]], [])
    assert decided(group([CLEAR])) == ([[""]], [])
    equal, lone = group([[400, 400, 400]] * 2), group([[400, 400, 400]])
    assert decided(equal, lone, group([CLEAR, LOW]))[0] == [["", ""], [""], ["B", "↓"]]


def test_holm_is_within_a_column() -> None:
    """p of one comparison is near 0.03: alone it is significant, with a second like it no longer. What other columns
    hold changes nothing.
    """
    best, other = [400, 400, 400], [373, 380, 365]
    test = statistics.seeds_and_images(*([first(right) for right in rights] for rights in (best, other)))
    assert test is not None and 0.025 < test.p < 0.05
    assert decided(group([best, other]))[0] == [["B", "↓"]]
    assert decided(group([best, other, other])) == ([["", "", ""]], [])
    assert decided(*(group([best, other]) for _ in range(8)))[0] == [["B", "↓"]] * 8


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("one seed", {"seeds": (0,)}),
        ("other seeds", {"seeds": (0, 1, 5)}),
        ("other test images", {"n": (N, 2 * N)}),
        ("no per-image outcomes", {"behind": ()}),
        ("attacked in another precision", {"behind": (("low", "pgd20-0a1b2c3d.bf16@3"),) * 3}),
        ("no per-image outcomes", {"outcomes": ((0, 0),) * 3}),
        ("no per-image outcomes", {"outcomes": (first(9, N - 1),) * 3}),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_number_that_cannot_be_tested_stands_outside(why: str, change: dict[str, Any], place: int) -> None:
    """Of three methods far apart one cannot be tested, be it the best: it carries °, the others their marks."""
    entries = group([CLEAR, [300, 303, 299], LOW])
    entries[place] |= change
    shown, notes = decided(entries)
    rest = ["B", "↓"]
    assert shown == [[*rest[:place], "°", *rest[place:]]]
    assert notes[-1] == ("°", f"not tested and compared with none (1 of 3 numbers): {why}") and notes[0][0] == "↓"
    two = group([CLEAR, LOW])  # of two there are no others
    two[1] |= change
    assert decided(two) == ([["°", ""]], [("°", f"the best of its column, not tested: {why}")])


def test_what_is_tested_is_the_most_numbers_of_one_kind() -> None:
    """Two own rows of two seeds take no mark from three of three; of as many rows those with more seeds count."""
    entries, own = group([CLEAR, LOW, [200, 206, 197]]), group([[450, 452], [440, 441]])
    shown, notes = decided([*entries, *own])
    assert shown == [["B", "↓", "↓", "°", "°"]] and "(2 of 5 numbers): other seeds" in notes[-1][1]
    assert decided([*own, *entries[:2]])[0] == [["°", "°", "B", "↓"]]


def test_the_level_of_the_others_is_unchanged() -> None:
    """Equal methods of which one lacks a seed, highest of all at random: the others have the marks that they have
    without it, and one of their columns has any in at most 5 %.
    """
    draw = np.random.default_rng(7)
    marked = 0
    for _ in range(200):
        rows = [[int(right) for right in draw.binomial(N, draw.normal(0.5, 0.03, 3).clip(0, 1))] for _ in range(4)]
        rows[draw.integers(4)].pop()
        entries = group(rows)
        (shown,), _ = decided(entries)
        (lacking,) = (i for i, entry in enumerate(entries) if len(entry["seeds"]) == 2)
        (alone,), _ = decided([*entries[:lacking], *entries[lacking + 1 :]])
        assert shown == [*alone[:lacking], "°", *alone[lacking:]]
        marked += any(alone)
    assert marked <= 18  # P(more | 5 %) is below 0.5 %


def test_values_over_no_image_are_not_tested() -> None:
    assert decided([{**entry, "n": (0,)} for entry in group([CLEAR, LOW])])[0] == [["°", ""]]
    one_image = group([[1, 1], [0, 0]], n=1)
    assert decided(one_image) == ([["°", ""]], [("°", "the best of its column, not tested: one image")])


def test_without_outcomes_or_with_numbers_missing() -> None:
    assert decided([{**entry, "behind": (), "outcomes": ()} for entry in group([CLEAR, LOW])])[0] == [["°", ""]]
    entries = group([CLEAR, LOW, CLOSE])
    entries[2]["mean"] = None  # not measured yet
    assert decided(entries)[0] == [["B", "↓", ""]]


def test_several_models_judge_an_image() -> None:
    """Two models a seed on one side: outcomes of both, one after the other."""
    entries = group([CLEAR, LOW])
    entries[0]["outcomes"] = tuple(((one << n) | one, 2 * n) for one, n in map(first, CLEAR))
    assert decided(entries)[0] == [["B", "↓"]]


# --- the same decision in every format ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fashion(committed: Mapping[str, Store]) -> Store:
    """Five seeds of every method; under natural some are clearly below."""
    return committed["sfat-jpeg75-cpu"]


SUITE = """\
name: two
title: t
description: d
extends: sfat-audit-jpeg75
tables:
  - {id: audit, title: t, rows: [method], where: {method: [FAT, FAT shrunk]}, values: {natural: natural,
     AA: autoattack}, ties: TIES}
"""


def grids(store: Store, folder: Path, ties: str = "true") -> list[Any]:
    (folder / "two.yaml").write_text(SUITE.replace("TIES", ties))
    suite = files.load(str(folder / "two.yaml"))
    return report.build_tables(suite, suite.plan("cpu"), store)


def test_what_is_bold_in_one_format_is_bold_in_all(fashion: Store, tmp_path: Path, monkeypatch: Any) -> None:
    """FAT is significantly above FAT shrunk in natural accuracy (36.36, 27.51), not under AutoAttack."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160"}.items():
        monkeypatch.setenv(name, value)
    found = grids(fashion, tmp_path)
    bold = {
        "markdown": r"\*\*(\d[\d.]*)\*\*", "latex": r"\\textbf\{(\d[\d.]*)\}", "terminal": r"\x1b\[1m(\d[\d.]*)\x1b",
        "html": r'class="best">(\d[\d.]*)<',
    }  # fmt: skip
    for format, pattern in bold.items():
        text = report.render(found, format)
        assert re.findall(pattern, text) == ["36.36"], format
        assert ("downarrow" if format == "latex" else "↓") in text
        assert "underline" not in text.split("</style>")[-1] and "<u>" not in text, format
    assert dict(found[0].notes)["marks"] == "bold: significantly better than every other measured number of a column"
    assert "Bold: significantly better than all others." in report.render(found, "latex")
    drawers = [one for point in drilldown.points_of(found).values() for _, _, one in point["shown"]]
    assert [one.number for one in drawers if one.rank == "best"] == ["36.36"]
    assert [one.marks for one in drawers] == [(), (), ("↓",), ()]


def test_a_table_that_asks_for_no_marks_has_neither(fashion: Store, tmp_path: Path) -> None:
    (grid,) = grids(fashion, tmp_path, "false")
    assert not any(value.rank or value.marks for value in grid.all()) and grid.footnotes == []
    assert "marks" not in dict(grid.notes)


def test_accuracies_by_class_are_not_tested(committed: Mapping[str, Store]) -> None:
    """AdFL's table by class: training logs numbers and no outcomes, so that nothing is bold."""
    suite = files.load("adfl-mnist")
    tables = report.build_tables(suite, suite.plan("jpeg-cpu"), committed["adfl-mnist-jpeg-cpu"])
    (by_class,) = (grid for grid in tables if grid.id == "classes")
    assert not any(value.rank for value in by_class.all())
    assert any("°" in value.marks for value in by_class.all())
    assert by_class.footnotes[-1] == ("°", "the best of its comparison group, not tested: no per-image outcomes")


def test_the_best_has_as_many_seeds_as_the_others() -> None:
    """One lucky seed above all is no best: what stands highest of those with every seed is."""
    entries = group([[490], CLEAR, LOW])
    assert entries[0]["mean"] > max(entry["mean"] for entry in entries[1:])
    shown, notes = decided(entries)
    assert shown == [["°", "B", "↓"]] and "one seed" in notes[-1][1]
