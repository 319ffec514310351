"""`fatbench show` and `fatbench logs`: one cell, with all that is known of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fatbench import whole_file
from fatbench.cli.common import FIGURES, cell_in, known_format, print_json
from fatbench.cli.options import Cell, Db, Format, output_folder
from fatbench.errors import FatbenchError, NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened


def show_cell(
    cell: Cell,
    artifacts: Annotated[
        bool, typer.Option("--artifacts", help="Show the images and tensors that a round kept.")
    ] = False,
    round: Annotated[
        int | None, typer.Option("--round", min=1, help="The round to show; default: the last one kept.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", callback=output_folder, help="Folder for images; default: results/figures."),
    ] = None,
    db: Db = None,
    format: Format = "text",
) -> None:
    """Show the numbers of a cell and the runs behind them; with --artifacts, draw what a round kept.

    Example: fatbench show 0301a225a8b3
    """
    from fatbench.cli import show
    from fatbench.report.numbers import cell_rows, cell_runs
    from fatbench.report.numbers.doubts import in_words
    from fatbench.store.schema import NUMBERS
    from fatbench.store.stage_names import parsed

    known_format(format, ("text", "json"))
    if not artifacts and (round is not None or output is not None):
        raise SpecError("--round and -o need --artifacts")
    if artifacts:
        _show_artifacts(cell, round, output or FIGURES, db, format)
        return
    with opened(db) as store:
        id = cell_in(store, cell, db)
        assert store is not None
        spec = store.cells([id])[id]
        runs = store.runs([id])
        stages = store.stages([id])
        replicate_runs = cell_runs.runs_of_cell(store, id)
        outcomes = cell_rows.outcomes([id], store)
        evaluated = cell_rows.numbers_of([id], store, cell_rows.EVALUATED)
        cell_rows.check_accuracies(evaluated, store, outcomes)
        doubts_by_stage = cell_rows.doubts_of([id], store, outcomes, evaluated)

        def doubted(number: Mapping[str, Any]) -> dict[str, Any]:
            accuracy = number["metric"] == parsed(number["stage"]).metric
            return {**number, "doubts": in_words(doubts_by_stage.get((id, number["stage"]), ())) if accuracy else []}

        if format == "json":
            rows = map(doubted, store.each_measurement(id))
            number_rows = ({key: row[key] for key in row if key != "settings"} for row in rows)  # those of its stage
            of_stages = [
                {name: getattr(row, name) for name in ("stage", "status", "round", "total", "settings")}
                for row in stages.values()
            ]
            print_json(
                {
                    "cell": id,
                    "spec": spec,
                    "stages": of_stages,
                    "numbers": number_rows,
                    "runs": runs,
                    "replicates": replicate_runs,
                }
            )
            return
        last_round, earlier_count = store.last_trained(id)
        trained = cell_rows.numbers_of([id], store, (NUMBERS.c.stage == "train") & (NUMBERS.c.round >= last_round))
        numbers = [doubted(number._asdict()) for number in (*evaluated, *trained)]
    labels, suite = name_of(id, runs)
    show.cell(id, f"{labels} ({suite})" if suite else "", spec, stages, numbers, runs, earlier_count)
    if replicate_runs:
        print(cell_runs.runs_as_text(replicate_runs))


def name_of(id: str, runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Labels of a cell in the first suite that ran it and is here: "SFAT, seed 0", "sfat-fashion, preset cpu".

    Both are empty where there is no such suite.
    """
    from fatbench.store.replicates import SIGN

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


def _show_artifacts(cell: str, round: int | None, folder: Path, db: str | None, format: str) -> None:
    from fatbench import settings

    with opened(db) as store:
        id = cell_in(store, cell, db)
        assert store is not None
        train = store.stages([id]).get((id, "train"))
        digests = {} if train is None else train.record.get("sha256", {})
    from fatbench.report.figures import artifacts

    files = settings.files_folder(settings.database(db)) / id
    kept_rounds = artifacts.rounds(files)
    if not kept_rounds:
        raise NothingMatched(f"cell {id} kept no artifacts, or they are not on this machine: {files / 'artifacts'}")
    if round is not None and round not in kept_rounds:
        raise SpecError(
            f"--round: cell {id} kept no artifacts of round {round}{did_you_mean(str(round), map(str, kept_rounds))}"
        )
    round = round or max(kept_rounds)
    tensors = artifacts.load(kept_rounds[round], digests.get(kept_rounds[round].relative_to(files).as_posix()))
    image_files = []
    for image in artifacts.images(tensors):
        file = folder / f"{id}-round-{round:06d}-{image.name}.png"
        whole_file.write(file, image.png(), f"-o {folder}", make_folder=True)
        image_files.append(str(file))
    words = artifacts.lines(tensors)
    if format == "json":
        print_json({"cell": id, "round": round, "rounds": list(kept_rounds), "files": image_files, "values": words})
    else:
        print("\n".join([*image_files, *words]))


def logs(cell: Cell, db: Db = None, format: Format = "text") -> None:
    """Print the log of a cell, with the traceback if it failed.

    Example: fatbench logs 0301a225a8b3
    """
    from fatbench import settings

    known_format(format, ("text", "json"))
    with opened(db) as store:
        id = cell_in(store, cell, db)
        assert store is not None
        errors = {stage: row.error for (_, stage), row in store.stages([id]).items() if row.error}
    file = settings.files_folder(settings.database(db)) / id / "log.txt"
    if format == "json":
        text = file.read_text(encoding="utf-8") if file.exists() else None
        print_json({"cell": id, "file": str(file), "log": text, "errors": errors})
        return
    if file.exists():
        print(file.read_text(encoding="utf-8"), end="")
    else:
        print(f"no log at {file}", file=sys.stderr)
    for stage, error in errors.items():
        print(f"--- {stage} failed\n{error.rstrip()}")
