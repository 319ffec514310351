"""From measurements to grids: one per table of a suite, every number with its seeds, its spread and the published one.

Nothing here imports torch.

    build(suite, plan, query.numbers_of_sources(sources, plan, store, "last"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fatbench.data.catalogue import CATALOGUE
from fatbench.report.numbers import provenance
from fatbench.report.numbers.measurements import (
    CLIENT,
    EVERY,
    Numbers,
    Source,
    clients,
    metric_names,
)
from fatbench.report.numbers.published import Lookup
from fatbench.report.numbers.statistics import paired
from fatbench.report.tables import significance
from fatbench.report.tables.common_images import OnCommonImages
from fatbench.report.tables.grid import Column, Grid, Group, PairedComparison, Row, Value, label
from fatbench.report.tables.grid_points import (
    Names,
    TablePoints,
    absent_headings,
    baselines,
    measures,
    point_key,
    points_of_table,
    spread,
)
from fatbench.report.tables.notes import as_published, checkpoint, footnotes, notes
from fatbench.report.tables.relative import difference, ends_of, placed, value_of
from fatbench.suite import confounders, cost, facts, perturbation, plugins
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.confounders import Confounder
from fatbench.suite.external_models import SUITE as EVALUATED
from fatbench.suite.external_models import describe_model
from fatbench.suite.files import Suite
from fatbench.suite.model import Condition
from fatbench.suite.tables import OVER, SERIES, Table


def build(
    suite: Suite,
    plan: Plan,
    numbers: Numbers,
    *,
    published: bool = True,
    evaluated: Sequence[Cell] = (),
    digits: int = 2,
    images: str = "all",
) -> list[Grid]:
    """The tables of a suite that the plan's cells have a row in.

    numbers: of the plan's cells and of those evaluated: models that were not trained here; each has a row below those
    of the plan and is compared with none of them. published: whether the papers' numbers are shown. digits: after the
    point of percentages. images: those of each attack ("all"), or those that all attacks of a table have ("common").
    SpecError: a table lumps together points of the grid that differ in an axis it does not name.
    """
    grids = (
        _grid(plan, spread(table, plan), numbers, published, evaluated, digits=digits, images=images)
        for table in suite.tables
    )
    return [grid for grid in grids if grid is not None]


@dataclass(frozen=True)
class _TableRequest:
    """A table, the points of the grid that it shows, and where their numbers come from."""

    plan: Plan
    table: Table
    numbers: Numbers
    found: TablePoints
    sources: Mapping[str, Source]
    headings: Sequence[str]  # those of `sources` that some point has a number of
    axes: list[str]  # of the rows
    client: Mapping[str, int]  # the index of a row's client, by its label
    lookup: Lookup | None  # of published numbers
    facts: provenance.TableFacts = field(default_factory=provenance.TableFacts)

    @cached_property
    def row_keys(self) -> list[Names]:
        return list(dict.fromkeys(row for row, _ in self.found))

    @cached_property
    def group_keys(self) -> list[Names]:
        return list(dict.fromkeys(group for _, group in self.found))

    def minus(self, heading: str) -> Condition:
        """The labels of the point that the heading's numbers are differences from; empty: they are none."""
        return self.table.sources[heading].minus

    def share(self, heading: str) -> Condition:
        """The two labels between which the heading places a number, of one axis."""
        return self.table.sources[heading].share


def _grid(
    plan: Plan, table: Table, numbers: Numbers, published: bool, evaluated: Sequence[Cell], *, digits: int, images: str
) -> Grid | None:
    cells_by_point = points_of_table(plan, table)
    if not cells_by_point:
        return None
    sources = {heading: Source.parse(text) for heading, text in table.values.items()}
    cells_by_point, axes, client = _by_client(cells_by_point, sources, table)
    absent_reasons = absent_headings(sources, cells_by_point)
    headings = [heading for heading in sources if heading not in absent_reasons]
    if not headings:  # `unfilled` says why
        return None
    if images == "common":
        numbers = OnCommonImages(numbers, cells_by_point, sources)
    lookup = Lookup(table.reference) if published and table.reference else None
    request = _TableRequest(plan, table, numbers, cells_by_point, sources, headings, axes, client, lookup)
    rows = [*_rows(request), *(_evaluated(cell, request) for cell in evaluated)]
    columns = _columns(request, rows, digits)
    bucket = [
        cell for cells_by_heading in cells_by_point.values() for cells in cells_by_heading.values() for cell in cells
    ]
    cells = list({cell.id: cell for cell in bucket}.values())
    unlike = confounded(plan, table, cells_by_point)
    unlike_cells = confounders.uncompared_cells(unlike)
    comparable, split, uncompared = _comparable(request, columns, rows, unlike_cells)
    seeds = sorted({int(cell.spec["seed"]) for cell in cells})
    grid = Grid(
        suite=plan.suite,
        preset=plan.preset,
        id=table.id,
        name=table.title,
        label=label(plan),
        axes=axes,
        groups=[Group(dict(key)) for key in request.group_keys],
        columns=columns,
        rows=rows,
        select=numbers.select,
        checkpoint=checkpoint(columns, numbers.select, plan, cells),
        seeds=[] if plan.suite == EVALUATED and len(seeds) == 1 else seeds,  # one network is no seed
        facts=request.facts,
        points=list(dict.fromkeys((", ".join(cell.key.values()), cell.id) for cell in bucket)),
        attacks=_attacks(columns, cells_by_point),
        perturbation=perturbation.in_words((cell.spec["data"]["name"], cell.perturbation) for cell in cells),
        split=split,
    )
    footnotes(grid)
    if isinstance(numbers, OnCommonImages) and numbers.most:
        counts = " or ".join(f"{n:,}" for n in dict.fromkeys(numbers.most.values()))
        grid.notes.append(("images", f"every attack on the first {counts} test images, which all of them have"))
    if table.ties:
        of = "comparison group" if split else table.best_within
        significance.mark(grid, comparable, numbers.outcomes, of, numbers.images)
    if table.ties and uncompared:
        grid.notes.append(("not compared", f"{'; '.join(uncompared)}: another training objective (compare_across)"))
    grid.notes.extend(("not compared", sentence) for sentence in confounders.sentences(unlike))
    if table.paired is not None:
        grid.paired.extend(_comparisons(grid, *table.paired, unlike_cells))
    evaluates = any(column.source.stage != "train" for column in columns)
    at_chance = [(cell, low) for cell in cells if evaluates and (low := numbers.below_chance(cell))]
    grid.notes.extend(notes(grid, plan, table, cells, absent_reasons, lookup, below=at_chance))
    if broken := numbers.failed & {cell.id for cell in cells}:
        count = f"{len(broken)} cell{'s' * (len(broken) > 1)}"
        grid.notes.append(("failed", f"{count}: {', '.join(sorted(broken))} (see fatbench logs)"))
    grid.notes.extend(("evaluated", f"external model: {describe_model(cell.spec)}") for cell in evaluated)
    return grid


def _rows(request: _TableRequest) -> Iterator[Row]:
    """The rows of the plan's cells, each number beside the published one."""
    baseline_cells = {heading: baselines(request.plan, request.minus(heading)) for heading in request.headings}
    ends = {heading: ends_of(request.plan, request.share(heading)) for heading in request.headings}
    own_rows = _own_rows(request)
    for row_key in request.row_keys:
        client = dict(row_key).get(CLIENT, "") if request.axes != request.table.rows else ""
        values: list[list[Value]] = []
        for group_key in request.group_keys:
            cells_by_heading = request.found.get((row_key, group_key), {})
            values.append([])
            for heading in request.headings:
                source, minus = request.sources[heading], request.minus(heading)
                cells = [cell for cell in cells_by_heading.get(heading, ()) if measures(cell, source)]
                if source.client == EVERY:
                    source = replace(source, client=request.client[client])
                if minus:
                    value = difference(cells, source, request.numbers, request.facts, baseline_cells[heading], minus)
                elif ends[heading]:
                    value = placed(cells, source, request.numbers, request.facts, ends[heading])
                else:
                    value = value_of(cells, source, request.numbers, request.facts)
                if value.planned:
                    _beside_published(value, heading, cells_by_heading[heading], source, request)
                values[-1].append(value)
        yield Row(dict(row_key), values, own=row_key in own_rows)


def _own_rows(request: _TableRequest) -> set[Names]:
    """The rows that train by a function of a plug-in; none where all do."""
    own_rows = {
        row
        for (row, _), cells_by_heading in request.found.items()
        for cells in cells_by_heading.values()
        if any(plugins.files(cell.spec) for cell in cells[:1])  # seeds differ in nothing else
    }
    return own_rows if len(own_rows) < len(request.row_keys) else set()


def _beside_published(
    value: Value, heading: str, cells: Sequence[Cell], source: Source, request: _TableRequest
) -> None:
    """Set the labels that the heading's condition names, and what is published of the point."""
    point, lookup = cells[0].key, request.lookup
    value.labels = {axis: point[axis] for axis in request.table.conditions.get(heading, ())}
    if lookup is None:
        return
    labels = {**point, SERIES: heading}
    value.published, value.published_std, value.published_flag = lookup.find(labels, heading)
    relative = request.table.sources[heading].relative  # a difference has no floor
    accuracy = None if relative else value.published
    floor = _no_better_than_a_constant(cells[0], source, accuracy)
    value.published_flag = "; ".join(filter(None, (value.published_flag, floor)))
    lowest, highest = lookup.range(labels, heading) or (None, None)
    value.published_most = highest if highest != lowest else None
    own_checkpoint = source.checkpoint(request.numbers.select)
    value.published_select = lookup.select if own_checkpoint else ""
    value.formula = lookup.formula and value.published is not None
    value.comparable = as_published(request.plan, cells) and value.published_select == own_checkpoint


def _no_better_than_a_constant(cell: Cell, source: Source, published: float | None) -> str:
    """What is doubtful about a published accuracy on balanced classes: a constant classifier has as much."""
    judged = [
        evaluation.attack
        for evaluation in cell.evaluations
        if source.stage == "evaluation" and source.shows(evaluation)
    ]
    dataset = CATALOGUE.get(cell.spec["data"]["name"])
    if published is None or dataset is None or not dataset.balanced or not dataset.classes:
        return ""
    if not any(facts.role(attack) in ("natural", "attack") for attack in judged) or published > 1 / dataset.classes:
        return ""
    return f"not above a constant classifier, {100 / dataset.classes:g} %"


def _columns(request: _TableRequest, rows: Sequence[Row], percent_digits: int) -> list[Column]:
    columns, reference = [], request.table.reference
    judged = [i for i, heading in enumerate(request.headings) if request.sources[heading].stage == "evaluation"]
    names = metric_names(request.sources.values())
    for position, heading in enumerate(request.headings):
        source, minus, share = request.sources[heading], request.minus(heading), request.share(heading)
        given_plain = reference is not None and reference.unit == "plain" and heading in reference.values
        column_values = [group[position] for row in rows for group in row.values]
        is_plain = not source.fraction or given_plain
        unit, digits = ("plain", _digits(column_values)) if is_plain else ("percent", percent_digits)
        metric = names[source.text]
        if minus:
            metric += f" minus {', '.join(label for axis_labels in minus.values() for label in axis_labels)}"
        if share:
            metric += f" share from {' to '.join(*share.values())}"
        fewer = _fewer_images(rows, position, judged) if position in judged else ""
        condition, best = request.table.conditions.get(heading, {}), request.table.best[heading]
        columns.append(Column(heading, source, metric, best, unit, digits, condition, minus, share, fewer))
    return columns


def confounded(plan: Plan, table: Table, cells_by_point: TablePoints) -> list[Confounder]:
    """What rows that a table compares differ in besides their labels: in a column, and from where `minus` points to."""
    groups: dict[tuple[Any, ...], dict[str, Cell]] = {}
    pairs: dict[tuple[str, str], list[Cell]] = {}
    for heading, text in table.values.items():
        source, minus = Source.parse(text), table.sources[heading].minus
        baseline_cells = baselines(plan, minus)
        for (row, group), cells_by_heading in cells_by_point.items():
            for cell in cells_by_heading.get(heading, ())[:1]:  # seeds differ in nothing else
                if baseline_cells and (baseline_cell := baseline_cells.get(point_key(cell, minus))) is not None:
                    pairs[baseline_cell.id, cell.id] = [baseline_cell, cell]
                elif table.best[heading] != "none" or table.paired:
                    side = row if table.best_within == "row" else group
                    key = (side, *_comparison_group(cell, source, table))
                    groups.setdefault(key, {})[cell.id] = cell
    compared = {tuple(cells): [*cells.values()] for cells in groups.values()}
    baseline = table.paired or plan.baseline
    return [
        *(confounder for cells in compared.values() for confounder in confounders.confounders(cells, baseline)),
        *(confounder for pair in pairs.values() for confounder in confounders.confounders(pair)),
    ]


def _comparable(
    request: _TableRequest, columns: Sequence[Column], rows: Sequence[Row], unlike_cells: Collection[str]
) -> tuple[list[tuple[list[Value], str]], bool, dict[str, None]]:
    """(the numbers that are ranked against each other, with what is best of them; whether some rows of a column, or
    groups of a row, are not compared; rows that nothing is compared with, because their training objective is another).
    """
    table, split = request.table, False
    groups: list[tuple[list[Value], str]] = []
    uncompared: dict[str, None] = {}
    for position, column in enumerate(columns):
        compared: dict[tuple[Names, str, str], list[Value]] = {}
        rows_of: dict[tuple[Names, str, str], str] = {}
        for row_key, row in zip(request.row_keys, rows, strict=False):  # those of the plan come first
            for group, group_key in enumerate(request.group_keys):
                for cell in request.found.get((row_key, group_key), {}).get(column.heading, ())[:1]:
                    side = row_key if table.best_within == "row" else group_key
                    comparison = (side, *_comparison_group(cell, column.source, table))
                    if cell.id in unlike_cells:
                        continue
                    compared.setdefault(comparison, []).append(row.values[group][position])
                    rows_of[comparison] = ", ".join(row.key.values())
        groups += [(members, column.best) for members in compared.values()]
        split |= len(compared) > len({side for side, *_ in compared})
        sizes = Counter(comparison[:2] for comparison in compared for _ in compared[comparison])
        uncompared |= {
            rows_of[comparison]: None
            for comparison, members in compared.items()
            if column.best != "none" and len(members) == 1 < sizes[comparison[:2]]
        }
    return groups, split, uncompared


def _by_client(
    cells_by_point: TablePoints, sources: Mapping[str, Source], table: Table
) -> tuple[TablePoints, list[str], Mapping[str, int]]:
    """The places with a row for each client, where a source is "metric[*]"; the axes of the rows; label -> index."""
    client_headings = [heading for heading, source in sources.items() if source.client == EVERY]
    if not client_headings:
        return cells_by_point, table.rows, {}
    rows: TablePoints = {}
    index: dict[str, int] = {}
    for (row, group), cells_by_heading in cells_by_point.items():
        for k in range(
            max(clients(cells_by_heading.get(heading, ()), sources[heading]) for heading in client_headings)
        ):
            label = sources[client_headings[0]].counted(k)
            rows[(*row, (CLIENT, label)), group] = cells_by_heading
            index[label] = k
    return rows, [*table.rows, CLIENT], index


def _evaluated(cell: Cell, request: _TableRequest) -> Row:
    """The row of a model that was not trained here: its evaluations in each group of columns on the same data."""
    first_axis, *other_axes = request.axes
    on_same_data = {
        group
        for (_, group), cells_by_heading in request.found.items()
        if any(
            cell_here.spec["data"] == cell.spec["data"] for cells in cells_by_heading.values() for cell_here in cells
        )
    }
    sources, headings = request.sources, request.table.sources
    shown_sources = [None if headings[heading].relative else sources[heading] for heading in request.headings]
    values = [
        [
            value_of([cell], source, request.numbers, request.facts)
            if group in on_same_data and source is not None and source.stage == "evaluation"
            else Value(planned=False)
            for source in shown_sources
        ]
        for group in request.group_keys
    ]
    return Row({first_axis: cell.key["model"], **dict.fromkeys(other_axes, "")}, values)


def _attacks(columns: Iterable[Column], cells_by_point: TablePoints) -> dict[str, list[dict[str, Any]]]:
    """Metric -> its attack with all settings, or attacks where the grid has points that differ in them."""
    attacks: dict[str, list[dict[str, Any]]] = {}
    for column in columns:
        if column.source.stage == "train":
            continue
        cells = [
            cell for cells_by_heading in cells_by_point.values() for cell in cells_by_heading.get(column.heading, ())
        ]
        for evaluations in {id(cell.evaluations): cell.evaluations for cell in cells}.values():
            for evaluation in evaluations:
                metric = evaluation.label if column.source.stage in OVER else column.source.metric
                known_attacks = attacks.setdefault(metric, [])
                attack = evaluation.attack
                if evaluation.origin is not None:
                    attack = {**attack, "computed on": f"{evaluation.origin.shown}'s model"}
                if column.source.shows(evaluation) and attack not in known_attacks:
                    known_attacks.append(attack)
    return attacks


def _comparison_group(cell: Cell, source: Source, table: Table) -> tuple[str, str]:
    """What must be the same for two numbers to be compared: an accuracy on one data set is not better than on another.

    (data set, partition with its number of clients and the attack that judges; training objective). With
    `compare_across` the labels of all other axes that the table shows, in place of partition and objective.
    """
    attack = next((evaluation.attack for evaluation in cell.evaluations if source.shows(evaluation)), None)
    judged = repr((cell.spec["data"], attack if source.stage != "train" else None))
    if table.compare_across:
        shown_axes = (*table.rows, *table.across)
        return judged + repr([cell.key.get(axis) for axis in shown_axes if axis not in table.compare_across]), ""
    return judged + repr(cell.spec["partition"]), repr(cost.local(cell.spec["algorithm"]).get("objective"))


def _fewer_images(rows: Sequence[Row], position: int, judged: Sequence[int]) -> str:
    """ "n = 500" where an attack's column has fewer images than others of the columns `judged` in a row; else empty."""
    sizes: set[int] = set()
    fewer = False
    for group in (group for row in rows for group in row.values):
        own_sizes = [n for n in group[position].n if n]
        sizes |= {*own_sizes}
        fewer |= any(
            n < other_size for n in own_sizes for other_column in judged for other_size in group[other_column].n
        )
    if not fewer:
        return ""
    ends = f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    return f"n = {ends}"


def _digits(values: Sequence[Value]) -> int:
    """Digits after the point in a column of plain numbers: none for counts, else about four that matter."""
    numbers = [x for value in values for x in (value.mean, value.published) if x is not None]
    spreads = [x for value in values for x in (value.std, value.published_std) if x is not None]
    largest = max(map(abs, numbers), default=0.0)
    if largest and all(x == round(x) for x in (*numbers, *spreads)):
        return 0
    for bound, digits in ((1000, 0), (10, 2), (1, 3), (0.1, 4)):
        if largest >= bound:
            return digits
    return 6 if largest else 2


def _comparisons(grid: Grid, axis: str, against: str, unlike_cells: frozenset[str]) -> Iterable[PairedComparison]:
    """Each label of an axis against one of them, at the same labels of all others, under each heading.

    unlike_cells: cells that are not compared.
    """
    values: dict[tuple[tuple[Names, int], str], Value] = {}  # (the other labels, heading), label
    for row in grid.rows:
        for group, row_values in zip(grid.groups, row.values, strict=True):
            key = {**row.key, **group.key}
            other_labels = tuple(
                (other_axis, other_label) for other_axis, other_label in key.items() if other_axis != axis
            )
            values |= {((other_labels, position), key[axis]): value for position, value in enumerate(row_values)}
    for (rest_and_column, own_label), value in values.items():
        base = values.get((rest_and_column, against))
        if own_label == against or base is None or not unlike_cells.isdisjoint({*value.cells, *base.cells}):
            continue
        own_values, base_values = (
            dict(zip(paired_value.seeds, paired_value.values, strict=True)) for paired_value in (value, base)
        )
        if (test := paired(own_values, base_values)) is not None:
            yield PairedComparison(dict(rest_and_column[0]), own_label, against, grid.columns[rest_and_column[1]], test)
