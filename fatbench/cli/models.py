"""`fatbench models`: networks of stored results with their numbers, and whether their files are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fatbench.cli.common import known_format, print_json
from fatbench.cli.options import Format
from fatbench.errors import NothingMatched


def models(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Files written by `fatbench export`; default: results/*.jsonl.", show_default=False),
    ] = None,
    place: Annotated[
        list[str] | None, typer.Option("--from", metavar="PLACE", help="Folder or https address with the files.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Only networks whose file is here.")] = False,
    format: Format = "text",
) -> None:
    """List the networks of results with their numbers; fatbench.load_model(NAME) gives one in Python.

    Example: fatbench models
    """
    from fatbench.cli import show
    from fatbench.runner import zoo

    known_format(format, ("text", "json"))
    rows = zoo.rows(results or sorted(Path("results").glob("*.jsonl")), place or ())
    rows = [row for row in rows if row["file"] is not None or not here]
    if not rows:
        raise NothingMatched("no network is known here: name files of results, as fatbench export writes them")
    if format == "json":
        print_json({"models": rows})
    else:
        show.models(rows)
