"""`fatbench verify`: run a sample of exported cells again and compare the numbers."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import whole_file
from fatbench.cli.common import cell_in, known_format, print_json
from fatbench.cli.options import DataDir, Device, Format, Precision
from fatbench.errors import NothingMatched, SpecError
from fatbench.runner.run_options import RunOptions
from fatbench.suite import weights

if TYPE_CHECKING:
    from fatbench.runner.jobs import Job
    from fatbench.store.stages import Store


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
    """Run a few cells of exported results again; exit 0 if all accuracies agree within the tolerance."""
    known_format(format, ("text", "json"))
    from fatbench.store import jsonl
    from fatbench.store.stages import Store
    from fatbench.suite.validate_import import identity

    if not whole_file.regular(file).is_file():
        raise SpecError(f"{file}: no such file (give one that 'fatbench export' wrote)")
    with tempfile.TemporaryDirectory(prefix="fatbench-") as folder, contextlib.ExitStack() as stack:
        theirs = stack.enter_context(Store.open(f"{folder}/theirs.db", create=True))
        jsonl.import_(theirs, file, identify=identity)
        chosen = [cell_in(theirs, id) for id in cell] if cell else choose(theirs, sample, seed)
        if brought := [id for id, spec in theirs.cells(chosen).items() if "evaluated" in spec]:
            raise SpecError(f"cell {brought[0]} is an external model: its training cannot be run again")
        options = RunOptions(device=device, precision=precision, db=f"{folder}/ours.db", data=data)
        found, tolerance, reason = again(theirs, chosen, options, path, tolerance)
    worst = max((one.far for one in found if one.counts), default=0.0)
    if format == "json":
        numbers = [{**asdict(one), "apart": one.far} for one in found]
        print_json({"cells": chosen, "numbers": numbers, "tolerance": tolerance, "because": reason, "apart": worst})
    else:
        print(text(found, worst, tolerance, reason))
    if worst > tolerance:
        raise typer.Exit(1)


def again(
    theirs: Store, chosen: Sequence[str], options: RunOptions, path: str | None = None, tolerance: float | None = None
) -> tuple[list[Apart], float, str]:
    """Run cells again in the empty database of the options: (numbers, tolerance, why that). SystemExit: one failed."""
    from fatbench.store.stages import Store

    _run(theirs, [job(theirs, id, trained_only=True) for id in origins(theirs, chosen)], options, path)
    _run(theirs, [job(theirs, id) for id in chosen], options, path)
    with Store.open(str(options.db)) as ours:
        found = [one for id in chosen for one in apart(theirs, ours, id)]
        if tolerance is not None:
            return found, tolerance, "--tolerance"
        return found, *largest_allowed([(_trained(theirs, id), _trained(ours, id)) for id in chosen], found)


def origins(store: Store, cells: Sequence[str]) -> list[str]:
    """The cells with whose models these begin, the first ones first. SpecError: one is not in the file."""
    found: dict[str, None] = {}
    for id in cells:
        origin = weights.trained_by(store.cells([id])[id])
        if origin is None:
            continue
        if origin not in store.cells([origin]):
            raise SpecError(f"cell {id} begins with the weights of cell {origin}, which is not in the file")
        found |= dict.fromkeys([*origins(store, [origin]), origin])
    return list(found)


def _run(theirs: Store, jobs: Sequence[Job], options: RunOptions, path: str | None) -> None:
    """Run cells as they were run there, or as the options say. SystemExit: one failed."""
    from fatbench.cli.watch import Watch
    from fatbench.runner import start

    alike: dict[tuple[str | None, str | None, str], list[Job]] = {}
    for one in jobs:
        was = _trained(theirs, one.cell)
        attacked = next((run["precision"] for run in theirs.runs([one.cell]) if run["stage"] != "train"), None)
        trained, way = was.get("precision"), path or str(was.get("path") or "loop")
        alike.setdefault((options.precision or trained, options.precision or attacked, way), []).append(one)
    for (bits, attacks, way), these in alike.items():
        with Watch(f"again: {bits}, path {way}") as watch:
            start.run(these, watch, replace(options, precision=bits, attack_precision=attacks, path=way))


def _trained(store: Store, cell: str) -> Mapping[str, Any]:
    """The first training run of a cell of which anything is left; empty: there is none."""
    return next((run for run in store.runs([cell]) if run["stage"] == "train" and not run.get("dropped")), {})


TOLERANCE = 0.02  # where another machine, library or precision may change what is computed
MACHINE = ("device", "cpu", "precision", "path", "threads", "not_reproducible")


def largest_allowed(
    runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], numbers: Sequence[Apart] = ()
) -> tuple[float, str]:
    """The largest difference allowed between runs (there, here), and why: 0 where the bytes should be the same."""
    for theirs, ours in runs:
        there, here = ({**run, "torch": (run.get("versions") or {}).get("torch")} for run in (theirs, ours))
        for key in (*MACHINE, "torch"):
            if there.get(key) != here.get(key):
                return TOLERANCE, f"{key}: {_said(there.get(key))} there, {_said(here.get(key))} here"
        if here.get("not_reproducible"):
            return TOLERANCE, f"not reproducible: {here['not_reproducible']}"
    for one in numbers:
        if one.precisions[0] != one.precisions[1]:
            return TOLERANCE, f"precision of {one.metric}: {one.precisions[0]} there, {one.precisions[1]} here"
    return 0.0, "same machine, torch and precision"


def _said(value: Any) -> str:
    return (
        "not recorded"
        if value is None
        else " ".join(map(str, value.values()))
        if isinstance(value, dict)
        else str(value)
    )


CLOCK = ("seconds",)  # training numbers that tell of the machine alone


@dataclass(frozen=True)
class Apart:
    """One number of a cell, there and here."""

    cell: str
    metric: str  # "pgd20 (last)", or "train_loss" of training
    theirs: float
    ours: float
    agreement: float | None  # fraction of the test images with the same outcome
    counts: bool  # whether the tolerance is about it
    precisions: tuple[str, str] = ("fp32", "fp32")  # of the attack, there and here

    @property
    def far(self) -> float:
        """Of an accuracy the difference, of a training number the difference relative to the larger one."""
        difference = abs(self.theirs - self.ours)
        if "(" in self.metric:
            return round(difference, 12)  # 0.594 and 0.574 are 0.02 apart, in floating point a little more
        return difference / max(abs(self.theirs), abs(self.ours)) if difference else 0.0


def choose(store: Store, sample: int, seed: int | None) -> list[str]:
    """Cells whose training is done: with a seed any of them at random, without the cheapest. NothingMatched: none."""
    from fatbench.store.replicates import SIGN

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
    if seed is not None:
        return random.Random(seed).sample(done, min(sample, len(done)))
    seconds = dict.fromkeys(done, 0.0)
    for number in store.measurements(done, metrics=["seconds"]):
        if number["client"] < 0:
            seconds[number["cell"]] += number["value"]
    # a cell without recorded seconds comes after all that have them
    return sorted(done, key=lambda id: (not seconds[id], seconds[id], _work(specs[id]), id))[:sample]


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
    from fatbench.suite.cells import Evaluation, canonical

    rows = {stage: row for (_, stage), row in store.stages([cell]).items()}
    if "train" not in rows or rows["train"].status != "done":
        raise SpecError(f"cell {cell} is not trained to the end: there is nothing to verify")
    spec = canonical(store.cells([cell])[cell])  # with the settings that the program has learned since
    evaluations: dict[str, Evaluation] = {}
    sizes = {n["stage"]: n["n"] for n in store.measurements([cell], stages=list(rows)) if n["metric"] != "seconds"}
    for stage, row in rows.items():
        metric, evaluation, *_ = parsed(stage)
        if stage == "train" or row.status != "done" or row.settings is None or evaluation in evaluations:
            continue
        if trained_only:
            break
        if "origin" in row.settings:  # of another cell, which may not be in the file
            continue
        attack = {key: value for key, value in row.settings.items() if key != "implementation"}
        chunks = store.outcomes(cell, stage)
        if not chunks or stage not in sizes:
            lacking = "outcomes" if stage in sizes else "numbers"
            raise SpecError(f"cell {cell} {stage} is finished but has no {lacking}: it cannot be verified")
        batch, n = chunks[0][1], sizes[stage]
        # neither n nor batch is stored as it was asked for: the hash in the stage's name says which it was
        known = [Evaluation(metric, attack, many, b) for many in (n, None) for b in _batches(batch)]
        evaluations[evaluation] = next((one for one in known if one.id == evaluation), known[0])
    attacked = {parsed(stage).round for stage in rows if stage != "train"}
    record = rows["train"].record
    checkpoints = [name for name in WORDS if name in record and int(record[name]["round"]) in attacked]
    run = _trained(store, cell)
    suite, preset = str(run.get("suite") or "verify"), str(run.get("preset") or "verify")
    return Job(cell, spec, list(evaluations.values()), checkpoints, suite, preset)


def _batches(first: int) -> list[int]:
    """Batches that a first chunk of so many images can come from: one of that size, or any that holds all images."""
    return [first, *(size for size in (50, 64, 100, 128, 200, 250, 256, 500, 512, 1000, 2000) if size >= first)]


def apart(theirs: Store, ours: Store, cell: str) -> list[Apart]:
    """Every evaluation at every checkpoint, and the last round's training numbers; these count if nothing else does."""
    from fatbench.report.numbers.compare import label, measured
    from fatbench.store.selection import WORDS

    found = []
    for checkpoint in WORDS:
        there, here = (
            {label(name): one for name, one in measured(store, [cell], checkpoint)[cell].items()}  # type: ignore[arg-type]
            for store in (theirs, ours)
        )
        for metric in there.keys() & here.keys():
            one, other = there[metric], here[metric]
            same = None
            if one.outcomes and other.outcomes and one.n == other.n:
                same = 1 - (one.outcomes[0] ^ other.outcomes[0]).bit_count() / one.n
            name, precisions = f"{metric} ({checkpoint})", (one.precision, other.precision)
            found.append(Apart(cell, name, one.value, other.value, same, True, precisions))
    found.sort(key=lambda one: one.metric)
    ends = [
        {
            n["metric"]: n["value"]
            for n in store.measurements([cell], stages=["train"])
            if n["client"] < 0 and n["round"] == int(store.cells([cell])[cell]["algorithm"]["rounds"])
        }
        for store in (theirs, ours)
    ]
    evaluated = bool(found)
    for metric in sorted(ends[0].keys() & ends[1].keys() - set(CLOCK)):
        found.append(Apart(cell, metric, ends[0][metric], ends[1][metric], None, not evaluated))
    return found


def text(found: Sequence[Apart], worst: float, tolerance: float, reason: str) -> str:
    """A block for each cell, and what it comes to."""
    lines = []
    for cell in dict.fromkeys(one.cell for one in found):
        lines.append(f"cell {cell}: there, here, apart")
        for one in found:
            if one.cell != cell:
                continue
            same = "" if one.agreement is None else f", {100 * one.agreement:.1f} % of outcomes agree"
            bare = "" if one.counts else " (relative, not counted)" if "(" not in one.metric else ""
            lines.append(f"  {one.metric}: {one.theirs:.6g}, {one.ours:.6g}, {one.far:.4g}{bare}{same}")
    within = "within" if worst <= tolerance else "beyond"
    lines.append(f"at most {worst:.4g} apart: {within} the tolerance of {tolerance:g} ({reason})")
    return "\n".join(lines)
