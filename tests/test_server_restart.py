"""A PostgreSQL server is restarted at every point of a step: what is under way waits, and is done exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crew import Watcher, lasting, never, numbers, undisturbed
from databases import binaries_of_postgres, serving
from sqlalchemy import event

from fatbench.cli.watch import Watch
from fatbench.engine.rounds import Number
from fatbench.runner import heartbeat, progress, start, versions, worker
from fatbench.runner.executors import local
from fatbench.runner.jobs import Work
from fatbench.runner.run_options import RunOptions
from fatbench.runner.waiting import StopRequest
from fatbench.runner.worker import attempt, open_store
from fatbench.store import database
from fatbench.store.database import Locked
from fatbench.store.stages import Store

CELL, SPEC = "0123456789abcdef", {"seed": 1}


class Server:
    """A server that is stopped, as by a crash, and started again."""

    def __init__(self, folder: str, binaries: Path):
        self.folder, self.url = folder, f"postgresql://postgres:geheim@/postgres?host={folder}"
        self.control = [str(binaries / "pg_ctl"), "-s", "-w", "-D", f"{folder}/data"]
        self.timers = list[threading.Timer]()
        self.outages = 0

    def call(self, *arguments: str) -> None:
        owner = os.stat(f"{self.folder}/data").st_uid
        with open(os.devnull, "wb") as nowhere:
            subprocess.run([*self.control, *arguments], check=True, user=owner, cwd="/", stdout=nowhere, stderr=nowhere)

    def stop(self) -> None:
        self.call("-m", "immediate", "stop")
        self.outages += 1

    def start(self) -> None:
        self.call("-o", f"-k {self.folder} -c listen_addresses= -c fsync=off", "-l", f"{self.folder}/data/log", "start")

    def restart(self, seconds: float = 0.3) -> None:
        """Stop, and start in so many seconds."""
        self.stop()
        self.timers.append(threading.Timer(seconds, self.start))
        self.timers[-1].start()

    def join(self) -> None:
        for timer in self.timers:
            timer.join()
        self.timers.clear()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    pytest.importorskip("psycopg")
    if (binaries := binaries_of_postgres()) is None:
        pytest.skip("no PostgreSQL server of this test's own")
    with serving(binaries) as folder:
        server = Server(folder, binaries)
        yield server
        server.call("-m", "immediate", "stop")


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, with an empty database."""
    monkeypatch.setattr(database, "PAUSE", 0.05)
    engine = database.Database(running.url)._engine
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    Store.open(running.url, create=True).close()
    running.outages = 0
    yield running
    running.join()


MOMENTS = ("first statement", "last statement", "before commit", "after commit")


@contextmanager
def outage(store: Store, server: Server, moment: str, last: str) -> Iterator[None]:
    """Inside, the server is restarted once, at a moment of the transaction whose last statement begins with `last`."""
    engine, dialect = store.database._engine, store.database._engine.dialect
    commit, seen = dialect.do_commit, list[str]()

    def statement(connection: Any, cursor: Any, text: str, *_: object) -> None:
        if server.outages == 0 and (moment == MOMENTS[0] or (moment == MOMENTS[1] and text.startswith(last))):
            server.restart()
        seen.append(text)

    def committing(connection: Any) -> None:
        ends = any(text.startswith(last) for text in seen) and server.outages == 0
        if ends and moment == "before commit":
            server.restart()
        commit(connection)
        if ends and moment == "after commit":
            server.restart()
            connection.execute("SELECT 1")  # the answer is lost, as the driver says it

    event.listen(engine, "before_cursor_execute", statement)
    dialect.do_commit = committing
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", statement)
        dialect.do_commit = commit
    assert server.outages == 1


def stage_of(store: Store, around: Callable[[str], Any]) -> list[Any]:
    """A stage from its claim to its end, each step inside `around(its name)`; what the database holds then."""
    store.add_cell(CELL, SPEC)
    with around("claim"):
        run = store.claim(CELL, "fgsm-1@4", suite="s", total=16, provenance={"pid": os.getpid()})
    with around("heartbeat"):
        store.heartbeat(run)
    with around("commit"):
        store.commit(run, numbers=iter([Number("a", 0.25, 8, 8)]), round=8, outcomes=(0, 8, b"\x11"), record={"x": 1})
    with around("status"):
        [row] = store.stages([CELL]).values()
    assert (row.round, row.status, row.alive) == (8, "running", True) or row.run == run
    with around("finish"):
        store.finish(run, iter([Number("b", 0.5, 16, 16)]), round=16)
    runs = [(entry["stage"], entry["status"]) for entry in store.runs()]
    [row] = store.stages([CELL]).values()
    values = [(number["metric"], number["value"], number["n"]) for number in store.measurements([CELL])]
    return [runs, (row.status, row.round, row.record), values, store.outcomes(CELL, "fgsm-1@4")]


LAST = {"claim": "INSERT INTO stages", "heartbeat": "UPDATE stages", "commit": "INSERT INTO outcome_chunks",
        "status": "SELECT", "finish": "UPDATE stages"}  # fmt: skip


ALL = [(step, moment) for step in LAST for moment in MOMENTS]


@pytest.mark.promise(
    "Faults of the machine", "While a PostgreSQL server is restarted runs wait, and each step is done once"
)
@pytest.mark.parametrize(
    ("step", "moment"),
    [pytest.param(*one, marks=[pytest.mark.nightly] * (one[0] != "commit" and one[1] != MOMENTS[0])) for one in ALL],
)
def test_a_restart_during_each_step_of_a_stage(server: Server, tmp_path: Path, step: str, moment: str) -> None:
    """All that is stored equals what is stored undisturbed, with one run."""
    with Store.open(str(tmp_path / "x.db"), create=True) as whole:
        expected = stage_of(whole, lambda name: contextmanager(lambda: iter([None]))())
    with open_store(server.url) as store:
        store.database.patience = 30.0

        def around(name: str) -> Any:
            forced = name == step
            return outage(store, server, moment, LAST[step]) if forced else contextmanager(lambda: iter([None]))()

        assert stage_of(store, around) == expected
    assert server.outages == 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_without_patience_a_restart_is_said_at_once(server: Server, moment: str) -> None:
    """Commands other than runs: an error in words. After a commit without an answer, the truth is in the database."""
    with Store.open(server.url) as store:
        store.add_cell(CELL, SPEC)
        with pytest.raises(Locked), outage(store, server, moment, "INSERT INTO stages"):
            store.claim(CELL, "train", suite="s", total=1, provenance={})
        server.join()
        assert len(store.runs()) == (moment == "after commit")


def test_a_restart_during_a_heartbeat(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One renewal fails, the next one renews; the work goes on meanwhile."""
    renewed = list[float]()
    beat = Store.heartbeat

    def heartbeat_of(self: Store, run: int) -> None:
        if server.outages == 0:
            server.restart()
        beat(self, run)
        renewed.append(time.monotonic())

    monkeypatch.setattr(Store, "heartbeat", heartbeat_of)
    with Store.open(server.url) as store:
        store.add_cell(CELL, SPEC)
        run = store.claim(CELL, "train", suite="s", total=1, provenance={"pid": os.getpid()})
        beats = heartbeat.Heartbeat()
        with heartbeat.renewing(server.url, run, beats, lease=1.0):
            end = time.monotonic() + 30
            while not renewed and time.monotonic() < end:
                beats()
                time.sleep(0.02)
        assert renewed and server.outages == 1
        store.finish(run)


def test_a_worker_that_finds_no_server_waits_for_it(jobs, machine, server: Server) -> None:
    expected = undisturbed(machine, jobs[0])
    server.restart(1.0)
    place = replace(machine, db=server.url)
    assert attempt(jobs[0], place, lambda event: None, lambda: False) == "done"
    assert numbers(place, jobs[0]) == expected


def test_a_worker_does_not_wait_for_ever_for_a_server_it_never_saw(jobs, machine, monkeypatch) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setattr(worker, "OPENING", 0.1)
    monkeypatch.setattr(database, "PAUSE", 0.05)
    seen = []
    place = replace(machine, db="postgresql://me:geheim@127.0.0.1:1/x")
    assert attempt(jobs[0], place, seen.append, lambda: False) == "blocked"
    assert "refused" in seen[0].message and "geheim" not in seen[0].message


def test_a_restart_in_the_middle_of_training(jobs, machine, forks, server: Server) -> None:
    """Worker processes commit every round: the server is away while they do."""
    job = lasting(jobs[0], 8)
    expected = undisturbed(machine, job)
    place = replace(machine, db=server.url, recovery=replace(machine.recovery, checkpoint_seconds=0.0))
    watch = Watcher(job.cell, "progress", server.restart)
    assert local.run(Work([job], place), ["cpu"], watch, never) == {job.cell: "done"}
    assert server.outages == 1 and watch.kinds(job) == ["done"]
    assert numbers(place, job) == expected
    with Store.open(server.url) as store:
        assert {run["status"] for run in store.runs()} == {"done"}


@pytest.mark.parametrize("point", ["states_of", "changed"])
def test_a_restart_while_the_driver_reads_the_status(jobs, machine, forks, server, monkeypatch, capfd, point) -> None:
    """At the end of a run and between two looks at what others have in hand."""
    module = {"states_of": progress, "changed": versions}[point]
    real, ended = getattr(module, point), threading.Event()
    executor = local.run

    def run(*args: Any, **kwargs: Any) -> Any:
        statuses = executor(*args, **kwargs)
        ended.set()
        return statuses

    def after_outage(*args: Any, **kwargs: Any) -> Any:
        if ended.is_set() and server.outages == 0:
            server.restart()
        return real(*args, **kwargs)

    monkeypatch.setattr(local, "run", run)
    monkeypatch.setattr(module, point, after_outage)
    start.run(jobs[:1], Watch("crew"), RunOptions(db=server.url, device="cpu", jobs=1))
    assert server.outages == 1 and "1 of 1 cells done" in capfd.readouterr().err


def test_a_user_who_will_not_wait(server: Server) -> None:
    """Ctrl-C ends the driver's wait, with the code of the signal."""
    server.stop()
    try:
        with pytest.raises(SystemExit) as exit, StopRequest() as request:
            opened = Store(database.Database(server.url))
            opened.database.patience, opened.database.stop = 30.0, request.ask  # type: ignore[method-assign]
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            opened.stages()
        assert exit.value.code == 128 + signal.SIGINT
    finally:
        server.start()
