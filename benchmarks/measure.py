"""How a row of the benchmark measures: variants in turn, programs in processes of their own, where it all ran."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from fatbench.engine import memory
from fatbench.engine.precision import exact
from fatbench.runner.provenance import produced_by

Seconds = dict[str, list[float]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Bench:
    """What every row is told."""

    device: torch.device
    quick: bool  # the least that shows that a row works: its number means nothing
    folder: Path  # empty, for files that a row needs

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def repeats(self, full: int) -> int:
        return 1 if self.quick else full


def interleaved(
    device: torch.device, variants: Mapping[str, Callable[[], Result]], repeats: int, theirs: str = ""
) -> tuple[Seconds, dict[str, Result]]:
    """What every variant costs (`cost`) and returns; they take turns (A B A B): a machine that slows down slows all.

    On a CPU each run is a process of its own, forked from this one: none has the memory that another has freed.
    `theirs`, what people run, has memory and float32 as torch comes; the others have them as workers have, where those
    whose names end in "bf16" run under that precision.
    """
    seconds: Seconds = {name: [] for name in variants}
    returned: dict[str, Result] = {}

    def run(name: str) -> tuple[float, Result]:
        memory.keep_freed_memory(name != theirs)
        if name == theirs:
            _as_torch_comes(device)
        else:
            exact(device, "bf16" if name.endswith("bf16") else "fp32")
        results: list[Result] = []
        return cost(device, lambda: results.append(variants[name]())), results[0]

    for _ in range(repeats):
        for name in variants:
            measure = functools.partial(run, name)
            took, returned[name] = measure() if device.type == "cuda" else in_fork(measure)
            seconds[name].append(took)
    return seconds, returned


def in_fork(act: Callable[[], Result]) -> Result:
    """What `act` returns, called in a fork of this process. RuntimeError: it failed; its traceback is on stderr."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def send() -> None:
        sending.send_bytes(pickle.dumps(act()))  # by value: torch's own way shares memory that ends with the process

    process = context.Process(target=send)
    process.start()
    sending.close()
    try:
        result: Result = pickle.loads(receiving.recv_bytes())
    except EOFError:
        raise RuntimeError("a measured process failed") from None
    finally:
        process.join()
    return result


def _as_torch_comes(device: torch.device) -> None:
    """The opposite of `exact`."""
    if device.type == "cuda":
        exact(device, "bf16")
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False


def matrix_rate(device: torch.device, precision: str) -> float:
    """Operations per second of a large matrix product: what passes could reach at most."""
    n, dtype = 8192 if device.type == "cuda" else 1024, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    a = torch.randn(n, n, device=device, dtype=dtype)
    times = [cost(device, lambda: a @ a) for _ in range(10)]
    return 2.0 * n**3 / statistics.median(times)


def clock(device: torch.device) -> str:
    """What `cost` measures: CPU time, which other work on the machine changes least, of one thread on a CPU."""
    return "wall time" if device.type == "cuda" or torch.get_num_threads() > 1 else "CPU time"


def cost(device: torch.device, act: Callable[[], object]) -> float:
    """CPU seconds of `act` and of programs that it waits for; seconds until it is over where `clock` says wall time."""
    if clock(device) == "wall time":
        return wall(device, act)
    before = _cpu_seconds()
    act()
    return _cpu_seconds() - before


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def wall(device: torch.device, act: Callable[[], object]) -> float:
    """Seconds until `act` is over, on the device too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def line(
    work: str,
    against: str,
    goals: Mapping[str, float | None],
    measured: Sequence[float],
    unit: str = "x",
    note: str = "",
) -> dict[str, Any]:
    """One line of the table: the median of what was measured and its spread. Ratios are to grow, other units to fall.

    `goals`: by kind of device, "cpu" and "cuda"; None where there is none that applies to this machine.
    """
    values = sorted(measured)
    return {
        "work": work, "against": against, "goals": dict(goals), "measured": statistics.median(values), "unit": unit,
        "low": values[0], "high": values[-1], "runs": len(values), "note": note,
    }  # fmt: skip


def ratios(seconds: Seconds, slow: str, fast: str) -> list[float]:
    """slow / fast of every turn."""
    return [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]


def child(code: str, *arguments: str) -> Any:
    """What a Python program prints as JSON on its last line; it has one thread."""
    done = program([sys.executable, "-c", code, *arguments])
    return json.loads(done.splitlines()[-1])


def program(command: Sequence[str], threads: int = 1) -> str:
    """The standard output of a program. RuntimeError: it failed, with what it said."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def fatbench(*arguments: str) -> list[str]:
    """The command line of this very installation."""
    return [sys.executable, "-m", "fatbench", *arguments]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def amx() -> bool:
    """Whether the processor multiplies bfloat16 matrices by itself."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def provenance(device: torch.device) -> dict[str, Any]:
    """Where, when and with which code."""
    return {
        **produced_by("cuda:0" if device.type == "cuda" else "cpu"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()),
        "system": platform.platform(),
    }
