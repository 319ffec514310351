"""Leaderboards: every row of one task, of any suite, in one table that can be sorted.

A task is a data set with its variant, a split among clients, and attacks with their settings, in one preset. Attacks on
privacy are a task of their suite. The table is a sheet like any other (`points.combined`), so its marks and notes are
those of the tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import FatbenchError
from fatbench.report import contrasts, sentences
from fatbench.report.contrasts import Difference
from fatbench.report.numbers import shown_runs
from fatbench.report.numbers.long import columns
from fatbench.report.numbers.points import combined
from fatbench.report.numbers.sources import OVER_OWN, Source
from fatbench.report.numbers.stored import read
from fatbench.report.pairs import measured_numbers
from fatbench.report.tables.entries import PUBLISHED, sheets
from fatbench.report.tables.number_format import with_texts
from fatbench.report.tables.sheet import Row, Sheet, any_number
from fatbench.store.rows import grouped
from fatbench.store.selection import Checkpoint
from fatbench.suite import facts, format_call, standard_attacks, threats
from fatbench.suite.cells import Cell, Plan, digest
from fatbench.suite.files import Suite
from fatbench.suite.folders import METHODS, OTHER, PAPERS, paper_of
from fatbench.suite.tables import Table

if TYPE_CHECKING:
    from fatbench.store.stages import Store

Part = tuple[Suite, Plan]
LEAST = 2  # rows that a leaderboard needs
VARIANTS = {"jpeg": "as JPEG", "jpeg75": "as JPEG"}
LABELS = 12  # of an axis that can be chosen from a list


@dataclass
class Task:
    """The cells that one leaderboard compares."""

    preset: str
    cell: Cell  # the first of them
    evaluations: dict[str, str]  # label -> id: the attack with its settings and number of images
    parts: dict[str, Part] = field(default_factory=dict)  # suite -> with its cells of this task alone
    labels: set[tuple[str, str]] = field(default_factory=set)  # (axis, label) of all cells of these suites
    headlines: list[Difference] = field(default_factory=list)  # declared comparisons that suites are quoted with

    def takes(self, cell: Cell) -> bool:
        """Whether a cell asks nothing else under the name of an attack."""
        return all(self.evaluations.get(one.label, one.id) == one.id for one in cell.evaluations)

    @property
    def cells(self) -> list[Cell]:
        return [cell for _, plan in self.parts.values() for cell in plan.cells]


@dataclass
class Board:
    """A leaderboard, ready to print."""

    id: str
    title: str
    about: str
    task: Task
    grid: Sheet  # the best row first; those without a measured number last
    axes: list[str]  # in which its rows differ
    sorted_by: int  # position of the column
    choices: list[tuple[str, list[str]]]  # axis -> labels
    asked: set[str]  # the labels that its question is about
    differences: list[Difference]  # of its rows, where they were tested
    sentence: str = ""  # what the numbers come to
    answer: Difference | None = None  # the one that the sentence tells
    declared: bool = False  # a suite declares it


def tasks(suite_plans: Sequence[Part]) -> list[Task]:
    """The tasks of some suites. A cell belongs to a task that asks nothing else under the name of an attack."""
    by_content: dict[str, list[Task]] = {}  # digest of data, split and preset -> its tasks
    for suite, plan in suite_plans:
        labels = {item for cell in plan.cells for item in cell.key.items()}
        for cell in plan.cells:
            own = suite.name if "attacker" in cell.key else ""
            spec = cell.spec
            content = digest([plan.preset, spec["data"], spec.get("partition"), spec.get("test"), own])
            task = next((task for task in by_content.get(content, ()) if task.takes(cell)), None)
            if task is None:
                by_content.setdefault(content, []).append(task := Task(plan.preset, cell, {}))
            task.labels |= labels
            task.evaluations |= {one.label: one.id for one in cell.evaluations}
            task.parts.setdefault(suite.name, (suite, replace(plan, cells=[])))[1].cells.append(cell)
    return [task for of_content in by_content.values() for task in of_content]


def boards(suite_plans: Sequence[Part], grids: Sequence[Sheet], store: Store, select: Checkpoint) -> list[Board]:
    """The leaderboards of some suites; grids: their tables, which know the published numbers. Those that say nothing
    come last.
    """
    found_tasks = tasks(suite_plans)
    declared: dict[tuple[str, str], list[Difference]] = {}  # suite, preset -> what it declares
    for suite, plan in suite_plans:
        if not suite.tests:
            continue
        numbers_of = measured_numbers(store, {cell.id for cell in plan.cells}, select).__getitem__
        of_suite = declared[suite.name, plan.preset] = contrasts.declared_by(suite.tests, plan, numbers_of)
        among = [task for task in found_tasks if task.preset == plan.preset and suite.name in task.parts]
        for tests in suite.tests if among else ():
            if (headline := contrasts.quoted(tests, of_suite)) is not None:
                _give(headline, suite.name, plan, among)
    found_tasks.sort(key=lambda task: paper_order(next(iter(task.parts))))
    made = [board for task in found_tasks if (board := _board(task, grids, declared, store, select)) is not None]
    for same in grouped((board.title, board) for board in made).values():  # told apart by their suites or preset
        names = [(", ".join(board.task.parts), board.task.preset) for board in same]
        differing = [i for i in (0, 1) if len({name[i] for name in names}) > 1]
        for board, name in zip(same, names, strict=True):
            board.title += f" ({', '.join(name[i] for i in differing)})" * bool(differing)
    return sorted(made, key=lambda board: not board.sentence)


def _give(headline: Difference, suite: str, plan: Plan, among: Sequence[Task]) -> None:
    """Give a headline to the task with most of its cells, which then has the rows of every side.

    A headline over several data sets has no board of its own and is told by those that have a cell of it.
    """
    shared = [sum(cell.id in headline.cells for cell in task.parts[suite][1].cells) for task in among]
    fullest = among[shared.index(max(shared))]
    cells, of_headline = fullest.parts[suite][1].cells, [cell for cell in plan.cells if cell.id in headline.cells]
    if all(fullest.takes(cell) and cell.spec["data"] == fullest.cell.spec["data"] for cell in of_headline):
        cells += [cell for cell in of_headline if cell not in cells]
        fullest.headlines.append(headline)
        return
    for task, count in zip(among, shared, strict=True):
        task.headlines += [headline] * (count > 0)


def paper_order(suite: str) -> int:
    """The position of a suite's paper among the papers."""
    return [*dict.fromkeys(PAPERS.values()), OTHER].index(paper_of(suite))


def _privacy_sentence(board: Board) -> str:
    """A sentence on the images that the strongest attacker identifies, without a defence and with the best."""
    column = next((i for i, column in enumerate(board.grid.columns) if column.metric == "identification"), None)
    if column is None or "defence" not in board.axes:
        return ""
    entries = [(row.key, row.values[0][column]) for row in board.grid.rows if row.values[0][column].mean is not None]
    undefended = [entry.mean for key, entry in entries if key.get("defence") == "none"]
    defended = [(entry.mean, key) for key, entry in entries if key.get("defence") != "none"]
    chances = [entry.chance for _, entry in entries if entry.chance is not None]
    if not undefended or not defended:
        return ""
    share, key = min(defended, key=lambda one: one[0])
    statement = f"The strongest attacker identifies {100 * max(undefended):.0f} % of the clients without a defence"
    guesses = f"; random guesses, at most {100 * max(chances):.2g} %" if chances else ""
    if share >= max(undefended):
        return f"{statement}, and as many with each defence{guesses}"
    return f"{statement}, and {100 * share:.0f} % with {key['defence']} ({key['attacker']}){guesses}"


def _table(task: Task) -> tuple[Table, Plan] | None:
    """One table of all cells of a task, in which every row is compared with every other; None: what the suites' tables
    show is not what these cells have.
    """
    known: dict[str, tuple[str, str]] = {}  # source -> heading, best
    for table in (table for suite, _ in task.parts.values() for table in suite.tables):
        for heading, text in table.values.items():
            source = Source.parse(text)
            # of an attack's headings some speak of their table's rows: "AT, PGD-7", and "server" for natural
            own = source.stage == "train" or (source.metric != "natural" and heading not in table.conditions)
            if not source.stage.startswith(("gap", "prior")) and source.stage not in OVER_OWN:
                named = heading if own else standard_attacks.heading(source.metric)
                known.setdefault(text, (named, table.best[heading]))
    sources = list(task.evaluations) or list(known)
    try:
        suite, plan = combined([*task.parts.values()], (), sources)
    except FatbenchError:
        return None
    names: dict[str, str] = {}
    for text in sources:
        wordings = (known.get(text, (standard_attacks.heading(text),))[0], Source.parse(text).metric.replace("_", " "))
        names[text] = next((name for name in wordings if name not in names.values()), text)
    (table,) = suite.tables
    changed = {
        "sources": {names[spec.source]: spec for spec in table.sources.values()},
        "best": {names[text]: known.get(text, ("", "max"))[1] for text in sources},
        "compare_across": [*table.rows],
    }
    return table.model_copy(update=changed), plan


def with_published(board: Sheet, grids: Sequence[Sheet]) -> Sheet:
    """The board with the published numbers of the suites' tables beside the same cells and metrics."""
    published = {
        (entry.cells, column.source.text): entry
        for grid in grids
        for entry in grid.all()
        for column in [grid.columns[entry.column]]
        if entry.published is not None and not entry.formula and not column.minus
    }
    keys = ((entry.cells, board.columns[entry.column].source.text) for entry in board.all())
    beside = [published.get(key, own) for key, own in zip(keys, board.all(), strict=True)]
    known = columns(PUBLISHED, [[getattr(entry, name) for name in PUBLISHED] for entry in beside])
    return replace(board, entries=with_texts(board.entries.assign(**known), board.columns))


def _board(
    task: Task, grids: Sequence[Sheet], declared: Mapping[tuple[str, str], Sequence[Difference]], store: Store,
    select: Checkpoint,
) -> Board | None:  # fmt: skip
    """The leaderboard of a task; None where fewer than two rows have a number.

    Its rows are compared with the baselines of their suites; a headline that a suite declares answers it first.
    """
    if (found := _table(task)) is None:
        return None
    table, combined_plan = found
    numbers = read(table.values.values(), combined_plan, store, select)
    made = sheets([table], combined_plan, numbers, published=False)
    boards = (_arranged(task, with_published(sheet, grids)) for sheet in made)
    if (board := next(boards, None)) is None:
        return None
    if note := shown_runs.note(store, [id for _, id in board.grid.points]):
        board.grid.notes.append(("replicates", note))
    column = board.grid.columns[board.sorted_by]
    if "attacker" in board.grid.axes:
        board.sentence = _privacy_sentence(board)
    for suite, plan in task.parts.values() if column.source.stage == "evaluation" else ():
        own = declared.get((suite.name, plan.preset), ())
        compared = contrasts.from_baseline(plan, numbers.evaluated, [column.metric], own)
        board.differences += [one for one in compared if one.test is not None]
    if task.headlines:
        board.answer, board.sentence = task.headlines[0], sentences.finding(task.headlines[0])
    elif board.differences:
        # of several groups of rows, the one whose baseline is strongest: adversarial training under an attack
        strength = max(fmean(one.values[1]) for one in board.differences)
        strongest = [one for one in board.differences if fmean(one.values[1]) == strength]
        board.answer = next((one for one in strongest if one.sides[0].startswith(METHODS)), strongest[0])
        row_text = ", ".join(f"{axis} {label}" for axis, label in board.answer.labels.items() if axis in board.axes)
        board.sentence = f"{row_text}: " * bool(row_text) + sentences.sentence(board.answer)
    families = {one.family for of_suite in declared.values() for one in of_suite}
    board.declared = board.answer is not None and board.answer.family in families
    return board


def _arranged(task: Task, grid: Sheet) -> Board | None:
    """The rows and columns of a board in their order, with its title and what is said above it."""
    rows, positions = grid.having(any_number)
    if len(rows) < LEAST or not positions:
        return None
    of_one_row = [p for p in positions if sum(row.values[0][p].mean is not None for row in rows) == 1]
    of_one_row = of_one_row if len(of_one_row) < len(positions) and len(rows) > LEAST else []
    quoted = ", ".join(f'"{grid.columns[p].heading}"' for p in of_one_row)
    if "attacker" in grid.axes:
        rows = _strongest_attackers(grid, rows, task)
    grid = grid.only(rows, [position for position in positions if position not in of_one_row])
    sorted_by = _strongest_column(grid)
    if grid.columns[sorted_by].metric == "identification":  # what counts stands first
        grid = grid.only(grid.rows, [sorted_by, *(c for c in range(len(grid.columns)) if c != sorted_by)])
        sorted_by = 0
    labels = {axis: list(dict.fromkeys(row.key.get(axis, "") for row in rows)) for axis in grid.axes}
    axes = [axis for axis, of_axis in labels.items() if len(of_axis) > 1] or grid.axes[-1:]
    alike = [(axis, of_axis[0]) for axis, of_axis in labels.items() if axis not in (*axes, "suite", "dataset")]
    alike = [(axis, label) for axis, label in alike if label not in ("", "none")]
    data, split = task.cell.spec["data"], task.cell.spec.get("partition")
    title = CATALOGUE[data["name"]].title if data["name"] in CATALOGUE else data["name"]
    variants = [f", {VARIANTS.get(text, f'{key} {text}')}" for key, text in data.items() if key != "name" and text]
    remarks = [
        split and f"Split: {format_call.with_all_settings({k: v for k, v in split.items() if v is not None})}",
        ", ".join(f"{axis} {label}" for axis, label in alike),
        "each row with the attacker who identifies most; the tables have all attackers" * ("attacker" in axes),
        f"the tables have {quoted}, of one row" * bool(quoted),
        f"suites: {', '.join(task.parts)}",
    ]
    vary = Counter(axis for axis, _ in task.labels)
    baselines = dict(plan.baseline for _, plan in task.parts.values() if plan.baseline)
    asked = next((axis for axis in (*baselines, "defence", "attacker") if axis in axes), axes[-1])
    question = _question(asked, [label for label in labels[asked] if label], baselines.get(asked, ""))
    sign = 1 if grid.columns[sorted_by].best == "min" else -1

    def order(row: Row) -> tuple[bool, bool, float]:
        entry = row.values[0][sorted_by]
        number = entry.published if entry.mean is None else entry.mean
        unmeasured = all(one.mean is None for one in row.values[0])
        return entry.mean is None, unmeasured, float("inf") if number is None else sign * number

    return Board(
        id=f"board-{digest([task.preset, data, split, task.evaluations, list(task.parts)])[:8]}",
        title=", ".join([question, title + "".join(variants), *(label for axis, label in alike if vary[axis] > 1)]),
        about="; ".join(filter(None, remarks)) + ".",
        task=task,
        grid=grid.only(sorted(grid.rows, key=order), range(len(grid.columns))),
        axes=axes,
        sorted_by=sorted_by,
        choices=[(axis, labels[axis]) for axis in axes if 1 < len(labels[axis]) < min(LABELS + 1, len(rows))],
        asked={*labels[asked]},
        differences=[],
    )


def _question(axis: str, labels: Sequence[str], baseline: str) -> str:
    """The question of a board: "SFAT against FAT", "11 methods against FAT", "7 defences"."""
    others = [label for label in labels if label != baseline]
    names = " and ".join(others) if len(others) <= 2 else f"{len(others)} {axis.removesuffix('s')}s"
    if len(others) < len(labels):
        return f"{names} against {f'no {axis}' if baseline == 'none' else baseline}"
    suffixes = {"defence": " against gradient inversion", "attacker": " by gradient inversion"}
    return names + suffixes.get(axis, "")


def _strongest_attackers(grid: Sheet, rows: Sequence[Row], task: Task) -> list[Row]:
    """For each defence, network and suite the attacker who identifies most; one who knows what only the client has is
    an upper bound and no attacker.
    """
    of_threats = [(cell.key.get("attacker"), threats.of_cell(cell.spec).get("threat")) for cell in task.cells]
    metrics = [column.metric for column in grid.columns]
    ranked_by = [metrics.index(metric) for metric in ("identification", "psnr") if metric in metrics]
    attackers = [row for row in rows if (row.key.get("attacker"), threats.BOUND) not in of_threats]
    by_others = grouped((tuple(one for one in row.key.items() if one[0] != "attacker"), row) for row in attackers)

    def identified(row: Row) -> list[float]:
        means = [row.values[0][position].mean for position in ranked_by]
        return [-1.0 if mean is None else mean for mean in means]

    return [max(of_others, key=identified) for of_others in by_others.values()]


def _strongest_column(grid: Sheet) -> int:
    """The column that a leaderboard is first sorted by: the strongest attack of the known order, else the last one.

    A column with published numbers alone is it only where nothing is measured.
    """
    measured = {entry.column for entry in grid.all() if entry.mean is not None} or {*range(len(grid.columns))}
    metrics = [column.metric for column in grid.columns]
    ranks = [
        (metric in standard_attacks.TITLES, standard_attacks.strength(metric), position)
        for position, (metric, column) in enumerate(zip(metrics, grid.columns, strict=True))
        if column.source.stage == "evaluation" and position in measured
        and all(facts.role(spec) != "corruption" for spec in grid.attacks.get(column.source.metric, ()))
    ]  # fmt: skip
    if ranks:
        return max(ranks)[2]
    return metrics.index("identification") if "identification" in metrics else 0
