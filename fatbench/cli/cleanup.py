"""`fatbench delete` and `fatbench clean`: cells taken out, files that no cell needs."""

from __future__ import annotations

from typing import Annotated

import typer

from fatbench.cli.common import cell_in
from fatbench.cli.options import Db
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened


def delete(
    cells: Annotated[list[str], typer.Argument(help="Cell ids, or their first letters.", show_default=False)],
    db: Db = None,
) -> None:
    """Delete cells: numbers, outcomes, runs, replicates, checkpoints and logs. This cannot be undone.

    Example: fatbench delete 0301a225a8b3
    """
    from fatbench import settings
    from fatbench.store import cleanup
    from fatbench.store.folder import belongs
    from fatbench.store.rows import counted

    with opened(db) as store:
        if short := [id for id in cells if len(id) < 4]:
            raise SpecError(f"'{short[0]}': give at least the first 4 letters of a cell's id")
        chosen = list(dict.fromkeys(cell_in(store, id) for id in cells))
        assert store is not None
        folder = settings.files_folder(settings.database(db))
        ours = belongs(store, folder)
        for id in chosen:
            counts = cleanup.delete_cell(store, id)
            for path in [folder / id, *folder.glob(f"{id}~*")] if ours else []:
                cleanup.remove(path)
            print(f"{id}: {counted(counts)} deleted", flush=True)


def clean(
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only list what would be removed.")] = False,
    db: Db = None,
) -> None:
    """Remove files of deleted cells, and checkpoints that no cell refers to.

    Example: fatbench clean -n
    """
    from fatbench import settings
    from fatbench.store import cleanup
    from fatbench.store.folder import belongs

    with opened(db) as store:
        if store is None:
            raise NothingMatched("there is no database, so it is unknown which files are needed")
        folder = settings.files_folder(settings.database(db))
        if folder.is_dir() and not belongs(store, folder):
            raise SpecError(f"{folder} does not say whose files these are: no run of this database has used it")
        freed = number = 0
        for path, size in cleanup.unneeded(store, folder):
            print(path)
            if not dry_run:
                cleanup.remove(path)
            freed, number = freed + size, number + 1
    print(f"{number} {'would be ' if dry_run else ''}removed, {freed / 1e6:.1f} MB in {folder}")
