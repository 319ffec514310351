"""Submit a run's jobs and follow them: say why jobs wait, free the cells of lost jobs, and submit lost jobs again."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from fatbench.errors import MachineError
from fatbench.runner import progress
from fatbench.runner.executors import NO_CELL, give_back
from fatbench.runner.executors.slurm import queue, table
from fatbench.runner.executors.slurm.queue import OVER, UNFINISHED, Queued
from fatbench.runner.jobs import Event, Note, Statuses, Stop, Watch, Work
from fatbench.runner.worker import open_store
from fatbench.store.pools import FREE, TAKEN, Pool

PAUSE = 1.0  # seconds between two looks at the database, and at least five times as long as a look takes
ASK = 20.0  # seconds between two queries to SLURM, each for all jobs
SOON = 4.0  # seconds to the next query after jobs were submitted or cancelled
TRIES = 5  # how often a lost job is submitted again
LEAVE = 60.0  # seconds to wait for jobs to end after their current round
AGAIN = 300.0  # seconds until a full queue is tried again, unless one of our jobs ends
BROKEN = 2  # a node is excluded after so many jobs have found no working GPU there
DATABASE = "FATBENCH_DB"  # the environment variable with the database's address for the jobs, which no file holds


@dataclass(eq=False)
class SlurmJob:
    """A submitted job, as far as this process knows."""

    id: str
    tries: int  # how often it was submitted before
    queued: Queued = field(default_factory=lambda: Queued("PENDING"))
    took: bool = False  # whether it has ever taken a cell


class Driver:
    """Submits a run's jobs and follows them to the end; calling it returns each cell's status."""

    def __init__(
        self, work: Work, slurm_table: dict[str, object], most_jobs: int, watch: Watch, stop: Stop, note: Note
    ):
        """most_jobs: the most jobs in the queue at a time."""
        self.work, self.watch, self.stop, self.note = work, watch, stop, note
        self.cells = {job.cell: job for job in work.jobs}
        self.machine, self.chosen = work.machine, slurm_table
        self.most, self.width = most_jobs, table.width(slurm_table, self.machine.device, work.per_gpu)
        self.jobs: dict[str, SlurmJob] = {}  # id -> job, of those that are not over
        self.lanes: dict[tuple[str, str], int] = {}  # (job, its slot) -> the observer's slot
        self.to_submit: list[int] = []  # for each job: how often it was submitted before
        self.bad_nodes: Counter[str] = Counter()  # node -> how many jobs found no working GPU there
        self.said: set[str] = set()
        self.no_cell = self.rounds = self.last = 0
        self.ask_at = self.submit_at = 0.0
        self.halted = self.given_up = False  # given_up: some job is not submitted again
        self.leave_at = math.inf
        self.largest = queue.largest_array()
        self.environment = queue.clean_environment(**{DATABASE: self.machine.db})

    def __call__(self) -> Statuses:
        """Follow the jobs to the end and return each cell's status."""
        with open_store(self.machine.db) as self.store:
            self._begin()
            try:
                while not (self.halted and not self.jobs) and time.monotonic() <= self.leave_at:
                    if request := self.stop():
                        self._halt()
                        if request >= 2:
                            break
                    began = time.monotonic()
                    free, taken, stops = self.pool.counts()
                    self._read()
                    if stops and not self.halted:  # another process that followed the same jobs has ended their run
                        self.jobs.clear()
                        if not self._settle():
                            break
                        self._begin()
                    elif not free + taken:
                        break
                    self._submit(free + taken)
                    self._ask()
                    if not self.jobs and not self.to_submit and not self.halted and not self._settle():
                        break
                    if self.jobs:
                        time.sleep(max(PAUSE, 5 * (time.monotonic() - began)))
            finally:
                self._end(at_once=self.stop() >= 2 or bool(sum(self.pool.counts()[:2]) and not self.halted))
            return self.ends

    # --- submitting ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Follow the jobs of an earlier run that are in the queue and do all of this work, else begin a pool."""
        shared = 0
        for pool in Pool.lasting(self.store.database):
            entries = pool.entries()
            states = queue.states(entries) if entries else {}
            alive = [job for job in entries if job in states and states[job].state not in OVER]
            if entries and states and not alive:
                pool.delete()
            text = pool.work() if alive else None
            if text is None:
                continue
            other = Work.parsed(text, self.machine.db)
            cells = {job.cell: job for job in other.jobs}
            same = [job for job in self.cells.values() if cells.get(job.cell) == job]
            same_way = (other.machine, other.per_gpu) == (self.machine, self.work.per_gpu)
            if same_way and len(same) == len(self.cells) and not pool.counts()[2]:
                self.jobs = {job: SlurmJob(job, entries[job].tries, states[job]) for job in alive}
                arrays = ", ".join(queue.arrays_of(alive))
                self.note(f"SLURM array {arrays} is in the queue with these cells: this run follows it")
                self.pool, self.folder = pool, Path(other.folder)
                self.last, _ = pool.events(0)  # another driver has shown them to the user
                return
            shared += len(same)
        if shared:
            self.note(
                f"{shared} of these cells are in the queue with other SLURM jobs of yours: the first job to"
                " begin a cell works on it"
            )
        parent = Path(self.machine.files).absolute() / "slurm"
        parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=parent))  # only its owner's
        work = replace(self.work, folder=str(self.folder))
        self.pool = Pool.create(self.store.database, work.text(), list(self.cells), lasts=True)
        self.last = 0
        self._write_script()
        self.to_submit = [0] * min(self.most, max(1, math.ceil((len(self.cells) - shared) / self.width)))

    def _submit(self, cells: int) -> None:
        """Submit jobs, as far as cells are left for them and the queue accepts them."""
        if not self.to_submit or self.halted or time.monotonic() < self.submit_at:
            return
        del self.to_submit[max(0, math.ceil(cells / self.width) - len(self.jobs)) :]
        while self.to_submit:
            batch = self.to_submit[: self.largest]
            try:
                script = self._write_script()
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
            new = dict(zip(submitted, batch, strict=True))
            self.pool.expect(new)
            self.jobs |= {job: SlurmJob(job, tries) for job, tries in new.items()}
            del self.to_submit[: len(batch)]
            self.ask_at = time.monotonic() + SOON

    def _write_script(self) -> Path:
        """The batch script, with the nodes excluded that have turned out to be broken."""
        chosen, file = self.chosen, self.folder / "job.sh"
        if broken := self._broken():
            by_user = chosen.get("exclude")
            excluded = by_user if isinstance(by_user, list) else [by_user] if by_user else []
            chosen = {**chosen, "exclude": [*excluded, *broken]}
        file.write_text(table.script(chosen, self.machine.device, self.pool.id))
        return file

    def _broken(self) -> list[str]:
        return sorted(node for node, count in self.bad_nodes.items() if count >= BROKEN)

    # --- what jobs say -------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Show the jobs' new events, and see which jobs have ended."""
        self.last, found = self.pool.events(self.last)
        for worker, values in found:
            event, id = Event(**values), worker.partition("/")[0]
            if id in self.jobs:
                self.jobs[id].took, self.no_cell = True, 0
            self.watch(self._lane(worker), event)
            if event.stage == "cell" and (event.kind == "blocked" or (event.kind == "failed" and self.work.fail_fast)):
                self._halt()
        for id, entry in self.pool.entries().items():
            kind, _, fault = entry.said.partition(": ")
            if id not in self.jobs or not kind:
                continue
            job = self.jobs[id]
            if kind == "bad_node":
                self._blame_node(job, entry.host, fault)
                continue
            if kind == "no_progress":
                self.given_up = True
                self.note(
                    f"SLURM job {id} finished no round in {fault} starts in a row: a round takes longer than the"
                    " job may; give a longer `time`, or checkpoint_seconds below it"
                )
            self._forget(job)

    def _lane(self, worker: str) -> int:
        """The observer's slot for a worker: the first one that is free."""
        job, _, slot = worker.rpartition(".")[0].split("/")
        key = job, slot
        if key not in self.lanes:
            used = {*self.lanes.values()}
            self.lanes[key] = next(lane for lane in range(len(used) + 1) if lane not in used)
        return self.lanes[key]

    def _forget(self, job: SlurmJob) -> None:
        self.jobs.pop(job.id, None)
        self.pool.left(job.id, "gone")
        self.submit_at = 0.0  # there is room in the queue
        self.lanes = {key: lane for key, lane in self.lanes.items() if key[0] != job.id}

    def _blame_node(self, job: SlurmJob, host: str, fault: str) -> None:
        """Blame the node of a job that found no working GPU; after BROKEN such jobs it is excluded."""
        self.bad_nodes[host] += 1
        text = f"SLURM job {job.id}: no working GPU on {host}: {fault}"
        if self.bad_nodes[host] == BROKEN:
            text += f"; the run's jobs keep away from {host} from now on"
            queue.exclude(self.jobs, self._broken())
        self._resubmit(job, text, "GONE")

    # --- states in SLURM -----------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Query SLURM every ASK seconds: tell the user why jobs wait, and handle those that are over."""
        if not self.jobs or time.monotonic() < self.ask_at:
            return
        states = queue.states(self.jobs)
        self.ask_at = time.monotonic() + (SOON if self.halted else ASK)
        self._read()  # what jobs wrote before SLURM answered
        entries = self.pool.entries()
        for job in [job for job in self.jobs.values() if job.id in states]:
            job.queued = states[job.id]
            host = entries[job.id].host
            if job.queued.state == "PENDING" and host:
                self._free(job, f"SLURM has put its job {job.id} back into the queue ({job.queued.reason})")
                self.pool.left(job.id, "")
            if job.queued.state in OVER:
                self._resubmit(job, self._describe_end(job, host), job.queued.state)
        pending = [job for job in self.jobs.values() if job.queued.state == "PENDING"]
        if self.halted:
            for job in pending:
                self._forget(job)  # cancelled; if it starts all the same, it sees that the pool stops
            return
        for reason, count in Counter(job.queued.reason for job in pending).items():
            if advice := queue.advice(reason):
                arrays = ", ".join(queue.arrays_of(self.jobs))
                self._say(f"{count} of {len(self.jobs)} SLURM jobs ({arrays}) wait: {reason}: {advice}", reason)

    def _describe_end(self, job: SlurmJob, host: str) -> str:
        state = "SLURM does not know it any more" if job.queued.state == "GONE" else job.queued.state
        state += f" ({queue.HINTS[state]})" if state in queue.HINTS else ""
        log = self.folder / f"{job.id}.log"
        text = f"SLURM job {job.id} ended{f' on {host}' if host else ''}: {state}"
        with contextlib.suppress(OSError):
            for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
                if line.strip() and not line.startswith("srun: "):
                    return f"{text}; {log} ends: {line.strip()[:200]}"
        return text

    def _resubmit(self, job: SlurmJob, text: str, state: str) -> None:
        """Handle a job that ended too early: free its cells, and submit it again unless that is hopeless."""
        held = self._free(job, text, own_fault=state not in UNFINISHED and not self.halted)
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
            if not held:
                self.note(f"{text}: it is submitted again ({job.tries + 1} of {TRIES} times)")
            self.to_submit.append(job.tries + 1)
        self.no_cell += not job.took
        if self.no_cell >= NO_CELL:
            raise MachineError(f"{NO_CELL} SLURM jobs in a row ended before they took a cell; the last one: {text}")

    def _free(self, job: SlurmJob, text: str, own_fault: bool = False) -> bool:
        """Free the cells of a job that does not work any more; those that end a second job by themselves fail."""
        message = f"{text}: it goes on from its checkpoint"
        return free_cells(self.pool, self.work, job.id, message, text if own_fault else "")

    # --- the end -------------------------------------------------------------------------------------------------

    @property
    def statuses(self) -> Statuses:
        """Each cell's status; what other processes hold or did is read from the stages."""
        found = self.pool.statuses()
        open_cells = [job for cell, job in self.cells.items() if found.get(cell, FREE) in (FREE, TAKEN)]
        states = progress.states_of(open_cells, self.store) if open_cells else {}
        ends: Statuses = {"done": "done", "running": "elsewhere"}
        if not self.machine.recovery.retry_failed:
            ends["failed"] = "failed"
        known = {cell: status for cell, status in found.items() if status not in (FREE, TAKEN)}
        ended = {cell: known.get(cell) or ends.get(states[cell], "interrupted") for cell in self.cells}
        return cast(Statuses, ended)

    def _settle(self) -> bool:
        """Whether cells are left although no jobs are, for which jobs are planned."""
        left = [cell for cell, status in self.statuses.items() if status == "interrupted"]
        self.rounds += 1
        if self.given_up or self.rounds > TRIES:
            self._halt()
        self.to_submit = [0] * min(self.most, math.ceil(len(left) / self.width))
        return bool(left) and not self.halted

    def _halt(self) -> None:
        """Submit no more jobs, cancel pending ones, and tell running ones to end after their current round."""
        if not self.halted:
            self.halted = True
            self.leave_at = time.monotonic() + LEAVE
            self.to_submit.clear()
            self.pool.stop()
            queue.cancel(self.jobs, pending_only=True)
            self.ask_at = 0.0

    def _end(self, at_once: bool) -> None:
        """Wait for the last jobs to end. at_once: cancel them without waiting for their current round."""
        if at_once:
            self.pool.stop()
            queue.cancel(self.jobs)
        elif not self.halted:
            queue.cancel(self.jobs, pending_only=True)  # no cell is left for the pending ones
        end = time.monotonic() + (15 if at_once else 0 if self.halted else LEAVE)
        while self.jobs and time.monotonic() < end:
            states = queue.states(self.jobs)
            for job in [job for job in self.jobs.values() if job.id in states and states[job.id].state in OVER]:
                self._free(job, f"SLURM job {job.id} ended: {states[job.id].state}")
                self._forget(job)
            time.sleep(PAUSE)
            self._read()
        self.ends = self.statuses
        self.pool.delete()
        if self.jobs:
            arrays = queue.arrays_of(self.jobs)
            self.note(
                f"{len(self.jobs)} SLURM jobs are still in the queue ({', '.join(arrays)}); they end by themselves"
                f" after the round at hand; to end them now: scancel {' '.join(arrays)}"
            )
            return
        (self.folder / "job.sh").unlink(missing_ok=True)
        for folder in (self.folder, self.folder.parent):  # logs stay
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _say(self, text: str, subject: str = "") -> None:
        """Tell the user a text once, or one text of a subject."""
        if (subject or text) not in self.said:
            self.said.add(subject or text)
            self.note(text)


def free_cells(pool: Pool, work: Work, job: str, text: str, fault: str = "") -> bool:
    """Free the cells that a SLURM job has taken. fault: why a cell fails that was taken by two such jobs."""
    held = {worker: one for worker, one in pool.taken().items() if worker.startswith(f"{job}/")}
    for worker, one in held.items():
        said = [Event(one.cell, "train", "interrupted", message=text)]
        give_back(pool, work, worker, one, said, fault if one.tries > 1 else "", bool(fault))
    return bool(held)
