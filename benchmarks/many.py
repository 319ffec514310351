"""Many cells: suites that the benchmark writes for itself, runs of them, and a database filled without training."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from sqlalchemy import insert

from benchmarks.measure import Bench, fatbench, program
from fatbench.store.numbers import append
from fatbench.store.rows import current_time
from fatbench.store.schema import RUNS, STAGES
from fatbench.store.stages import Store
from fatbench.suite import files

SUITE = """\
name: {name}
title: Cells of the benchmark
seeds: "0-{last}"
base:
  data: {{name: digits}}
  partition: {{name: iid, clients: 4}}
  model: {{name: small_cnn, width: 8}}
  train: {train}
  test: 100
  algorithm:
    name: fedavg
    rounds: {rounds}
    local:
      batch: 32
      lr: 0.01
      momentum: 0.9
      objective: {{name: at, attack: {{name: pgd, eps: 8/255, step: 2/255, steps: 10}}}}
    aggregator: {{name: samples}}
axes:
{axes}
evaluate:
  checkpoints: [last]
  attacks:
    natural: {{name: natural}}
    pgd20: {{name: pgd, eps: 8/255, step: 2/255, steps: 20}}
presets: {{paper: {{}}, quick: {{}}, smoke: {{}}}}
tables:
  - id: T
    title: The benchmark's table
    rows: [{rows}]
    values: {{natural: natural, PGD-20: pgd20}}
"""
METHODS = """\
  method:
    FAT: {}
    SFAT: {algorithm: {aggregator: {name: sfat, alpha: 1/6, top: 1}}}
    Re-SFAT: {algorithm: {aggregator: {name: resfat_deemph, r: 0.8, top: 1}}}
"""


def table_suite(file: Path, seeds: int, *, rounds: int = 4, train: int = 500) -> Path:
    """The suite of FAT, SFAT and Re-SFAT on digits, written to `file`."""
    text = SUITE.format(name=file.stem, last=seeds - 1, train=train, rounds=rounds, axes=METHODS, rows="method")
    file.write_text(text, encoding="utf-8")
    return file


def run(bench: Bench, file: Path, jobs: int, *how: str) -> None:
    """All cells of a suite from nothing, as a person runs them; `how`: further options."""
    db = bench.folder / "run.db"
    for old in bench.folder.glob("run*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    where = ["-c", f"run.per_gpu={jobs}"] if bench.gpu else ["--jobs", str(jobs)]
    program(fatbench("run", "suite", str(file), "--db", str(db), "--device", bench.device.type, *where, *how))


def largest() -> str:
    """The suite with the most cells."""
    return max(files.available(), key=lambda name: len(files.load(name).plan("paper").unique()))


def database(folder: Path, rates: int, splits: int, seeds: int) -> tuple[Path, str]:
    """(a suite of rates * splits * seeds cells, a database in which all of them are done), with numbers made up."""
    cells = rates * splits * seeds
    file = folder / f"bench-{cells}.yaml"
    rate = "\n".join(
        f"    '{0.001 * i:.3f}': {{algorithm: {{local: {{lr: {0.001 * i:.3f}}}}}}}" for i in range(1, rates + 1)
    )
    clients = "\n".join(f"    '{k}': {{partition: {{clients: {k}}}}}" for k in range(2, 2 + splits))
    axes = f"  lr:\n{rate}\n  clients:\n{clients}\n"
    text = SUITE.format(
        name=file.stem, last=seeds - 1, train=1000, rounds=2, axes=axes, rows="lr]\n    across: [clients"
    )
    file.write_text(text, encoding="utf-8")
    db = folder / f"bench-{cells}.db"
    plan = files.load(str(file)).plan("paper").unique()
    moment, number = current_time(), itertools.count(1)
    runs, stages = [], []
    numbers: dict[tuple[str, str, int, str, int, str], list[tuple[int, float, int]]] = {}
    for cell in plan:
        measured = {"train": ["train_loss", "train_accuracy", "drift_post"]}
        measured |= {evaluation.stage(2): [evaluation.label] for evaluation in cell.evaluations}
        for stage, metrics in measured.items():
            id = next(number)
            runs.append({
                "id": id, "uid": f"{id:032x}", "cell": cell.id, "stage": stage, "suite": file.stem, "preset": "paper",
                "status": "done", "started": moment, "ended": moment, "host": "bench", "device": "cpu",
                "precision": "fp32", "commit": "0" * 40, "dirty": False, "versions": "{}", "extra": "{}",
            })  # fmt: skip
            record = '{"last":{"round":2,"value":null}}' if stage == "train" else "{}"
            stages.append({
                "cell": cell.id, "stage": stage, "status": "done", "round": 2, "total": 2, "record": record, "run": id,
                "heartbeat": moment,
            })  # fmt: skip
            rounds = (1, 2) if stage == "train" else (2,)
            numbers |= {
                (cell.id, stage, round, metric, id, moment): [(-1, 0.5, 100)] for metric in metrics for round in rounds
            }
    with Store.open(str(db), create=True) as store:
        store.add_cells({cell.id: cell.spec for cell in plan})
        with store.database.writing() as connection:
            for table, rows in ((RUNS, runs), (STAGES, stages)):
                connection.execute(insert(table), rows)
            append(connection, numbers)
    return file, str(db)
