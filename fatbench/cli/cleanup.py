"""`fatbench delete` and `fatbench clean`: cells taken out, files that no cell needs."""

from __future__ import annotations

from typing import Annotated

import typer

from fatbench.cli import completing
from fatbench.cli.common import cell_in, plan_in
from fatbench.cli.options import Db, Preset, Seeds, Smoke, Where
from fatbench.errors import NothingMatched, SpecError
from fatbench.store.opening import opened


def delete(
    cells: Annotated[
        list[str] | None, typer.Argument(help="Cell ids, or their first letters.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="Cells of this suite, which --preset, -k and --seeds choose.",
            autocompletion=completing.suites,
        ),
    ] = None,
    preset: Preset = None,
    smoke: Smoke = False,
    where: Where = None,
    seeds: Seeds = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Only list what would be deleted.")] = False,
    db: Db = None,
) -> None:
    """Delete cells: numbers, outcomes, runs, replicates, checkpoints and logs. This cannot be undone.

    Other suites that have the same cells lose them too.

    Example: fatbench delete --suite my_rule.yaml --smoke -k method=my_rule -n
    """
    from fatbench import settings
    from fatbench.store import cleanup
    from fatbench.store.folder import belongs
    from fatbench.store.rows import counted_text

    if not cells and name is None:
        raise SpecError("name cells, or a suite: --suite NAME, with -k to choose some of its cells")
    if name is None and (preset or smoke or where or seeds):
        raise SpecError("--preset, --smoke, -k and --seeds choose cells of a suite: name it with --suite")
    with opened(db) as store:
        if too_short := [id for id in cells or () if len(id) < 4]:
            raise SpecError(f"'{too_short[0]}': give at least the first 4 letters of a cell's id")
        labels = dict.fromkeys((cell_in(store, id) for id in cells or ()), "")
        if name is not None:
            plan = plan_in(name, preset, smoke, seeds, where, store)[1]
            stored_ids = set() if store is None else {*store.cells([cell.id for cell in plan.cells])}
            for cell in plan.cells:
                if cell.id in stored_ids:
                    labels[cell.id] = ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"])
            if not labels:
                raise NothingMatched(f"the database has no such cell of '{plan.suite}', preset {plan.preset}")
        if dry_run:
            print(*(f"{id}  {label}".rstrip() for id, label in labels.items()), sep="\n")
            print(f"{len(labels)} cell{'s' * (len(labels) != 1)} would be deleted")
            return
        assert store is not None
        folder = settings.files_folder(settings.database(db))
        is_our_folder = belongs(store, folder)
        for id in labels:
            counts = cleanup.delete_cell(store, id)
            for path in [folder / id, *folder.glob(f"{id}~*")] if is_our_folder else []:
                cleanup.remove(path)
            print(f"{id}: {counted_text(counts)} deleted", flush=True)


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
