"""A suite of three small cells, and what tests of executors ask about them."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fatbench.runner.jobs import Event, Job, Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files, signatures, source_files

SUITE = """
name: crew
title: A few rounds of two clients on a few digits
seeds: [1]
base:
  data: digits
  train: 60
  test: 30
  validation: 10
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: nin, width: 4, init: he}
  algorithm:
    name: fedavg
    rounds: 4
    local:
      epochs: 1
      batch: 16
      lr: 0.05
      objective: {name: at, attack: {name: pgd, eps: 8/255, step: 4/255, steps: 1}}
    aggregator: samples
  monitor: natural
axes:
  pace:
    slow: {algorithm: {local: {lr: 0.02}}}
    usual: {}
    fast: {algorithm: {local: {lr: 0.08}}}
evaluate:
  checkpoints: [last]
  attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}
presets: {paper: {}}
tables:
  - {id: A, title: Crew, rows: [pace], values: {natural: natural}}
"""


def forget_plugins() -> None:
    """No plug-in is known or in memory any more, as in a new process."""
    source_files.delete(*signatures.plugins())
    signatures.drop_plugins(list(signatures.plugins()))


def machine_of(place: Path, **recovery: Any) -> Machine:
    """Database, files and data in one folder; every round is committed."""
    how = Recovery(checkpoint_seconds=0.0, **recovery)
    return Machine(str(place / "r.db"), str(place / "files"), str(place), recovery=how)


def fork_server() -> Any:
    """Processes from a server that has torch loaded. It keeps the environment that it was started with."""
    context = multiprocessing.get_context("forkserver")
    parts = ("runner.executors.local", "engine.accuracy", "engine.experiment", "methods.algorithms", "methods.evasion")
    context.set_forkserver_preload(["torch", *(f"fatbench.{part}" for part in parts)])
    return context


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Workers come from that server, also the one that every `fatbench run` begins early. The program itself starts new
    interpreters, which takes seconds each; tests that start the program as a process see them."""
    context, context_of = fork_server(), multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        chosen = lambda method=None: context if method == "spawn" else context_of(method)  # noqa: E731
        patch.setattr(multiprocessing, "get_context", chosen)
        yield


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Three cells of about a second; the folder they are in is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("crew.yaml").write_text(SUITE)
    return jobs_of(files.load("crew.yaml").plan())


@pytest.fixture
def machine(jobs: list[Job], tmp_path: Path) -> Machine:
    place = Machine(
        db=str(tmp_path / "r.db"),
        files=str(tmp_path / "files"),
        data=str(tmp_path / "data"),
        recovery=Recovery(checkpoint_seconds=1000.0),  # only what a worker stops for is committed before the last round
    )
    Store.open(place.db, create=True).close()
    return place


def recovering(machine: Machine, **changes: Any) -> Machine:
    """The machine with other settings of its recovery."""
    return replace(machine, recovery=replace(machine.recovery, **changes))


def never() -> int:
    return 0


def ignore(slot: int, event: Event) -> None:
    pass


def with_model(job: Job, **model: Any) -> Job:
    """The cell with another network."""
    return replace(job, cell=model["name"], spec={**job.spec, "model": model})


def diverging(job: Job, cell: str = "wild") -> Job:
    spec = copy.deepcopy(job.spec)
    spec["algorithm"]["local"]["lr"] = 1e30
    return replace(job, cell=cell, spec=spec)


def lasting(job: Job, rounds: int = 60) -> Job:
    """A cell that is still being trained when somebody reacts to its first round: a round takes some 20 ms."""
    spec = copy.deepcopy(job.spec)
    spec["algorithm"]["rounds"] = rounds
    return replace(job, cell=f"{job.cell}-{rounds}", spec=spec)


def rows(machine: Machine, job: Job) -> dict[str, tuple[str, str | None]]:
    with Store.open(machine.db) as store:
        return {row.stage: (row.status, row.error) for row in store.stages([job.cell]).values()}


def numbers(machine: Machine, job: Job) -> list[tuple]:
    with Store.open(machine.db) as store:
        found = store.measurements([job.cell])
    keys = ("stage", "round", "client", "metric", "value", "n")
    return sorted(tuple(row[key] for key in keys) for row in found if row["metric"] != "seconds")


WHOLE: dict[str, list[tuple]] = {}


def undisturbed(machine: Machine, job: Job) -> list[tuple]:
    """The numbers of a cell that this process works on by itself, once: they are the same in every test."""
    if (asked := repr(job)) not in WHOLE:
        place = replace(machine, db=f"{machine.db}.whole", files=f"{machine.files}-whole")
        with Store.open(place.db, create=True) as store:
            assert work(job, place, store) == "done"
        WHOLE[asked] = numbers(place, job)
    return WHOLE[asked]


def pid_of(machine: Machine, job: Job) -> int:
    """The process that has the cell's training in hand."""
    return next(iter(pids_of(machine, job)))


def pids_of(machine: Machine, job: Job) -> set[int]:
    """The processes that have a stage of the cell in hand; none just after one was killed."""
    with Store.open(machine.db) as store:
        return {run["pid"] for run in store.runs([job.cell]) if run["status"] == "running"}


def once_begun(machine: Machine, job: Job, act: Callable[[int], int | None]) -> Callable[[], int]:
    """A `stop` that hands the worker's pid to `act` once the cell is in somebody's hands, and then says what it said.

    That is before the worker has imported torch, which takes most of a small cell's time.
    """
    said: list[int] = []

    def stop() -> int:
        if not said and rows(machine, job).get("train", ("", ""))[0] == "running":
            said.append(act(pid_of(machine, job)) or 0)
        return said[0] if said else 0

    return stop


def each_time(machine: Machine, job: Job, act: Callable[[int], object]) -> Callable[[], int]:
    """A `stop` that hands each worker's pid to `act` once the cell is in its hands, and never asks to stop."""
    seen: set[int] = set()

    def stop() -> int:
        if rows(machine, job).get("train", ("", ""))[0] == "running":
            for pid in pids_of(machine, job) - seen:
                seen.add(pid)
                act(pid)
        return 0

    return stop


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Watcher:
    """Takes events, and does something once when a cell gets to a point."""

    def __init__(self, cell: str = "", kind: str = "", act: Callable[[], object] = lambda: None):
        self.when, self.act, self.seen = (cell, kind), act, list[tuple[int, Event]]()

    def __call__(self, slot: int, event: Event) -> None:
        self.seen.append((slot, event))
        if self.when == (event.cell, event.kind) and event.stage == "train":
            self.when = ("", "")
            self.act()

    def kinds(self, job: Job, stage: str = "cell") -> list[str]:
        return [event.kind for _, event in self.seen if (event.cell, event.stage) == (job.cell, stage)]
