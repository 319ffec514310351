"""`fatbench delete` and `fatbench clean`: cells taken out, files that no cell needs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy import select

from fatbench.cli import completing
from fatbench.cli.common import cell_in, demand_consent, named_preset, plan_in
from fatbench.cli.options import Db, Preset, Seeds, Smoke, Where, Yes
from fatbench.errors import FatbenchError, MachineError, NothingMatched, SpecError
from fatbench.store.opening import may_be_cell, opened
from fatbench.store.rows import fetch
from fatbench.store.schema import SUITE_CELLS

if TYPE_CHECKING:
    from fatbench.store.stages import Store


def _is_suite(target: str, store: Store | None) -> bool:
    """Whether a target is a suite, and not the beginning of a cell's id. SpecError: it is both."""
    from fatbench.suite import files

    if not may_be_cell(target):
        return True
    try:
        files.locate(target)
    except SpecError:
        return False
    # "fade" may be both: deleting the wrong one could not be undone
    if store is not None and store.ids_beginning_with(target):
        raise SpecError(f"'{target}' is a suite and begins a cell's id: give its file, or more of the id")
    return True


def _cells_of(
    name: str, preset: str | None, smoke: bool, where: list[str] | None, seeds: str | None, store: Store | None,
    *, demand_choice: bool,
) -> dict[str, str]:  # fmt: skip
    """Stored cells that are chosen of a suite -> their labels. NothingMatched: there is none.

    SpecError: no preset is named, and there are such cells of several, or of another suite; or nothing is chosen,
    though it must be.
    """
    from fatbench.suite import external_models

    suite, plan = plan_in(name, preset, smoke, seeds, where, store)
    plans = [plan]
    is_named = named_preset(preset, smoke) is not None
    if not is_named and store is not None and plan.suite != external_models.SUITE:
        for other_preset in [known_preset for known_preset in suite.presets() if known_preset != plan.preset]:
            # a filter may name what only one preset has
            with contextlib.suppress(FatbenchError):
                plans.append(plan_in(name, other_preset, False, seeds, where, store)[1])
    labels_by_preset = {}
    for known_plan in plans:
        stored_ids = set() if store is None else {*store.cells([cell.id for cell in known_plan.cells])}
        labels_by_preset[known_plan.preset] = {
            cell.id: ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"])
            for cell in known_plan.cells
            if cell.id in stored_ids
        }
    # presets may share their cells: then either is meant
    chosen = {tuple(labels): (known_preset, labels) for known_preset, labels in labels_by_preset.items() if labels}
    if not chosen:
        raise NothingMatched(f"the database has no such cell of '{plan.suite}', preset {plan.preset}")
    if len(chosen) > 1:
        counts = ", ".join(f"{known_preset} ({len(labels)})" for known_preset, labels in chosen.values())
        raise SpecError(f"the database has cells of '{plan.suite}' in the presets {counts}: name one, --preset NAME")
    ((known_preset, labels),) = chosen.values()
    assert store is not None
    if not is_named and (other_suites := _other_suites(labels, plan.suite, store)):
        raise SpecError(
            f"{', '.join(other_suites)} ran cells that are among these, and would lose them too: choose others with -k,"
            f" or say --preset {known_preset}"
        )
    if demand_choice:
        raise SpecError(
            f"this would delete all {len(labels)} cells of '{plan.suite}', preset {known_preset}: choose some with -k,"
            f" or say --preset {known_preset}; -n lists them"
        )
    return labels


def _other_suites(cells: Collection[str], suite: str, store: Store) -> list[str]:
    """The suites that ran those of the cells which this suite has not run."""
    query = select(SUITE_CELLS.c.cell, SUITE_CELLS.c.suite)
    with store.database.reading() as connection:
        rows = [*fetch(connection, query, SUITE_CELLS.c.cell, cells)]
    own_cells = {row.cell for row in rows if row.suite == suite}
    return sorted({row.suite for row in rows if row.cell not in own_cells})


def delete(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CELL|NAME...",
            help="Cell ids or their first letters; or a suite, whose cells -k, --preset and --seeds choose.",
            show_default=False,
            autocompletion=completing.suites,
        ),
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only list what would be deleted.")] = False,
    yes: Yes = False,
    db: Db = None,
) -> None:
    """Delete cells: numbers, outcomes, runs, replicates, checkpoints and logs. This cannot be undone.

    Other suites that have the same cells lose them too, and whoever ran them. It asks on a terminal. If you may not
    delete all of it, nothing is deleted.

    Example: fatbench delete my_rule.yaml --smoke -k method=my_rule -n
    """
    from fatbench import settings
    from fatbench.store import cleanup
    from fatbench.store.folder import belongs, trained
    from fatbench.store.rows import counted_text

    if not targets:
        raise SpecError("name cells, or a suite and with -k some of its cells: fatbench delete NAME -k FILTER -n")
    choosing = bool(preset or smoke or where or seeds)
    with opened(db) as store:
        suite_names = [target for target in targets if _is_suite(target, store)]
        if choosing and not suite_names:
            raise SpecError("--preset, --smoke, -k and --seeds choose cells of a suite: fatbench delete NAME -k FILTER")
        if too_short := [id for id in targets if len(id) < 4 and id not in suite_names]:
            raise SpecError(f"'{too_short[0]}': give at least the first 4 letters of a cell's id")
        labels = dict.fromkeys((cell_in(store, id, db) for id in targets if id not in suite_names), "")
        for name in suite_names:
            labels |= _cells_of(name, preset, smoke, where, seeds, store, demand_choice=not (choosing or dry_run))
        if dry_run:
            print(*(f"{id}  {label}".rstrip() for id, label in labels.items()), sep="\n")
            print(f"{len(labels)} cell{'s' * (len(labels) != 1)} would be deleted")
            return
        assert store is not None
        counts = cleanup.would_delete(store, labels)
        files = settings.files_folder(settings.database(db))
        is_ours = belongs(store, files)  # files of a folder without an owner may be anybody's
        folders = {id: cleanup.folders_of(id, files) if is_ours else [] for id in labels}
        if missing := [id for id in trained(store, [*labels]) if files / id not in folders[id]]:
            listed = f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
            print(f"fatbench: {files} has no files of {listed}: models elsewhere stay there", file=sys.stderr)
        counts["folders"] = sum(map(len, folders.values()))
        demand_consent(f"Delete {counted_text(counts)} of {store.database.shown} and {files}?", yes)
        for id in labels:
            print(f"{id}: {counted_text(cleanup.delete_cell(store, id))} deleted", flush=True)
            for folder in folders[id]:
                cleanup.remove(folder)


def clean(
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only list what would be removed.")] = False,
    yes: Yes = False,
    db: Db = None,
) -> None:
    """Remove files of deleted cells, and checkpoints that no cell refers to. It asks on a terminal.

    Example: fatbench clean -n
    """
    from fatbench import settings
    from fatbench.store import cleanup, rights
    from fatbench.store.folder import belongs

    with opened(db) as store:
        if store is None:
            raise NothingMatched("there is no database, so it is unknown which files are needed")
        folder = settings.files_folder(settings.database(db))
        if folder.is_dir() and not belongs(store, folder):
            raise SpecError(f"{folder} does not say whose files these are: no run of this database has used it")
        sizes = dict(cleanup.unneeded_files(store, folder))
    kept = {path: reason for path in sizes if (reason := rights.refusal_to_remove(path))}
    removable = [path for path in sizes if path not in kept]
    print(*removable, sep="\n", end="\n" * bool(removable))
    summary = f"{len(removable)} {{}}removed, {sum(sizes[path] for path in removable) / 1e6:.1f} MB in {folder}"
    if removable and not dry_run:
        demand_consent(summary.format("files and folders will be ") + "?", yes)
        for path in removable:
            cleanup.remove(path)
    print(summary.format("would be " if dry_run else ""))
    if kept:
        raise MachineError(f"{len(kept)} you may not remove: {next(iter(kept.values()))}")
