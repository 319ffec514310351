"""Run cells as Ray tasks, on the cluster that RAY_ADDRESS names or on one started here for the run.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fatbench.errors import MachineError, SpecError
from fatbench.runner.executors import Worker, device_and_jobs, local, record_loss, release, say, this_worker
from fatbench.runner.jobs import CellStatus, Event, Job, Machine
from fatbench.runner.worker import attempt
from fatbench.store.database import Database
from fatbench.suite import plugins

SILENCE = 60.0  # seconds without a task that begins or reports, after which the user is told
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
    """Work through `jobs`, as many tasks at a time as there are slots, and return each cell's status."""
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

    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0, scheduling_strategy=on_this_node)(StatusBoard).remote()  # other nodes may be lost
    # a task sees only the GPU that Ray gave it, as cuda:0
    local_machine = replace(machine, device="cpu" if slots[0] == "cpu" else "cuda:0")
    gpu = 0.0 if slots[0] == "cpu" else 1 / max(Counter(slots).values())
    task = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0)(_work)
    final_task = ray.remote(num_cpus=1, num_gpus=gpu, max_retries=0, max_calls=1)(
        _work
    )  # for jobs of plug-ins: the process ends after one task
    waiting, free_slots = list(jobs), list(range(len(slots)))
    tasks: dict[Any, tuple[int, Job]] = {}
    workers: dict[str, tuple[Worker, str]] = {}  # cell -> (worker, its node)
    restarted: set[str] = set()  # cells that were started once more
    statuses: dict[str, CellStatus] = {}
    halted = False
    last_report = time.monotonic()  # when a task last began or reported

    def hear() -> None:
        nonlocal last_report
        for slot, item in ray.get(board.take.remote()):
            last_report = max(last_report, time.monotonic())
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
                if job.cell not in workers:  # its task has not begun
                    ray.cancel(reference)

    while waiting or tasks:
        request = stop()
        if request:
            halt()
        if request >= 2:
            break
        while waiting and free_slots:
            slot, job = free_slots.pop(0), waiting.pop(0)
            has_plugins = plugins.files(job.spec, job.evaluations)  # a plug-in may change all of torch
            tasks[(final_task if has_plugins else task).remote(slot, job, local_machine, board)] = (slot, job)
            watch(slot, Event(job.cell, "slot", "given"))
        ready, _ = ray.wait(list(tasks), timeout=0.2)
        hear()
        if time.monotonic() - last_report > SILENCE and (
            count := sum(job.cell not in workers for _, job in tasks.values())
        ):
            last_report = math.inf  # tell the user only once
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
                if job.cell not in restarted and (reason := _retry_reason(ray, error, node)):
                    restarted.add(job.cell)
                    if worker is not None:
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
                    lost = [Event(job.cell, "train", "failed", message=text)]
                    for event in record_loss(job, machine, worker, text) if worker else lost:
                        watch(slot, event)
                    status = "failed"
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
        if job.cell in workers:
            release(job, machine, workers[job.cell][0])
    for job in jobs:
        statuses.setdefault(job.cell, "interrupted")
    return statuses


def _retry_reason(ray: Any, error: Exception, node: str) -> str:
    """Why a task ended that may start once more; empty if its own code failed."""
    if _node_is_gone(ray, error, node):
        return "its Ray node is lost"
    killed = isinstance(error, (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError))
    return "its Ray worker was killed (out of memory?)" if killed else ""


def _node_is_gone(ray: Any, error: Exception, node: str) -> bool:
    """Whether a task ended because its node is gone; the cluster may notice that a moment after the task's end."""
    end = time.monotonic() + PATIENCE
    while not isinstance(error, ray.exceptions.NodeDiedError):
        if any(node_row["NodeID"] == node and not node_row["Alive"] for node_row in ray.nodes()):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class StatusBoard:
    """An actor through which tasks report their progress, and the driver asks them to stop."""

    def __init__(self) -> None:
        self.items: list[tuple[int, Any]] = []
        self.stopping = False

    def tell(self, slot: int, item: Any) -> None:
        """Add an event, or (cell, worker, node) when a worker begins a cell."""
        self.items.append((slot, item))

    def take(self) -> list[tuple[int, Any]]:
        """Return and forget everything since the last call."""
        items, self.items = self.items, []
        return items

    def stop(self) -> None:
        """Ask the tasks to end after their current round."""
        self.stopping = True

    def should_stop(self) -> bool:
        """Whether `stop` was called."""
        return self.stopping


def _work(slot: int, job: Job, machine: Machine, board: Any) -> CellStatus:
    """Work on one cell: the body of a Ray task."""
    import ray

    def notify(event: Event) -> None:
        board.tell.remote(slot, event)

    def stop() -> bool:
        try:
            return bool(ray.get(board.should_stop.remote()))
        except ray.exceptions.RayError:  # the driver is gone, and the board with it
            return True

    ray.get(board.tell.remote(slot, (job.cell, this_worker(), ray.get_runtime_context().get_node_id())))
    status: CellStatus = "interrupted" if stop() else attempt(job, machine, notify, stop)
    stop()  # calls to an actor arrive in order, so every event has arrived after this one
    return status


def _package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics unasked
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # the default of later versions; without it Ray prints a warning
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
            if address is not None:
                _check_address(address)
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


def _check_address(address: str) -> None:
    """Raise OSError within seconds if nothing answers at HOST:PORT, where Ray would take minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
