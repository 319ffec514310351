"""Measure how fast this machine is on kinds of cells that it has not run yet, by running short cells for some seconds.

They run as any cell does, in a temporary process and with a temporary database.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError
from fatbench.runner import start
from fatbench.runner.executors.local import gpu_count
from fatbench.runner.jobs import Job, Machine
from fatbench.runner.worker import attempt
from fatbench.store import timing
from fatbench.store.stages import Store
from fatbench.suite import cost, duration, facts, signatures, weights
from fatbench.suite.cells import Cell, Plan, digest
from fatbench.suite.types import number

ROUNDS = 2  # the first is not counted: it warms up
STOPPING_EARLY = ("autoattack",)  # skips images that it has broken, so an untrained model says nothing about its time
# (batches of a client, images attacked): one pass over all kinds of cells for each pair, for as long as there is time.
# Start-up costs count less in the longer passes, and each measurement is weighted by its work.
SIZES = ((1, 32), (4, 128), (16, 512))


def samples(cells: Iterable[Cell], speeds: duration.Speeds) -> list[Cell]:
    """One cell of each kind whose speed is not known, the kinds with the most work first."""
    works: dict[tuple[str, ...], float] = {}
    cell_by_kind: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        net, kind = duration.network(cell.spec), duration.kind(cell.spec)
        attacks = {digest(one.attack) for one in cell.evaluations if one.attack["name"] not in STOPPING_EARLY}
        untimed_attacks = tuple(sorted(attack for attack in attacks if (net, attack) not in speeds.attacks))
        if kind in speeds.training and not untimed_attacks:
            continue
        work = cost.training(cell.spec)
        cell_by_kind.setdefault((kind, *untimed_attacks), cell)
        works[kind, *untimed_attacks] = works.get((kind, *untimed_attacks), 0.0) + (
            0.0 if work is None else work.image_passes
        )
    return [cell_by_kind[key] for key in sorted(works, key=works.__getitem__, reverse=True)]


def job(cell: Cell, plan: Plan, data: Path, size: tuple[int, int] = SIZES[0]) -> Job:
    """Shorten a cell to two rounds, `size` = (batches for each client, images attacked).

    It gets more batches if its partition cannot be dealt with so few. MachineError: its data set is not here.
    """
    for batches in (size[0], 4, 16, 64):
        short_job = _shorten(cell, plan, batches, size[1])
        try:
            start.check_data([short_job], data)
        except SpecError:  # too few images for this partition
            continue
        return short_job
    return short_job


def _shorten(cell: Cell, plan: Plan, batches: int, images: int) -> Job:
    spec: dict[str, Any] = {**cell.spec, "algorithm": {**cell.spec["algorithm"], "rounds": ROUNDS}, "monitor": None}
    clients, batch = spec["partition"].get("clients") or 1, cost.local(spec["algorithm"]).get("batch") or 1
    available = spec["train"] or facts.of_data(spec["data"]).train or 10**9
    if weights.trained_by(spec) is not None:
        spec["model"] = weights.changed(spec["model"], lambda _: None)  # they do not change the time
    spec["validation"] = min(spec["validation"], SIZES[0][1])
    fraction = 1 - float(number(spec["client_holdout"]))
    spec["train"] = min(available, int(batches * clients * batch / fraction) + 1 + spec["validation"])
    spec["test"] = min(spec["test"] or images, images)
    timed = [one for one in cell.evaluations if one.attack["name"] not in STOPPING_EARLY]
    evaluations = [replace(one, n=min(one.n or images, images)) for one in timed]
    return Job(digest(spec)[:12], spec, evaluations, ["last"], plan.suite, plan.preset)


def measure_speeds(plan: Plan, speeds: duration.Speeds, data: Path, seconds: float) -> list[timing.TimedRun]:
    """Time short versions of the plan's cells for about so many seconds, not counting the import of torch."""
    cells = samples(plan.unique(), speeds)
    short_jobs = [job(cell, plan, data, size) for size in SIZES for cell in cells]
    jobs = list({short_job.cell: short_job for short_job in short_jobs}.values())
    if not jobs:
        return []
    with tempfile.TemporaryDirectory(prefix="fatbench-") as folder:
        device = "cuda:0" if gpu_count() else "cpu"
        machine = Machine(
            db=str(Path(folder) / "speed.db"), files=folder, data=str(data.absolute()), device=device,
            precision="auto", attack_precision="fp32", path="auto",
            plugins=signatures.of_plugins(),
        )  # fmt: skip
        with Store.open(machine.db, create=True):
            pass
        context = multiprocessing.get_context("spawn")
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_measure, args=(jobs, machine, child_end), daemon=True)
        process.start()
        child_end.close()
        if parent_end.poll(120):  # sent once torch is imported
            process.join(seconds)
        if process.is_alive():
            process.kill()
        process.join()
        with Store.open(machine.db) as store:
            return timing.timed_runs(store, after_round=ROUNDS - 1)


def _measure(jobs: Sequence[Job], machine: Machine, pipe: Any) -> None:
    import fatbench.engine.accuracy
    import fatbench.engine.experiment
    import fatbench.methods.algorithms  # noqa: F401

    pipe.send(time.time())
    for short_job in jobs:
        attempt(short_job, machine, lambda event: None, lambda: False)
