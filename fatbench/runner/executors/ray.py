"""Cells as Ray tasks: on the cluster that RAY_ADDRESS names, else on one started here for the run.

Every node must see the data, the files folder and the database under the same paths, and have fatbench and the
plugins installed. On several nodes the database is PostgreSQL. A cell whose node is lost is begun once more on another,
and one whose worker is killed, as a system does that is out of memory; Ray does not say by which signal it died.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import Worker, attempt, device_and_jobs, local, record_loss, release, say, this_worker
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.store.database import Database
from fatbench.suite import plugins

SILENCE = 60.0  # seconds in which no task begins or says anything, after which a person is told
PATIENCE = 3.0  # seconds that a cluster may take to know that a node is gone


def slots(device: str | None, jobs: int | None, per_gpu: int, url: str) -> list[str]:
    """What the cluster has: a GPU (or a fraction of one) or a core a slot.

    SpecError: no Ray, a device that is not Ray's to choose, SQLite on several nodes. MachineError: no GPU, no cluster.
    """
    ray = _package()
    device_name, jobs = device_and_jobs(device, jobs)
    if ":" in device_name:
        raise SpecError(
            f"--device {device_name}: Ray chooses the GPUs; give cuda (CUDA_VISIBLE_DEVICES hides the others)"
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
        raise MachineError("--device cuda: the Ray cluster has no GPU")
    if gpus and device_name != "cpu":
        return [f"cuda:{gpu}" for _ in range(per_gpu) for gpu in range(gpus)][:jobs]
    return ["cpu"] * (jobs or max(cores, 1))


def run(
    jobs: Sequence[Job],
    machine: Machine,
    slots: Sequence[str],
    watch: Callable[[int, Event], None],
    stop: Callable[[], int],
    *,
    fail_fast: bool = False,
    note: Callable[[str], None] = say,
) -> dict[str, CellStatus]:
    """Work through `jobs`, as many tasks at a time as there are slots; status of each cell."""
    ray = _package()
    with _connected(ray, slots):
        return _run(ray, jobs, machine, slots, watch, stop, fail_fast=fail_fast, note=note)


def _run(
    ray: Any,
    jobs: Sequence[Job],
    machine: Machine,
    slots: Sequence[str],
    watch: Callable[[int, Event], None],
    stop: Callable[[], int],
    *,
    fail_fast: bool,
    note: Callable[[str], None],
) -> dict[str, CellStatus]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with_us = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=with_us)(StatusBoard).remote()  # another node may be lost
    # Ray names the GPU: a task sees only the one it was given
    local_machine = replace(machine, device="cpu" if slots[0] == "cpu" else "cuda:0")
    gpu = 0.0 if slots[0] == "cpu" else 1 / max(Counter(slots).values())
    task = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0)(_work)
    final_task = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0, max_calls=1)(_work)  # its process then ends
    waiting, free_slots = list(jobs), list(range(len(slots)))
    tasks: dict[Any, tuple[int, Job]] = {}
    workers: dict[str, tuple[Worker, str]] = {}  # who has taken a cell, and on which node
    restarted: set[str] = set()  # cells that were begun once more
    statuses: dict[str, CellStatus] = {}
    halted = False
    since = time.monotonic()  # when a task last began

    def hear() -> None:
        nonlocal since
        for slot, item in ray.get(board.take.remote()):
            since = max(since, time.monotonic())
            if isinstance(item, Event):
                watch(slot, item)
            else:
                cell, worker, node = item
                workers[cell] = worker, node

    def halt() -> None:
        nonlocal halted
        if not halted:
            halted = True
            waiting.clear()
            ray.get(board.stop.remote())
            hear()
            for reference, (_, job) in tasks.items():
                if job.cell not in workers:  # it waits for a place on the cluster
                    ray.cancel(reference)

    while waiting or tasks:
        request = stop()
        if request:
            halt()
        if request >= 2:
            break
        while waiting and free_slots:
            slot, job = free_slots.pop(0), waiting.pop(0)
            changes = plugins.files(job.spec, job.evaluations)  # a plug-in may change all of torch
            tasks[(final_task if changes else task).remote(slot, job, local_machine, board)] = (slot, job)
            watch(slot, Event(job.cell, "slot", "given"))
        ready, _ = ray.wait(list(tasks), timeout=0.2)
        hear()
        if time.monotonic() - since > SILENCE and (count := sum(job.cell not in workers for _, job in tasks.values())):
            since = math.inf  # once
            cluster = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
            needs = f"1 CPU and {gpu:g} GPU" if gpu else "1 CPU"
            note(
                f"{count} Ray tasks have waited {SILENCE:g} s: each needs {needs} of a node; the cluster has"
                f" {cluster['CPU']:g} CPUs and {cluster['GPU']:g} GPUs in all, and other runs may have them "
                "(ray status)"
            )
        for reference in ready:
            slot, job = tasks.pop(reference)
            free_slots.append(slot)
            try:
                status = ray.get(reference)
            except ray.exceptions.TaskCancelledError:
                status = "interrupted"
            except ray.exceptions.RayError as error:
                worker, node = workers.pop(job.cell, (None, ""))
                if job.cell not in restarted and (reason := _reason(ray, error, node)):
                    restarted.add(job.cell)
                    release(job, machine, worker)
                    if not halted:
                        waiting.append(job)
                        text = f"{reason}: it starts again"
                        watch(slot, Event(job.cell, "train", "interrupted", message=text))
                        continue
                    status = "interrupted"
                else:
                    place_text = f" on {worker.host}" if worker else ""
                    text = f"the Ray worker{place_text} ended: {type(error).__name__}: {str(error).splitlines()[0]}"
                    status = record_loss(job, machine, worker, text, watch, slot)
            statuses[job.cell] = status
            watch(slot, Event(job.cell, "cell", status))
            if status == "blocked" or (status == "failed" and fail_fast):
                halt()
    for reference in tasks:
        ray.cancel(reference, force=True)
    if tasks:
        ray.wait(list(tasks), num_returns=len(tasks), timeout=10)
        hear()
    for _, job in tasks.values():
        release(job, machine, workers.get(job.cell, (None, ""))[0])
    for job in jobs:
        statuses.setdefault(job.cell, "interrupted")
    return statuses


def _reason(ray: Any, error: Exception, node: str) -> str:
    """Why a task ended that may begin once more; empty where its own code failed."""
    if _node_is_gone(ray, error, node):
        return "its Ray node is lost"
    killed = isinstance(error, (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError))
    return "its Ray worker was killed (out of memory?)" if killed else ""


def _node_is_gone(ray: Any, error: Exception, node: str) -> bool:
    """Whether a task ended because its node is gone; the cluster may know that a moment later than of the task."""
    end = time.monotonic() + PATIENCE
    while not isinstance(error, ray.exceptions.NodeDiedError):
        if any(node_row["NodeID"] == node and not node_row["Alive"] for node_row in ray.nodes()):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class StatusBoard:
    """An actor that both sides write on: the tasks what they do, the driver that they are to stop."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Any]] = []
        self.stopping = False

    def tell(self, slot: int, item: Any) -> None:
        """An event, or (cell, worker, node): who has taken the cell, and on which node."""
        self.items.append((slot, item))

    def take(self) -> list[tuple[int, Any]]:
        """What was told since the last time."""
        items, self.items = self.items, []
        return items

    def stop(self) -> None:
        """The tasks are to end after the round at hand."""
        self.stopping = True

    def stopped(self) -> bool:
        """Whether the tasks are to end."""
        return self.stopping


def _work(slot: int, job: Job, machine: Machine, board: Any) -> CellStatus:
    """The task."""
    import ray

    def notify(event: Event) -> None:
        board.tell.remote(slot, event)

    def stop() -> bool:
        try:
            return bool(ray.get(board.stopped.remote()))
        except ray.exceptions.RayError:  # the driver is gone, and the board with it
            return True

    ray.get(board.tell.remote(slot, (job.cell, this_worker(), ray.get_runtime_context().get_node_id())))
    status: CellStatus = "interrupted" if stop() else attempt(job, machine, notify, stop)
    stop()  # calls arrive in order: now every event has
    return status


def _package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent home unasked
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a later Ray's default, and this one warns of it
    try:
        import ray
    except ModuleNotFoundError:
        raise SpecError("--executor ray needs Ray: pip install 'fatbench[ray]'") from None
    return ray


def _address() -> str | None:
    address = os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


@contextlib.contextmanager
def _connected(ray: Any, slots: Sequence[str] = ()) -> Iterator[None]:
    """A connection to Ray. One that was there before stays; what is started here is ended here.

    Ray takes SIGTERM for itself and writes messages of its nodes to stdout: the one goes back, the others to stderr.
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
        # tasks pass no arrays: the store is the smallest that Ray accepts
        options = {"address": "local", "num_cpus": len(slots), "num_gpus": gpus, "object_store_memory": 80 << 20}
        options["include_dashboard"] = False
    with contextlib.redirect_stdout(_WithoutDumps()):
        try:
            if address is not None:
                _knock(address)
            ray.init(log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # a node that does not start in time is a plain one
            ray.shutdown()
            address_text = f"RAY_ADDRESS={address}" if address else "Ray does not start here"
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


class _WithoutDumps(io.TextIOBase):
    """stderr, without the dozens of lines of a node's state that Ray writes when one dies: `run` says so in one."""

    def __init__(self) -> None:
        self.rest = ""

    def write(self, text: str) -> int:
        """Pass on whole lines, less those of a node and those that continue one."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            if line.strip() and "(raylet)" not in line and not line[0].isspace():
                sys.stderr.write(f"{line}\n")
        return len(text)


def _knock(address: str) -> None:
    """Find out in seconds that nothing answers at HOST:PORT; Ray takes minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
