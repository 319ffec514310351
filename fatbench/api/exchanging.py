"""Results between machines: files of results, whole databases, and cells that are half done."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pandas

from fatbench import settings
from fatbench.api.asking import Plugins, Seeds, Where, names, plugged, seed_list
from fatbench.api.views import existing_store, planned_suite, with_results
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import Db, listed_databases, opened
from fatbench.store.stages import Store
from fatbench.suite import external_models, files
from fatbench.suite.asked import contradiction, identity
from fatbench.suite.cells import Plan
from fatbench.suite.files import Suite

if TYPE_CHECKING:
    from fatbench.runner.unfinished import Collected
    from fatbench.store.tar import Parts


def import_results(*files: str | Path, db: str | Path | None = None) -> pandas.DataFrame:
    """Import files of `export_results` into a database; a row for each file counts its cells and what was new.

    All files are checked first; importing a file twice changes nothing. ExchangeError: a file is not an export, is
    damaged, or contradicts the database.
    """
    summaries, *_ = take_in([Path(file) for file in files], None if db is None else str(db), None)
    return pandas.DataFrame(summaries).set_index("file")


def export_results(
    path: str | Path | TextIO,
    *,
    suite: str | Path | Suite | None = None,
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    cells: Sequence[str] | None = None,
    without: str | Sequence[str] = (),
    unfinished: bool = False,
    plugins: Plugins = (),
    db: Db = None,
) -> int:
    """Write results as JSON lines, which `results(db=path)` reads and others import; returns the number of cells.

    path: a name that ends in .gz or .xz is compressed. suite, preset, seeds, where: only these cells; or cells: their
    ids. without: metrics whose numbers for single clients are left out. unfinished: a tar of the cells that are half
    done, with what they go on from; without suite, of all suites. NothingMatched: there are no such cells.
    """
    from fatbench.store import jsonl

    if unfinished:
        if not isinstance(path, str | Path):
            raise SpecError("unfinished: a tar is written to a file, not to a stream of text")
        if names(without):
            raise SpecError("without: a cell goes on from all of its numbers")
        with half_done(suite, preset, seeds, where, cells, plugins=plugins, db=db) as found:
            found.write(Path(path))
            return len(found.cells)
    with plugged(plugins, db), opened(db) as store:
        plan = None
        if suite is not None:  # before the database: a misspelt name is said first
            plan = planned_suite(suite, preset, seed_list(seeds), where, store)[1]
        store = existing_store(store, db)
        cells = cells if plan is None else [cell.id for cell in plan.to_run()]
        if plan is not None and not store.known_cells(cells or ()):
            raise NothingMatched(f"the database has no cell of '{plan.suite}', preset {plan.preset}")
        return jsonl.export(store, path, cells, names(without))


# --- shared with the commands -------------------------------------------------------------------------------------


@contextmanager
def half_done(
    suites: str | Path | Suite | Sequence[str] | None = None,
    preset: str | None = None,
    seeds: Seeds = None,
    where: Where = None,
    cells: Sequence[str] | None = None,
    *,
    plugins: Plugins = (),
    db: Db = None,
) -> Iterator[Collected]:
    """The cells that are half done, which `write` makes a tar of; arguments as of `export_results`.

    NothingMatched: there are none.
    """
    from fatbench.runner import unfinished

    with plugged(plugins, db), opened(db) as opened_store:
        store = existing_store(opened_store, db)
        listed = [suites] if isinstance(suites, str | Path | Suite) else list(suites or ())
        plans = (
            [planned_suite(one, preset, seed_list(seeds), where, store)[1] for one in listed]
            if listed
            else _plans(store)
        )
        folder = settings.files_folder(settings.database(next(iter(listed_databases(db)), None)))
        with unfinished.collected(store, folder, plans, cells) as found:
            yield found


def _plans(store: Store) -> Iterator[Plan]:
    """What every suite that has been run asks for, in each preset that has been."""
    from fatbench.runner import progress

    for name in with_results(store):
        if name != external_models.SUITE:
            suite = files.load(name)
            for preset in progress.presets_run(suite, store):
                yield planned_suite(suite, preset, None, None, store)[1]


def take_in(
    sources: Sequence[Path], db: str | None, problems: list[str] | None
) -> tuple[list[dict[str, Any]], Any, list[str]]:
    """Import files after checking them all; counts for each, and the differences of cells with unequal repetitions.

    Last, a sentence on each preset whose cells have other labels in our suite than in a file.

    problems: collects the reasons for invalid lines, which are then left out; None: an invalid line is an error.
    """
    from fatbench.report.numbers import sql_tables
    from fatbench.runner import cell_labels
    from fatbench.store import inputs, jsonl, old_databases, tar

    if databases := [source for source in sources if old_databases.is_database(source)]:
        if len(sources) > 1:
            raise SpecError(f"{databases[0]} is a database: import it by itself")
        return [_take_over(databases[0], settings.database(db))], {}, []
    tars = {source for source in sources if tar.is_tar(source)}
    url = settings.database(db)
    summaries, cells = list[dict[str, Any]](), set[str]()
    with tempfile.TemporaryFile() as documents:
        with opened(db, create=True) as store:
            checked: list[Any] = [
                tar.read(source, identity, contradiction)
                if source in tars
                else jsonl.check(
                    store, source, identify=identity, contradiction=contradiction, problems=problems, target=documents
                )
                for source in sources
            ]
        documents.seek(0)
        with _with_folder(url) if tars else Store.open(url, create=True) as store:
            for file, lines in zip(sources, checked, strict=True):
                cells |= set(lines.cells)
                if file in tars:
                    summaries.append(_take_in_tar(store, settings.files_folder(url), lines))
                    continue
                summary = jsonl.take(store, lines, documents)
                summaries.append({"file": str(file), **summary, "invalid lines": len(lines.bad)})
            for plan in cell_labels.of_unlabelled(store):
                store.store_points(cell_labels.points_of(plan))
            relabelled = cell_labels.mark_shipped(store, cells)
            sql_tables.judge(store, sorted(cells))
            several = any(summary.get("new replicates") for summary in summaries)
            return summaries, inputs.differing_replicates(store.database) if several else {}, relabelled


def _with_folder(url: str) -> Any:
    """The database with the folder of its checkpoints."""
    from fatbench.store import folder

    return folder.opened(url, settings.files_folder(url), _say)


def _say(text: str) -> None:
    print(f"fatbench: {text}", file=sys.stderr)


def _take_in_tar(store: Store, folder: Path, parts: Parts) -> dict[str, Any]:
    """Take in half-done cells, and say which stay as they are and where the rest cannot have the same bytes."""
    from fatbench.runner import unfinished

    taken = unfinished.take_in(store, folder, parts)
    for cell, reason in taken.left.items():
        _say(f"{cell} stays as it is: {reason}")
    for words, ids in unfinished.differences(parts, taken.cells).items():
        more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
        _say(f"{', '.join(ids[:3])}{more}: trained so far {words}; what follows may differ in last digits")
    return {
        "file": str(parts.file), "cells": len(parts.cells), "cells to go on with": len(taken.cells),
        "cells joined": len(taken.joined), "cells left": len(taken.left), "new numbers": taken.numbers,
        "invalid lines": 0,
    }  # fmt: skip


def _take_over(file: Path, url: str) -> dict[str, Any]:
    """Make a new database of an older one, with its models; counts of what it holds. SpecError: `url` is not new."""
    from fatbench.store import folder, integrity, old_databases

    if "://" in url and not url.startswith("sqlite"):
        raise SpecError(f"{settings.shown_url(url)}: a database is taken over into a new file (--db NEW.db)")
    target = Path(url.removeprefix("sqlite:///"))
    old_files, new_files = settings.files_folder(str(file)), settings.files_folder(url)
    shares_files = old_files.resolve() == new_files.resolve()
    if not shares_files and new_files.is_dir() and any(new_files.iterdir()):
        raise SpecError(f"{new_files} is not empty: models of {file} are copied to a new folder")
    old_databases.take_over(file, target, keep_identity=shares_files)
    counts = integrity.counts(url, contents=False)
    linked = 0
    if not shares_files and old_files.is_dir():
        linked = old_databases.link_files(old_files, new_files)
        with Store.open(url) as store:
            folder.claim(store, new_files)
    numbers = {"new numbers": counts["numbers"], "files of models": linked}
    return {"file": str(file), "cells": counts["cells"], **numbers, "invalid lines": 0}
