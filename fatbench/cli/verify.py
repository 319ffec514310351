"""`fatbench verify`: run a sample of exported cells again and compare the numbers."""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fatbench import settings, whole_file
from fatbench.cli.options import Argument, Device, DryRun, Format, Option, Where
from fatbench.cli.shared import known_format, print_json
from fatbench.errors import SpecError
from fatbench.runner.run_options import run_options
from fatbench.store import inputs
from fatbench.store.replicates import SIGN

if TYPE_CHECKING:
    from fatbench.api.verifying import CellAgain
    from fatbench.store.stages import Store


def verify(
    file: Annotated[Path, Argument(metavar="FILE", help="A file written by `fatbench export`.", show_default=False)],
    where: Where = None,
    sample: Annotated[int, Option("--sample", metavar="N", min=1, help="Number of cells to run again.")] = 3,
    sample_seed: Annotated[int, Option("--sample-seed", metavar="N", help="Draw the cells with this seed.")] = 0,
    tolerance: Annotated[
        float | None,
        Option(
            "--tolerance", metavar="X", min=0,
            help="Largest difference of accuracies allowed; default: 0 on the same machine, else 0.02.",
        ),
    ] = None,
    device: Device = None,
    dry_run: DryRun = False,
    format: Format = "text",
) -> None:  # fmt: skip
    """Run a few cells of exported results again; exit 0 if they agree.

    Every finished number of these cells must agree. -k runs all cells of FILE that match: -k cell=ID.

    Example: fatbench verify results.jsonl --sample 2 -n
    """
    known_format(format, ("text", "json"))
    from fatbench.api import verifying
    from fatbench.cli.watch import Watch
    from fatbench.report import agreement
    from fatbench.report.numbers import doubts
    from fatbench.store import jsonl
    from fatbench.store.stages import Store
    from fatbench.suite.asked import contradiction, identity
    from fatbench.suite.facts import data_keys
    from fatbench.suite.filters import filter_text

    if not whole_file.regular(file).is_file():
        raise SpecError(f"{file}: no such file (give one that 'fatbench export' wrote)")
    with tempfile.TemporaryDirectory(prefix="fatbench-") as folder, contextlib.ExitStack() as stack:
        # a database of its own: numbers of other files must not decide what is compared
        their_store = stack.enter_context(Store.open(f"{folder}/theirs.db", create=True))
        jsonl.import_(their_store, file, identify=identity, contradiction=contradiction)
        if mixed := inputs.find_mixtures(their_store.database, data_keys):
            raise SpecError(f"{file}: {'; '.join(mixed[:3])}: a file whose names mean several things is not verified")
        wanted = filter_text(where)
        cells = _matching(their_store, wanted, file) if wanted else None
        if cells is None:
            cells, how = verifying.choose(their_store, sample, sample_seed)
            print(f"fatbench: {how}", file=sys.stderr)
        if brought := [id for id, spec in their_store.cells(cells).items() if "evaluated" in spec]:
            raise SpecError(f"cell {brought[0]} is an external model: its training cannot be run again")
        cells_again = verifying.to_run_again(their_store, cells)
        if dry_run:
            if format == "json":
                print_json({"cells": [asdict(cell_again) for cell_again in cells_again]})
            else:
                print(in_words(cells_again))
            return
        print(in_words(cells_again), file=sys.stderr)
        options = run_options(
            device=device,
            precision=settings.setting("run.precision"),
            db=f"{folder}/ours.db",
            data=settings.given("data"),
        )
        way, watch = settings.setting("run.path"), functools.partial(Watch, starts=True)
        verification = verifying.run_again(their_store, cells, options, watch, way, tolerance)
        notes = dict.fromkeys(verifying.at_chance(their_store, cells), f" ({doubts.Doubt('chance').words})")
    if format == "json":
        numbers = verification.numbers
        records = [{**asdict(one), "agreement": one.agreement, "evaluated": one.evaluated} for one in numbers]
        verdict = {name: getattr(verification, name) for name in ("agrees", "reasons", "unverified")}
        tolerated = {"tolerance": verification.tolerance, "because": verification.because, "apart": verification.far}
        print_json({"cells": cells, **verdict, **tolerated, "numbers": records})
    else:
        print(agreement.text(verification, notes))
    if not verification.agrees:
        raise typer.Exit(1)


def _matching(store: Store, wanted: str, file: Path) -> list[str]:
    """The cells of the file that match; NothingMatched: none does. Labels of axes are those of suites, not of files."""
    from fatbench.suite import filters
    from fatbench.suite.cells import Cell, Plan

    cells = [Cell(id, {}, spec, ()) for id, spec in store.cells().items() if SIGN not in id]
    return [cell.id for cell in filters.select(Plan(str(file), "", "", cells, []), wanted).cells]


def in_words(cells_again: Sequence[CellAgain]) -> str:
    """ "to run again: 2 cells of sfat-fashion, preset cpu", a line a cell, and what they took."""
    from fatbench.cli.watch import duration

    devices = " and ".join(dict.fromkeys(entry.device for entry in cells_again if entry.device)) or "one machine"
    suites = " and ".join(dict.fromkeys(entry.suite for entry in cells_again if entry.suite)) or "the file"
    times = [duration(entry.seconds) if entry.seconds else "time unknown" for entry in cells_again]
    width = max(map(len, times))
    total = duration(sum(entry.seconds for entry in cells_again))
    return "\n".join(
        [
            f"to run again: {len(cells_again)} cell{'s' * (len(cells_again) != 1)} of {suites}",
            *(f"  {one.cell}  {time:>{width}}  {one.name}" for one, time in zip(cells_again, times, strict=True)),
            f"there they took {total} on {devices}, one after the other",
        ]
    )
