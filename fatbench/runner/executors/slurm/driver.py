"""Who submits a run's jobs and follows them: what waits and why, what was lost, what is to be submitted again."""

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
from fatbench.runner.executors import open_store, record_loss, release
from fatbench.runner.executors.slurm import plan as folders
from fatbench.runner.executors.slurm import queue, table
from fatbench.runner.executors.slurm.plan import Ear, Plan
from fatbench.runner.executors.slurm.queue import OVER, UNFINISHED, Queued
from fatbench.runner.jobs import CellStatus, Event, Job, Machine

PAUSE = 1.0  # seconds between two looks at what the jobs say
ASK = 20.0  # seconds between two questions to SLURM, one for all jobs
SOON = 4.0  # seconds to the question after jobs were submitted or cancelled
PATIENCE = 30.0  # seconds that a network file system may take to show a job's last word
TRIES = 5  # times that a job is submitted again
FRUITLESS = 5  # jobs in a row that end before they take a cell; then something is wrong with all
LEAVE = 60.0  # seconds for jobs to end after the round at hand; then they end without us
AGAIN = 300.0  # seconds until a queue that was full is tried again, where no job of ours has ended
BROKEN = 2  # jobs that find no working GPU on a node; then it is excluded


PENDING = Queued("PENDING")


@dataclass(eq=False)
class SlurmJob:
    """A submitted job as this process knows it."""

    id: str
    tries: int  # times that it was submitted before
    ear: Ear | None = None  # of its last start
    restarts: int = -1  # of its last start
    host: str = ""  # of its last start; empty: it waits
    queued: Queued = PENDING
    ended: str = ""  # its last word: "over", "leaves", "unfit"
    fault: str = ""  # what is wrong with its node
    took: bool = False  # whether it has ever had a cell in hand
    in_hand: dict[str, int] = field(default_factory=dict)  # cell -> place
    missed: float | None = None  # since when SLURM says that it is over, without a last word


class Driver:
    """A run's jobs, from their submission to the last one's end. Called, it says how each cell ended."""

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
        """most: jobs in the queue at most."""
        self.cells = {job.cell: job for job in jobs}
        self.machine, self.watch, self.stop, self.note, self.fail_fast = machine, watch, stop, note, fail_fast
        self.most, self.width = most_jobs, table.width(slurm_table, device, per_gpu)
        self.plan = Plan(list(jobs), machine, device, per_gpu, table.warning(slurm_table) * 2 / 3)
        self.chosen = slurm_table
        self.jobs: dict[str, SlurmJob] = {}  # those that are not over
        self.places: dict[tuple[str, int], int] = {}  # (job, its slot) -> where a person sees it
        self.statuses: dict[str, CellStatus] = {}
        self.waiting: set[str] = set()  # cells that wait for other cells' models
        self.again: set[str] = set()  # cells whose job died, once
        self.owed: list[int] = []  # jobs to submit: how often each was submitted before
        self.faults: Counter[str] = Counter()  # node -> jobs that found no working GPU there
        self.said: set[str] = set()
        self.fruitless = self.rounds = 0
        self.ask_at = self.submit_at = 0.0
        self.halted = self.given_up = False  # given_up: a job ended that is not submitted again
        self.leave_at = math.inf
        self.largest = queue.largest_array()
        self.environment = queue.clean_environment(**{folders.DATABASE: machine.db})
        self.folder = self._begin()

    @property
    def open(self) -> list[str]:
        """Cells that have not ended and wait for nothing."""
        return [cell for cell in self.cells if cell not in self.statuses and cell not in self.waiting]

    def __call__(self) -> dict[str, CellStatus]:
        """Follow the jobs to the end."""
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
        """The folder of the run: that of one whose jobs are in the queue and do all of this, else a new one."""
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
                f"{shared_cells} of these cells are in the queue with other SLURM jobs of yours: who begins one, has it"
            )
        folder = folders.make(self.machine.files, self.plan)
        (folder / "job.sh").write_text(table.script(self.chosen, self.plan.device, folder))
        self.owed = [0] * min(self.most, max(1, self._jobs_for(len(self.cells) - shared_cells)))
        return folder

    def _begin_anew(self) -> None:
        """Another process that followed the same jobs has ended the run: what is left, this one submits anew."""
        self.jobs.clear()
        self._settle()
        if self.open and not self.halted:
            self.folder = self._begin()

    def _jobs_for(self, cells: int) -> int:
        return -(-cells // self.width)

    def _submit_owed(self) -> None:
        """Submit what is owed, as far as cells are left for it and the queue takes it."""
        if not self.owed or self.halted or time.monotonic() < self.submit_at:
            return
        del self.owed[max(0, self._jobs_for(len(self.open)) - len(self.jobs)) :]
        while self.owed:
            batch = self.owed[: self.largest]
            try:
                script = self._script()
                submitted = queue.submit(script, len(batch), self.folder, self.environment)
            except queue.Refused as error:
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
        """The batch script, which keeps away from the nodes that are excluded by now."""
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

    # --- what the jobs say ---------------------------------------------------------------------------------------

    def _hear(self, told_before: bool = False) -> None:
        """Take in what the jobs have written since the last time. told_before: another driver has shown it."""
        for file in sorted(self.folder.glob("*.jsonl"), key=folders.restarts_of):
            job = self.jobs.get(file.name.split(".")[0])
            restarts = folders.restarts_of(file)
            if job is None or restarts < job.restarts:
                continue
            if restarts > job.restarts:
                self._give_back(job, f"SLURM has started job {job.id} again")
                job.restarts, job.ear, job.ended = restarts, Ear(file), ""
            for kind, *values in job.ear.news() if job.ear else ():
                self._take_in(job, kind, values, told_before)
        for job in list(self.jobs.values()):
            if job.ended == "unfit":
                self._unfit(job)
            elif job.ended == "vain":
                self._vain(job)
            elif job.ended == "over":
                self._over(job)

    def _take_in(self, job: SlurmJob, kind: str, values: list[Any], told_before: bool) -> None:
        if kind == "start":
            job.host, job.queued, job.missed = str(values[0]), Queued("RUNNING"), None
        elif kind == "event":
            slot, event = values[0], Event(**values[1])
            job.took, self.fruitless = True, 0
            self.waiting.discard(event.cell)
            job.in_hand[event.cell] = self._lane(job, slot)
            if not told_before and event.cell in self.cells:
                self.watch(job.in_hand[event.cell], event)
        elif kind == "over":
            cell, status = values
            lane = job.in_hand.pop(cell, -1)
            if status == "waiting":
                self.waiting.add(cell)
            else:
                self._ended(cell, status, lane)
        elif kind == "left":
            job.in_hand.pop(values[0], None)
        elif kind == "unfit":
            job.ended, job.fault = kind, str(values[0])
        elif kind == "bye":
            job.ended = str(values[0])
            job.in_hand.clear()

    def _lane(self, job: SlurmJob, slot: int) -> int:
        """The first free place for a slot of a job, among those that a person sees."""
        if (job.id, slot) not in self.places:
            used_lanes = {*self.places.values()}
            self.places[job.id, slot] = next(lane for lane in range(len(used_lanes) + 1) if lane not in used_lanes)
        return self.places[job.id, slot]

    def _ended(self, cell: str, status: CellStatus, lane: int) -> None:
        if cell in self.statuses or cell not in self.cells:
            return
        self.statuses[cell] = status
        self.waiting.discard(cell)
        self.watch(lane, Event(cell, "cell", status))
        if status == "blocked" or (status == "failed" and self.fail_fast):
            self._halt()

    def _over(self, job: SlurmJob) -> None:
        del self.jobs[job.id]
        self.submit_at = 0.0  # there is room in the queue
        self.places = {of: lane for of, lane in self.places.items() if of[0] != job.id}

    def _unfit(self, job: SlurmJob) -> None:
        """A job found no working GPU: its node is to blame, and after BROKEN such jobs it is excluded."""
        self.faults[job.host] += 1
        text = f"SLURM job {job.id}: no working GPU on {job.host}: {job.fault}"
        if self.faults[job.host] == BROKEN:
            text += f"; the run's jobs keep away from {job.host} from now on"
            queue.exclude(self.jobs, self._broken())
        self._lost(job, text, "GONE")

    def _vain(self, job: SlurmJob) -> None:
        """A job has been started again and again, and no round was finished in its time."""
        self.given_up = True
        self._over(job)
        self.note(
            f"SLURM job {job.id} finished no round in {folders.IN_VAIN} starts in a row: a round takes longer than the"
            " job may; give a longer `time`, or checkpoint_seconds below it"
        )

    # --- what SLURM says -----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask SLURM about all jobs, every ASK seconds: say why they wait, and take in that some are over."""
        if not self.jobs or time.monotonic() < self.ask_at:
            return
        states = queue.states(self.jobs)
        self.ask_at = time.monotonic() + (SOON if self.halted else ASK)
        self._hear()  # what was written before SLURM answered
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
                )  # it never ran, so there is no word to wait for
                if silent or time.monotonic() - job.missed >= PATIENCE:
                    self._lost(job, self._end_in_words(job), job.queued.state)
                else:
                    self.ask_at = min(self.ask_at, job.missed + PATIENCE)
        self._say_reasons()
        if self.halted:
            for job in [job for job in self.jobs.values() if job.queued.state == "PENDING"]:
                self._over(job)  # it was cancelled; if it starts all the same, it sees `stop`

    def _say_reasons(self) -> None:
        reasons = Counter(job.queued.reason for job in self.jobs.values() if job.queued.state == "PENDING")
        for reason, count in reasons.items():
            if not self.halted and (advice := queue.advice(reason)):
                key = f"waits: {reason}"
                if key not in self.said:
                    self.said.add(key)
                    arrays = ", ".join(queue.arrays_of(self.jobs))
                    self.note(f"{count} of {len(self.jobs)} SLURM jobs ({arrays}) wait: {reason}: {advice}")

    def _end_in_words(self, job: SlurmJob) -> str:
        host_text = f" on {job.host}" if job.host else ""
        state = job.queued.state
        state = "SLURM does not know it any more" if state == "GONE" else state
        state += f" ({queue.HINTS[state]})" if state in queue.HINTS else ""
        log = self.folder / f"{job.id}.log"
        log_line = _last_line(log)
        return f"SLURM job {job.id} ended{host_text}: {state}" + (f"; {log} ends: {log_line}" if log_line else "")

    def _lost(self, job: SlurmJob, text: str, state: str) -> None:
        """A job is over that should not be: what it had in hand goes on elsewhere, and it is submitted again."""
        own_fault = state not in UNFINISHED and not self.halted
        lasts = [cell for cell in job.in_hand if own_fault and cell in self.again]
        self.again.update(job.in_hand if own_fault else ())
        cells, lanes = list(job.in_hand), dict(job.in_hand)
        self._give_back(job, text, but=lasts)
        for cell in lasts:
            status = record_loss(self.cells[cell], self.machine, job.id, text, self.watch, lanes[cell])
            self._ended(cell, status, lanes[cell])
        self._over(job)
        if self.halted:
            return
        if state == "CANCELLED":
            self.note(f"{text}: it is not submitted again")
            self.given_up = True
        elif job.tries >= TRIES:
            self.given_up = True
            self.note(f"{text}: it was submitted {TRIES + 1} times and is not again")
        else:
            if not cells:
                self.note(f"{text}: it is submitted again ({job.tries + 1} of {TRIES} times)")
            self.owed.append(job.tries + 1)
        self.fruitless += not job.took
        if self.fruitless >= FRUITLESS:
            raise MachineError(f"{FRUITLESS} SLURM jobs in a row ended before they took a cell; the last one: {text}")

    def _give_back(self, job: SlurmJob, text: str, but: Sequence[str] = ()) -> None:
        """Free what a job has in hand that does not work any more."""
        for cell, lane in job.in_hand.items():
            if cell not in but and cell in self.cells:
                release(self.cells[cell], self.machine, job.id)
                message = f"{text}: it goes on from its checkpoint"
                self.watch(lane, Event(cell, "train", "interrupted", message=message))
        job.in_hand.clear()

    # --- the end -------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """No job is left, and cells are: others have them in hand, or have done them; for the rest, more jobs."""
        with open_store(self.machine.db) as store:
            states = progress.of_jobs([self.cells[cell] for cell in self.open], store)
        ends: dict[str, CellStatus] = {"done": "done", "running": "elsewhere", progress.CHANGED: "interrupted"}
        if not self.machine.recovery.retry_failed:
            ends["failed"] = "failed"
        for cell, state in states.items():
            if state in ends:
                self._ended(cell, ends[state], -1)
        self.rounds += 1
        if self.given_up or self.rounds > TRIES:
            self._halt()
        else:
            self.owed = [0] * min(self.most, self._jobs_for(len(self.open)))

    def _halt(self) -> None:
        """Submit no more; jobs that wait are cancelled, those that run end after the round at hand."""
        if not self.halted:
            self.halted = True
            self.leave_at = time.monotonic() + LEAVE
            self.owed.clear()
            (self.folder / "stop").touch()
            queue.cancel(self.jobs, pending_only=True)
            self.ask_at = 0.0

    def _end(self, at_once: bool) -> None:
        """See the last jobs off. at_once: what they have in hand is not wanted."""
        if at_once:
            (self.folder / "stop").touch()
            queue.cancel(self.jobs)
        elif not self.halted:
            queue.cancel(self.jobs, pending_only=True)  # nothing is left for those that wait
        end = time.monotonic() + (15 if at_once else 0 if self.halted else LEAVE)
        while self.jobs and time.monotonic() < end:
            states = queue.states(self.jobs)
            for job in list(self.jobs.values()):
                if job.id in states and states[job.id].state in OVER:
                    self._give_back(job, f"SLURM job {job.id} ended: {states[job.id].state}")
                    self._over(job)
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
    """The last line of a log that says something; empty: there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    own_lines = [line.strip() for line in lines if line.strip() and not line.startswith("srun: ")]
    return own_lines[-1][:200] if own_lines else ""
