"""The report as data: CSV, one line a number, and JSON. Fractions in [0, 1], unrounded, differences as well."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pandas

from fatbench.report.contrasts import Difference
from fatbench.report.tables.number_format import csv_text, tidy
from fatbench.report.tables.sheet import Column, Entry, Row, Sheet
from fatbench.store.rows import grouped
from fatbench.suite.model import Key

SCHEMA_VERSION = 1
BEFORE = ("suite", "table")
AFTER = (
    "heading", "metric", "unit", "checkpoint", "mean", "std", "seeds", "seeds_planned", "n", "published",
    "published_std", "published_checkpoint", "difference", "doubts", "published_flag", "published_most",
    "formula", "low", "high", "preset", "variant", "device", "precision", "commit", "label",
)  # fmt: skip


def render_csv(grids: Sequence[Sheet]) -> str:
    """The numbers of `frame` as CSV."""
    return csv_text(frame(grids))


def frame(grids: Sequence[Sheet]) -> pandas.DataFrame:
    """One line for each number of each table, see `tidy`; several seeds, n or doubts are separated by ";"."""
    numbers = (
        (key, shared | _line(column, value))
        for grid in grids
        for shared in [_shared_fields(grid)]  # asks every cell
        for row in grid.rows
        for key, column, value in _planned_values(grid, row)
    )
    return tidy(numbers, BEFORE, AFTER)


def _planned_values(grid: Sheet, row: Row) -> Iterable[tuple[Key, Column, Entry]]:
    """(labels of row, group and heading; column; value) of each number that the suite plans."""
    for group, values in zip(grid.groups, row.values, strict=True):
        for column, value in zip(grid.columns, values, strict=True):
            if value.planned:
                yield {**row.key, **group.key, **value.labels}, column, value


def _shared_fields(grid: Sheet) -> dict[str, str]:
    """The fields that all numbers of a table share."""
    facts = grid.facts
    return {
        "suite": grid.suite,
        "table": grid.id,
        "checkpoint": grid.select,
        "preset": grid.preset,
        "label": grid.label,
        "variant": _join({variant for versions in facts.data.values() for variant, _ in versions if variant}),
        "device": _join(facts.values("device")),
        "precision": _join(facts.values("precision")),
        "commit": _join(facts.values("commit")),
    }


def _line(column: Column, value: Entry) -> dict[str, Any]:
    difference = value.difference
    if difference is not None and column.unit == "percent":
        difference = round(difference, 12)  # of two numbers below 1: what is left of their last bits is no digit
    return {
        "heading": column.heading,
        "metric": column.metric,
        "unit": _unit(column),
        "mean": value.mean,
        "std": value.std,
        "seeds": _join(value.seeds),
        "seeds_planned": value.wanted,
        "n": _join(n for n in value.n if n),
        "published": None if value.formula else value.published,
        "published_std": value.published_std,
        "published_checkpoint": "" if value.published is None else value.published_select,
        "difference": difference,
        "doubts": _join(value.doubts),
        "published_flag": value.published_flag,
        "published_most": value.published_most,
        "formula": value.published if value.formula else None,
        "low": value.interval and value.interval[0],
        "high": value.interval and value.interval[1],
    }


def _join(items: Any) -> str:
    return ";".join(str(item) for item in items)


def render_json(grids: Sequence[Sheet]) -> str:
    """{"schema_version", "tables": [...]}; scripts may rely on what is there, more keys may come."""
    content = {"schema_version": SCHEMA_VERSION, "tables": [_table(grid) for grid in grids]}
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _table(grid: Sheet) -> dict[str, Any]:
    """One table; each point of the grid is a row, its key holding the labels of row, group and heading."""
    has_own = any(row.own for row in grid.rows)
    points = grouped(
        ((position, tuple(key.items())), (column, value))
        for position, row in enumerate(grid.rows)  # two models that were not trained here may have one name
        for key, column, value in _planned_values(grid, row)
    )
    rows = [
        {
            "key": dict(labels),
            **({"own": grid.rows[position].own} if has_own else {}),
            "measured": {c.metric: _measured_record(v) for c, v in column_values},
            "published": {
                c.metric: {
                    "mean": v.published,
                    "std": v.published_std,
                    "checkpoint": v.published_select or None,
                    "flag": v.published_flag,
                    **({} if v.published_most is None else {"most": v.published_most}),
                }
                for c, v in column_values
                if v.published is not None and not v.formula
            },
            "formula": {c.metric: v.published for c, v in column_values if v.formula},
            "doubts": [f"{c.metric}: {doubt}" for c, v in column_values for doubt in v.doubts],
        }
        for (position, labels), column_values in points.items()
    ]
    facts = grid.facts
    optional: dict[str, Any] = {}
    if plugin_records := facts.plugins():
        optional["plugins"] = [{key: value for key, value in one.items() if key != "cells"} for one in plugin_records]
    if any(column.where for column in grid.columns):  # two headings may then show the same metric
        optional["columns"] = [
            {"heading": c.heading, "metric": c.metric, "where": c.where, "unit": _unit(c), "best": c.best}
            for c in grid.columns
        ]
    if grid.paired:
        optional["paired"] = [_paired(column, one) for column, one in grid.paired]
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
        "devices": facts.values("device"),
        "precisions": facts.values("precision"),
        "commits": list(dict.fromkeys(commit.removesuffix("+dirty") for commit in facts.values("commit"))),
        "dirty": any(origin.dirty for origin in facts.origins),
        "attacks": facts.attacks,
        "attack_settings": grid.attacks,
        "versions": facts.versions,
        "mixed": facts.mixed(),
        "notes": [f"{note_name}: {note}" for note_name, note in grid.notes],
        **optional,
    }


def _unit(column: Column) -> str:
    return "fraction" if column.unit == "percent" else "plain"


def _measured_record(value: Entry) -> dict[str, Any]:
    n = [n for n in value.n if n]
    return {
        "mean": value.mean,
        "std": value.std,
        **({} if value.interval is None else {"interval": list(value.interval)}),
        "seeds": list(value.seeds),
        "n": (n[0] if len(n) == 1 else n) if n else None,
        "seeds_planned": value.wanted,
        "difference": value.difference,
        "rank": value.rank or None,
        "doubts": list(value.doubts),
    }


def _paired(column: Column, one: Difference) -> dict[str, Any]:
    label, against = one.sides
    test = one.over_seeds
    assert test is not None  # a table has no others
    return {
        "key": one.labels, "label": label, "against": against, "heading": column.heading, "metric": column.metric,
        "unit": _unit(column), "mean": test.mean, "std": test.std, "n": len(test.seeds), "seeds": list(test.seeds),
        "t_p": test.t_p, "wilcoxon_p": test.wilcoxon_p,
    }  # fmt: skip
