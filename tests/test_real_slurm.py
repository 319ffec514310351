"""The SLURM executor on a real SLURM of three nodes on this machine, with every fault that a site has on its first day.

`make slurm` runs it, as root on Debian; where SLURM cannot be started, it is skipped and says why. A run is a process
of its own, as a person starts it, but that it looks at SLURM more often. Whatever happens, the numbers that are stored
in the end are those of a run on this machine that nobody disturbed, or one line says what to do.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from crew import SUITE
from slurm_cluster import Cluster, until

from fatbench.store.stages import Store

pytestmark = pytest.mark.nightly

ROUNDS = 40  # of each of three cells
LONG = SUITE.replace("rounds: 4", f"rounds: {ROUNDS}").replace("aggregator: samples", "aggregator: patient")
LONG = LONG.replace("seeds: [1]", "seeds: [1]\nplugins: [patient.py]")
PATIENT = """\"\"\"A round that takes its time, whatever else the machine does.\"\"\"
import time

from fatbench.methods.aggregators import samples


def patient(updates, context):
    \"\"\"As samples, a quarter of a second later.\"\"\"
    time.sleep(0.25)
    return samples(updates, context)


AGGREGATORS = {"patient": patient}
"""
# the program, which looks at SLURM every two seconds and not every twenty
PROGRAM = """
from fatbench.runner.executors.slurm import driver
driver.ASK = driver.SOON = 2.0
driver.LEAVE = 8.0
from fatbench.cli.app import main
main()
"""


def start(stack: contextlib.ExitStack, accounting: bool = False, max_array: int = 1001) -> Cluster:
    """A SLURM that ends with the stack; skipped, with the reason, where none can be had."""
    if reason := slurm_cluster.lacking(accounting):
        pytest.skip(reason)
    try:
        return stack.enter_context(slurm_cluster.started(3, accounting, max_array))
    except RuntimeError as error:
        pytest.skip(f"SLURM does not start here: {error}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield start(stack)


@pytest.fixture
def slurm(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, idle; the working directory is empty but for the suite."""
    cluster.ready()
    monkeypatch.chdir(tmp_path)
    suite(tmp_path)
    yield cluster
    end_runs()
    cluster.ready()


def suite(folder: Path, rounds: int = ROUNDS) -> None:
    (folder / "crew.yaml").write_text(LONG.replace(f"rounds: {ROUNDS}", f"rounds: {rounds}"))
    (folder / "patient.py").write_text(PATIENT)


def table(text: str = "") -> None:
    Path("fatbench.toml").write_text(f"[run]\ncheckpoint_seconds = 0.5\n[slurm]\ntime = 60\n{text}\n")


RUNS: list[Run] = []  # of the test


class Run:
    """`fatbench run suite crew.yaml --executor slurm`, as a process."""

    def __init__(self, slurm: Cluster, *options: str, **extra: str):
        command = [sys.executable, "-c", PROGRAM, "run", "suite", "crew.yaml", "--executor", "slurm", *options]
        self.log = Path(f"run-{time.monotonic_ns()}.log")
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stderr=file, env=slurm.environment | extra)
        RUNS.append(self)

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, said: str, seconds: float = 90) -> re.Match[str]:
        """Wait for a line. AssertionError: it does not come, or the run ends first."""
        end = time.monotonic() + seconds
        while (found := re.search(said, self.text)) is None:
            assert time.monotonic() < end and self.process.poll() is None, f"no '{said}' in:\n{self.text[-2000:]}"
            time.sleep(0.2)
        return found

    def end(self, seconds: float = 300) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run does not end:\n{self.text}") from None


def end_runs() -> None:
    """What a test that failed has left."""
    while RUNS:
        run = RUNS.pop()
        run.process.kill()
        run.process.wait()


def stored(db: str = "results/fatbench.db") -> dict[str, list[tuple]]:
    """Cell -> its numbers; times are none."""
    keys = ("stage", "round", "client", "metric", "value", "n")
    with Store.open(db) as store:
        rows = store.measurements()
    result: dict[str, list[tuple]] = {}
    for row in rows:
        if row["metric"] != "seconds":
            result.setdefault(row["cell"], []).append(tuple(row[key] for key in keys))
    return {cell: sorted(numbers) for cell, numbers in result.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    suite(folder)
    command = [sys.executable, "-m", "fatbench", "run", "suite", "crew.yaml", "--jobs", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return stored(str(folder / "results/fatbench.db"))


def done(run: Run, undisturbed: dict[str, list[tuple]], seconds: float = 300) -> None:
    """The run ends with everything done, and the numbers are the undisturbed ones."""
    assert run.end(seconds) == 0, run.text[-2000:]
    assert stored() == undisturbed
    assert not list(Path("results").glob("*/slurm/*/job.sh"))
    assert list(Path("results").glob("*/slurm/*/*.log"))  # they stay


def progress_of(run: Run) -> tuple[str, str]:
    """(job, node) of the first cell whose training has a checkpoint of some rounds."""
    end = time.monotonic() + 120
    while time.monotonic() < end and run.process.poll() is None:
        time.sleep(0.5)
        if " to go" not in run.text:  # the database is made before that
            continue
        with Store.open("results/fatbench.db") as store:
            begun = {row.run for row in store.stages([*store.cells()]).values() if row.alive and row.round > 1}
            found = [(row["slurm_job"], row["host"]) for row in store.runs() if row["id"] in begun]
        if found:
            return found[0]
    raise AssertionError(f"no cell is trained:\n{run.text}")


def test_a_run_from_a_job(slurm, undisturbed):
    """What most sites ask for: the driver is itself a job, whose SLURM_* its own jobs must not inherit."""
    table()
    command = f"{sys.executable} -m fatbench run suite crew.yaml --executor slurm --jobs 2"
    done_ = slurm.call("sbatch", "--parsable", "--wait", "--mem=500", "--output=out", "--wrap", command)
    assert done_ and "3 of 3 cells done" in Path("out").read_text()
    assert stored() == undisturbed


def test_a_cell_longer_than_its_job_goes_on_where_sites_requeue_nothing(slurm, undisturbed):
    """JobRequeue=0. The signal of its time's end comes here from scancel: SLURM's own comes once a minute."""
    table()
    run = Run(slurm, "--jobs", "1")
    job, _ = progress_of(run)
    for _ in range(2):
        slurm.call("scancel", "--signal=USR1", job)
        until(lambda: slurm.jobs()[job] == "PENDING", 60)
        until(lambda: slurm.jobs()[job] == "RUNNING", 90)
        time.sleep(5)
    done(run, undisturbed)
    assert "failed" not in run.text and run.text.count("submitted") == 0
    assert "Restarts=2" in slurm.call("scontrol", "show", "job", job)


@pytest.mark.promise(
    "Interrupted and shared runs",
    "When the time of a SLURM job is up, its next start continues its cell and repeats no round",
)
def test_the_end_of_a_job_s_time(slurm, undisturbed):
    table("")
    Path("fatbench.toml").write_text("[run]\ncheckpoint_seconds = 0.5\n[slurm]\ntime = 1\ncpus = 1\n")
    suite(Path(), 3 * ROUNDS)
    run = Run(slurm, "--jobs", "1", "-k", "pace=slow")
    assert run.end(900) == 0 and "mostly starts and stops" in run.text
    with Store.open("results/fatbench.db") as store:
        [(cell, rows)] = stored().items()
        assert len({row["id"] for row in store.runs([cell]) if row["stage"] == "train"}) > 1
    assert len([row for row in rows if row[3] == "train_loss" and row[2] == -1]) == 3 * ROUNDS


def test_a_lost_node_whose_process_lives(slurm, undisturbed):
    """Its slurmd dies, SLURM starts the job elsewhere, and the old process goes on: its cell is taken from it."""
    table()
    run = Run(slurm, "--jobs", "2")
    job, node = progress_of(run)
    slurm.kill(node)
    slurm.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")  # before its cells are done
    until(lambda: slurm.jobs().get(job) == "PENDING" or job in run.text, 120)
    done(run, undisturbed)
    assert "being run by another process" not in run.text


def test_a_node_crashes(slurm, undisturbed):
    table()
    run = Run(slurm, "--jobs", "2")
    _, node = progress_of(run)
    slurm.crash(node)
    done(run, undisturbed)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ('partition = "short"\ntime = 240', "PartitionTimeLimit: `time` is more than the partition allows"),
        ('partition = "down"', "PartitionDown: the partition is down"),
        ("hold = true", "JobHeldUser: it is held: scontrol release"),
    ],
)
def test_why_nothing_runs_is_said_once_and_one_signal_ends_it(rows, reason, slurm):
    Path("fatbench.toml").write_text(f"[slurm]\n{rows}\n")
    run = Run(slurm, "--jobs", "2")
    run.until(f"2 of 2 SLURM jobs .* wait: {reason}")
    time.sleep(5)
    run.process.send_signal(signal.SIGINT)
    assert run.end(15) == 130 and run.text.count(reason) == 1
    assert {*slurm.jobs("PENDING,RUNNING")} == set()


def test_one_signal_ends_a_run_with_a_job_that_was_put_back(slurm, undisturbed):
    """One job is held in the queue after its start, one runs: it keeps its round."""
    table()
    run = Run(slurm, "--jobs", "2")
    job, _ = progress_of(run)
    slurm.call("scontrol", "requeuehold", job)
    run.until(r"1 of \d SLURM jobs .* wait: .*: it is held: scontrol release")
    run.process.send_signal(signal.SIGINT)
    assert run.end(30) == 130
    until(lambda: not slurm.jobs("PENDING,RUNNING,COMPLETING"), 30)
    with Store.open("results/fatbench.db") as store:
        assert any(row.round > 1 for row in store.stages([*store.cells()]).values())
    again = Run(slurm, "--jobs", "2")
    assert again.end() == 0 and stored() == undisturbed


@pytest.mark.parametrize("partition", ["low", "grace", "cancel"])
def test_a_preempted_job(partition, slurm, undisturbed):
    """SLURM puts it back at once, after a grace in which it leaves by itself, or ends it for good."""
    table(f'partition = "{partition}"')
    run = Run(slurm, "--jobs", "1")
    progress_of(run)
    began = time.monotonic()
    slurm.call("sbatch", "--parsable", "--partition=high", "--exclusive", "--nodes=3", "--wrap", "sleep 5")
    done(run, undisturbed)
    assert time.monotonic() - began < 200
    if partition == "cancel":
        assert "PREEMPTED" in run.text


def test_a_job_that_is_cancelled_is_not_submitted_again(slurm):
    table("hold = true")
    run = Run(slurm, "--jobs", "1")
    run.until("JobHeldUser")
    slurm.call("scancel", "--me")
    assert run.end(60) == 1
    assert re.search(r"SLURM job \d+_0 ended: CANCELLED: it is not submitted again", run.text)


def test_the_driver_is_killed_and_started_again(slurm, undisturbed):
    table()
    first = Run(slurm, "--jobs", "2")
    progress_of(first)
    first.process.kill()
    first.process.wait()
    arrays = {job.partition("_")[0] for job in slurm.jobs("PENDING,RUNNING")}
    second = Run(slurm, "--jobs", "2")
    second.until("is in the queue with these cells: this run follows it")
    done(second, undisturbed)
    assert {job.partition("_")[0] for job in slurm.jobs("PENDING,RUNNING,COMPLETING")} <= arrays


def test_the_controller_is_gone_for_a_while(slurm, undisturbed):
    table()
    run = Run(slurm, "--jobs", "2")
    progress_of(run)
    slurm.kill("slurmctld")
    time.sleep(10)
    slurm.start_controller()
    done(run, undisturbed)


def test_nodes_without_a_working_gpu(slurm):
    """No CUDA here: every node is found unfit, none of the cells fails, and the nodes are named."""
    Path("fatbench.toml").write_text("[slurm]\ngpus = 1\n")
    run = Run(slurm, "--jobs", "3", **{"FATBENCH_RUN_CHECKPOINT_SECONDS": "1"})
    assert run.end() == 5
    assert re.search(r"no working GPU on n\d: .*; the run's jobs keep away from n\d from now on", run.text)
    with Store.open("results/fatbench.db") as store:
        assert not store.stages([*store.cells()])


def test_postgresql_whose_password_is_in_no_file(slurm, undisturbed, new_postgres):
    """The jobs get the database's address by their environment. The server trusts whoever reaches its socket."""
    table()
    url = new_postgres()
    run = Run(slurm, "--jobs", "2", "--db", url)
    slurm_cluster.until(lambda: list(Path("results").glob("*/slurm/*/*.log")), 120)
    time.sleep(3)
    for _ in range(2):  # while it runs, and after
        files = [file for file in Path().rglob("*") if file.is_file()]
        assert files and not [file for file in files if b"geheim" in file.read_bytes()]
        assert run.end() == 0, run.text[-2000:]
    assert stored(url) == undisturbed


def test_lines_before_the_job_a_command_for_python_and_jobs_of_the_attacks(slurm, undisturbed):
    Path("python.sh").write_text(f'#!/bin/bash\necho "$FLAG" >> {Path.cwd()}/flags\nexec {sys.executable} "$@"\n')
    Path("python.sh").chmod(0o755)
    table(f'setup = ["export FLAG=loaded"]\npython = "{Path.cwd()}/python.sh"\n[slurm.attacks]\npartition = "gpu"')
    done(Run(slurm, "--jobs", "2"), undisturbed)
    assert {*Path("flags").read_text().split()} == {"loaded"}
    with Store.open("results/fatbench.db") as store:
        jobs = {row["stage"] == "train": row["slurm_job"].partition("_")[0] for row in store.runs()}
    assert "Partition=gpu" in slurm.call("scontrol", "show", "job", jobs[False])
    assert "Partition=all" in slurm.call("scontrol", "show", "job", jobs[True])
    command = [sys.executable, "-m", "fatbench", "show", next(iter(undisturbed))]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert f"SLURM job {jobs[True]}_" in shown.stdout.replace("\n", " ")


def test_a_line_before_the_job_that_fails(slurm):
    table('setup = ["module load no-such-module"]')
    run = Run(slurm, "--jobs", "2")
    assert (
        run.end() == 5
        and "in a row ended before they took a cell" in run.text
        and "module: command not found" in run.text
    )


def test_an_array_of_plain_runs(slurm, undisturbed):
    """Without the executor: each job is a run of its own, and they share the cells by leases."""
    command = f"{sys.executable} -m fatbench run suite crew.yaml --jobs 1"
    slurm.call("sbatch", "--parsable", "--wait", "--array=0-2", "--output=out-%a", "--wrap", command)
    assert stored() == undisturbed


# --- limits, which need SLURM's accounting -----------------------------------------------------------------------


@pytest.fixture
def limited(tmp_path: Path, monkeypatch) -> Iterator[Cluster]:
    monkeypatch.chdir(tmp_path)
    suite(tmp_path)
    with contextlib.ExitStack() as stack:
        yield start(stack, accounting=True, max_array=2)
        end_runs()


def test_limits_of_submission(limited, undisturbed):
    """MaxArraySize=2, and MaxSubmitJobs=2 of three: two jobs take all the cells."""
    table()
    limited.call("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=2")
    run = Run(limited, "--jobs", "3")
    done(run, undisturbed)
    assert re.search("AssocMaxSubmitJobLimit.*: 2 jobs take all cells in turn", run.text)
    limited.call("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=-1")
    limited.call("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxWall=2")
    Path("results").rename("before")
    run = Run(limited, "--jobs", "3")
    run.until("QOSMaxWallDurationPerJobLimit: `time` is more than the QOS allows")
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 130
