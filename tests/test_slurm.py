"""The SLURM executor without SLURM: its table, its words, its folder, the job in this process, and a driver whose
`sbatch` and `squeue` answer as told. `test_real_slurm.py` has the rest, on a real SLURM.
"""

from __future__ import annotations

import datetime
import getpass
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from crew import Watcher, ignore, never, numbers, rows, undisturbed

from fatbench.cli.watch import Watch
from fatbench.errors import MachineError, SpecError
from fatbench.runner import start
from fatbench.runner.executors import slurm
from fatbench.runner.executors.slurm import driver, job, queue, table
from fatbench.runner.jobs import Event, Job, Machine, Work
from fatbench.runner.processes import SIGNALS
from fatbench.runner.run_options import RunOptions
from fatbench.runner.worker import work
from fatbench.store.pools import Pool
from fatbench.store.stages import Store

# --- the table [slurm] -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "minutes"),
    [(240, 240), ("240", 240), ("4:00:00", 240), ("90:30", 90.5), ("1-12", 2160), ("1-12:30", 2190),
     ("2-00:00:30", 2880.5), (datetime.time(4, 0), 240)],
)  # fmt: skip
def test_a_time_is_minutes_or_as_slurm_writes_it(given, minutes):
    assert table.minutes(given) == minutes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"partitoin": "x"}, r"unknown key 'partitoin' \(did you mean 'partition'\?\)"),
        ({"mail_tpe": "END"}, r"unknown key 'mail_tpe' \(did you mean 'mail-type'\?\)"),
        ({"time": "4 hours"}, r"time: expected minutes, or as SLURM writes it: \"4:00:00\", .*; got '4 hours'"),
        ({"time": 0}, "time: expected minutes"),
        ({"time": True}, "time: expected minutes"),
        ({"nodes": 2}, "nodes: a job is one process on one node"),
        ({"array": "0-3"}, "array: fatbench sets it itself"),
        ({"open_mode": "truncate"}, "open_mode: fatbench sets it itself"),
        ({"jobs": 0}, "jobs: expected a whole number, got 0"),
        ({"cpus": "4"}, "cpus: expected a whole number, got '4'"),
        ({"setup": 3}, r'setup: expected \["module load cuda"\]; one that fails ends the job, got 3'),
        ({"attacks": "cpu"}, r"attacks: expected a table \[slurm.attacks\]"),
        ({"partition": {"name": "x"}}, "partition: expected one value"),
    ],
)
def test_what_the_table_does_not_take(wrong, message):
    with pytest.raises(SpecError, match=rf"^fatbench\.toml: \[slurm\]: {message}"):
        table.checked(wrong)


def test_the_attacks_table_is_over_the_other():
    chosen = table.checked({"partition": "gpu", "gpus": 1, "attacks": {"partition": "cpu", "gpus": 0, "cpus": 8}})
    assert table.wants_gpu(chosen) and not table.wants_gpu({"partition": "gpu"})  # a name asks for nothing
    attacks = table.of_attacks(chosen)
    assert attacks == {"partition": "cpu", "gpus": 0, "cpus": 8} and not table.wants_gpu(attacks)
    assert table.width(attacks, "cpu", 1) == 8 and table.width(chosen, "cuda", 3) == 3
    assert table.width({"gres": "gpu:a100:2"}, "cuda", 2) == 4
    with pytest.raises(SpecError, match=r"\[slurm.attacks\]: unknown key 'gpu'"):
        table.of_attacks({"attacks": {"gpu": 1}})


def test_the_script():
    chosen = table.checked(
        {"time": "1:30:00", "mail_type": "END", "nodelist": ["n1", "n2"], "exclusive": True, "hold": False,
         "setup": ["module load cuda", "export A='b c'"], "python": "apptainer exec --nv 'my image.sif' python",
         "srun": ["--container-image=x"]}
    )  # fmt: skip
    text = table.script(chosen, "cuda", "0123abcd")
    head, _, body = text.partition("set -e\n")
    for option in (
        "mail-type=END", "nodelist=n1,n2", "exclusive", "time=90", "gpus-per-node=1", "cpus-per-task=1", "requeue",
        "open-mode=append", "signal=USR1@90", "nodes=1", "job-name=fatbench",
    ):  # fmt: skip
        assert f"#SBATCH --{option}\n" in head
    assert "hold" not in head and "wckey" not in head
    assert body.startswith("module load cuda\nexport A='b c'\nset +e\n")
    command = "'my image.sif' python -m fatbench.runner.executors.slurm.job 0123abcd"
    assert f"--container-image=x apptainer exec --nv {command}" in body
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "gpus" not in table.script({}, "cpu", "") and sys.executable in table.script({}, "cpu", "")
    assert "#SBATCH --signal=USR1@30\n" in table.script({"time": 2}, "cpu", "")  # not three quarters of its time


# --- SLURM's commands --------------------------------------------------------------------------------------------

FAKES = {
    "sbatch": 'echo "sbatch $*" >> {log}/calls; env > {log}/env; {refuse}\necho 77',
    "scancel": 'echo "scancel $*" >> {log}/calls',
    "squeue": 'echo "squeue" >> {log}/asked; {answer}',
    "scontrol": 'echo "scontrol $*" >> {log}/calls; echo "MaxArraySize = {most}"',
}


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Put commands that answer as told into PATH: the folder of their `calls`."""
    monkeypatch.setattr(driver, "PAUSE", 0.05)
    monkeypatch.setattr(driver, "SOON", 0.05)
    monkeypatch.setattr(driver, "ASK", 0.2)

    def install(answer: str = "", refuse: str = "", most: int = 1001) -> Path:
        folder = tmp_path / "commands"
        folder.mkdir(exist_ok=True)
        for name, text in FAKES.items():
            body = text.format(log=tmp_path, refuse=refuse, answer=answer, most=most)
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return tmp_path

    yield install


def calls(log: Path, command: str) -> list[str]:
    return [line for line in (log / "calls").read_text().splitlines() if line.startswith(command)]


def test_jobs_inherit_no_job_and_no_option_around_them(jobs, machine, fake_slurm, monkeypatch):
    """The driver in a job: its SLURM_* would make the cells' jobs contradict themselves."""
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SBATCH_EXPORT", "SLURM_CONF", "MY_SLURM_X"):
        monkeypatch.setenv(name, f"of {name}")
    log = fake_slurm('for job in 0 1 2; do echo "77_$job|CANCELLED|None"; done')
    slurm.run(Work(jobs, machine), ["cpu"] * 3, ignore, never, note=never_said)
    passed = dict(line.split("=", 1) for line in (log / "env").read_text().splitlines() if "=" in line)
    assert {name for name in passed if name.startswith(("SLURM_", "SBATCH_"))} == {"SLURM_CONF"}
    assert passed["MY_SLURM_X"] == "of MY_SLURM_X" and passed["HOME"] == os.environ["HOME"]
    assert passed[driver.DATABASE] == machine.db


def never_said(text: str) -> None:
    pass


def driven(machine: Machine, jobs: list[Job], wishes: Callable[[], int] = never, **more: Any) -> set[str]:
    """How the cells end of a driver with three slots."""
    return {*slurm.run(Work(jobs, machine), ["cpu"] * 3, ignore, wishes, **more).values()}


def stopping(after: int, wish: int = 1) -> Callable[[], int]:
    """Asks to stop from then on."""
    asked = itertools.count()
    return lambda: wish * (next(asked) >= after)


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("None", None),
        ("Resources", "other jobs have the nodes"),
        ("PartitionTimeLimit", "`time` is more than the partition allows"),
        ("launch failed requeued held", "could not be started and is held: scontrol release"),
        ("job requeued in held state", "it is held: scontrol release"),
        ("ReqNodeNotAvail, UnavailableNodes:n7", "down or reserved"),
        ("QOSMaxCpuPerUserLimit", "a limit of the account or QOS"),
        ("SomethingNew", "scontrol show job"),
    ],
)
def test_every_reason_has_its_advice(reason, what):
    said = queue.advice(reason)
    assert said is None if what is None else what in (said or "")


def test_why_jobs_wait_is_said_once(jobs, machine, fake_slurm):
    fake_slurm('echo "77_0|PENDING|PartitionTimeLimit"; echo "77_1|PENDING|JobHeldUser"; echo "77_2|PENDING|Priority"')
    notes: list[str] = []
    assert driven(machine, jobs, stopping(20), note=notes.append) == {"interrupted"}
    waits = [note for note in notes if " wait: " in note]
    assert sorted(note.split(" wait: ")[1].split(":")[0] for note in waits) == [
        "JobHeldUser", "PartitionTimeLimit", "Priority",
    ]  # fmt: skip
    assert all(note.startswith("1 of 3 SLURM jobs (77) wait: ") for note in waits)


def test_one_signal_ends_a_run_whose_jobs_wait_with_one_scancel(jobs, machine, fake_slurm, tmp_path):
    """Also where one has run before and was put back into the queue."""
    log = fake_slurm('for job in 0 1 2; do echo "77_$job|PENDING|BeginTime"; done')
    asked, notes = stopping(2), list[str]()

    def stop() -> int:
        for pool in pools(machine):
            pool.enter("77_1", "n1")
        return asked()

    assert driven(machine, jobs, stop, note=notes.append) == {"interrupted"}
    assert calls(log, "scancel") == ["scancel --state=PENDING 77"]
    assert not Path(machine.files, "slurm").exists()  # no job has left a log


def test_the_second_signal_leaves_nothing(jobs, machine, fake_slurm, monkeypatch):
    """The jobs run and do not end; the closing line would name them, had SLURM not ended them."""
    log = fake_slurm(
        'for job in 0 1 2; do if grep -q "scancel 77" $(dirname $(dirname $0))/calls; then'
        ' echo "77_$job|CANCELLED|None"; else echo "77_$job|RUNNING|None"; fi; done'
    )
    assert driven(machine, jobs, stopping(9, 2)) == {"interrupted"}
    assert calls(log, "scancel") == ["scancel --state=PENDING 77", "scancel 77"]


def test_as_many_jobs_as_the_queue_takes(jobs, machine, fake_slurm, monkeypatch):
    """It takes one of ours; that one takes all cells in turn."""
    monkeypatch.setattr(driver, "LEAVE", 0.0)
    refuse = 'case "$*" in *--array=0-0*) ;; *) echo "sbatch: error: AssocMaxSubmitJobLimit" >&2; exit 1;; esac;'
    refuse += ' [ "$(grep -c "array=0-0" $(dirname $(dirname $0))/calls)" = 1 ] || { echo "sbatch: error:'
    refuse += ' QOSMaxSubmitJobPerUserLimit" >&2; exit 1; };'
    log = fake_slurm('echo "77_0|RUNNING|None"', refuse)
    notes: list[str] = []
    driven(machine, jobs, stopping(9), note=notes.append)
    assert [call.split()[2] for call in calls(log, "sbatch")] == ["--array=0-2", "--array=0-0", "--array=0-0"]
    assert notes[0].startswith("sbatch: QOSMaxSubmitJobPerUserLimit: 1 jobs take all cells in turn")


def test_arrays_are_no_larger_than_slurm_allows(jobs, machine, fake_slurm):
    log = fake_slurm('for job in 0 1; do echo "77_$job|CANCELLED|None"; done', most=2)
    driven(machine, jobs)
    assert [call.split()[2] for call in calls(log, "sbatch")] == ["--array=0-1", "--array=0-0"]


def test_a_job_that_ended_without_a_word_is_submitted_again(jobs, machine, fake_slurm, monkeypatch):
    """PREEMPTED without requeue, and so on, every time; a cancelled one is left to whoever cancelled it."""
    monkeypatch.setattr(driver, "NO_CELL", 100)
    log = fake_slurm('echo "77_0|TIMEOUT|None"')
    notes: list[str] = []
    assert driven(machine, jobs[:1], note=notes.append) == {"interrupted"}
    assert len(calls(log, "sbatch")) == 1 + driver.TRIES
    assert notes[0].startswith("SLURM job 77_0 ended: TIMEOUT (it did not stop in time: give a longer")
    assert notes[0].endswith("): it is submitted again (1 of 5 times)")
    assert notes[-1].endswith("it was submitted 6 times and is not submitted again")
    log = fake_slurm('echo "77_0|CANCELLED|None"')
    driven(machine, jobs[:1], note=notes.append)
    assert len(calls(log, "sbatch")) == 2 + driver.TRIES and notes[-1].endswith("CANCELLED: it is not submitted again")


def test_jobs_that_never_take_a_cell_end_the_run_with_the_end_of_their_log(jobs, machine, fake_slurm):
    """A line of `setup` fails."""
    fake_slurm('echo "77_0|FAILED|NonZeroExitCode"', 'echo "job.sh: line 9: module: command not found" > $(echo "$*" |'
               ' sed "s/.*--error=//; s/ .*//; s/%A_%a/77_0/");')  # fmt: skip
    with pytest.raises(MachineError, match=r"5 SLURM jobs in a row .*FAILED; .*77_0\.log ends: job\.sh: .* not found"):
        driven(machine, jobs[:1], note=never_said)


def test_a_node_without_a_working_gpu_is_excluded_and_no_cell_fails(jobs, machine, fake_slurm, monkeypatch):
    monkeypatch.setattr(driver, "NO_CELL", 3)
    log = fake_slurm('echo "77_0|RUNNING|None"')
    notes, scripts, submitted = list[str](), list[str](), [0]

    def stop() -> int:
        """Every job that was submitted, they all have one number here, says that it has no GPU."""
        for pool in pools(machine):
            scripts.extend(file.read_text() for file in Path(machine.files, "slurm").glob("*/job.sh"))
            if pool.entries() and len(calls(log, "sbatch")) > submitted[0]:
                submitted[0] += 1
                pool.enter("77_0", "n7")
                pool.left("77_0", "bad_node: RuntimeError: no driver")
        return 0

    with pytest.raises(MachineError, match="no working GPU on n7: RuntimeError: no driver"):
        slurm.run(Work(jobs[:1], machine), ["cuda:0"], ignore, stop, note=notes.append)
    assert "keep away from n7" in notes[1] and rows(machine, jobs[0]) == {}
    assert "SBATCH --exclude" not in scripts[0] and "#SBATCH --exclude=n7\n" in scripts[-1]


def test_a_driver_that_starts_again_follows_what_is_in_the_queue(jobs, machine, fake_slurm):
    log = fake_slurm('for job in 0 1 2; do echo "77_$job|RUNNING|None"; done')
    pool = begun(jobs, machine)
    pool.expect({"77_0": 0, "77_1": 0})
    pool.report("77_0/0/0.0", [asdict(Event(jobs[0].cell, "train", "start"))])
    notes, seen = list[str](), Watcher()

    def stop() -> int:
        for number, one in enumerate(jobs):
            worker = f"77_{number % 2}/0/0.0"
            assert pool.take(worker, lambda cell: True) in (one.cell, None)
            pool.end(worker, one.cell, "done", [asdict(Event(one.cell, "cell", "done"))])
        pool.left("77_0", "exit")
        pool.left("77_1", "exit")
        return 0

    ended = slurm.run(Work(jobs, machine), ["cpu"] * 3, seen, stop, note=notes.append)
    assert ended == {one.cell: "done" for one in jobs}
    assert notes == ["SLURM array 77 is in the queue with these cells: this run follows it"]
    assert not (log / "calls").exists() or not calls(log, "sbatch")
    assert [event.kind for _, event in seen.seen] == ["done"] * 3  # what was told before is not told again
    assert not pools(machine)


def test_a_controller_that_does_not_answer_ends_nothing(fake_slurm):
    fake_slurm("exit 1")
    assert queue.states(["77_0"]) == {}


def test_an_array_cancelled_while_it_waits_is_one_line(fake_slurm):
    fake_slurm('echo "77|CANCELLED|None"; echo "77_1|RUNNING|None"; echo "78_0|PENDING|(a|b)"')
    found = queue.states(["77_0", "77_1", "78_0", "79_0"])
    assert [found[job].state for job in found] == ["CANCELLED", "RUNNING", "PENDING", "GONE"]
    assert found["78_0"].reason == "(a|b)"


def test_sbatch_is_asked_whether_it_would_take_a_job(fake_slurm, jobs, machine, capsys):
    """Where it answers: else a plan is a plan all the same."""
    asked = 'case "$*" in *--test-only*) echo "{}" >&2; exit {};; esac;'
    log = fake_slurm(refuse=asked.format("sbatch: Job 7 to start at 2026-01-02T03:04:05", 0))
    dry = RunOptions(executor="slurm", dry_run=True, db=machine.db)
    start.run(jobs, Watch("crew"), dry)
    assert "3 cells, 3 to run" in (said := capsys.readouterr().out) and "Job 7 to start at 2026-01-02" in said
    assert "--test-only" in calls(log, "sbatch")[0] and not Path(machine.files).exists()
    fake_slurm(refuse=asked.format("allocation failure: Invalid partition name specified", 1))
    with pytest.raises(MachineError, match="sbatch: allocation failure: Invalid partition name specified"):
        start.run(jobs, Watch("crew"), dry)
    fake_slurm(refuse=asked.format("fatal: no controller", 1))
    start.run(jobs, Watch("crew"), dry)
    assert "sbatch: fatal: no controller" in capsys.readouterr().out


# --- the job, in this process ------------------------------------------------------------------------------------


def pools(machine: Machine) -> list[Pool]:
    """What SLURM's jobs may take cells from."""
    with Store.open(machine.db) as store:
        return Pool.lasting(store.database)


def begun(jobs: list[Job], machine: Machine, **options: Any) -> Pool:
    """The pool of a run on SLURM."""
    work = Work(jobs, machine, patience=20.0, **options)
    with Store.open(machine.db) as store:
        return Pool.create(store.database, work.text(), [job.cell for job in jobs], lasts=True)


@pytest.fixture
def in_job(jobs, machine, monkeypatch, forks) -> Iterator[Callable[..., int]]:
    """Make a job of this process, and do its work: its exit code. The driver's variables are around it."""
    handlers = {which: signal.getsignal(which) for which in SIGNALS}
    monkeypatch.setenv(driver.DATABASE, machine.db)
    monkeypatch.setattr(job, "PAUSE", 0.1)

    def work_of(pool: Pool, number: int = 0, restarts: int = 0, *, signalled: bool = False) -> int:
        values = {"ARRAY_JOB_ID": 77, "ARRAY_TASK_ID": number, "RESTART_COUNT": restarts}
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        if f"77_{number}" not in pool.entries():
            pool.expect({f"77_{number}": 0})
        with Store.open(machine.db) as store:
            work = job.SlurmWork(store, pool, Work.parsed(pool.work() or "", machine.db))
            if signalled:
                work._hear()
            return work()

    yield work_of
    for which, handler in handlers.items():
        signal.signal(which, handler)


def test_a_job_takes_cells_until_none_is_free(jobs, machine, in_job):
    """It leaves what others hold, and its runs name it."""
    with Store.open(machine.db) as store:
        store.add_cell(jobs[1].cell, jobs[1].spec)
        store.claim(jobs[1].cell, "train", suite="crew", total=4, provenance={"host": "node7", "pid": 4711})
    pool = begun(jobs, machine)
    assert in_job(pool, 2) == 0 and pool.entries()["77_2"].said == "exit"
    assert pool.statuses() == {jobs[0].cell: "done", jobs[1].cell: "elsewhere", jobs[2].cell: "done"}
    for one in (jobs[0], jobs[2]):
        assert numbers(machine, one) == undisturbed(machine, one)
    with Store.open("own.db", create=True) as store:  # in this process: the fork server's environment is a former one
        assert work(replace(jobs[0], evaluations=[]), machine, store) == "done"
        assert {run["slurm_job"] for run in store.runs([jobs[0].cell])} == {"77_2"}
    assert in_job(pool, 1) == 0


def test_a_job_whose_time_is_up_wants_to_go_on_and_takes_over_from_its_last_start(jobs, machine, in_job):
    """A node that died has left a stage in its hands."""
    pool = begun(jobs, machine)
    pool.enter("77_0/0/0.0", "n7")
    assert pool.take("77_0/0/0.0", lambda cell: True) == jobs[0].cell
    with Store.open(machine.db) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        about = {"host": "n7", "pid": 4711, "slurm_job": "77_0"}
        store.claim(jobs[0].cell, "train", suite="crew", total=4, provenance=about)
    assert in_job(pool, restarts=1, signalled=True) == table.REQUEUE_CODE
    assert rows(machine, jobs[0]) == {"train": ("interrupted", None)} and pool.counts() == (3, 0, False)
    pool.stop()
    assert in_job(pool, restarts=2, signalled=True) == 0


def test_a_job_that_finishes_no_round_in_its_time_is_not_queued_for_ever(in_job, jobs, machine):
    pool = begun(jobs, machine)
    codes = [in_job(pool, restarts=restarts, signalled=True) for restarts in range(job.NO_PROGRESS)]
    assert codes == [table.REQUEUE_CODE, table.REQUEUE_CODE, 1]
    assert pool.entries()["77_0"].said == f"no_progress: {job.NO_PROGRESS}"


def test_a_job_without_a_gpu_takes_no_cell(in_job, machine, monkeypatch, jobs):
    monkeypatch.setattr(job, "BAD_NODE", 0.0)
    monkeypatch.setattr(job, "GPU", "raise RuntimeError('no driver')")
    pool = begun(jobs, replace(machine, device="cuda"))
    assert in_job(pool) == 1 and pool.entries()["77_0"].said == "bad_node: RuntimeError: no driver"
    assert rows(machine, jobs[0]) == {}


def test_a_process_whose_job_slurm_has_started_elsewhere_ends(jobs, machine, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    pool = begun(jobs, machine)
    with Store.open(machine.db) as store:
        work = job.SlurmWork(store, pool, Work.parsed(pool.work() or "", machine.db))
        pool.enter("77", "n1")
        assert work.stop() == 0
        monkeypatch.setattr(os, "getpid", lambda: 1)
        pool.enter("77", "n2")
        monkeypatch.undo()
        assert work.stop() == 1


def test_what_is_stored_of_a_run_holds_no_address(jobs, machine):
    secret = Work(jobs, replace(machine, db="postgresql://u:geheim@host/x"))
    assert "geheim" not in secret.text() and Work.parsed(secret.text(), secret.machine.db) == secret


def test_another_user_s_run_on_the_same_database_is_left_alone(jobs, machine, fake_slurm, monkeypatch):
    pool = begun(jobs, machine)
    pool.expect({"77_0": 0})
    monkeypatch.setattr(getpass, "getuser", lambda: "somebody")
    log = fake_slurm('echo "77_0|CANCELLED|None"')
    driven(machine, jobs[:1], note=never_said)
    assert len(calls(log, "sbatch")) == 1 and pool.work() is not None


def test_status_and_show_name_the_job_of_a_cell(jobs, machine, run):
    with Store.open(machine.db) as store:
        store.add_cell(jobs[0].cell, jobs[0].spec)
        about = {"host": "n7", "pid": 4711, "slurm_job": "77_3", "device": "cpu", "precision": "fp32", "commit": "c"}
        store.claim(jobs[0].cell, "train", suite="crew", total=4, provenance=about)
    code, out, _ = run("status", "crew.yaml", "--db", machine.db)
    assert code == 0 and f"{jobs[0].cell} train is held by process 4711 on n7, SLURM job 77_3, last progress" in out
    code, out, _ = run("show", jobs[0].cell, "--db", machine.db)
    assert code == 0 and "on n7, SLURM job 77_3," in " ".join(out.split())


def test_two_drivers_of_one_run(jobs, machine, fake_slurm):
    """The one that sees the end first deletes the pool; the other finds in the database that all is done."""
    log = fake_slurm('for job in 0 1 2; do echo "77_$job|RUNNING|None"; done')
    seen = Watcher()

    def stop() -> int:
        for pool in pools(machine):
            if pool.entries():
                with Store.open(machine.db) as store:
                    assert [work(one, machine, store) for one in jobs] == ["done"] * 3
                pool.delete()
        return 0

    assert slurm.run(Work(jobs, machine), ["cpu"] * 3, seen, stop) == {job.cell: "done" for job in jobs}
    assert len(calls(log, "sbatch")) == 1 and not Path(machine.files, "slurm").exists()
