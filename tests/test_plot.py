"""`fatbench plot` without a figure of the suite: --x, --metric, --by, cells, several suites. Synthetic numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_figures import EVALUATED, SUITE, fill, row

from fatbench import report
from fatbench.report.figures import adhoc_figures, heat_map, plots, series
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.files import Suite

ATTACKS = """\
evaluate:
  attacks:
    natural: natural
    pgd1: {name: pgd, eps: 8/255, step: 4/255, steps: 1}
    cw: {name: cw, eps: 8/255, step: 1/255}
    pgd: {name: pgd, eps: [8/255, 2/255], step: 1/255, steps: 2}
"""
MONITOR = "  monitor: {name: pgd, eps: 8/255, step: 4/255, steps: 1}\naxes:"
DB = ("--db", "results/fatbench.db")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two suites, drawn and other, with numbers of every kind: seed 1 has 0.5 of everything, seed 2 0.7."""
    folder = tmp_path_factory.mktemp("plot")
    with contextlib.chdir(folder):
        _fill()
    return folder


@pytest.fixture
def suite(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """The first of the two suites, in their folder."""
    monkeypatch.chdir(prepared)
    return files.load("drawn.yaml")


def _fill() -> None:
    text = SUITE.replace("evaluate: {attacks: {natural: natural}}\n", ATTACKS).replace("axes:", MONITOR, 1) + EVALUATED
    Path("drawn.yaml").write_text(text)
    Path("other.yaml").write_text(text.replace("name: drawn", "name: other").replace("lr: 0.05", "lr: 0.06"))
    with Store.open("results/fatbench.db", create=True) as store:
        for name in ("drawn.yaml", "other.yaml"):
            plan = files.load(name).plan()
            rows: list[dict[str, Any]] = []
            for one in plan.cells:
                value = 0.3 + 0.2 * one.spec["seed"]
                for metric in ("natural", "monitor", "train_loss", "natural_loss"):
                    rows += [row(one, metric, round, value) for round in (1, 2)]
                rows += [row(one, "weight", round, 0.5, client) for round in (1, 2) for client in (0, 1)]
                rows += [row(one, e.label, 2, value) | {"stage": e.stage(2)} for e in one.evaluations]
            fill(store, plan, rows)


def drawn_of(suite: Suite, x: str | None, y: list[str], by: list[str]) -> series.Plot:
    plan = suite.plan()
    with Store.open("results/fatbench.db") as store:
        [plot] = series.drawn_from(suite, plan, store, [adhoc_figures.figure(suite, plan, store, x, y, by)], "last")
    return plot


def test_numbers_over_the_rounds(suite: Suite) -> None:
    """pgd1 is what the monitor measures, so it has rounds; the axis that is not named becomes panels."""
    plot = drawn_of(suite, "round", ["pgd1"], ["method"])
    assert (plot.figure.kind, plot.figure.panels, plot.figure.series) == ("lines", ["split"], {"pgd1": "train:monitor"})
    assert [len(panel.lines) for panel in plot.panels] == [2, 2]
    points = plot.panels[0].lines[0].points
    assert [(point.round, point.mean) for point in points] == [(1, pytest.approx(0.6)), (2, pytest.approx(0.6))]
    assert dict(plot.notes)["note"] == "pgd1: measured by the monitor during training, with the same attack"


def test_bars_over_an_axis_and_curves_over_radii(suite: Suite) -> None:
    bars = drawn_of(suite, "method", ["cw", "train_loss"], ["split"])
    assert (bars.figure.kind, bars.figure.lines, bars.figure.panels) == ("bars", ["method", "split"], ["series"])
    assert bars.figure.series == {"cw": "cw", "train_loss": "train:train_loss"}
    assert bars.panels[0].lines[0].points[0].mean == pytest.approx(0.6)
    curve = drawn_of(suite, "eps", [], ["method"])
    assert [point.radius for point in curve.panels[0].lines[0].points] == ["2/255", "8/255"]
    clients = drawn_of(suite, "client", [], ["method"])
    assert clients.figure.series == {"weight": "train:weight[*]"}
    assert [one.index for one in clients.panels[0].lines] == [0, 1, 0, 1]
    assert drawn_of(suite, None, [], []).figure.series == {"natural": "train:natural", "monitor": "train:monitor"}


def test_several_suites_are_one_image(suite: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    """Panels that are alike say their suite; those of one suite alone do not."""
    args = ("--x", "round", "--metric", "natural", "--by", "method", "--format", "png", *DB)
    code, out, err = run("plot", "drawn.yaml", "other.yaml", *args)
    assert (code, out, err) == (0, "results/figures/drawn+other-natural-over-round-by-method.png\n", "")
    other = files.load("other.yaml")
    with Store.open("results/fatbench.db") as store:
        plots = [p for s in (suite, other) for p in report.build_figures(s, s.plan(), store, "curves")]
    [plot] = series.merge_plots(plots)
    expected = [(name, split) for name in ("drawn", "other") for split in ("skewed", "even")]
    assert [tuple(panel.key.values()) for panel in plot.panels] == expected
    assert dict(plot.notes)["suite"] == "drawn, preset paper; other, preset paper"
    assert series.merge_plots(plots[:1]) == plots[:1]


def test_panels_of_suites_with_other_axes_are_one_figure(suite: Suite, tmp_path: Path) -> None:
    with Store.open("results/fatbench.db") as store:
        [plot] = report.build_figures(suite, suite.plan(), store, "curves")
    narrower = replace(plot, suite="other", panels=[replace(plot.panels[0], key={"data": "digits"})])
    [merged] = series.merge_plots([plot, narrower])
    expected = [{"split": "even", "data": ""}, {"split": "", "data": "digits"}]
    assert [panel.key for panel in merged.panels[-2:]] == expected
    assert plots.draw([merged], tmp_path, "svg")


def test_the_learning_curves_of_a_cell(suite: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    cell = suite.plan().cells[0].id
    code, out, err = run("plot", cell[:7], "--format", "svg", *DB)
    assert (code, out, err) == (0, f"results/figures/drawn-{cell}-curves.svg\n", "")
    assert f"Learning curves: cell {cell}" in Path(out.strip()).read_text()
    with Store.open("results/fatbench.db") as store:
        [plot] = adhoc_figures.curves(store, cell, [])
        headings = {panel.key["what"]: [one.heading for one in panel.lines] for panel in plot.panels}
        assert headings == {"accuracy": ["natural", "monitor"], "loss": ["train_loss", "natural_loss"]}
        [plot] = adhoc_figures.curves(store, cell, ["weight"])
        assert [one.index for one in plot.panels[0].lines] == [0, 1]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("drawn.yaml --x rond", 2, "--x: 'rond' is neither round, eps, client nor an axis (did you mean 'round'?)"),
        ("drawn.yaml --by metod", 2, "--by: no axis is named 'metod' (did you mean 'method'?)"),
        ("drawn.yaml --metric natrual", 2, "--metric: no number is named 'natrual' (did you mean 'natural'?)"),
        ("drawn.yaml --metric cw", 2,
         "--metric: 'cw' is measured on the final model, not in each round: take x from split, or one of pgd1,"
         " monitor, natural, natural_loss, train_loss"),
        ("drawn.yaml --x eps --metric cw", 2, "--metric: 'cw' is not evaluated at a list of radii; these are: pgd"),
        ("drawn.yaml --x class --metric natural", 2,
         "--metric: 'natural' is not logged for each client or class; those are: weight"),
        ("drawn.yaml --figure curves --x round", 2,
         "--figure cannot be combined with --x, --metric and --by"),
        ("", 2, "name a suite or a cell"),
        ("drawn.yaml abcd", 2, "name suites or cells, not both"),
        ("abcd --x round", 2, "a cell's curves take --metric, --select, --format and -o alone"),
        ("drawn.yaml --x round --db none.db", 4, "none.db does not exist: nothing has been run yet"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_says_what_can(suite: Suite, run, options: str, code: int, message: str) -> None:
    assert run("plot", *options.split()) == (code, "", f"fatbench: {message}\n")


def test_a_table_is_drawn_as_a_heat_map(prepared: Path, suite: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    """A square for each number that is measured, its mean in it; the numbers of several columns have one scale."""
    (id,) = (table.id for table in suite.tables)
    with Store.open("results/fatbench.db") as store:
        (sheet,) = report.build_tables(suite, suite.plan(), store)
    (axes,) = heat_map.figure_of(sheet).axes
    measured = [entry.mean for entry in sheet.all() if entry.mean is not None]
    by = 100 if sheet.columns[0].unit == "percent" else 1
    assert measured and [text.get_text() for text in axes.texts] == [f"{by * mean:.1f}" for mean in measured]
    assert [label.get_text() for label in axes.get_yticklabels()] == [", ".join(row.key.values()) for row in sheet.rows]
    code, said, _ = run("plot", "drawn.yaml", "--figure", id, "--format", "png", "-o", "maps")
    assert code == 0 and Path(said.strip()).stat().st_size > 1000
    code, _, said = run("plot", "drawn.yaml", "--figure", id, "--format", "csv")
    assert code == 2 and f"report --table {id} --format csv" in said
    code, _, said = run("plot", "drawn.yaml", "--figure", id, "-k", "seed=77")
    assert code == 3
    code, _, said = run("plot", "drawn.yaml", "--figure", "X")
    assert code == 2 and f"(known: {id}, " in said
