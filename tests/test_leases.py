"""Leases: a stage is its run's while there is progress, by the database's clock, whatever a machine's own says."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update

from fatbench.engine.rounds import Number
from fatbench.store import leases
from fatbench.store.rows import current_time
from fatbench.store.schema import STAGES
from fatbench.store.stages import LeaseLost, Store

pytest_plugins = ("databases",)

CELL = "0123456789ab"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        opened.add_cell(CELL, {"seed": 7})
        yield opened


def claim(store: Store, **provenance: Any) -> int | None:
    return store.claim(CELL, "train", suite="s", total=3, provenance=provenance)


def taken(store: Store, **provenance: Any) -> int:
    run = claim(store, **provenance)
    assert run is not None
    return run


def alive(store: Store) -> bool:
    return store.stages([CELL])[CELL, "train"].alive


def silent(store: Store, seconds: float) -> None:
    """The last sign of progress was so long ago."""
    with store.database.writing() as connection:
        then = leases.stamp(leases.clock(connection, store.database.path) - seconds)
        connection.execute(update(STAGES).values(heartbeat=then))


@pytest.mark.parametrize("provenance", [{}, {"host": "elsewhere", "pid": 1}, {"pid": os.getppid()}])
@pytest.mark.promise(
    "Leases", "A stage without progress is free when its lease ends. Its process can then write nothing more"
)
def test_a_lease_ends_a_quarter_of_an_hour_after_the_last_progress(store: Store, provenance: dict[str, Any]) -> None:
    """Also that of a process which is still there: it may be stopped, or hang."""
    run = taken(store, **provenance)
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="state-1")
    silent(store, 14 * 60)
    assert alive(store) and claim(store) is None
    silent(store, 16 * 60)
    assert not alive(store)
    other = taken(store)
    for late in (
        lambda: store.commit(run, numbers=[Number("loss", 9.0, 2)], round=2, checkpoint="evil"),
        lambda: store.finish(run, [Number("loss", 9.0, 2)]),
        lambda: store.heartbeat(run),
    ):
        with pytest.raises(LeaseLost):
            late()
    row = store.stages([CELL])[CELL, "train"]
    assert (row.run, row.round, row.checkpoint, len(store.measurements())) == (other, 1, "state-1", 1)


def test_a_lease_is_over_at_its_end() -> None:
    row = SimpleNamespace(host="elsewhere", pid=1, process=None, heartbeat="1970-01-01T00:01:40.000Z", extra=None)
    end = leases.lease_end(row)
    assert end == 100 + leases.LEASE
    assert [leases.is_held(row, at) for at in (end - 0.001, end, end + 0.001)] == [True, False, False]


def test_progress_renews_a_lease(store: Store) -> None:
    run = taken(store)
    for progress in (lambda: store.heartbeat(run), lambda: store.commit(run, round=1), lambda: store.restart(run)):
        silent(store, 16 * 60)
        assert not alive(store)
        progress()
        assert alive(store) and claim(store) is None


def test_a_lease_is_as_long_as_its_run_says(store: Store) -> None:
    taken(store, lease=2.0)
    silent(store, 1.0)
    assert alive(store) and claim(store) is None
    silent(store, 3.0)
    assert not alive(store)
    taken(store, lease=7200.0)
    silent(store, 3600.0)
    assert alive(store) and claim(store) is None


CLAIM = """
import json, sys, time
from fatbench.store.stages import Store
with Store.open(sys.argv[1]) as store:
    row = store.stages()["0123456789ab", "train"]
    got = store.claim("0123456789ab", "train", suite="s", total=3, provenance={})
print(json.dumps([time.time(), row.alive, got]))
"""


@pytest.mark.parametrize("off", [16 * 60, -16 * 60])
@pytest.mark.promise("Leases", "A machine whose clock is wrong takes over nothing and loses nothing")
def test_a_machine_whose_clock_is_off_steals_nothing(store: Store, url: str, off: int) -> None:
    """Another process, whose every clock is 16 minutes fast or slow, looks at a run of a machine it cannot see.

    What it holds itself nobody takes from it either.
    """
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed")
    run = taken(store, host="elsewhere", pid=1)
    command = ["faketime", "-f", f"{off:+d}s", sys.executable, "-c"]
    done = subprocess.run([*command, CLAIM, url], capture_output=True, text=True, check=True)
    theirs, held, got = json.loads(done.stdout)
    assert abs(theirs - time.time() - off) < 60  # its clock is off indeed
    assert held and got is None
    store.release(run)
    done = subprocess.run([*command, CLAIM.replace("{}", '{"host": "x"}'), url], capture_output=True, check=True)
    assert json.loads(done.stdout)[2] > run
    assert alive(store) and claim(store) is None


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_times_are_stored_in_utc_wherever_the_machine_is(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """13:37 on the last day of 2025 is 1,767,188,220 s after the epoch: `date -u -d '2025-12-31 13:37' +%s`."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        assert leases.stamp(1767188220.25) == "2025-12-31T13:37:00.250Z"
        assert leases.epoch("2025-12-31T13:37:00.250Z") == 1767188220.25
        assert abs((leases.epoch(current_time()) or 0.0) - time.time()) < 60
    time.tzset()
    assert leases.epoch(None) is None


@pytest.mark.promise("Leases", "The stages of a dead process of this machine are free at once")
def test_a_dead_process_holds_nothing_however_fresh_its_lease(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = taken(store, pid=child.pid, host=socket.gethostname())
    assert claim(store) is None
    child.communicate()
    assert not alive(store)
    assert taken(store) != run
