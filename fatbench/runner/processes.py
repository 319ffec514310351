"""Start worker processes, which ignore the user's signals; one may start before the jobs are known.

A worker first imports torch, which takes longer than expanding ten thousand cells. So a command may start one with
`started_early` while it reads the suite and the database, and the executor's first worker is that one. It
neither opens nor writes a file before it is given its machine; if there is nothing to do, it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_EARLY: list[tuple[Any, Any]] = []  # (process, our end of its pipe)


def heard_signals() -> list[signal.Signals]:
    """The signals that ask for an end; not SIGHUP where `nohup` has it ignored, so that it outlives its terminal."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


def start_process(target: Callable[..., object], *arguments: Any) -> Any:
    """Start a process that imports the engine and calls `target`.

    Ctrl-C reaches every process of the terminal. Only the parent reacts: the child blocks signals from the beginning.
    """
    process: Any = multiprocessing.get_context("spawn").Process(target=_ready, args=(target, *arguments), daemon=True)
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # spawn reads it, and a notebook's %reset deletes it
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signals
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    return process


@contextlib.contextmanager
def started_early(enabled: bool = True) -> Iterator[None]:
    """A context in which a worker imports the engine; at its end the worker is killed, whether it was taken or not."""
    process = None
    if enabled:
        parent_end, child_end = multiprocessing.get_context("spawn").Pipe()
        process = start_process(_begin, child_end)
        child_end.close()
        _EARLY.append((process, parent_end))
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.join()
            _EARLY.clear()


def start_or_take_early(target: Callable[..., object], *arguments: Any) -> Any:
    """A process that calls `target`: for the first caller the one that was started early, else a new one."""
    while _EARLY:
        process, pipe = _EARLY.pop()
        with contextlib.suppress(OSError):
            pipe.send((target, arguments))
            if process.is_alive():
                return process
    return start_process(target, *arguments)


def _ready(target: Callable[..., object], *arguments: Any) -> None:
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: a killed run leaves no worker behind
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    import_engine()
    target(*arguments)


def _begin(pipe: Any) -> None:
    try:
        target, arguments = pipe.recv()
    except EOFError:
        return
    target(*arguments)


def import_engine() -> None:
    """Import what every cell needs, and exempt it from garbage collection after each cell."""
    gc.disable()
    import fatbench.engine.accuracy
    import fatbench.engine.experiment
    import fatbench.methods.algorithms
    import fatbench.runner.attacking
    import fatbench.runner.training  # noqa: F401

    gc.enable()
    gc.freeze()
