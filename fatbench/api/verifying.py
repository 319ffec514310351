"""Runs a sample of exported cells again and compares the numbers: what `fatbench verify` does."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fatbench import settings
from fatbench.errors import FatbenchError, NothingMatched, SpecError
from fatbench.report.numbers import stored
from fatbench.report.numbers.doubts import NOT_LEARNED
from fatbench.runner.run_options import RunOptions
from fatbench.store import inputs
from fatbench.store.opening import opened
from fatbench.store.replicates import SIGN
from fatbench.store.schema import NUMBERS
from fatbench.store.selection import WORDS
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import asked, weights
from fatbench.suite.cells import Cell, Evaluation, Plan

if TYPE_CHECKING:
    from fatbench.report.agreement import Agreement, NumberPair
    from fatbench.runner.jobs import Job
    from fatbench.runner.start import Observer

SECONDS = 3600.0  # that the cells which `choose` draws may take together
DRAWN = 10  # times the sample: cells that are looked at, some of which take too long
MEASURED = 10.0  # seconds in which a machine that has run nothing comparable is measured
Watching = Callable[[str], AbstractContextManager["Observer"]]  # what is run in words -> what sees its progress


def run_again(
    their_store: Store,
    cell_ids: Sequence[str],
    options: RunOptions,
    watch: Watching,
    path: str | None = None,
    tolerance: float | None = None,
) -> Agreement:
    """Run cells again in the empty database of the options, and compare.

    watch: a context for each run, with what sees its progress. SystemExit: one failed.
    """
    from fatbench.report import agreement

    cells_again = to_run_again(their_store, cell_ids)
    label_by_cell = {cell_again.cell: cell_again.name for cell_again in cells_again}
    jobs = {id: replace(job(their_store, id), label=label_by_cell[id]) for id in cell_ids}
    origin_jobs = [
        _without_transfers(jobs[id])
        if id in jobs
        else replace(job(their_store, id, trained_only=True), label=label_by_cell[id])
        for id in origins(their_store, cell_ids)
    ]
    _run(their_store, origin_jobs, options, path, watch)  # first: their models are needed
    _run(their_store, list(jobs.values()), options, path, watch)
    with Store.open(str(options.db)) as our_store:
        comparisons = [agreement.compared_numbers(their_store, our_store, id) for id in cell_ids]
        numbers = [number for cell_numbers, _ in comparisons for number in cell_numbers]
        pairs = [(_trained(their_store, id), _trained(our_store, id)) for id in cell_ids]
        missing_numbers = [stage_name for _, absent_stages in comparisons for stage_name in absent_stages]
        cell_numbers = agreement.overall(numbers, missing_numbers, elsewhere(pairs, numbers), tolerance)
        return replace(cell_numbers, reasons=[*_causes(their_store, our_store, cell_ids), *cell_numbers.reasons])


@dataclass(frozen=True)
class CellAgain:
    """A cell to run again: its labels, and what it took where the file is from."""

    cell: str
    name: str
    suite: str
    seconds: float  # of training and attacks; 0: not recorded
    device: str


def to_run_again(their_store: Store, cell_ids: Sequence[str]) -> list[CellAgain]:
    """These cells, after those on whose models they are attacked or with whose weights they begin."""
    all_ids = [*dict.fromkeys([*origins(their_store, cell_ids), *cell_ids])]
    seconds = _seconds(their_store, all_ids)
    device_by_cell = {id: str(_trained(their_store, id).get("device") or "") for id in all_ids}
    names = {id: name_of(id, their_store.runs([id])) for id in all_ids}
    return [CellAgain(id, *names[id], seconds[id], device_by_cell[id]) for id in all_ids]


def name_of(id: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Labels of a cell in the first suite that ran it and is here: "SFAT, seed 0", "sfat-fashion, preset cpu".

    Both are empty where there is no such suite.
    """
    for suite, preset in dict.fromkeys((str(run["suite"]), str(run["preset"])) for run in runs):
        from fatbench.suite import files  # slow: nothing else here reads a suite

        try:
            cells = files.load(suite).plan(preset, refuse=False).cells if not files.is_path(suite) else []
        except FatbenchError:
            continue
        for cell in cells:
            if cell.id == id.partition(SIGN)[0]:
                return ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"]), f"{suite}, preset {preset}"
    return "", ""


def _seconds(store: Store, cells: Sequence[str]) -> dict[str, float]:
    """The seconds that training and attacks of each cell took; 0: not recorded."""
    seconds = dict.fromkeys(cells, 0.0)
    for number in stored.numbers_of(cells, store, (NUMBERS.c.metric == "seconds") & stored.OVERALL):
        seconds[number.cell] += number.value
    return seconds


def _causes(their_store: Store, our_store: Store, cell_ids: Sequence[str]) -> list[str]:
    """In what the cells were answered by something else there than here: why numbers differ, and no agreement."""
    inputs_there, inputs_here = (inputs.stored_inputs(store.database, cell_ids) for store in (their_store, our_store))
    reasons = (
        (cell, reason)
        for (cell, stage), answered in inputs_there.items()
        if (cell, stage) in inputs_here
        for reason in answered.decisive(inputs_here[cell, stage])
        # two trainings have two models, which the numbers compare
        if reason.code not in ("model", "origin")
    )
    return list(dict.fromkeys(f"cell {cell} there is of {reason.words}" for cell, reason in reasons))


def _without_transfers(job: Job) -> Job:
    """The job without the attacks that are computed on models of other cells."""
    return replace(
        job,
        evaluations=[
            evaluation for evaluation in job.evaluations if evaluation.origin is None or not evaluation.origin.cell
        ],
    )


def origins(store: Store, cells: Sequence[str]) -> list[str]:
    """The cells with whose models these begin, or on whose models they are attacked; the first ones first.

    SpecError: one with whose weights a cell begins is not in the file.
    """
    evaluations = [one for id in cells for one in _evaluations(store, id)]
    attacking = [one.origin.cell for one in evaluations if one.origin is not None]
    ordered_cells: dict[str, None] = {}
    for id in [*cells, *sorted(filter(None, attacking))]:
        ordered_cells |= dict.fromkeys(_trained_before(store, id))
        ordered_cells |= dict.fromkeys([id] if id in attacking else [])
    return list(ordered_cells)


def _trained_before(store: Store, cell: str) -> list[str]:
    """The cells that have to be trained before a cell, the first ones first. SpecError: one is not in the file."""
    origin = weights.trained_by(store.cells([cell])[cell])
    if origin is None:
        return []
    if origin not in store.cells([origin]):
        raise SpecError(f"cell {cell} begins with the weights of cell {origin}, which is not in the file")
    return [*_trained_before(store, origin), origin]


def _run(their_store: Store, jobs: Sequence[Job], options: RunOptions, path: str | None, watching: Watching) -> None:
    """Run cells as they were run there, or as the options say. SystemExit: one failed."""
    from fatbench.runner import start

    jobs_by_settings: dict[tuple[str | None, str | None, str], list[Job]] = {}
    for rerun_job in jobs:
        earlier_run = _trained(their_store, rerun_job.cell)
        runs = [run for run in their_store.runs([rerun_job.cell]) if run["stage"] != "train"]
        attack_precision = next((run["precision"] for run in runs), None)
        trained, way = earlier_run.get("precision"), path or str(earlier_run.get("path") or "loop")
        way = "loop" if path is None and way in settings.FORMER_PATHS else way  # files keep paths that are gone
        asked_precision = None if options.precision == "auto" else options.precision
        key = asked_precision or trained, asked_precision or attack_precision, way
        jobs_by_settings.setdefault(key, []).append(rerun_job)
    # one run for each precision and path, as they hold for all of its cells
    for (bits, attacks, way), same_jobs in jobs_by_settings.items():
        with watching(f"again: {bits}, path {way}") as watch:
            start.run(same_jobs, watch, replace(options, precision=bits, attack_precision=attacks, path=way))


def _trained(store: Store, cell: str) -> Mapping[str, Any]:
    """The first training run of a cell of which anything is left; empty: there is none."""
    return next((run for run in store.runs([cell]) if run["stage"] == "train" and not run.get("dropped")), {})


MACHINE = ("device", "cpu", "precision", "path", "threads", "not_reproducible")


def elsewhere(
    runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], numbers: Sequence[NumberPair] = ()
) -> str | None:
    """In what runs here are not those of the file (there, here); None: in nothing, so the bytes should be the same."""
    for their_run, our_run in runs:
        both = ({**run, "torch": (run.get("versions") or {}).get("torch")} for run in (their_run, our_run))
        run_there, run_here = both
        for key in (*MACHINE, "torch"):
            if run_there.get(key) != run_here.get(key):
                return f"{key}: {_value_text(run_there.get(key))} there, {_value_text(run_here.get(key))} here"
        if run_here.get("not_reproducible"):
            return f"not reproducible: {run_here['not_reproducible']}"
    for number in numbers:
        if number.precisions[0] != number.precisions[1]:
            return f"precision of {number.metric}: {number.precisions[0]} there, {number.precisions[1]} here"
    return None


def _value_text(value: Any) -> str:
    known = " ".join(map(str, value.values())) if isinstance(value, dict) else str(value)
    return "not recorded" if value is None else known


def candidates(store: Store) -> list[str]:
    """The cells that are worth running again: trained, of methods that a suite compares, and not at chance.

    Where no suite here compares any of them, or all are at chance, that asks for nothing. NothingMatched: none is
    trained.
    """
    all_specs = {id: spec for id, spec in store.cells().items() if SIGN not in id}
    specs = {id: spec for id, spec in all_specs.items() if "evaluated" not in spec}
    stages = store.stages()
    trained = sorted(id for id in specs if (row := stages.get((id, "train"))) is not None and row.status == "done")
    if not trained and len(all_specs) > len(specs):
        raise NothingMatched(
            "these models were trained elsewhere and their files are not included: cannot verify;"
            " fatbench site FILE ... shows them beside other results"
        )
    if not trained:
        raise NothingMatched("no cell of these results finished its training: there is nothing to verify")
    compared = _compared(store)
    trained = [id for id in trained if id in compared] or trained
    at_chance_cells = at_chance(store, trained)  # any training gives the same numbers: they verify nothing
    return [id for id in trained if id not in at_chance_cells] or trained


def _compared(store: Store) -> set[str]:
    """The cells of the methods that the suites of these results compare, as far as these are here."""
    from fatbench.runner import progress
    from fatbench.suite import files

    compared: set[str] = set()
    for name, preset in progress.by_suite(store):
        try:
            suite = None if files.is_path(name) else files.load(name)
            cells = [] if suite is None else suite.plan(preset, refuse=False).cells
        except FatbenchError:
            continue
        contrasts = [one for tests in suite.tests for one in tests.contrasts.values()] if suite is not None else []
        sides = {(contrast.axis, label) for contrast in contrasts for label, _ in contrast.weights}
        compared |= {cell.id for cell in cells if not sides.isdisjoint(cell.key.items())}
    return compared


Estimate = Callable[["Job"], float | None]  # of a cell: seconds; None: not known


def estimate_here(cells: Sequence[Job]) -> Estimate:
    """What this machine needs for each of these cells, from what has run here, else from a measurement."""
    from fatbench.runner import calibrate
    from fatbench.store import timing
    from fatbench.suite import duration

    def cell_of(one: Job) -> Cell:
        return Cell(one.cell, {}, one.spec, tuple(one.evaluations))

    def seconds(one: Job) -> float | None:
        models = [(evaluation, float(len(one.checkpoints))) for evaluation in one.evaluations]
        found = duration.estimate([cell_of(one)], speeds, lambda cell: (1.0, models))
        return None if found.unknown else found.seconds

    with opened(None) as own:
        timed = [] if own is None else timing.timed_runs(own)
    speeds = duration.speeds(timed)
    if not_known := [cell_of(one) for one in cells if seconds(one) is None]:
        plan = Plan("verify", "verify", "", not_known, ["last"])
        with contextlib.suppress(FatbenchError):  # its data are not here: the run will say so
            timed = [*timed, *calibrate.measure_speeds(plan, speeds, settings.data_folder(), MEASURED)]
        speeds = duration.speeds(timed)
    return seconds


def choose(
    store: Store, sample: int, seed: int, estimates: Callable[[Sequence[Job]], Estimate] | None = None
) -> tuple[list[str], str]:
    """(cells to run again, how they were chosen): drawn from `candidates`, as many as fit into SECONDS together.

    What the file says of times plays no part: its author could make chosen cells look cheap.
    """
    pool = candidates(store)
    drawn = random.Random(seed).sample(pool, min(len(pool), DRAWN * sample))
    jobs = {id: job(store, id) for id in drawn}
    seconds_here = (estimates or estimate_here)([*jobs.values()])
    chosen: list[str] = []
    total, shortest = 0.0, (float("inf"), "")
    for id in drawn:
        if len(chosen) == sample:
            break
        if (length := seconds_here(jobs[id])) is None:
            continue
        if total + length <= SECONDS:
            chosen.append(id)
            total += length
        shortest = min(shortest, (length, id))
    limit = f"at most {SECONDS / 60:.0f} min by this machine's estimate"
    if chosen:
        time = f"{total / 60:.1f} min here of {limit}"
    elif shortest[1]:
        chosen, time = [shortest[1]], f"none takes {limit}: the shortest, {shortest[0] / 60:.0f} min"
    else:
        chosen, time = drawn[:1], "nothing comparable has run here, so no time is known: a single one"
    return chosen, f"{len(chosen)} of {len(pool)} cells, drawn by seed {seed}; {time}"


def at_chance(store: Store, cells: Sequence[str]) -> set[str]:
    """Those of these cells of which a model is at chance."""
    doubts_by_stage = stored.doubts_of(list(cells), store)
    doubted = [(cell, doubt.code) for (cell, _), doubts in doubts_by_stage.items() for doubt in doubts]
    return {cell for cell, code in doubted if code in NOT_LEARNED}


def job(store: Store, cell: str, trained_only: bool = False) -> Job:
    """What made a cell's results, from the results alone: evaluations with their attacks, and their checkpoints.

    trained_only: without its evaluations.

    SpecError: the cell is not trained to the end, or a finished evaluation has no numbers or no outcomes.
    """
    from fatbench.runner.jobs import Job
    from fatbench.suite.cells import canonical

    rows = {stage: row for (_, stage), row in store.stages([cell]).items()}
    if "train" not in rows or rows["train"].status != "done":
        raise SpecError(f"cell {cell} is not trained to the end: there is nothing to verify")
    spec = canonical(store.cells([cell])[cell])  # with the settings that the program has learned since
    evaluations = [] if trained_only else _evaluations(store, cell)
    attacked_rounds = {parsed(stage).round for stage in rows if stage != "train"}
    record = rows["train"].record
    checkpoints = [name for name in WORDS if name in record and int(record[name]["round"]) in attacked_rounds]
    run = _trained(store, cell)
    suite, preset = str(run.get("suite") or "verify"), str(run.get("preset") or "verify")
    return Job(cell, spec, evaluations, checkpoints, suite, preset)


def _evaluations(store: Store, cell: str) -> list[Evaluation]:
    """The finished evaluations of a cell that can be run again; what is not among them, `agreement.compared_numbers`
    names.

    SpecError: a finished evaluation has no numbers or no outcomes.
    """
    sizes = {stage: n for (_, stage), (_, n) in stored.accuracies([cell], store).items()}
    evaluations_by_id: dict[str, Evaluation] = {}
    for (_, stage), row in store.stages([cell]).items():
        if stage == "train" or row.status != "done" or row.settings is None:
            continue
        chunks = store.outcomes(cell, stage)
        if not chunks or stage not in sizes:
            missing_kind = "outcomes" if stage in sizes else "numbers"
            raise SpecError(f"cell {cell} {stage} is finished but has no {missing_kind}: it cannot be verified")
        requested = row.record.get("requested")  # unknown in files of before 28 November 2026
        planned = None if requested is None else asked.evaluation(stage, row.settings, requested)
        if planned is None:
            continue
        if planned.origin is not None and planned.origin.cell:
            spec = store.cells([planned.origin.cell]).get(planned.origin.cell)
            if spec is None:  # its model cannot be trained again
                continue
            planned = replace(planned, origin=replace(planned.origin, spec=spec))
        evaluations_by_id[planned.id] = planned
    return list(evaluations_by_id.values())
