"""The plain data that a run and its workers exchange: jobs, the machine's options, events."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fatbench.errors import UnknownName
from fatbench.settings import LocalPath, Precision
from fatbench.store.grid_points import Point
from fatbench.store.leases import LEASE
from fatbench.suite.calls import call
from fatbench.suite.cells import Evaluation, TransferOrigin

if TYPE_CHECKING:
    from fatbench.runner.heartbeat import Heartbeat
    from fatbench.store.inputs import Reason
    from fatbench.store.stages import Store

# waiting: for other cells' models; blocked: something every cell needs is unavailable, so the run stops
CellStatus = Literal["done", "failed", "interrupted", "elsewhere", "waiting", "blocked"]
WORSE: tuple[CellStatus, ...] = ("done", "elsewhere", "failed")  # a cell has the worst status of its stages


@dataclass(frozen=True)
class Job:
    """A cell and the evaluations that a suite asks for; plain data that can be sent to other processes and machines."""

    cell: str
    spec: dict[str, Any]
    evaluations: list[Evaluation]
    checkpoints: list[str]
    suite: str
    preset: str
    label: str = ""  # the point of the grid in words: "Non-IID, FedAvg, SFAT, seed 6"
    points: tuple[Point, ...] = ()  # the cell's places in the suite's grid
    answers: Mapping[str, Any] | None = None  # for a network that was not trained here: see `store.fingerprints`


def resolved(job: Job) -> Job:
    """The job with its cell and attacks as Calls again, in the process that received it and has loaded the plug-ins."""
    try:
        attacks = [call("Attack", evaluation.attack) for evaluation in job.evaluations]
        spec = call("Experiment", job.spec)
    except UnknownName:  # the stage that needs the function reports it
        return job
    evaluations = [
        replace(evaluation, attack=attack) for evaluation, attack in zip(job.evaluations, attacks, strict=True)
    ]
    return replace(job, spec=spec, evaluations=evaluations)


@dataclass(frozen=True)
class Recovery:
    """How a run treats failures, changed inputs and stopped processes, and how much work it may lose."""

    retry_failed: bool = False
    rerun_changed: bool = False  # compute stages again whose inputs have changed since
    checkpoint_seconds: float = 30.0  # between two checkpoints of a training; 0 saves every round
    lease: float = LEASE  # seconds without progress after which another process may take a stage over
    time_limit: float | None = None  # seconds that a worker may spend on a cell


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes: the options of `fatbench run` that concern the machine."""

    db: str
    files: str
    data: str
    device: str = "cpu"
    precision: Precision | Literal["auto"] = "fp32"  # auto: a worker chooses for each cell that is not begun
    attack_precision: Precision | None = None  # for attacks after training; None: as `precision`
    strict: bool = True  # deterministic kernels only, if the precision has them; see `stage.retry_nondeterministic`
    path: LocalPath | Literal["auto"] = "loop"  # auto: a worker chooses for each cell
    microbatch: int | None = None
    threads: int = 1
    plugins: Mapping[str, Any] = field(default_factory=dict)  # as `signatures.of_plugins` gives them
    recovery: Recovery = Recovery()


@dataclass(frozen=True)
class Work:
    """The work of a run, as its workers know it."""

    jobs: Sequence[Job]
    machine: Machine  # as text without the address of the database, which may hold a password
    fail_fast: bool = False
    per_gpu: int = 1
    patience: float = 60.0  # seconds for the current round once a SLURM job must end; then its last checkpoint counts
    folder: str = ""  # of the logs of SLURM jobs

    def text(self) -> str:
        """The work as JSON."""
        work = replace(self, machine=replace(self.machine, db=""))
        return json.dumps(work, default=lambda item: {part.name: getattr(item, part.name) for part in fields(item)})

    @classmethod
    def parsed(cls, text: str, db: str) -> Work:
        """The work that `text` has written."""
        work = json.loads(text)
        machine = work["machine"] | {"db": db, "recovery": Recovery(**work["machine"]["recovery"])}
        return cls(**work | {"jobs": [_parsed_job(job) for job in work["jobs"]], "machine": Machine(**machine)})


def _parsed_job(job: dict[str, Any]) -> Job:
    points = tuple(Point(*rest)._replace(evaluations=tuple(rest[8])) for rest in job["points"])
    evaluations = [
        Evaluation(**one | {"origin": None if one["origin"] is None else TransferOrigin(**one["origin"])})
        for one in job["evaluations"]
    ]
    return Job(**job | {"points": points, "evaluations": evaluations})


@dataclass(frozen=True)
class Event:
    """What a worker reports to the run's observer."""

    cell: str
    stage: str  # a stage; "cell" once all work on the cell is over; "slot" when a worker is "given" the cell
    kind: Literal["given", "start", "progress", "done", "failed", "interrupted", "elsewhere", "waiting", "blocked"]
    round: int = 0
    total: int = 0
    images: float = 0.0  # image passes since the last event
    loss: float | None = None  # the round's training loss
    accuracy: float | None = None  # in training on clean test images; in an attack on the images so far
    message: str = ""


Watch = Callable[[int, Event], None]  # takes a slot's number and what the worker there reports
Stop = Callable[[], int]  # what the user asked for: 0 to go on, 1 to end after the current round, 2 to end at once
Note = Callable[[str], None]  # tells the user what concerns no single cell
Statuses = dict[str, CellStatus]  # of each cell


@dataclass(frozen=True)
class Summary:
    """How a run ended: the number of its cells, and those that are not done."""

    cells: int
    failed: Sequence[str]
    interrupted: Sequence[str]
    elsewhere: Sequence[str]  # another process runs them
    changed: Mapping[str, Mapping[str, Sequence[Reason]]]  # see `fatbench.runner.versions.Changed`

    @property
    def done(self) -> int:
        return self.cells - len(self.failed) - len(self.interrupted) - len(self.elsewhere) - len(self.changed)


@dataclass(frozen=True)
class Turn:
    """A worker's turn at a cell: the job, where its results go, and callbacks to report and to stop."""

    job: Job
    store: Store
    folder: Path  # with the cell's files
    notify: Callable[[Event], None]
    stop: Callable[[], bool]  # called after every round and every chunk of an evaluation; True ends the turn
    heartbeat: Heartbeat  # keeps the leases of its stages


def evaluation_rounds(job: Job, record: Mapping[str, Any]) -> list[int]:
    """The rounds whose models the job's evaluations attack; each once."""
    rounds = [int(record[name]["round"]) for name in job.checkpoints if name in record]
    return list(dict.fromkeys(rounds))
