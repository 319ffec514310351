"""Many cells: a database of 100,000 cells and 10 million numbers, and what the commands cost on it.

    python tests/scale.py --folder build/scale        `make scale`; builds the database once, then measures
    python tests/scale.py --seeds 1 --times 1         a tenth of it

A cell of a suite of 10,000 is trained and attacked by the store's own methods, with the numbers of a small run; its
rows are then copied, under new names, for every cell and each of ten seeds. Of each command the least CPU time (user
and system) of a few runs is printed, with the most memory. Models and logs are not there: nothing is trained.
The program has its bytecode, as one that was installed has: without it, a command takes 0.1 s more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fatbench.store import cell_records, document, problems
from fatbench.store.rows import cell_row
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.cells import Cell

SUITE = """
name: many
title: Ten thousand cells
seeds: [0]
base:
  data: digits
  train: 600
  test: 100
  partition: {name: shah, clients: 5, skew: 2}
  model: {name: small_cnn}
  algorithm:
    name: fedavg
    rounds: 4
    local:
      {epochs: 1, batch: 16, lr: 0.05, objective: {name: at, attack: {name: pgd, eps: 8/255, step: 4/255, steps: 1}}}
    aggregator: samples
  monitor: natural
axes:
AXES
evaluate:
  checkpoints: [last]
  attacks:
    natural: natural
    fgsm: {name: fgsm, eps: 8/255}
    pgd20: {name: pgd, eps: 8/255, step: 2/255, steps: 20}
presets:
  paper: {}
  thousand: {axes: {train: [a0]}}
  first: {axes: {train: [a0], steps: [a0], eps: [a0], lr: [a0]}}
tables:
  - {id: A, title: Many, rows: [lr, eps, steps], across: [train], values: {natural: natural, FGSM: fgsm, PGD-20: pgd20}}
"""
AXES = {  # a label is laid on the cell; i from 1
    "train": "{{train: {i}00}}",
    "lr": "{{algorithm: {{local: {{lr: 0.{i:02}}}}}}}",
    "eps": "{{algorithm: {{local: {{objective: {{attack: {{eps: {i}/255}}}}}}}}}}",
    "steps": "{{algorithm: {{local: {{objective: {{attack: {{steps: {i}}}}}}}}}}}",
}
CREATED = "2026-01-01T00:00:00.000Z"
ROUNDS, CLIENTS, IMAGES = 4, 5, 100
HALF = (((1 << 50) - 1) << 54).to_bytes(13, "big")  # outcomes: half of the 100 images are right
OVERALL = ("train_loss", "train_accuracy", "forward", "backward", "seconds", "gradient_steps", "bytes_up", "monitor")
OF_CLIENTS = ("train_loss", "train_accuracy", "weight")


class Number(NamedTuple):
    """What the store asks of a number."""

    metric: str
    value: float
    round: int
    n: int = 0
    client: int = -1


def written(folder: Path) -> Path:
    """The suite's file: a grid of four axes of ten."""
    labels = (
        f"  {axis}:\n" + "\n".join(f"    a{i}: {patch.format(i=i + 1)}" for i in range(10))
        for axis, patch in AXES.items()
    )
    file = folder / "many.yaml"
    file.write_text(SUITE.replace("AXES", "\n".join(labels)))
    return file


def build(folder: Path, seeds: int) -> tuple[Path, Path]:
    """The suite and its database of so many seeds, made unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    suite, file = written(folder), folder / f"many{seeds}.db"
    if file.exists():
        return suite, file
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    plan = files.load(str(suite)).plan(seeds=range(seeds))
    first, others = plan.cells[0], plan.cells[1:]
    provenance = {"preset": "paper", "device": "cpu", "precision": "fp32", "commit": "0" * 40, "dirty": False,
                  "versions": {"torch": "2"}}  # fmt: skip
    with Store.open(str(part), create=True) as store:
        store.add_cell(first.id, first.spec)
        run = store.claim(first.id, "train", suite="many", total=ROUNDS, provenance=provenance)
        for round in range(1, ROUNDS + 1):
            numbers = [Number(m, 1.0 / round, round) for m in OVERALL if m != "monitor"]
            numbers.append(Number("monitor", round / IMAGES, round, IMAGES))
            numbers += [Number(m, 1.0 / round, round, 60, k) for m in OF_CLIENTS for k in range(CLIENTS)]
            store.commit(run, numbers=numbers, round=round)
        store.finish(run, round=ROUNDS)
        for one in first.evaluations:
            stage = one.stage(ROUNDS)
            run = store.claim(first.id, stage, suite="many", total=IMAGES, provenance=provenance, settings=one.attack)
            store.commit(run, round=IMAGES, outcomes=(0, IMAGES, HALF))
            numbers = [Number(one.label, 0.5, ROUNDS, IMAGES)]
            numbers += [Number(metric, 1.0, ROUNDS) for metric in ("forward", "seconds")]
            store.finish(run, numbers, round=IMAGES)
        cells = [cell_row(cell.id, cell.spec, CREATED) for cell in others]
    with sqlite3.connect(part) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executemany("INSERT INTO cells VALUES (:id, :spec, :seed, :created)", cells)
        new = f"(SELECT id FROM cells WHERE id != '{first.id}' ORDER BY id) c"
        _copied(connection, "runs", new, {"id": None, "uid": "lower(hex(randomblob(16)))", "cell": "c.id"})
        here = "(SELECT r.id FROM runs r WHERE r.cell = c.id AND r.stage = t.stage)"
        for table in ("stages", "round_metrics", "outcome_chunks"):
            other = {"cell": "c.id", "run": here, "digest": "NULL", "id": None}
            _copied(connection, table, new, other)
        connection.execute(
            "INSERT INTO numbers SELECT m.id, n.client, n.value, n.n FROM round_metrics m JOIN round_metrics f"
            f" ON f.cell = '{first.id}' AND f.stage = m.stage AND f.round = m.round AND f.metric = m.metric"
            " JOIN numbers n ON n.round_metric = f.id WHERE m.cell != f.cell ORDER BY m.id"
        )
    connection.close()
    with Store.open(str(part)) as store:
        line = _document(store, first.id)
    with sqlite3.connect(part) as connection:
        uids: dict[str, dict[str, str]] = defaultdict(dict)
        for cell_id, stage, uid in connection.execute("SELECT cell, stage, uid FROM runs"):
            uids[cell_id][stage] = uid
        digests = (row for cell in others for row in _digests(line, cell, uids[cell.id]))
        connection.executemany("UPDATE stages SET digest = ? WHERE cell = ? AND stage = ?", digests)
    connection.close()
    with Store.open(str(part)) as store:
        damage = [
            one
            for one in store.ids_beginning_with(others[-1].id[:2], 5)
            if any(problems.problems(_document(store, one)))
        ]
        assert not damage, damage
    part.rename(file)
    return suite, file


def _digests(line: document.Cell, cell: Cell, uids: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(digest, cell, stage) of a copy of a cell with that document; `uids` of its runs, by stage."""
    runs = [run.model_copy(update={"uid": uids[run.stage]}) for run in line.runs]
    copy = line.model_copy(update={"spec": cell.spec, "created": CREATED, "runs": runs})
    for stage in line.stages:
        yield document.digest(copy, stage), cell.id, stage.stage


def _document(store: Store, cell: str) -> document.Cell:
    with store.database.reading() as connection:
        (line,) = cell_records.read(connection, [cell])
    return line


def _copied(connection: sqlite3.Connection, table: str, new: str, other: dict[str, str | None]) -> None:
    """Copy the rows of the first cell for the `new` ones; `other` says what is in some columns, None: let it out."""
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    kept = [column for column in columns if other.get(column, "") is not None]
    values = ", ".join(other.get(column) or f't."{column}"' for column in kept)
    names = ", ".join(f'"{column}"' for column in kept)
    connection.execute("CREATE TEMP TABLE first AS SELECT * FROM " + table)
    connection.execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM {new} CROSS JOIN first t")
    connection.execute("DROP TABLE first")


# --- commands ----------------------------------------------------------------------------------------------------


INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class TooLong(Exception):
    """A program was ended that took more CPU time than it may."""


def cost(command: Sequence[str], folder: Path, most: int) -> tuple[float, float]:
    """CPU seconds and megabytes of a program that ends well. TooLong: it takes more than `most` CPU seconds."""
    own = ["prlimit", f"--cpu={most}", sys.executable, "-m", "fatbench", *command]
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(own, stdout=out, cwd=folder, env=INSTALLED)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TooLong
    assert process.returncode == 0, command
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def commands(suite: Path, db: Path, seeds: int) -> dict[str, list[str]]:
    """What is measured: in words -> its arguments."""
    compared = max(seeds - 1, 1)
    with Store.open(str(db)) as store:
        cell = store.ids_beginning_with("8", 1)[0]
    log = db.with_name(f"{db.stem}-files") / cell / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("09:41:02 round 1\n" * 20_000)  # of a training of days
    here = ["--db", str(db)]
    one = ["--preset", "first"]
    return {
        "list suites": ["list", "suites"],
        "status": ["status", *here],
        "status, 10 cells": ["status", str(suite), *one, *here],
        "status, 10,000 cells": ["status", str(suite), "--preset", "paper", *here],
        "plan, 1,000 cells": ["plan", "suite", str(suite), "--preset", "thousand", *here],
        "plan, 10,000 cells": ["plan", "suite", str(suite), *here],
        "plan, 10,000 cells, no database": ["plan", "suite", str(suite), "--db", "none.db"],
        "show CELL": ["show", cell, *here],
        "show CELL --log": ["show", "--log", cell, *here],
        "report, 10 cells": ["report", str(suite), *one, *here],
        "report, 1,000 cells": ["report", str(suite), "--preset", "thousand", *here],
        f"compare, 2 x {50 * compared} cells": [
            "compare", "lr=a0", "lr=a1", "--suite", str(suite), "--preset", "thousand",
            "-k", "eps=a0 or eps=a1 or eps=a2 or eps=a3 or eps=a4", *here,
        ],
        "site": ["site", str(suite), "-o", "site", *here],
        "export": ["export", "-o", "out.jsonl", *here],
    }  # fmt: skip


def first_cell(suite: Path, folder: Path) -> tuple[float, float]:
    """Seconds from the start of `run` of 10,000 cells until the first is claimed, and CPU seconds until then."""
    db = folder / "run.db"
    for file in folder.glob("run.db*"):
        file.unlink()
    shutil.rmtree(folder / "run-files", ignore_errors=True)  # of the database that was here before
    began = time.monotonic()
    command = [sys.executable, "-m", "fatbench", "run", "suite", str(suite), "--jobs", "1", "--db", str(db)]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, cwd=folder, env=INSTALLED)
    try:
        while not _claimed(db):
            assert process.poll() is None
            time.sleep(0.02)
        ticks = sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return time.monotonic() - began, ticks / os.sysconf("SC_CLK_TCK")
    finally:
        process.terminate()
        process.wait()


def _claimed(db: Path) -> bool:
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT 1 FROM runs LIMIT 1").fetchone() is not None
    except sqlite3.Error:
        return False


# --- many writers ------------------------------------------------------------------------------------------------


def commits(url: str, processes: int, seconds: float = 15.0) -> list[float]:
    """Seconds of every commit of so many processes, each of which commits a round about once a second."""
    cells = [f"{processes:06d}{i:06d}" for i in range(processes)]
    with Store.open(url, create=True) as store:
        store.add_cells({cell: {"seed": 0} for cell in cells})
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        every = pool.starmap(_commit, [(url, cell, seconds) for cell in cells], chunksize=1)
    return sorted(itertools.chain.from_iterable(every))


def _commit(url: str, cell: str, seconds: float) -> list[float]:
    """How long a claim took, and each round's commit."""
    draw, took = random.Random(cell), list[float]()
    with Store.open(url) as store:
        store.database.patience = math.inf
        began = time.monotonic()
        run = store.claim(cell, "train", suite="many", total=10**6, provenance={})
        took.append(time.monotonic() - began)
        for round in itertools.takewhile(lambda _: time.monotonic() < began + seconds, itertools.count(1)):
            time.sleep(0.5 + draw.random())
            numbers = [Number(metric, 1.0 / round, round) for metric in OVERALL]
            numbers += [Number(m, 1.0 / round, round, 60, k) for m in OF_CLIENTS for k in range(CLIENTS)]
            before = time.monotonic()
            store.commit(run, numbers=numbers, round=round)
            took.append(time.monotonic() - before)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/scale"))
    parser.add_argument("--seeds", type=int, default=10, help="of each of 10,000 cells: 10 are 100,000 cells")
    parser.add_argument("--times", type=int, default=5, help="runs of each command")
    parser.add_argument("--most", type=int, default=600, help="CPU seconds, after which a command is ended")
    parser.add_argument("--only", default="", help="commands that begin so")
    parser.add_argument("--commits", metavar="URL", help="measure commits to an empty database at this address instead")
    parser.add_argument("--processes", type=int, default=1, help="of --commits")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    if asked.commits:
        took = commits(asked.commits, asked.processes)
        said = f"median {took[len(took) // 2]:.2f} s, slowest {took[-1]:.2f} s"
        print(f"{asked.processes} processes, {len(took)} commits: {said}")
        return
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # what it needs is not what a command needs
        suite, db = pool.apply(build, (folder, asked.seeds))
    print("| command | CPU seconds | MB |\n|---|---|---|")
    for what, arguments in commands(suite, db, asked.seeds).items():
        if not what.startswith(asked.only):
            continue
        runs: list[tuple[float, float]] = []
        with contextlib.suppress(TooLong):
            while len(runs) < asked.times and sum(seconds for seconds, _ in runs) < asked.most / 10:
                runs.append(cost(arguments, folder, asked.most))
        said = f"{min(runs)[0]:.2f} | {max(mb for _, mb in runs):.0f}" if runs else f"more than {asked.most} |"
        print(f"| `{what}` | {said} |", flush=True)
    if "first cell".startswith(asked.only):
        runs = [first_cell(suite, folder) for _ in range(asked.times)]
        seconds, used = min(runs)
        print(f"the first of 10,000 cells starts after {seconds:.2f} s, {used:.2f} s of CPU in the process that plans")


if __name__ == "__main__":
    main()
