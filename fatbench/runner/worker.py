"""A worker takes cells from the database, one after the other, and works on each stage by stage.

    take_cells("r.db", pool, "0.0", "cpu")     # every launcher starts this, in a process, a task or a job

A cell is trained; then every evaluation is run on every checkpoint that the suite asks for. A process killed at any
instant leaves a database from which the same command continues and ends with the same bytes. See `training.py` and
`attacking.py`, and `stage.py` for what they share.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fatbench.data import decoded
from fatbench.errors import FatbenchError, MachineError, Unavailable
from fatbench.runner import checkpoints, slots, versions
from fatbench.runner.attacking import attack_models
from fatbench.runner.checkpoints import model_file
from fatbench.runner.gpu_estimates import path_for
from fatbench.runner.heartbeat import Heartbeat
from fatbench.runner.jobs import CellStatus, Event, Job, Machine, Turn, Work, resolved
from fatbench.runner.stage import claim
from fatbench.runner.training import train
from fatbench.settings import FORMER_PATHS, LocalPath, data_in
from fatbench.store.database import patiently
from fatbench.store.pools import FREE, Pool
from fatbench.store.stages import Store
from fatbench.suite import plugin_reads, plugins, signatures

log = logging.getLogger("fatbench")
OPENING = 600.0  # seconds that a worker waits for the database before it gives up: its node may not reach the server
OFTEN, SELDOM = 0.2, 2.0  # seconds between two reports, or five times as long as one takes


# --- cell after cell ---------------------------------------------------------------------------------------------


def take_cells(db: str, pool_id: str, name: str, device: str, said: str = "") -> None:
    """Take cells from a pool until none is free for this process, or it is to end.

    name, said: the worker's name in the pool, and what the pool is to know of it.
    A plug-in may change anything in torch. A process that has run one takes only cells whose training uses it.
    SystemExit: the database cannot be used any more.
    """
    try:
        with open_store(db) as store:
            pool = Pool(store.database, pool_id)
            if (text := pool.work()) is not None:
                pool.enter(name, said=said)
                _take_cells(Work.parsed(text, db), pool, name, device)
    except Unavailable as error:
        raise SystemExit(error.exit_code) from None


def _take_cells(work: Work, pool: Pool, name: str, device: str) -> None:
    jobs = {job.cell: job for job in work.jobs}
    machine, has_run = replace(work.machine, device=device), set[Path]()
    signatures.add_described(machine.plugins)

    def fits(cell: str) -> bool:
        return not has_run or has_run <= plugins.files(jobs[cell].spec)

    with Report(machine.db, pool.id, name) as report:
        while cell := pool.take(name, fits):
            job = jobs[cell]
            has_run |= plugins.files(job.spec, job.evaluations)
            report(Event(cell, "slot", "given"))
            status = attempt(job, machine, report, lambda: report.stops or report.leaves)
            stop = status == "blocked" or (status == "failed" and work.fail_fast)
            gives_back = status == "interrupted" and report.leaves
            last_events = report.rest(*([] if gives_back else [Event(cell, "cell", status)]))
            pool.end(name, cell, FREE if gives_back else status, last_events, stop=stop)
            gc.freeze()  # objects that outlive a cell, such as modules, are exempt from later collections
    gc.unfreeze()  # else triton, which timm imports, lists every function that is left on stderr at exit


class Report:
    """Stores a worker's events in its pool and reads there whether it is to end, in a thread: no round waits."""

    def __init__(self, db: str, pool: str, worker: str):
        self.db, self.pool, self.worker = db, pool, worker
        self.events: list[Any] = []
        self.stops = self.leaves = False
        self.over, self.wakes, self.writing = False, threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Report:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over = True
        self.wakes.set()
        self.thread.join()

    def __call__(self, event: Event) -> None:
        self.events.append(asdict(event))
        if event.kind != "progress":
            self.wakes.set()

    def rest(self, *events: Event) -> list[Any]:
        """What is not stored yet, and these events."""
        with self.writing:
            rest, self.events = [*self.events, *map(asdict, events)], []
        return rest

    def _repeat(self) -> None:
        wait = OFTEN
        while True:
            self.wakes.wait(wait)
            self.wakes.clear()
            if self.over:
                return
            began = time.monotonic()
            with self.writing:
                count = len(self.events)
                try:
                    with Store.open(self.db) as store:
                        stops = Pool(store.database, self.pool).report(self.worker, self.events[:count])
                    self.stops, self.leaves = self.stops or stops[0], self.leaves or stops[1]
                    del self.events[:count]
                except FatbenchError:  # try again later; the work itself meets what is wrong
                    pass
            wait = min(max(OFTEN, 5 * (time.monotonic() - began)), SELDOM)


def open_store(db: str) -> Store:
    """Open the database for a worker, whose work neither another writer nor a restarted server may end."""
    store = patiently(lambda: Store.open(db), OPENING)
    store.database.patience = math.inf
    return store


def attempt(job: Job, machine: Machine, notify: Callable[[Event], None], stop: Callable[[], bool]) -> CellStatus:
    """Take a worker's turn at a cell, with its own database connection.

    `work` stores the failure of a stage. Other errors (no database, no place for the log) cannot be stored: they become
    an event, and the worker goes on to the next cell.
    """
    try:
        with open_store(machine.db) as store:
            return work(job, machine, store, notify, stop)
    except Unavailable as error:
        notify(Event(job.cell, "train", "blocked", message=str(error)))
        return "blocked"
    except Exception as error:
        is_expected = isinstance(error, FatbenchError)
        notify(Event(job.cell, "train", "failed", message=str(error) if is_expected else traceback.format_exc()))
        return "failed"


# --- one cell ----------------------------------------------------------------------------------------------------


@plugin_reads.watching()
def work(
    job: Job,
    machine: Machine,
    store: Store,
    notify: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> CellStatus:
    """Do what is left of a job. A failure is stored with its traceback and returned, not raised.

    `stop` is called after every round and every chunk of an evaluation; if it is True, the work is committed and ends.
    """
    signatures.add_described(machine.plugins)
    job = resolved(job)
    store.add_cell(job.cell, job.spec)
    store.store_points(job.points)
    try:
        machine = resolve_auto(job, machine, store)
    except MachineError as error:  # another machine can continue the cell
        notify(Event(job.cell, "train", "interrupted", message=str(error)))
        return "interrupted"
    heartbeat = Heartbeat(machine.recovery.time_limit)
    turn = Turn(job, store, Path(machine.files) / job.cell, notify, stop, heartbeat)
    handler = _log_to(turn.folder / "log.txt")

    def ask(*_: object) -> None:
        if stop():
            raise decoded.Interrupted

    try:
        for trained_again in (False, True):
            with decoded.progress(ask), data_in(Path(machine.data)):
                status = train(turn, machine)
            if status != "done":
                return status
            try:
                attacking = replace(machine, precision=machine.attack_precision or machine.precision)
                with decoded.progress(ask), data_in(Path(machine.data)):
                    return attack_models(turn, attacking, trained_again)
            except checkpoints.DamagedCheckpoint as error:  # only in the first pass, see `trained_again`
                log.warning("%s: training begins again from round 0", error)
                store.reopen(job.cell, "train")
        raise AssertionError("unreachable: the second pass stores a damaged checkpoint as a failure")
    finally:
        log.removeHandler(handler)
        handler.close()
        gc.collect()


def resolve_auto(job: Job, machine: Machine, store: Store) -> Machine:
    """Replace "auto" in the machine's precision and path by what the cell is trained with.

    A cell that is already begun keeps both, wherever it is resumed. MachineError: this machine does not have them.
    """
    begun_run: Mapping[str, Any] = {}
    if "auto" in (machine.precision, machine.path):
        row = store.stages([job.cell]).get((job.cell, "train"))
        if row is not None and row.round and row.status != "done":
            begun_run = next((run for run in store.runs([job.cell]) if run["id"] == row.run), {})
    bits, path = machine.precision, machine.path
    if bits == "auto":
        bits = begun_run.get("precision") or slots.precision_for(machine.device)
        if bits == "tf32" and not slots.has_tf32(machine.device):
            raise MachineError(
                "its training was begun in tf32, which this machine lacks: resume it on a GPU, or with --precision fp32"
            )
    if path == "auto":
        path = begun_run.get("path") or path_of(job, replace(machine, precision=bits))
        if path in FORMER_PATHS:
            raise MachineError(
                f"its training was begun with run.path={path}, which no longer exists: resume it with -c run.path=loop"
            )
        if path == "graphs" and not machine.device.startswith("cuda"):
            raise MachineError(
                "its training was begun with run.path=graphs, which needs a GPU: resume it there, or with run.path=loop"
            )
    return replace(machine, precision=bits, path=path)


def path_of(job: Job, machine: Machine) -> LocalPath:
    """The path of local training; for "auto", the one that suits the cell and the device."""
    if machine.path != "auto":
        return machine.path
    return path_for(job.spec) if machine.device.startswith("cuda") else "loop"


def evaluate(
    job: Job,
    machine: Machine,
    store: Store,
    ready: Any,
    notify: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> CellStatus:
    """Attack a model that was not trained here: `ready` is its Setup, with the model as the initial state.

    The model is stored as that of the cell's last round; from then on the cell is like any other.
    """
    store.add_cell(job.cell, job.spec)
    turn = Turn(job, store, Path(machine.files) / job.cell, notify, stop, Heartbeat())
    turn.heartbeat.watch(ready.problem.model)
    handler = _log_to(turn.folder / "log.txt")
    round = int(job.spec["algorithm"]["rounds"])
    try:
        header = {"cell": job.cell, "round": str(round), "classes": str(ready.classes)}
        digest = checkpoints.save_model(turn.folder / model_file(round), ready.initial.model, {}, **header)
        changed = "train" in versions.changed([job], store).get(job.cell, {})
        run = claim(turn, "train", machine, round, fresh=changed)
        if run is not None:
            store.describe_run(run, ready.data)
            store.finish(run, round=round, record={"last": {"round": round}, "sha256": {model_file(round): digest}})
        return attack_models(turn, machine, True, ready)
    finally:
        log.removeHandler(handler)
        handler.close()


def _log_to(file: Path) -> logging.Handler:
    """Append this worker's log to the cell's file. Unavailable: the folder cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"cannot write {file}: {error.strerror}") from None
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # a log line lost on a full disk ends no work
    own_thread = threading.get_ident()  # a process can work on several cells, each in a thread
    handler.addFilter(lambda record: record.thread == own_thread)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.disabled = False  # logging.config.dictConfig of another library disables every logger that it does not name
    log.propagate = False
    return handler
