"""Leaderboards: every row of one task, of any suite, in one table that can be sorted.

A task is a data set with its variant, a split among clients, and attacks with their settings, in one preset. Attacks on
privacy are a task of their suite. The table is a grid like any other (`combined`), so its marks and notes are those of
the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import FatbenchError
from fatbench.report.numbers import baseline, compare, declared_tests
from fatbench.report.numbers.baseline import Difference
from fatbench.report.numbers.compare import Measured
from fatbench.report.numbers.measurements import Source
from fatbench.report.tables import combined
from fatbench.report.tables.grid import Grid, Row, any_number
from fatbench.store.selection import Checkpoint
from fatbench.suite import facts, format_call, standard_attacks, threats
from fatbench.suite.cells import Cell, Plan, digest
from fatbench.suite.files import Suite
from fatbench.suite.papers import METHODS, OTHER, PAPERS, paper_of

if TYPE_CHECKING:
    from fatbench.store.stages import Store

Part = tuple[Suite, Plan]
LEAST = 2  # rows of a leaderboard
VARIANTS = {"jpeg": "as JPEG", "jpeg75": "as JPEG"}
LABELS = 12  # of an axis that can be chosen from a list


@dataclass
class Task:
    """The cells that are compared."""

    preset: str
    cell: Cell  # the first of them
    evaluations: dict[str, str]  # label -> what it is: the attack, on how many images
    parts: dict[str, tuple[Suite, Plan, list[Cell]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The difference that answers a board's question, with its 95 % interval: fractions."""

    who: str  # "SFAT \u2212 FAT"
    metric: str
    difference: float
    low: float
    high: float
    seeds: int


@dataclass
class Board:
    """A leaderboard, ready to print."""

    id: str
    title: str
    about: str
    grid: Grid
    axes: list[str]  # in which its rows differ
    rows: list[Row]  # the best first
    sorted_by: int  # position of the column
    choices: list[tuple[str, list[str]]]  # axis -> labels
    differences: list[Difference] = field(default_factory=list)  # of its rows, where they were tested
    sentence: str = ""  # what the numbers come to
    answer: Answer | None = None  # the one that the sentence tells
    suites: list[str] = field(default_factory=list)
    preset: str = ""


def tasks(parts: Sequence[Part]) -> list[Task]:
    """The tasks of some suites. A cell belongs to a task that asks nothing else under the name of an attack."""
    found: dict[str, list[Task]] = {}
    for suite, plan in parts:
        for cell in plan.cells:
            asked = {one.label: one.id for one in cell.evaluations}
            what = digest(
                [plan.preset, cell.spec["data"], cell.spec.get("partition"), cell.spec.get("test"),
                 suite.name if "attacker" in cell.key else ""]
            )  # fmt: skip
            known = found.setdefault(what, [])
            fits = (t for t in known if all(t.evaluations.get(label, id) == id for label, id in asked.items()))
            task = next(fits, None)
            if task is None:
                known.append(task := Task(plan.preset, cell, {}))
            task.evaluations |= asked
            task.parts.setdefault(suite.name, (suite, plan, []))[2].append(cell)
    return [task for known in found.values() for task in known]


def boards(parts: Sequence[Part], grids: Sequence[Grid], store: Store, select: Checkpoint) -> list[Board]:
    """The leaderboards of some suites; grids: their tables, which know the published numbers."""
    found = []
    for task in sorted(tasks(parts), key=lambda task: paper_order(next(iter(task.parts)))):
        grid = _grid(task, store, select)
        if grid is not None:
            add_published(grid, grids)
            if (board := _board(task, grid)) is not None:
                plans = [replace(plan, cells=cells) for _, plan, cells in task.parts.values()]
                ids = {cell.id for plan in plans for cell in plan.cells}
                of = compare.measured_numbers(store, ids, select).__getitem__
                _answer(plans, board, of)
                _quote(board, task, store, select)
                found.append(board)
    _tell_apart(found)
    return found


def _tell_apart(boards: Sequence[Board]) -> None:
    """Add to titles that are alike what is not: the suites, the preset."""
    alike: dict[str, list[Board]] = {}
    for board in boards:
        alike.setdefault(board.title, []).append(board)
    for same in alike.values():
        names = [(", ".join(board.suites), board.preset) for board in same]
        unlike = [position for position in (0, 1) if len({name[position] for name in names}) > 1]
        for board, name in zip(same, names, strict=True):
            board.title += f" ({', '.join(name[position] for position in unlike)})" if unlike else ""


def difference(board: Board, row: Row) -> Difference | None:
    """A row against its baseline; None: it is the baseline, or not tested."""
    mine = {*row.values[0][board.sorted_by].cells}
    return next((one for one in board.differences if mine & one.cells), None)


def paper_order(suite: str) -> int:
    """The position of a suite's paper among the papers."""
    return [*dict.fromkeys(PAPERS.values()), OTHER].index(paper_of(suite))


def _answer(plans: Sequence[Plan], board: Board, of: Callable[[str], Mapping[str, Measured]]) -> None:
    """Compare the rows with the baselines of their suites, and say in a sentence what that comes to."""
    column = board.grid.columns[board.sorted_by]
    if "attacker" in board.grid.axes:
        board.sentence = _privacy(board)
    if column.source.stage != "evaluation":
        return
    every = [one for plan in plans for one in baseline.differences(plan, of, [column.metric])]
    board.differences = [one for one in every if one.comparison.test is not None]
    if board.differences:
        every = board.differences
        # of several groups of rows, the one whose baseline is strongest: adversarial training under an attack
        best = max(sum(one.comparison.b) / len(one.comparison.b) for one in every)
        group = [one for one in every if sum(one.comparison.b) / len(one.comparison.b) == best]
        one = next((one for one in group if one.label.startswith(METHODS)), group[0])
        where = ", ".join(f"{axis} {label}" for axis, label in one.where.items() if axis in board.axes)
        board.sentence = f"{where}: " * bool(where) + one.sentence()
        if (test := one.comparison.test) is not None:
            who = f"{one.label} \u2212 {one.baseline}"
            compared = one.comparison
            board.answer = Answer(who, compared.metric, compared.difference, test.low, test.high, len(compared.seeds))


def _quote(board: Board, task: Task, store: Store, select: Checkpoint) -> None:
    """Say what a suite of the task declares that it is quoted with, where its cells are on this board."""
    for suite, plan, cells in task.parts.values():
        if any(tests.headline for tests in suite.tests):
            of = compare.measured_numbers(store, {cell.id for cell in plan.cells}, select)
            found = declared_tests.headline(suite.tests, plan, of.__getitem__)
            if found is None or (test := found[0].test) is None:
                continue
            if found[0].cells <= {cell.id for cell in cells}:
                declared, board.sentence = found
                sides = declared_tests.sides(declared)
                who = sides if isinstance(sides, str) else " \u2212 ".join(sides)
                board.answer = Answer(who, declared.metric, test.mean, test.low, test.high, len(declared.seeds))
                return


def _privacy(board: Board) -> str:
    """How many images the strongest attacker names, without a defence and with the best."""
    at = next((i for i, column in enumerate(board.grid.columns) if column.metric == "identification"), None)
    if at is None or "defence" not in board.axes:
        return ""
    named = [(mean, row) for row in board.rows if (mean := row.values[0][at].mean) is not None]
    bare = [share for share, row in named if row.key.get("defence") == "none"]
    kept = [(share, row) for share, row in named if row.key.get("defence") != "none"]
    if not bare or not kept:
        return ""
    share, row = min(kept, key=lambda one: one[0])
    said = f"The strongest attacker identifies {100 * max(bare):.0f} % of the images without a defence"
    if share >= max(bare):
        return f"{said}, and as many with each defence"
    return f"{said}, and {100 * share:.0f} % with {row.key['defence']} ({row.key['attacker']})"


def _grid(task: Task, store: Store, select: Checkpoint) -> Grid | None:
    """One table of all cells of a task, in which every row is compared with every other."""
    from fatbench.report import build_tables

    mine = [(suite, replace(plan, cells=cells)) for suite, plan, cells in task.parts.values()]
    shown: dict[str, tuple[str, str]] = {}  # source -> heading, best
    for suite, _ in mine:
        for table in suite.tables:
            for heading, source in table.values.items():
                parsed = Source.parse(source)
                # of an attack's headings some speak of their table's rows: "AT, PGD-7", and "server" for natural
                own = parsed.stage == "train" or (parsed.metric != "natural" and heading not in table.conditions)
                if not parsed.stage.startswith(("gap", "prior")):
                    said = heading if own else compare.attack_name(parsed.metric)
                    shown.setdefault(source, (said, table.best[heading]))
    sources = list(task.evaluations) or list(shown)
    try:
        suite, plan = combined.combine(mine, (), sources)
    except FatbenchError:  # what the tables show is not what these cells have
        return None
    (table,) = suite.tables
    names: dict[str, str] = {}
    for source in sources:
        heading = shown.get(source, (compare.attack_name(source), ""))[0]
        if heading in names.values():
            heading = Source.parse(source).metric.replace("_", " ")
        names[source] = source if heading in names.values() else heading
    table = table.model_copy(
        update={
            "sources": {names[one.source]: one for one in table.sources.values()},
            "best": {names[source]: shown.get(source, ("", "max"))[1] for source in sources},
            "compare_across": [*table.rows],
        }
    )
    suite = replace(suite, contents=suite.contents.model_copy(update={"tables": [table]}))
    found = build_tables(suite, plan, store, select=select, published=False)
    return found[0] if found else None


def add_published(board: Grid, grids: Sequence[Grid]) -> None:
    """Put the published numbers of the suites' tables beside the same cells and metrics."""
    known = {
        (value.cells, column.source.text): value
        for grid in grids
        for row in grid.rows
        for values in row.values
        for column, value in zip(grid.columns, values, strict=True)
        if value.published is not None and not value.formula and not column.minus
    }
    for row in board.rows:
        for column, value in zip(board.columns, row.values[0], strict=True):
            if (same := known.get((value.cells, column.source.text))) is not None:
                value.published, value.published_std = same.published, same.published_std
                value.published_flag, value.published_select = same.published_flag, same.published_select
                value.comparable = same.comparable


def _board(task: Task, grid: Grid) -> Board | None:
    rows, keep = grid.having(any_number)
    if len(rows) < LEAST or not keep:
        return None
    alone = [p for p in keep if sum(row.values[0][p].mean is not None for row in rows) == 1]
    alone = alone if len(alone) < len(keep) and len(rows) > LEAST else []
    keep = [position for position in keep if position not in alone]
    if "attacker" in grid.axes:
        rows = _strongest_attackers(grid, rows, {key["attacker"] for key in _bounds(task) if "attacker" in key})
    labels = {axis: list(dict.fromkeys(row.key.get(axis, "") for row in rows)) for axis in grid.axes}
    axes = [axis for axis, said in labels.items() if len(said) > 1] or grid.axes[-1:]
    every = [cell.key for _, plan, _ in task.parts.values() for cell in plan.cells]
    of_task = {axis for axis in labels if len({key[axis] for key in every if axis in key}) > 1}
    same = [(axis, said[0]) for axis, said in labels.items() if axis not in (*axes, "suite", "dataset")]
    same = [(axis, said) for axis, said in same if said not in ("", "none")]
    headings = [grid.columns[position].heading for position in alone]
    grid = grid.only(rows, keep)
    at = _strongest(grid)
    if grid.columns[at].metric == "identification":  # what counts stands first
        grid, at = grid.only(grid.rows, [at, *(c for c in range(len(grid.columns)) if c != at)]), 0
    sign = 1 if grid.columns[at].best == "min" else -1

    def order(row: Row) -> float:
        value = row.values[0][at]
        shown = value.mean if value.mean is not None else value.published
        return float("inf") if shown is None else sign * shown

    spec = task.cell.spec
    data = spec["data"]
    title = CATALOGUE[data["name"]].title if data["name"] in CATALOGUE else data["name"]
    title += "".join(f", {VARIANTS.get(said, f'{key} {said}')}" for key, said in data.items() if key != "name" and said)
    split = spec.get("partition")
    about = (
        [f"Split: {format_call.with_all_settings({k: v for k, v in split.items() if v is not None})}"] if split else []
    )
    about += [", ".join(f"{axis} {said}" for axis, said in same)] if same else []
    about += ["each row with the attacker who identifies most; the tables have all attackers"] * ("attacker" in axes)
    quoted = ", ".join(f'"{heading}"' for heading in headings)
    about += [f"the tables have {quoted}, of one row"] * bool(headings)
    about += [f"suites: {', '.join(task.parts)}"]
    baselines = dict(plan.baseline for _, plan, _ in task.parts.values() if plan.baseline)
    shown = next((axis for axis in (*baselines, "defence", "attacker") if axis in axes), axes[-1])
    who = _question(shown, [label for label in labels[shown] if label], baselines.get(shown, ""))
    return Board(
        id=f"board-{digest([task.preset, data, split, task.evaluations, list(task.parts)])[:8]}",
        title=", ".join([who, title, *(said for axis, said in same if axis in of_task)]),
        about="; ".join(about) + ".",
        grid=grid,
        axes=axes,
        rows=sorted(grid.rows, key=order),
        sorted_by=at,
        choices=[
            (axis, labels[axis]) for axis in axes if 1 < len(labels[axis]) <= LABELS and len(labels[axis]) < len(rows)
        ],
        suites=[*task.parts],
        preset=task.preset,
    )


def _question(axis: str, labels: Sequence[str], baseline: str) -> str:
    """What a board asks: "SFAT against FAT", "11 methods against FAT", "7 defences"."""
    others = [label for label in labels if label != baseline]
    names = " and ".join(others) if len(others) <= 2 else f"{len(others)} {axis.removesuffix('s')}s"
    if len(others) < len(labels):
        return f"{names} against {baseline}"
    said = {"defence": " against gradient inversion", "attacker": " by gradient inversion"}
    return names + said.get(axis, "")


def _bounds(task: Task) -> list[Mapping[str, str]]:
    """The places of cells that invert with what only the client has: upper bounds, no attackers."""
    cells = [cell for _, plan, _ in task.parts.values() for cell in plan.cells]
    return [cell.key for cell in cells if threats.of_cell(cell.spec).get("threat") == threats.BOUND]


def _strongest_attackers(grid: Grid, rows: Sequence[Row], bounds: set[str]) -> list[Row]:
    """For each defence, network and suite the attacker who identifies most; an upper bound is no attacker."""
    metrics = [column.metric for column in grid.columns]
    by = [metrics.index(metric) for metric in ("identification", "psnr") if metric in metrics]

    def strength(row: Row) -> tuple[float, ...]:
        means = [row.values[0][position].mean for position in by]
        return tuple(-1.0 if mean is None else mean for mean in means)

    found: dict[tuple[tuple[str, str], ...], Row] = {}
    for row in rows:
        if row.key.get("attacker") in bounds:
            continue
        others = tuple((axis, label) for axis, label in row.key.items() if axis != "attacker")
        if others not in found or strength(row) > strength(found[others]):
            found[others] = row
    return [*found.values()]


def _strongest(grid: Grid) -> int:
    """The column that a leaderboard is first sorted by: the strongest attack of the known order, else the last one."""
    order = {metric: position for position, metric in enumerate(standard_attacks.CHAIN)}
    attacks = [
        position
        for position, column in enumerate(grid.columns)
        if column.source.stage == "evaluation"
        and all(facts.role(spec) != "corruption" for spec in grid.attacks.get(column.source.metric, ()))
    ]
    if not attacks:
        metrics = [column.metric for column in grid.columns]
        return metrics.index("identification") if "identification" in metrics else 0
    known = [position for position in attacks if order.get(grid.columns[position].metric, 0) > 0]
    return max(known or attacks, key=lambda position: (order.get(grid.columns[position].metric, 0), position))
