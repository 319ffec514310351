"""Every difference that the program prints of a database, as plain data: for `tests/golden/contrasts.json`."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from typer.testing import CliRunner

import fatbench
from fatbench import api, report
from fatbench.cli.app import app
from fatbench.errors import FatbenchError
from fatbench.report.site import leaderboards, pages
from fatbench.runner import progress
from fatbench.store.stages import Store
from fatbench.suite import files

VIEWS = ("boards", "compare", "differences", "forest", "tables", "tests")


def said_of(store: Store) -> dict[str, Any]:
    """ "suite, preset" -> what is said of each suite that the database has cells of."""
    views = dict(zip(VIEWS, (boards, compared, difference_tables, forest, tables, families), strict=True))
    return {
        f"{suite}, {preset}": {view: answered(said, suite, preset, store) for view, said in views.items()}
        for suite, preset in progress.by_suite(store)
    }


def answered(said: Callable[[str, str, Store], Any], suite: str, preset: str, store: Store) -> Any:
    try:
        return short(said(suite, preset, store))
    except FatbenchError as error:
        return str(error).replace(str(store.database.path), "DB")


def short(node: Any) -> Any:
    """Floats with 13 digits."""
    if isinstance(node, dict):
        return {key: short(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [short(value) for value in node]
    return float(f"{node:.13g}") if isinstance(node, float) else node


def digest(text: str) -> str:
    """Stands for a text, whose numbers are beside it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def command(*arguments: str, store: Store) -> str:
    options = [*arguments, "--db", str(store.database.path)]
    return CliRunner().invoke(app, options, catch_exceptions=False).stdout


def compared(name: str, preset: str, store: Store) -> Any:
    """`fatbench compare LABEL BASELINE`, of every label."""
    plan = files.load(name).plan(preset)
    if plan.baseline is None:
        return None
    axis, baseline = plan.baseline
    said: dict[str, Any] = {}
    for label in dict.fromkeys(cell.key.get(axis, "") for cell in plan.cells if cell.key.get(axis) != baseline):
        asked = ["compare", f"{axis}='{label}'", f"{axis}='{baseline}'", "--suite", name, "--preset", preset]
        try:
            found = json.loads(command(*asked, "--format", "json", store=store))["comparisons"]
            said[label] = [digest(command(*asked, store=store)), *(compared_row(one) for one in found)]
        except FatbenchError as error:
            said[label] = str(error).replace(str(store.database.path), "DB")
    return said


def compared_row(one: dict[str, Any]) -> list[Any]:
    seeds, test = one["over_seeds"] or {}, one["test"]
    said = [one["row"], one["metric"], one["n"], one["seeds"], one["difference"], test and test_row(test)]
    return [*said, [seeds.get(key) for key in ("std", "t_p", "wilcoxon_p")], [i["mcnemar_p"] for i in one["images"]]]


def test_row(test: dict[str, Any]) -> list[Any]:
    names = ("over", "mean", "interval", "at_most", "p", "detectable", "detectable_corrected", "equivalent")
    return [test[key] for key in names]


def families(name: str, preset: str, store: Store) -> Any:
    """`fatbench compare SUITE`."""
    asked = ["compare", name, "--preset", preset]
    said = json.loads(command(*asked, "--format", "json", store=store))["families"]
    return {
        family["family"]: [
            [one["contrast"], one["row"], one["metric"], one["n"], one["seeds"], one["not_tested"], one["p_holm"],
             one["test"] and test_row(one["test"])]
            for one in family["comparisons"]
        ]
        for family in said
    } | {"text": digest(command(*asked, store=store))}  # fmt: skip


def difference_tables(name: str, preset: str, store: Store) -> Any:
    """`fatbench report --differences`, of every metric."""
    plan = files.load(name).plan(preset)
    said = {}
    for metric in plan.metrics() if plan.baseline is not None else ():
        numbers = fatbench.table(name, preset=preset, differences=metric, db=str(store.database.path)).frame()
        numbers = numbers[[column for column in numbers if column in ("difference", "low", "high", "at_most", "p")]]
        said[metric] = numbers.astype(object).where(numbers.notna(), None).to_numpy().tolist()
    return said


def tables(name: str, preset: str, store: Store) -> Any:
    """What tables say of differences: paired tests, intervals, the finding."""
    asked = ["report", name, "--preset", preset]
    said = {}
    for table in json.loads(command(*asked, "--format", "json", store=store))["tables"]:
        paired = [
            [*one["key"].values(), one["label"], one["against"], one["heading"], one["seeds"],
             *(one[key] for key in ("mean", "std", "t_p", "wilcoxon_p"))]
            for one in table.get("paired", ())
        ]  # fmt: skip
        intervals = [
            [*row["key"].values(), metric, number["mean"], *number["interval"]]
            for row in table["rows"]
            for metric, number in row["measured"].items()
            if "interval" in number
        ]
        finding = [note for note in table["notes"] if note.startswith("finding")]
        if paired or intervals or finding:
            said[table["id"]] = {"paired": paired, "intervals": intervals, "finding": finding}
    return said


@contextmanager
def figures_saved() -> Iterator[list[Figure]]:
    """The figures that are written meanwhile."""
    saved: list[Figure] = []
    save = Figure.savefig
    Figure.savefig = lambda self, *args, **how: [saved.append(self), save(self, *args, **how)][1]  # type: ignore[method-assign]
    try:
        yield saved
    finally:
        Figure.savefig = save  # type: ignore[method-assign]


def forest(name: str, preset: str, store: Store) -> Any:
    """The dots of the forest plot, full or not, its rows and its caption."""
    suite = files.load(name)
    plan = api.to_read(suite, suite.plan(preset), store)
    with tempfile.TemporaryDirectory() as folder, figures_saved() as saved:
        file = report.draw_forest(plan, store, Path(folder), "svg", select="last", width=5.0, families=suite.tests)
        caption = file.with_suffix(".txt").read_text(encoding="utf-8")
    panels = [
        [axes.get_title(), *([float(line.get_xdata()[0]), int(line.get_ydata()[0]), line.get_marker(),
                              line.get_markerfacecolor() != "white"]
                             for line in axes.get_lines() if line.get_marker() != "None")]
        for axes in saved[0].axes
    ]  # fmt: skip
    return [caption, [label.get_text() for label in saved[0].axes[0].get_yticklabels()], *panels]


def boards(name: str, preset: str, store: Store) -> Any:
    """The conclusion of each leaderboard, and the difference of each of its rows."""
    suite = files.load(name)
    plan = api.to_read(suite, suite.plan(preset), store)
    grids = report.build_tables(suite, plan, store)
    said = []
    for board in leaderboards.boards([(suite, plan)], grids, store, "last"):
        overview = pages._overview(board)
        rows = [found and [found["raw"], found["interval"], found["places"]] for found in
                (pages._difference(board, row) for row in board.grid.rows)]  # fmt: skip
        said.append([*(overview[key] for key in ("sentence", "who", "difference", "interval", "seeds", "best")),
                     pages._heading(board), rows])  # fmt: skip
    return said
