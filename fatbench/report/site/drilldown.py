"""The runs behind a number: the cells of one point of the grid, seed by seed, in words, curves and images."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.report import sentences
from fatbench.report.numbers.sources import Source
from fatbench.report.numbers.stored import OVERALL, numbers_of
from fatbench.report.tables import significance
from fatbench.report.tables.sheet import Sheet
from fatbench.store import replicates
from fatbench.store.selection import PUBLISHED
from fatbench.store.stage_names import parsed
from fatbench.suite import format_call, standard_attacks
from fatbench.suite.model import Key

if TYPE_CHECKING:
    from fatbench.store.stages import StageRow, Store

COUNTED = ("gradient_steps", "forward", "backward", "server_steps", "server_forward", "server_backward")
SENT = ("bytes_up", "bytes_down")
ONCE = {"edge_parameters": "parameters at a client", "edge_flops": "FLOPs of a forward pass at a client"}
COSTS = frozenset({*COUNTED, *SENT, "seconds", "edge_memory", "edge_step_flops", *ONCE})
FIRST = ("monitor", "natural", "val_monitor", "psnr", "train_accuracy", "train_loss")  # of the curves
MOST = 60  # points of a curve
LOG = 30  # lines of a log


@dataclass(frozen=True)
class Curve:
    """A number over the rounds, seed by seed, in a square of 100."""

    heading: str
    rounds: tuple[int, int]  # first, last
    ends: tuple[float, float]  # least, most
    lines: list[tuple[str, str, float]]  # seed, "x,y x,y ...", its last value


@dataclass
class GridPoint:
    """One point of the grid."""

    anchor: str
    suite: str
    preset: str
    title: str
    cells: tuple[str, ...]
    shown: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[tuple[int, str, str]] = field(default_factory=list)  # seed, cell, state
    settings: list[tuple[str, str, str]] = field(default_factory=list)  # what, the call, what it does
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    cost: list[tuple[str, str]] = field(default_factory=list)
    origins: list[tuple[str, str]] = field(default_factory=list)
    runs: list[dict[str, str]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    log: str = ""
    images: list[tuple[str, str]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # further runs of the same cells
    commands: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        """Whether a difference from a published number is shown."""
        return any(entry["difference"] for entry in self.shown)


def points_of(grids: Iterable[Sheet], boards: Iterable[Sheet] = ()) -> dict[tuple[str, ...], GridPoint]:
    """The points behind the numbers of tables and leaderboards, each with the entries that tables show of it."""
    point_by_cells: dict[tuple[str, ...], GridPoint] = {}
    anchors: set[str] = set()  # an anchor may stand once on a page
    for grid, is_table in [*((grid, True) for grid in grids), *((grid, False) for grid in boards)]:
        for row in grid.rows:
            for group, values in zip(grid.groups, row.values, strict=True):
                for column, value in zip(grid.columns, values, strict=True):
                    if not value.cells:
                        continue
                    point = point_by_cells.get(value.cells)
                    if point is None:
                        key = {**row.key, **group.key, **value.labels}
                        anchor = _anchor(value.cells[0], anchors)
                        point = GridPoint(anchor, grid.suite, grid.preset, _title(key), value.cells)
                        point_by_cells[value.cells] = point
                    if not is_table or (value.mean is None and value.published is None):
                        continue
                    point.shown.append(
                        {
                            "table": grid.id,
                            "heading": column.heading,
                            "number": value.number,
                            "spread": value.spread,
                            "rank": value.rank,
                            "marks": significance.marks(value)[len(value.marked) :],  # doubts stand below in full
                            "published": f"formula: {value.paper}" if value.formula else value.paper,
                            "published_at": PUBLISHED.get(value.published_select, "") * bool(value.paper),
                            "published_flag": value.published_flag,
                            "difference": value.delta.replace("-", "\u2212"),
                            "doubts": value.doubts,
                        }
                    )
    return point_by_cells


def _anchor(cell: str, used_anchors: set[str]) -> str:
    anchor_name = f"cell-{cell.replace(replicates.SIGN, '-')}"
    name = next(
        n
        for k in range(1, len(used_anchors) + 2)
        if (n := anchor_name if k == 1 else f"{anchor_name}-{k}") not in used_anchors
    )
    used_anchors.add(name)
    return name


AT_ONCE = 500  # points whose rows of the database are in memory together


def _title(key: Key) -> str:
    return ", ".join(label for label in key.values() if label) or "the only row"


def fill(
    points: Sequence[GridPoint], store: Store, files: Path | None, images: Mapping[str, list[tuple[str, str]]]
) -> None:
    """Fill each point with the facts of its cells in the database.

    files: where the cells' folders are; images: cell -> further images.
    """
    for offset in range(0, len(points), AT_ONCE):
        _fill_batch(points[offset : offset + AT_ONCE], store, files, images)


def _fill_batch(
    points: Sequence[GridPoint], store: Store, files: Path | None, images: Mapping[str, list[tuple[str, str]]]
) -> None:
    ids = list(dict.fromkeys(cell for point in points for cell in point.cells))
    specs = store.cells(ids)
    replicate_ids = replicates.by_cell(store.database, ids)
    stages: dict[str, list[StageRow]] = {}
    for (cell, _), row in sorted(store.stages(ids).items()):
        stages.setdefault(cell, []).append(row)
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in store.runs(ids):
        if not run.get("dropped"):
            runs.setdefault(run["cell"], []).append(run)
    numbers: dict[str, dict[str, dict[str, dict[int, tuple[float, int]]]]] = {}  # cell, stage, metric, round
    for cell, stage, round, _, metric, value, n, *_ in numbers_of(ids, store, OVERALL):
        numbers.setdefault(cell, {}).setdefault(stage, {}).setdefault(metric, {})[round] = value, n
    for point in points:
        stored_cells = [cell for cell in point.cells if cell in specs]
        if not stored_cells:
            continue
        numbers_by_cell = {cell: numbers.get(cell, {}) for cell in stored_cells}
        seeds = {cell: int(specs[cell].get("seed") or 0) for cell in stored_cells}
        point.seeds = [(seeds[cell], cell, _state(stages.get(cell, []))) for cell in stored_cells]
        rows = [row for cell in stored_cells for row in stages.get(cell, [])]
        point.settings = [*format_call.of_cell(specs[stored_cells[0]]), *_attacks(rows)]
        point.evaluations = _evaluations(
            numbers_by_cell, int((specs[stored_cells[0]].get("algorithm") or {}).get("rounds") or 0)
        )
        point.curves = _curves(numbers_by_cell, seeds)
        point.cost = list(_cost(numbers_by_cell))
        point_runs = [run for cell in stored_cells for run in runs.get(cell, [])]
        point.origins = list(_origins(point_runs))
        point.runs = [_run_record(run, seeds[run["cell"]]) for run in point_runs]
        point.errors = [
            (f"{_stage_text(row.stage)}, seed {seeds[cell]}", row.error.strip())
            for cell in stored_cells
            for row in stages.get(cell, [])
            if row.status == "failed" and row.error
        ]
        failed_cells = [cell for cell in stored_cells if any(row.status == "failed" for row in stages.get(cell, []))]
        point.log = next((log for cell in failed_cells if (log := _log(files, cell))), "")
        point.images = [
            image
            for cell in stored_cells
            for image in [*images.get(cell, []), *_artifact_images(files, cell, seeds[cell])]
        ]
        point.others = [
            f"Seed {seeds[cell]} was run {len(replicate_ids[cell])} times: {', '.join(replicate_ids[cell])}."
            for cell in stored_cells
            if cell in replicate_ids
        ]
        point.commands = [f"fatbench show {stored_cells[0]}", f"fatbench show {stored_cells[0]} --log"]
        if point.evaluations:
            point.commands.append(
                f"fatbench show {stored_cells[0]} --outcomes --metric {point.evaluations[-1]['metric']}"
            )
            point.commands.append(sentences.way_back(stored_cells[0]))


# --- in words ----------------------------------------------------------------------------------------------------


def _state(rows: Sequence[StageRow]) -> str:
    """The state of a cell: that of its first stage that is not done."""
    return next((row.status for row in rows if row.status != "done"), "done" if rows else "not run")


def _attacks(rows: Iterable[StageRow]) -> Iterable[tuple[str, str, str]]:
    """(label, attack with all settings, the code that ran it) of each attack, once."""
    listed_labels = set()
    for row in rows:
        label = parsed(row.stage).metric
        if row.settings and label not in listed_labels:
            listed_labels.add(label)
            implementation = row.settings.get("implementation")
            attack = {key: value for key, value in row.settings.items() if key != "implementation"}
            yield label, format_call.with_all_settings(attack), f"run by {implementation}" if implementation else ""


def _evaluations(
    numbers_by_cell: Mapping[str, Mapping[str, Mapping[str, Mapping[int, tuple[float, int]]]]], last_round: int
) -> list[dict[str, Any]]:
    """Each evaluation, seed by seed, the last model first; seeds have other rounds where the best model is chosen."""
    row_by_evaluation: dict[tuple[int, int, str], dict[str, Any]] = {}  # (-round, strength, stage) -> its row
    for cell, cell_numbers in numbers_by_cell.items():
        for stage, metrics in cell_numbers.items():
            label, _, precision, model_round = parsed(stage)
            if stage == "train" or label not in metrics:
                continue
            (value, n), *_ = metrics[label].values()
            strength = standard_attacks.strength(label)
            row = row_by_evaluation.setdefault(
                (-model_round, strength, stage),
                {"metric": _attack_name(label, precision), "round": model_round, "by": {}, "n": n},
            )
            row["by"][cell] = f"{100 * value:.2f}"
    return [
        {
            "metric": row["metric"],
            "round": f"{row['round']}, the last" if row["round"] == last_round else str(row["round"] or ""),
            "n": row["n"],
            "by_seed": [row["by"].get(cell, "") for cell in numbers_by_cell],
        }
        for _, row in sorted(row_by_evaluation.items())
    ]


def _stage_text(stage: str) -> str:
    label, _, precision, model_round = parsed(stage)
    return f"{_attack_name(label, precision)}, model of round {model_round}" if label else stage


def _attack_name(label: str, precision: str) -> str:
    """An attack's name, with its precision where that is not float32."""
    name = standard_attacks.attack_name(label)
    return name if precision == "fp32" else f"{name} in {precision}"


# --- curves ------------------------------------------------------------------------------------------------------


def _curves(numbers_by_cell: Mapping[str, Any], seeds: Mapping[str, int]) -> list[Curve]:
    """The numbers of training over the rounds, at most MOST of each; fractions in per cent."""
    metrics = dict.fromkeys(
        metric
        for cell_numbers in numbers_by_cell.values()
        for metric, by_round in cell_numbers.get("train", {}).items()
        if len(by_round) > 1 and metric not in COSTS and not metric.endswith("_ci")
    )
    curves = []
    for metric in sorted(metrics, key=lambda metric: FIRST.index(metric) if metric in FIRST else len(FIRST)):
        fraction = Source.parse(f"train:{metric}").fraction
        by_seed: dict[str, dict[int, float]] = {}
        for cell, cell_numbers in numbers_by_cell.items():
            by_round = cell_numbers.get("train", {}).get(metric, {})
            finite = {
                round_number: v * (100 if fraction else 1)
                for round_number, (v, _) in by_round.items()
                if math.isfinite(v)
            }
            if finite:
                by_seed[str(seeds[cell])] = {
                    round_number: finite[round_number] for round_number in thinned(sorted(finite))
                }
        if by_seed:
            curves.append(_curve(metric.replace("_", " ") + (" (%)" if fraction else ""), by_seed))
    return curves


def _curve(heading: str, by_seed: Mapping[str, Mapping[int, float]]) -> Curve:
    rounds = sorted({round_number for line in by_seed.values() for round_number in line})
    values = [value for line in by_seed.values() for value in line.values()]
    (first_round, last_round), (lowest, highest) = (rounds[0], rounds[-1]), (min(values), max(values))

    def coordinates(round_number: int, value: float) -> str:
        x = 100 * (round_number - first_round) / (last_round - first_round or 1)
        y = 100 - 100 * (value - lowest) / (highest - lowest or 1)
        return f"{x:.4g},{y:.4g}"

    lines = [
        (s, " ".join(coordinates(*point) for point in line.items()), line[max(line)]) for s, line in by_seed.items()
    ]
    return Curve(heading, (first_round, last_round), (lowest, highest), lines)


def thinned(rounds: Sequence[Any]) -> list[Any]:
    """At most MOST of the rounds, evenly spaced, with the first and the last."""
    if len(rounds) <= MOST:
        return list(rounds)
    return [rounds[round(i * (len(rounds) - 1) / (MOST - 1))] for i in range(MOST)]


# --- cost and provenance -----------------------------------------------------------------------------------------


def _cost(numbers_by_cell: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """(name, text) of each cost: sums over the rounds, their mean over the seeds."""

    def total(metric: str, training: bool) -> float | None:
        sums = [
            math.fsum(value for value, _ in by_round.values())
            for cell_numbers in numbers_by_cell.values()
            for stage, metrics in cell_numbers.items()
            if (stage == "train") is training and (by_round := metrics.get(metric))
        ]
        return math.fsum(sums) / len(numbers_by_cell) if sums else None

    for name, training in (("training", True), ("evaluations", False)):
        if (seconds := total("seconds", training)) is not None:
            yield name, duration(seconds)
    for metric in COUNTED:
        if count := total(metric, True):
            yield metric.replace("_", " ") + (" image passes" if "ward" in metric else ""), si_number(count)
    for metric in SENT:
        if count := total(metric, True):
            yield metric.replace("_", " "), f"{si_number(count)}{'B' if count >= 1000 else ' B'}"
    for metric, description in ONCE.items():
        if count := total(metric, True):
            yield description, si_number(count)


def _origins(runs: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """(name, text) of each fact of some runs: one value where all agree, else all values."""

    def distinct_texts(fact_of: Any) -> str:
        return "; ".join(dict.fromkeys(text for run in runs if (text := fact_of(run))))

    def data(run: Mapping[str, Any]) -> str:
        data_facts = run.get("data")
        if not isinstance(data_facts, Mapping):
            return ""
        variant = f", variant {data_facts['variant']}" if data_facts.get("variant") else ""
        return f"{data_facts['name']}{variant}, SHA-256 {str(data_facts.get('fingerprint'))[:16]}"

    def code(run: Mapping[str, Any]) -> str:
        return f"{run['commit']}{' with uncommitted changes' if run['dirty'] else ''}" if run.get("commit") else ""

    def versions(run: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())

    facts = {
        "machine": lambda run: run.get("device") or "", "precision": lambda run: run.get("precision") or "",
        "commit": code, "data": data, "attack code": lambda run: str(run.get("attack") or ""),
        "packages": versions,
        "plug-ins": lambda run: ", ".join(f"{p['plugin']} {p['sha256'][:12]}" for p in run.get("plugins") or ()),
    }  # fmt: skip
    for fact_name, fact_of in facts.items():
        if fact_text := distinct_texts(fact_of):
            yield fact_name, fact_text


def _run_record(run: Mapping[str, Any], seed: int) -> dict[str, str]:
    return {
        "stage": _stage_text(run["stage"]),
        "seed": str(seed),
        "status": str(run["status"]),
        "started": str(run["started"])[:19].replace("T", " "),
        "took": _run_time(run.get("started"), run.get("ended")),
    }


def _run_time(start_time: str | None, end_time: str | None) -> str:
    if not start_time or not end_time:
        return ""
    begin, end = (datetime.fromisoformat(moment.replace("Z", "+00:00")) for moment in (start_time, end_time))
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
    if files is None:
        return ""
    with suppress(OSError):
        lines = (files / cell / "log.txt").read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        return "\n".join(lines[-LOG:])
    return ""


def _artifact_images(files: Path | None, cell: str, seed: int) -> list[tuple[str, str]]:
    """(caption, data URI) of the tensors that the last round stored, as small images."""
    if files is None or not (files / cell / "artifacts").is_dir():
        return []
    from fatbench.report.figures import artifacts

    for round, file in list(artifacts.rounds(files / cell).items())[-1:]:
        tensors = artifacts.load(file)
        words = "; ".join(artifacts.lines(tensors))
        return [
            (f"Seed {seed}, round {round}: {image.name}. {words}".rstrip(". "), image.uri())
            for image in artifacts.images(tensors, tile=32, brief=True)
        ]
    return []


def uri(file: Path) -> str:
    """An image file as a data URI, for a page that fetches nothing."""
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def images_in(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Cell -> (caption, data URI) of the images in a folder or below, as `show CELL --artifacts` names them."""
    images_by_cell: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(folder.rglob("*-round-*.png")):
        cell, _, round_and_name = file.stem.partition("-round-")
        number, _, name = round_and_name.partition("-")
        if number.isdigit():
            images_by_cell.setdefault(cell, []).append((f"Round {int(number)}: {name.replace('-', ', ')}", uri(file)))
    return images_by_cell
