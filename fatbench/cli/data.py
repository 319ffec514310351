"""`fatbench data`: data sets and published weights on this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fatbench.cli.common import known_format, print_json
from fatbench.cli.options import DataDir, Format
from fatbench.errors import MachineError

DataNames = Annotated[list[str], typer.Argument(help="Data sets, or published weights.", show_default=False)]


def data_list(data: DataDir = None, format: Format = "text") -> None:
    """List data sets and published weights: found or not, complete or not, as published or a variant."""
    from fatbench import data as datasets
    from fatbench import settings
    from fatbench.cli import show

    known_format(format, ("text", "json"))
    root = settings.data_folder(str(data) if data else None)
    rows, weights = datasets.status(root), datasets.weights_status(root)
    if format == "json":
        print_json({"root": str(root), "datasets": rows, "weights": weights})
    else:
        show.datasets(root, rows, weights)


def data_prepare(names: DataNames, data: DataDir = None) -> None:
    """Fetch data sets or weights and verify them."""
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    for name in names:
        row = datasets.prepare(name, root, lambda line: print(line, file=sys.stderr))
        print(f"{name}: {row['state']} in {row['where']}")


def data_verify(names: DataNames, data: DataDir = None) -> None:
    """Verify files against the published checksums."""
    from fatbench import data as datasets
    from fatbench import settings

    root = settings.data_folder(str(data) if data else None)
    bad = 0
    for name in names:
        row = datasets.verify(name, root)
        bad += row["state"] not in ("complete", "variant")
        print(f"{name}: {row['state']}{': ' + row['message'] if row['message'] else ''}")
    if bad:
        raise typer.Exit(MachineError.exit_code)
