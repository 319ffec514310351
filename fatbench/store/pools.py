"""Pools: the cells of one `fatbench run`, of which each of its workers takes the next, and what the workers report.

    pools           the cells and options of a run, without the database's address; whether it is to stop
    pool_cells      who has taken a cell, or how it has ended
    pool_workers    processes, and jobs of SLURM; one may be asked to leave
    pool_reports    their events, until the run has read them

These tables are made by the first run and are empty between runs: a power cut may lose what they hold.
A cell that is taken is not yet claimed: its stages may be in the hands of another run.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, func, insert, select, update

from fatbench.store.database import Database, lock, patient
from fatbench.store.liveness import is_gone
from fatbench.store.rows import run_values
from fatbench.store.schema import POOL_CELLS as CELLS
from fatbench.store.schema import POOL_REPORTS as REPORTS
from fatbench.store.schema import POOL_WORKERS as WORKERS
from fatbench.store.schema import POOLS, WORK

KEPT = 1000  # reports that stay after they were read
FREE, TAKEN = "free", "taken"  # else a cell's status is that of its end


class Taken(NamedTuple):
    """A cell that a worker has taken."""

    cell: str
    tries: int  # how often it was taken
    host: str
    pid: int


class Entry(NamedTuple):
    """A job of SLURM in a pool, or a worker that is in none."""

    host: str
    pid: int
    tries: int
    no_progress: int
    said: str


@dataclass(frozen=True)
class Pool:
    """The pool of a run, in an open database. Every method is one transaction."""

    database: Database
    id: str

    @classmethod
    def create(cls, database: Database, work: str, cells: Sequence[str], *, lasts: bool = False) -> Pool:
        """A new pool. work: what its workers must know. lasts: the pool outlives this process."""
        pool = cls(database, os.urandom(16).hex())
        pool._create(zlib.compress(work.encode()), cells, lasts)
        return pool

    @patient
    def _create(self, work: bytes, cells: Sequence[str], lasts: bool) -> None:
        owner: dict[str, Any] = {} if lasts else {name: run_values({})[name] for name in ("host", "pid", "process")}
        owner["user"] = getpass.getuser()
        with self.database.writing(lasting=False) as connection:
            lock(connection)
            WORK.create_all(connection)
            for pool in connection.execute(select(POOLS.c.id, POOLS.c.host, POOLS.c.pid, POOLS.c.process)).all():
                if is_gone(*pool[1:]):
                    connection.execute(delete(POOLS).where(POOLS.c.id == pool.id))
            connection.execute(insert(POOLS).values(id=self.id, work=work, stops=0, **owner))
            row = {"pool": self.id, "status": FREE, "worker": "", "tries": 0}
            connection.execute(insert(CELLS), [{**row, "cell": cell, "place": i} for i, cell in enumerate(cells)])

    @patient
    def work(self) -> str | None:
        """What the workers must know; None once the pool is gone."""
        with self.database.reading() as connection:
            work = connection.scalar(select(POOLS.c.work).where(POOLS.c.id == self.id))
        return None if work is None else zlib.decompress(work).decode()

    @patient
    def delete(self) -> None:
        """Forget the pool: workers that still live end after their current round."""
        with self.database.writing(lasting=False) as connection:
            lock(connection)
            connection.execute(delete(POOLS).where(POOLS.c.id == self.id))

    # --- a worker's side -----------------------------------------------------------------------------------------

    @patient
    def enter(self, worker: str, host: str = "", said: str = "") -> None:
        """Say that this process is the worker of that name. host: its node's name, if that is another."""
        place = {"host": host or socket.gethostname(), "pid": os.getpid(), "leaves": 0, "said": said}
        key = {"pool": self.id, "worker": worker}
        these = (WORKERS.c.pool == self.id) & (WORKERS.c.worker == worker)
        with self.database.writing(lasting=False) as connection:
            if not connection.execute(update(WORKERS).where(these).values(place)).rowcount:
                connection.execute(insert(WORKERS).values({**key, **place, "tries": 0, "no_progress": 0}))

    @patient
    def take(self, worker: str, fits: Callable[[str], bool]) -> str | None:
        """Take the first free cell that fits; None if there is none, or the pool stops."""
        with self.database.writing(lasting=False) as connection:
            lock(connection)
            if any(self._ends(connection, worker)):
                return None
            query = select(CELLS.c.cell).where(CELLS.c.pool == self.id, CELLS.c.status == FREE).order_by(CELLS.c.place)
            with connection.execute(query) as rows:
                cell = next((row.cell for row in rows if fits(row.cell)), None)
            if cell is not None:
                taken = {"status": TAKEN, "worker": worker, "tries": CELLS.c.tries + 1}
                connection.execute(update(CELLS).where(CELLS.c.pool == self.id, CELLS.c.cell == cell).values(taken))
            return cell

    @patient
    def end(
        self,
        worker: str,
        cell: str,
        status: str,
        events: Sequence[Any] = (),
        *,
        counts: bool = False,
        stop: bool = False,
    ) -> bool:
        """Store how a worker's cell has ended, with the worker's last events, and stop the pool if that is so.

        False: the worker has lost the cell meanwhile. FREE: others may take it, and only with `counts` the turn
        counts. Once a cell is done, those that wait for its model are free.
        """
        mine = (CELLS.c.pool == self.id) & (CELLS.c.cell == cell) & (CELLS.c.worker == worker)
        values = {"status": status} | ({"tries": CELLS.c.tries - 1} if status == FREE and not counts else {})
        with self.database.writing(lasting=False) as connection:
            lock(connection)
            if not connection.execute(update(CELLS).where(mine, CELLS.c.status == TAKEN).values(values)).rowcount:
                return False
            if status == "done":
                waits = (CELLS.c.pool == self.id) & (CELLS.c.status == "waiting")
                connection.execute(update(CELLS).where(waits).values(status=FREE))
            if stop:
                connection.execute(update(POOLS).where(POOLS.c.id == self.id).values(stops=1))
            self._write(connection, worker, events)
            return True

    @patient
    def report(self, worker: str, events: Sequence[Any]) -> tuple[bool, bool]:
        """Store a worker's events; whether the pool stops, and whether this worker is to leave."""
        if not events:
            with self.database.reading() as connection:
                return self._ends(connection, worker)
        with self.database.writing(lasting=False) as connection:
            lock(connection)  # so that the ids are in the order of the commits
            if connection.scalar(select(POOLS.c.id).where(POOLS.c.id == self.id)):
                self._write(connection, worker, events)
            return self._ends(connection, worker)

    def _write(self, connection: Connection, worker: str, events: Sequence[Any]) -> None:
        if events:
            connection.execute(insert(REPORTS).values(pool=self.id, worker=worker, events=json.dumps(events)))

    def _ends(self, connection: Connection, worker: str) -> tuple[bool, bool]:
        stops = connection.scalar(select(POOLS.c.stops).where(POOLS.c.id == self.id))
        leaves = select(WORKERS.c.leaves).where(WORKERS.c.pool == self.id, WORKERS.c.worker == worker)
        return stops != 0, bool(connection.scalar(leaves))

    # --- the run's side ------------------------------------------------------------------------------------------

    @patient
    def stop(self) -> None:
        """Ask every worker to end after its current round."""
        with self.database.writing(lasting=False) as connection:
            connection.execute(update(POOLS).where(POOLS.c.id == self.id).values(stops=1))

    @patient
    def leave(self, workers: Iterable[str]) -> None:
        """Ask these workers to end after their current round."""
        with self.database.writing(lasting=False) as connection:
            these = (WORKERS.c.pool == self.id) & WORKERS.c.worker.in_([*workers])
            connection.execute(update(WORKERS).where(these).values(leaves=1))

    @patient
    def expect(self, tries: Mapping[str, int]) -> None:
        """Note submitted jobs, and how often each was submitted before; one may have started already."""
        row = {"pool": self.id, "host": "", "pid": 0, "leaves": 0, "no_progress": 0, "said": ""}
        with self.database.writing(lasting=False) as connection:
            for job, count in tries.items():
                these = (WORKERS.c.pool == self.id) & (WORKERS.c.worker == job)
                connection.execute(delete(WORKERS).where(these, WORKERS.c.said != ""))
                if not connection.execute(update(WORKERS).where(these).values(tries=count)).rowcount:
                    connection.execute(insert(WORKERS).values(row | {"worker": job, "tries": count}))

    @patient
    def left(self, job: str, said: str, no_progress: int = 0) -> None:
        """Store how a job has ended; empty: it is in the queue again."""
        values = {"said": said, "no_progress": no_progress} | ({} if said else {"host": ""})
        with self.database.writing(lasting=False) as connection:
            these = (WORKERS.c.pool == self.id) & (WORKERS.c.worker == job)
            connection.execute(update(WORKERS).where(these).values(values))

    @patient
    def entries(self) -> dict[str, Entry]:
        """The jobs that were submitted, and the workers that are in none."""
        query = select(WORKERS).where(WORKERS.c.pool == self.id, ~WORKERS.c.worker.contains("/"))
        with self.database.reading() as connection:
            rows = connection.execute(query.order_by(WORKERS.c.worker)).all()
        return {row.worker: Entry(row.host, row.pid, row.tries, row.no_progress, row.said) for row in rows}

    @classmethod
    def lasting(cls, database: Database) -> list[Pool]:
        """This user's pools that outlive their processes."""
        query = select(POOLS.c.id).where(POOLS.c.host.is_(None), POOLS.c.user == getpass.getuser())
        with database.writing(lasting=False) as connection:
            WORK.create_all(connection)
            return [cls(database, row.id) for row in connection.execute(query)]

    @patient
    def counts(self, prefix: str = "") -> tuple[int, int, bool]:
        """(free cells, cells taken by workers whose names begin so, whether the pool stops), of one moment."""
        taken = (CELLS.c.status == TAKEN) & CELLS.c.worker.startswith(prefix, autoescape=True)
        these = (CELLS.c.pool == self.id) & ((CELLS.c.status == FREE) | taken)
        with self.database.reading() as connection:
            query = select(CELLS.c.status, func.count()).where(these).group_by(CELLS.c.status)
            found = {row[0]: row[1] for row in connection.execute(query)}
            stops = connection.scalar(select(POOLS.c.stops).where(POOLS.c.id == self.id))
        return found.get(FREE, 0), found.get(TAKEN, 0), stops != 0

    @patient
    def failed(self, prefix: str) -> int:
        """How many cells of workers whose names begin so have failed."""
        theirs = CELLS.c.worker.startswith(prefix, autoescape=True)
        query = select(func.count()).where(CELLS.c.pool == self.id, CELLS.c.status == "failed", theirs)
        with self.database.reading() as connection:
            return int(connection.scalar(query) or 0)

    @patient
    def statuses(self) -> dict[str, str]:
        """cell -> FREE, TAKEN or how it has ended."""
        with self.database.reading() as connection:
            query = select(CELLS.c.cell, CELLS.c.status).where(CELLS.c.pool == self.id)
            return {row.cell: row.status for row in connection.execute(query)}

    @patient
    def taken(self) -> dict[str, Taken]:
        """worker -> the cell that it has taken."""
        pairs = (WORKERS.c.pool == CELLS.c.pool) & (WORKERS.c.worker == CELLS.c.worker)
        query = select(CELLS.c.worker, CELLS.c.cell, CELLS.c.tries, WORKERS.c.host, WORKERS.c.pid).join(WORKERS, pairs)
        with self.database.reading() as connection:
            rows = connection.execute(query.where(CELLS.c.pool == self.id, CELLS.c.status == TAKEN)).all()
        return {worker: Taken(*rest) for worker, *rest in rows}

    @patient
    def events(self, after: int) -> tuple[int, list[tuple[str, Any]]]:
        """(last report's id, [(worker, event)]) of the reports after the one with this id; old ones are deleted."""
        query = select(REPORTS).where(REPORTS.c.pool == self.id, REPORTS.c.id > after).order_by(REPORTS.c.id)
        with self.database.reading() as connection:
            rows = connection.execute(query).all()
        if rows and rows[-1].id // KEPT != after // KEPT:
            with self.database.writing(lasting=False) as connection:
                connection.execute(delete(REPORTS).where(REPORTS.c.pool == self.id, REPORTS.c.id <= after))
        found = [(row.worker, event) for row in rows for event in json.loads(row.events)]
        return (rows[-1].id if rows else after), found
