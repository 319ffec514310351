"""How fast this machine is, measured where nothing is known: cells of a plan, cut to a moment's work, for some seconds.

They run as any cell does, in a temporary process and database.
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
from fatbench.runner.executors import attempt
from fatbench.runner.executors.local import gpu_count
from fatbench.runner.jobs import Job, Machine
from fatbench.store import timing
from fatbench.store.stages import Store
from fatbench.suite import cost, duration, facts, signatures, weights
from fatbench.suite.cells import Cell, Plan, digest
from fatbench.suite.types import number

ROUNDS = 2  # the first is not counted: it warms up
EARLY = ("autoattack",)  # stop at images that fall, so their time on an untrained model is meaningless
# (batches of a client, images attacked) of one pass over the kinds after another, for as long as there is time: what a
# client or an attack begins with counts less in a long one, and each measurement counts by its work
SIZES = ((1, 32), (4, 128), (16, 512))


def samples(cells: Iterable[Cell], speeds: duration.Speeds) -> list[Cell]:
    """A cell of each kind that nothing is known of, the kinds with the most work first."""
    works: dict[tuple[str, ...], float] = {}
    cell_by_kind: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        net, kind = duration.network(cell.spec), duration.kind(cell.spec)
        attacks = {
            digest(attack_digest.attack)
            for attack_digest in cell.evaluations
            if attack_digest.attack["name"] not in EARLY
        }
        untimed_attacks = tuple(
            sorted(attack_digest for attack_digest in attacks if (net, attack_digest) not in speeds.attacks)
        )
        if kind in speeds.training and not untimed_attacks:
            continue
        work = cost.training(cell.spec)
        cell_by_kind.setdefault((kind, *untimed_attacks), cell)
        works[kind, *untimed_attacks] = works.get((kind, *untimed_attacks), 0.0) + (
            0.0 if work is None else work.image_passes
        )
    return [cell_by_kind[key] for key in sorted(works, key=works.__getitem__, reverse=True)]


def job(cell: Cell, plan: Plan, data: Path, size: tuple[int, int] = SIZES[0]) -> Job:
    """The cell with so many batches for each client in two rounds, or more if its partition needs them, and few images.

    MachineError: its data set is not here.
    """
    for batches in (size[0], 4, 16, 64):
        cut = _cut(cell, plan, batches, size[1])
        try:
            start.check_data([cut], data)
        except SpecError:  # too few to deal out
            continue
        return cut
    return cut


def _cut(cell: Cell, plan: Plan, batches: int, images: int) -> Job:
    spec: dict[str, Any] = {**cell.spec, "algorithm": {**cell.spec["algorithm"], "rounds": ROUNDS}, "monitor": None}
    clients, batch = spec["partition"].get("clients") or 1, cost.local(spec["algorithm"]).get("batch") or 1
    available = spec["train"] or facts.of_data(spec["data"]).train or 10**9
    if weights.trained_by(spec) is not None:
        spec["model"] = {**spec["model"], "weights": None}  # they change no time
    spec["validation"] = min(spec["validation"], SIZES[0][1])
    fraction = 1 - float(number(spec["client_holdout"]))
    spec["train"] = min(available, int(batches * clients * batch / fraction) + 1 + spec["validation"])
    spec["test"] = min(spec["test"] or images, images)
    evaluations = [
        replace(evaluation, n=min(evaluation.n or images, images))
        for evaluation in cell.evaluations
        if evaluation.attack["name"] not in EARLY
    ]
    return Job(digest(spec)[:12], spec, evaluations, ["last"], plan.suite, plan.preset)


def calibrated(plan: Plan, speeds: duration.Speeds, data: Path, seconds: float) -> list[timing.TimedRun]:
    """What could be timed of the plan's cells in about so many seconds, once torch is imported."""
    cells = samples(plan.unique(), speeds)
    jobs = list(
        {
            short_job.cell: short_job for size in SIZES for cell in cells for short_job in [job(cell, plan, data, size)]
        }.values()
    )
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
        if parent_end.poll(120):  # torch is imported
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
