"""Submit a run's jobs and follow them: report why jobs wait, release lost cells, and submit lost jobs again."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fatbench.errors import MachineError
from fatbench.runner import progress
from fatbench.runner.executors import record_loss, release
from fatbench.runner.executors.slurm import plan as folders
from fatbench.runner.executors.slurm import queue, table
from fatbench.runner.executors.slurm.plan import Ear, Plan
from fatbench.runner.executors.slurm.queue import OVER, UNFINISHED, Queued
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.runner.worker import open_store

PAUSE = 1.0  # seconds between two looks at the jobs' reports
ASK = 20.0  # seconds between two queries to SLURM, each for all jobs
SOON = 4.0  # seconds to the next query after jobs were submitted or cancelled
PATIENCE = 30.0  # seconds that a network file system may take to show a job's last line
TRIES = 5  # how often a lost job is submitted again
FRUITLESS = 5  # jobs in a row that end before they take a cell; then the run ends with an error
LEAVE = 60.0  # seconds to wait for jobs to end after their current round
AGAIN = 300.0  # seconds until a full queue is tried again, unless one of our jobs ends
BROKEN = 2  # a node is excluded after so many jobs have found no working GPU there


PENDING = Queued("PENDING")


@dataclass(eq=False)
class SlurmJob:
    """A submitted job, as far as this process knows."""

    id: str
    tries: int  # how often it was submitted before
    ear: Ear | None = None  # for the reports of its last start
    restarts: int = -1  # how often SLURM had restarted it at its last start
    host: str = ""  # where it runs; empty while it waits
    queued: Queued = PENDING
    ended: str = ""  # its last report: "over", "leaves", "vain" or "unfit"
    fault: str = ""  # what is wrong with its node
    took: bool = False  # whether it has ever taken a cell
    in_hand: dict[str, int] = field(default_factory=dict)  # cell that it works on -> the observer's slot
    missed: float | None = None  # since when SLURM says that it is over, although its last report is missing


class Driver:
    """Submits a run's jobs and follows them to the end; calling it returns each cell's status."""

    def __init__(  # noqa: PLR0917  what an executor's `run` is given
        self,
        jobs: Sequence[Job],
        machine: Machine,
        slurm_table: dict[str, object],
        device: str,
        per_gpu: int,
        most_jobs: int,
        watch: Callable[[int, Event], None],
        stop: Callable[[], int],
        note: Callable[[str], None],
        fail_fast: bool,
    ):
        """most_jobs: the most jobs in the queue at a time."""
        self.cells = {job.cell: job for job in jobs}
        self.machine, self.watch, self.stop, self.note, self.fail_fast = machine, watch, stop, note, fail_fast
        self.most, self.width = most_jobs, table.width(slurm_table, device, per_gpu)
        self.plan = Plan(list(jobs), machine, device, per_gpu, table.warning(slurm_table) * 2 / 3)
        self.chosen = slurm_table
        self.jobs: dict[str, SlurmJob] = {}  # id -> job, of those that are not over
        self.places: dict[tuple[str, int], int] = {}  # (job, its slot) -> the observer's slot
        self.statuses: dict[str, CellStatus] = {}
        self.waiting: set[str] = set()  # cells that wait for other cells' models
        self.again: set[str] = set()  # cells that have lost a job once; the second time they fail
        self.owed: list[int] = []  # an entry for each job to submit: how often it was submitted before
        self.faults: Counter[str] = Counter()  # node -> how many jobs found no working GPU there
        self.said: set[str] = set()
        self.fruitless = self.rounds = 0
        self.ask_at = self.submit_at = 0.0
        self.halted = self.given_up = False  # given_up: some job is not submitted again
        self.leave_at = math.inf
        self.largest = queue.largest_array()
        self.environment = queue.clean_environment(**{folders.DATABASE: machine.db})
        self.folder = self._begin()

    @property
    def open(self) -> list[str]:
        """The cells that have not ended and do not wait for another cell's model."""
        return [cell for cell in self.cells if cell not in self.statuses and cell not in self.waiting]

    def __call__(self) -> dict[str, CellStatus]:
        """Follow the jobs to the end and return each cell's status."""
        try:
            while self.open and not (self.halted and not self.jobs):
                if request := self.stop():
                    self._halt()
                    if request >= 2:
                        break
                if time.monotonic() > self.leave_at:
                    break
                if not self.halted and folders.is_over(self.folder):
                    self._begin_anew()
                self._submit_owed()
                began = time.monotonic()
                self._hear()
                spent = time.monotonic() - began
                self._ask()
                if not self.jobs and not self.owed and self.open and not self.halted:
                    self._settle()
                if self.jobs:
                    time.sleep(max(PAUSE, 5 * spent))
        finally:
            self._end(at_once=bool(self.open) and (not self.halted or self.stop() >= 2))
        for cell in self.cells:
            self.statuses.setdefault(cell, "waiting" if cell in self.waiting and not self.halted else "interrupted")
        return self.statuses

    # --- submitting ----------------------------------------------------------------------------------------------

    def _begin(self) -> Path:
        """The folder of an earlier run whose jobs are in the queue and do all of this work, else a new folder."""
        shared_cells = 0
        for folder in sorted((Path(self.machine.files).absolute() / "slurm").glob("*/")):
            other_plan = None if folders.is_over(folder) else folders.read_plan(folder)
            if other_plan is None:
                continue
            planned_jobs = {job.cell: job for job in other_plan.jobs}
            if shared := [job for job in self.cells.values() if planned_jobs.get(job.cell) == job]:
                noted = folders.noted_jobs(folder)
                states = queue.states(noted)
                alive = [job for job in noted if job in states and states[job].state not in OVER]
                if alive and len(shared) == len(self.cells) and folders.same_work(self.plan, other_plan):
                    self.jobs = {job: SlurmJob(job, noted[job], queued=states[job]) for job in alive}
                    arrays = ", ".join(queue.arrays_of(alive))
                    self.note(f"SLURM array {arrays} is in the queue with these cells: this run follows it")
                    self.folder = folder
                    self._hear(told_before=True)
                    return folder
                shared_cells += len(shared) if alive else 0
        if shared_cells:
            self.note(
                f"{shared_cells} of these cells are in the queue with other SLURM jobs of yours: the first job to"
                " begin a cell works on it"
            )
        folder = folders.make(self.machine.files, self.plan)
        (folder / "job.sh").write_text(table.script(self.chosen, self.plan.device, folder))
        self.owed = [0] * min(self.most, max(1, self._jobs_for(len(self.cells) - shared_cells)))
        return folder

    def _begin_anew(self) -> None:
        """Submit what is left anew, after another process that followed the same jobs has ended their run."""
        self.jobs.clear()
        self._settle()
        if self.open and not self.halted:
            self.folder = self._begin()

    def _jobs_for(self, cells: int) -> int:
        return -(-cells // self.width)

    def _submit_owed(self) -> None:
        """Submit the jobs in `owed`, as far as cells are left for them and the queue accepts them."""
        if not self.owed or self.halted or time.monotonic() < self.submit_at:
            return
        del self.owed[max(0, self._jobs_for(len(self.open)) - len(self.jobs)) :]
        while self.owed:
            batch = self.owed[: self.largest]
            try:
                script = self._script()
                submitted = queue.submit(script, len(batch), self.folder, self.environment)
            except queue.SubmissionRefused as error:
                if error.full and len(batch) > 1:
                    self.largest = len(batch) // 2
                    continue
                if not self.jobs:
                    raise
                self._say(f"{error}: {len(self.jobs)} jobs take all cells in turn; more follow as they end")
                self.submit_at = time.monotonic() + AGAIN
                return
            for job, tries in zip(submitted, batch, strict=True):
                folders.note_jobs(self.folder, [job], tries)
                self.jobs[job] = SlurmJob(job, tries)
            del self.owed[: len(batch)]
            self.ask_at = time.monotonic() + SOON

    def _script(self) -> Path:
        """The batch script, with the nodes excluded that have turned out to be broken."""
        file = self.folder / "job.sh"
        if broken := self._broken():
            excluded = self.chosen.get("exclude")
            excluded_by_user = excluded if isinstance(excluded, list) else [excluded] if excluded else []
            file.write_text(
                table.script({**self.chosen, "exclude": [*excluded_by_user, *broken]}, self.plan.device, self.folder)
            )
        return file

    def _broken(self) -> list[str]:
        return sorted(node for node, count in self.faults.items() if count >= BROKEN)

    # --- reports of jobs -----------------------------------------------------------------------------------------

    def _hear(self, told_before: bool = False) -> None:
        """Read the jobs' new reports. told_before: another driver has already shown them to the user."""
        for file in sorted(self.folder.glob("*.jsonl"), key=folders.restarts_of):
            job = self.jobs.get(file.name.split(".")[0])
            restarts = folders.restarts_of(file)
            if job is None or restarts < job.restarts:
                continue
            if restarts > job.restarts:
                self._give_back(job, f"SLURM has started job {job.id} again")
                job.restarts, job.ear, job.ended = restarts, Ear(file), ""
            for kind, *values in job.ear.news() if job.ear else ():
                self._read_report(job, kind, values, told_before)
        for job in list(self.jobs.values()):
            if job.ended == "unfit":
                self._blame_node(job)
            elif job.ended == "vain":
                self._give_up_on(job)
            elif job.ended == "over":
                self._forget(job)

    def _read_report(self, job: SlurmJob, kind: str, values: list[Any], told_before: bool) -> None:
        if kind == "start":
            job.host, job.queued, job.missed = str(values[0]), Queued("RUNNING"), None
        elif kind == "event":
            slot, event = values[0], Event(**values[1])
            job.took, self.fruitless = True, 0
            self.waiting.discard(event.cell)
            job.in_hand[event.cell] = self._observer_slot(job, slot)
            if not told_before and event.cell in self.cells:
                self.watch(job.in_hand[event.cell], event)
        elif kind == "over":
            cell, status = values
            lane = job.in_hand.pop(cell, -1)
            if status == "waiting":
                self.waiting.add(cell)
            else:
                self._end_cell(cell, status, lane)
        elif kind == "left":
            job.in_hand.pop(values[0], None)
        elif kind == "unfit":
            job.ended, job.fault = kind, str(values[0])
        elif kind == "bye":
            job.ended = str(values[0])
            job.in_hand.clear()

    def _observer_slot(self, job: SlurmJob, slot: int) -> int:
        """The observer's slot for a slot of a job: the first one that is free."""
        if (job.id, slot) not in self.places:
            used_lanes = {*self.places.values()}
            self.places[job.id, slot] = next(lane for lane in range(len(used_lanes) + 1) if lane not in used_lanes)
        return self.places[job.id, slot]

    def _end_cell(self, cell: str, status: CellStatus, lane: int) -> None:
        if cell in self.statuses or cell not in self.cells:
            return
        self.statuses[cell] = status
        self.waiting.discard(cell)
        self.watch(lane, Event(cell, "cell", status))
        if status == "blocked" or (status == "failed" and self.fail_fast):
            self._halt()

    def _forget(self, job: SlurmJob) -> None:
        del self.jobs[job.id]
        self.submit_at = 0.0  # there is room in the queue
        self.places = {(id, slot): lane for (id, slot), lane in self.places.items() if id != job.id}

    def _blame_node(self, job: SlurmJob) -> None:
        """Blame the node of a job that found no working GPU; after BROKEN such jobs it is excluded."""
        self.faults[job.host] += 1
        text = f"SLURM job {job.id}: no working GPU on {job.host}: {job.fault}"
        if self.faults[job.host] == BROKEN:
            text += f"; the run's jobs keep away from {job.host} from now on"
            queue.exclude(self.jobs, self._broken())
        self._resubmit(job, text, "GONE")

    def _give_up_on(self, job: SlurmJob) -> None:
        """Give up on a job that was started again and again without finishing a round."""
        self.given_up = True
        self._forget(job)
        self.note(
            f"SLURM job {job.id} finished no round in {folders.IN_VAIN} starts in a row: a round takes longer than the"
            " job may; give a longer `time`, or checkpoint_seconds below it"
        )

    # --- states in SLURM -----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Query SLURM every ASK seconds: tell the user why jobs wait, and handle those that are over."""
        if not self.jobs or time.monotonic() < self.ask_at:
            return
        states = queue.states(self.jobs)
        self.ask_at = time.monotonic() + (SOON if self.halted else ASK)
        self._hear()  # reports that jobs wrote before SLURM answered
        for job in list(self.jobs.values()):
            if job.id not in states:
                continue
            job.queued = states[job.id]
            if job.queued.state == "PENDING" and job.host:
                self._give_back(job, f"SLURM has put its job {job.id} back into the queue ({job.queued.reason})")
                job.host = ""
            if job.queued.state in OVER:
                job.missed = job.missed or time.monotonic()
                silent = (
                    not job.host and job.queued.state != "COMPLETED"
                )  # it never ran, so there is no report to wait for
                if silent or time.monotonic() - job.missed >= PATIENCE:
                    self._resubmit(job, self._describe_end(job), job.queued.state)
                else:
                    self.ask_at = min(self.ask_at, job.missed + PATIENCE)
        self._say_reasons()
        if self.halted:
            for job in [job for job in self.jobs.values() if job.queued.state == "PENDING"]:
                self._forget(job)  # cancelled; if it starts all the same, it sees `stop`

    def _say_reasons(self) -> None:
        reasons = Counter(job.queued.reason for job in self.jobs.values() if job.queued.state == "PENDING")
        for reason, count in reasons.items():
            if not self.halted and (advice := queue.advice(reason)):
                key = f"waits: {reason}"
                if key not in self.said:
                    self.said.add(key)
                    arrays = ", ".join(queue.arrays_of(self.jobs))
                    self.note(f"{count} of {len(self.jobs)} SLURM jobs ({arrays}) wait: {reason}: {advice}")

    def _describe_end(self, job: SlurmJob) -> str:
        host_text = f" on {job.host}" if job.host else ""
        state = job.queued.state
        state = "SLURM does not know it any more" if state == "GONE" else state
        state += f" ({queue.HINTS[state]})" if state in queue.HINTS else ""
        log = self.folder / f"{job.id}.log"
        log_line = _last_line(log)
        return f"SLURM job {job.id} ended{host_text}: {state}" + (f"; {log} ends: {log_line}" if log_line else "")

    def _resubmit(self, job: SlurmJob, text: str, state: str) -> None:
        """Handle a job that ended too early: release its cells, and submit it again unless that is hopeless."""
        own_fault = state not in UNFINISHED and not self.halted
        failing = [cell for cell in job.in_hand if own_fault and cell in self.again]
        self.again.update(job.in_hand if own_fault else ())
        cells, lanes = list(job.in_hand), dict(job.in_hand)
        self._give_back(job, text, but=failing)
        for cell in failing:
            for event in record_loss(self.cells[cell], self.machine, job.id, text):
                self.watch(lanes[cell], event)
            self._end_cell(cell, "failed", lanes[cell])
        self._forget(job)
        if self.halted:
            return
        if state == "CANCELLED":
            self.note(f"{text}: it is not submitted again")
            self.given_up = True
        elif job.tries >= TRIES:
            self.given_up = True
            self.note(f"{text}: it was submitted {TRIES + 1} times and is not submitted again")
        else:
            if not cells:
                self.note(f"{text}: it is submitted again ({job.tries + 1} of {TRIES} times)")
            self.owed.append(job.tries + 1)
        self.fruitless += not job.took
        if self.fruitless >= FRUITLESS:
            raise MachineError(f"{FRUITLESS} SLURM jobs in a row ended before they took a cell; the last one: {text}")

    def _give_back(self, job: SlurmJob, text: str, but: Sequence[str] = ()) -> None:
        """Release the cells of a job that does not work any more, except those in `but`."""
        for cell, lane in job.in_hand.items():
            if cell not in but and cell in self.cells:
                release(self.cells[cell], self.machine, job.id)
                message = f"{text}: it goes on from its checkpoint"
                self.watch(lane, Event(cell, "train", "interrupted", message=message))
        job.in_hand.clear()

    # --- the end -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """If cells are left but no jobs, note those that other processes hold or did, and plan jobs for the rest."""
        with open_store(self.machine.db) as store:
            states = progress.states_of([self.cells[cell] for cell in self.open], store)
        ends: dict[str, CellStatus] = {"done": "done", "running": "elsewhere", progress.CHANGED: "interrupted"}
        if not self.machine.recovery.retry_failed:
            ends["failed"] = "failed"
        for cell, state in states.items():
            if state in ends:
                self._end_cell(cell, ends[state], -1)
        self.rounds += 1
        if self.given_up or self.rounds > TRIES:
            self._halt()
        else:
            self.owed = [0] * min(self.most, self._jobs_for(len(self.open)))

    def _halt(self) -> None:
        """Submit no more jobs, cancel pending ones, and tell running ones to end after their current round."""
        if not self.halted:
            self.halted = True
            self.leave_at = time.monotonic() + LEAVE
            self.owed.clear()
            (self.folder / "stop").touch()
            queue.cancel(self.jobs, pending_only=True)
            self.ask_at = 0.0

    def _end(self, at_once: bool) -> None:
        """Wait for the last jobs to end. at_once: cancel them without waiting for their current round."""
        if at_once:
            (self.folder / "stop").touch()
            queue.cancel(self.jobs)
        elif not self.halted:
            queue.cancel(self.jobs, pending_only=True)  # no cell is left for the pending ones
        end = time.monotonic() + (15 if at_once else 0 if self.halted else LEAVE)
        while self.jobs and time.monotonic() < end:
            states = queue.states(self.jobs)
            for job in list(self.jobs.values()):
                if job.id in states and states[job.id].state in OVER:
                    self._give_back(job, f"SLURM job {job.id} ended: {states[job.id].state}")
                    self._forget(job)
            time.sleep(PAUSE)
            self._hear()
        if self.jobs:
            arrays = queue.arrays_of(self.jobs)
            self.note(
                f"{len(self.jobs)} SLURM jobs are still in the queue ({', '.join(arrays)}); they end by themselves"
                f" after the round at hand; to end them now: scancel {' '.join(arrays)}"
            )
        else:
            folders.finish(self.folder)

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.note(text)


def _last_line(log: Path) -> str:
    """The last line of a log that is neither blank nor srun's; empty if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    own_lines = [line.strip() for line in lines if line.strip() and not line.startswith("srun: ")]
    return own_lines[-1][:200] if own_lines else ""
