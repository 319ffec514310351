"""`fatbench export` and `import`: results between machines, as tables of numbers, and as published numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fatbench import settings, whole_file
from fatbench.cli import options as opt
from fatbench.cli.options import Argument, Option, formats
from fatbench.cli.shared import (
    cell_in,
    format_of,
    is_suite,
    known_format,
    print_json,
    print_or_write,
    say_written,
    working,
)  # fmt: skip
from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened

if TYPE_CHECKING:
    import pandas

EXPORTS = ("jsonl", "csv", "parquet", "sqlite")


def export(
    targets: opt.Things = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    without: Annotated[
        list[str] | None,
        Option("--without", metavar="METRIC", help="Leave out each client's numbers of METRIC (jsonl)."),
    ] = None,
    unfinished: Annotated[
        bool, Option("--unfinished", help="Half-done cells with what they go on from, as a tar; no -o: only list them.")
    ] = False,
    format: Annotated[str | None, formats(*EXPORTS)] = None,
    output: opt.Output = None,
) -> None:
    """Write results as JSON lines, CSV, Parquet, or a copy of the database; or half-done cells for another machine.

    The ending of -o decides the format: .jsonl (.gz and .xz are compressed), .csv, .parquet, .db; stdout has JSON
    lines. Without a NAME or CELL all results are written. With --unfinished, `fatbench import` of the tar goes on.

    Example: fatbench export fat-baselines -k 'method in [FAT, SFAT]' -o results.jsonl
    """
    if unfinished:
        if format is not None or without:
            named = "--without" if without else "--format"
            raise SpecError(f"--unfinished writes a tar of all numbers: leave out {named}")
        _half_done(targets or [], preset, where, output)
        return
    format = known_format(format or format_of(output, EXPORTS, "jsonl"), EXPORTS)
    if format in ("parquet", "sqlite") and (output is None or (format == "sqlite" and str(output) == "-")):
        raise SpecError("say where with -o FILE", option=f"format {format}")
    names = [target for target in targets or () if is_suite(target)]
    if not names and (preset or where):
        raise SpecError("--preset and -k need a suite: fatbench export NAME -k FILTER")
    if format == "sqlite":
        if targets:
            raise SpecError(f"--format sqlite copies the whole database: leave out {' '.join(targets)[:60]}")
        assert output is not None  # checked above
        from fatbench.store import cleanup
        from fatbench.store.stages import Store

        with Store.open(settings.database()) as copied:
            size = cleanup.backup(copied, output)
            print(f"{output}: {size / 1e6:.1f} MB, {copied.database.shown} as it was")
        return
    if format != "jsonl":
        _write_numbers(_numbers(targets or [], names, preset, where), format, output)
        return
    from fatbench import api

    cells: dict[str, None] = {}
    with working("writing results") if output is not None else contextlib.nullcontext(), opened(None) as store:
        for name in names:  # before the database: a misspelt name is said first
            plan = api.planned_suite(name, preset, None, where, store)[1]
            cells |= dict.fromkeys(cell.id for cell in plan.to_run())
            if store is not None and not store.known_cells(cells):
                raise NothingMatched(f"no cells of {plan.suite} (preset {plan.preset}) in {store.database.shown}")
        cells |= dict.fromkeys(cell_in(store, target) for target in targets or () if target not in names)
        target = sys.stdout if output is None else output
        api.export_results(target, cells=[*cells] if targets else None, without=without or ())
    if output is not None:
        say_written(output)


def _half_done(targets: list[str], preset: str | None, where: list[str] | None, output: Path | None) -> None:
    """Say which cells are half done and how large they are, and write them."""
    from fatbench import api

    names = [target for target in targets if is_suite(target)]
    if not names and (preset or where):
        raise SpecError("--preset and -k need a suite: fatbench export --unfinished NAME -k FILTER")
    with opened(None) as store:
        cells = [cell_in(store, target) for target in targets if target not in names]
    # the cells of a suite and cells by id cannot be told apart afterwards
    if names and cells:
        raise SpecError("--unfinished: name suites or cells, not both")
    with api.half_done(names, preset, None, where, cells or None) as found:
        print(found, file=sys.stdout if output is None else sys.stderr)
        if output is not None:
            found.write(output)
            say_written(output)


def _numbers(targets: list[str], names: list[str], preset: str | None, where: list[str] | None) -> pandas.DataFrame:
    """Every number of suites and cells, also those of rounds."""
    import pandas

    from fatbench import api

    chosen: dict[str, Any] = {"stage": None, "preset": preset, "where": where}
    frames = [api.results(name, **chosen) for name in names]
    if cells := [target for target in targets if target not in names]:
        with opened(None) as store:
            ids = [cell_in(store, cell) for cell in cells]
        numbers = api.results(stage=None)
        frames.append(numbers[numbers["cell"].isin(ids)])
    return pandas.concat(frames) if len(frames) > 1 else frames[0] if frames else api.results(stage=None)


def _write_numbers(frame: pandas.DataFrame, format: str, output: Path | None) -> None:
    """Every number as a row. SpecError: pyarrow is not installed."""
    from fatbench.report.tables.number_format import csv_text

    if frame.empty:
        raise typer.Exit(NothingMatched.exit_code)  # the reason is printed
    if format == "csv":
        print_or_write(csv_text(frame), output)
        return
    if importlib.util.find_spec("pyarrow") is None:
        raise SpecError("--format parquet: pip install 'fatbench[parquet]'")
    assert output is not None  # checked before anything was read
    whole_file.write(output, frame.to_parquet(index=False), f"-o {output}")
    say_written(output)


def import_(
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="Files written by `fatbench export`.", show_default=False)
    ],
    skip_bad: Annotated[bool, Option("--skip-bad", help="Skip invalid lines and report them.")] = False,
    as_published: Annotated[
        str | None,
        Option("--as-published", metavar="SUITE", help="FILE is a paper's table: published numbers of SUITE."),
    ] = None,
    table: opt.TableId = None,
    label: Annotated[
        list[str] | None, Option("--label", metavar="PAPER=OURS", help="Map the paper's name to ours.")
    ] = None,
    select: Annotated[
        str, Option("--select", metavar="WHICH", help="Checkpoint: last, best-val or best-test.")
    ] = "unknown",
    unit: Annotated[
        str | None, Option("--unit", metavar="UNIT", help="Of the paper's numbers: percent or plain.")
    ] = None,
    format: opt.Format = "text",
) -> None:
    """Import results of other machines, or half-done cells; importing twice changes nothing.

    All files are checked first. With --as-published, a paper's table, or RobustBench's records, become published
    numbers of a suite of your own; --table, --label, --select and --unit say how to read it.

    Example: fatbench import results.jsonl
    """
    known_format(format, ("text", "json"))
    if as_published is not None:
        _publish(files, as_published, table or [], label or [], select, unit, skip_bad, format)
        return
    of_papers = {"--table": table, "--label": label, "--unit": unit, "--select": select != "unknown"}
    if misplaced := [option for option, value in of_papers.items() if value]:
        raise SpecError(f"{', '.join(misplaced)}: only with --as-published SUITE")
    take_in(files, skip_bad, format)


def take_in(files: Sequence[Path], skip_bad: bool = False, format: str = "text") -> None:
    """Import files and say what was new. ExchangeError: a line is invalid, and skip_bad is not said."""
    from fatbench import api

    problems: list[str] | None = [] if skip_bad else None  # None: an invalid line is an error
    with working(f"reading {', '.join(map(str, files))}"):
        file_counts, differing, relabelled = api.take_in(files, None, problems)
    for message in problems or ():
        print(f"fatbench: skipped: {message}", file=sys.stderr)
    for summary in file_counts if format != "json" else ():
        counts = {
            count_name: count
            for count_name, count in summary.items()
            if count_name not in ("file", "invalid lines") and (count or count_name == "cells")
        }
        lines_left = f", {summary['invalid lines']} invalid lines skipped" if summary["invalid lines"] else ""
        print(f"{summary['file']}: {', '.join(f'{n} {count_name}' for count_name, n in counts.items())}{lines_left}")
    for cell, reasons in differing.items():
        words = "; ".join(reason.beside for reason in reasons)
        print(f"fatbench: {cell} is no repetition of its cell, they differ in {words}", file=sys.stderr)
    for sentence in relabelled:
        print(f"fatbench: {sentence}", file=sys.stderr)
    if format == "json":
        summaries = [{key.replace(" ", "_"): value for key, value in summary.items()} for summary in file_counts]
        print_json({"files": summaries, "skipped": problems or []})


def _publish(
    papers: Sequence[Path], name: str, ids: Sequence[str], labels: Sequence[str], select: str, unit: str | None,
    skip_bad: bool, format: str,
) -> None:  # fmt: skip
    """Take tables of papers as published numbers of a suite's table, and say what was refused. SpecError."""
    from fatbench.suite import files, publish
    from fatbench.suite.tables import Selected

    checkpoints = get_args(Selected)
    if select not in checkpoints:
        raise SpecError(f"no checkpoint is named '{select}'{did_you_mean(select, checkpoints)}", option="select")
    if unit not in (None, "percent", "plain"):
        raise SpecError(f"expected percent or plain, got '{unit}'", option="unit")
    if len(ids) > 1:
        raise SpecError(f"with --as-published one table, got {len(ids)}", option="table")
    if bad_label := next((label_text for label_text in labels if "=" not in label_text), None):
        raise SpecError(f"expected PAPER=OURS, such as 'Standard AT=FAT', got '{bad_label}'", option="label")
    pairs = [label.partition("=") for label in labels]
    ours_by_paper = {paper.strip(): ours.strip() for paper, _, ours in pairs}
    suite = files.load(name)
    table = publish.table_of(suite, ids[0] if ids else None)
    read_rows = [row for paper in papers for row in publish.read_table(paper)]
    rows = publish.match_rows(read_rows, suite, table, ours_by_paper)
    for line in rows.refused:
        print(f"fatbench: refused: {line}", file=sys.stderr)
    if rows.refused and not (skip_bad and rows.count):
        raise SpecError(f"{len(rows.refused)} rows are refused, and nothing was written; --skip-bad takes the others")
    target = publish.write(rows, suite, select, unit)
    if format == "json":
        print_json({"suite": str(suite.file), "table": table.id, "file": str(target), "rows": len(rows.rows),
                    "numbers": rows.count, "refused": rows.refused, "unused": rows.unused})  # fmt: skip
        return
    print(f"{suite.file}: table {table.id} has {rows.count} published numbers in {len(rows.rows)} rows, from {target}")
    if rows.unused:
        print(f"fatbench: columns that the table does not have: {', '.join(rows.unused)}", file=sys.stderr)
