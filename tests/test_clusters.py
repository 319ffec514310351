"""Ray: real nodes on this machine."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from crew import SUITE, Watcher, ignore, lasting, never, numbers, pid_of, rows
from ray_cluster import patiently

from fatbench.cli.app import app
from fatbench.cli.watch import Watch
from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import ray
from fatbench.runner.jobs import Event, Job, Machine, Work
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import jobs_of
from fatbench.runner.start import run as run_all
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files

# --- Ray ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(patient_ray, postgres_server) -> Iterator[Any]:
    """Two Ray nodes of a core each on this machine; we are connected to the first. The second, and how to lose it."""
    utilities = pytest.importorskip("ray.cluster_utils")
    small = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    ports = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", "dashboard_agent_listen_port")

    def place() -> dict[str, Any]:
        """With ports that we choose, Ray need not wait until its helpers have; they are slow on a busy machine."""
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in ports]
            for one in sockets:
                one.bind(("127.0.0.1", 0))
            return small | {name: one.getsockname()[1] for name, one in zip(ports, sockets, strict=True)}

    def start() -> Any:
        cluster = utilities.Cluster()
        try:
            cluster.add_node(**place())
            second = cluster.add_node(**place())
            patient_ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            return cluster, second
        except Exception as error:  # Ray's own class for a node that did not start in time
            patient_ray.shutdown()
            cluster.shutdown()
            raise MachineError(str(error)) from None

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    cluster, second = patiently(start)
    yield second, lambda: cluster.remove_node(second, allow_graceful=False)
    patient_ray.shutdown()
    cluster.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files of Ray that it leaves to the garbage collector
@pytest.mark.promise(
    "Interrupted and shared runs", "When a Ray node is killed in the middle of a cell, another node continues it"
)
def test_a_ray_node_is_killed_in_the_middle_of_a_cell(tmp_path, monkeypatch, two_nodes, new_postgres, capfd):
    """A cell on each node; the node of one is gone after its first rounds. The other node does it, from a checkpoint.

    The run ends with 0, and its tables are those of a run on this machine alone.
    """
    second, lose = two_nodes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FATBENCH_RUN_CHECKPOINT_SECONDS", "0")
    Path("crew.yaml").write_text(SUITE.replace("rounds: 4", "rounds: 60").replace("    usual: {}\n", ""))
    whole, url = jobs_of(files.load("crew.yaml").plan()), new_postgres()
    raylet = next(one.process.pid for one in second.all_processes["raylet"])
    lost: list[str] = []

    class Losing(Watch):
        def see(self, slot: int, event: Event) -> None:
            super().see(slot, event)
            if not lost and event.stage == "train" and event.kind == "progress" and event.round < 50:
                with Store.open(url) as store:
                    pids = [run["pid"] for run in store.runs([event.cell]) if run["status"] == "running"]
                if pids and parent_of(pids[0]) == raylet:
                    lost.append(event.cell)
                    lose()

    run_all(whole, Losing("crew"), RunOptions(executor="ray", device="cpu", db=url))
    err = capfd.readouterr().err
    assert "crew: 2 of 2 cells done" in err and f"{lost[0]} train interrupted: its Ray node is lost" in err
    assert "state-dump" not in err and "(raylet)" not in err
    with Store.open(url) as store:
        ended = [run["status"] for run in store.runs(lost) if run["stage"] == "train"]
    assert ended == ["interrupted", "done"]
    [log] = [file.read_text() for file in Path("results").glob(f"*-files/{lost[0]}/log.txt")]
    assert log.count("train: from round 0 of 60") == 1 and log.count("train: from round") == 2  # it goes on
    alone = Machine(str(tmp_path / "alone.db"), str(tmp_path / "alone"), "")
    with Store.open(alone.db, create=True) as store:
        assert [work(job, alone, store) for job in whole] == ["done"] * 2
    assert [numbers(replace(alone, db=url), job) for job in whole] == [numbers(alone, job) for job in whole]
    tables = []
    for db in (url, alone.db):  # into a file: Ray writes to stdout when it notices the loss
        app(["report", "crew.yaml", "--db", db, "--format", "csv", "-o", "table.csv"], standalone_mode=False)
        tables.append(Path("table.csv").read_text())
    assert tables[0] == tables[1] and "slow" in tables[0]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # files of Ray that it leaves to the garbage collector
@pytest.mark.promise("Interrupted and shared runs", "A Ray node lost while the run is being stopped fails no cell")
def test_a_ray_node_that_is_lost_while_the_run_is_being_stopped_fails_no_cell(jobs, machine, two_nodes):
    """Ctrl-C, and in the round that it waits for one of the two nodes goes. Its cell is given back and not begun anew.

    The rounds have no end: only the second Ctrl-C ends the cell of the other node.
    """
    second, lose = two_nodes
    raylet = next(one.process.pid for one in second.all_processes["raylet"])
    endless = [lasting(job) for job in jobs[:2]]
    for job in endless:
        job.spec["algorithm"]["local"]["epochs"] = 10**6
    seen, lost, since = Watcher(), list[Job](), list[float]()

    def stop() -> int:
        if not lost:
            if any(rows(machine, job).get("train", ("", ""))[0] != "running" for job in endless):
                return 0
            lost.extend(job for job in endless if parent_of(pid_of(machine, job)) == raylet)
            return 1
        if not since:
            lose()
            since.append(time.monotonic())
        return 2 if seen.kinds(lost[0]) or time.monotonic() > since[0] + 60 else 1

    assert ray.run(Work(endless, machine), ["cpu"] * 2, seen, stop) == {job.cell: "interrupted" for job in endless}
    assert seen.kinds(lost[0]) == ["interrupted"]
    for job in endless:
        assert rows(machine, job) == {"train": ("interrupted", None)}
        assert seen.kinds(job, "slot") == ["given"]


def test_what_ray_writes_of_a_lost_node_is_left_out(capsys):
    """As Ray 2.5x writes it, in pieces."""
    quiet = ray._StderrWithoutDumps()
    terminated = "Raylet is terminated. Last 20 lines of the Raylet logs:\n    [state-dump] x"
    for line in (f"\033[33m(raylet)\033[0m {terminated}", "\t(2) raylet has lagging heartbeats", ""):
        print(line, file=quiet)
    print("(autoscaler +1m)", "no node has 4 GPUs", file=quiet)
    assert capsys.readouterr() == ("", "(autoscaler +1m) no node has 4 GPUs\n")


def late(**options: object) -> None:
    """Ray's own way to say that a node did not start."""
    raise Exception("The node timed out during startup")


def test_what_ray_cannot_do(machine, monkeypatch):
    package = pytest.importorskip("ray")
    with pytest.raises(SpecError, match=r"^device=cuda:1: Ray chooses the GPUs; give cuda \(CUDA_VISIBLE_DEVICES"):
        ray.slots("cuda:1", None, 1, machine.db)
    monkeypatch.setattr(package, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(MachineError, match=r"RAY_ADDRESS=127\.0\.0\.1:9: .*[Rr]efused"):
        ray.slots("cpu", None, 1, machine.db)
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(package, "init", late)
    with pytest.raises(MachineError, match=r"^Ray cannot be started here: The node timed out during startup$"):
        ray.run(Work([], machine), ["cpu"], ignore, never)
    resources = {"CPU": 8.0, "GPU": 2.0}
    nodes = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(package, "is_initialized", lambda: True)
    monkeypatch.setattr(package, "cluster_resources", lambda: resources)
    monkeypatch.setattr(package, "nodes", lambda: nodes)
    message = r"r\.db: 2 Ray nodes cannot share a SQLite file; use PostgreSQL: --db postgresql://user:"
    with pytest.raises(SpecError, match=message):
        ray.slots(None, None, 1, machine.db)
    server = "postgresql://u:geheim@nowhere/x"
    if find_spec("psycopg"):
        assert ray.slots(None, None, 2, server) == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    nodes.pop(0)
    assert ray.slots("auto", 1, 1, machine.db) == ["cuda:0"]
    assert ray.slots("cpu", None, 1, machine.db) == ["cpu"] * 8
    del resources["GPU"]
    assert ray.slots("auto", 3, 1, machine.db) == ["cpu"] * 3
    with pytest.raises(MachineError, match=r"^device=cuda: the Ray cluster has no GPU"):
        ray.slots("cuda", None, 1, machine.db)
