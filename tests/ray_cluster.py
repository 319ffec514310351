"""Ray on this machine, for tests."""

from __future__ import annotations

import contextlib
import gc
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fatbench.errors import MachineError
from fatbench.runner.executors import ray


def patiently(start: Callable[[], Any]) -> Any:
    """Ray gives its own helpers a quarter of a minute to start, which is too short on a machine that is busy."""
    for _ in range(3):
        try:
            return start()
        except MachineError as error:
            if "timed out during startup" not in str(error):
                raise
    pytest.skip("this machine is so busy that Ray gives up starting")


@pytest.fixture(scope="module")
def patient_ray() -> Iterator[Any]:
    """Ray, whose workers have the priority of everything else here; it would give them the lowest but four."""
    package = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        yield package
    with warnings.catch_warnings():  # Ray leaves its processes and files to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def cluster(patient_ray) -> Iterator[Any]:
    """A Ray cluster of two cores on this machine, as the executor starts one."""
    package = patient_ray
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with contextlib.ExitStack() as stack:
        patiently(lambda: stack.enter_context(ray._connected(package, ["cpu", "cpu"])))
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        yield package
    assert not package.is_initialized()
