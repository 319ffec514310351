"""`fatbench list` and `fetch`: suites, data sets, networks, papers, functions; what of them is here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fatbench import packed, settings, whole_file
from fatbench.cli.completing import one_of
from fatbench.cli.options import Argument, DryRun, Option, Output, formats
from fatbench.cli.shared import known_format, print_json
from fatbench.errors import MachineError, NothingMatched, SpecError, did_you_mean

FUNCTIONS = {  # kind of `fatbench list` -> the table of functions
    "methods": "Algorithm", "aggregators": "Aggregator", "objectives": "Objective", "attacks": "Attack",
    "adversaries": "Adversary", "defences": "Defence", "inversions": "Inversion", "manipulations": "Manipulation",
    "partitions": "Partition", "augmentations": "Augment",
}  # fmt: skip
KINDS = ("suites", "data", "models", "papers", *FUNCTIONS)
FORMATS = ("text", "json", "bibtex", "markdown")


def list_(
    kind: Annotated[
        str,
        Argument(
            metavar="KIND", help=f"{', '.join(KINDS)}.", show_default=False, autocompletion=one_of(*KINDS)
        ),
    ],
    of: Annotated[
        list[str] | None,
        Argument(metavar="[NAME|FILE]...", help="Only what this suite needs, or these files hold.", show_default=False),
    ] = None,
    every: Annotated[bool, Option("--all", help="Include suites on JPEG-compressed images.")] = False,
    format: Annotated[str, formats(*FORMATS)] = "text",
) -> None:  # fmt: skip
    """List suites, data sets, networks, papers, methods, attacks.

    Of papers, --format bibtex prints references, and text is Markdown.

    Example: fatbench list papers sfat-cifar10 --format bibtex
    """
    plural = {word.rstrip("s"): word for word in KINDS} | {"datasets": "data", "adversary": "adversaries"}
    kind = plural.get(kind, kind)
    if kind not in KINDS:
        raise SpecError(f"no kind of thing is named '{kind}'{did_you_mean(kind, KINDS)}")
    known_format(format, FORMATS if kind == "papers" else FORMATS[:2])
    if every and kind != "suites":
        raise SpecError("only of suites", option="all")
    if kind == "suites":
        _suites(of or [], every, format)
    elif kind == "models":
        _models([Path(file) for file in of or ()], format)
    elif len(of or ()) > 1:
        raise SpecError(f"expected one suite, got {len(of or ())}: {' '.join(of or ())[:60]}")
    else:
        suite = of[0] if of else None
        {"data": _data, "papers": _papers}.get(kind, lambda name, format: _functions(kind, name, format))(suite, format)


def _suites(names: list[str], every: bool, format: str) -> None:
    """Suites by paper with their numbers of cells. Exit 2: one of them is invalid."""
    from fatbench.cli import show
    from fatbench.runner.versions import explain
    from fatbench.suite import files
    from fatbench.suite.folders import is_jpeg

    all_rows = list(files.listing())
    rows = [row for row in all_rows if "error" not in row and (not names or row["name"] in names)]
    if unknown := {*names} - {row["name"] for row in rows}:
        name = min(unknown)
        known = [row.get("name", "") for row in files.listing()]
        raise SpecError(f"no suite is named '{name}'{did_you_mean(name, known)}")
    for row in all_rows:
        if "error" in row:
            print(f"fatbench: {explain(row['error']).at_terminal()}", file=sys.stderr)
    if format == "json":
        print_json({"suites": rows})
    else:
        shown_rows = [row for row in rows if every or names or not is_jpeg(row["name"])]
        show.suites(shown_rows, len(rows) - len(shown_rows))
    if any("error" in row for row in all_rows):
        raise typer.Exit(SpecError.exit_code)


def _data(suite: str | None, format: str) -> None:
    """Data sets and published weights, and which are installed and complete."""
    from fatbench import data as datasets
    from fatbench.api.needs import data_of
    from fatbench.cli import show

    root = settings.data_folder()
    rows, weights = datasets.status(root), datasets.weights_status(root)
    if suite is not None:
        rows, weights = data_of(suite, {row["name"]: row for row in rows}, root)
    if format == "json":
        print_json({"root": str(root), "datasets": rows, "weights": weights})
    else:
        show.datasets(root, rows, weights)


def _models(files: list[Path], format: str) -> None:
    """Networks of results with their numbers, and whether their files are here."""
    from fatbench.cli import show
    from fatbench.runner import zoo

    files = files or packed.results_in(Path("results"))
    rows = zoo.rows(files, _beside(files))
    if not rows:
        raise NothingMatched("no network is known here: name files of results, as fatbench export writes them")
    if format == "json":
        print_json({"models": rows})
    else:
        show.models(rows)


def _beside(files: list[Path]) -> list[Path]:
    """The folders beside files of results that may hold the networks."""
    return list(dict.fromkeys(file.parent / "weights" for file in files))


def _papers(suite: str | None, format: str) -> None:
    """The papers behind a suite: its methods, attacks, networks, data sets and intervals; or all that are cited."""
    from fatbench.report import references
    from fatbench.suite import files

    entries = list(references.entries()) if suite is None else references.cited_by(files.load(suite))
    if format == "json":
        print_json({"references": [{"key": entry.key, **entry.fields} for entry in entries]})
    else:
        print((references.bibtex if format == "bibtex" else references.markdown)(entries), end="")


def _functions(kind: str, suite: str | None, format: str) -> None:
    """The functions of a table; with a suite those that its cells use."""
    from fatbench.api.needs import functions_of
    from fatbench.suite import signatures

    names = signatures.names(FUNCTIONS[kind]) if suite is None else functions_of(suite, FUNCTIONS[kind])
    if format == "json":
        print_json({kind: names})
    else:
        print(*names, sep="\n")


def fetch(
    names: Annotated[
        list[str],
        Argument(metavar="NAME...", help="Data sets, published weights, networks of results.", show_default=False),
    ],
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Download data sets and weights that are missing; check those that are here.

    -n only checks. A network of results, a name of 'fatbench list models', is written to -o.

    Example: fatbench fetch cifar10
    """
    from fatbench import data as datasets
    from fatbench.data import catalogue
    from fatbench.suite import weights

    published, root = (*catalogue.CATALOGUE, *weights.WEIGHTS), settings.data_folder()
    networks = [name for name in names if name not in published and ("/" in name or output is not None)]
    if output is not None and len(names) > 1:
        raise SpecError(f"is one file, for the network of one NAME; got {len(names)}", option=f"o {output}")
    if output is not None and not networks:
        raise SpecError(f"{names[0]} goes to the folder of the data sets, {root} (--data)", option="o")
    failures = 0
    for name in names:
        if name in networks:
            _fetch_network(name, dry_run, output)
            continue
        if dry_run:
            row = datasets.verify(name, root)
            failures += row["state"] not in ("complete", "variant")
            print(f"{name}: {row['state']}{': ' + row['message'] if row['message'] else ''}")
        else:
            row = datasets.prepare(name, root, lambda line: print(line, file=sys.stderr))
            print(f"{name}: {row['state']} in {row['where']}")
    if failures:
        raise typer.Exit(MachineError.exit_code)


def _fetch_network(name: str, dry_run: bool, output: Path | None) -> None:
    """Find the file of a network, or read it from hf://OWNER/NAME/FILE; write it to -o. NothingMatched: not here."""
    from fatbench.runner import zoo

    if "://" in name:
        file: Path | None = whole_file.regular(Path(name))
    else:
        files = packed.results_in(Path("results"))
        network = zoo.choose(name, zoo.names(zoo.entries(files)))
        file = zoo.find(network, _beside(files))
        if file is None:
            digest = network.sha256[:12]
            raise NothingMatched(f"{name}: its file, SHA-256 {digest}, is not here (fatbench run {network.cell})")
    assert file is not None
    if output is not None and not dry_run:
        whole_file.write(output, file.read_bytes(), f"-o {output}")
    else:
        print(f"{name}: complete in {file}")
