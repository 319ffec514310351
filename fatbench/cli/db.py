"""`fatbench db`, `export` and `import`: the database itself, and results between machines."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import whole_file
from fatbench.cli import completing, publish
from fatbench.cli.common import (
    known_format,
    named_filter,
    named_preset,
    plan_in,
    print_json,
    say_written,
    working,
    write_text,
)
from fatbench.cli.options import Db, Format, Preset, Seeds, Smoke, Where, output_folder
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    import pandas

    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan


def export(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Suite name or file; default: all cells of the database.", autocompletion=completing.suites
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File (.jsonl.gz, .jsonl.xz: compressed); folder of robustbench, croissant; default: stdout.",
        ),
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="jsonl for `fatbench import`, csv, parquet, robustbench's records, croissant, datasette's metadata.",
            autocompletion=completing.one_of("jsonl", "csv", "parquet", "robustbench", "croissant", "datasette"),
        ),
    ] = "jsonl",
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="METRIC", help="Leave out each client's numbers of METRIC (jsonl)."),
    ] = None,
    db: Db = None,
) -> None:
    """Export results: as JSON lines, as a table of every number, or as RobustBench's records.

    Example: fatbench export fat-baselines -k 'method in [FAT, SFAT]' -o results.jsonl
    """
    from fatbench import api

    known_format(format, EXPORTS)
    if format in ("parquet", "robustbench", "croissant") and output is None:
        raise SpecError(f"--format {format}: say where with -o {'FILE' if format == 'parquet' else 'FOLDER'}")
    if name is None and (preset or smoke or where or seeds):
        raise SpecError("--preset, --smoke, -k and --seeds choose cells of a suite: fatbench export NAME -k FILTER")
    if format == "datasette":
        _datasette(db, output)
        return
    if format == "robustbench":
        if name is None:
            raise SpecError("--format robustbench: name the suite, fatbench export NAME")
        with opened(db) as store:
            plan = plan_in(name, preset, smoke, seeds, where, store)[1]
            _robustbench(plan, api.existing_store(store, db), output or Path())
        return

    chosen: dict[str, Any] = {
        "preset": named_preset(preset, smoke),
        "where": named_filter(where),
        "seeds": seeds,
        "db": db,
    }
    if format != "jsonl":
        # stage=None: the numbers of the rounds, too
        _write_numbers(api.results(name, stage=None, **chosen), name, chosen["preset"], format, output)
        return
    with working("writing results") if output is not None else contextlib.nullcontext():
        target = sys.stdout if output is None else output
        api.export_results(target, suite=name, without=without or (), **chosen)
    if output is not None:
        say_written(output)


EXPORTS = ("jsonl", "csv", "parquet", "robustbench", "croissant", "datasette")


def _datasette(db: str | None, output: Path | None) -> None:
    """What Datasette shows beside the tables. SpecError: a server's database, which it does not read."""
    from fatbench import api
    from fatbench.report.formats import datasette

    with opened(db) as store:
        store = api.existing_store(store, db)
        if store.database.path is None:  # of PostgreSQL
            raise SpecError(f"--format datasette: {store.database.shown} is a server's; Datasette reads SQLite files")
        text = datasette.metadata(store.database.path)
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text, output)


def _robustbench(plan: Plan, store: Store, output: Path) -> None:
    """Print the files of a plan's models."""
    from fatbench.report.formats import robustbench

    output_folder(output)
    written_files = robustbench.write(plan, store, output)
    for file in written_files:
        print(output / file)
    if strange := {file.parts[0] for file in written_files} - {*robustbench.BOARDS}:
        boards = ", ".join(robustbench.BOARDS)
        print(f"fatbench: RobustBench has boards of {boards}, none of {', '.join(sorted(strange))}", file=sys.stderr)


def _write_numbers(
    frame: pandas.DataFrame, name: str | None, preset: str | None, format: str, output: Path | None
) -> None:
    """Every number as a row. SpecError: pyarrow is not installed."""
    from fatbench.report.tables.number_format import csv_text

    if frame.empty:
        raise typer.Exit(NothingMatched.exit_code)  # the reason is printed
    text = csv_text(frame)
    if format == "croissant":
        from fatbench.report.formats import croissant

        folder = output_folder(output) or Path()
        called = "-".join(name_part for name_part in (name and Path(name).stem, preset) if name_part) or "results"
        described = croissant.describe(frame, f"{called}.csv", text.encode(), f"fatbench {called}")
        files: dict[Path, str | bytes] = {folder / f"{called}.csv": text, folder / "croissant.json": described}
        whole_file.write_all(files, f"-o {folder}")
        print(*files, sep="\n")
        return
    if format == "csv":
        if output is None:
            sys.stdout.write(text)
        else:
            write_text(output, text, output)
        return
    if importlib.util.find_spec("pyarrow") is None:
        raise SpecError("--format parquet: pip install 'fatbench[parquet]'")
    assert output is not None  # checked before anything was read
    whole_file.write(output, frame.to_parquet(index=False), f"-o {output}")
    say_written(output)


def import_(
    files: Annotated[list[Path], typer.Argument(help="Files written by `fatbench export`.", show_default=False)],
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip invalid lines and report them.")] = False,
    as_published: Annotated[
        str | None,
        typer.Option("--as-published", metavar="SUITE", help="FILES are a paper's table: published numbers of SUITE."),
    ] = None,
    table: Annotated[str | None, typer.Option("--table", metavar="ID", help="With --as-published: this table.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="PAPER=OURS", help="With --as-published: what the paper calls it."),
    ] = None,
    select: Annotated[
        str, typer.Option("--select", help="With --as-published: the paper's checkpoint: last, best-val, best-test.")
    ] = "unknown",
    unit: Annotated[str | None, typer.Option("--unit", help="With --as-published: percent or plain.")] = None,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Import results from other machines. All files are checked first; importing twice changes nothing.

    With --as-published, take a paper's table, or RobustBench's records, as published numbers of a suite of your own.

    Example: fatbench import results.jsonl
    """
    if as_published is not None:
        publish.publish(files, as_published, table, label or [], select, unit, skip_bad, format)
        return
    if misplaced := [
        option
        for option, value in (
            ("--table", table),
            ("--label", label),
            ("--unit", unit),
            ("--select", select != "unknown"),
        )
        if value
    ]:
        raise SpecError(f"{', '.join(misplaced)}: only with --as-published SUITE")
    from fatbench import api

    known_format(format, ("text", "json"))
    problems: list[str] | None = [] if skip_bad else None  # None: an invalid line is an error
    with working(f"reading {', '.join(map(str, files))}"):
        file_counts, differing = api.take_in(files, db, problems)
    for message in problems or ():
        print(f"fatbench: skipped: {message}", file=sys.stderr)
    if format != "json":
        for summary in file_counts:
            counts = {
                count_name: count
                for count_name, count in summary.items()
                if count_name not in ("file", "invalid lines") and (count or count_name == "cells")
            }
            lines_left = f", {summary['invalid lines']} invalid lines skipped" if summary["invalid lines"] else ""
            print(
                f"{summary['file']}: "
                f"{', '.join(f'{count} {count_name}' for count_name, count in counts.items())}{lines_left}"
            )
    for cell, reasons in differing.items():
        words = "; ".join(reason.beside for reason in reasons)
        print(f"fatbench: {cell} is no repetition of its cell, they differ in {words}", file=sys.stderr)
    if format == "json":
        summaries = [{key.replace(" ", "_"): value for key, value in summary.items()} for summary in file_counts]
        print_json({"files": summaries, "skipped": problems or []})


def db_backup(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist.", show_default=False)],
    db: Db = None,
) -> None:
    """Copy the database to a new file, even while runs write to it. Checkpoints are not copied.

    Example: fatbench db backup copy.db
    """
    from fatbench import settings
    from fatbench.store import cleanup
    from fatbench.store.stages import Store

    with Store.open(settings.database(db)) as store:
        size = cleanup.backup(store, file)
        print(f"{file}: {size / 1e6:.1f} MB, {store.database.shown} as it was")


def db_check(
    repair: Annotated[bool, typer.Option("--repair", help="Store the doubts anew that differ.")] = False,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Check that the database is intact: its schema, the digest of every finished stage, accuracies and outcomes.

    The doubts that SQL shows must be those that follow from the numbers.

    Example: fatbench db check
    """
    from fatbench import settings
    from fatbench.report.numbers import sql_tables
    from fatbench.store import integrity
    from fatbench.store.rows import counted_text
    from fatbench.store.stages import Store
    from fatbench.suite.asked import contradiction
    from fatbench.suite.validate_import import identity

    known_format(format, ("text", "json"))
    url = settings.database(db)
    files = settings.files_folder(url)
    rows = integrity.counts(url, identity, files, contradiction=contradiction)
    with Store.open(url) as store:
        outdated = sql_tables.outdated(store)
        if outdated and repair:
            sql_tables.judge(store, sorted({cell for cell, _ in outdated}))
            print(f"fatbench: doubts of {counted_text({'evaluations': len(outdated)})} stored anew", file=sys.stderr)
            rows = integrity.counts(url, contents=False)  # the contents were checked above
        elif outdated:
            raise integrity.Damaged(f"{settings.shown_url(url)}: {_outdated(outdated)}")
    if format == "json":
        print_json({"database": settings.shown_url(url), "intact": True, "rows": rows})
    else:
        print(integrity.intact(url, rows))


def _outdated(outdated: Mapping[tuple[str, str], tuple[list[str], list[str]]]) -> str:
    """Which evaluations have other doubts than are stored, as one sentence."""
    descriptions = [
        f"{cell} {stage} ({', '.join(stored_doubts) or 'none'}; now {', '.join(computed) or 'none'})"
        for (cell, stage), (stored_doubts, computed) in outdated.items()
    ]
    remainder = f" and {len(descriptions) - 5} more" if len(descriptions) > 5 else ""
    return (
        f"stored doubts are not those of the numbers: {'; '.join(descriptions[:5])}{remainder} (fatbench db check "
        "--repair)"
    )
