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
    at = checkpoint(select)
    asked = what or []
    files = [Path(one) for one in asked if one == "-" or one.endswith(packed.RESULTS)]
    suites = [one for one in asked if Path(one) not in files]
    if missing := next((file for file in files if not whole_file.regular(file).is_file()), None):
        raise SpecError(f"no such file: {missing}")
    if images is not None and not images.is_dir():
        raise SpecError(f"--images {images}: no such folder")
    if watch and files:
        raise SpecError(f"--watch: {files[0]} is a file of results; cells run in a database (--db)")
    idle = 0
    while True:
        running = _write(files, suites, output, images, at, runs, db, EVERY if watch else 0)
        if show:
            webbrowser.open((output / "index.html").resolve().as_uri())
            show = False
        if not watch or (idle := 0 if running else idle + 1) == IDLE:
            break
        time.sleep(EVERY)
    if watch:
        _write(files, suites, output, images, at, runs, db, 0)  # pages that no longer ask for newer ones


EVERY = 60  # seconds between two looks
IDLE = 3  # looks: between two cells of a run there may be a moment without one


def _write(
    files: list[Path],
    suites: list[str],
    output: Path,
    images: Path | None,
    at: Checkpoint,
    runs: str,
    db: str | None,
    every: int,
) -> bool:
    """Write the pages once; whether a cell of them runs. every: seconds after which a browser reads them again."""
    from fatbench import settings
    from fatbench.report.site import pages
    from fatbench.runner import provenance

    with contextlib.ExitStack() as stack:
        say = stack.enter_context(working("reading results"))
        store = stack.enter_context(_imported(files) if files else opened(db))
        if store is None:
            raise NothingMatched("the database has no results yet: fatbench run NAME")
        parts, problems = _parts(store, suites, at, runs)
        if not parts:
            raise NothingMatched("; ".join(problems) or "the database has no results yet: fatbench run NAME")
        folder = None if files else settings.files_folder(settings.database(db))

        def read(part: Part) -> pages.Content:
            say(f"page of {part.plan.suite}, of {len(parts)} suites")
            return pages.content([part], store, select=at, files=folder, images=images)

        def boards() -> list[Board]:
            say("index")
            return pages.boards_of(parts, store, at)

        written = pages.site(parts, read, boards, output, problems, provenance.short_version(), every)
    for problem in problems:
        print(f"fatbench: {problem}", file=sys.stderr)
    for file in written:
        print(file)
    return any(part.counts.get("running") for part in parts)


def _parts(store: Store, suites: list[str], at: Checkpoint, runs: str) -> tuple[list[Part], list[str]]:
    """Every preset of the suites that has been run, with its tables; and what cannot be shown, in words."""
    from fatbench import api, report
    from fatbench.report.site.pages import Part
    from fatbench.runner import progress
    from fatbench.suite import files
    from fatbench.suite.folders import own_files

    found: list[Part] = []
    problems = []
    counted = progress.by_suite(store)
    known = files.available()
    own = {name: file for name, file in own_files().items() if name not in known}
    # by what a person asked for: a file of a suite has another name than the suite
    wanted: list[tuple[str, str | None]] = [(name, None) for name in suites] or [(n, p or None) for n, p in counted]
    for name, preset in wanted:
        try:
            if not suites and files.is_path(name):  # of imported lines: a name, and never a file to open
                raise SpecError("a suite's name is no path")
            base = files.with_settings(name)[0]
            asked = own[base] + name.removeprefix(base) if base in own else name
            suite, plan = plan_in(asked, preset, False, None, None, store)
        except FatbenchError as error:
            if suites:
                raise
            cells = sum(counted[name, preset or ""].values())
            problems.append(f"{cells} cells of '{name}' are not shown: {error}")
            continue
        asked_for, plan = plan, api.to_read(suite, plan, store, runs)
        grids = report.build_tables(suite, plan, store, select=at)
        shown = {cell.id for cell in asked_for.unique()}  # and not the networks that they begin with
        rows = [row for row in progress.cells_of(asked_for, store) if row.cell.id in shown]
        measured = frozenset(row.cell.id for row in rows if row.stages_done > (row.stages > 1))
        counts = {"measured": len(measured), **progress.count(rows)}
        if grids and not (preset and any(part.file == Part(suite, plan, []).file for part in found)):
            found.append(Part(suite, plan, grids, counts, measured))
    return found, problems


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
