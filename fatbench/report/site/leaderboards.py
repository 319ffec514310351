"""Leaderboards: every row of one task, of any suite, in one table that can be sorted.

A task is a data set with its variant, a split among clients, and attacks with their settings, in one preset. Attacks on
privacy are a task of their suite. The table is a grid like any other (`combined`), so its marks and notes are those of
the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import FatbenchError
from fatbench.report import contrasts, sentences
from fatbench.report.contrasts import Difference
from fatbench.report.numbers.sources import Source
from fatbench.report.pairs import measured_numbers
from fatbench.report.tables import combined
from fatbench.report.tables.number_format import with_texts
from fatbench.report.tables.sheet import Row, Sheet, any_number
from fatbench.store.selection import Checkpoint
from fatbench.suite import facts, format_call, standard_attacks, threats
from fatbench.suite.cells import Cell, Plan, digest
from fatbench.suite.files import Suite
from fatbench.suite.folders import METHODS, OTHER, PAPERS, paper_of

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
    parts: dict[str, tuple[Suite, Plan, list[Cell]]] = field(default_factory=dict)
    headlines: list[Difference] = field(default_factory=list)  # declared comparisons that suites are quoted with


@dataclass
class Board:
    """A leaderboard, ready to print."""

    id: str
    title: str
    about: str
    grid: Sheet
    axes: list[str]  # in which its rows differ
    rows: list[Row]  # the best first; those without a measured number last
    sorted_by: int  # position of the column
    choices: list[tuple[str, list[str]]]  # axis -> labels
    differences: list[Difference] = field(default_factory=list)  # of its rows, where they were tested
    sentence: str = ""  # what the numbers come to
    answer: Difference | None = None  # the one that the sentence tells
    declared: bool = False  # a suite declares it
    suites: list[str] = field(default_factory=list)
    preset: str = ""


def tasks(suite_plans: Sequence[Part]) -> list[Task]:
    """The tasks of some suites. A cell belongs to a task that asks nothing else under the name of an attack."""
    tasks_by_content: dict[str, list[Task]] = {}  # digest of data, split and preset -> its tasks
    for suite, plan in suite_plans:
        for cell in plan.cells:
            evaluations = {evaluation.label: evaluation.id for evaluation in cell.evaluations}
            content = digest(
                [plan.preset, cell.spec["data"], cell.spec.get("partition"), cell.spec.get("test"),
                 suite.name if "attacker" in cell.key else ""]
            )  # fmt: skip
            same_content = tasks_by_content.setdefault(content, [])
            task = next((task for task in same_content if _asks_nothing_else(task, cell)), None)
            if task is None:
                same_content.append(task := Task(plan.preset, cell, {}))
            task.evaluations |= evaluations
            task.parts.setdefault(suite.name, (suite, plan, []))[2].append(cell)
    return [task for same_content in tasks_by_content.values() for task in same_content]


def _asks_nothing_else(task: Task, cell: Cell) -> bool:
    return all(task.evaluations.get(one.label, one.id) == one.id for one in cell.evaluations)


def _set_headlines(suite: Suite, plan: Plan, among: Sequence[Task], declared: Sequence[Difference]) -> None:
    """Give each headline of a suite to the task with most of its cells, which then has the rows of every side.

    A headline over several data sets has no board of its own and is told by those that have a cell of it.
    """
    for one in filter(None, (contrasts.quoted(tests, declared) for tests in suite.tests)):
        shared = {i: sum(cell.id in one.cells for cell in task.parts[suite.name][2]) for i, task in enumerate(among)}
        fullest = among[max(shared, key=lambda i: shared[i])]
        cells, of_headline = fullest.parts[suite.name][2], [cell for cell in plan.cells if cell.id in one.cells]
        if all(
            _asks_nothing_else(fullest, cell) and cell.spec["data"] == fullest.cell.spec["data"] for cell in of_headline
        ):
            cells += [cell for cell in of_headline if cell not in cells]
            fullest.headlines.append(one)
        else:
            for i, task in enumerate(among):
                task.headlines += [one] * (shared[i] > 0)


def boards(suite_plans: Sequence[Part], grids: Sequence[Sheet], store: Store, select: Checkpoint) -> list[Board]:
    """The leaderboards of some suites; grids: their tables, which know the published numbers. Those that say nothing
    come last.
    """
    found_tasks = tasks(suite_plans)
    declared: dict[tuple[str, str], list[Difference]] = {}  # suite, preset -> what it declares
    for suite, plan in suite_plans:
        numbers_of = measured_numbers(store, {cell.id for cell in plan.cells}, select).__getitem__
        declared[suite.name, plan.preset] = contrasts.declared_by(suite.tests, plan, numbers_of)
        among = [task for task in found_tasks if task.preset == plan.preset and suite.name in task.parts]
        if among:
            _set_headlines(suite, plan, among, declared[suite.name, plan.preset])
    all_boards = []
    for task in sorted(found_tasks, key=lambda task: paper_order(next(iter(task.parts)))):
        grid = _grid(task, store, select)
        if grid is not None:
            grid = with_published(grid, grids)
            if (board := _board(task, grid)) is not None:
                _set_answer(board, task, store, select, declared)
                all_boards.append(board)
    _distinguish_titles(all_boards)
    return sorted(all_boards, key=lambda board: not board.sentence)


def _distinguish_titles(boards: Sequence[Board]) -> None:
    """Add suites or preset to the titles of boards that would share one."""
    boards_by_title: dict[str, list[Board]] = {}
    for board in boards:
        boards_by_title.setdefault(board.title, []).append(board)
    for same_title in boards_by_title.values():
        names = [(", ".join(board.suites), board.preset) for board in same_title]
        differing = [position for position in (0, 1) if len({name[position] for name in names}) > 1]
        for board, name in zip(same_title, names, strict=True):
            board.title += f" ({', '.join(name[position] for position in differing)})" if differing else ""


def difference(board: Board, row: Row) -> Difference | None:
    """The difference of a row from its baseline; None for the baseline itself and for untested rows."""
    row_cells = {*row.values[0][board.sorted_by].cells}
    return next((candidate for candidate in board.differences if row_cells & candidate.cells), None)


def paper_order(suite: str) -> int:
    """The position of a suite's paper among the papers."""
    return [*dict.fromkeys(PAPERS.values()), OTHER].index(paper_of(suite))


def _set_answer(
    board: Board, task: Task, store: Store, select: Checkpoint, declared: Mapping[tuple[str, str], list[Difference]]
) -> None:
    """Compare the rows with the baselines of their suites and set the board's answer and sentence.

    The headline that a suite declares goes before.
    """
    column = board.grid.columns[board.sorted_by]
    if "attacker" in board.grid.axes:
        board.sentence = _privacy_sentence(board)
    for suite, plan, cells in task.parts.values() if column.source.stage == "evaluation" else ():
        numbers_of = measured_numbers(store, {cell.id for cell in cells}, select).__getitem__
        of_board = replace(plan, cells=cells)
        compared = contrasts.from_baseline(of_board, numbers_of, [column.metric], declared[suite.name, plan.preset])
        board.differences += [one for one in compared if one.test is not None]
    if task.headlines:
        board.answer, board.sentence = task.headlines[0], sentences.finding(task.headlines[0])
    elif board.differences:
        # of several groups of rows, the one whose baseline is strongest: adversarial training under an attack
        strengths = [fmean(one.values[1]) for one in board.differences]
        strongest = [one for one, mean in zip(board.differences, strengths, strict=True) if mean == max(strengths)]
        board.answer = next((one for one in strongest if one.sides[0].startswith(METHODS)), strongest[0])
        row_text = ", ".join(f"{axis} {label}" for axis, label in board.answer.labels.items() if axis in board.axes)
        board.sentence = f"{row_text}: " * bool(row_text) + sentences.sentence(board.answer)
    if board.answer is not None:
        families = {one.family for of_suite in declared.values() for one in of_suite}
        board.declared = board.answer.family in families


def _privacy_sentence(board: Board) -> str:
    """A sentence on the images that the strongest attacker identifies, without a defence and with the best."""
    column_index = next((i for i, column in enumerate(board.grid.columns) if column.metric == "identification"), None)
    if column_index is None or "defence" not in board.axes:
        return ""
    identified = [(mean, row) for row in board.rows if (mean := row.values[0][column_index].mean) is not None]
    chances = [chance for _, row in identified if (chance := row.values[0][column_index].chance) is not None]
    undefended = [share for share, row in identified if row.key.get("defence") == "none"]
    defended = [(share, row) for share, row in identified if row.key.get("defence") != "none"]
    if not undefended or not defended:
        return ""
    share, row = min(defended, key=lambda share_and_row: share_and_row[0])
    statement = f"The strongest attacker identifies {100 * max(undefended):.0f} % of the clients without a defence"
    guesses = f"; random guesses, at most {100 * max(chances):.2g} %" if chances else ""
    if share >= max(undefended):
        return f"{statement}, and as many with each defence{guesses}"
    return f"{statement}, and {100 * share:.0f} % with {row.key['defence']} ({row.key['attacker']}){guesses}"


def _grid(task: Task, store: Store, select: Checkpoint) -> Sheet | None:
    """One table of all cells of a task, in which every row is compared with every other; None without numbers."""
    from fatbench.report import build_tables

    task_suites = [(suite, replace(plan, cells=cells)) for suite, plan, cells in task.parts.values()]
    heading_by_source: dict[str, tuple[str, str]] = {}  # source -> heading, best
    for suite, _ in task_suites:
        for table in suite.tables:
            for heading, source in table.values.items():
                parsed = Source.parse(source)
                # of an attack's headings some speak of their table's rows: "AT, PGD-7", and "server" for natural
                is_own = parsed.stage == "train" or (parsed.metric != "natural" and heading not in table.conditions)
                if not parsed.stage.startswith(("gap", "prior")):
                    heading_text = heading if is_own else standard_attacks.heading(parsed.metric)
                    heading_by_source.setdefault(source, (heading_text, table.best[heading]))
    sources = list(task.evaluations) or list(heading_by_source)
    try:
        suite, plan = combined.combine(task_suites, (), sources)
    except FatbenchError:  # what the tables show is not what these cells have
        return None
    (table,) = suite.tables
    names: dict[str, str] = {}
    for source in sources:
        heading = heading_by_source.get(source, (standard_attacks.heading(source), ""))[0]
        if heading in names.values():
            heading = Source.parse(source).metric.replace("_", " ")
        names[source] = source if heading in names.values() else heading
    table = table.model_copy(
        update={
            "sources": {names[heading_spec.source]: heading_spec for heading_spec in table.sources.values()},
            "best": {names[source]: heading_by_source.get(source, ("", "max"))[1] for source in sources},
            "compare_across": [*table.rows],
        }
    )
    suite = replace(suite, contents=suite.contents.model_copy(update={"tables": [table]}))
    grids = build_tables(suite, plan, store, select=select, published=False)
    return grids[0] if grids else None


def with_published(board: Sheet, grids: Sequence[Sheet]) -> Sheet:
    """The board with the published numbers of the suites' tables beside the same cells and metrics."""
    fields = ["published", "published_std", "published_flag", "published_select", "comparable"]
    published = {
        (entry.cells, column.source.text): [getattr(entry, name) for name in fields]
        for grid in grids
        for entry in grid.all()
        for column in [grid.columns[entry.column]]
        if entry.published is not None and not entry.formula and not column.minus
    }
    entries = board.entries.copy()
    for i, entry in enumerate(board.all()):
        if (beside := published.get((entry.cells, board.columns[entry.column].source.text))) is not None:
            for name, value in zip(fields, beside, strict=True):
                entries.at[i, name] = value
    return replace(board, entries=with_texts(entries, board.columns))


def _board(task: Task, grid: Sheet) -> Board | None:
    rows, positions = grid.having(any_number)
    if len(rows) < LEAST or not positions:
        return None
    single_columns = [p for p in positions if sum(row.values[0][p].mean is not None for row in rows) == 1]
    single_columns = single_columns if len(single_columns) < len(positions) and len(rows) > LEAST else []
    positions = [position for position in positions if position not in single_columns]
    if "attacker" in grid.axes:
        rows = _strongest_attackers(grid, rows, {key["attacker"] for key in _bounds(task) if "attacker" in key})
    labels = {axis: list(dict.fromkeys(row.key.get(axis, "") for row in rows)) for axis in grid.axes}
    axes = [axis for axis, label_text in labels.items() if len(label_text) > 1] or grid.axes[-1:]
    all_keys = [cell.key for _, plan, _ in task.parts.values() for cell in plan.cells]
    task_axes = {axis for axis in labels if len({key[axis] for key in all_keys if axis in key}) > 1}
    constant_labels = [
        (axis, label_text[0]) for axis, label_text in labels.items() if axis not in (*axes, "suite", "dataset")
    ]
    constant_labels = [(axis, label_text) for axis, label_text in constant_labels if label_text not in ("", "none")]
    headings = [grid.columns[position].heading for position in single_columns]
    grid = grid.only(rows, positions)
    sorted_column = _strongest_column(grid)
    if grid.columns[sorted_column].metric == "identification":  # what counts stands first
        grid, sorted_column = (
            grid.only(grid.rows, [sorted_column, *(c for c in range(len(grid.columns)) if c != sorted_column)]),
            0,
        )
    sign = 1 if grid.columns[sorted_column].best == "min" else -1

    def order(row: Row) -> tuple[bool, bool, float]:
        value = row.values[0][sorted_column]
        accuracy = value.mean if value.mean is not None else value.published
        unmeasured = all(value.mean is None for value in row.values[0])
        return value.mean is None, unmeasured, float("inf") if accuracy is None else sign * accuracy

    spec = task.cell.spec
    data = spec["data"]
    title = CATALOGUE[data["name"]].title if data["name"] in CATALOGUE else data["name"]
    title += "".join(
        f", {VARIANTS.get(label_text, f'{key} {label_text}')}"
        for key, label_text in data.items()
        if key != "name" and label_text
    )
    split = spec.get("partition")
    remarks = (
        [f"Split: {format_call.with_all_settings({k: v for k, v in split.items() if v is not None})}"] if split else []
    )
    remarks += [", ".join(f"{axis} {label_text}" for axis, label_text in constant_labels)] if constant_labels else []
    remarks += ["each row with the attacker who identifies most; the tables have all attackers"] * ("attacker" in axes)
    quoted = ", ".join(f'"{heading}"' for heading in headings)
    remarks += [f"the tables have {quoted}, of one row"] * bool(headings)
    remarks += [f"suites: {', '.join(task.parts)}"]
    baselines = dict(plan.baseline for _, plan, _ in task.parts.values() if plan.baseline)
    question_axis = next((axis for axis in (*baselines, "defence", "attacker") if axis in axes), axes[-1])
    question = _question(
        question_axis, [label for label in labels[question_axis] if label], baselines.get(question_axis, "")
    )
    rows = sorted(grid.rows, key=order)
    return Board(
        id=f"board-{digest([task.preset, data, split, task.evaluations, list(task.parts)])[:8]}",
        title=", ".join([question, title, *(label_text for axis, label_text in constant_labels if axis in task_axes)]),
        about="; ".join(remarks) + ".",
        grid=grid,
        axes=axes,
        rows=rows,
        sorted_by=sorted_column,
        choices=[
            (axis, labels[axis]) for axis in axes if 1 < len(labels[axis]) <= LABELS and len(labels[axis]) < len(rows)
        ],
        suites=[*task.parts],
        preset=task.preset,
    )


def _question(axis: str, labels: Sequence[str], baseline: str) -> str:
    """The question of a board: "SFAT against FAT", "11 methods against FAT", "7 defences"."""
    other_labels = [label for label in labels if label != baseline]
    names = " and ".join(other_labels) if len(other_labels) <= 2 else f"{len(other_labels)} {axis.removesuffix('s')}s"
    if len(other_labels) < len(labels):
        return f"{names} against {baseline}"
    suffixes = {"defence": " against gradient inversion", "attacker": " by gradient inversion"}
    return names + suffixes.get(axis, "")


def _bounds(task: Task) -> list[Mapping[str, str]]:
    """The keys of cells whose attacker knows what only the client has: upper bounds, no real attackers."""
    cells = [cell for _, plan, _ in task.parts.values() for cell in plan.cells]
    return [cell.key for cell in cells if threats.of_cell(cell.spec).get("threat") == threats.BOUND]


def _strongest_attackers(grid: Sheet, rows: Sequence[Row], bounds: set[str]) -> list[Row]:
    """For each defence, network and suite the attacker who identifies most; an upper bound is no attacker."""
    metrics = [column.metric for column in grid.columns]
    ranking_columns = [metrics.index(metric) for metric in ("identification", "psnr") if metric in metrics]

    def identified(row: Row) -> tuple[float, ...]:
        means = [row.values[0][position].mean for position in ranking_columns]
        return tuple(-1.0 if mean is None else mean for mean in means)

    strongest: dict[tuple[tuple[str, str], ...], Row] = {}
    for row in rows:
        if row.key.get("attacker") in bounds:
            continue
        other_labels = tuple((axis, label) for axis, label in row.key.items() if axis != "attacker")
        if other_labels not in strongest or identified(row) > identified(strongest[other_labels]):
            strongest[other_labels] = row
    return [*strongest.values()]


def _strongest_column(grid: Sheet) -> int:
    """The column that a leaderboard is first sorted by: the strongest attack of the known order, else the last one.

    A column with published numbers alone is it only where nothing is measured.
    """
    measured = {p for row in grid.rows for p, value in enumerate(row.values[0]) if value.mean is not None}
    attacks = [
        position
        for position, column in enumerate(grid.columns)
        if column.source.stage == "evaluation"
        and (position in measured or not measured)
        and all(facts.role(spec) != "corruption" for spec in grid.attacks.get(column.source.metric, ()))
    ]
    if not attacks:
        metrics = [column.metric for column in grid.columns]
        return metrics.index("identification") if "identification" in metrics else 0
    ranked_attacks = [position for position in attacks if grid.columns[position].metric in standard_attacks.TITLES]
    strengths = {position: standard_attacks.strength(grid.columns[position].metric) for position in attacks}
    return max(ranked_attacks or attacks, key=lambda position: (strengths[position], position))
