"""What a site shows: every preset that has been run of some suites, or of a whole database."""

from __future__ import annotations

from collections.abc import Sequence

from fatbench import report
from fatbench.api.views import planned_suite, to_read
from fatbench.errors import FatbenchError, SpecError
from fatbench.report.site.pages import Part
from fatbench.runner import progress
from fatbench.store.selection import Checkpoint
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.folders import own_files


def suite_parts_of(store: Store, suites: Sequence[str], select: Checkpoint) -> tuple[list[Part], list[str]]:
    """Every preset of the suites that has been run, with its tables; and what cannot be shown, in words.

    suites: names or files; none: all of the database. SpecError: one that is named cannot be read.
    """
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
                raise SpecError("a suite's name is not a path")
            base = files.split_settings(name)[0]
            suite_name = own_files_by_name[base] + name.removeprefix(base) if base in own_files_by_name else name
            suite, plan = planned_suite(suite_name, preset, None, None, store)
            plans = [plan] + [
                planned_suite(suite_name, other_preset, None, None, store)[1]
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
            plan = to_read(suite, asked_for, store)
            grids = report.build_tables(suite, plan, store, select=select)
            shown_cells = {cell.id for cell in asked_for.unique()}  # and not the networks that they begin with
            rows = [row for row in progress.cells_of(asked_for, store) if row.cell.id in shown_cells]
            measured_cells = frozenset(row.cell.id for row in rows if row.stages_done > (row.stages > 1))
            counts = {"measured": len(measured_cells), **progress.count(rows)}
            if grids:
                suite_parts.append(Part(suite, plan, grids, counts, measured_cells))
    return suite_parts, problems
