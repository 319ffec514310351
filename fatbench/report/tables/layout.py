"""Build the grid of each table of a suite: every number with its seeds, its spread and the published number.

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
from fatbench.report.contrasts import Difference, of_values
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
from fatbench.report.tables import significance
from fatbench.report.tables.common_images import OnCommonImages
from fatbench.report.tables.grid import Column, Grid, Group, Row, Value, label
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
from fatbench.report.tables.relative import share_between, share_ends, value_minus_baseline, value_of
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
    """Build the tables of a suite in which the plan's cells have a row.

    numbers: those of the plan's cells and of `evaluated`. evaluated: models that were not trained here; each has a row
    below those of the plan and is compared with none of them. published: whether the papers' numbers are shown. digits:
    decimals of percentages. images: "all" those of each attack, or those that all attacks of a table have ("common").
    SpecError: one field of a table holds points of the grid that differ in an axis that the table does not name.
    """
    grids = (
        _build_grid(plan, spread(table, plan), numbers, published, evaluated, digits=digits, images=images)
        for table in suite.tables
    )
    return [grid for grid in grids if grid is not None]


@dataclass(frozen=True)
class _TableRequest:
    """A table, the points of the grid that it shows, and the sources of their numbers."""

    plan: Plan
    table: Table
    numbers: Numbers
    cells_by_point: TablePoints  # (row, group) -> heading -> cells
    sources: Mapping[str, Source]
    headings: Sequence[str]  # those of `sources` for which some point can have a number
    axes: list[str]  # that label the rows
    client: Mapping[str, int]  # the index of a row's client, by its label
    lookup: Lookup | None  # of published numbers
    facts: provenance.TableFacts = field(default_factory=provenance.TableFacts)

    @cached_property
    def row_keys(self) -> list[Names]:
        return list(dict.fromkeys(row for row, _ in self.cells_by_point))

    @cached_property
    def group_keys(self) -> list[Names]:
        return list(dict.fromkeys(group for _, group in self.cells_by_point))

    def minus(self, heading: str) -> Condition:
        """The labels of the baseline that the heading subtracts; empty where it shows no difference."""
        return self.table.sources[heading].minus

    def share(self, heading: str) -> Condition:
        """The axis and its two labels between which the heading places a number; empty where it shows no share."""
        return self.table.sources[heading].share


def _build_grid(
    plan: Plan, table: Table, numbers: Numbers, published: bool, evaluated: Sequence[Cell], *, digits: int, images: str
) -> Grid | None:
    """Build one table; None where the plan has no cell for it, or no cell that can fill a heading."""
    cells_by_point = points_of_table(plan, table)
    if not cells_by_point:
        return None
    sources = {heading: Source.parse(text) for heading, text in table.values.items()}
    cells_by_point, axes, client = _split_by_client(cells_by_point, sources, table)
    absent_reasons = absent_headings(sources, cells_by_point)
    headings = [heading for heading in sources if heading not in absent_reasons]
    if not headings:  # the report says why, see `grid_points.unfilled`
        return None
    if images == "common":
        numbers = OnCommonImages(numbers, cells_by_point, sources)
    lookup = Lookup(table.reference) if published and table.reference else None
    request = _TableRequest(plan, table, numbers, cells_by_point, sources, headings, axes, client, lookup)
    rows = [*_planned_rows(request), *(_external_row(cell, request) for cell in evaluated)]
    columns = _columns(request, rows, digits)
    all_cells = [
        cell for cells_by_heading in cells_by_point.values() for cells in cells_by_heading.values() for cell in cells
    ]
    cells = list({cell.id: cell for cell in all_cells}.values())
    confounded_by = find_confounders(plan, table, cells_by_point)
    unlike_cells = confounders.uncompared_cells(confounded_by)
    ranked_groups, has_subgroups, uncompared = _comparison_groups(request, columns, rows, unlike_cells)
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
        points=list(dict.fromkeys((", ".join(cell.key.values()), cell.id) for cell in all_cells)),
        attacks=_attacks(columns, cells_by_point),
        perturbation=perturbation.in_words((cell.spec["data"]["name"], cell.perturbation) for cell in cells),
        split=has_subgroups,
    )
    footnotes(grid)
    if isinstance(numbers, OnCommonImages) and numbers.shared_counts:
        counts = " or ".join(f"{n:,}" for n in dict.fromkeys(numbers.shared_counts.values()))
        grid.notes.append(("images", f"every attack on the first {counts} test images, which all of them have"))
    if table.ties:
        group_name = "comparison group" if has_subgroups else table.best_within
        significance.mark(grid, ranked_groups, numbers.outcomes, group_name, numbers.images)
    if table.ties and uncompared:
        grid.notes.append(("not compared", f"{'; '.join(uncompared)}: another training objective (compare_across)"))
    grid.notes.extend(("not compared", sentence) for sentence in confounders.sentences(confounded_by))
    if table.paired is not None:
        grid.paired.extend(_paired_comparisons(grid, *table.paired, unlike_cells))
    evaluates = any(column.source.stage != "train" for column in columns)
    cells_at_chance = [(cell, accuracy) for cell in cells if evaluates and (accuracy := numbers.below_chance(cell))]
    grid.notes.extend(notes(grid, plan, table, cells, absent_reasons, lookup, cells_at_chance=cells_at_chance))
    if failed_cells := numbers.failed & {cell.id for cell in cells}:
        count = f"{len(failed_cells)} cell{'s' * (len(failed_cells) > 1)}"
        grid.notes.append(("failed", f"{count}: {', '.join(sorted(failed_cells))} (see fatbench logs)"))
    grid.notes.extend(("evaluated", f"external model: {describe_model(cell.spec)}") for cell in evaluated)
    return grid


def _planned_rows(request: _TableRequest) -> Iterator[Row]:
    """The rows of the plan's cells, with the published number beside each value."""
    baseline_cells = {heading: baselines(request.plan, request.minus(heading)) for heading in request.headings}
    ends = {heading: share_ends(request.plan, request.share(heading)) for heading in request.headings}
    plugin_rows = _plugin_rows(request)
    for row_key in request.row_keys:
        # rows of clients have one axis more than the table
        client = dict(row_key).get(CLIENT, "") if request.axes != request.table.rows else ""
        values: list[list[Value]] = []
        for group_key in request.group_keys:
            cells_by_heading = request.cells_by_point.get((row_key, group_key), {})
            values.append([])  # [group][column]
            for heading in request.headings:
                source, minus = request.sources[heading], request.minus(heading)
                cells = [cell for cell in cells_by_heading.get(heading, ()) if measures(cell, source)]
                if source.client == EVERY:  # "weight[*]": each row shows its own client
                    source = replace(source, client=request.client[client])
                if minus:
                    value = value_minus_baseline(
                        cells, source, request.numbers, request.facts, baseline_cells[heading], minus
                    )
                elif ends[heading]:
                    value = share_between(cells, source, request.numbers, request.facts, ends[heading])
                else:
                    value = value_of(cells, source, request.numbers, request.facts)
                if value.planned:
                    _add_published(value, heading, cells_by_heading[heading], source, request)
                values[-1].append(value)
        yield Row(dict(row_key), values, own=row_key in plugin_rows)


def _plugin_rows(request: _TableRequest) -> set[Names]:
    """The rows whose cells call a function of a plug-in; empty where all rows do, since then no mark is needed."""
    plugin_rows = {
        row
        for (row, _), cells_by_heading in request.cells_by_point.items()
        for cells in cells_by_heading.values()
        if any(plugins.files(cell.spec) for cell in cells[:1])  # seeds differ in nothing else
    }
    return plugin_rows if len(plugin_rows) < len(request.row_keys) else set()


def _add_published(value: Value, heading: str, cells: Sequence[Cell], source: Source, request: _TableRequest) -> None:
    """Add the published number of a point to its value, and the labels that the heading's condition names."""
    point, lookup = cells[0].key, request.lookup
    value.labels = {axis: point[axis] for axis in request.table.conditions.get(heading, ())}
    if lookup is None:
        return
    labels = {**point, SERIES: heading}
    value.published, value.published_most, value.published_std, value.published_flag = lookup.find(labels, heading)
    relative = request.table.sources[heading].relative  # a difference has no floor
    accuracy = None if relative else value.published
    floor = _chance_flag(cells[0], source, accuracy)
    value.published_flag = "; ".join(filter(None, (value.published_flag, floor)))
    measured_checkpoint = source.checkpoint(request.numbers.select)
    value.published_select = lookup.select if measured_checkpoint else ""
    value.formula = lookup.formula and value.published is not None
    value.comparable = as_published(request.plan, cells) and value.published_select == measured_checkpoint


def _chance_flag(cell: Cell, source: Source, published: float | None) -> str:
    """A flag for a published accuracy that a constant classifier reaches on balanced classes; empty for others."""
    attacks = [
        evaluation.attack
        for evaluation in cell.evaluations
        if source.stage == "evaluation" and source.shows(evaluation)
    ]
    dataset = CATALOGUE.get(cell.spec["data"]["name"])
    if published is None or dataset is None or not dataset.balanced or not dataset.classes:
        return ""
    if not any(facts.role(attack) in ("natural", "attack") for attack in attacks) or published > 1 / dataset.classes:
        return ""
    return f"not above a constant classifier, {100 / dataset.classes:g} %"


def _columns(request: _TableRequest, rows: Sequence[Row], percent_digits: int) -> list[Column]:
    columns, reference = [], request.table.reference
    evaluation_columns = [
        i for i, heading in enumerate(request.headings) if request.sources[heading].stage == "evaluation"
    ]
    names = metric_names(request.sources.values())
    for position, heading in enumerate(request.headings):
        source, minus, share = request.sources[heading], request.minus(heading), request.share(heading)
        published_in_units = reference is not None and reference.unit == "plain" and heading in reference.values
        column_values = [group[position] for row in rows for group in row.values]
        is_plain = not source.fraction or published_in_units
        unit, digits = ("plain", _digits(column_values)) if is_plain else ("percent", percent_digits)
        metric = names[source.text]
        if minus:
            metric += f" minus {', '.join(label for axis_labels in minus.values() for label in axis_labels)}"
        if share:
            metric += f" share from {' to '.join(*share.values())}"
        image_count = _fewer_images(rows, position, evaluation_columns) if position in evaluation_columns else ""
        condition, best = request.table.conditions.get(heading, {}), request.table.best[heading]
        columns.append(Column(heading, source, metric, best, unit, digits, condition, minus, share, image_count))
    return columns


def find_confounders(plan: Plan, table: Table, cells_by_point: TablePoints) -> list[Confounder]:
    """The confounders of a table: settings besides the labels in which rows differ that it compares or subtracts."""
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
                    key = (side, *_comparison_key(cell, source, table))
                    groups.setdefault(key, {})[cell.id] = cell
    compared = {tuple(cells): [*cells.values()] for cells in groups.values()}
    baseline = table.paired or plan.baseline
    return [
        *(confounder for cells in compared.values() for confounder in confounders.confounders(cells, baseline)),
        *(confounder for pair in pairs.values() for confounder in confounders.confounders(pair)),
    ]


def _comparison_groups(
    request: _TableRequest, columns: Sequence[Column], rows: Sequence[Row], unlike_cells: Collection[str]
) -> tuple[list[tuple[list[Value], str]], bool, dict[str, None]]:
    """Split the values of each column into groups that are ranked.

    Returns (groups with "max", "min" or "none"; whether one column holds several groups; the rows that are compared
    with nothing because their training objective differs).
    """
    table, has_subgroups = request.table, False
    ranked_groups: list[tuple[list[Value], str]] = []
    uncompared: dict[str, None] = {}
    for position, column in enumerate(columns):
        members_by_group: dict[tuple[Names, str, str], list[Value]] = {}
        row_names: dict[tuple[Names, str, str], str] = {}
        for row_key, row in zip(request.row_keys, rows, strict=False):  # those of the plan come first
            for group, group_key in enumerate(request.group_keys):
                for cell in request.cells_by_point.get((row_key, group_key), {}).get(column.heading, ())[:1]:
                    side = row_key if table.best_within == "row" else group_key
                    group_id = (side, *_comparison_key(cell, column.source, table))
                    if cell.id in unlike_cells:  # it differs in more than the row's labels
                        continue
                    members_by_group.setdefault(group_id, []).append(row.values[group][position])
                    row_names[group_id] = ", ".join(row.key.values())
        ranked_groups += [(members, column.best) for members in members_by_group.values()]
        has_subgroups |= len(members_by_group) > len({side for side, *_ in members_by_group})
        sizes = Counter(group_id[:2] for group_id in members_by_group for _ in members_by_group[group_id])
        uncompared |= {
            row_names[group_id]: None
            for group_id, members in members_by_group.items()
            if column.best != "none" and len(members) == 1 < sizes[group_id[:2]]
        }
    return ranked_groups, has_subgroups, uncompared


def _split_by_client(
    cells_by_point: TablePoints, sources: Mapping[str, Source], table: Table
) -> tuple[TablePoints, list[str], Mapping[str, int]]:
    """Split rows by client where a source is "metric[*]": (points, axes of the rows, label -> index)."""
    client_headings = [heading for heading, source in sources.items() if source.client == EVERY]
    if not client_headings:
        return cells_by_point, table.rows, {}
    client_points: TablePoints = {}
    index_by_label: dict[str, int] = {}
    for (row, group), cells_by_heading in cells_by_point.items():
        for k in range(
            max(clients(cells_by_heading.get(heading, ()), sources[heading]) for heading in client_headings)
        ):
            label = sources[client_headings[0]].index_text(k)
            client_points[(*row, (CLIENT, label)), group] = cells_by_heading
            index_by_label[label] = k
    return client_points, [*table.rows, CLIENT], index_by_label


def _external_row(cell: Cell, request: _TableRequest) -> Row:
    """The row of a model that was not trained here, filled in the groups of columns that show its data set."""
    first_axis, *other_axes = request.axes
    groups_on_same_data = {
        group
        for (_, group), cells_by_heading in request.cells_by_point.items()
        if any(
            planned_cell.spec["data"] == cell.spec["data"]
            for cells in cells_by_heading.values()
            for planned_cell in cells
        )
    }
    sources, headings = request.sources, request.table.sources
    absolute_sources = [None if headings[heading].relative else sources[heading] for heading in request.headings]
    values = [
        [
            value_of([cell], source, request.numbers, request.facts)
            if group in groups_on_same_data and source is not None and source.stage == "evaluation"
            else Value(planned=False)
            for source in absolute_sources
        ]
        for group in request.group_keys
    ]
    return Row({first_axis: cell.key["model"], **dict.fromkeys(other_axes, "")}, values)


def _attacks(columns: Iterable[Column], cells_by_point: TablePoints) -> dict[str, list[dict[str, Any]]]:
    """Metric -> its attacks with all settings; several where points of the grid differ in them."""
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
                attacks_of_metric = attacks.setdefault(metric, [])
                attack = evaluation.attack
                if evaluation.origin is not None:
                    attack = {**attack, "computed on": f"{evaluation.origin.display_name}'s model"}
                if column.source.shows(evaluation) and attack not in attacks_of_metric:
                    attacks_of_metric.append(attack)
    return attacks


def _comparison_key(cell: Cell, source: Source, table: Table) -> tuple[str, str]:
    """A key that two cells share if their numbers can be ranked: (data set, attack and partition; training objective).

    With `compare_across` the labels of all other axes of the table stand in place of partition and objective.
    """
    attack = next((evaluation.attack for evaluation in cell.evaluations if source.shows(evaluation)), None)
    data_and_attack = repr((cell.spec["data"], attack if source.stage != "train" else None))
    if table.compare_across:
        shown_axes = (*table.rows, *table.across)
        return data_and_attack + repr(
            [cell.key.get(axis) for axis in shown_axes if axis not in table.compare_across]
        ), ""
    return data_and_attack + repr(cell.spec["partition"]), repr(cost.local(cell.spec["algorithm"]).get("objective"))


def _fewer_images(rows: Sequence[Row], position: int, evaluation_columns: Sequence[int]) -> str:
    """ "n = 500" where an attack's column has fewer images than another evaluation in a row; else empty."""
    sizes: set[int] = set()
    has_fewer = False
    for group in (group for row in rows for group in row.values):
        column_sizes = [n for n in group[position].n if n]
        sizes |= {*column_sizes}
        has_fewer |= any(
            n < larger_size
            for n in column_sizes
            for other_column in evaluation_columns
            for larger_size in group[other_column].n
        )
    if not has_fewer:
        return ""
    size_text = f"{min(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    return f"n = {size_text}"


def _digits(values: Sequence[Value]) -> int:
    """Decimals of a column of plain numbers: none for counts, else enough for about four significant digits."""
    numbers = [x for value in values for x in (value.mean, value.published) if x is not None]
    spreads = [x for value in values for x in (value.std, value.published_std) if x is not None]
    largest = max(map(abs, numbers), default=0.0)
    if largest and all(x == round(x) for x in (*numbers, *spreads)):
        return 0
    for bound, digits in ((1000, 0), (10, 2), (1, 3), (0.1, 4)):
        if largest >= bound:
            return digits
    return 6 if largest else 2


def _paired_comparisons(
    grid: Grid, axis: str, against: str, unlike_cells: frozenset[str]
) -> Iterable[tuple[Column, Difference]]:
    """(column, difference) of each label of an axis from one of them, under each heading and at equal other labels.

    unlike_cells: cells that are compared with none, since they differ in more than their labels.
    """
    values: dict[tuple[tuple[Names, int], str], Value] = {}  # ((other labels, position of the column), label) -> value
    for row in grid.rows:
        for group, row_values in zip(grid.groups, row.values, strict=True):
            key = {**row.key, **group.key}
            other_labels = tuple(
                (other_axis, other_label) for other_axis, other_label in key.items() if other_axis != axis
            )
            values |= {((other_labels, position), key[axis]): value for position, value in enumerate(row_values)}
    for ((labels, position), compared_label), value in values.items():
        baseline_value = values.get(((labels, position), against))
        if (
            compared_label == against
            or baseline_value is None
            or not unlike_cells.isdisjoint({*value.cells, *baseline_value.cells})
        ):
            continue
        sides = (dict(zip(side.seeds, side.values, strict=True)) for side in (value, baseline_value))
        column = grid.columns[position]
        difference = of_values((compared_label, against), column.metric, *sides, labels=dict(labels))
        if difference.over_seeds is not None:
            yield column, difference
