"""`fatbench check`: suites, plug-ins, exported results and databases, each by its kind; nothing is stored."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fatbench import packed, settings
from fatbench.cli import completing
from fatbench.cli.options import Argument, Device, Format, Option, Preset
from fatbench.cli.shared import known_format, plan_of, print_json
from fatbench.errors import FatbenchError, SpecError

DATABASES = (".db", ".sqlite", ".sqlite3")


def check(
    files: Annotated[
        list[str] | None,
        Argument(
            metavar="[FILE]...", show_default=False, autocompletion=completing.suites,
            help="Suites or their names, plug-ins (.py), exported results, databases; none: the database of --db.",
        ),
    ] = None,
    learn: Annotated[
        bool, Option("--learn", help="Train a suite's first cell until it is above chance; stores nothing.")
    ] = False,
    preset: Preset = None,
    device: Device = None,
    repair: Annotated[bool, Option("--repair", help="Recompute doubts that are out of date.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON Schema of suite files, for editors.")] = False,
    format: Format = "text",
) -> None:  # fmt: skip
    """Check suites, plug-ins, exported results, or the database.

    It plans every preset of a suite and runs nothing; calls every function of a plug-in, which must keep its
    properties; checks schema, digests, accuracies and doubts of a database.

    Example: fatbench check my_rule.py my_rule.yaml
    """
    known_format(format, ("text", "json"))
    if schema:
        from fatbench.suite import file_schema

        print(file_schema.text(), end="")
        return
    if learn:
        if format == "json":
            raise SpecError("--learn prints text, not json")
        if len(files or ()) != 1:
            raise SpecError(f"--learn takes one suite, got {len(files or ())}")
        _learn((files or [""])[0], preset, device)
        return
    if preset or device:
        raise SpecError("--preset and --device: only with --learn")
    kinds: dict[str, list[str]] = {}
    for file in files or ():
        kinds.setdefault(_kind(file), []).append(file)
    if repair and (files or [""]) != kinds.get("database", [""]):
        raise SpecError("only of a database", option="repair")
    result: dict[str, Any] = {}
    codes = [_suites(kinds["suite"], format, result)] if "suite" in kinds else []
    codes += [_plugins(kinds["plugin"], format, result)] if "plugin" in kinds else []
    for file in kinds.get("results", ()):
        _results(file, format, result)
    for database in kinds.get("database", () if files else (settings.database(),)):
        _database(database, repair, format, result)
    if format == "json":
        print_json(result)
    if any(codes):
        raise typer.Exit(max(codes))


def _kind(file: str) -> str:
    """ "suite", "plugin", "results" or "database", by the ending of a file or what it is."""
    from fatbench.store.opening import is_export
    from fatbench.suite import files

    if file.endswith(".py"):
        return "plugin"
    if (files.is_path(file) and not Path(file).suffix) or file.endswith((".yaml", ".yml")):
        return "suite"
    if file.endswith(packed.RESULTS) or file == "-":
        return "results"
    if file.endswith(DATABASES) or ("://" in file and not file.startswith("hf:")):
        return "database"
    return "results" if "\0" not in file and is_export(file) else "suite"


def _suites(names: list[str], format: str, result: dict[str, Any]) -> int:
    """Validate suites, every preset and table, without running anything; 2: one is invalid."""
    from fatbench import report
    from fatbench.runner.versions import explain
    from fatbench.suite.files import load
    from fatbench.suite.tuning import demand_validation, suite_of

    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            suite = load(suite_of(name))
            plans = [suite.plan(preset) for preset in suite.presets()]
            for plan in plans:
                report.check(suite, plan)
            report.check_headings(suite, plans)
            if suite.contents.tune is not None:
                for plan in plans:
                    demand_validation(suite.trials().plan(plan.preset).cells, suite.file)
        except FatbenchError as error:
            said = explain(error).at_terminal()
            rows.append({"file": name, "ok": False, "error": said})
            if format == "text":
                print(f"fatbench: {said}", file=sys.stderr)
        else:
            sizes = {plan.preset: len(plan.to_run()) for plan in plans}
            rows.append({"file": name, "ok": True, "presets": sizes})
            if format == "text":
                print(f"{name}: ok ({', '.join(f'{preset} {n} cells' for preset, n in sizes.items())})")
                for file in dict.fromkeys(one.reference.file for one in suite.tables if one.reference is not None):
                    from fatbench.report import audit  # which imports pandas

                    if count := len(audit.marks(file)):
                        print(f"{name}: asked about in {file.name}: {count} of its numbers (fatbench audit {file})")
                for presets, sentence in report.unlike(suite, plans):
                    print(f"{name}: not compared in {presets}: {sentence}")
    result["suites"] = rows
    return 0 if all(row["ok"] for row in rows) else 2


def _plugins(names: list[str], format: str, result: dict[str, Any]) -> int:
    """A line for every function of plug-in files, and what does not hold for it; 1: something does not."""
    from fatbench.suite import plugins

    paths = [Path(name).expanduser().resolve() for name in names]
    for path in paths:
        plugins.add(path, "")
    from fatbench import testing

    rows: list[dict[str, Any]] = []
    for path in paths:
        for kind, name, held, broken in testing.check(path):
            rows.append({"file": path.name, "kind": kind, "name": name, "ok": not broken, "broken": broken})
            if format == "json":
                continue
            verdict = "ok" if held else "has no property to test; a run reads it"
            if broken:
                verdict = f"{len(broken)} of {len(held) + len(broken)} properties do not hold"
            print(f"{path.name}: {kind} {name}: {verdict}")
            properties_by_problem: dict[str, list[str]] = {}  # what is wrong -> the properties that it breaks
            for line in broken:
                property, _, words = line.partition(": ")
                properties_by_problem.setdefault(words, []).append(property)
            for words, properties in properties_by_problem.items():
                print(f"  {', '.join(properties)}: {words}")
    result["plugins"] = rows
    return 0 if all(row["ok"] for row in rows) else 1


def _results(file: str, format: str, result: dict[str, Any]) -> None:
    """Whether `fatbench import` would take a file. ExchangeError: a line is invalid."""
    from fatbench.store import jsonl
    from fatbench.suite.asked import contradiction, identity

    lines = jsonl.check(None, file, identify=identity, contradiction=contradiction)
    result.setdefault("files", []).append({"file": file, "ok": True, "cells": lines.new})
    if format == "text":
        print(f"{file}: ok ({lines.new} cells)")


def _database(url: str, repair: bool, format: str, result: dict[str, Any]) -> None:
    """Whether a database is intact, and its doubts are those that follow from the numbers. DatabaseError: it is not."""
    from fatbench.report.numbers import sql_tables
    from fatbench.store import integrity
    from fatbench.store.rows import counted_text
    from fatbench.store.stages import Store
    from fatbench.suite.asked import contradiction, identity

    rows = integrity.counts(url, identity, settings.files_folder(url), contradiction=contradiction)
    with Store.open(url) as store:
        outdated = sql_tables.outdated(store)
        if outdated and repair:
            sql_tables.judge(store, sorted({cell for cell, _ in outdated}))
            print(f"fatbench: doubts of {counted_text({'evaluations': len(outdated)})} stored anew", file=sys.stderr)
            rows = integrity.counts(url, contents=False)  # the contents were checked above
        elif outdated:
            raise integrity.Damaged(f"{settings.shown_url(url)}: {_outdated(outdated)}")
    result |= {"database": settings.shown_url(url), "intact": True, "rows": rows}
    if format == "text":
        print(integrity.intact(url, rows))


def _outdated(outdated: Mapping[tuple[str, str], tuple[list[str], list[str]]]) -> str:
    """Which evaluations have other doubts than are stored, as one sentence."""
    descriptions = [
        f"{cell} {stage} ({', '.join(stored_doubts) or 'none'}; now {', '.join(computed) or 'none'})"
        for (cell, stage), (stored_doubts, computed) in outdated.items()
    ]
    remainder = f" and {len(descriptions) - 5} more" if len(descriptions) > 5 else ""
    listed = "; ".join(descriptions[:5])
    return f"stored doubts are not those of the numbers: {listed}{remainder} (fatbench check --repair)"


def _learn(name: str, preset: str | None, device: str | None) -> None:
    """Train a plan's first cell round by round and say when it left chance. Exit 1: it did not."""
    from fatbench.report.numbers.doubts import leaves_chance
    from fatbench.report.numbers.statistics import binomial_tail
    from fatbench.runner.executors.local import slots
    from fatbench.runner.learning_check import check_learning

    _, plan = plan_of(name, preset)
    cell = plan.cells[0]
    cell_label = ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"])
    print(f"{plan.suite}, preset {plan.preset}, cell {cell.id}: {cell_label}")
    check = None
    for check in check_learning(plan, settings.data_folder(), slots(device, 1)[0]):
        loss = "" if math.isnan(check.loss) else f"loss {check.loss:.4f}, "
        seen = f"round {check.round} of {check.rounds}, step {check.steps}: {loss}natural"
        line = f"{seen} {100 * check.accuracy:.2f} % of"
        print(f"{line} {check.n}", file=sys.stderr, flush=True)
        chance = binomial_tail(round(check.accuracy * check.n), check.n, check.chance)
        if learned := leaves_chance(chance, check.rounds):
            break
    assert check is not None  # an algorithm has a round
    reached = f"{check.steps} steps of a client (round {check.round} of {check.rounds})"
    result = f"natural accuracy {100 * check.accuracy:.2f} % of {check.n} images, chance {100 * check.chance:.4g} %"
    p = "p < 1e-6" if chance < 1e-6 else f"p = {chance:.2g}"
    print(f"{'above chance' if learned else 'still at chance'} after {reached}: {result}, {p}")
    if not learned:
        raise typer.Exit(1)
