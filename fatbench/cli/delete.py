"""`fatbench delete`: cells taken out, files that no cell needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from fatbench import settings
from fatbench.cli.options import DryRun, Option, Preset, Things, Where
from fatbench.cli.shared import cell_in, demand_consent, is_suite
from fatbench.errors import MachineError, NothingMatched, SpecError
from fatbench.store.opening import may_be_cell, opened

if TYPE_CHECKING:
    from fatbench.store.stages import Store


def _is_suite(target: str, store: Store | None) -> bool:
    """Whether a target is a suite, and not the beginning of a cell's id. SpecError: it is both."""
    if not is_suite(target):
        return False
    # "fade" may be both: deleting the wrong one could not be undone
    if may_be_cell(target) and store is not None and store.ids_beginning_with(target):
        raise SpecError(f"'{target}' is both a suite and a cell; use {target}.yaml or more letters of the id")
    return True


def delete(
    targets: Things = None,
    preset: Preset = None,
    where: Where = None,
    unused: Annotated[
        bool, Option("--unused", help="Files that no cell needs, such as those of deleted cells.")
    ] = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, Option("-y", "--yes", help="Do not ask on a terminal.")] = False,
) -> None:
    """Delete cells with all they stored, or files that no cell needs.

    Numbers, outcomes, runs, replicates, checkpoints and logs go, for other suites with the same cells, too. This cannot
    be undone; it asks on a terminal. If you may not delete all of it, nothing is deleted.

    Example: fatbench delete my_rule.yaml --smoke -k method=my_rule -n
    """
    if unused:
        if targets or preset or where:
            raise SpecError("--unused looks for files of no cell: without NAME, --preset and -k")
        _delete_unused(dry_run, yes)
        return
    from fatbench.api.deleting import chosen_cells
    from fatbench.store import cleanup
    from fatbench.store.folder import belongs, trained
    from fatbench.store.rows import counted_text

    if not targets:
        raise SpecError("name cells, or a suite and with -k some of its cells: fatbench delete NAME -k FILTER -n")
    choosing = bool(preset or where)
    with opened(None) as store:
        suite_names = [target for target in targets if _is_suite(target, store)]
        if choosing and not suite_names:
            raise SpecError("--preset and -k need a suite: fatbench delete NAME -k FILTER")
        if too_short := [id for id in targets if len(id) < 4 and id not in suite_names]:
            raise SpecError(f"'{too_short[0]}': give at least the first 4 letters of a cell's id")
        labels = dict.fromkeys((cell_in(store, id) for id in targets if id not in suite_names), "")
        for name in suite_names:
            labels |= chosen_cells(name, preset, where, store, demand_choice=not (choosing or dry_run))
        if dry_run:
            print(*(f"{id}  {label}".rstrip() for id, label in labels.items()), sep="\n")
            print(f"{len(labels)} cell{'s' * (len(labels) != 1)} would be deleted")
            return
        assert store is not None
        counts = cleanup.would_delete(store, labels)
        files = settings.files_folder(settings.database())
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


def _delete_unused(dry_run: bool, yes: bool) -> None:
    """Remove files of deleted cells, and checkpoints that no cell refers to."""
    from fatbench.store import cleanup, rights
    from fatbench.store.folder import belongs

    with opened(None) as store:
        if store is None:
            place = settings.shown_url(settings.database())
            raise NothingMatched(f"no database at {place}: cannot tell which files are unused")
        folder = settings.files_folder(settings.database())
        if folder.is_dir() and not belongs(store, folder):
            raise SpecError(f"{folder} was not created by this database")
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
