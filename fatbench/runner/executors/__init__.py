"""Executors hand cells to workers: processes on this machine, Ray tasks, SLURM jobs.

    local   worker processes on this machine
    ray     Ray tasks
    slurm   SLURM jobs

An executor is a module with two functions. `slots(device, jobs, per_gpu, url)` says which devices work side by side,
and refuses what cannot be done before anything is written. `run(work, slots, watch, stop, note=say)` works through the
cells and returns how each ended. `watch` takes the workers' events. `stop` returns what the user asked for: 0 to go on,
1 to end after the current round, 2 to end at once. `note` tells the user what concerns no single cell. What executors
share is in this file.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol, cast

from fatbench import settings
from fatbench.errors import MachineError, SpecError, Unavailable
from fatbench.runner.jobs import Event, Job, Machine, Statuses, Stop, Watch, Work
from fatbench.runner.worker import open_store
from fatbench.store.pools import FREE, TAKEN, Pool, Taken
from fatbench.store.stages import Store


class Worker(NamedTuple):
    """The process that is working on a cell."""

    host: str
    pid: int


def device_and_jobs(device: str | None, jobs: int | None) -> tuple[str, int | None]:
    """(device, cells side by side) from the flags, else from the settings. SpecError: one of them is not valid."""
    device_name = settings.setting("run.device", device) or "auto"
    if device_name not in ("auto", "cpu", "cuda"):
        kind, _, numbers = device_name.partition(":")
        if kind != "cuda" or not all(gpu_number.isdecimal() for gpu_number in numbers.split(",")):
            raise SpecError(f"expected auto, cpu, cuda or cuda:0,1, got '{device_name}'", option="device")
    if jobs is None:
        return device_name, settings.number("run.jobs", high=MOST_JOBS)
    if jobs > MOST_JOBS:
        raise SpecError(f"jobs: expected at most {MOST_JOBS} cells in parallel, got {jobs}")
    return device_name, jobs


MOST_JOBS = 1000  # each is a process that imports torch


def say(text: str) -> None:
    """Print a line for the user on stderr, beside what the run's observer shows."""
    print(f"fatbench: {text}", file=sys.stderr, flush=True)


# --- a run and its workers ---------------------------------------------------------------------------------------

IDLE = "the worker process made no progress"
IDLE_SECONDS = 20.0  # at least so long may a worker be idle; a lease, if that is longer
GRACE = 60.0  # seconds for a worker to end a cell by itself after its time limit
LONGEST = 2.0  # seconds between two looks at the database
LEAVE = 5.0  # seconds for workers without a cell to end
NO_CELL = 5  # workers in a row that end before they take a cell; then the run ends with an error


class End(NamedTuple):
    """How a worker has ended."""

    text: str  # in words; empty: by itself
    lost: bool = False  # through no fault of its cell, which starts once more
    blocked: bool = False  # the database could not be used


class Launched(Protocol):
    """A worker that an executor has started."""

    def end(self) -> End | None:
        """How it ended; None while it lives."""

    def kill(self) -> None:
        """End it at once."""


Launch = Callable[[str, Pool, str, str], Launched]  # starts a worker: (database, pool, worker's name, device)


@dataclass(eq=False)
class _Slot:
    """A place for one worker, and the worker in it."""

    name: str
    launched: Launched
    cell: str = ""  # that it works on
    began: float = 0.0  # when it took the cell
    idle: int = 0  # consecutive checks in which it made no progress
    reason: str = ""  # why we killed it


@dataclass
class Supervisor:
    """Keeps a worker in each slot as long as cells are free, and goes on when one is lost.

    With a prefix, which begins the names of its workers, it is one of several at the same pool and ends without it.
    """

    pool: Pool
    work: Work
    slots: list[str]  # the device of each; may grow
    launch: Launch
    prefix: str = ""
    pause: float = 0.1  # seconds between two looks at the database, or five times as long as a look takes
    workers: dict[int, _Slot] = field(default_factory=dict)
    started: int = 0
    no_cell: int = 0

    def __call__(self, stop: Stop, look: Callable[[], None] = lambda: None) -> None:
        """Work until no cell is left. look: called in each turn."""
        interval = check_interval(self.work.machine)
        next_check = time.monotonic() + interval
        try:
            while True:
                began = time.monotonic()
                request = stop()
                free, taken, stops = self.pool.counts(self.prefix)
                if request and self.prefix:
                    self.pool.leave(worker.name for worker in self.workers.values())
                elif request and not stops:
                    self.pool.stop()
                self._see_ends(stops := stops or bool(request))
                taken_cells = self.pool.taken()
                for worker in self.workers.values():
                    cell = taken_cells[worker.name].cell if worker.name in taken_cells else ""
                    if cell and cell != worker.cell:
                        worker.began, worker.idle, self.no_cell = time.monotonic(), 0, 0
                    worker.cell = cell
                look()
                if request >= 2 or not taken + (0 if stops else free):
                    break
                if not stops:
                    self._start(free)
                if time.monotonic() > next_check:
                    next_check = time.monotonic() + interval
                    self._kill_stuck()
                time.sleep(min(max(self.pause, 5 * (time.monotonic() - began)), LONGEST))
        finally:
            self._end_all()
            look()

    def _start(self, free: int) -> None:
        """Start workers in empty slots, as long as there are more free cells than workers that look for one."""
        idle = sum(not worker.cell for worker in self.workers.values())
        for slot in [slot for slot in range(len(self.slots)) if slot not in self.workers][: max(0, free - idle)]:
            name = f"{self.prefix}{slot}.{self.started}"
            self.started += 1
            launched = self.launch(self.work.machine.db, self.pool, name, self.slots[slot])
            self.workers[slot] = _Slot(name, launched)

    def _see_ends(self, stops: bool) -> None:
        ends = {slot: end for slot, worker in self.workers.items() if (end := worker.launched.end()) is not None}
        taken = self.pool.taken() if ends else {}  # read once they are gone
        for slot, end in ends.items():
            worker = self.workers.pop(slot)
            if end.blocked:
                self.pool.stop()  # raises the reason, if it lasts
            if worker.name in taken:
                lost = end.blocked or (worker.reason == IDLE if worker.reason else end.lost)
                self._give_back(
                    worker.name, taken[worker.name], worker.reason or end.text, lost=lost, stops=stops or end.blocked
                )
            elif end.text and not worker.reason:
                self.no_cell += 1
                if self.no_cell >= NO_CELL:
                    raise MachineError(f"{NO_CELL} workers in a row ended before they took a cell: {end.text}")

    def _give_back(self, name: str, taken: Taken, text: str, *, lost: bool, stops: bool) -> None:
        """Let the cell of a worker that is gone start once more, or fail."""
        fails = not lost or (taken.tries > 1 and not stops)
        fault = text or "its worker ended" if fails else ""
        said = [Event(taken.cell, "train", "interrupted", message=f"{text}: it starts again")]
        if stops:
            said = [] if self.prefix else [Event(taken.cell, "cell", "interrupted")]
        give_back(self.pool, self.work, name, taken, said, fault, not stops)

    def _kill_stuck(self) -> None:
        """Kill workers that made no progress for a lease, and those whose cell is over its time limit."""
        recovery = self.work.machine.recovery
        limit = recovery.time_limit
        for name, taken in self.pool.taken().items():
            worker = next((worker for worker in self.workers.values() if worker.name == name), None)
            if worker is None or worker.cell != taken.cell:
                continue
            try:
                working = is_working(taken.cell, self.work.machine, Worker(taken.host, taken.pid))
            except Unavailable:  # without the database no worker can make progress
                working = True
            worker.idle = 0 if working else worker.idle + 1
            if limit is not None and time.monotonic() - worker.began > limit + GRACE:
                worker.reason = f"TimeLimit: the time limit of {limit:g} s is over, and the worker process did not stop"
            elif worker.idle * check_interval(self.work.machine) > max(recovery.lease, IDLE_SECONDS):
                worker.reason = IDLE
            if worker.reason:
                worker.launched.kill()

    def _end_all(self) -> None:
        """Let workers without a cell end by themselves, kill the others and release their cells."""
        end = time.monotonic() + LEAVE
        for worker in self.workers.values():
            while not worker.cell and worker.launched.end() is None and time.monotonic() < end:
                time.sleep(0.05)
            if worker.launched.end() is None:
                worker.launched.kill()
        with contextlib.suppress(Unavailable):
            taken = self.pool.taken()
            for worker in self.workers.values():
                if worker.name in taken:
                    self._give_back(worker.name, taken[worker.name], "", lost=True, stops=True)


def give_back(pool: Pool, work: Work, name: str, taken: Taken, said: list[Event], fault: str, counts: bool) -> None:
    """Free the cell of a worker that is gone.

    said: of a cell that is free again. fault: why it fails instead. counts: whether this turn was one of its tries.
    """
    # a worker of a SLURM job; its runs name the job, wherever it was started again
    holder = name.partition("/")[0] if "/" in name else Worker(taken.host, taken.pid)
    stages = let_go(Store(pool.database), taken.cell, holder, fault)
    if fault:
        said = [Event(taken.cell, stage, "failed", message=fault) for stage in stages or ["train"]]
        said.append(Event(taken.cell, "cell", "failed"))
    events, status = [asdict(event) for event in said], "failed" if fault else FREE
    pool.end(name, taken.cell, status, events, counts=counts, stop=bool(fault) and work.fail_fast)


def check_interval(machine: Machine) -> float:
    """Seconds between two checks of the workers' progress."""
    return min(max(machine.recovery.lease / 4, 5.0), 60.0)


def supervised(
    work: Work,
    slots: Sequence[str],
    launch: Launch,
    watch: Watch,
    stop: Stop,
    more_slots: Callable[[Sequence[Job]], Sequence[str]] | None = None,
) -> Statuses:
    """Run workers in these slots until all cells have ended, and return each cell's status.

    more_slots: called with the free jobs after each cell's first round; returns the slots, these and new ones.
    """
    jobs = {job.cell: job for job in work.jobs}
    last, started, statuses = 0, set[str](), dict[str, str]()
    try:
        with open_store(work.machine.db) as store:
            store.database.stop = lambda: stop() >= 2  # type: ignore[method-assign]
            pool = Pool.create(store.database, work.text(), list(jobs))
            supervisor = Supervisor(pool, work, list(slots), launch)

            def look() -> None:
                nonlocal last
                last, found = pool.events(last)
                for worker, values in found:
                    event = Event(**values)
                    watch(int(worker.partition(".")[0]), event)
                    if more_slots and (event.stage, event.kind) == ("train", "progress") and event.cell not in started:
                        started.add(event.cell)
                        free = [jobs[cell] for cell, status in pool.statuses().items() if status == FREE]
                        supervisor.slots[:] = more_slots(free)

            try:
                supervisor(stop, look)
                statuses = pool.statuses()
            finally:
                with contextlib.suppress(Unavailable):
                    pool.delete()
    except Unavailable as error:
        watch(0, Event("", "train", "blocked", message=str(error)))
        return dict.fromkeys(jobs, "blocked")
    ends = {cell: "interrupted" if status in (FREE, TAKEN) else status for cell, status in statuses.items()}
    return cast(Statuses, ends)


def let_go(store: Store, cell: str, worker: Worker | str, fault: str = "") -> list[str]:
    """Release the stages that a dead worker, or any process of a SLURM job, held, and return them; fault: they fail.

    A stage that was released resumes from its checkpoint. Those of other processes stay as they are.
    """
    held_runs = _held_stages(store, cell, worker)
    for run in held_runs.values():
        if fault:
            store.fail(run, fault)
        else:
            store.release(run)
    return [*held_runs]


def is_working(cell: str, machine: Machine, worker: Worker) -> bool:
    """Whether a worker holds a stage of its cell and makes progress."""
    with Store.open(machine.db) as store:
        held_runs = _held_stages(store, cell, worker)
        rows = store.stages([cell])
        return any(rows[cell, stage].alive for stage in held_runs)


def _held_stages(store: Store, cell: str, worker: Worker | str) -> dict[str, int]:
    """stage -> run, of the stages of a cell that a worker holds. worker: a string is a SLURM job."""
    rows = store.stages([cell]).values()  # read before the runs, so that no row lacks its run
    runs = {
        run["id"]
        for run in store.runs([cell])
        if worker == (run.get("slurm_job") if isinstance(worker, str) else (run["host"], run["pid"]))
    }
    return {row.stage: row.run for row in rows if row.status == "running" and row.run is not None and row.run in runs}
