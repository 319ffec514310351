"""The tables of a suite: a row for each number of a seed (`numbers.long`), then a row for each printed number.

    sheets(suite.tables, plan, stored.read(sources, plan, store, "last"))

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pandas import DataFrame

from fatbench.data.catalogue import CATALOGUE
from fatbench.report import audit
from fatbench.report.contrasts import of_values, share
from fatbench.report.numbers import statistics, table_facts
from fatbench.report.numbers.doubts import NOT_ABOVE, with_seeds
from fatbench.report.numbers.long import FROM, MINUS, OWN, TO, WORST, columns, found, long
from fatbench.report.numbers.points import Points, TablePoints, find_confounders, spread
from fatbench.report.numbers.published import Lookup
from fatbench.report.numbers.sources import Source, mean_and_std, metric_names
from fatbench.report.numbers.stored import Stored
from fatbench.report.numbers.worst_case import worst_case
from fatbench.report.tables import significance
from fatbench.report.tables.notes import as_published, checkpoint, footnotes, notes
from fatbench.report.tables.number_format import decimals, with_texts
from fatbench.report.tables.sheet import ENTRY, LABEL, Column, Sheet, as_tuples, label
from fatbench.store.stage_names import parsed
from fatbench.suite import confounders, cost, facts, model, plugins
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.external_models import SUITE as EVALUATED
from fatbench.suite.external_models import describe_model
from fatbench.suite.tables import SERIES, Heading, Table

PLACE = ("row", "group", "column", "planned")
PUBLISHED = (
    "published", "published_most", "published_std", "published_flag", "published_select", "formula", "comparable",
)  # fmt: skip
IMAGES = ("all", "common")  # of each attack, or those that all attacks of a table have


def sheets(
    tables: Iterable[Table],
    plan: Plan,
    stored: Stored,
    *,
    published: bool = True,
    evaluated: Sequence[Cell] = (),
    digits: int = 2,
    images: str = "all",
) -> list[Sheet]:
    """The tables in which the plan's cells have a row.

    stored: what is stored of the plan's cells and of `evaluated`. evaluated: models that were not trained here; each
    has a row below those of the plan and is compared with none of them. published: whether the papers' numbers are
    shown. digits: decimals of percentages. images: one of IMAGES. SpecError: one field of a table holds points of the
    grid that differ in an axis that the table does not name.
    """
    how: Any = {"digits": digits, "images": images}
    made = (_sheet(plan, spread(table, plan), stored, published, evaluated, **how) for table in tables)
    return [sheet for sheet in made if sheet is not None]


def _sheet(
    plan: Plan, table: Table, stored: Stored, published: bool, evaluated: Sequence[Cell], *, digits: int, images: str
) -> Sheet | None:
    """One table; None where the plan has no cell for it, or no cell that can fill a heading."""
    points, absent_reasons = Points.of(plan, table)
    if points is None:
        return None
    numbers, cut = long(plan, points, stored, evaluated, images)
    headings = [table.sources[heading] for heading in points.headings]
    entries = entries_of(numbers, len(points.rows) + len(evaluated), len(points.groups), headings)
    entries = _with_labels(entries, points, evaluated)
    lookup = Lookup(table.reference) if published and table.reference else None
    if lookup is not None:
        entries = _with_published(entries, plan, points, lookup, stored.select)
    headed = _columns(points, entries, digits)
    cells = list({cell.id: cell for cell in points.all_cells()}.values())
    seeds = sorted({int(cell.spec["seed"]) for cell in cells})
    confounded_by = find_confounders(plan, table, points.cells)
    unlike_cells = confounders.uncompared_cells(confounded_by)
    groups_ranked, has_subgroups, uncompared = significance.comparison_groups(points, headed, entries, unlike_cells)
    entries, keys = footnotes(entries)
    if table.ties:
        name = "comparison group" if has_subgroups else table.best_within
        entries, test_keys = significance.mark(entries, groups_ranked, name, stored.images, stored.inputs)
        keys += test_keys
    sheet = Sheet(
        suite=plan.suite,
        preset=plan.preset,
        id=table.id,
        name=table.title,
        label=label(plan),
        axes=table.rows,
        across=list(table.across),
        columns=headed,
        entries=with_texts(entries, headed),
        select=stored.select,
        checkpoint=checkpoint(headed, stored.select, plan, cells),
        seeds=[] if plan.suite == EVALUATED and len(seeds) == 1 else seeds,  # one network is no seed
        facts=table_facts.Facts(_behind(numbers, stored)),
        footnotes=keys,
        points=list(dict.fromkeys((", ".join(cell.key.values()), cell.id) for cell in points.all_cells())),
        attacks=_attacks(headed, points.cells),
        perturbation=model.perturbations_in_words((cell.spec["data"]["name"], cell.perturbation) for cell in cells),
        split=has_subgroups,
    )
    sheet.notes.extend(("images", sentence) for sentence in cut)
    if table.ties and uncompared:
        sheet.notes.append(("not compared", f"{'; '.join(uncompared)}: another training objective (compare_across)"))
    sheet.notes.extend(("not compared", sentence) for sentence in confounders.sentences(confounded_by))
    if table.paired is not None:
        sheet.paired.extend(significance.paired_comparisons(sheet, *table.paired, unlike_cells))
    evaluates = any(column.source.stage != "train" for column in headed)
    cells_at_chance = _below_chance(cells, stored) if evaluates else []
    sheet.notes.extend(notes(sheet, plan, table, cells, absent_reasons, lookup, cells_at_chance=cells_at_chance))
    if failed_cells := stored.failed & {cell.id for cell in cells}:
        count = f"{len(failed_cells)} cell{'s' * (len(failed_cells) > 1)}"
        sheet.notes.append(("failed", f"{count}: {', '.join(sorted(failed_cells))} (see fatbench show CELL --log)"))
    sheet.notes.extend(("evaluated", f"external model: {describe_model(cell.spec)}") for cell in evaluated)
    return sheet


def _behind(numbers: DataFrame, stored: Stored) -> Iterable[tuple[Any, ...]]:
    """The runs behind the finite numbers, see `provenance.BEHIND`; each evaluation of several under its own name."""
    for number in as_tuples(numbers):
        if number.value is None or not math.isfinite(number.value):
            continue
        of_training = number.source.stage == "train"
        for stage in number.stages:
            several = number.source.stage == "all"
            metric = parsed(stage).metric if several else number.source.metric * (not of_training)
            yield from stored.behind(number.cell, stage, metric, number.n)


# --- a row for each printed number --------------------------------------------------------------------------------


def entries_of(numbers: DataFrame, rows: int, groups: int, headings: Sequence[Heading | None]) -> DataFrame:
    """An entry for each place of a table: mean and spread over seeds, a difference, or a share.

    numbers: as `long` makes them.
    """
    by_place: dict[tuple[int, int, int], dict[str, list[Any]]] = {}
    for number in as_tuples(numbers):
        sides = by_place.setdefault((number.row, number.group, number.column), {})
        sides.setdefault(number.side, []).append(number)
    records = []
    for row in range(rows):
        for group in range(groups):
            for column, heading in enumerate(headings):
                sides = by_place.get((row, group, column), {})
                entry = over_seeds(sides.get(OWN, []))
                if heading is not None and heading.minus:
                    entry = _minus(entry, over_seeds(sides.get(MINUS, [])), sides.get(OWN, []))
                elif heading is not None and heading.share:
                    entry = _share(heading.source, entry, *(over_seeds(sides.get(side, [])) for side in (FROM, TO)))
                elif heading is not None and heading.worst:
                    of_labels = (over_seeds(numbers) for side, numbers in sides.items() if side.startswith(WORST))
                    entry = _worst(entry, [*of_labels], sum(map(len, heading.worst.values())))
                records.append({"row": row, "group": group, "column": column, **ENTRY, **entry})
    return DataFrame(records, columns=["row", "group", "column", *ENTRY], dtype=object)


def over_seeds(numbers: Sequence[Any]) -> dict[str, Any]:
    """Mean and spread of the numbers of one point, a seed each; nothing for a point that is not planned."""
    if not numbers:
        return {}
    measured = [number for number in numbers if number.value is not None and math.isfinite(number.value)]
    seeds = tuple(number.seed for number in measured)
    common = {
        "planned": True,
        "doubts": with_seeds(((number.seed, number.doubts) for number in numbers), seeds, len(numbers)),
        "codes": frozenset(doubt.code for number in numbers for doubt in number.doubts),
        "cells": tuple(number.cell.id for number in numbers if number.cell is not None),
    }
    if not measured:
        never = all(number.never for number in numbers)
        return {**common, "never": never, "wanted": 0 if never else len(numbers)}
    values = tuple(number.value for number in measured)
    mean, std = mean_and_std(values)
    behind = [
        number
        for number in measured
        if number.stages and (number.source.of_images or isinstance(number.outcomes, statistics.OfClients))
    ]
    chances = [number.chance for number in measured if number.chance is not None]
    return {
        **common,
        "mean": mean,
        "std": std,
        "seeds": seeds,
        "wanted": len(numbers),
        "n": tuple(sorted({number.n for number in measured})),
        "values": values,
        "chance": math.fsum(chances) / len(chances) if chances else None,
        "behind": tuple((number.cell.id, number.stages[-1]) for number in behind),
        "outcomes": tuple(number.outcomes for number in behind),
        "at_floor": all(any(doubt.code in NOT_ABOVE for doubt in number.doubts) for number in measured),
    }


def _by_seed(entry: Mapping[str, Any]) -> dict[int, float]:
    return dict(zip(entry.get("seeds", ()), entry.get("values", ()), strict=True))


def _minus(entry: dict[str, Any], baseline: dict[str, Any], numbers: Sequence[Any]) -> dict[str, Any]:
    """The difference between a point and its baseline, seed by seed."""
    own, other = _by_seed(entry), _by_seed(baseline)
    seeds = tuple(seed for seed in own if seed in other)
    kept = {k: v for k, v in entry.items() if k in ("planned", "wanted", "doubts", "codes", "cells")}
    if not seeds:
        return {**kept, "never": entry.get("never", False) or baseline.get("never", False)}
    values = tuple(own[seed] - other[seed] for seed in seeds)
    mean, std = mean_and_std(values)
    source, n = numbers[0].source, entry["n"]
    # of accuracies, seeds that agree to the image are no interval of no width
    images = n[0] if source.fraction and len(n) == 1 else 0
    interval = of_values(("row", "baseline"), source.metric, own, other, n=images).interval
    return {**kept, "mean": mean, "std": std, "seeds": seeds, "n": n, "values": values, "interval": interval}


def _share(metric: str, entry: dict[str, Any], start: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """The share of the way between two points at which a point lies, by means over the seeds that all three have."""
    found = share(metric, *map(_by_seed, (entry, start, end)))
    over = {"mean": found.difference, "std": None, "seeds": found.seeds, "values": (), "behind": (), "outcomes": ()}
    return {**entry, **over, "chance": None, "interval": found.interval}


def _worst(entry: dict[str, Any], of_labels: Sequence[dict[str, Any]], wanted: int) -> dict[str, Any]:
    """The least accuracy over some labels, of the seeds that all have; no number where one of them is not measured."""
    rows = [row for row in of_labels if row.get("outcomes") and len(row["outcomes"]) == len(row["seeds"])]
    if any(isinstance(one, statistics.OfClients) for row in rows for one in row["outcomes"]):
        rows = []
    if not entry or len(rows) < wanted or len({row["n"] for row in rows}) > 1 or len(rows[0]["n"]) != 1:
        return {k: v for k, v in entry.items() if k in ("planned", "wanted", "cells")}
    seeds = tuple(seed for seed in rows[0]["seeds"] if all(seed in row["seeds"] for row in rows))
    (n,) = rows[0]["n"]
    found = worst_case([[row["outcomes"][row["seeds"].index(seed)] for seed in seeds] for row in rows], n)
    mean = found.mean if found is not None else min(row["mean"] for row in rows)
    texts = dict.fromkeys(text for row in rows for text in row["doubts"])
    return {
        **entry, "mean": mean, "std": None, "seeds": seeds, "values": (), "behind": (), "outcomes": (), "chance": None,
        "interval": found and (found.low, found.high), "doubts": tuple(texts),
        "codes": frozenset().union(*(row["codes"] for row in rows)),
        "cells": tuple(dict.fromkeys(cell for row in rows for cell in row["cells"])),
    }  # fmt: skip


def _with_labels(entries: DataFrame, points: Points, evaluated: Sequence[Cell]) -> DataFrame:
    """The entries with the labels of their rows and groups, and with `own`."""
    external = [{**dict.fromkeys(points.table.rows, ""), points.table.rows[0]: cell.key["model"]} for cell in evaluated]
    row_labels, group_labels = [*map(dict, points.rows), *external], [*map(dict, points.groups)]
    plugin_rows = _plugin_rows(points)
    labels = {LABEL + axis: [row_labels[i][axis] for i in entries["row"]] for axis in points.table.rows}
    labels |= {LABEL + axis: [group_labels[i][axis] for i in entries["group"]] for axis in points.table.across}
    conditions = points.table.conditions
    condition_labels = [
        {axis: cells[0].key[axis] for axis in conditions.get(points.headings[column], ())} if planned and cells else {}
        for row, group, column, planned in zip(*(entries[name] for name in PLACE), strict=True)
        for cells in [points.cells_at(row, group, column)]
    ]
    return entries.assign(
        **labels,
        own=[row in plugin_rows for row in entries["row"]],
        **columns(["labels"], [(labels_of,) for labels_of in condition_labels]),
    )


def _plugin_rows(points: Points) -> set[int]:
    """The rows whose cells call a function of a plug-in; empty where all rows do, since then no mark is needed."""
    plugin_rows = {
        row
        for (row, _), by_heading in points.cells.items()
        for cells in by_heading.values()
        if any(plugins.files(cell.spec) for cell in cells[:1])  # seeds differ in nothing else
    }
    return {i for i, row in enumerate(points.rows) if row in plugin_rows and len(plugin_rows) < len(points.rows)}


def _with_published(entries: DataFrame, plan: Plan, points: Points, lookup: Lookup, select: str) -> DataFrame:
    """The entries with the published number of each planned point."""
    records, asked = [], audit.marks(lookup.published.file)
    for row, group, column, planned in zip(*(entries[name] for name in PLACE), strict=True):
        cells, heading = points.cells_at(row, group, column), points.headings[column]
        if not planned or not cells:
            records.append(tuple(ENTRY[name] for name in PUBLISHED))
            continue
        source = points.sources[heading]
        value, most, std, flag, place = lookup.find({**cells[0].key, SERIES: heading}, heading)
        # a difference has no floor
        floor = _chance_flag(cells[0], source, None if points.table.sources[heading].relative else value)
        measured_checkpoint = source.checkpoint(select)
        paper_checkpoint = lookup.select if measured_checkpoint else ""
        comparable = as_published(plan, cells) and paper_checkpoint == measured_checkpoint
        flags = "; ".join(filter(None, (flag, floor, asked.get(place))))
        records.append((value, most, std, flags, paper_checkpoint, lookup.formula and value is not None, comparable))
    return entries.assign(**columns(PUBLISHED, records))


def _chance_flag(cell: Cell, source: Source, published: float | None) -> str:
    """A flag for a published accuracy that a constant classifier of as many classes has at least; empty for others."""
    attacks = [one.attack for one in cell.evaluations if source.stage == "evaluation" and source.shows(one)]
    dataset = CATALOGUE.get(cell.spec["data"]["name"])
    if published is None or dataset is None or not dataset.classes:
        return ""
    if not any(facts.role(attack) in ("natural", "attack") for attack in attacks) or published > 1 / dataset.classes:
        return ""
    return f"not above a constant classifier, {100 / dataset.classes:g} %"


def _columns(points: Points, entries: DataFrame, percent_digits: int) -> list[Column]:
    columns, reference = [], points.table.reference
    names = metric_names(points.sources.values())
    fewer = _fewer_images(entries, [points.sources[heading].stage == "evaluation" for heading in points.headings])
    for position, heading in enumerate(points.headings):
        source, spec = points.sources[heading], points.table.sources[heading]
        own = entries[entries["column"] == position]
        published_in_units = reference is not None and reference.unit == "plain" and heading in reference.values
        is_plain = not source.fraction or published_in_units
        digits = decimals([*own["mean"], *own["published"]], [*own["std"], *own["published_std"]])
        unit, digits = ("plain", digits) if is_plain else ("percent", percent_digits)
        metric = names[source.text]
        if spec.minus:
            metric += f" minus {', '.join(label for axis_labels in spec.minus.values() for label in axis_labels)}"
        if spec.share:
            metric += f" share from {' to '.join(*spec.share.values())}"
        if spec.worst:
            metric += f" worst of {', '.join(label for axis_labels in spec.worst.values() for label in axis_labels)}"
        shown = spec.where, spec.minus, spec.share, spec.worst, fewer.get(position, "")
        columns.append(Column(heading, source, metric, points.table.best[heading], unit, digits, *shown))
    return columns


def _fewer_images(entries: DataFrame, is_evaluation: Sequence[bool]) -> dict[int, str]:
    """Column -> "n = 500" where an attack has fewer images than another evaluation in a row."""
    sizes: dict[int, set[int]] = {}
    by_place: dict[tuple[int, int], list[tuple[int, int]]] = {}  # row, group -> column, n
    for row, group, column, n in zip(*(entries[name] for name in ("row", "group", "column", "n")), strict=True):
        for size in n if is_evaluation[column] else ():
            if size:
                sizes.setdefault(column, set()).add(size)
                by_place.setdefault((row, group), []).append((column, size))
    largest = {place: max(size for _, size in found) for place, found in by_place.items()}
    fewer = {column for place, found in by_place.items() for column, size in found if size < largest[place]}
    texts = {column: sorted({min(sizes[column]), max(sizes[column])}) for column in fewer}
    return {column: "n = " + " to ".join(f"{size:,}" for size in ends) for column, ends in texts.items()}


def _attacks(columns: Iterable[Column], cells_by_point: TablePoints) -> dict[str, list[dict[str, Any]]]:
    """Metric -> its attacks with all settings; several where points of the grid differ in them."""
    attacks: dict[str, list[dict[str, Any]]] = {}
    for column in columns:
        if column.source.stage == "train":
            continue
        cells = [cell for by_heading in cells_by_point.values() for cell in by_heading.get(column.heading, ())]
        for evaluations in {id(cell.evaluations): cell.evaluations for cell in cells}.values():
            for evaluation in evaluations:
                metric = evaluation.label if column.source.stage == "all" else column.source.metric
                attacks_of_metric = attacks.setdefault(metric, [])
                attack = evaluation.attack
                if evaluation.origin is not None:
                    attack = {**attack, "computed on": f"{evaluation.origin.display_name}'s model"}
                if evaluation.on:
                    source, _, least = evaluation.on.partition(" >= ")
                    images = "held out images" if source == "held_out" else "writers' test images"
                    attack = {**attack, "on": f"each client's {images}" + f", where there are {least}" * bool(least)}
                if column.source.shows(evaluation) and attack not in attacks_of_metric:
                    attacks_of_metric.append(attack)
    return attacks


def _below_chance(cells: Sequence[Cell], stored: Stored) -> list[tuple[Cell, tuple[float, int, float]]]:
    """(cell, (natural accuracy, images, chance)) of the cells that have not learned, where chance is known."""
    own = {e.label for cell in cells for e in cell.evaluations if e.on and e.attack["name"] == "natural"}
    # a client's own model is for its own images
    of_each = [own if own and cost.deploys(cell.spec) > 1 else () for cell in cells]
    pairs = zip(cells, of_each, strict=True)
    labels = [next((e.label for e in cell.evaluations if e.label in of), "natural") for cell, of in pairs]
    sources = [*map(Source.parse, labels)]
    asked = DataFrame({"cell": cells, "source": sources}, dtype=object)
    below: list[tuple[Cell, tuple[float, int, float]]] = []
    for natural in as_tuples(found(asked, stored)):
        chances = (doubt.value for doubt in natural.doubts if doubt.code == "chance")
        below += [(natural.cell, (natural.value, natural.n, chance)) for chance in chances][:1]
    return below
