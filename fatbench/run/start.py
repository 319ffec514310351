"""`fatbench run`: from a plan to finished cells. What can be wrong is found before the first worker starts."""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fatbench import settings
from fatbench.engine.splits import split
from fatbench.errors import MachineError, NothingMatched, SpecError, did_you_mean
from fatbench.run import progress, versions
from fatbench.run.worker import Event, Job, Machine
from fatbench.store.database import NoDatabase
from fatbench.store.stages import Store
from fatbench.suite import signatures, weights
from fatbench.suite.cells import Plan, digest
from fatbench.suite.types import number

EXECUTORS = ("local", "ray", "slurm")
PATHS = ("reference", "loop", "fast")


def jobs_of(plan: Plan) -> list[Job]:
    """A plan's cells as jobs, each once."""
    return [
        Job(
            cell.id,
            cell.spec,
            list(cell.evaluations),
            plan.checkpoints,
            plan.suite,
            plan.preset,
            ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"]),
        )
        for cell in plan.unique()
    ]


class Watch(Protocol):
    """Who is told how a run goes on: `fatbench.cli.watch` shows it to a person."""

    what: str  # the run in words: "suite sfat-cifar10, preset quick"

    def begin(self, jobs: Sequence[Job], before: Mapping[str, str], lanes: Sequence[str]) -> None:
        """The run starts. before: cell -> its state until now; lanes: a name for each place a cell is worked on."""

    def see(self, lane: int, event: Event) -> None:
        """A worker says something."""

    def summary(
        self,
        cells: int,
        failed: Sequence[str],
        interrupted: Sequence[str],
        elsewhere: Sequence[str],
        changed: versions.Changed,
    ) -> None:
        """The run is over: how many cells it had, and which of them did not end as they should."""


def run(
    jobs: Sequence[Job],
    watch: Watch,
    *,
    jobs_at_once: int | None = None,
    device: str | None = None,
    per_gpu: int = 1,
    executor: str = "local",
    precision: str | None = None,
    path: str = "loop",
    microbatch: int | None = None,
    together: int = 1,
    retry_failed: bool = False,
    rerun_changed: bool = False,
    fail_fast: bool = False,
    dry_run: bool = False,
    db: str | None = None,
    data: Path | None = None,
) -> None:
    """Run jobs; returns when all is done, else raises SystemExit with the documented code."""
    if getattr(
        multiprocessing.current_process(), "_inheriting", False
    ):  # a worker that imports the script of its parent
        raise SystemExit(f"fatbench: {Path(sys.argv[0]).name}: run suites below `if __name__ == '__main__':`")
    if executor not in EXECUTORS:
        raise SpecError(f"--executor: no executor is named '{executor}'{did_you_mean(executor, EXECUTORS)}")
    settings.precision(precision)
    if path not in PATHS:
        raise SpecError(f"--path: expected {', '.join(PATHS)}, got '{path}'{did_you_mean(path, PATHS)}")
    if path == "fast" and microbatch is not None:
        raise SpecError(f"--path fast and --microbatch {microbatch} contradict each other: more and less at once")
    if together > 1 and path != "fast":
        raise SpecError(f"--together {together} trains cells in one program: it needs --path fast, not {path}")
    if together > 1 and executor != "local":
        raise SpecError(
            f"--together {together}: {executor} gives every cell a process of its own; use --executor local"
        )
    url = settings.database(db)
    root = settings.data_folder(str(data) if data else None)
    if dry_run:
        _say_what_would_run(jobs, url, watch.what, rerun_changed)
        return
    chosen: Any = importlib.import_module(f"fatbench.run.executors.{executor}")
    lanes = chosen.lanes(device, jobs_at_once, per_gpu, url)
    settings.precision(precision, lanes)
    check_data(jobs, root)
    with Store.open(url, create=True) as store:
        before = progress.of_jobs(jobs, store)
        changed = {} if rerun_changed else versions.changed(jobs, store)
        address = str(store.database.path or url)
    machine = Machine(  # a worker may have another working directory
        db=address,
        files=str(settings.files_folder(url).absolute()),
        data=str(root.absolute()),
        precision=settings.precision(precision, lanes),
        path=path,  # type: ignore[arg-type]
        microbatch=microbatch,
        retry_failed=retry_failed,
        rerun_changed=rerun_changed,
        checkpoint_seconds=settings.checkpoint_seconds(),
        plugins=tuple(str(file) for file in signatures.plugins()),
    )
    keep = {"done", *(() if retry_failed else ("failed",)), *(() if rerun_changed else (progress.CHANGED,))}
    left = [job for job in jobs if before[job.cell] not in keep]
    failed = [job.cell for job in jobs if before[job.cell] == "failed" and job not in left]
    wish = _Wish()
    lanes, machine = _shared(lanes[: len(left)], len(left), together, machine)
    watch.begin(jobs, before, lanes if executor == "local" else [executor] * len(lanes))
    outcomes = {}
    if left:
        with wish:
            outcomes = chosen.run(left, machine, lanes, watch.see, wish.ask, fail_fast=fail_fast)
            # attacks on models of other cells: those of this run are trained by now
            again = [job for job in left if outcomes[job.cell] == "waiting"]
            if again and not wish.ask() and not (fail_fast and "failed" in outcomes.values()):
                outcomes |= chosen.run(again, machine, lanes, watch.see, wish.ask, fail_fast=fail_fast)
    failed += [cell for cell, outcome in outcomes.items() if outcome == "failed"]
    interrupted = [cell for cell, outcome in outcomes.items() if outcome in ("interrupted", "waiting")]
    elsewhere = [cell for cell, outcome in outcomes.items() if outcome == "elsewhere"]
    interrupted = [cell for cell in interrupted if cell not in changed]
    changed = {cell: stages for cell, stages in changed.items() if cell not in {*failed, *elsewhere}}
    watch.summary(len(jobs), failed, interrupted, elsewhere, changed)
    if wish.code:
        raise SystemExit(wish.code)
    if failed or interrupted or changed:
        raise SystemExit(1)


def _shared(devices: list[str], cells: int, together: int, machine: Machine) -> tuple[list[str], Machine]:
    """A lane for every cell that is worked on at a time: `together` on a device, fewer where others would be idle."""
    here = max(1, min(together, -(-cells // max(1, len(devices)))))
    return [device for device in devices for _ in range(here)][:cells], replace(machine, together=here)


def check_data(jobs: Sequence[Job], root: Path) -> None:
    """Read every data set of the run once and deal it to the clients, before any worker starts.

    MachineError: missing, damaged or not as named, or a file of weights is not there or another; SpecError: the data
    cannot be split as the cell says.
    """
    for text in weights.wanted(job.spec for job in jobs):
        found = weights.read(text)
        if found is not None and (row := weights.status(found, root))["state"] != "complete":
            how = f" (fatbench data prepare {text})" if text in weights.WEIGHTS else ""
            raise MachineError(f"model: weights: {text}: {row['message']}{how}")
    keys = ("data", "partition", "seed", "train", "validation", "client_holdout")
    splits = {digest([job.spec[key] for key in keys]): job for job in jobs}
    datasets: dict[str, Any] = {}
    for job in {digest([job.spec.get(key) for key in AUXILIARY]): job for job in jobs}.values():
        _check_auxiliary(job, root)
    for job in splits.values():
        name = digest(job.spec["data"])
        if name not in datasets:
            datasets = {name: signatures.build("Data", job.spec["data"])(root)}  # one in memory at a time
        spec = {key: number(job.spec[key]) for key in keys[2:]}
        try:
            split(datasets[name], partition=signatures.build("Partition", job.spec["partition"]), **spec)
        except ValueError as error:
            raise SpecError(f"cell {job.cell}: partition: {str(error).removeprefix('partition: ')}") from None


AUXILIARY = ("data", "train", "auxiliary", "auxiliary_n")


def _check_auxiliary(job: Job, root: Path) -> None:
    """Read the server's images too, and refuse those of the test set."""
    if job.spec.get("auxiliary") is None:
        return
    from fatbench.engine.splits import auxiliary_images

    own = signatures.build("Data", job.spec["data"])(root)
    other = own if job.spec["auxiliary"] == job.spec["data"] else signatures.build("Data", job.spec["auxiliary"])(root)
    try:
        auxiliary_images(own, other, job.spec["train"], job.spec["auxiliary_n"])
    except SpecError as error:
        raise SpecError(f"cell {job.cell}: {error}") from None


def _say_what_would_run(jobs: Sequence[Job], url: str, what: str, rerun_changed: bool) -> None:
    changed: versions.Changed = {}
    try:
        with Store.open(url) as store:
            states = progress.of_jobs(jobs, store)
            changed = {} if rerun_changed else versions.changed(jobs, store)
    except NoDatabase:
        states = {job.cell: "todo" for job in jobs}
    keep = ("done",) if rerun_changed else ("done", progress.CHANGED)
    left = [job for job in jobs if states[job.cell] not in keep]
    if not jobs:
        raise NothingMatched("nothing to run")
    print(f"{what}: {len(jobs)} cells, {len(left)} to run")
    for job in left:
        print(f"{job.cell}  {states[job.cell]}")
    if changed:
        print("\n".join(versions.lines(changed)))


class _Wish:
    """What the user asked for by signals: 1 after the first, 2 after the second; `code` is the exit status."""

    def __init__(self) -> None:
        self.times = 0
        self.code = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Wish:
        for which in (signal.SIGINT, signal.SIGTERM):
            self._before[which] = signal.signal(which, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self._before.items():
            signal.signal(which, handler)

    def _hear(self, which: int, _: object) -> None:
        self.times += 1
        self.code = 128 + which
        if self.times == 1:
            print(
                "\nfatbench: finishing and checkpointing the current round; again to stop at once"
                " (the same command goes on from the last checkpoint)",
                file=sys.stderr,
            )

    def ask(self) -> int:
        return self.times
