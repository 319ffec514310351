"""Figures: numbers to curves to files, and what rounds keep beside their numbers. Synthetic numbers, small images."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measured
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from safetensors.numpy import save_file

from fatbench import report
from fatbench.engine.rounds import Number
from fatbench.errors import MachineError, NothingMatched, SpecError
from fatbench.report import contrasts, sentences
from fatbench.report.figures import artifacts, forest, panel_kinds, plots, series, styles
from fatbench.report.formats import records
from fatbench.report.numbers.doubts import Doubt
from fatbench.report.numbers.sources import Source
from fatbench.report.numbers.stored import Measurement
from fatbench.report.tables.entries import sheets
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite

SUITE = """\
name: drawn
title: A suite for the figures' tests
seeds: [1, 2]
base:
  data: digits
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: nin}
  algorithm:
    {name: fedavg, rounds: 2, aggregator: samples, local: {epochs: 1, batch: 16, lr: 0.05, objective:
      {name: at, attack: {name: pgd, eps: 8/255, step: 4/255, steps: 1}}}}
axes:
  split: {skewed: {}, even: {partition: {name: iid, clients: 2}}}
  method: {FAT: {}, Uniform: {algorithm: {aggregator: uniform}}}
baseline: FAT
evaluate: {attacks: {natural: natural}}
presets:
  paper: {}
  smoke: {note: nothing but a check, seeds: [1], overrides: [{set: {algorithm: {rounds: 1}}}]}
tables:
  - {id: T, title: A table, rows: [split, method], values: {natural: natural}}
figures:
  - {id: curves, title: Accuracy, panels: [split], lines: [method], note: A note.,
     series: {clean: "train:natural", attacked: "train:monitor"}}
  - {id: weights, title: Weights, where: {split: skewed}, panels: [method], series: {weight: "train:weight[*]"}}
  - {id: classes, title: By class, kind: bars, where: {split: skewed}, lines: [method],
     series: {accuracy: "train:natural_class[*]"}}
  - {id: labels, title: Two headings, kind: bars, where: {split: skewed}, lines: [method],
     series: {one: "train:natural", two: {source: "train:monitor", where: {method: FAT}}}}
  - {id: cross, title: Cross-prediction, kind: heatmap, where: {split: skewed}, lines: [method],
     series: {p: "artifact:adfl_cross"}}
  - {id: images, title: Images, kind: images, where: {split: skewed, method: FAT},
     series: {images: "artifact:adfl_images"}}
"""
PROVENANCE = {"device": "cpu", "precision": "fp32", "commit": "1a2b3c4d5e" * 4, "versions": {"torch": "2.15.0"}}


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.chdir(tmp_path)
    return written()


def written(change: tuple[str, str] = ("", "")) -> Suite:
    """The suite with a piece of its text replaced, in the working directory."""
    assert change[0] in SUITE
    Path("drawn.yaml").write_text(SUITE.replace(*change) if change[0] else SUITE)
    return files.load("drawn.yaml")


def cell(plan: Plan, split: str, method: str, seed: int) -> Cell:
    return next(c for c in plan.cells if c.key == {"split": split, "method": method} and c.spec["seed"] == seed)


def row(of: Cell, metric: str, round: int, value: float, client: int = -1) -> dict[str, Any]:
    where = {"cell": of.id, "stage": "train", "metric": metric, "round": round, "client": client}
    return {**where, "value": value, "n": 10, "provenance": PROVENANCE}


def rows_of(plan: Plan) -> list[dict[str, Any]]:
    """natural: 0.1 * round + 0.1 * seed, 0.5 more for Uniform; monitor a half; weights 1/4 and 3/4; two classes."""
    rows = []
    for one in plan.cells:
        seed = one.spec["seed"]
        for round in range(1, one.spec["algorithm"]["rounds"] + 1):
            value = 0.1 * round + 0.1 * seed + 0.5 * (one.key["method"] == "Uniform")
            rows += [row(one, "natural", round, value), row(one, "monitor", round, value / 2)]
            rows += [row(one, "weight", round, 0.25, 0), row(one, "weight", round, 0.75, 1)]
            rows += [row(one, "natural_class", round, value, 0), row(one, "natural_class", round, value / 4, 1)]
    return rows


def build(suite: Suite, plan: Plan | None = None, rows: list[Any] | None = None) -> list[series.Plot]:
    """The figures of a suite, filled with these measurements."""
    plan = plan or suite.plan()
    return series.build(suite, plan, measured.numbers(plan, rows_of(plan) if rows is None else rows))


def csv_of(found: list[series.Plot], *figures: str) -> list[dict[str, str]]:
    lines = csv.DictReader(io.StringIO(series.render_csv(found)))
    return [one for one in lines if not figures or one["figure"] in figures]


def plot_of(found: list[series.Plot], id: str) -> series.Plot:
    return next(plot for plot in found if plot.figure.id == id)


def line(plot: series.Plot, heading: str, index: int | None = None, **labels: str) -> series.Line:
    """The one line with these labels, of panel or line."""
    lines = [(one, {**panel.key, **one.key}) for panel in plot.panels for one in panel.lines]
    [found] = [o for o, key in lines if labels.items() <= key.items() and (o.heading, o.index) == (heading, index)]
    return found


# --- the numbers -------------------------------------------------------------------------------------------------


def test_mean_and_spread_over_seeds_round_by_round(drawn: Suite) -> None:
    """FAT, round r: 0.1 r + 0.1 and 0.1 r + 0.2, so mean 0.1 r + 0.15 and std 0.1 / sqrt(2). A line for each client."""
    found = build(drawn)
    plot, weights = plot_of(found, "curves"), plot_of(found, "weights")
    assert [panel.key for panel in plot.panels] == [{"split": "skewed"}, {"split": "even"}]
    clean = line(plot, "clean", split="skewed", method="FAT")
    assert [(point.round, point.seeds) for point in clean.points] == [(1, (1, 2)), (2, (1, 2))]
    assert [point.mean for point in clean.points] == pytest.approx([0.25, 0.35])
    assert [point.std for point in clean.points] == pytest.approx([0.1 / math.sqrt(2)] * 2)
    assert not clean.partial(clean.points)
    assert line(plot, "attacked", split="even", method="Uniform").points[1].mean == pytest.approx(0.425)
    assert {
        "suite": "drawn, preset paper", "machine": "cpu, fp32", "code": "commit 1a2b3c4d5e; torch 2.15.0",
        "seeds": "1, 2; line: mean, band: ± sample standard deviation over seeds (ddof 1)", "note": "A note.",
    }.items() <= dict(plot.notes).items()  # fmt: skip
    for index, value in ((0, 0.25), (1, 0.75)):
        points = line(weights, "weight", index, method="FAT").points
        assert [(point.mean, point.std) for point in points] == [(value, 0.0)] * 2
    assert len(weights.panels[0].lines) == 2


def test_a_bar_of_one_seed_has_the_interval_that_training_logs(drawn: Suite) -> None:
    logged = {
        "natural": 0.5,
        "natural_low": 0.2,
        "natural_exact_low": 0.3,
        "natural_exact_high": 0.9,
        "natural_high": 1,
    }
    for seeds, interval in (("[1]", (0.3, 0.9)), ("[1, 2]", None)):
        suite = written(("seeds: [1, 2]", f"seeds: {seeds}"))
        plan = suite.plan()
        fat = cell(plan, "skewed", "FAT", 1)
        bars = plot_of(build(suite, plan, [row(fat, metric, 2, value) for metric, value in logged.items()]), "labels")
        assert line(bars, "one", method="FAT").points[-1].interval == interval
        segments = [one.get_segments() for one in axes_of(bars)[0].collections if hasattr(one, "get_segments")]
        assert [segment[:, 1].tolist() for of_bar in segments for segment in of_bar] == ([[30, 90]] if interval else [])
        assert any("whisker" in text for _, text in bars.notes) == bool(interval)


def test_missing_seeds_and_numbers_that_are_none(drawn: Suite) -> None:
    """Seed 2 stopped after round 1, and one loss was not a number: each point says its seeds, and the note how many."""
    plan = drawn.plan()
    second = cell(plan, "skewed", "FAT", 2)
    rows = [r for r in rows_of(plan) if not (r["cell"] == second.id and r["round"] == 2)]
    rows.append(row(second, "natural", 2, math.nan))
    plot = plot_of(build(drawn, plan, rows), "curves")
    points = line(plot, "clean", split="skewed", method="FAT").points
    assert [(point.seeds, point.std is None) for point in points] == [((1, 2), False), ((1,), True)]
    assert points[1].mean == pytest.approx(0.3)
    assert dict(plot.notes)["incomplete"] == "2 of 8 lines average fewer seeds than planned, at some rounds or all"


def test_a_line_without_a_number_is_named_and_ones_own_is_marked(drawn: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = drawn.plan()
    rows = [r for r in rows_of(plan) if r["cell"] not in {c.id for c in plan.cells if c.key["method"] == "Uniform"}]
    assert dict(plot_of(build(drawn, plan, rows), "curves").notes)["missing"] == "no number of Uniform"
    assert "missing" not in dict(plot_of(build(drawn), "curves").notes)
    uniform = {c.id: c.spec for c in plan.cells if c.key["method"] == "Uniform"}
    monkeypatch.setattr("fatbench.suite.plugins.files", lambda spec: {Path("x.py")} if spec in uniform.values() else ())
    plot = plot_of(build(drawn), "curves")
    name, _, legend = styles.styles_of(plot, plot.panels)
    assert {label for label in legend if "(own)" in label} == {"Uniform (own)"}
    assert "(own)" not in name(line(plot, "clean", split="even", method="FAT"))
    (table,) = sheets(drawn.tables, plan, measured.numbers(plan, rows_of(plan)))
    marked = json.loads(records.render_json([table]))["tables"][0]["rows"]
    assert {row["key"]["method"]: row["own"] for row in marked} == {"FAT": False, "Uniform": True}


def test_the_database_gives_the_same_curves(drawn: Suite) -> None:
    plan = drawn.plan()
    with Store.open("test.db", create=True) as store:
        fill(store, plan, rows_of(plan))
        found = report.build_figures(drawn, plan, store)
        assert [plot.figure.id for plot in report.build_figures(drawn, plan, store, "weights")] == ["weights"]
        with pytest.raises(SpecError, match=r"has no figure 'forst' \(did you mean 'forest'\?\)"):
            report.build_figures(drawn, plan, store, "forst")  # every suite has this one
        assert report.unknown(found, plan, store) == []
        odd = written(("train:natural_class[*]", "train:natural_clas[*]"))
        assert report.unknown(report.build_figures(odd, plan, store), plan, store) == [
            "figure classes: accuracy: nothing is logged as 'natural_clas' (did you mean 'natural_class'?)"
        ]
    expected = build(drawn)
    assert series.render_csv(found) == series.render_csv(expected)
    assert [plot.notes for plot in found] == [plot.notes for plot in expected]


EVALUATED = """\
  - {id: radii, title: Accuracy over the radius, where: {split: skewed}, lines: [method], series: {PGD: pgd}}
  - {id: attacks, title: Three attacks, kind: bars, where: {split: skewed}, lines: [method],
     series: {clean: natural, PGD: pgd, CW: cw}}
"""
ATTACKS = """\
evaluate:
  attacks:
    natural: natural
    pgd: {name: pgd, eps: [8/255, 2/255], step: 1/255, steps: 2}
    cw: {name: cw, eps: 8/255, step: 1/255}
"""


def evaluated(change: tuple[str, str] = ("{PGD: pgd}", "{PGD: pgd}")) -> Suite:
    """The suite with three attacks and two figures of them, a piece of whose text is replaced."""
    text = SUITE.replace("evaluate: {attacks: {natural: natural}}\n", ATTACKS)
    Path("drawn.yaml").write_text(text + EVALUATED.replace(*change))
    return files.load("drawn.yaml")


def test_evaluations_are_curves_over_radii_and_bars(drawn: Suite) -> None:
    """Under 2/255 and 8/255 seeds 1 and 2 have 0.5, 0.7 and 0.2, 0.4: means 0.6 and 0.3, std 0.2 / sqrt 2."""
    suite = evaluated()
    plan = suite.plan()
    values = {"natural": 0.8, "pgd_2_255": 0.5, "pgd_8_255": 0.2, "cw": 0.1}
    rows = []
    for one in plan.cells:
        last = one.spec["algorithm"]["rounds"]
        for evaluation in one.evaluations:
            value = values[evaluation.label] + 0.2 * (one.spec["seed"] - 1)
            rows.append(row(one, evaluation.label, last, value) | {"stage": evaluation.stage(last)})
    found = build(suite, plan, rows)
    curve = line(plot_of(found, "radii"), "PGD", method="FAT")
    assert [(p.radius, p.round) for p in curve.points] == [("2/255", 2 / 255), ("8/255", 8 / 255)]
    assert [p.mean for p in curve.points] == pytest.approx([0.6, 0.3])
    assert curve.points[0].std == pytest.approx(0.2 / 2**0.5)
    bars = plot_of(found, "attacks")
    assert [one.heading for one in bars.panels[0].lines][:4] == ["clean", "PGD 8/255", "PGD 2/255", "CW"]
    assert line(bars, "CW", method="FAT").points[0].mean == pytest.approx(0.2)
    assert ("checkpoint", "last round") in bars.notes
    axes = axes_of(plot_of(found, "radii"))[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2/255", "8/255"]
    assert axes.get_xlabel() == "radius of the attack"
    assert len(axes_of(bars)[0].patches) == 8  # two methods, four numbers each
    lines = [(one["radius"], one["round"], one["method"]) for one in csv_of(found, "radii")]
    assert lines[:2] == [("2/255", "", "FAT"), ("8/255", "", "FAT")]
    with Store.open("f.db", create=True) as store:
        fill(store, plan, rows)
        stored = csv_of(report.build_figures(suite, plan, store))
    assert {one["doubts"].split(";")[0] for one in stored} == {"no outcome of each image is stored"}
    assert [{**one, "doubts": ""} for one in stored] == csv_of(found)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("{PGD: cw}", "figure radii: PGD: 'cw' has one radius and makes no curve: give the attack a list"),
        ("{PGD: pgd, clean: 'train:natural'}", "series: series must be either all over rounds (train:)"),
        ("{PGD: pgd@3}", "PGD: an evaluation has no rounds: remove '@3' from 'pgd@3'"),
    ],
)
def test_evaluations_that_make_no_figure(drawn: Suite, series: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        report.check(suite := evaluated(("{PGD: pgd}", series)), suite.plan())


def test_a_number_that_was_computed_otherwise_says_so_in_csv_and_note(drawn: Suite) -> None:
    """Of the two seeds of one line one was computed with another plug-in; no other line says it."""
    plan = drawn.plan()
    numbers, doubt = measured.numbers(plan, rows_of(plan)), Doubt("changed", against="another x.py")
    numbers.doubts = {(cell(plan, "skewed", "FAT", 2).id, "train"): (doubt,)}
    found = series.build(drawn, plan, numbers)
    said = {(one["split"], one["method"]): one["doubts"] for one in csv_of(found, "curves") if one["doubts"]}
    assert said == {("skewed", "FAT"): "computed with another x.py (seed 2)"}
    assert dict(plot_of(found, "curves").notes)["changed"] == "computed with another x.py (1 cell)"
    assert "computed with another x.py (1 cell)" in plots._caption(plot_of(found, "curves"), {})


def test_csv_has_a_line_a_point(drawn: Suite) -> None:
    lines = csv_of(build(drawn))
    curves, weights = 2 * 2 * 2 * 2, 2 * 2 * 2
    assert len(lines) == curves + weights + weights + (2 + 1) * 2
    assert {
        "figure": "curves", "split": "skewed", "method": "FAT", "heading": "clean", "metric": "natural",
        "unit": "fraction", "round": "1", "seeds": "1;2",
    }.items() <= lines[0].items()  # fmt: skip
    assert float(lines[0]["mean"]) == pytest.approx(0.25)
    weight = next(one for one in lines if one["figure"] == "weights" and one["index"] == "2")
    assert (weight["unit"], weight["mean"], weight["method"]) == ("plain", "0.75", "FAT")


MORE = """\
  - id: some
    title: Two points of four
    include: [{split: skewed, method: FAT}, {split: even, method: Uniform}]
    lines: [split, method]
    series: {clean: "train:natural"}
  - id: gains
    title: What Uniform gains
    kind: bars
    where: {method: Uniform}
    minus: {method: FAT}
    panels: [split]
    series: {total: "train:natural", class 1: "train:natural_class[1]"}
    published:
      file: gains.csv
      rows: {split: split, series: what}
      values: {total: low, class 1: low}
      to: {total: high, class 1: high}
  - id: rounds
    title: Who counts
    kind: raster
    where: {split: skewed}
    panels: [method]
    series: {weight: "train:weight[*]"}
"""


def more(change: tuple[str, str] = ("kind: raster", "kind: raster")) -> Suite:
    """The suite with three further figures, a piece of their text replaced; the paper gives 40 to 45 points."""
    assert change[0] in MORE
    Path("drawn.yaml").write_text(SUITE + MORE.replace(*change))
    Path("gains.csv").write_text("split,what,low,high\nskewed,total,40,45\neven,class 1,7,\n")
    return files.load("drawn.yaml")


def test_differences_seed_by_seed_beside_published_ones(drawn: Suite) -> None:
    """Uniform has 0.5 more than FAT at each seed, in class 1 a quarter of that; seed 2 of FAT lacks, so it has none."""
    suite = more()
    plan = suite.plan()
    some = plot_of(build(suite), "some").panels[0].lines
    assert [tuple(one.key.values()) for one in some] == [("skewed", "FAT"), ("even", "Uniform")]
    gone = cell(plan, "even", "FAT", 2).id
    plot = plot_of(build(suite, plan, [r for r in rows_of(plan) if r["cell"] != gone]), "gains")
    total, one = (line(plot, what, split="skewed").points[-1] for what in ("total", "class 1"))
    assert (total.mean, total.std, *total.values) == pytest.approx((0.5, 0.0, 0.5, 0.5), abs=1e-12)
    assert one.mean == pytest.approx(0.125)
    assert line(plot, "total", split="even").points[-1].seeds == (1,)
    assert line(plot, "total", split="skewed").published == pytest.approx((0.40, 0.45))
    assert line(plot, "class 1", split="even").published == pytest.approx((0.07, 0.07))
    assert line(plot, "total", split="even").published is None
    assert ("differences", "differences from method FAT, seed by seed") in plot.notes
    left, _ = axes_of(plot)
    assert left.get_ylabel() == "points"
    assert [text.get_text() for text in left.get_xticklabels()] == ["total", "class 1"]
    assert sorted(bar.get_height() for bar in left.patches) == pytest.approx([12.5, 50])
    marks = [one for one in left.get_lines() if one.get_color() == "black"]
    assert [list(one.get_ydata()) for one in marks] == [pytest.approx([40, 45])]
    assert [text.get_text() for text in left.figure.legends[0].get_texts()] == ["published"]
    assert [len(dots.get_offsets()) for dots in left.collections if len(dots.get_offsets()) == 2] == [2, 2]
    csv_lines = [one for one in csv_of([plot]) if one["heading"] == "total"]
    assert (csv_lines[1]["values"].count(";"), float(csv_lines[1]["published_most"])) == (1, pytest.approx(0.45))
    with pytest.raises(SpecError) as caught:
        build(suite, suite.plan(where="method=Uniform"), [])
    assert str(caught.value) == "figure gains: minus: no cell of preset 'paper' has method FAT"


def test_a_raster_has_a_row_for_each_client(drawn: Suite) -> None:
    """Weights 1/4 and 3/4 in two rounds of the first seed; beside them their sums, one half and one and a half."""
    first, _ = axes_of(plot_of(build(more()), "rounds"))
    assert first.images[0].get_array().tolist() == [[0.25, 0.25], [0.75, 0.75]]
    assert [text.get_text() for text in first.get_yticklabels()] == ["1", "2"]
    assert [text.get_text() for text in first.texts] == ["0.5", "1.5"]
    assert not first.figure.legends


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("minus: {method: FAT}", "minus: {method: [FAT, Uniform]}"), ": method: expected one label, got FAT, Uniform"),
        (("[{split: skewed, method: FAT}, {split: even, method: Uniform}]", "{split: skewed}"),
         "include: expected a list of conditions, such as [{method: FAT}"),
        (("weight[*]", "weight[1]"), "a raster has one row per client or class: write 'train:weight[*]', not"),
        (("    kind: bars\n    where: {method: Uniform}", ""),
         "published: published numbers can be drawn in bars only, not in lines"),
        (("to: {total: high", "to: {totl: high"), "values: the figure has no series 'totl' (did you mean 'total'?)"),
    ],
)  # fmt: skip
def test_figures_that_cannot_be(drawn: Suite, change: tuple[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        more(change)


def fill(store: Store, plan: Plan, rows: list[dict[str, Any]]) -> None:
    """Rows as the engine would leave them: every stage done."""
    for one in plan.unique():
        store.add_cell(one.id, one.spec)
        mine = [r for r in rows if r["cell"] == one.id]
        for stage in dict.fromkeys(r["stage"] for r in mine):
            run = store.claim(one.id, stage, suite="drawn", total=2, provenance={"preset": plan.preset, **PROVENANCE})
            here = [r for r in mine if r["stage"] == stage]
            numbers = [Number(r["metric"], r["value"], r["round"], r["n"], r["client"]) for r in here]
            store.commit(run, numbers=numbers, round=max(r["round"] for r in here))
            store.finish(run)


# --- the files ---------------------------------------------------------------------------------------------------


def keep(folder: Path, round: int, **more: np.ndarray) -> None:
    """What AdFL keeps of a round with clients 4 and 7, and two labels."""
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    kept = {
        "adfl_images": np.arange(2 * 2 * 1 * 4 * 4, dtype=np.uint8).reshape(2, 2, 1, 4, 4),
        "adfl_cross": np.array([[[1, 0], [0.5, 1]], [[0, 0], [1, 1]]], np.float32),
        "adfl_weights": np.array([0.25, 0.75]),
        "adfl_clients": np.array([4, 7]),
    }
    save_file({**kept, **more}, folder / "artifacts" / f"round-{round:06d}.safetensors")


@pytest.mark.parametrize("format", [pytest.param(f, marks=[pytest.mark.nightly] * (f != "svg")) for f in plots.FORMATS])
def test_every_kind_is_drawn_and_drawn_again_the_same(drawn: Suite, format: str) -> None:
    """The same numbers give the same bytes; the title, the label of a reduced preset and the provenance are inside."""
    plan = drawn.plan("smoke")
    keep(Path("files", cell(plan, "skewed", "FAT", 1).id), 1)
    ids = [figure.id for figure in drawn.figures if format == "png" or figure.id in ("curves", "cross")]
    found = [plot for plot in build(drawn, plan, rows_of(plan)) if plot.figure.id in ids]
    first, second = (plots.draw(found, Path(folder), format, Path("files")) for folder in ("a", "b"))
    assert [path.name for path in first] == [f"drawn-{id}-smoke.{format}" for id in ids]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    label = "SMOKE PRESET - not comparable with published numbers"
    if format == "svg":
        text = first[0].read_text()
        assert f"<dc:title>Accuracy [{label}]</dc:title>" in text
        assert "machine: cpu, fp32; code: commit 1a2b3c4d5e" in text and "dc:date" not in text
    elif format == "png":
        with Image.open(first[0]) as image:
            assert image.text["Title"] == f"Accuracy [{label}]"  # type: ignore[attr-defined]
            assert "commit 1a2b3c4d5e" in image.text["Description"]  # type: ignore[attr-defined]
    else:
        data = first[0].read_bytes()
        assert data.startswith(b"%PDF") and b"CreationDate" not in data and label.encode() in data


def axes_of(plot: series.Plot, files: Path | None = None) -> list[Any]:
    """matplotlib's axes of a plot of one page."""
    [(names, panels)] = plots.paged(plot)
    return plots.page_of(plot, names, panels, files).axes


def test_a_line_far_below_all_others_does_not_flatten_them() -> None:
    """Four lines between 40 and 60; a fifth at 20 is a number at the edge, at 30 it is within the axis."""

    def axes_with(lowest: float) -> Any:
        means = {"a": (0.4, 0.5), "b": (0.45, 0.55), "c": (0.5, 0.6), "d": (0.42, 0.58), "e": (lowest, lowest)}
        panel = series.Panel({}, [
            series.Line({"method": method}, "PGD", Source.parse("train:monitor"), None,
                        [series.SeriesPoint(i + 1, mean, None, (0,)) for i, mean in enumerate(of)], 1, ("x",))
            for method, of in means.items()
        ])  # fmt: skip
        axes = Figure().subplots()
        looks = {method: styles.Style("#000000", 0) for method in means}
        panel_kinds.curves(panel, axes, lambda line: line.key["method"], looks)
        panel_kinds.leave_out_below(panel, axes, lambda line: line.key["method"], looks)
        return axes

    axes = axes_with(0.2)
    assert axes.get_ylim()[0] == pytest.approx(34) and axes.texts[0].get_text().startswith("e: 20 ")
    axes = axes_with(0.3)
    assert axes.get_ylim()[0] < 30 and not axes.texts


def test_lines_of_one_dimension_differ_in_colour_and_style(drawn: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panel_kinds, "FEW", 2)
    axes = axes_of(plot_of(build(drawn), "weights"))
    looks = [(one.get_color(), one.get_linestyle()) for one in axes[0].get_lines()]
    assert looks == [(styles.COLOURS[0], "-"), (styles.COLOURS[1], "--")]
    assert [text.get_text() for text in axes[0].figure.legends[0].get_texts()] == ["client 1", "client 2"]
    assert axes[0].get_ylabel() == "weight"


@pytest.mark.parametrize("palette", [styles.COLOURS, styles.MUTED])
def test_a_colour_comes_again_with_another_marker(palette: tuple[str, ...]) -> None:
    looks = [styles._style_at([position, 0], palette) for position in range(14)]
    assert len({(look.colour, look.marker) for look in looks}) == 14


# --- what rounds keep --------------------------------------------------------------------------------------------


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    file = tmp_path / "artifacts" / "round-000001.safetensors"
    file.write_bytes(b"no tensors")
    with pytest.raises(MachineError, match="damaged, or not written by fatbench"):
        artifacts.load(file)
    assert artifacts.rounds(tmp_path / "nowhere") == {}


# --- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def stored(drawn: Suite) -> Suite:
    """With every number of the suite in the database."""
    with Store.open("results/fatbench.db", create=True) as store:
        fill(store, drawn.plan(), rows_of(drawn.plan()))
        fill(store, drawn.plan("smoke"), rows_of(drawn.plan("smoke")))
    return drawn


def test_plot_without_a_number_says_why(drawn: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("plot", "drawn.yaml") == (
        NothingMatched.exit_code, "",
        "fatbench: no figure of 'drawn' can be drawn: results/fatbench.db does not exist: nothing has been run here, or"
        " the database is another\n",
    )  # fmt: skip


def test_plot_from_the_command_line(stored: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    for figure in ("forest", "curves"):
        code, out, err = run("plot", "drawn.yaml", "--figure", figure, "-k", "seed=77")
        assert (code, out) == (3, "") and "-k 'seed=77' matches none of the" in err
    assert run("plot", "drawn.yaml", "--figure", "curves", "--format", "svg") == (
        0, "results/figures/drawn-curves.svg\n", "",
    )  # fmt: skip
    assert Path("results/figures/drawn-curves.svg").stat().st_size > 0
    code, out, err = run("plot", "drawn.yaml", "--format", "csv", "--figure", "weights")
    assert (code, err, out.count("\n")) == (0, "", 1 + 8)
    assert run("plot", "drawn.yaml", "--format", "csv", "-o", "there")[1] == "there/drawn-figures.csv\n"
    Path("file").touch()
    for options, said in (
        ("--figure curve", "suite 'drawn' has no figure 'curve' (did you mean 'curves'?)"),
        ("--format jpg", "--format: no format is named 'jpg' (did you mean 'png'?)"),
        ("--figure curves -o file/there", "-o file/there: Not a directory"),
    ):
        assert run("plot", "drawn.yaml", *options.split())[::2] == (2, f"fatbench: {said}\n")
    assert "figure curves: Accuracy" in run("show", "drawn.yaml")[1]
    assert run("check", "drawn.yaml")[0] == 0
    written(("panels: [split], lines: [method], note", "panels: [split], note"))
    code, _, err = run("check", "drawn.yaml")
    lumped = "a line shows more than one point of the grid: name the axis method in 'panels', 'lines' or 'where'"
    assert (code, err) == (2, f"fatbench: drawn.yaml: figure curves: {lumped} (paper)\n")
    assert all(run(command, "drawn.yaml") == (2, "", err) for command in ("run", "plan", "report"))
    text = Path("drawn.yaml").read_text()
    Path("drawn.yaml").write_text(text[: text.index("figures:")])
    said = "fatbench: suite 'drawn' has no figures: give x, such as round, and a metric for your own\n"
    assert run("plot", "drawn.yaml") == (3, "", said)


@pytest.mark.nightly
def test_show_what_a_round_kept(stored: Suite, run: Callable[..., tuple[int, str, str]]) -> None:
    one = stored.plan().cells[0].id
    folder = Path("results/fatbench-files", one)
    code, _, err = run("show", one, "--artifacts")
    assert (code, err) == (
        3, f"fatbench: cell {one} kept no artifacts, or they are not on this machine: {folder / 'artifacts'}\n",
    )  # fmt: skip
    keep(folder, 1)
    keep(folder, 2)
    code, out, err = run("show", one[:6], "--artifacts", "-o", "out")
    files = [f"out/{one}-round-000002-{name}.png" for name in ("adfl_cross", "adfl_images")]
    assert (code, err) == (0, "")
    assert out.splitlines() == [*files, "adfl_clients: 4 7", "adfl_weights: 0.25 0.75"]
    for file in files:
        with Image.open(file) as image:
            assert min(image.size) > 16
    said = json.loads(run("show", one, "--artifacts", "--round", "1", "--format", "json", "-o", "out")[1])
    assert (said["round"], said["rounds"], len(said["files"])) == (1, [1, 2], 2)
    assert run("show", one, "--artifacts", "--round", "3")[::2] == (
        2, f"fatbench: --round: cell {one} kept no artifacts of round 3 (known: 1, 2)\n",
    )  # fmt: skip
    said = "fatbench: --round needs --artifacts, and -o needs --artifacts or --outcomes\n"
    assert run("show", one, "--round", "1")[::2] == (2, said)
    page = run("report", "drawn.yaml", "--format", "html")[1]
    assert len(re.findall("data:image/png;base64,", page)) == 4  # two of the cell, two of the figures of them


# --- figures for a paper ------------------------------------------------------------------------------------------


def test_a_plain_figure_has_its_width_no_notes_and_one_axis_and_a_caption_beside_it(
    stored: Suite, run: Callable[..., tuple[int, str, str]]
) -> None:
    asked = ("plot", "drawn.yaml", "--smoke", "--figure", "curves", "--format", "png", "-o", "there")
    assert run(*asked, "--width", "column")[0] == 0
    with Image.open("there/drawn-curves-smoke.png") as image:
        assert image.width == int(300 * plots.COLUMN)
    caption = Path("there/drawn-curves-smoke.txt").read_text()
    assert caption.startswith("Accuracy. SMOKE PRESET - not comparable with published numbers.")
    assert "Seeds 1" in caption and "commit" not in caption and "machine" not in caption
    serif = run(*asked, "--width", "text", "-c", "plot.serif=true", "--format", "pdf")[1].split()[0]
    assert b"STIXGeneral" in Path(serif).read_bytes()
    assert "or points from 100 to 1000, got 'wide'" in run(*asked, "--width", "wide")[2]
    plot = plot_of(build(stored, stored.plan("smoke")), "curves")
    [(names, panels)] = plots.paged(plot)
    page = plots.page_of(plot, names, panels, None, plots.TEXT)
    assert page.get_suptitle() == "" and not [text.get_text() for text in page.texts if text.get_text()]
    assert [one.get_ylabel() for one in page.axes] == ["per cent", ""]
    assert page.axes[0].get_ylim() == page.axes[1].get_ylim()


def test_the_forest_plot_has_a_row_a_method_and_a_panel_an_attack(drawn: Suite) -> None:
    """By hand: Uniform is 0.25 above FAT at seed 1 and 0.27 at seed 2, of 100 images without outcomes."""
    plan = drawn.plan()
    keys = {one.id: (one.key["method"], int(one.spec["seed"])) for one in plan.cells}

    def of(cell: str) -> dict[str, Measurement]:
        method, seed = keys[cell]
        value = 0.5 + (method == "Uniform") * (0.23 + 0.02 * seed)
        return {name: Measurement(value, 100, None) for name in ("natural-a", "pgd20-b")}

    found = contrasts.from_baseline(plan, of)
    assert [(one.row, *one.sides, one.metric) for one in found] == [
        (row, "Uniform", "FAT", metric) for row in ("skewed", "even") for metric in ("natural", "pgd20")
    ]
    assert found[0].difference == pytest.approx(0.26)
    skewed = {one.id for one in plan.cells if one.key["split"] == "skewed"}  # alone there is nothing to tell it from
    assert {one.row for one in contrasts.from_baseline(plan, lambda cell: of(cell) if cell in skewed else {})} == {""}
    said = sentences.sentence(found[1])
    assert said.startswith("Uniform is 26.0 points above FAT under PGD-20 (95 % interval ")
    assert said.endswith(", 2 seeds, too few for a claim)")
    metrics = ["natural", "pgd20"]
    axes = forest.figure_of(found, metrics).axes
    assert [one.get_title() for one in axes] == ["natural", "PGD-20"]
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["skewed, Uniform", "even, Uniform"]
    far = replace(found[0], weights={("far", ""): 1.0, ("FAT", ""): -1.0}, by_seed=(-9.0,), test=None)  # one seed, say
    clipped = forest.figure_of([*found, far], metrics).axes[0]
    assert clipped.get_xlim()[0] > -100 and [text.get_text().strip() for text in clipped.texts] == ["-900"]
    dots = [line.get_xdata()[0] for line in axes[1].get_lines() if line.get_marker() == "o"]
    assert dots == pytest.approx([26, 26])
    for_a_paper = forest.figure_of(found, metrics, paper_width=plots.COLUMN)
    assert for_a_paper.get_supxlabel() == forest.title(found, "points") == "points from FAT"
    assert "mean over 2 seeds" in forest.caption(found) and "mean over 2 seeds" in axes[0].figure.get_supxlabel()
    alone = [replace(one, seeds=(1,), test=None) for one in found]
    assert forest.caption(alone, "SMOKE") == "SMOKE. Differences in points, not tested; dot: one seed."


def test_a_baseline_is_a_label_and_where_none_is_named_nothing_is_guessed(drawn: Suite) -> None:
    assert written(("baseline: FAT", "baseline: Uniform")).plan().baseline == ("method", "Uniform")
    assert contrasts.from_baseline(written(("baseline: FAT\n", "")).plan(), lambda cell: {}) == []
    with pytest.raises(SpecError, match=r"drawn\.yaml:\d+: baseline: no axis has the label 'FATT'"):
        written(("baseline: FAT", "baseline: FATT"))


@pytest.mark.parametrize(
    ("seeds", "test", "said"),
    [
        (5, (0.003, 0.001, 0.005, 0.01),
         "A is 0.3 points above B under PGD-20 (95 % interval +0.10 to +0.50, 5 seeds)"),
        (5, (0.003, -0.01, 0.016, 0.4), "A and B differ by at most 1.6 points under PGD-20 (95 %, 5 seeds)"),
        (1, None, "A is 0.3 points above B under PGD-20 (1 seed: not tested)"),
    ],
)  # fmt: skip
def test_a_difference_in_a_sentence(seeds: int, test: tuple[float, ...] | None, said: str) -> None:
    tested = None
    if test is not None:
        tested = SimpleNamespace(mean=test[0], low=test[1], high=test[2], p=test[3], at_most=max(-test[1], test[2]))
    weights = {("A", ""): 1.0, ("B", ""): -1.0}
    one = contrasts.Difference("A - B", "pgd20", weights, seeds=tuple(range(seeds)), by_seed=(0.003,), test=tested)  # type: ignore[arg-type]
    assert sentences.sentence(one) == said
