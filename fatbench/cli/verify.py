"""`fatbench verify`: run a sample of exported cells again and compare the numbers."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import settings, whole_file
from fatbench.cli.common import cell_in, known_format, print_json
from fatbench.cli.options import DataDir, Device, Format, Precision
from fatbench.errors import NothingMatched, SpecError
from fatbench.runner.run_options import RunOptions
from fatbench.store import inputs
from fatbench.suite import weights

if TYPE_CHECKING:
    from fatbench.report.numbers.agreement import Agreement, Apart
    from fatbench.runner.jobs import Job
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Evaluation


def verify(
    file: Annotated[Path, typer.Argument(help="A file written by `fatbench export`.", show_default=False)],
    *,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Number of cells to run again.")] = 3,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Sample the cells with this seed; default: the cheapest ones.")
    ] = None,
    cell: Annotated[list[str] | None, typer.Option("--cell", help="Run this cell again; may be repeated.")] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            help="Largest difference of accuracies allowed; default: 0 on the same machine, else 0.02.",
        ),
    ] = None,
    device: Device = None,
    precision: Precision = None,
    path: Annotated[str | None, typer.Option("--path", help="As for `fatbench run`; default: as in the file.")] = None,
    data: DataDir = None,
    format: Format = "text",
) -> None:
    """Run a few cells of exported results again; exit 0 if every finished number of these cells agrees.

    Example: fatbench verify results.jsonl --sample 2
    """
    known_format(format, ("text", "json"))
    from fatbench.report.numbers import agreement, doubts
    from fatbench.store import jsonl
    from fatbench.store.stages import Store
    from fatbench.suite.asked import contradiction
    from fatbench.suite.first_images import data_keys
    from fatbench.suite.validate_import import identity

    if not whole_file.regular(file).is_file():
        raise SpecError(f"{file}: no such file (give one that 'fatbench export' wrote)")
    with tempfile.TemporaryDirectory(prefix="fatbench-") as folder, contextlib.ExitStack() as stack:
        theirs = stack.enter_context(Store.open(f"{folder}/theirs.db", create=True))
        jsonl.import_(theirs, file, identify=identity, contradiction=contradiction)
        if mixed := inputs.mixtures(theirs.database, data_keys):
            raise SpecError(f"{file}: {'; '.join(mixed[:3])}: a file whose names mean several things is not verified")
        chosen = [cell_in(theirs, id) for id in cell] if cell else choose(theirs, sample, seed)
        if brought := [id for id, spec in theirs.cells(chosen).items() if "evaluated" in spec]:
            raise SpecError(f"cell {brought[0]} is an external model: its training cannot be run again")
        options = RunOptions(device=device, precision=precision, db=f"{folder}/ours.db", data=data)
        found = again(theirs, chosen, options, path, tolerance)
        notes = dict.fromkeys(at_chance(theirs, chosen), f" ({doubts.WORDS['chance']})")
    if format == "json":
        numbers = [{**asdict(one), "agreement": one.agreement, "evaluated": one.evaluated} for one in found.numbers]
        said = {"agrees": found.agrees, "reasons": found.reasons, "unverified": found.unverified}
        tolerated = {"tolerance": found.tolerance, "because": found.because, "apart": found.far}
        print_json({"cells": chosen, **said, **tolerated, "numbers": numbers})
    else:
        print(agreement.text(found, notes))
    if not found.agrees:
        raise typer.Exit(1)


def again(
    theirs: Store, chosen: Sequence[str], options: RunOptions, path: str | None = None, tolerance: float | None = None
) -> Agreement:
    """Run cells again in the empty database of the options, and compare. SystemExit: one failed."""
    from fatbench.report.numbers import agreement
    from fatbench.store.stages import Store

    jobs = {id: job(theirs, id) for id in chosen}
    first = [_alone(jobs[id]) if id in jobs else job(theirs, id, trained_only=True) for id in origins(theirs, chosen)]
    _run(theirs, first, options, path)
    _run(theirs, list(jobs.values()), options, path)
    with Store.open(str(options.db)) as ours:
        both = [agreement.apart(theirs, ours, id) for id in chosen]
        numbers = [one for found, _ in both for one in found]
        pairs = [(_trained(theirs, id), _trained(ours, id)) for id in chosen]
        missing = [what for _, without in both for what in without]
        found = agreement.overall(numbers, missing, elsewhere(pairs, numbers), tolerance)
        return replace(found, reasons=[*_causes(theirs, ours, chosen), *found.reasons])


def _causes(theirs: Store, ours: Store, chosen: Sequence[str]) -> list[str]:
    """In what the cells were answered by something else there than here: why numbers differ, and no agreement."""
    there, here = (inputs.stored(store.database, chosen) for store in (theirs, ours))
    reasons = (
        (cell, one)
        for (cell, stage), answered in there.items()
        if (cell, stage) in here
        for one in inputs.differ(answered, here[cell, stage])
        if one.decides and one.code not in ("model", "origin")  # of two trainings
    )
    return list(dict.fromkeys(f"cell {cell} there is of {one.words}" for cell, one in reasons))


def _alone(job: Job) -> Job:
    """The job without the attacks that are computed on models of other cells."""
    return replace(job, evaluations=[one for one in job.evaluations if one.origin is None or not one.origin.cell])


def origins(store: Store, cells: Sequence[str]) -> list[str]:
    """The cells with whose models these begin, or on whose models they are attacked; the first ones first.

    SpecError: one with whose weights a cell begins is not in the file.
    """
    attacking = [one.origin.cell for id in cells for one in _evaluations(store, id) if one.origin is not None]
    found: dict[str, None] = {}
    for id in [*cells, *sorted(filter(None, attacking))]:
        found |= dict.fromkeys(_before(store, id))
        found |= dict.fromkeys([id] if id in attacking else [])
    return list(found)


def _before(store: Store, cell: str) -> list[str]:
    """The cells that have to be trained before a cell, the first ones first. SpecError: one is not in the file."""
    origin = weights.trained_by(store.cells([cell])[cell])
    if origin is None:
        return []
    if origin not in store.cells([origin]):
        raise SpecError(f"cell {cell} begins with the weights of cell {origin}, which is not in the file")
    return [*_before(store, origin), origin]


def _run(theirs: Store, jobs: Sequence[Job], options: RunOptions, path: str | None) -> None:
    """Run cells as they were run there, or as the options say. SystemExit: one failed."""
    from fatbench.cli.watch import Watch
    from fatbench.runner import start

    alike: dict[tuple[str | None, str | None, str], list[Job]] = {}
    for one in jobs:
        was = _trained(theirs, one.cell)
        attacked = next((run["precision"] for run in theirs.runs([one.cell]) if run["stage"] != "train"), None)
        trained, way = was.get("precision"), path or str(was.get("path") or "loop")
        way = "loop" if path is None and way in settings.FORMER_PATHS else way
        asked = None if options.precision == "auto" else options.precision
        alike.setdefault((asked or trained, asked or attacked, way), []).append(one)
    for (bits, attacks, way), these in alike.items():
        with Watch(f"again: {bits}, path {way}") as watch:
            start.run(these, watch, replace(options, precision=bits, attack_precision=attacks, path=way))


def _trained(store: Store, cell: str) -> Mapping[str, Any]:
    """The first training run of a cell of which anything is left; empty: there is none."""
    return next((run for run in store.runs([cell]) if run["stage"] == "train" and not run.get("dropped")), {})


MACHINE = ("device", "cpu", "precision", "path", "threads", "not_reproducible")


def elsewhere(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], numbers: Sequence[Apart] = ()) -> str | None:
    """In what runs here are not those of the file (there, here); None: in nothing, so the bytes should be the same."""
    for theirs, ours in runs:
        there, here = ({**run, "torch": (run.get("versions") or {}).get("torch")} for run in (theirs, ours))
        for key in (*MACHINE, "torch"):
            if there.get(key) != here.get(key):
                return f"{key}: {_said(there.get(key))} there, {_said(here.get(key))} here"
        if here.get("not_reproducible"):
            return f"not reproducible: {here['not_reproducible']}"
    for one in numbers:
        if one.precisions[0] != one.precisions[1]:
            return f"precision of {one.metric}: {one.precisions[0]} there, {one.precisions[1]} here"
    return None


def _said(value: Any) -> str:
    return (
        "not recorded"
        if value is None
        else " ".join(map(str, value.values()))
        if isinstance(value, dict)
        else str(value)
    )


def choose(store: Store, sample: int, seed: int | None) -> list[str]:
    """Cells whose training is done: with a seed any of them at random, without the cheapest. NothingMatched: none.

    Cells at chance come last: whatever is done to them, they stay there.
    """
    from fatbench.report.numbers import cell_rows
    from fatbench.store.replicates import SIGN
    from fatbench.store.schema import NUMBERS

    known = {id: spec for id, spec in store.cells().items() if SIGN not in id}
    specs = {id: spec for id, spec in known.items() if "evaluated" not in spec}
    stages = store.stages()
    done = sorted(id for id in specs if (row := stages.get((id, "train"))) is not None and row.status == "done")
    if not done and len(known) > len(specs):
        raise NothingMatched(
            "these are models that were trained elsewhere: without their files nobody can attack them again;"
            " fatbench site FILE ... shows them beside other results"
        )
    if not done:
        raise NothingMatched("no cell of these results finished its training: there is nothing to verify")
    below = at_chance(store, done)
    done = [id for id in done if id not in below] or done
    if seed is not None:
        return random.Random(seed).sample(done, min(sample, len(done)))
    seconds = dict.fromkeys(done, 0.0)
    for number in cell_rows.numbers_of(done, store, (NUMBERS.c.metric == "seconds") & cell_rows.OVERALL):
        seconds[number["cell"]] += number["value"]
    # a cell without recorded seconds comes after all that have them
    return sorted(done, key=lambda id: (not seconds[id], seconds[id], _work(specs[id]), id))[:sample]


def at_chance(store: Store, cells: Sequence[str]) -> set[str]:
    """Those of these cells of which a model is at chance."""
    from fatbench.report.numbers import cell_rows
    from fatbench.report.numbers.doubts import NOT_LEARNED

    why = cell_rows.doubts_of(list(cells), store)
    return {cell for (cell, _), found in why.items() for doubt in found if doubt.code in NOT_LEARNED}


def _work(spec: Mapping[str, Any]) -> float:
    """Image passes of a cell's training, to order cells by; infinite where they are not known."""
    from fatbench.suite import cost

    work = cost.training(spec)
    return float("inf") if work is None else work.image_passes


def job(store: Store, cell: str, trained_only: bool = False) -> Job:
    """What made a cell's results, from the results alone: evaluations with their attacks, and their checkpoints.

    trained_only: without its evaluations.

    SpecError: the cell is not trained to the end, or a finished evaluation has no numbers or no outcomes.
    """
    from fatbench.runner.jobs import Job
    from fatbench.store.selection import WORDS
    from fatbench.store.stage_names import parsed
    from fatbench.suite.cells import canonical

    rows = {stage: row for (_, stage), row in store.stages([cell]).items()}
    if "train" not in rows or rows["train"].status != "done":
        raise SpecError(f"cell {cell} is not trained to the end: there is nothing to verify")
    spec = canonical(store.cells([cell])[cell])  # with the settings that the program has learned since
    evaluations = [] if trained_only else _evaluations(store, cell)
    attacked = {parsed(stage).round for stage in rows if stage != "train"}
    record = rows["train"].record
    checkpoints = [name for name in WORDS if name in record and int(record[name]["round"]) in attacked]
    run = _trained(store, cell)
    suite, preset = str(run.get("suite") or "verify"), str(run.get("preset") or "verify")
    return Job(cell, spec, evaluations, checkpoints, suite, preset)


def _evaluations(store: Store, cell: str) -> list[Evaluation]:
    """The finished evaluations of a cell that can be run again; what is not among them, `agreement.apart` names.

    SpecError: a finished evaluation has no numbers or no outcomes.
    """
    from fatbench.report.numbers import cell_rows
    from fatbench.suite import asked

    sizes = {stage: n for (_, stage), (_, n) in cell_rows.accuracies([cell], store).items()}
    found: dict[str, Evaluation] = {}
    for (_, stage), row in store.stages([cell]).items():
        if stage == "train" or row.status != "done" or row.settings is None:
            continue
        chunks = store.outcomes(cell, stage)
        if not chunks or stage not in sizes:
            lacking = "outcomes" if stage in sizes else "numbers"
            raise SpecError(f"cell {cell} {stage} is finished but has no {lacking}: it cannot be verified")
        one = asked.evaluation(stage, row.settings, sizes[stage], chunks[0][1])
        if one is None:
            continue
        if one.origin is not None and one.origin.cell:
            spec = store.cells([one.origin.cell]).get(one.origin.cell)
            if spec is None:  # its model cannot be trained again
                continue
            one = replace(one, origin=replace(one.origin, spec=spec))
        found[one.id] = one
    return list(found.values())
