"""Metadata of a database for Datasette: `datasette fatbench.db --metadata metadata.json`."""

from __future__ import annotations

import json
from pathlib import Path

from fatbench.report.formats.croissant import COLUMNS
from fatbench.store.schema import OUTCOMES_VIEW, RESULTS_VIEW, SUITE_CELLS, VIEW

TABLES = {
    RESULTS_VIEW: "Every accuracy that a suite asks for, with its labels and doubts, of the run that tables read.",
    VIEW.name: "Every number with what produced it. Monitors have the stage train; client -1: about no single client.",
    SUITE_CELLS.name: "Every suite and preset that has a cell.",
    OUTCOMES_VIEW: "Whether each test image was classified right, by cell, stage and position.",
    "cells": "Experiments: their settings as JSON.",
    "runs": "Runs of cells: code, machine, versions, times.",
    "stages": "How far each training and evaluation is; of a failed one the traceback.",
}
QUERIES = {
    "final_accuracies": (
        "Accuracy of each evaluation, the mean over seeds",
        "SELECT suite, preset, labels, attack, round(100 * avg(value), 2) AS per_cent, count(*) AS seeds FROM results\n"
        "WHERE is_last AND current GROUP BY suite, preset, labels, attack\n"
        "ORDER BY suite, preset, attack, per_cent DESC",
    ),
    "one_cell": (
        "Every number of a cell that is about no single client",
        "SELECT stage, round, metric, value, n, device, \"precision\", \"commit\", created FROM measurements\n"
        "WHERE cell = :cell AND client = -1 ORDER BY stage, round, metric",
    ),
    "learning_curve": (
        "A metric of a cell, round by round",
        "SELECT round, value FROM measurements WHERE cell = :cell AND metric = :metric AND stage = 'train'\n"
        "AND client = -1 ORDER BY round",
    ),
    "not_reproducible": (
        "Numbers of code that was not committed",
        "SELECT cell, suite, stage, count(*) AS numbers FROM measurements WHERE dirty GROUP BY cell, suite, stage",
    ),
    "failures": (
        "What failed, and why",
        "SELECT cell, stage, error FROM stages WHERE status = 'failed' ORDER BY cell, stage",
    ),
}  # fmt: skip


def metadata(database: Path) -> str:
    """The JSON of a SQLite file: its tables, their columns, and first queries."""
    columns = {column.name: COLUMNS[column.name] for column in VIEW.columns}
    described = {
        name: {"description": text, **({"columns": columns} if name == VIEW.name else {})}
        for name, text in TABLES.items()
    }
    queries = {name: {"title": title, "sql": sql} for name, (title, sql) in QUERIES.items()}
    document = {
        "title": "fatbench results",
        "description": "Federated adversarial training: every number with the code, seed and machine behind it.",
        "databases": {database.stem: {"tables": described, "queries": queries}},
    }
    return json.dumps(document, indent=2) + "\n"
