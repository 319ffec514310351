"""Choose the run of a cell that is read where a database has several, whatever the order of import.

    plan = shown_plan(plan, store)   the plan, its cells' ids those of the runs that tables, figures and tests read

Of the runs of a cell that is taken which is trained; then one that the data and plug-ins of now have answered, as far
as that is known (`fatbench.store.inputs`); then in the precision of most cells of the plan; then with most of
the evaluations that the plan asks for; then the newest. Numbers of one cell never come from two runs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sqlalchemy import select as sql

from fatbench.errors import SpecError, did_you_mean
from fatbench.settings import PRECISIONS
from fatbench.store import inputs, replicates
from fatbench.store.inputs import Inputs, Reason
from fatbench.store.rows import fetch
from fatbench.store.schema import RUNS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins, signatures
from fatbench.suite.cells import Plan
from fatbench.suite.facts import data_keys
from fatbench.suite.filters import RUN_KEYS

if TYPE_CHECKING:
    from fatbench.store.stages import Store


RULE = (
    "shown is the one that data and plug-ins of now have answered, then the one in the precision of most cells, then"
    " with most evaluations, then the newest (-k run.precision=...)"
)


@dataclass
class _Run:
    """One run of a cell: all its stages."""

    trained: bool = False
    made_by: list[tuple[str, str, str]] = field(default_factory=list)  # of each stage: precision, device, commit
    evaluations: set[str] = field(default_factory=set)  # those that are done
    current: bool = True  # the data and plug-ins of now have answered it, as far as that is known
    newest: tuple[str, str] = ("", "")  # when its last stage ended, and the name of that on every machine


def shown_plan(plan: Plan, store: Store, run_filter: str = "", whole_plan: Callable[[], Plan] | None = None) -> Plan:
    """Replace the ids of a plan's cells by those of the runs to read; a resolved plan stays as it is.

    run_filter: as for `chosen_runs`. whole_plan: the plan without a filter, so that a filter never changes the choice.
    """
    if plan.resolved:
        return plan
    ids: dict[str, str] = {}
    if run_filter or replicates.by_cell(store.database, [cell.id for cell in plan.unique()]):
        cells = (plan if whole_plan is None else whole_plan()).unique()
        ids = chosen_runs(
            store,
            {cell.id: [evaluation.id for evaluation in cell.evaluations] for cell in [*cells, *plan.unique()]},
            run_filter,
        )
    cells = [replace(cell, id=ids.get(cell.id, cell.id)) for cell in plan.cells]
    return replace(plan, cells=cells, resolved=True)


def chosen_runs(
    store: Store, evaluations_by_cell: Mapping[str, Collection[str]], run_filter: str = ""
) -> dict[str, str]:
    """Cell -> the id of the run to read, where that is not the id of the cell.

    evaluations_by_cell: cell -> the evaluations that are asked for. run_filter: such as "precision=fp32"; a cell
    without such a run is not read. SpecError: an unknown filter.
    """
    position_and_value = _filter(run_filter)
    replicate_ids = replicates.by_cell(store.database, evaluations_by_cell)
    if not replicate_ids and not position_and_value:
        return {}
    ids = {cell: replicate_ids.get(cell, [cell]) for cell in evaluations_by_cell}
    runs = _runs(store, [id for run_ids in ids.values() for id in run_ids])
    precisions = Counter(
        precision
        for run_ids in ids.values()
        for precision in {origin[0] for id in run_ids for origin in runs[id].made_by}
    )
    usual_precision = min(precisions, key=lambda precision: (-precisions[precision], _rank(precision)), default="")

    # compared from left to right, the largest is read
    def rank(cell: str, id: str) -> tuple[bool, bool, float, int, tuple[str, str]]:
        run = runs[id]
        matching = sum(precision == usual_precision for precision, _, _ in run.made_by) / max(1, len(run.made_by))
        return run.trained, run.current, matching, len(run.evaluations & {*evaluations_by_cell[cell]}), run.newest

    run_by_cell = {}
    for cell, run_ids in ids.items():
        matching = [id for id in run_ids if not position_and_value or _fits(runs[id], *position_and_value)]
        # a cell without a matching run gets an id that no run has
        best = max(matching, key=lambda id: rank(cell, id)) if matching else f"{cell}{replicates.SIGN}"
        if best != cell:
            run_by_cell[cell] = best
    return run_by_cell


def note(store: Store, ids: Iterable[str]) -> str:
    """A note on the choice of runs where cells were run more than once; else empty. ids: of cells or of their runs."""
    cells = {id.partition(replicates.SIGN)[0] for id in ids}
    replicated_count = len(replicates.by_cell(store.database, cells))
    if not replicated_count:
        return ""
    reasons_by_run = inputs.differing_replicates(store.database, cells)
    words = dict.fromkeys(reason.beside for reasons in reasons_by_run.values() for reason in reasons)
    differing = f"; {len(reasons_by_run)} of their runs differ in {'; '.join(words)}" if reasons_by_run else ""
    return f"{replicated_count} of {len(cells)} cells were run more than once: {RULE}{differing}"


def _filter(run_filter: str) -> tuple[int, str] | None:
    """(place among RUN_KEYS, value) of "precision=fp32"; None: no filter."""
    if not run_filter:
        return None
    name, sign, value = run_filter.partition("=")
    if name not in RUN_KEYS or not sign or not value:
        raise SpecError(
            f"runs: expected {', '.join(f'{filter_name}=...' for filter_name in RUN_KEYS)}, got "
            f"'{run_filter}'{did_you_mean(name, RUN_KEYS)}"
        )
    return RUN_KEYS.index(name), value


def _fits(run: _Run, position: int, value: str) -> bool:
    return bool(run.made_by) and all(origin[position].startswith(value) for origin in run.made_by)


def _rank(precision: str) -> int:
    return PRECISIONS.index(precision) if precision in PRECISIONS else len(PRECISIONS)


def _runs(store: Store, ids: Collection[str]) -> dict[str, _Run]:
    run_by_id = {id: _Run() for id in ids}
    columns = (RUNS.c.cell, RUNS.c.stage, RUNS.c.precision, RUNS.c.device, RUNS.c.commit, RUNS.c.ended, RUNS.c.uid)
    done_query = sql(STAGES.c.cell, STAGES.c.stage).where(STAGES.c.status == "done")
    with store.database.reading() as connection:
        for cell, stage in fetch(connection, done_query, STAGES.c.cell, ids):
            run_by_id[cell].trained |= stage == "train"
            run_by_id[cell].evaluations.add(parsed(stage).evaluation)
        for cell, _, precision, device, commit, end_time, uid in fetch(connection, sql(*columns), RUNS.c.cell, ids):
            run_by_id[cell].made_by.append((precision or "", device or "", commit or ""))
            run_by_id[cell].newest = max(run_by_id[cell].newest, (end_time or "", uid))
    for cell, _ in changed_since(store, ids, inputs.stored_inputs(store.database, ids)):
        run_by_id[cell].current = False
    return run_by_id


def changed_since(
    store: Store, cells: Collection[str], answered: Mapping[tuple[str, str], Inputs]
) -> dict[tuple[str, str], list[Reason]]:
    """(cell, stage) -> the inputs that are known to be others now than when its numbers were computed.

    answered: those of the stages of these cells, see `inputs.stored_inputs`. Digests that were taken already are
    compared, and those of files that a loaded plug-in has read: no image is hashed. What this machine cannot know is
    unknown, and no change. The evaluations of a model whose training has changed have changed, too.
    """
    fingerprints, models = store.seen_data(), inputs.last_models(store.database, answered.values())
    if not (fingerprints or models or signatures.plugins()):
        return {}
    origins = {subject.removeprefix("cell ") for subject in models}
    of_all = {**inputs.stored_inputs(store.database, origins), **answered}
    specs = store.cells(sorted({*cells, *origins}))
    data_of = functools.cache(lambda cell: inputs.of_data(data_keys(specs[cell]), fingerprints))
    today = {key: (data_of(key[0]), plugins.now(known["functions"], known["read"])) for key, known in of_all.items()}
    found = inputs.changed(of_all, today, models)
    changed = {key: reasons for key, reasons in found.items() if key in answered}
    for cell, stage in answered:
        if stage != "train" and (cell, "train") in changed:
            changed[cell, stage] = list(dict.fromkeys([*changed[cell, "train"], *changed.get((cell, stage), ())]))
    return changed
