"""The report as data: CSV, one line a number, and JSON. Fractions in [0, 1], unrounded, differences as well."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from fatbench.report.numbers.provenance import Origin
from fatbench.report.tables.grid import Column, Comparison, Grid, Value

SCHEMA_VERSION = 1
BEFORE = ("suite", "table")
AFTER = (
    "heading", "metric", "unit", "checkpoint", "mean", "std", "seeds", "seeds_planned", "n", "published",
    "published_std", "difference", "flags", "published_flag", "preset", "variant", "device", "precision", "commit",
    "label",
)  # fmt: skip


def render_csv(grids: Sequence[Grid]) -> str:
    """One line for each number of each table; the axes of all tables are columns, empty where a table lacks one.

    An axis with the name of another column is written "axis:NAME"; several seeds, n or flags are separated by ";".
    """
    axes = list(dict.fromkeys(axis for grid in grids for axis in (*grid.axes, *_across(grid))))
    names = {axis: f"axis:{axis}" if axis in (*BEFORE, *AFTER) else axis for axis in axes}
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*BEFORE, *names.values(), *AFTER], lineterminator="\n", restval="")
    writer.writeheader()
    for grid in grids:
        facts = grid.facts
        shared = {
            "suite": grid.suite, "table": grid.id, "checkpoint": grid.select, "preset": grid.preset,
            "label": grid.label,
            "variant": _joined({variant for versions in facts.data.values() for variant, _ in versions if variant}),
            "device": _joined(facts.values(lambda origin: origin.device)),
            "precision": _joined(facts.values(lambda origin: origin.precision)),
            "commit": _joined(facts.values(_commit)),
        }  # fmt: skip
        for row in grid.rows:
            for group, values in zip(grid.groups, row.values, strict=True):
                key = {names[axis]: label for axis, label in {**row.key, **group.key}.items()}
                for column, value in zip(grid.columns, values, strict=True):
                    if value.planned:
                        more = {names[axis]: label for axis, label in value.labels.items()}
                        writer.writerow({**shared, **key, **more, **_line(column, value)})
    return stream.getvalue()


def _line(column: Column, value: Value) -> dict[str, Any]:
    line = {
        "heading": column.heading,
        "metric": column.metric,
        "unit": "fraction" if column.unit == "percent" else "plain",
        "mean": value.mean,
        "std": value.std,
        "seeds": _joined(value.seeds),
        "seeds_planned": value.wanted,
        "n": _joined(n for n in value.n if n),
        "published": value.published,
        "published_std": value.published_std,
        "difference": value.difference,
        "flags": _joined(value.flags),
        "published_flag": value.published_flag,
    }
    return {name: "" if item is None else item for name, item in line.items()}


def _commit(origin: Origin) -> str:
    return f"{origin.commit}+dirty" if origin.commit and origin.dirty else origin.commit


def _joined(items: Any) -> str:
    return ";".join(str(item) for item in items)


def _across(grid: Grid) -> list[str]:
    groups = (axis for group in grid.groups for axis in group.key)
    return list(dict.fromkeys([*groups, *(axis for column in grid.columns for axis in column.where)]))


def render_json(grids: Sequence[Grid]) -> str:
    """{"schema_version", "tables": [...]}; scripts may rely on what is there, more keys may come."""
    content = {"schema_version": SCHEMA_VERSION, "tables": [_table(grid) for grid in grids]}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _table(grid: Grid) -> dict[str, Any]:
    """One table; each point of the grid is a row, its key holding the labels of row, group and heading."""
    rows = []
    for row in grid.rows:
        for group, values in zip(grid.groups, row.values, strict=True):
            points: dict[tuple[tuple[str, str], ...], list[tuple[Column, Value]]] = {}
            for column, value in zip(grid.columns, values, strict=True):
                if value.planned:
                    points.setdefault(tuple(value.labels.items()), []).append((column, value))
            for labels, planned in points.items():
                rows.append(
                    {
                        "key": {**row.key, **group.key, **dict(labels)},
                        "measured": {c.metric: _measured(v) for c, v in planned},
                        "published": {
                            c.metric: {"mean": v.published, "std": v.published_std, "flag": v.published_flag}
                            for c, v in planned
                            if v.published is not None
                        },
                        "flags": [f"{c.metric}: {flag}" for c, v in planned for flag in v.flags],
                    }
                )
    facts = grid.facts
    more: dict[str, Any] = {}
    if used := facts.plugins():
        more["plugins"] = [{key: value for key, value in record.items() if key != "cells"} for record in used]
    if any(column.where for column in grid.columns):  # two headings may then show the same metric
        more["columns"] = [
            {"heading": c.heading, "metric": c.metric, "where": c.where, "unit": _unit(c), "best": c.best}
            for c in grid.columns
        ]
    if grid.paired:
        more["paired"] = [_paired(comparison) for comparison in grid.paired]
    return {
        "id": grid.id,
        "title": grid.title,
        "suite": grid.suite,
        "preset": grid.preset,
        "label": grid.label,
        "checkpoint": grid.select,
        "seeds": grid.seeds,
        "metrics": {c.metric: {"heading": c.heading, "unit": _unit(c), "best": c.best} for c in grid.columns},
        "rows": rows,
        "data": [
            {"name": name, "variant": variant, "fingerprint": fingerprint}
            for name, versions in facts.data.items()
            for variant, fingerprint in versions
        ],
        "devices": list(facts.values(lambda origin: origin.device)),
        "precisions": list(facts.values(lambda origin: origin.precision)),
        "commits": list(facts.values(lambda origin: origin.commit)),
        "dirty": any(origin.dirty for _, origin in facts.origins),
        "attacks": facts.attacks(),
        "attack_settings": grid.attacks,
        "versions": facts.versions(),
        "mixed": facts.mixed(),
        "notes": [f"{what}: {note}" for what, note in grid.notes],
        **more,
    }


def _unit(column: Column) -> str:
    return "fraction" if column.unit == "percent" else "plain"


def _measured(value: Value) -> dict[str, Any]:
    n = [n for n in value.n if n]
    return {
        "mean": value.mean,
        "std": value.std,
        "seeds": list(value.seeds),
        "n": (n[0] if len(n) == 1 else n) if n else None,
        "seeds_planned": value.wanted,
        "difference": value.difference,
        "rank": value.rank or None,
        "flags": list(value.flags),
    }


def _paired(comparison: Comparison) -> dict[str, Any]:
    test = comparison.test
    return {
        "key": comparison.key,
        "label": comparison.label,
        "against": comparison.against,
        "heading": comparison.column.heading,
        "metric": comparison.column.metric,
        "unit": _unit(comparison.column),
        "mean": test.mean,
        "std": test.std,
        "n": len(test.seeds),
        "seeds": list(test.seeds),
        "t_p": test.t_p,
        "wilcoxon_p": test.wilcoxon_p,
    }
