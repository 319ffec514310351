"""`fatbench cite`: the papers behind a suite, as BibTeX."""

from __future__ import annotations

from typing import Annotated

import typer

from fatbench.cli import completing
from fatbench.cli.common import known_format, print_json

FORMATS = ("bibtex", "markdown", "json")


def cite(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[SUITE]",
            help="Suite name or YAML file; default: every paper that is cited.",
            autocompletion=completing.suites,
            show_default=False,
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="bibtex, markdown or json.")] = "bibtex",
) -> None:
    """Print the papers behind a suite: its methods, attacks, networks, data sets and intervals.

    Example: fatbench cite sfat-cifar10
    """
    known_format(format, FORMATS)
    from fatbench.report import references

    if name is None:
        entries = list(references.entries())
    else:
        from fatbench.suite import files

        entries = references.cited_by(files.load(name))
    if format == "json":
        print_json({"references": [{"key": entry.key, **entry.fields} for entry in entries]})
    else:
        print((references.bibtex if format == "bibtex" else references.markdown)(entries), end="")
