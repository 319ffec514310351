"""Executors: what a dying worker takes with it, stopping and going on, the same numbers from every executor."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from fatbench.cli import app as cli
from fatbench.cli.watch import Watch
from fatbench.errors import MachineError, SpecError
from fatbench.run import start as run
from fatbench.run.executors import Worker, asked, attempt, bury, local, me, ray, release, slurm
from fatbench.run.start import jobs_of
from fatbench.run.start import run as run_all
from fatbench.run.worker import Event, Job, Machine, work
from fatbench.store.stages import Store
from fatbench.suite import files

pytest_plugins = ("databases",)

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
  protocol:
    name: fedavg
    rounds: 4
    local:
      epochs: 1
      batch: 16
      lr: 0.05
      objective: {name: at, attack: {name: pgd, eps: 8/255, step: 4/255, steps: 1}}
    rule: samples
  monitor: natural
axes:
  pace:
    slow: {protocol: {local: {lr: 0.02}}}
    usual: {}
    fast: {protocol: {local: {lr: 0.08}}}
evaluate:
  checkpoints: [last]
  attacks:
    natural: natural
    fgsm: {name: fgsm, eps: 8/255}
presets:
  paper: {}
tables:
  - {id: A, title: Crew, rows: [pace], values: {natural: natural}}
"""


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
        checkpoint_seconds=1000.0,  # only what a worker stops for is committed before the last round
    )
    Store.open(place.db, create=True).close()
    return place


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local workers from a server that has torch loaded; the executor itself starts new interpreters."""
    context = multiprocessing.get_context("forkserver")
    parts = ("executors.local", "experiment", "attacks", "data", "models", "protocols")
    context.set_forkserver_preload(["torch", "torch._dynamo", *(f"fatbench.{part}" for part in parts)])
    monkeypatch.setattr(local.multiprocessing, "get_context", lambda method: context)


def never() -> int:
    return 0


def ignore(lane: int, event: Event) -> None:
    pass


def diverging(job: Job, cell: str = "wild") -> Job:
    spec = copy.deepcopy(job.spec)
    spec["protocol"]["local"]["lr"] = 1e30
    return replace(job, cell=cell, spec=spec)


def lasting(job: Job) -> Job:
    """A cell that is still being trained when somebody reacts to its first round."""
    spec = copy.deepcopy(job.spec)
    spec["protocol"]["rounds"] = 100
    return replace(job, cell=f"{job.cell}-100", spec=spec)


def rows(machine: Machine, job: Job) -> dict[str, tuple[str, str | None]]:
    with Store.open(machine.db) as store:
        return {row.stage: (row.status, row.error) for row in store.stages([job.cell]).values()}


def numbers(machine: Machine, job: Job) -> list[tuple]:
    with Store.open(machine.db) as store:
        found = store.measurements([job.cell])
    keys = ("stage", "round", "client", "metric", "value", "n")
    return sorted(tuple(row[key] for key in keys) for row in found if row["metric"] != "seconds")


def undisturbed(machine: Machine, job: Job) -> list[tuple]:
    """The numbers of a cell that this process works on by itself."""
    place = replace(machine, db=f"{machine.db}.whole", files=f"{machine.files}-whole")
    with Store.open(place.db, create=True) as store:
        assert work(job, place, store) == "done"
    return numbers(place, job)


def pid_of(machine: Machine, job: Job) -> int:
    """The process that has the cell's training in hand."""
    with Store.open(machine.db) as store:
        return next(run["pid"] for run in store.runs([job.cell]) if run["status"] == "running")


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


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Watcher:
    """Takes events, and does something once when a cell gets to a point."""

    def __init__(self, cell: str = "", kind: str = "", act: Callable[[], object] = lambda: None):
        self.when, self.act, self.seen = (cell, kind), act, list[tuple[int, Event]]()

    def __call__(self, lane: int, event: Event) -> None:
        self.seen.append((lane, event))
        if self.when == (event.cell, event.kind) and event.stage == "train":
            self.when = ("", "")
            self.act()

    def kinds(self, job: Job, stage: str = "cell") -> list[str]:
        return [event.kind for _, event in self.seen if (event.cell, event.stage) == (job.cell, stage)]


# --- what executors share ----------------------------------------------------------------------------------------


def test_the_dead_worker_s_stages_are_failed_and_nobody_else_s(jobs, machine):
    """Two processes have a stage of the cell each; the one that dies leaves the other's alone."""
    job, seen = jobs[0], Watcher()
    host, other = me().host, os.getpid() + 1
    with Store.open(machine.db) as store:
        store.add_cell(job.cell, job.spec)
        mine = store.claim(job.cell, "train", suite="crew", total=4, provenance={})
        theirs = store.claim(job.cell, "fgsm-1@4", suite="crew", total=4, provenance={"host": host, "pid": other})
    assert mine is not None and theirs is not None
    assert bury(job, machine, None, "it ended", seen, 2) == "failed"  # it died before it said who it was
    assert {status for status, _ in rows(machine, job).values()} == {"running"}
    assert bury(job, machine, Worker(host, other), "it ended", seen, 2) == "failed"
    assert rows(machine, job) == {"train": ("running", None), "fgsm-1@4": ("failed", "it ended")}
    release(job, machine, Worker("elsewhere", os.getpid()))
    assert rows(machine, job)["train"] == ("running", None)
    release(job, machine, me())
    assert rows(machine, job)["train"] == ("interrupted", None)
    assert [(lane, event.stage, event.message) for lane, event in seen.seen] == [
        (2, "train", "it ended"),
        (2, "fgsm-1@4", "it ended"),
    ]


def test_a_worker_survives_what_is_wrong_around_a_cell(jobs, machine):
    """Without a database there is nowhere to store the failure: it is an event, in words."""
    seen: list[Event] = []
    gone = replace(machine, db=f"{machine.db}-gone")
    assert attempt(jobs[0], gone, seen.append, lambda: False) == "failed"
    assert [(event.cell, event.kind, event.message) for event in seen] == [
        (jobs[0].cell, "failed", f"{gone.db} does not exist: nothing has been run yet")
    ]


def test_devices_and_numbers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert asked(None, None) == ("auto", None)
    assert asked("cuda:0,1", 3) == ("cuda:0,1", 3)
    Path("fatbench.toml").write_text('device = "cpu"\njobs = 5\n')
    assert asked(None, None) == ("cpu", 5)
    assert asked("cuda", 1) == ("cuda", 1)
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:0,", "cpu:0", "cuda0"):
        with pytest.raises(SpecError, match=f"--device: expected auto, cpu, cuda or cuda:0,1, got '{wrong}'"):
            asked(wrong, None)
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("FATBENCH_JOBS", wrong)
        with pytest.raises(SpecError, match=f"jobs: expected a number of cells side by side, got '{wrong}'"):
            asked(None, None)


# --- processes on this machine -----------------------------------------------------------------------------------


def test_local_lanes(monkeypatch):
    """GPUs take turns, so that fewer cells than lanes spread over the GPUs."""
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    assert local.lanes("auto", None, 1) == ["cuda:0", "cuda:1"]
    assert local.lanes("cuda", None, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert local.lanes("cuda", 3, 2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert local.lanes("cuda:1", None, 2) == ["cuda:1", "cuda:1"]
    assert local.lanes("cpu", 3, 2) == ["cpu"] * 3
    with pytest.raises(MachineError, match=r"--device cuda:0,2: there is no GPU 2 here \(2 found; fatbench doctor\)"):
        local.lanes("cuda:0,2", None, 1)
    monkeypatch.setattr(local, "gpu_count", lambda: 0)
    assert local.lanes("auto", 2, 1) == ["cpu"] * 2
    with pytest.raises(MachineError, match="--device cuda: there is no GPU 0 here"):
        local.lanes("cuda", None, 1)


def test_gpus_are_counted_as_torch_counts_them_without_importing_it():
    import torch

    code = "import sys; from fatbench.run.executors import local; print(local.gpu_count(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{torch.cuda.device_count()} False\n"


def test_a_worker_of_a_trivial_cell_imports_no_compiler(jobs, machine):
    """What a worker has imported after a cell, as another worker of its kind sees it in itself."""
    code = """
import sys, pickle
from fatbench.run.executors import attempt, local
from fatbench.store.stages import Store
job, machine = pickle.load(sys.stdin.buffer)
Store.open(machine.db, create=True).close()
local._import_engine()
print(attempt(job, machine, lambda event: None, lambda: False))
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
"""
    given = pickle.dumps((jobs[0], machine))
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True)
    assert done.stdout.decode() == "done\n[]\n"


def test_a_killed_worker_takes_only_its_cell_with_it(jobs, machine, forks):
    """One of two workers gets SIGKILL in its first cell; three lanes for three cells minus one, so a cell waits."""
    seen = Watcher(jobs[0].cell, "start", lambda: os.kill(pid_of(machine, jobs[0]), signal.SIGKILL))
    outcomes = local.run(jobs, machine, ["cpu", "cpu"], seen, never)
    assert outcomes == {jobs[0].cell: "failed", jobs[1].cell: "done", jobs[2].cell: "done"}
    assert rows(machine, jobs[0]) == {"train": ("failed", "the worker process ended with SIGKILL (out of memory?)")}
    assert seen.kinds(jobs[0], "train") == ["start", "failed"] and seen.kinds(jobs[0]) == ["failed"]
    for job in jobs[1:]:
        assert len(rows(machine, job)) == 3 and {status for status, _ in rows(machine, job).values()} == {"done"}
    again = replace(machine, retry_failed=True)
    assert local.run(jobs[:1], again, ["cpu"], ignore, never) == {jobs[0].cell: "done"}
    assert numbers(machine, jobs[0]) == undisturbed(machine, jobs[0])


def test_cells_in_one_program_have_numbers_logs_and_failures_of_their_own(jobs, machine, forks):
    """Three lanes of one process, then two: the fourth cell joins when the first is done. One diverges."""
    place = replace(machine, path="fast", together=3)
    spec = copy.deepcopy(jobs[0].spec)
    spec["seed"] = 2
    cells = [*jobs, replace(jobs[0], cell="other", spec=spec), diverging(jobs[0])]
    outcomes = local.run(cells, place, ["cpu"] * 3, ignore, never)
    assert outcomes == {job.cell: "done" for job in cells[:4]} | {cells[4].cell: "failed"}
    assert "Diverged: round 1" in rows(place, cells[4])["train"][1]
    for job in cells[:4]:
        ours, alone = numbers(place, job), undisturbed(replace(machine, path="fast"), job)
        assert [row[:4] for row in ours] == [row[:4] for row in alone]
        for row, other in zip(ours, alone, strict=True):
            if row[3] == "train_loss":
                assert row[4] == pytest.approx(other[4], rel=0.01)
        log = (Path(place.files) / job.cell / "log.txt").read_text()
        assert [log.count(f"round {r}:") for r in range(1, 6)] == [1, 1, 1, 1, 0]
    with Store.open(place.db) as store:
        assert {run["together"] for run in store.runs([job.cell for job in cells])} == {3}


def test_a_killed_process_takes_the_cells_of_all_its_lanes_with_it(jobs, machine, forks):
    """SIGKILL once all three have begun; a new process, of as many lanes, does the rest."""
    place = replace(machine, path="fast", together=3)
    begun: set[str] = set()

    def watch(lane: int, event: Event) -> None:
        if event.kind == "start" and event.stage == "train" and len(begun) < 3:
            begun.add(event.cell)
            if len(begun) == 3:
                os.kill(pid_of(place, cells[0]), signal.SIGKILL)

    cells = [*map(lasting, jobs), replace(jobs[0], cell="later")]
    outcomes = local.run(cells, place, ["cpu"] * 3, watch, never)
    assert outcomes == {job.cell: "failed" for job in cells[:3]} | {"later": "done"}
    for job in cells[:3]:
        assert rows(place, job) == {"train": ("failed", "the worker process ended with SIGKILL (out of memory?)")}


@pytest.mark.parametrize("wish", [1, 2])
def test_stopping_cells_in_one_program(wish, jobs, machine, forks):
    """After the round at hand, or at once: nothing stays in hand, and the same run goes on to the end."""
    place = replace(machine, path="fast", together=2)
    cells, asked_for = [lasting(job) for job in jobs[:2]], [0]
    seen = Watcher(cells[1].cell, "progress", partial(asked_for.__setitem__, 0, wish))
    outcomes = local.run(cells, place, ["cpu"] * 2, seen, lambda: asked_for[0])
    assert set(outcomes.values()) == {"interrupted"}
    with Store.open(place.db) as store:
        stages = [store.stages([job.cell])[job.cell, "train"] for job in cells]
    assert [row.status for row in stages] == ["interrupted"] * 2
    assert all((row.round >= 1) == (wish == 1) for row in stages)


def test_lanes_share_devices_only_where_there_are_more_cells_than_devices():
    def shared(devices: list[str], cells: int, together: int) -> tuple[list[str], int]:
        lanes, place = run._shared(devices, cells, together, Machine("", "", ""))
        return lanes, place.together

    assert shared(["cuda:0"], 9, 4) == (["cuda:0"] * 4, 4)
    assert shared(["cuda:0", "cuda:1"], 3, 9) == (["cuda:0", "cuda:0", "cuda:1"], 2)
    assert shared(["cpu", "cpu"], 2, 9) == (["cpu", "cpu"], 1)
    assert shared([], 0, 9) == ([], 1)


def test_more_lanes_than_cells_and_stopping_after_the_round(jobs, machine, forks):
    """Asked to stop after the first round, a worker commits the round at hand; the rest is not begun."""
    job, wish = lasting(jobs[0]), [0]
    seen = Watcher(job.cell, "progress", partial(wish.__setitem__, 0, 1))
    outcomes = local.run([job], machine, ["cpu"] * 4, seen, lambda: wish[0])
    assert outcomes == {job.cell: "interrupted"}
    assert {lane for lane, _ in seen.seen} == {0}
    with Store.open(machine.db) as store:
        row = store.stages([job.cell])[job.cell, "train"]
    assert row.status == "interrupted" and 1 <= row.round < 100
    assert local.run([job], machine, ["cpu"], ignore, never) == {job.cell: "done"}
    assert numbers(machine, job) == undisturbed(machine, job)


def test_stopping_at_once(jobs, machine, forks):
    """Nothing is committed, nothing is left in the hands of a process that is gone, the other cells are not begun."""
    wish = [0]
    seen = Watcher(jobs[0].cell, "start", partial(wish.__setitem__, 0, 2))
    outcomes = local.run(jobs, machine, ["cpu"], seen, lambda: wish[0])
    assert set(outcomes.values()) == {"interrupted"} and len(outcomes) == 3
    assert rows(machine, jobs[0]) == {"train": ("interrupted", None)}
    assert rows(machine, jobs[1]) == rows(machine, jobs[2]) == {}


def test_exit_status_and_fail_fast(jobs, machine, forks, capfd):
    wild = diverging(jobs[0])
    options = {"jobs_at_once": 1, "device": "cpu", "db": machine.db}
    with pytest.raises(SystemExit) as exit:
        run_all([wild, *jobs[1:]], Watch("crew"), fail_fast=True, **options)
    assert exit.value.code == 1
    assert rows(machine, wild)["train"][0] == "failed" and rows(machine, jobs[1]) == rows(machine, jobs[2]) == {}
    assert "0 of 3 cells done, 1 failed, 2 not finished" in capfd.readouterr().err
    with pytest.raises(SystemExit) as exit:
        run_all([wild, jobs[1]], Watch("crew"), **options)
    assert exit.value.code == 1
    assert "1 of 2 cells done, 1 failed" in capfd.readouterr().err
    run_all([jobs[1]], Watch("crew"), **options)  # all that was asked for is done: it returns
    assert "crew: 1 of 1 cells done" in capfd.readouterr().err


def test_two_workers_on_postgresql(jobs, forks, new_postgres, monkeypatch, capfd):
    """The command line from the suite to its table, on a database server; the password stays unseen."""
    url = new_postgres().replace("postgresql://", "postgresql+psycopg://")

    def fatbench(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fatbench", *arguments, "--db", url])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return (exit.value.code or 0, *capfd.readouterr())

    run = fatbench("run", "suite", "crew.yaml", "--jobs", "2", "--device", "cpu")
    assert run[0] == 0 and "3 of 3 cells done" in run[2] and run[1] == ""
    code, out, _ = fatbench("status", "crew.yaml", "--format", "json")
    assert code == 0 and json.loads(out)["cells"] == {"done": 3, "failed": 0, "running": 0, "todo": 0}
    code, out, _ = fatbench("report", "crew.yaml", "--format", "json")
    measured = [row["measured"]["natural"] for row in json.loads(out)["tables"][0]["rows"]]
    assert len(measured) == 3 and all(0 <= entry["mean"] <= 1 and entry["n"] == 30 for entry in measured)
    assert fatbench("run", "suite", "crew.yaml", "--jobs", "2")[0] == 0
    with Store.open(url) as store:
        runs = store.runs()
    assert len({run["pid"] for run in runs}) == 2 and len(runs) == 9  # 3 stages of 3 cells, each once
    assert Path("results/files", jobs[0].cell, "log.txt").exists()
    assert "geheim" not in "".join(run[1:]) and "geheim" not in json.dumps(runs)


# --- Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[object]:
    """A Ray cluster of two cores on this machine, as the executor starts one."""
    package = pytest.importorskip("ray")
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with ray._connected(package, ["cpu", "cpu"]):
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        yield package
    assert not package.is_initialized()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files of Ray that it leaves to the garbage collector
def test_ray(jobs, machine, cluster):
    """A task that is killed takes its cell with it; stopped and cancelled tasks go on where they were."""
    assert ray.lanes("cpu", None, 1, machine.db) == ["cpu"] * 2
    job, seen = lasting(jobs[2]), Watcher()
    stop = once_begun(machine, job, lambda pid: 2)
    assert ray.run([job], machine, ["cpu"], ignore, stop) == {job.cell: "interrupted"}
    assert rows(machine, job) == {"train": ("interrupted", None)}

    outcomes = ray.run(jobs[:2], machine, ["cpu"] * 2, seen, once_begun(machine, jobs[0], kill))
    assert outcomes == {jobs[0].cell: "failed", jobs[1].cell: "done"}
    status, error = rows(machine, jobs[0])["train"]
    assert status == "failed" and error is not None
    assert error.startswith(f"the Ray worker on {me().host} ended: WorkerCrashedError: ")
    assert seen.kinds(jobs[0], "train")[-1] == "failed" and seen.kinds(jobs[0]) == ["failed"]
    assert seen.kinds(jobs[1], "train") == ["start", *["progress"] * 4, "done"] and seen.kinds(jobs[1]) == ["done"]
    assert numbers(machine, jobs[1]) == undisturbed(machine, jobs[1])

    wish = [0]
    seen = Watcher(job.cell, "progress", partial(wish.__setitem__, 0, 1))
    assert ray.run([job], machine, ["cpu"], seen, lambda: wish[0]) == {job.cell: "interrupted"}
    assert rows(machine, job) == {"train": ("interrupted", None)} and seen.kinds(job, "train")[-1] == "interrupted"
    seen = Watcher()
    assert ray.run([job], machine, ["cpu"], seen, never) == {job.cell: "done"}
    assert seen.seen[0][1].round > 0  # it goes on
    assert numbers(machine, job) == undisturbed(machine, job)


def test_what_ray_cannot_do(machine, monkeypatch):
    package = pytest.importorskip("ray")
    with pytest.raises(SpecError, match=r"--device cuda:1: Ray chooses the GPUs; give cuda \(CUDA_VISIBLE_DEVICES"):
        ray.lanes("cuda:1", None, 1, machine.db)
    monkeypatch.setattr(package, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(MachineError, match=r"RAY_ADDRESS=127\.0\.0\.1:9: .*[Rr]efused"):
        ray.lanes("cpu", None, 1, machine.db)
    resources = {"CPU": 8.0, "GPU": 2.0}
    nodes = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(package, "is_initialized", lambda: True)
    monkeypatch.setattr(package, "cluster_resources", lambda: resources)
    monkeypatch.setattr(package, "nodes", lambda: nodes)
    with pytest.raises(
        SpecError, match=r"r\.db: 2 Ray nodes cannot share a SQLite file; use PostgreSQL: --db postgresql://user:"
    ):
        ray.lanes(None, None, 1, machine.db)
    server = "postgresql://u:geheim@nowhere/x"
    if find_spec("psycopg"):
        assert ray.lanes(None, None, 2, server) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    nodes.pop(0)
    assert ray.lanes("auto", 1, 1, machine.db) == ["cuda:0"]
    assert ray.lanes("cpu", None, 1, machine.db) == ["cpu"] * 8
    del resources["GPU"]
    assert ray.lanes("auto", 3, 1, machine.db) == ["cpu"] * 3
    with pytest.raises(MachineError, match="--device cuda: the Ray cluster has no GPU"):
        ray.lanes("cuda", None, 1, machine.db)


@pytest.mark.parametrize(("executor", "package"), [(ray, "ray"), (slurm, "submitit")])
def test_an_extra_that_is_not_installed(executor, package, monkeypatch, machine):
    monkeypatch.setitem(sys.modules, package, None)
    extra = executor.__name__.rpartition(".")[2]
    with pytest.raises(SpecError, match=rf"--executor {extra} needs .*: pip install 'fatbench\[{extra}\]'"):
        executor.lanes("cpu", 1, 1, machine.db)


# --- SLURM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet_submitit() -> Iterator[None]:
    """submitit logs to the stdout there was when it was imported, which pytest has closed since."""
    pytest.importorskip("submitit")
    logger = logging.getLogger("submitit")
    before, logger.handlers = logger.handlers, []
    yield
    logger.handlers = before


@pytest.mark.slow
def test_slurm_jobs_on_this_machine(jobs, machine, quiet_submitit):
    """submitit's own stand-in for SLURM: one job is killed, one hears that its time is up and goes on in another."""
    killed, warned = jobs[0], lasting(jobs[1])
    Path("fatbench.toml").write_text('[slurm]\ncluster = "local"\n')
    assert slurm.lanes("cpu", 2, 1, machine.db) == ["cpu"] * 2
    seen = Watcher(warned.cell, "progress", lambda: os.kill(pid_of(machine, warned), signal.SIGUSR2))
    outcomes = slurm.run([killed, warned], machine, ["cpu"] * 2, seen, once_begun(machine, killed, kill))
    assert outcomes == {killed.cell: "failed", warned.cell: "done"}
    status, error = rows(machine, killed)["train"]
    assert status == "failed" and error is not None
    assert error.startswith("SLURM job ") and "ended: FAILED; its log is " in error
    assert seen.kinds(warned, "train").count("interrupted") == 1 and seen.kinds(warned) == ["done"]
    assert seen.kinds(warned, "train").count("progress") == 100  # no round twice
    assert numbers(machine, warned) == undisturbed(machine, warned)
    (folder,) = Path(machine.files, "slurm").iterdir()  # what failed can be looked into
    assert folder.stat().st_mode & 0o077 == 0


FAKES = {
    "srun": "exit 1",
    "sbatch": 'cp "$1" {log}/script; echo "sbatch $#" >> {log}/calls; {refuse}echo Submitted batch job 77',
    "scancel": 'echo "scancel $1" >> {log}/calls',
    "squeue": "{answer}",
}


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch, quiet_submitit) -> Callable[..., Path]:
    """Commands with SLURM's names that note what they are called with: which jobs there are, squeue is told."""

    def make(answer: str = "exit 1", refuse: str = "") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name, body in FAKES.items():
            text = body.format(log=tmp_path, answer=answer, refuse=refuse)
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return tmp_path

    monkeypatch.setattr(slurm, "PATIENCE", 0.0)
    monkeypatch.setattr(slurm, "PAUSE", 0.05)
    return make


def test_an_array_of_jobs_is_submitted_and_followed(jobs, machine, fake_slurm):
    """One was cancelled by somebody, which says nothing of its cell; one had no memory left; one is no longer known."""
    log = fake_slurm("echo 77_0 CANCELLED; echo 77_1 OUT_OF_MEMORY; echo 78 RUNNING")
    Path("fatbench.toml").write_text('[slurm]\npartition = "big"\ntime = 30\ngpus = 1\naccount = "us"\n')
    assert slurm.lanes(None, None, 1, machine.db) == ["cuda:0"] * 256
    seen = Watcher()
    outcomes = slurm.run(jobs, machine, ["cuda:0"] * 2, seen, never)
    assert [outcomes[job.cell] for job in jobs] == ["interrupted", "failed", "failed"]
    assert [event.message.partition(";")[0] for _, event in seen.seen if event.message] == [
        "SLURM job 77_1 ended: OUT_OF_MEMORY",
        "SLURM job 77_2 ended: GONE",
    ]
    script = (log / "script").read_text()
    for line in ("array=0-2%2", "partition=big", "time=30", "gpus-per-node=1", "account=us", "cpus-per-task=1"):
        assert f"#SBATCH --{line}\n" in script
    assert "#SBATCH --signal=USR2@90\n" in script and "#SBATCH --job-name=fatbench\n" in script


def test_jobs_in_the_queue_are_cancelled_when_the_run_is_stopped(jobs, machine, fake_slurm, tmp_path):
    state = f"$(grep -q scancel {tmp_path}/calls && echo CANCELLED || echo PENDING)"
    log = fake_slurm(f"for job in 0 1 2; do echo 77_$job {state}; done")
    wishes = iter([0, 0, 1])
    Path("fatbench.toml").write_text("[slurm]\n")
    outcomes = slurm.run(jobs, machine, ["cpu"], ignore, lambda: next(wishes))
    assert set(outcomes.values()) == {"interrupted"} and len(outcomes) == 3
    assert (log / "calls").read_text().split("\n")[:4] == ["sbatch 1", "scancel 77_0", "scancel 77_1", "scancel 77_2"]
    assert list(Path(machine.files, "slurm").glob("*/stop"))


def test_what_sbatch_refuses(jobs, machine, fake_slurm):
    fake_slurm(refuse='echo "sbatch: error: invalid partition specified: bog" >&2; exit 1; ')
    with pytest.raises(MachineError, match=r"^sbatch: error: invalid partition specified: bog$"):
        slurm.run(jobs, machine, ["cpu"], ignore, never)


def test_a_controller_that_does_not_answer_ends_nothing(fake_slurm):
    fake_slurm("exit 1")
    assert slurm._states([type("Job", (), {"job_id": "77_0"})()], here=False) == {}


def test_what_slurm_cannot_do(machine, monkeypatch, tmp_path, capsys, quiet_submitit):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no sbatch here: --executor slurm runs on a SLURM login node"):
        slurm.lanes("cpu", None, 1, machine.db)
    with pytest.raises(SpecError, match="--device cuda:0: SLURM chooses the GPUs; give cuda"):
        slurm.lanes("cuda:0", None, 1, machine.db)
    with pytest.raises(SpecError, match="--per-gpu 2: a SLURM job has its GPU to itself"):
        slurm.lanes("cuda", None, 2, machine.db)
    for table, message in (
        ("partitoin = 'x'", "Unknown argument 'partitoin' for executor 'slurm'"),
        ("time = '4:00:00'", 'Parameter "timeout_min" expected type .*int.*value: "4:00:00"'),
        ("cluster = 'pbs'", "AutoExecutor doesn't know any executor named pbs"),
    ):
        Path("fatbench.toml").write_text(f"[slurm]\n{table}\n")
        for name in ("sbatch", "srun"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        with pytest.raises(SpecError, match=rf"^fatbench\.toml: \[slurm\]: {message}"):
            slurm.lanes("cpu", None, 1, machine.db)
    for table, message in (
        ("slurm = 3", r"slurm: expected a table \[slurm\]"),
        ("[jobs]\nn = 3", "jobs: expected one value"),
        ("[slrum]", r"unknown setting 'slrum' \(did you mean 'slurm'\?\)"),
    ):
        Path("fatbench.toml").write_text(table)
        with pytest.raises(SpecError, match=rf"^fatbench\.toml: {message}"):
            slurm.lanes("cpu", None, 1, machine.db)
    assert capsys.readouterr().err == ""
    Path("fatbench.toml").write_text("[slurm]\n")
    assert slurm.lanes("auto", 3, 1, machine.db) == ["cpu"] * 3
    assert "r.db: a SQLite file must be on a file system that all nodes share" in capsys.readouterr().err
    Path("fatbench.toml").write_text("[slurm]\ngres = 'gpu:a100:1'\n")
    assert slurm.lanes("auto", 1, 1, machine.db) == ["cuda:0"]


def test_a_job_goes_on_from_the_one_before_it(jobs, machine, tmp_path, quiet_submitit):
    """A node that died has left the stage in its hands, and half a line; the next job of the cell takes it over."""
    job = jobs[0]
    with Store.open(machine.db) as store:
        store.add_cell(job.cell, job.spec)
        store.claim(job.cell, "train", suite="crew", total=4, provenance={"host": "node7", "pid": 4711})
    file = tmp_path / f"{job.cell}.jsonl"
    file.write_text('["worker", ["node7", 4711]]\n["event", {"cell": "x", "stage": "train", "ki\n')
    before = signal.getsignal(signal.SIGTERM)
    try:
        slurm.Task(job, machine, tmp_path, 1.0)()
    finally:
        signal.signal(signal.SIGTERM, before)
    sent = slurm._Sent(job, None, file)
    events = list(sent.news([sent]))
    assert (sent.outcome, sent.worker, sent.lane) == ("done", me(), 0)
    assert [event.kind for event in events if event.stage == "train"] == ["start", *["progress"] * 4, "done"]
    assert numbers(machine, job) == undisturbed(machine, job)
    assert list(sent.news([sent])) == []


def test_what_a_job_leaves_to_the_next(jobs, machine, tmp_path, quiet_submitit):
    """The next job has the same cell; there is none when the cell is done or the run was stopped."""
    task = slurm.Task(jobs[0], machine, tmp_path, 1.0)
    assert task.checkpoint().function.job == jobs[0]
    task.outcome = "done"
    assert task.checkpoint() is None
    task.outcome = "interrupted"
    assert task.checkpoint().function.folder == tmp_path
    (tmp_path / "stop").touch()
    assert task.checkpoint() is None
