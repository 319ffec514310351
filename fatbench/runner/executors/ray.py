"""Run workers as Ray tasks, on the cluster that RAY_ADDRESS names or on one started here for the run.

Every node must see the data, the files folder and the database under the same paths, and have fatbench and the plug-ins
installed. Several nodes need PostgreSQL as the database. A cell starts once more if its node is lost or its worker is
killed, as systems do when they run out of memory; Ray does not tell by which signal a worker died.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import End, device_and_jobs, local, say, supervised
from fatbench.runner.jobs import Note, Statuses, Stop, Watch, Work
from fatbench.runner.worker import take_cells
from fatbench.store.database import Database
from fatbench.store.pools import Pool

SILENCE = 60.0  # seconds without a task that begins, after which the user is told
PATIENCE = 3.0  # seconds that a cluster may take to notice that a node is gone


def slots(device: str | None, jobs: int | None, per_gpu: int, url: str) -> list[str]:
    """The device of each slot: one for each core of the cluster, or `per_gpu` for each of its GPUs.

    SpecError: Ray is not installed, a numbered GPU is asked for, or SQLite on several nodes. MachineError: there is no
    GPU or no cluster.
    """
    ray = _package()
    device_name, jobs = device_and_jobs(device, jobs)
    if ":" in device_name:
        raise SpecError(
            "Ray chooses the GPUs; give cuda (CUDA_VISIBLE_DEVICES hides the others)", option=f"device {device_name}"
        )
    if not (_address() or ray.is_initialized()):
        return local.slots(device_name, jobs, per_gpu)
    with _connected(ray):
        nodes = sum(node["Alive"] for node in ray.nodes())
        resources = ray.cluster_resources()
    database = Database(url)
    if nodes > 1 and database.path is not None:
        raise SpecError(
            f"{database.shown}: {nodes} Ray nodes cannot share a SQLite file; use PostgreSQL:"
            " --db postgresql://user:password@host/name"
        )
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if device_name == "cuda" and not gpus:
        raise MachineError("the Ray cluster has no GPU", option="device cuda")
    if gpus and device_name != "cpu":
        return [f"cuda:{gpu}" for _ in range(per_gpu) for gpu in range(gpus)][:jobs]
    return ["cpu"] * (jobs or max(cores, 1))


def run(work: Work, slots: Sequence[str], watch: Watch, stop: Stop, *, note: Note = say) -> Statuses:
    """Work with a task for each slot, and return each cell's status."""
    ray = _package()
    with _connected(ray, slots):
        tasks = Tasks(ray, 0.0 if slots[0] == "cpu" else 1 / max(Counter(slots).values()), note)
        return supervised(work, slots, partial(RayTask, tasks), watch, stop)


class Tasks:
    """The tasks of a run, each of which is a process; it sees only the GPU that Ray gave it, as cuda:0."""

    def __init__(self, ray: Any, gpu: float, note: Note):
        self.ray, self.gpu, self.note = ray, gpu, note
        # a plug-in may change all of torch, so no process is used again
        self.remote = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0, max_calls=1)(_work)
        self.since = time.monotonic()

    def say_if_none_begins(self, pool: Pool) -> None:
        """Tell the user once if all tasks wait for long."""
        if time.monotonic() - self.since < SILENCE:
            return
        self.since = math.inf
        if not pool.entries():
            cluster = {name: self.ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            needs = f"1 CPU and {self.gpu:g} GPU" if self.gpu else "1 CPU"
            self.note(
                f"Ray tasks have waited {SILENCE:g} s: each needs {needs} of a node; the cluster has"
                f" {cluster['CPU']:g} CPUs and {cluster['GPU']:g} GPUs in all, and others may have them (ray status)"
            )


class RayTask:
    """A worker as a task of Ray."""

    def __init__(self, tasks: Tasks, db: str, pool: Pool, name: str, device: str):
        self.tasks, self.ray, self.pool, self.name = tasks, tasks.ray, pool, name
        self.reference = tasks.remote.remote(db, pool.id, name, "cpu" if device == "cpu" else "cuda:0")

    def end(self) -> End | None:
        """How it ended; None while it lives."""
        self.tasks.say_if_none_begins(self.pool)
        if not self.ray.wait([self.reference], timeout=0)[0]:
            return None
        try:
            return End("", blocked=bool(self.ray.get(self.reference)))
        except self.ray.exceptions.TaskCancelledError:
            return End("")
        except self.ray.exceptions.RayError as error:
            entry = self.pool.entries().get(self.name)
            if reason := _why_lost(self.ray, error, entry.said if entry else ""):
                return End(reason, lost=True)
            return End(f"the Ray worker ended: {type(error).__name__}: {str(error).splitlines()[0]}")

    def kill(self) -> None:
        """End it at once."""
        self.ray.cancel(self.reference, force=True)
        self.ray.wait([self.reference], timeout=10)


def _work(db: str, pool: str, name: str, device: str) -> int:
    """The body of a task: a worker, whose node the pool knows."""
    import ray

    try:
        take_cells(db, pool, name, device, ray.get_runtime_context().get_node_id())
    except SystemExit as error:
        return int(str(error.code))
    return 0


def _why_lost(ray: Any, error: Exception, node: str) -> str:
    """Why a task ended whose cell may start once more; empty if its own code failed."""
    end, gone = time.monotonic() + PATIENCE, isinstance(error, ray.exceptions.NodeDiedError)
    while not gone and time.monotonic() <= end:  # the cluster may notice that a node is gone a moment after the task
        time.sleep(0.2)
        gone = any(row["NodeID"] == node and not row["Alive"] for row in ray.nodes())
    if gone:
        return "its Ray node is lost"
    killed = isinstance(error, (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError))
    return "its Ray worker was killed (out of memory?)" if killed else ""


def _package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics unasked
    # the default of later versions; without it Ray prints a warning
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise SpecError(" needs Ray: pip install 'fatbench[ray]'", option="executor ray") from None
    return ray


def _address() -> str | None:
    address = os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


@contextlib.contextmanager
def _connected(ray: Any, slots: Sequence[str] = ()) -> Iterator[None]:
    """A context with a connection to Ray; an existing one is used and left open.

    Ray replaces the handler of SIGTERM, which is restored, and prints messages of its nodes to stdout, which go to
    stderr instead.
    """
    if ray.is_initialized():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old_handlers = [signal.getsignal(number) for number in numbers]
    address = _address()
    options: dict[str, Any] = {"address": address}
    if address is None:
        gpus = len({slot for slot in slots if slot != "cpu"})
        # tasks exchange no arrays, so the object store is the smallest that Ray accepts
        options = {"address": "local", "num_cpus": len(slots), "num_gpus": gpus, "object_store_memory": 80 << 20}
        options["include_dashboard"] = False
    with contextlib.redirect_stdout(_StderrWithoutDumps()):
        try:
            host, _, port = (address or "").rpartition("/")[2].rpartition(":")
            if host and port.isdecimal():  # if nothing answers, Ray would take minutes to say so
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # Ray raises a bare Exception if a node does not start in time
            ray.shutdown()
            address_text = f"RAY_ADDRESS={address}" if address else "Ray cannot be started here"
            token = address and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
            hint = " (a cluster that asks for a token wants RAY_AUTH_MODE=token)" if token else ""
            raise MachineError(f"{address_text}: {str(error).splitlines()[0]}{hint}") from None
        finally:
            for number, handler in zip(numbers, old_handlers, strict=True):
                signal.signal(number, handler)
        try:
            yield
        finally:
            ray.shutdown()


class _StderrWithoutDumps(io.TextIOBase):
    """stderr without the dozens of lines that Ray prints about a node that dies; `run` reports that in one line."""

    def __init__(self) -> None:
        self.rest = ""

    def write(self, text: str) -> int:
        """Pass on complete lines, except those of a node ("(raylet)") and their indented continuations."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.strip() and "(raylet)" not in line and not line[0].isspace():
                sys.stderr.write(f"{line}\n")
        return len(text)
