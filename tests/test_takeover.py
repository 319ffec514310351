"""No work is left undone: runners take over what others lose and wait for what they hold; no cell pays for a machine.

Stopped, killed and hanging processes, a locked database, a full disk, too little memory, time limits, signals.
"""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crew import Watcher, diverging, lasting, never, numbers, pid_of, recovering, rows, undisturbed, with_model
from test_opening import _mount

from fatbench.cli.watch import Watch
from fatbench.errors import SpecError, Unavailable
from fatbench.models.mcmahan_cnn import McMahanCNN
from fatbench.models.nin import NIN
from fatbench.runner import executors, progress, waiting, worker
from fatbench.runner.executors import Worker, is_working, local
from fatbench.runner.heartbeat import Heartbeat, renewing
from fatbench.runner.jobs import Event, Job, Machine, Work
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import run as run_all
from fatbench.runner.worker import attempt, work
from fatbench.settings import time_limit
from fatbench.store import database
from fatbench.store.schema import STAGES
from fatbench.store.stages import LeaseLost, Store


@pytest.fixture
def options(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(waiting, "PAUSE", 0.1)
    return {"jobs": 1, "device": "cpu", "db": machine.db}


@pytest.fixture
def other(machine: Machine, jobs: list[Job]):
    """Another process that has the first cell's training in hand and does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with Store.open(machine.db) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        assert store.claim(jobs[0].cell, "train", suite="crew", total=4, provenance={"pid": process.pid})
    yield process
    process.communicate()


def eventually(true: Callable[[], bool]) -> None:
    """Wait for another thread, which on a busy machine may take a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def beat(store: Store) -> float | None:
    return next(iter(store.stages().values())).heartbeat


# --- whose cell it is --------------------------------------------------------------------------------------------


@pytest.mark.promise("Leases", "A lease is renewed by progress, not by a thread that is alive")
def test_a_lease_is_renewed_by_beats_and_not_by_a_thread_that_lives(machine, jobs, monkeypatch) -> None:
    with Store.open(machine.db) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        run = store.claim(jobs[0].cell, "train", suite="crew", total=4, provenance={})
        first, heartbeat = beat(store), Heartbeat()
        network = torch.nn.Sequential(torch.nn.Identity())
        heartbeat.watch(network)
        with renewing(machine.db, run, heartbeat, 0.4):
            time.sleep(0.5)
            assert beat(store) == first  # the thread has looked, and nothing had happened
            network(torch.zeros(1))
            copy.deepcopy(network)[0](torch.zeros(1))  # part of a copy
            assert heartbeat.beats == 3
            eventually(lambda: beat(store) > first)
            with store.database.writing() as connection:
                connection.execute(STAGES.update().values(status="interrupted"))
            with pytest.raises(LeaseLost):
                eventually(lambda: network(torch.zeros(1)) is None)  # beats, until one of them is told


@pytest.mark.promise(
    "Interrupted and shared runs", "A run takes over the cells of a killed run, and ends with 0 only when all are done"
)
def test_a_run_takes_over_what_a_killed_one_had_in_hand(jobs, machine, options, forks, other, capfd) -> None:
    """It did the rest, waited, and went on when the other was killed: all is done, or it would not have ended."""

    class Killing(Watch):
        def note(self, text: str) -> None:
            super().note(text)
            other.kill()

    run_all(jobs[:2], Killing("crew"), RunOptions(**options))
    err = capfd.readouterr().err
    assert "crew: 2 of 2 cells done" in err
    assert f"waiting: {jobs[0].cell} train is held by process {other.pid} on" in err
    assert {status for status, _ in rows(machine, jobs[0]).values()} == {"done"}
    with Store.open(machine.db) as store:
        ended = {run["pid"]: run["status"] for run in store.runs([jobs[0].cell])}
    assert ended.pop(other.pid) == "interrupted" and set(ended.values()) == {"done"}


@pytest.mark.promise(
    "Interrupted and shared runs",
    "With `-c run.wait=false`, a run lists the remaining cells with their holders and ends with 1",
)
def test_without_waiting_it_says_what_is_left_and_who_has_it(jobs, machine, options, forks, other, capfd) -> None:
    with pytest.raises(SystemExit) as exit:
        run_all(jobs[:2], Watch("crew"), RunOptions(wait=False, **options))
    assert exit.value.code == 1
    err = capfd.readouterr().err
    assert "1 of 2 cells done, 1 being run by another process" in err
    assert f"{jobs[0].cell} train is held by process {other.pid} on" in err and "last progress" in err


def test_a_run_that_waits_can_be_stopped(jobs, machine, options, forks, other) -> None:

    class Ending(Watch):
        def note(self, text: str) -> None:
            if text.startswith("waiting"):
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as exit:
        run_all(jobs[:1], Ending("crew"), RunOptions(**options))
    assert exit.value.code == 143


@pytest.mark.parametrize("first", ["runs", "stages"])
@pytest.mark.promise("Interrupted and shared runs", "A claim by another run between two queries ends no run")
def test_a_claim_between_two_looks_at_the_database(first, jobs, machine, monkeypatch) -> None:
    """Whoever asks what a worker has in hand, or who holds what, meets a run that was not there a moment ago."""
    real, job = getattr(Store, first), jobs[0]

    def looked(self: Store, cells: list[str]) -> object:
        found = real(self, cells)
        with Store.open(machine.db) as store:
            store.claim(job.cell, "train", suite="crew", total=4, provenance={"host": "elsewhere", "pid": 7})
        return found

    for ask in (
        lambda store: is_working(job.cell, machine, Worker("elsewhere", 7)),
        lambda store: waiting.holders([job], store),
    ):
        with Store.open(machine.db) as store:
            store.add_cell(job.cell, job.spec)
            with monkeypatch.context() as patch:
                patch.setattr(Store, first, looked)
                assert ask(store) in (True, False, []) or "by process 7 on elsewhere" in ask(store)[0]
            with store.database.writing() as connection:
                connection.execute(STAGES.update().values(status="interrupted"))


@pytest.mark.parametrize("before", ["interrupted", "failed"])
@pytest.mark.promise(
    "Interrupted and shared runs", "Of several runs that want the same free cell, one gets it and the others wait"
)
def test_a_cell_that_another_process_claims_first_is_waited_for(before, jobs, machine, monkeypatch) -> None:
    """It was free when we looked. What had failed has failed: nobody claims it."""
    with Store.open(machine.db) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        run = store.claim(jobs[0].cell, "train", suite="crew", total=4, provenance={})
        store.fail(run, "it diverged") if before == "failed" else store.release(run)
        real = Store.claim

        def second(self: Store, *arguments: object, **options: object) -> int | None:
            real(self, *arguments, **{**options, "provenance": {"host": "elsewhere", "pid": 7}})
            return real(self, *arguments, **options)

        monkeypatch.setattr(Store, "claim", second)
        assert work(jobs[0], machine, store) == ("elsewhere" if before == "interrupted" else "failed")


@pytest.mark.promise("Interrupted and shared runs", "A worker that dies does not end its run")
def test_a_worker_that_died_does_not_end_the_run_that_writes_to_it() -> None:
    """The command line leaves SIGPIPE as it is, so that a command ends with its reader; not while cells are run."""
    reader, writer = os.pipe()
    os.close(reader)
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        with waiting.StopRequest():
            assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
            with pytest.raises(BrokenPipeError):
                os.write(writer, b"x")
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(writer)


def _stopped_and_continued(job: Job, machine: Machine, ready, go, outcome) -> None:
    """Work, but wait after the second round for somebody who stops this process."""

    def notify(event: Event) -> None:
        if event.round == 2 and not ready.is_set():
            ready.set()
            go.wait()

    with Store.open(machine.db) as store:
        outcome.put(work(job, machine, store, notify))


def stop_between_writes(pid: int) -> None:
    """SIGSTOP while the process holds no lock for writing: in the middle of a commit it would keep SQLite's."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        if not any(f" WRITE {pid} " in line for line in Path("/proc/locks").read_text().splitlines()):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


@pytest.mark.promise(
    "Leases",
    "A stopped process loses its cell when the lease ends. When continued, it drops the cell and stores nothing twice",
)
def test_a_stopped_process_loses_its_cell_and_notices_when_it_goes_on(jobs, machine, options, forks) -> None:
    """SIGSTOP after two rounds, a lease of two seconds; another run does the cell; SIGCONT: nothing is doubled."""
    context = multiprocessing.get_context("spawn")
    ready, go, outcome = context.Event(), context.Event(), context.Queue()
    job, place = jobs[0], recovering(machine, lease=2.0, checkpoint_seconds=0.0)
    process = context.Process(target=_stopped_and_continued, args=(job, place, ready, go, outcome))
    process.start()
    assert ready.wait(300)
    stop_between_writes(process.pid)
    run_all([job], Watch("crew"), RunOptions(**options))
    before = numbers(machine, job)
    assert process.is_alive()
    os.kill(process.pid, signal.SIGCONT)
    go.set()
    assert outcome.get(timeout=300) == "elsewhere"
    process.join()
    assert numbers(machine, job) == before == undisturbed(machine, job)
    assert {status for status, _ in rows(machine, job).values()} == {"done"}
    with Store.open(machine.db) as store:
        runs = [run for run in store.runs([job.cell]) if run["stage"] == "train"]
    assert [run["status"] for run in runs] == ["interrupted", "done"]
    assert runs[0]["pid"] == process.pid and runs[0]["lease"] == 2.0


@pytest.mark.promise("Interrupted and shared runs", "A stopped worker is replaced by its own run")
def test_a_worker_that_is_stopped_is_replaced(jobs, machine, forks, monkeypatch) -> None:
    """Nobody else runs: the run itself sees that its worker makes no progress, and begins the cell once more."""
    monkeypatch.setattr(executors, "check_interval", lambda machine: 0.5)
    monkeypatch.setattr(executors, "IDLE_SECONDS", 1e9)
    job, place = (lasting(jobs[0], 40), recovering(machine, lease=1.0, checkpoint_seconds=0.0))
    said: list[str] = []

    def watch(slot: int, event: Event) -> None:
        if event.kind == "progress" and not said:
            said.append("")
            os.kill(pid_of(machine, job), signal.SIGSTOP)
            monkeypatch.setattr(executors, "IDLE_SECONDS", 2.0)
        if event.kind == "interrupted":
            said[:] = [event.message]
            monkeypatch.setattr(executors, "IDLE_SECONDS", 1e9)  # the new one may take its time

    assert local.run(Work([job], place), ["cpu"], watch, never) == {job.cell: "done"}
    assert said == ["the worker process made no progress: it starts again"]
    assert numbers(machine, job) == undisturbed(machine, job)


# --- what no cell is to blame for --------------------------------------------------------------------------------


@pytest.mark.promise("Faults of the machine", "A run waits for a database that another process has locked")
def test_a_lock_of_another_process_is_waited_for(jobs, machine, monkeypatch) -> None:
    """Held for 30 times as long as SQLite waits: from the second round on, in training and at its end."""
    monkeypatch.setattr(database, "BUSY", 0.1)
    monkeypatch.setattr(database, "PAUSE", 0.1)
    foreign = sqlite3.connect(machine.db, isolation_level=None, check_same_thread=False)
    events: list[Event] = []

    def notify(event: Event) -> None:
        events.append(event)
        if (event.stage, event.kind, event.round) == ("train", "progress", 2):
            foreign.execute("BEGIN IMMEDIATE")
            threading.Timer(3.0, foreign.rollback).start()

    place = recovering(machine, checkpoint_seconds=0.0)
    began = time.monotonic()
    assert attempt(jobs[0], place, notify, lambda: False) == "done"
    assert time.monotonic() - began > 3
    foreign.close()
    assert not [event for event in events if event.kind in ("failed", "blocked", "interrupted")]
    assert numbers(machine, jobs[0]) == undisturbed(machine, jobs[0])
    log = Path(machine.files, jobs[0].cell, "log.txt").read_text()
    assert "another process has been writing for more than a minute: waiting" in log


@pytest.mark.parametrize("full", ["files", "everything"])
@pytest.mark.promise("Faults of the machine", "A full disk stops the run with exit code 5 and fails no cell")
def test_a_full_disk_stops_the_run_and_fails_no_cell(full, jobs, machine, options, forks, tmp_path, capfd) -> None:
    """A file system of 1 MB and 96 kB to spare: a state is larger. With space again the same command goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or not _mount(disk, "2m"):
        pytest.skip("only root may mount a file system")
    try:
        db = str(disk / "r.db") if full == "everything" else machine.db
        place = {**options, "db": db}
        os.environ["FATBENCH_FILES"] = str(disk / "files")
        Store.open(db, create=True).close()
        ballast = disk / "ballast"
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)), ballast.open("wb", 0) as file:
            while True:
                file.write(bytes(4096))
        os.truncate(ballast, ballast.stat().st_size - (8 << 10 if full == "files" else 160 << 10))
        with pytest.raises(Unavailable, match=r"disk is full|disk full|No space left") as stop:
            run_all(jobs, Watch("crew"), RunOptions(**place))
        assert stop.value.exit_code == 5 and "run the same command again to continue" in str(stop.value)
        assert "Traceback" not in capfd.readouterr().err
        ballast.unlink()
        with Store.open(db) as store:
            assert not [row for row in store.stages().values() if row.status == "failed"]
            assert set(progress.states_of(jobs, store).values()) == {"todo"}
        run_all(jobs, Watch("crew"), RunOptions(**place))
        assert numbers(replace(machine, db=db), jobs[2]) == undisturbed(machine, jobs[2])
    finally:
        os.environ.pop("FATBENCH_FILES", None)
        subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_takes_nothing_gives_the_cell_back(jobs, machine, monkeypatch) -> None:
    """The same without a file system to fill: the system call says so."""

    def refuse(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    events: list[Event] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        assert attempt(jobs[0], machine, events.append, lambda: False) == "blocked"
    assert rows(machine, jobs[0]) == {"train": ("interrupted", None)}
    (blocked,) = [event for event in events if event.kind == "blocked"]
    assert (blocked.cell, blocked.stage) == (jobs[0].cell, "train")
    assert blocked.message.endswith("the disk is full")
    assert attempt(jobs[0], machine, events.append, lambda: False) == "done"


@pytest.mark.promise("Interrupted and shared runs", "`status` and `run` agree on what failed")
def test_run_and_status_agree(jobs, machine, options, forks, capfd) -> None:
    """Folders for the logs that cannot be made: nothing has failed. A cell that diverges has, in both."""
    Path(machine.files).mkdir()
    for job in jobs:
        (Path(machine.files) / job.cell).write_text("a file")
    os.environ["FATBENCH_FILES"] = machine.files
    try:
        with pytest.raises(Unavailable, match=r"cannot write .*log\.txt: "):
            run_all(jobs, Watch("crew"), RunOptions(**options))
    finally:
        del os.environ["FATBENCH_FILES"]
        for job in jobs:
            (Path(machine.files) / job.cell).unlink()
    wild = diverging(jobs[0])
    with Store.open(machine.db) as store:
        assert set(progress.states_of(jobs, store).values()) == {"todo"}
    assert "0 of 3 cells done, 3 not finished" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        run_all([wild, jobs[1]], Watch("crew"), RunOptions(**options))
    assert "1 of 2 cells done, 1 failed" in capfd.readouterr().err
    with Store.open(machine.db) as store:
        assert progress.states_of([wild, jobs[1]], store) == {wild.cell: "failed", jobs[1].cell: "done"}


# --- memory ------------------------------------------------------------------------------------------------------


def cramped(monkeypatch, error: Callable[[], Exception], most: int, network: type = NIN) -> list[int]:
    """A network that has no memory for more than so many images; the sizes of the batches that it was given."""
    real, sizes = network.forward, []

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if len(x) > most:
            raise error()
        return real(self, x)

    monkeypatch.setattr(network, "forward", forward)
    return sizes


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(lambda: MemoryError("Unable to allocate 9 GiB"), marks=pytest.mark.nightly),
        lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:66] . DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["host", "gpu", "torch on the host"],
)
@pytest.mark.promise(
    "Faults of the machine",
    "A cell out of memory is tried once more with smaller microbatches, to the same numbers within rounding",
)
def test_too_little_memory_is_tried_once_more_with_smaller_microbatches(error, jobs, machine, monkeypatch) -> None:
    """Batches of 16 where 4 fit, chunks of 30 where 7 fit: the same numbers to rounding, and the runs say how."""
    job = with_model(jobs[0], name="mcmahan_cnn", width=8)
    job = replace(job, evaluations=[replace(e, batch=28) for e in job.evaluations])
    expected = undisturbed(machine, job)
    with monkeypatch.context() as patch:
        cramped(patch, error, 7, McMahanCNN)
        with Store.open(machine.db) as store:
            assert work(job, machine, store) == "done"
            runs = store.runs([job.cell])
    bounded = {run["stage"].split("-")[0]: run.get("microbatch") for run in runs}
    said = [run.get("out_of_memory") for run in runs]
    assert bounded == {"train": 4, "natural": None, "fgsm": None}  # an attack of ours halves what does not fit itself
    assert said == [str(error()), None, None]
    ours = numbers(machine, job)
    assert [row[:4] for row in ours] == [row[:4] for row in expected]
    assert [row[4] for row in ours] == pytest.approx([row[4] for row in expected], rel=1e-4, abs=1e-6)
    log = Path(machine.files, job.cell, "log.txt").read_text()
    assert "trying again with at most 4 images in the network at once" in log


def test_memory_that_is_never_enough_is_a_failure_in_words(jobs, machine, monkeypatch) -> None:
    sizes = cramped(monkeypatch, lambda: MemoryError("Unable to allocate"), 3)  # enough to count what a pass costs
    events: list[Event] = []
    with Store.open(machine.db) as store:
        assert work(jobs[0], machine, store, events.append) == "failed"
    said = "OutOfMemory: Unable to allocate; even with 4 images in the network at once"
    assert [(event.stage, event.message) for event in events if event.kind == "failed"] == [("train", said)]
    assert rows(machine, jobs[0])["train"] == ("failed", said)
    assert max(sizes) == 16


@pytest.mark.promise(
    "Faults of the machine", "A model with batch normalisation is not split into microbatches, and the cell says so"
)
def test_batch_normalisation_is_not_cut(jobs, machine, monkeypatch) -> None:
    """Its gradients would be others."""
    from fatbench.models.resnet import ResNet

    job = with_model(jobs[0], name="resnet18")

    def forward(self, x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ResNet, "forward", forward)
    with Store.open(machine.db) as store:
        assert work(job, machine, store) == "failed"
    assert rows(machine, job)["train"][1].endswith("batch normalisation in this model needs the whole batch")


# --- time and signals --------------------------------------------------------------------------------------------


@pytest.mark.promise("Interrupted and shared runs", "A cell can have a time limit")
def test_a_cell_has_so_much_time(jobs, machine, monkeypatch) -> None:
    """What was committed is kept, and a retry goes on from there."""
    job, place, heartbeats = (jobs[0], recovering(machine, checkpoint_seconds=0.0), list[Heartbeat]())

    def heartbeat_of(limit: float | None) -> Heartbeat:
        heartbeats.append(Heartbeat(limit))
        return heartbeats[-1]

    def notify(event: Event) -> None:
        if (event.stage, event.kind, event.round) == ("train", "progress", 2):
            assert heartbeats[-1].end > time.monotonic()
            heartbeats[-1].end = time.monotonic()

    monkeypatch.setattr(worker, "Heartbeat", heartbeat_of)
    with Store.open(machine.db) as store:
        assert work(job, recovering(place, time_limit=600.0), store, notify) == "failed"
        row = store.stages([job.cell])[job.cell, "train"]
        assert row.error.startswith("TimeLimit: the time limit of 600 s is over") and row.round == 2
        began: list[Event] = []
        assert work(job, recovering(place, retry_failed=True), store, began.append) == "done"
    assert (began[0].kind, began[0].round) == ("start", 2)


@pytest.mark.promise("Interrupted and shared runs", "A cell that hangs is killed when its time limit has passed")
def test_a_worker_that_does_not_end_with_its_time_is_killed(jobs, machine, forks, monkeypatch) -> None:
    monkeypatch.setattr(executors, "check_interval", lambda machine: 0.2)
    job, place = lasting(jobs[0], 600), recovering(machine, time_limit=600.0)

    def stop() -> None:
        os.kill(pid_of(machine, job), signal.SIGSTOP)
        monkeypatch.setattr(executors, "GRACE", -600.0)

    seen = Watcher(job.cell, "start", stop)
    assert local.run(Work([job], place), ["cpu"], seen, never) == {job.cell: "failed"}
    said = "TimeLimit: the time limit of 600 s is over, and the worker process did not stop"
    assert rows(machine, job)["train"][1].startswith(said)


def test_time_limits_as_people_write_them() -> None:
    given = {"90": 90, "45m": 2700, "2h": 7200, " 1.5d ": 129600, None: None}
    assert {text: time_limit(text) for text in given} == given
    for text in ("", "h", "-1h", "0", "2 weeks", "nan", "1e99"):
        with pytest.raises(SpecError, match=r"time_limit: expected a time such as 90s, 45m or 2h, got"):
            time_limit(text)


OTHER_SIGNALS = [pytest.param(s, marks=pytest.mark.nightly) for s in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]


@pytest.mark.parametrize("which", [signal.SIGTERM, *OTHER_SIGNALS])
@pytest.mark.promise(
    "Interrupted and shared runs",
    "Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal (SIGHUP) checkpoint the current round and release the cell",
)
def test_a_signal_ends_the_run_after_the_round_at_hand(which, jobs, machine, options, forks, monkeypatch) -> None:
    """The round is committed, the cell is given back, and the same run goes on from there."""
    job, watch, rounds = lasting(jobs[0]), Watch("crew"), []

    def see(slot: int, event: Event) -> None:
        if event.kind == "progress" and not rounds:
            os.kill(os.getpid(), which)
            rounds.append(event.round)

    monkeypatch.setattr(watch, "see", see)
    with pytest.raises(SystemExit) as exit:
        run_all([job], watch, RunOptions(**options))
    assert exit.value.code == 128 + which
    with Store.open(machine.db) as store:
        row = store.stages([job.cell])[job.cell, "train"]
    assert row.status == "interrupted" and 1 <= row.round < row.total and row.checkpoint
