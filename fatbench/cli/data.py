"""`fatbench data`: data sets and published weights on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fatbench.cli import completing
from fatbench.cli.common import known_format, print_json
from fatbench.cli.options import DataDir, Format
from fatbench.errors import MachineError

DataNames = Annotated[list[str], typer.Argument(help="Data sets, or published weights.", show_default=False)]


def data_list(
    suite: Annotated[
        str | None,
        typer.Argument(help="Only what this suite needs; default: all.", autocompletion=completing.suites),
    ] = None,
    data: DataDir = None,
    format: Format = "text",
) -> None:
    """List data sets and published weights: found or not, complete or not; with SUITE, what its presets need.

    Example: fatbench data list
    """
    from fatbench import data as datasets
    from fatbench import settings
    from fatbench.cli import show

    known_format(format, ("text", "json"))
    root = settings.data_folder(str(data) if data else None)
    rows, weights = datasets.status(root), datasets.weights_status(root)
    if suite is not None:
        rows, weights = _wanted_by(suite, {row["name"]: row for row in rows}, root)
    if format == "json":
        print_json({"root": str(root), "datasets": rows, "weights": weights})
    else:
        show.datasets(root, rows, weights)


def _wanted_by(
    name: str, rows_by_name: Mapping[str, dict[str, Any]], root: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of data sets with the presets of a suite that read them; the files of weights that its cells begin with.

    rows_by_name: rows of the data sets with published files. Of another, as a folder or a plug-in's, the row has its
    settings.
    """
    from fatbench.suite import calls, facts, files, format_call, weights

    chosen_suite, rows, texts = files.load(name), dict[str, dict[str, Any]](), dict[str, None]()
    for preset in chosen_suite.presets():
        specs = [cell.spec for cell in chosen_suite.plan(preset, refuse=False).to_run()]
        data_settings = [data for spec in specs for data in (spec["data"], spec.get("auxiliary")) if data]
        for brief, data in sorted({format_call.brief("Data", data): data for data in data_settings}.items()):
            row = rows_by_name.get(data["name"])
            if row is None:
                size = facts.of_data(calls.call("Data", data))
                row = {"name": data["name"], "state": "own", "train": size.train, "test": size.test, "where": brief}
            presets = rows.setdefault(brief if row["state"] == "own" else row["name"], {**row, "presets": []})[
                "presets"
            ]
            presets += [preset] * (preset not in presets)
        texts.update(dict.fromkeys(weights.weights_of(specs)))
    return [*rows.values()], [
        weights.status(known_weights, root) for text in texts if (known_weights := weights.parse_weights(text))
    ]


def data_prepare(names: DataNames, data: DataDir = None) -> None:
    """Fetch data sets or weights and verify them.

    Example: fatbench data prepare cifar10
    """
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    for name in names:
        row = datasets.prepare(name, root, lambda line: print(line, file=sys.stderr))
        print(f"{name}: {row['state']} in {row['where']}")


def data_verify(names: DataNames, data: DataDir = None) -> None:
    """Verify files against the published checksums.

    Example: fatbench data verify cifar10
    """
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    failures = 0
    for name in names:
        row = datasets.verify(name, root)
        failures += row["state"] not in ("complete", "variant")
        print(f"{name}: {row['state']}{': ' + row['message'] if row['message'] else ''}")
    if failures:
        raise typer.Exit(MachineError.exit_code)
