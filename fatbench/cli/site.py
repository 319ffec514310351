"""`fatbench site`: the pages of a database, or of files of results."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench import packed, whole_file
from fatbench.cli.common import plan_in, working
from fatbench.cli.options import Db, Runs, Select, output_folder
from fatbench.cli.reporting import checkpoint
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.report.site.leaderboards import Board
    from fatbench.report.site.pages import Part
    from fatbench.store.selection import Checkpoint
    from fatbench.store.stages import Store


def site(
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=output_folder, help="Folder to write to.", show_default=False)
    ],
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Exported files, or suite names or files; default: every suite in the database."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Folder of images written by `fatbench plot` or `show --artifacts`.")
    ] = None,
    select: Select = "last",
    runs: Runs = "",
    show: Annotated[bool, typer.Option("--open", help="Open the index in the browser.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the pages every minute while cells run; an open page follows.")
    ] = False,
    db: Db = None,
) -> None:
    """Write HTML pages: leaderboards, tables, figures, and the runs behind every number.

    Example: fatbench site -o site
    """
    chosen_checkpoint = checkpoint(select)
    requested = what or []
    files = [Path(item) for item in requested if item == "-" or item.endswith(packed.RESULTS)]
    suites = [item for item in requested if Path(item) not in files]
    if missing_file := next((file for file in files if not whole_file.regular(file).is_file()), None):
        raise SpecError(f"no such file: {missing_file}")
    if images is not None and not images.is_dir():
        raise SpecError(f"--images {images}: no such folder")
    if watch and files:
        raise SpecError(f"--watch: {files[0]} is a file of results; cells run in a database (--db)")
    idle = 0
    while True:
        running = _write(files, suites, output, images, chosen_checkpoint, runs, db, EVERY if watch else 0)
        if show:
            webbrowser.open((output / "index.html").resolve().as_uri())
            show = False
        if not watch or (idle := 0 if running else idle + 1) == IDLE:
            break
        time.sleep(EVERY)
    if watch:
        _write(files, suites, output, images, chosen_checkpoint, runs, db, 0)  # pages that no longer ask for newer ones


EVERY = 60  # seconds between two looks
IDLE = 3  # looks: between two cells of a run there may be a moment without one


def _write(
    files: list[Path],
    suites: list[str],
    output: Path,
    images: Path | None,
    chosen_checkpoint: Checkpoint,
    runs: str,
    db: str | None,
    refresh_seconds: int,
) -> bool:
    """Write the pages once; returns whether a cell of them runs. refresh_seconds: how often a browser reads them."""
    from fatbench import api, settings
    from fatbench.report.site import pages
    from fatbench.runner import provenance

    pages.refuse_foreign(output, ["index.html", pages.SCRIPT])
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(working("reading results"))
        store = stack.enter_context(_imported(files) if files else opened(db))
        if store is None:
            for name in suites:
                plan_in(name, None, False, None, None, None)  # a misspelt name is said first
            raise NothingMatched(api.why_empty(None, None, db))
        suite_parts, problems = _suite_parts(store, suites, chosen_checkpoint, runs)
        if not suite_parts:
            raise NothingMatched("; ".join(problems) or api.why_empty(None, store, files or db))
        folder = None if files else settings.files_folder(settings.database(db))

        def read(suite_part: Part) -> pages.Content:
            say(f"page of {suite_part.plan.suite}, of {len(suite_parts)} suites")
            return pages.content([suite_part], store, select=chosen_checkpoint, files=folder, images=images)

        def boards() -> list[Board]:
            say("index")
            return pages.boards_of(suite_parts, store, chosen_checkpoint)

        written_files, removed_files = pages.site(
            suite_parts, read, boards, output, problems, provenance.short_version(), refresh_seconds
        )
    for problem in problems:
        print(f"fatbench: {problem}", file=sys.stderr)
    if removed_files:
        print(f"fatbench: removed from {output}, of an earlier call: {', '.join(removed_files)}", file=sys.stderr)
    for file in written_files:
        print(file)
    return any(suite_part.counts.get("running") for suite_part in suite_parts)


def _suite_parts(
    store: Store, suites: list[str], chosen_checkpoint: Checkpoint, runs: str
) -> tuple[list[Part], list[str]]:
    """Every preset of the suites that has been run, with its tables; and what cannot be shown, in words."""
    from fatbench import api, report
    from fatbench.report.site.pages import Part
    from fatbench.runner import progress
    from fatbench.suite import files
    from fatbench.suite.folders import own_files

    suite_parts: list[Part] = []
    problems = []
    page_names = set()
    count_by_suite = progress.by_suite(store)
    suite_names = files.available()
    own_files_by_name = {name: file for name, file in own_files().items() if name not in suite_names}
    # by what a person asked for: a file of a suite has another name than the suite
    suites_wanted: list[tuple[str, str | None]] = [(name, None) for name in suites] or [
        (n, p or None) for n, p in count_by_suite
    ]
    for name, preset in suites_wanted:
        try:
            if not suites and files.is_path(name):  # of imported lines: a name, and never a file to open
                raise SpecError("a suite's name is no path")
            base = files.split_settings(name)[0]
            suite_name = own_files_by_name[base] + name.removeprefix(base) if base in own_files_by_name else name
            suite, plan = plan_in(suite_name, preset, False, None, None, store)
            plans = [plan] + [
                plan_in(suite_name, other_preset, False, None, None, store)[1]
                for other_preset in progress.presets_run(suite, store)
                # of a whole database, each preset that this suite has run comes by itself
                if other_preset != plan.preset and (suites or (suite.name, other_preset) not in count_by_suite)
            ]
        except FatbenchError as error:
            if suites:
                raise
            cells = sum(count_by_suite[name, preset or ""].values())
            problems.append(f"{cells} cells of '{name}' are not shown: {error}")
            continue
        for asked_for in plans:
            if (page_name := Part(suite, asked_for, []).file) in page_names:
                continue
            page_names.add(page_name)
            plan = api.to_read(suite, asked_for, store, runs)
            grids = report.build_tables(suite, plan, store, select=chosen_checkpoint)
            shown_cells = {cell.id for cell in asked_for.unique()}  # and not the networks that they begin with
            rows = [row for row in progress.cells_of(asked_for, store) if row.cell.id in shown_cells]
            measured_cells = frozenset(row.cell.id for row in rows if row.stages_done > (row.stages > 1))
            counts = {"measured": len(measured_cells), **progress.count(rows)}
            if grids:
                suite_parts.append(Part(suite, plan, grids, counts, measured_cells))
    return suite_parts, problems


@contextlib.contextmanager
def _imported(files: list[Path]) -> Iterator[Store]:
    """A database of the files alone, for as long as it is looked at."""
    from fatbench.store import jsonl
    from fatbench.store.stages import Store

    with (
        tempfile.TemporaryDirectory(prefix="fatbench-") as folder,
        Store.open(str(Path(folder) / "results.db"), create=True) as store,
    ):
        for file in files:
            jsonl.import_(store, file)
        yield store
