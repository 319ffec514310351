"""`fatbench show` and `doctor`: a suite in words, one cell with all that is known of it, this machine."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fatbench import settings, whole_file
from fatbench.cli.options import Format, Metric, Option, Output, Thing, formats, output_folder
from fatbench.cli.shared import (
    FIGURES,
    cell_in,
    format_of,
    known_format,
    name_list,
    print_json,
    print_or_write,
)  # fmt: skip
from fatbench.errors import NothingMatched, SpecError, did_you_mean
from fatbench.store.opening import opened
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.suite.files import Suite

COLUMNS = ("cell", "stage", "metric", "round", "checkpoint", "model", "image", "label", "correct")
FORMATS = ("text", "csv", "json")


def show(
    target: Thing,
    log: Annotated[bool, Option("--log", help="The cell's log, with the traceback if it failed.")] = False,
    outcomes: Annotated[
        bool, Option("--outcomes", help="Which test images are right, as CSV; labels need the data set here.")
    ] = False,
    artifacts: Annotated[bool, Option("--artifacts", help="Images and tensors that a round kept.")] = False,
    round: Annotated[
        int | None, Option("--round", metavar="N", min=1, help="Artifacts of this round; default: the last one kept.")
    ] = None,
    metric: Metric = None,
    format: Annotated[str | None, formats(*FORMATS)] = None,
    output: Output = None,
) -> None:
    """Describe a suite; or show every number of a cell and the runs behind them.

    --metric and -o go with --outcomes; -o also with --artifacts, whose images go to results/figures else.

    Example: fatbench show 0301a225a8b3 --outcomes --metric autoattack -o outcomes.csv
    """
    chosen = [name for name, asked in (("--log", log), ("--outcomes", outcomes), ("--artifacts", artifacts)) if asked]
    format = known_format(format or (format_of(output, FORMATS, "csv") if outcomes else "text"), FORMATS)
    if len(chosen) > 1:
        raise SpecError(f"{' and '.join(chosen)}: give one of them")
    if (round is not None and not artifacts) or (output is not None and not (artifacts or outcomes)):
        raise SpecError("--round needs --artifacts, and -o needs --artifacts or --outcomes")
    if (metric is not None or format == "csv") and not outcomes:
        raise SpecError("--metric and --format csv need --outcomes")
    if _is_suite(target):
        if chosen:
            cells = f"fatbench status {target} lists them"
            raise SpecError(f"'{target}' is a suite, and {chosen[0]} shows a cell ({cells})")
        from fatbench.cli import show
        from fatbench.suite import files

        suite = files.load(target)
        if format == "json":
            print_json(_described(suite))
        else:
            show.suite(suite)
        return
    if artifacts:
        _show_artifacts(target, round, output_folder(output) or FIGURES, format)
    elif outcomes:
        _show_outcomes(target, name_list(metric), "json" if format == "json" else "csv", output)
    elif log:
        _show_log(target, format)
    else:
        _show_cell(target, format)


def _is_suite(target: str) -> bool:
    """Whether a suite has this name; else `cell_in` says what may have been meant, such as a label."""
    from fatbench.suite import files

    if files.is_path(target):
        return True
    try:
        files.locate(files.split_settings(target)[0])
    except SpecError:
        return False
    return True


def _described(suite: Suite) -> dict[str, Any]:
    """What `show NAME` says, by name."""
    presets = {}
    for preset in suite.presets():
        plan = suite.plan(preset, refuse=False)
        presets[preset] = {
            "cells": len(plan.to_run()),
            "seeds": sorted({cell.spec["seed"] for cell in plan.cells}),
            "note": plan.note,
            "checkpoints": list(plan.checkpoints),
            "attacks": list(plan.metrics()),
            "excluded": [{"key": dict(key), "reason": reason} for key, reason in plan.excluded],
        }
    return {
        "name": suite.name, "title": suite.title, "description": suite.description, "file": str(suite.file),
        "axes": suite.axes(), "presets": presets,
        "tables": [{"id": table.id, "title": table.title} for table in suite.tables],
        "figures": [{"id": figure.id, "title": figure.title} for figure in suite.figures],
    }  # fmt: skip


def _show_cell(cell: str, format: str) -> None:
    """Its numbers and the runs behind them."""
    from fatbench.api.verifying import name_of
    from fatbench.cli import show
    from fatbench.report.numbers import stored
    from fatbench.report.numbers.doubts import in_words
    from fatbench.store.schema import NUMBERS

    with opened(None) as store:
        id = cell_in(store, cell)
        assert store is not None
        spec = store.cells([id])[id]
        runs = store.runs([id])
        labels, suite = name_of(id, runs)  # first: the suite's plug-ins say what has changed
        stages = store.stages([id])
        replicate_runs = stored.runs_of_cell(store, id)
        outcomes = stored.outcomes([id], store)
        evaluated = stored.numbers_of([id], store, stored.EVALUATED)
        stored.check_accuracies(evaluated, store, outcomes)
        doubts_by_stage = stored.doubts_of([id], store, outcomes, evaluated)

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
            whole = {"cell": id, "spec": spec, "stages": of_stages, "numbers": number_rows, "runs": runs}
            print_json({**whole, "replicates": replicate_runs})
            return
        last_round, earlier_count = store.last_trained(id)
        trained = stored.numbers_of([id], store, (NUMBERS.c.stage == "train") & (NUMBERS.c.round >= last_round))
        numbers = [doubted(number._asdict()) for number in (*evaluated, *trained)]
    show.cell(id, f"{labels} ({suite})" if suite else "", spec, stages, numbers, runs, earlier_count)
    if replicate_runs:
        print(show.runs_as_text(replicate_runs))


def _show_artifacts(cell: str, round: int | None, folder: Path, format: str) -> None:
    with opened(None) as store:
        id = cell_in(store, cell)
        assert store is not None
        train = store.stages([id]).get((id, "train"))
        digests = {} if train is None else train.record.get("sha256", {})
    from fatbench.report.figures import artifacts, plots

    files = settings.files_folder(settings.database()) / id
    kept_rounds = artifacts.rounds(files)
    if not kept_rounds:
        raise NothingMatched(f"cell {id} kept no artifacts, or they are not on this machine: {files / 'artifacts'}")
    if round is not None and round not in kept_rounds:
        hint = did_you_mean(str(round), map(str, kept_rounds))
        raise SpecError(f"cell {id} kept no artifacts of round {round}{hint}", option="round")
    round = round or max(kept_rounds)
    tensors = artifacts.load(kept_rounds[round], digests.get(kept_rounds[round].relative_to(files).as_posix()))
    image_files = []
    for name, image in plots.pictures(tensors):
        file = folder / f"{id}-round-{round:06d}-{name}.png"
        whole_file.write(file, image, f"-o {folder}", make_folder=True)
        image_files.append(str(file))
    words = artifacts.lines(tensors)
    if format == "json":
        print_json({"cell": id, "round": round, "rounds": list(kept_rounds), "files": image_files, "values": words})
    else:
        print("\n".join([*image_files, *words]))


def _show_log(cell: str, format: str) -> None:
    with opened(None) as store:
        id = cell_in(store, cell)
        assert store is not None
        errors = {stage: row.error for (_, stage), row in store.stages([id]).items() if row.error}
    file = settings.files_folder(settings.database()) / id / "log.txt"
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


def _show_outcomes(cell: str, metrics: list[str], format: str, output: Path | None) -> None:
    """Which test images a cell classifies right, a line each."""
    from fatbench.api.outcome_rows import outcome_rows
    from fatbench.report.tables.number_format import uncomputed

    with opened(None) as store:
        id = cell_in(store, cell)
        assert store is not None
        rows = outcome_rows(store, id, metrics)
    if format == "json":
        if output is None:
            print_json({"cell": id, "outcomes": rows})
        else:
            print_or_write(json.dumps({"schema_version": 1, "cell": id, "outcomes": rows}) + "\n", output)
        return
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if value is None else uncomputed(value) for key, value in row.items()} for row in rows)
    print_or_write(stream.getvalue(), output)


def doctor(format: Format = "text") -> None:
    """Describe this machine and its settings, for a bug report.

    Example: fatbench doctor
    """
    from fatbench.api.machine import facts
    from fatbench.cli import show

    known_format(format, ("text", "json"))
    if format == "json":
        print_json({"facts": [{"name": name, "text": text} for name, text in facts()]})
    else:
        show.doctor(facts())
