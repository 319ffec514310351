"""Executors: what a dying worker takes with it, stopping and going on, the same numbers from every executor."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from crew import diverging, rows

from fatbench.cli import app as cli
from fatbench.cli import run
from fatbench.cli.watch import Watch
from fatbench.errors import MachineError, SpecError
from fatbench.runner import processes
from fatbench.runner.executors import Worker, device_and_jobs, give_back, let_go, local
from fatbench.runner.jobs import Event, Work
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import run as run_all
from fatbench.runner.worker import attempt
from fatbench.store.pools import Pool
from fatbench.store.stages import Store

# --- what executors share ----------------------------------------------------------------------------------------


def test_the_dead_worker_s_stages_are_failed_and_nobody_else_s(jobs, machine):
    """Two processes have a stage of the cell each; the one that dies leaves the other's alone."""
    job = jobs[0]
    host, other = socket.gethostname(), os.getpid() + 1
    with Store.open(machine.db) as store:
        store.add_cell(job.cell, job.spec)
        mine = store.claim(job.cell, "train", suite="crew", total=4, provenance={})
        theirs = store.claim(job.cell, "fgsm-1@4", suite="crew", total=4, provenance={"host": host, "pid": other})
        assert mine is not None and theirs is not None
        assert let_go(store, job.cell, Worker("elsewhere", other), "it ended") == []
        assert {status for status, _ in rows(machine, job).values()} == {"running"}
        assert let_go(store, job.cell, Worker(host, other), "it ended") == ["fgsm-1@4"]
        assert rows(machine, job) == {"train": ("running", None), "fgsm-1@4": ("failed", "it ended")}
        assert let_go(store, job.cell, Worker("elsewhere", os.getpid())) == []
        assert rows(machine, job)["train"] == ("running", None)
        assert let_go(store, job.cell, Worker(host, os.getpid())) == ["train"]
        assert rows(machine, job)["train"] == ("interrupted", None)


@pytest.mark.parametrize("fail_fast", [True, False])
def test_a_lost_job_s_cell_ends_the_run_only_if_it_failed_and_may_not(jobs, machine, fail_fast):
    """A SLURM job whose node is lost: its cell is free again; once it counts as failed, fail_fast ends the run."""
    cells = [job.cell for job in jobs[:2]]
    work = Work(jobs[:2], machine, folder=".", fail_fast=fail_fast)
    with Store.open(machine.db) as store:
        pool = Pool.create(store.database, work.text(), cells)
        for fault, ended in (("", "free"), ("node lost", "failed")):
            pool.enter("77_0/1")
            assert pool.take("77_0/1", lambda cell: cell == cells[0]) == cells[0]
            give_back(pool, work, "77_0/1", pool.taken()["77_0/1"], [], fault, counts=True)
            assert pool.statuses() == {cells[0]: ended, cells[1]: "free"}
            assert pool.counts()[2] is (fail_fast and bool(fault))


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
    assert device_and_jobs(None, None) == ("auto", None)
    assert device_and_jobs("cuda:0,1", 3) == ("cuda:0,1", 3)
    Path("fatbench.toml").write_text('[run]\ndevice = "cpu"\njobs = 5\n')
    assert device_and_jobs(None, None) == ("cpu", 5)
    assert device_and_jobs("cuda", 1) == ("cuda", 1)
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:0,", "cpu:0", "cuda0"):
        with pytest.raises(SpecError, match=f"^device: expected auto, cpu, cuda or cuda:0,1, got '{wrong}'"):
            device_and_jobs(wrong, None)
    for wrong in ("0", "-1", "1001", "many"):
        monkeypatch.setenv("FATBENCH_RUN_JOBS", wrong)
        with pytest.raises(SpecError, match=f"run.jobs: expected a whole number from 1 to 1000, got '{wrong}'"):
            device_and_jobs(None, None)


# --- processes on this machine -----------------------------------------------------------------------------------


def test_local_slots(monkeypatch):
    """GPUs take turns, so that fewer cells than slots spread over the GPUs."""
    monkeypatch.setattr(local, "gpu_count", lambda: 2)
    assert local.slots("auto", None, 1) == ["cuda:0", "cuda:1"]
    assert local.slots("cuda", None, 2) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert local.slots("cuda", 3, 2) == ["cuda:0", "cuda:1", "cuda:0"]
    assert local.slots("cuda:1", None, 2) == ["cuda:1", "cuda:1"]
    assert local.slots("cpu", 3, 2) == ["cpu"] * 3
    with pytest.raises(MachineError, match=r"^device=cuda:0,2: there is no GPU 2 here \(2 found; fatbench doctor\)"):
        local.slots("cuda:0,2", None, 1)
    monkeypatch.setattr(local, "gpu_count", lambda: 0)
    assert local.slots("auto", 2, 1) == ["cpu"] * 2
    with pytest.raises(MachineError, match=r"^device=cuda: there is no GPU 0 here"):
        local.slots("cuda", None, 1)


def test_gpus_are_counted_as_torch_counts_them_without_importing_it():
    import torch

    code = "import sys; from fatbench.runner.executors import local; print(local.gpu_count(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{torch.cuda.device_count()} False\n"


def test_a_worker_of_a_trivial_cell_imports_no_compiler_and_no_package_of_attacks(jobs, machine):
    """What a worker has imported after a cell, its operations counted and attacked, as it sees it in itself."""
    code = """
import sys, pickle
from fatbench.runner import processes
from fatbench.runner.worker import attempt
from fatbench.store.pools import Pool
from fatbench.store.stages import Store
job, machine = pickle.load(sys.stdin.buffer)
Store.open(machine.db, create=True).close()
processes.import_engine()
print(attempt(job, machine, lambda event: None, lambda: False))
heavy = "torch._dynamo torch._inductor sympy triton scipy torchvision torchattacks pyautoattack timm"
print([name for name in heavy.split() if name in sys.modules])
"""
    given = pickle.dumps((jobs[0], machine))
    done = subprocess.run([sys.executable, "-c", code], input=given, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode() == "done\n[]\n"


@pytest.mark.nightly
def test_a_worker_that_has_met_timm_ends_without_a_word(jobs, machine):
    """timm brings torchvision and triton, whose functions complain at the end when the collector may not see them."""
    code = """
import pickle, sys
from fatbench.runner import worker
from fatbench.runner.jobs import Work
from fatbench.store.pools import Pool
from fatbench.store.pools import Pool
from fatbench.store.stages import Store
job, machine = pickle.load(sys.stdin.buffer)
def attempt(*_):
    import torchvision.ops
    return "done"
worker.attempt = attempt
with Store.open(machine.db) as store:
    pool = Pool.create(store.database, Work([job], machine).text(), [job.cell])
    worker.take_cells(machine.db, pool.id, "0.0", "cpu")
    print(pool.statuses())
"""
    given = pickle.dumps((jobs[0], machine))
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, check=True)
    assert (done.stdout.decode(), done.stderr) == (f"{{'{jobs[0].cell}': 'done'}}\n", b"")


# --- a worker that is begun early --------------------------------------------------------------------------------


@pytest.fixture
def begun(forks, monkeypatch: pytest.MonkeyPatch) -> list:
    """Every worker process that is started, and "plan" where a suite was expanded."""
    seen: list = []
    start, plan_of = processes.start_process, run.plan_of
    monkeypatch.setattr(processes, "start_process", lambda *of: seen.append(start(*of)) or seen[-1])
    monkeypatch.setattr(run, "plan_of", lambda *of: seen.append("plan") or plan_of(*of))
    return seen


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["fatbench", "run", *arguments])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    return exit.value.code or 0


def test_a_worker_begins_before_the_plan_is_made_and_takes_the_first_cell(jobs, machine, begun, monkeypatch):
    assert command(monkeypatch, "suite", "crew.yaml", "--jobs", "1", "--device", "cpu", "--db", machine.db) == 0
    worker, plan = begun
    assert plan == "plan"
    with Store.open(machine.db) as store:
        assert {(run["pid"], run["status"]) for run in store.runs()} == {(worker.pid, "done")}
    assert not worker.is_alive() and not processes._EARLY


@pytest.mark.parametrize("arguments", [["--preset", "no"], ["--device", "cuda:7"], ["--seeds", "4-1"]])
def test_a_mistake_leaves_no_worker_and_no_file(arguments, jobs, begun, monkeypatch, capfd):
    assert command(monkeypatch, "suite", "crew.yaml", "--db", "new.db", *arguments) in (2, 5)
    assert [one.exitcode for one in begun if one != "plan"] == [-signal.SIGKILL]
    assert not processes._EARLY and os.listdir() == ["crew.yaml"] and capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-n"], ["--executor", "slurm"]])
def test_no_worker_begins_early_where_none_or_another_is_needed(arguments, jobs, begun, monkeypatch):
    command(monkeypatch, "suite", "crew.yaml", "--db", "new.db", "--preset", "no", *arguments)
    assert begun == ["plan"]


def test_an_early_worker_that_died_is_not_taken(begun):
    with processes.started_early():
        begun[0].kill()
        begun[0].join()
        taken = processes.start_or_take_early(print)
        assert taken is begun[1] and len(begun) == 2
        taken.join()


def test_exit_status_and_fail_fast(jobs, machine, forks, capfd):
    wild = diverging(jobs[0])
    options = {"jobs": 1, "device": "cpu", "db": machine.db}
    with pytest.raises(SystemExit) as exit:
        run_all([wild, *jobs[1:]], Watch("crew"), RunOptions(fail_fast=True, **options))
    assert exit.value.code == 1
    assert rows(machine, wild)["train"][0] == "failed" and rows(machine, jobs[1]) == rows(machine, jobs[2]) == {}
    assert "0 of 3 cells done, 1 failed, 2 not finished" in capfd.readouterr().err
    with pytest.raises(SystemExit) as exit:
        run_all([wild, jobs[1]], Watch("crew"), RunOptions(**options))
    assert exit.value.code == 1
    assert "1 of 2 cells done, 1 failed" in capfd.readouterr().err
    run_all([jobs[1]], Watch("crew"), RunOptions(**options))  # all that was asked for is done: it returns
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
    assert len(list(Path("results").glob(f"*-files/{jobs[0].cell}/log.txt"))) == 1
    assert "geheim" not in "".join(run[1:]) and "geheim" not in json.dumps(runs)
