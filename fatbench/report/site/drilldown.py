"""The runs behind a number: the cells of one point of the grid, seed by seed, with curves and images."""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.report.numbers.sources import Source
from fatbench.report.numbers.stored import OVERALL, Number, numbers_of
from fatbench.report.tables.sheet import Sheet, any_number
from fatbench.store import replicates
from fatbench.store.rows import grouped
from fatbench.store.stage_names import StageName, parsed
from fatbench.suite import format_call, standard_attacks

if TYPE_CHECKING:
    from fatbench.store.stages import StageRow, Store

COST = {  # a number of training, summed over the rounds -> its name, its unit
    "gradient_steps": ("gradient steps", ""),
    "forward": ("forward image passes", ""),
    "backward": ("backward image passes", ""),
    "server_steps": ("server steps", ""),
    "server_forward": ("server forward image passes", ""),
    "server_backward": ("server backward image passes", ""),
    "bytes_up": ("bytes up", "B"),
    "bytes_down": ("bytes down", "B"),
    "edge_parameters": ("parameters at a client", ""),
    "edge_flops": ("FLOPs of a forward pass at a client", ""),
}
UNCURVED = {*COST, "seconds", "edge_memory", "edge_step_flops"}
FIRST = ("monitor", "natural", "val_monitor", "psnr", "train_accuracy", "train_loss")  # of the curves
MOST = 60  # points of a curve
LOG = 30  # lines of a log
AT_ONCE = 500  # points whose rows of the database are in memory together

Point = dict[str, Any]  # what the template shows of a point of the grid, see `points_of` and `filled`
Images = Mapping[str, Sequence[tuple[str, str]]]  # cell -> (caption, data URI)


def points_of(grids: Iterable[Sheet], boards: Iterable[Sheet] = ()) -> dict[tuple[str, ...], Point]:
    """The points behind the numbers of tables and leaderboards, each with the entries that tables show of it."""
    points: dict[tuple[str, ...], Point] = {}
    anchors: set[str] = set()  # an anchor may stand once on a page
    for grid, is_table in [*((grid, True) for grid in grids), *((grid, False) for grid in boards)]:
        groups = [(row, *one) for row in grid.rows for one in zip(grid.groups, row.values, strict=True)]
        for row, group, (column, entry) in (
            (*g[:2], one) for g in groups for one in zip(grid.columns, g[2], strict=True)
        ):
            if entry.cells and entry.cells not in points:
                begin = f"cell-{entry.cells[0].replace(replicates.SIGN, '-')}"
                names = itertools.chain([begin], (f"{begin}-{k}" for k in itertools.count(2)))
                anchors.add(anchor := next(name for name in names if name not in anchors))
                labels = filter(None, {**row.key, **group.key, **entry.labels}.values())
                points[entry.cells] = {
                    "anchor": anchor, "suite": grid.suite, "preset": grid.preset, "cells": entry.cells, "shown": [],
                    "title": ", ".join(labels) or "the only row",
                }  # fmt: skip
            if entry.cells and is_table and any_number(entry):
                points[entry.cells]["shown"].append((grid.id, column.heading, entry))
    return points


def filled(points: Sequence[Point], store: Store, files: Path | None, images: Images) -> list[Point]:
    """The points of which the database has a cell, with what is stored of their cells.

    files: where the cells' folders are; images: further ones.
    """
    found = []
    for offset in range(0, len(points), AT_ONCE):
        ids = list(dict.fromkeys(cell for point in points[offset : offset + AT_ONCE] for cell in point["cells"]))
        specs, others = store.cells(ids), replicates.by_cell(store.database, ids)
        runs = [run for run in store.runs(ids) if not run.get("dropped")]
        stored: list[dict[str, list[Any]]] = [
            grouped((run["cell"], run) for run in runs),
            grouped((row.cell, row) for _, row in sorted(store.stages(ids).items())),
            grouped((number.cell, number) for number in numbers_of(ids, store, OVERALL)),
        ]
        for point in points[offset : offset + AT_ONCE]:
            seeds = {cell: int(specs[cell].get("seed") or 0) for cell in point["cells"] if cell in specs}
            if seeds:
                own = ([one for cell in seeds for one in rows.get(cell, ())] for rows in stored)
                shown = [one for cell in seeds for one in (*images.get(cell, ()), *_kept(files, cell, seeds[cell]))]
                again = [(seeds[cell], others[cell]) for cell in seeds if cell in others]
                facts = _facts(seeds, specs[next(iter(seeds))], *own)
                log = next(filter(None, (_log(files, cell) for cell in facts["failed"])), "")
                found.append(point | facts | {"images": shown, "left_out": False, "others": again, "log": log})
    return found


def _facts(
    seeds: Mapping[str, int], spec: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], stages: Sequence[StageRow],
    numbers: Sequence[Number],
) -> Point:  # fmt: skip
    """What is stored of the cells of a point. seeds: cell -> its seed; spec: of the first."""
    states: dict[str, list[str]] = {cell: [] for cell in seeds}
    attacks: dict[str, tuple[str, str, str]] = {}
    for row in stages:
        states[row.cell].append(row.status)
        if row.settings and (label := parsed(row.stage).metric) not in attacks:
            settings = {key: value for key, value in row.settings.items() if key != "implementation"}
            code = row.settings.get("implementation")
            attacks[label] = label, format_call.with_all_settings(settings), f"run by {code}" * bool(code)
    by_stage: dict[tuple[int, int, str], dict[str, Number]] = {}  # (-round of the model, strength, stage) -> by cell
    for number in numbers:
        name = parsed(number.stage)
        if number.is_accuracy:
            at = -name.round, standard_attacks.strength(name.metric), number.stage
            by_stage.setdefault(at, {}).setdefault(number.cell, number)
    origins: dict[str, dict[str, None]] = {}
    for fact, text in (one for run in runs for one in _origin(run).items()):
        origins.setdefault(fact, {}).update(dict.fromkeys([text] if text else []))
    # the state of a cell is that of its first stage that is not done
    state_of = {
        id: next((one for one in of if one != "done"), "done" if of else "not run") for id, of in states.items()
    }
    return {
        "seeds": [(seed, cell, state_of[cell]) for cell, seed in seeds.items()],
        "settings": [*format_call.of_cell(spec), *attacks.values()],
        "evaluations": [(parsed(stage), by_cell) for (_, _, stage), by_cell in sorted(by_stage.items())],
        "rounds": int((spec.get("algorithm") or {}).get("rounds") or 0),
        "curves": _curves(numbers, seeds),
        "cost": _cost(numbers, len(seeds)),
        "origins": [(fact, "; ".join(texts)) for fact, texts in origins.items() if texts],
        "runs": [(run, seeds[run["cell"]], _took(run)) for run in runs],
        "errors": [(row, seeds[row.cell]) for row in stages if row.status == "failed" and row.error],
        "failed": [cell for cell, of_cell in states.items() if "failed" in of_cell],
    }


def stage_text(stage: str) -> str:
    """A stage in words: "PGD-20, model of round 40"."""
    name = parsed(stage)
    return f"{attack_text(name)}, model of round {name.round}" if name.metric else stage


def attack_text(name: StageName) -> str:
    """The attack of a stage, with its precision where that is not float32."""
    attack = standard_attacks.attack_name(name.metric)
    return attack if name.precision == "fp32" else f"{attack} in {name.precision}"


def _curves(numbers: Iterable[Number], seeds: Mapping[str, int]) -> list[tuple[Any, ...]]:
    """(heading, rounds, values, (seed, "x,y x,y ...", last value) of each seed) of each number of training over the
    rounds, in a square of 100, at most MOST points of a line; fractions in per cent.
    """
    series: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for number in numbers:
        if number.stage == "train" and number.metric not in UNCURVED and not number.metric.endswith("_ci"):
            of_seed = series.setdefault(number.metric, {}).setdefault(seeds[number.cell], [])
            of_seed.append((number.round, number.value))
    curves = []
    for metric in sorted(series, key=lambda metric: FIRST.index(metric) if metric in FIRST else len(FIRST)):
        fraction = Source.parse(f"train:{metric}").fraction
        lines = {seed: [(x, y * (100 if fraction else 1)) for x, y in of_seed if math.isfinite(y)]
                 for seed, of_seed in series[metric].items()}  # fmt: skip
        lines = {seed: thinned(line) for seed, line in lines.items() if line}
        if lines and max(map(len, series[metric].values())) > 1:
            (left, right), (low, high) = (
                (min(ends), max(ends)) for ends in ([one[i] for line in lines.values() for one in line] for i in (0, 1))
            )
            square = {
                seed: " ".join(
                    f"{100 * (x - left) / (right - left or 1):.4g},{100 - 100 * (y - low) / (high - low or 1):.4g}"
                    for x, y in line
                )
                for seed, line in lines.items()
            }
            drawn = [(seed, points, lines[seed][-1][1]) for seed, points in square.items()]
            curves.append((metric.replace("_", " ") + " (%)" * fraction, (left, right), (low, high), drawn))
    return curves


def thinned(rounds: Sequence[Any]) -> list[Any]:
    """At most MOST of the rounds, evenly spaced, with the first and the last."""
    if len(rounds) <= MOST:
        return list(rounds)
    return [rounds[round(i * (len(rounds) - 1) / (MOST - 1))] for i in range(MOST)]


def _cost(numbers: Iterable[Number], cells: int) -> list[tuple[str, str]]:
    """(name, text) of each cost: sums over the rounds, their mean over the seeds."""
    stages = {True: "training", False: "evaluations"}
    values = grouped(((stages[number.stage == "train"], number.metric), number.value) for number in numbers)
    means = {key: math.fsum(of_key) / cells for key, of_key in values.items()}
    cost = [(stage, duration(means[stage, "seconds"])) for stage in ("training", "evaluations")
            if (stage, "seconds") in means]  # fmt: skip
    for metric, (name, unit) in COST.items():
        if count := means.get(("training", metric)):
            cost.append((name, f"{si_number(count)}{' ' * (unit != '' and count < 1000)}{unit}"))
    return cost


def _origin(run: Mapping[str, Any]) -> dict[str, str]:
    """What made a run: its machine, code and data; empty where it does not say."""
    data = run["data"] if isinstance(run.get("data"), Mapping) else {}
    variant = f", variant {data['variant']}" if data.get("variant") else ""
    dirty = " with uncommitted changes" if run.get("dirty") else ""
    return {
        "machine": run.get("device") or "",
        "precision": run.get("precision") or "",
        "commit": f"{run['commit']}{dirty}" if run.get("commit") else "",
        "data": f"{data['name']}{variant}, SHA-256 {str(data.get('fingerprint'))[:16]}" if data else "",
        "attack code": str(run.get("attack") or ""),
        "packages": ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items()),
        "plug-ins": ", ".join(f"{one['plugin']} {one['sha256'][:12]}" for one in run.get("plugins") or ()),
    }


def _took(run: Mapping[str, Any]) -> str:
    if not run.get("started") or not run.get("ended"):
        return ""
    begin, end = (datetime.fromisoformat(run[at].replace("Z", "+00:00")) for at in ("started", "ended"))
    return duration((end - begin).total_seconds())


def duration(seconds: float) -> str:
    """A duration in words: "8.2 s", "12 min", "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def si_number(value: float) -> str:
    """A number with an SI prefix: "1.2 M"."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


# --- what lies in files ------------------------------------------------------------------------------------------


def _log(files: Path | None, cell: str) -> str:
    """The last lines of a cell's log, if it is on this machine."""
    with suppress(OSError):
        if files is not None:
            lines = (files / cell / "log.txt").read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
            return "\n".join(lines[-LOG:])
    return ""


def _kept(files: Path | None, cell: str, seed: int) -> list[tuple[str, str]]:
    """(caption, data URI) of the tensors that the last round stored, as small images."""
    if files is None or not (files / cell / "artifacts").is_dir():
        return []
    from fatbench.report.figures import artifacts, plots

    for round, file in list(artifacts.rounds(files / cell).items())[-1:]:
        tensors = artifacts.load(file)
        words = "; ".join(artifacts.lines(tensors))
        drawn = plots.pictures(tensors, tile=32, brief=True)
        return [(f"Seed {seed}, round {round}: {name}. {words}".rstrip(". "), uri(image)) for name, image in drawn]
    return []


def uri(image: bytes) -> str:
    """An image as a data URI, for a page that fetches nothing."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def images_in(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Cell -> (caption, data URI) of the images in a folder or below, as `show CELL --artifacts` names them."""
    images_by_cell: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(folder.rglob("*-round-*.png")):
        cell, _, round_and_name = file.stem.partition("-round-")
        number, _, name = round_and_name.partition("-")
        if number.isdigit():
            caption = f"Round {int(number)}: {name.replace('-', ', ')}"
            images_by_cell.setdefault(cell, []).append((caption, uri(file.read_bytes())))
    return images_by_cell
