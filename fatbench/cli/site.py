"""`fatbench site`: the pages of a database, or of files of results."""

from __future__ import annotations

import contextlib
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fatbench import packed, whole_file
from fatbench.cli import completing
from fatbench.cli.options import Argument, Option, OutputFolder, Select, Watched
from fatbench.cli.shared import FIGURES, working
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened

if TYPE_CHECKING:
    from fatbench.store.selection import Checkpoint


def site(
    what: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME|FILE]...", help="Suites, or exported files; none: every suite in the database.",
            show_default=False, autocompletion=completing.suites,
        ),
    ] = None,
    select: Select = "last",
    show: Annotated[bool, Option("--open", help="Open the index in the browser.")] = False,
    watch: Watched = False,
    output: OutputFolder = None,
) -> None:  # fmt: skip
    """Write web pages: leaderboards, tables, figures, runs.

    Images that 'fatbench plot' and 'show --artifacts' wrote are found in results/figures, and beside exported files.
    With --watch the pages are written every minute while cells run, and an open page follows.

    Example: fatbench site -o site
    """
    if output is None:
        raise SpecError("say where with -o FOLDER")
    requested = what or []
    files = [Path(item) for item in requested if item == "-" or item.endswith(packed.RESULTS)]
    suites = [item for item in requested if Path(item) not in files]
    if missing_file := next((file for file in files if not whole_file.regular(file).is_file()), None):
        raise SpecError(f"no such file: {missing_file}")
    if watch and files:
        raise SpecError(f"{files[0]} is a file of results; cells run in a database (--db)", option="watch")
    images = next(filter(Path.is_dir, [*(file.parent / "figures" for file in files), FIGURES]), None)
    idle = 0
    while True:
        running = _write(files, suites, output, images, select, EVERY if watch else 0)
        if show:
            webbrowser.open((output / "index.html").resolve().as_uri())
            show = False
        if not watch or (idle := 0 if running else idle + 1) == IDLE:
            break
        time.sleep(EVERY)
    if watch:
        _write(files, suites, output, images, select, 0)  # pages that no longer ask for newer ones


EVERY = 60  # seconds between two looks
IDLE = 3  # looks: between two cells of a run there may be a moment without one


def _write(
    files: list[Path], suites: list[str], output: Path, images: Path | None, select: Checkpoint, refresh_seconds: int
) -> bool:
    """Write the pages once; returns whether a cell of them runs. refresh_seconds: how often a browser reads them."""
    from fatbench import api, settings
    from fatbench.api.sites import suite_parts_of
    from fatbench.report.site import pages
    from fatbench.runner import provenance

    pages.refuse_foreign(output, ["index.html", pages.SCRIPT])
    with contextlib.ExitStack() as stack:
        say = stack.enter_context(working("reading results"))
        store = stack.enter_context(opened(files or None))
        if store is None:
            for name in suites:
                api.planned_suite(name, None, None, None, None)  # a misspelt name is said first
            raise NothingMatched(api.why_empty(None, None, None))
        suite_parts, problems = suite_parts_of(store, suites, select)
        if not suite_parts:
            raise NothingMatched("; ".join(problems) or api.why_empty(None, store, files or None))
        folder = None if files else settings.files_folder(settings.database())
        written_files, removed_files = pages.site(
            suite_parts, store, output, select=select, files=folder, images=images, problems=problems,
            commit=provenance.short_version(), refresh_seconds=refresh_seconds, say=say,
        )  # fmt: skip
    for problem in problems:
        print(f"fatbench: {problem}", file=sys.stderr)
    if removed_files:
        print(f"fatbench: removed from {output}, of an earlier call: {', '.join(removed_files)}", file=sys.stderr)
    for file in written_files:
        print(file)
    return any(suite_part.counts.get("running") for suite_part in suite_parts)
