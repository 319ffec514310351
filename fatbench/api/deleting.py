"""Which cells of a suite `fatbench delete` takes, so that no other suite loses its own by mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from sqlalchemy import select

from fatbench import settings
from fatbench.api.views import planned_suite
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.store.rows import fetch
from fatbench.store.schema import SUITE_CELLS
from fatbench.store.stages import Store
from fatbench.suite import external_models
from fatbench.suite.filters import Where


def chosen_cells(
    name: str, preset: str | None, where: Where, store: Store | None, *, demand_choice: bool
) -> dict[str, str]:
    """Stored cells that are chosen of a suite -> their labels. NothingMatched: there is none.

    SpecError: no preset is named, and there are such cells of several, or of another suite; or nothing is chosen,
    though it must be.
    """
    suite, plan = planned_suite(name, preset, None, where, store)
    plans = [plan]
    is_named = preset is not None
    if not is_named and store is not None and plan.suite != external_models.SUITE:
        for other_preset in [known_preset for known_preset in suite.presets() if known_preset != plan.preset]:
            # a filter may name what only one preset has
            with contextlib.suppress(FatbenchError):
                plans.append(planned_suite(name, other_preset, None, where, store)[1])
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
        place = settings.shown_url(settings.database())
        raise NothingMatched(f"no cells of {plan.suite} (preset {plan.preset}) in {place}")
    if len(chosen) > 1:
        counts = ", ".join(f"{known_preset} ({len(labels)})" for known_preset, labels in chosen.values())
        raise SpecError(f"the database has cells of '{plan.suite}' in the presets {counts}: name one, --preset NAME")
    ((known_preset, labels),) = chosen.values()
    assert store is not None
    if not is_named and (other_suites := _other_suites(labels, plan.suite, store)):
        raise SpecError(
            f"these cells also belong to {', '.join(other_suites)}: choose others with -k, or say"
            f" --preset {known_preset}"
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
