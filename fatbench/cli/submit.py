"""`fatbench submit`: check a file of results, run a sample again, write its record and the text of a pull request."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import packed, whole_file
from fatbench.cli.options import DataDir, Device, output_folder
from fatbench.errors import SpecError
from fatbench.runner.run_options import RunOptions

if TYPE_CHECKING:
    from fatbench.store.stages import Store

FOLDER = Path("results/submitted")


def submit(
    file: Annotated[Path, typer.Argument(help="A file written by `fatbench export`.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", callback=output_folder, help="Folder for the file and its record.")
    ] = FOLDER,
    sample: Annotated[int, typer.Option("--sample", min=1, help="Number of cells to run again.")] = 1,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Sample the cells with this seed; default: the cheapest ones.")
    ] = None,
    device: Device = None,
    data: DataDir = None,
) -> None:
    """Make results ready for the leaderboard: check the file, run a sample again, write record and pull request.

    Example: fatbench submit results.jsonl
    """
    from fatbench.cli import verify
    from fatbench.report import agreement
    from fatbench.store import jsonl
    from fatbench.store.stages import Store
    from fatbench.suite.asked import contradiction
    from fatbench.suite.validate_import import identity

    if not whole_file.regular(file).is_file():
        raise SpecError(f"{file}: no such file (give one that 'fatbench export' wrote)")
    with (
        tempfile.TemporaryDirectory(prefix="fatbench-") as folder,
        Store.open(f"{folder}/theirs.db", create=True) as their_store,
    ):
        # digests, outcomes and identities of every line
        jsonl.import_(their_store, file, identify=identity, contradiction=contradiction)
        if problems := list(_problems(their_store)):
            remainder = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise SpecError(f"{file}: {'; '.join(problems[:3])}{remainder}; nothing was written")
        sampled_cells = verify.choose(their_store, sample, seed)
        options = RunOptions(device=device, db=f"{folder}/ours.db", data=data)
        verification = verify.run_again(their_store, sampled_cells, options)
        print(agreement.text(verification))
        if not verification.agrees:
            word = "differs" if verification.reasons else "is not verified"
            print(f"fatbench: {file}: the sample {word}: nothing was written")
            raise typer.Exit(1)
        tolerated = {"tolerance": verification.tolerance, "because": verification.because}
        record = _record(their_store, file) | {
            "verified": {
                "cells": sampled_cells,
                "numbers": len(verification.numbers),
                "apart": verification.far,
                **tolerated,
            }
        }
    target = output / f"{record['sha256'][:12]}.jsonl"
    whole_file.write_all(
        {
            target: _content(file),
            target.with_suffix(".json"): json.dumps(record, indent=2) + "\n",
            target.with_suffix(".md"): _text(record, target),
        },
        f"-o {output}",
    )
    print(f"wrote {target}, its record .json and the text of a pull request .md")


def _problems(store: Store) -> Iterator[str]:
    """Why results cannot stand in a leaderboard: unfinished, at chance, without outcomes or versions, modified code."""
    from fatbench.report.numbers import cell_rows
    from fatbench.report.numbers.doubts import NOT_LEARNED
    from fatbench.store import inputs
    from fatbench.store.stage_names import parsed
    from fatbench.suite.first_images import data_keys

    yield from inputs.find_mixtures(store.database, data_keys)
    specs = store.cells()
    stages = store.stages()
    for cell in specs:
        cell_stages = {name: row for (id, name), row in stages.items() if id == cell}
        if "train" not in cell_stages or cell_stages["train"].status != "done":
            yield f"cell {cell} is not trained to the end"
        for name, row in cell_stages.items():
            if name != "train" and row.status != "done":
                yield f"cell {cell}: {name} is {row.status}"
            elif name != "train" and parsed(name).metric and not store.outcomes(cell, name):
                yield f"cell {cell}: {name} has no outcome of each image"
            elif name != "train" and row.settings is None:
                yield f"cell {cell}: {name} does not say what its attack was"
    doubts_by_stage = cell_rows.doubts_of(list(specs), store)
    not_learned = {
        (cell, doubt.words)
        for (cell, _), stage_doubts in doubts_by_stage.items()
        for doubt in stage_doubts
        if doubt.code in NOT_LEARNED
    }
    yield from (f"cell {cell}: the network has not learned: {words}" for cell, words in sorted(not_learned))
    for run in store.runs(list(specs)):
        if run["status"] == "done" and not (run.get("versions") or {}).get("torch"):
            yield f"cell {run['cell']}: the versions of the packages are not recorded"
        if run["status"] == "done" and run["commit"] is None:
            yield f"cell {run['cell']}: the commit of {run['stage']} is not recorded"
        if run["status"] == "done" and run["dirty"] is not False:
            yield f"cell {run['cell']}: modified code (commit {str(run['commit'])[:10]})"


def _content(file: Path) -> bytes:
    """The lines that a pull request shows, whether the file is compressed or not."""
    with packed.read(whole_file.regular(file)) as lines:
        return lines.read()


def _record(store: Store, file: Path) -> dict[str, Any]:
    """What a file holds and what made it."""
    runs = [run for run in store.runs(list(store.cells())) if run["status"] == "done"]

    def several(values: Iterator[Any]) -> list[Any]:
        return sorted({str(value) for value in values if value})

    return {
        "schema_version": 1,
        "sha256": hashlib.sha256(_content(file)).hexdigest(),
        "cells": len(store.cells()),
        "suites": several(f"{run['suite']}, preset {run['preset']}" for run in runs),
        "commits": several(run["commit"] for run in runs),
        "devices": several(run["device"] for run in runs),
        "precisions": several(run["precision"] for run in runs),
        "torch": several((run.get("versions") or {}).get("torch") for run in runs),
        "plugins": several(plugin_record["plugin"] for run in runs for plugin_record in run.get("plugins") or ()),
    }


def _text(record: dict[str, Any], target: Path) -> str:
    """The text of the pull request. Names are the file's, so they may hold anything."""
    from fatbench.report.formats.markdown import escape

    verification = record["verified"]
    suites = escape("; ".join(record["suites"]))
    lines = [
        f"# Results: {suites}",
        "",
        f"`{target}`, SHA-256 `{record['sha256']}`.",
        "",
        f"* cells: {record['cells']}",
    ]
    for fact_name in ("commits", "devices", "precisions", "torch", "plugins"):
        lines.append(f"* {fact_name}: {escape(', '.join(record[fact_name])) or 'none'}")
    lines.append(
        f"* run again: {', '.join(verification['cells'])}; accuracies at most "
        f"{100 * verification['apart']:.2f} points apart,"
        f" tolerance {100 * verification['tolerance']:g} ({escape(verification['because'])})"
    )
    return "\n".join([*lines, ""])
