"""The store: a stage is worked on by one process at a time, and a kill at any instant loses or doubles nothing.

Every promise is tested on SQLite and, where a server's binaries are found, on PostgreSQL.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select, text, update

from fatbench.engine.rounds import Number
from fatbench.errors import DatabaseError
from fatbench.store import database, jsonl, schema
from fatbench.store.cleanup import delete_cell
from fatbench.store.database import NETWORK
from fatbench.store.grid_points import Point
from fatbench.store.integrity import check
from fatbench.store.liveness import is_gone, this_machine
from fatbench.store.schema import OUTCOME_CHUNKS, RUNS, STAGES, VERSION
from fatbench.store.stages import LeaseLost, StageRow, Store

pytest_plugins = ("databases",)

COMMIT = 40 * "a"
CELL = "0123456789ab"
SPEC = {"seed": 7, "model": {"name": "nin"}, "eps": "8/255"}
FORK = multiprocessing.get_context("fork")  # the children use nothing but the store: no need to import it anew
# Python 3.12 and later warn where other tests have left threads behind (torch's); the children never wait for those.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        opened.add_cell(CELL, SPEC)
        yield opened


def claim(store: Store, stage: str = "train", *, cell: str = CELL, retry: bool = False, **more: Any) -> int | None:
    provenance = {"preset": "smoke", "device": "cpu", "precision": "fp32", "commit": COMMIT, "dirty": False, **more}
    how = {"retry_failed": True} if retry else {}  # else the default
    return store.claim(cell, stage, suite="s", total=3, provenance=provenance, **how)


def taken(store: Store, stage: str = "train", **more: Any) -> int:
    run = claim(store, stage, **more)
    assert run is not None
    return run


def row(store: Store, stage: str = "train") -> StageRow:
    return store.stages([CELL])[CELL, stage]


def dead(store: Store, run: int) -> None:
    """Make a run look as one whose process is gone."""
    with store.database.writing() as connection:
        connection.execute(update(RUNS).where(RUNS.c.id == run).values(pid=2**22 + 1))


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- a stage's life ----------------------------------------------------------------------------------------------


def test_a_stage_from_claim_to_done(store: Store) -> None:
    run = taken(store)
    assert row(store) == StageRow(
        CELL, "train", "running", 0, 3, None, {}, run, None, None, row(store).heartbeat, row(store).age, True
    )
    best, loss = {"best": {"round": 1}}, Number("loss", 1.5, 2, n=80)
    store.commit(run, numbers=[Number("loss", 2.5, 1, n=80)], round=1, checkpoint="state-1", record=best)
    store.commit(run, numbers=[loss, Number("w", 0.25, 2, client=0)], round=2, checkpoint="state-2")
    assert (row(store).round, row(store).checkpoint, row(store).record) == (2, "state-2", {"best": {"round": 1}})
    store.finish(run, [Number("loss", 0.5, 3, n=80)], round=3, record={"best": {"round": 3}})
    last = row(store)
    assert (last.status, last.round, last.checkpoint, last.alive) == ("done", 3, None, False)
    assert last.record == {"best": {"round": 3}}
    assert [(m["metric"], m["round"], m["client"], m["value"], m["n"]) for m in store.measurements([CELL])] == [
        ("loss", 1, -1, 2.5, 80), ("loss", 2, -1, 1.5, 80), ("w", 2, 0, 0.25, 0), ("loss", 3, -1, 0.5, 80),
    ]  # fmt: skip
    assert claim(store) is None, "what is done is not done again"
    assert claim(store, retry=True) is None


def test_a_number_carries_its_provenance(store: Store) -> None:
    run = taken(store, versions={"torch": "2.15"}, path="reference")
    store.describe_run(run, {"data": "cifar10 jpeg75", "log": "log.txt"}, total=9)
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1)
    (number,) = store.measurements()
    created = number.pop("created")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", created)
    assert number == {
        "cell": CELL, "suite": "s", "stage": "train", "round": 1, "metric": "loss", "value": 2.5, "n": 0, "seed": 7,
        "commit": COMMIT, "device": "cpu", "precision": "fp32", "client": -1, "preset": "smoke", "dirty": False,
        "run": run, "settings": None, "replicate_of": None, "replicate": 0,
    }  # fmt: skip
    (attempt,) = store.runs([CELL])
    assert attempt["versions"] == {"torch": "2.15"}
    assert (attempt["path"], attempt["data"], attempt["log"]) == ("reference", "cifar10 jpeg75", "log.txt")
    assert (attempt["host"], attempt["pid"], attempt["status"]) == (socket.gethostname(), os.getpid(), "running")
    assert row(store).total == 9


def test_an_evaluation_keeps_the_settings_of_its_attack(store: Store) -> None:
    """They stand with its stage and beside each of its numbers; a new attempt writes its own."""
    store.add_cell(CELL, {"seed": 7})
    asked = {"suite": "s", "total": 5, "provenance": {}}
    pgd = {"name": "pgd", "eps": "8/255", "steps": 20, "implementation": "fatbench 0.1.0"}
    run = store.claim(CELL, "pgd20-ab@3", settings=pgd, **asked)
    assert run is not None and row(store, "pgd20-ab@3").settings == pgd
    store.fail(run, "no memory")
    newer = {**pgd, "implementation": "fatbench 0.2.0"}
    run = store.claim(CELL, "pgd20-ab@3", settings=newer, retry_failed=True, **asked)
    assert run is not None and row(store, "pgd20-ab@3").settings == newer
    store.finish(run, [Number("pgd20", 0.25, 3, n=4)])
    with store.database.reading() as connection:
        found = connection.execute(text("SELECT metric, value, settings FROM measurements")).all()
    assert [(metric, value, json.loads(said)) for metric, value, said in found] == [("pgd20", 0.25, newer)]
    assert row(store, "pgd20-ab@3").settings == newer


def test_the_public_view_has_the_promised_columns_first(store: Store) -> None:
    """The names and their order are in the description of the command line; more may follow."""
    promised = ["cell", "suite", "stage", "round", "metric", "value", "n", "seed", "commit", "device", "precision"]
    promised += ["created"]
    with store.database.reading() as connection:
        assert list(connection.execute(text("SELECT * FROM measurements")).keys())[:12] == promised


def test_released_goes_on_from_its_checkpoint(store: Store) -> None:
    run = taken(store)
    store.commit(run, round=1, checkpoint="state-1", record={"a": 1})
    store.release(run)
    assert (row(store).status, row(store).alive) == ("interrupted", False)
    again = taken(store)
    assert again != run
    assert (row(store).round, row(store).checkpoint, row(store).record) == (1, "state-1", {"a": 1})
    assert [(r["id"], r["status"]) for r in store.runs()] == [(run, "interrupted"), (again, "running")]
    ended = [r["ended"] for r in store.runs()]
    assert ended[0] >= store.runs()[0]["started"] and ended[1] is None


def test_failed_is_retried_on_demand_and_goes_on(store: Store) -> None:
    run = taken(store)
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="state-1")
    store.fail(run, "Traceback ...\nRuntimeError: out of memory \udce4 \0")
    assert row(store).status == "failed"
    assert row(store).error == "Traceback ...\nRuntimeError: out of memory \\udce4 \\x00"
    assert claim(store) is None
    again = taken(store, retry=True)
    assert (row(store).round, row(store).checkpoint, row(store).error) == (1, "state-1", None)
    store.finish(again, [Number("loss", 1.5, 2)])
    assert [r["status"] for r in store.runs()] == ["failed", "done"]
    assert all(r["ended"] >= r["started"] for r in store.runs())
    assert store.runs()[0]["error"].endswith("\\x00")
    assert [m["run"] for m in store.measurements()] == [run, again]


def test_stages_are_claimed_one_by_one(store: Store) -> None:
    assert [claim(store, stage) is not None for stage in ("a@1", "b@1", "a@1")] == [True, True, False]
    with pytest.raises(ValueError, match="unknown cell nobody"):
        claim(store, cell="nobody")


def test_a_known_cell_stays_as_it_is(store: Store) -> None:
    """Identity leaves out defaults, so the same id may come with a spec that names more of them."""
    store.add_cell(CELL, {**SPEC, "new": "default"})
    store.add_cells({"b": {"seed": 2**80}, "a": {}})
    assert store.cells() == {CELL: SPEC, "a": {}, "b": {"seed": 2**80}}
    assert list(store.cells()) == sorted([CELL, "a", "b"])
    assert store.cells(["a", "c"]) == {"a": {}}


def test_restart_takes_back_an_unfinished_stage(store: Store) -> None:
    run = taken(store)
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="lost", record={"a": 1})
    store.restart(run)
    assert (row(store).round, row(store).checkpoint, row(store).record) == (0, None, {})
    assert store.measurements() == []
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1)
    store.finish(run)
    with pytest.raises(LeaseLost, match="no longer owns"):
        store.restart(run)


def test_what_is_done_is_taken_again_on_demand_from_nothing(store: Store) -> None:
    """What the stage of another name holds is left alone."""
    runs = {stage: taken(store, stage) for stage in ("a@1", "b@1")}
    for run in runs.values():
        store.commit(run, numbers=[Number("loss", 2.5, 1)], round=8, outcomes=(0, 8, b"\xff"), record={"model": "x"})
        store.finish(run)
    again = store.claim(CELL, "a@1", suite="s", total=0, provenance={}, fresh=True)
    begun = row(store, "a@1")
    assert (begun.status, begun.round, begun.checkpoint, begun.record, begun.run) == ("running", 0, None, {}, again)
    assert begun.total == 3  # as it was
    assert store.outcomes(CELL, "a@1") == [] and len(store.outcomes(CELL, "b@1")) == 1
    assert [m["stage"] for m in store.measurements()] == ["b@1"]
    assert row(store, "b@1").record == {"model": "x"}
    assert [(run["id"], run.get("dropped", False)) for run in store.runs()] == [
        (runs["a@1"], True), (runs["b@1"], False), (again, False),
    ]  # fmt: skip
    fresh = store.claim(CELL, "new", suite="s", total=5, provenance={}, fresh=True)  # never begun: as without
    assert fresh is not None and row(store, "new").total == 5


def test_a_stage_that_is_done_is_reopened(store: Store) -> None:
    """What was committed stays until somebody restarts it. Only what is done is reopened, and no other stage."""
    runs = {stage: taken(store, stage) for stage in ("a@1", "b@1", "train")}
    for stage in ("a@1", "b@1"):
        store.finish(runs[stage], [Number("loss", 2.5, 1)], round=1)
    before = store.stages()
    for stage in ("train", "nobody"):
        store.reopen(CELL, stage)
        assert store.stages() == before
    store.reopen(CELL, "a@1")
    assert (row(store, "a@1").status, row(store, "a@1").round) == ("interrupted", 1)
    assert [run["status"] for run in store.runs()] == ["interrupted", "done", "running"]
    assert row(store, "b@1") == before[CELL, "b@1"] and row(store) == before[CELL, "train"]
    assert claim(store, "a@1") is not None and claim(store, "b@1") is None
    assert len(store.measurements()) == 2


def test_cells_are_found_by_their_first_letters(store: Store) -> None:
    """In the order of their names, so many at most, as they are written; replicates only where they are asked for."""
    assert store.has_cells()
    store.add_cells({name: {} for name in ("ab", "ab~1", "abc", "a_c", "Abc", "b")})
    assert store.ids_beginning_with("ab") == ["ab", "abc"]
    assert store.ids_beginning_with("ab~") == ["ab~1"]
    assert store.ids_beginning_with("a_") == ["a_c"]
    assert store.ids_beginning_with("a", 2) == ["a_c", "ab"]
    assert store.ids_beginning_with("") == [CELL, "Abc", "a_c", "ab", "abc", "b"]
    assert store.ids_beginning_with("c") == []
    store.add_cells({f"c{i:02}": {} for i in range(12)})
    assert store.ids_beginning_with("c") == [f"c{i:02}" for i in range(9)]
    assert store.known_cells(["ab", "nobody", "b"]) == {"ab", "b"}


def test_how_many_cells_are_trained(store: Store) -> None:
    """Two suites have run the same cell; a replicate counts for none, nor an evaluation; one has not begun to train."""
    store.add_cells({name: {} for name in ("a", "b", "c", "a~1")})
    asked: dict[str, Any] = {"total": 3, "provenance": {"preset": "smoke"}}
    for cell in ("a", "b", "a~1"):
        run = store.claim(cell, "train", suite="s", **asked)
        store.finish(run)
    run = store.claim("a", "pgd20@3", suite="t", total=3, provenance={"preset": "paper"})
    store.claim("c", "pgd20@3", suite="s", **asked)
    store.fail(run, "no")
    store.claim(CELL, "train", suite="s", **asked)
    assert store.count_trainings() == {
        ("s", "smoke", "done"): 2, ("s", "smoke", "running"): 1, ("s", "smoke", "todo"): 1, ("t", "paper", "done"): 1,
    }  # fmt: skip


# --- outcomes ----------------------------------------------------------------------------------------------------


def test_outcomes_follow_one_another(store: Store) -> None:
    run = taken(store, "pgd20@3")
    store.commit(run, round=10, outcomes=(0, 10, b"\xff\xc0"))
    store.commit(run, round=13, outcomes=(10, 3, b"\xa0"))
    with pytest.raises(ValueError, match="do not lead from 13 examples to 15"):
        store.finish(run, round=15, outcomes=(13, 1, b"\x80"))
    assert row(store, "pgd20@3").status == "running"
    store.finish(run, round=14, outcomes=(13, 1, b"\x80"))
    assert store.outcomes(CELL, "pgd20@3") == [(0, 10, b"\xff\xc0"), (10, 3, b"\xa0"), (13, 1, b"\x80")]
    assert (row(store, "pgd20@3").round, row(store, "pgd20@3").status) == (14, "done")
    assert store.outcomes(CELL, "train") == []


@pytest.mark.parametrize(
    ("round", "chunk"),
    [
        (10, (0, 10, b"\xff")),
        (10, (0, 9, b"\xff\x80")),
        (10, (1, 9, b"\xff\x80")),
        (0, (0, 0, b"")),
        (10, (0, 10, b"\xff\xff\xff")),
    ],
)
def test_outcomes_that_do_not_fit_are_refused(store: Store, round: int, chunk: tuple[int, int, bytes]) -> None:
    run = taken(store, "pgd20@3")
    with pytest.raises(ValueError, match=f"do not lead from 0 examples to {round}$"):
        store.commit(run, numbers=[Number("a", 1.0, 3)], round=round, outcomes=chunk)
    assert (row(store, "pgd20@3").round, store.measurements()) == (0, [])


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(store: Store, value: float) -> None:
    """SQLite would store NaN as NULL."""
    run = taken(store)
    with pytest.raises(ValueError, match=f"^loss of round 2 is {value}: not a finite number$"):
        store.commit(run, numbers=[Number("w", 1.0, 2), Number("loss", value, 2)], round=2)
    with pytest.raises(ValueError, match="not a finite number"):
        store.finish(run, [Number("loss", value, 2)])
    assert (row(store).round, row(store).status, store.measurements()) == (0, "running", [])


def test_a_number_is_written_once(store: Store) -> None:
    run = taken(store)
    store.commit(run, numbers=[Number("w", 1.0, 1, client=4)], round=1)
    said = f"{CELL} train: w of client 4 of round 1 is there already; nothing was written"
    with pytest.raises(ValueError, match=said):
        store.commit(run, numbers=[Number("new", 1.0, 2), Number("w", 1.0, 1, client=4)], round=2, checkpoint="x")
    with pytest.raises(ValueError, match="w of round 2 is given twice"):
        store.commit(run, numbers=[Number("w", 1.0, 2), Number("w", 2.0, 2)], round=2)
    assert (row(store).round, row(store).checkpoint, len(store.measurements())) == (1, None, 1)


def test_rounds_do_not_go_back_and_a_commit_of_the_same_one_adds_to_it(store: Store) -> None:
    run = taken(store)
    for metric in "ab":
        store.commit(run, numbers=[Number(metric, 1.0, 1)], round=1)
    assert (row(store).round, [m["metric"] for m in store.measurements()]) == (1, ["a", "b"])
    store.commit(run, round=2)
    with pytest.raises(ValueError, match="round 1 after round 2"):
        store.commit(run, round=1)


def test_a_failed_stage_stays_failed_when_its_run_is_released(store: Store) -> None:
    run = taken(store)
    store.fail(run, "RuntimeError: no")
    store.release(run)
    assert (row(store).status, row(store).error) == ("failed", "RuntimeError: no")
    assert [(r["status"], r["error"]) for r in store.runs()] == [("failed", "RuntimeError: no")]


def test_there_is_no_negative_zero(store: Store) -> None:
    """SQLite stores -0.0 as 0.0 and PostgreSQL does not: exports of the two would differ."""
    store.commit(taken(store), numbers=[Number("drift", -0.0, 1)], round=1)
    assert math.copysign(1, store.measurements()[0]["value"]) == 1


def test_a_record_must_be_json_and_provenance_cannot_pose_as_a_column(store: Store) -> None:
    with pytest.raises(ValueError, match="provenance: 'uid' is reserved for the database"):
        claim(store, uid="0")
    run = taken(store)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.commit(run, round=1, record={"a": math.nan})
    assert row(store).round == 0


# --- whose stage it is -------------------------------------------------------------------------------------------


def test_a_dead_process_loses_its_stage_and_may_write_no_more(store: Store) -> None:
    run = taken(store)
    store.commit(run, numbers=[Number("loss", 2.5, 1)], round=1, checkpoint="state-1")
    assert claim(store) is None
    dead(store, run)
    assert (row(store).status, row(store).alive) == ("running", False)
    again = taken(store)
    assert (row(store).run, row(store).round, row(store).checkpoint) == (again, 1, "state-1")
    assert [r["status"] for r in store.runs()] == ["interrupted", "running"]
    ended = store.runs()[0]["ended"]
    assert ended is not None  # when it was last heard of
    before = (store.stages(), store.measurements(), store.runs())
    for late in (
        lambda: store.commit(run, numbers=[Number("loss", 9.0, 2)], round=2, checkpoint="evil"),
        lambda: store.finish(run, [Number("loss", 9.0, 2)]),
        lambda: store.heartbeat(run),
        lambda: store.describe_run(run, {"data": "x"}),
        lambda: store.restart(run),
    ):
        with pytest.raises(LeaseLost, match=rf"^{CELL} train: run {run} \(interrupted\) no longer owns this stage"):
            late()
    store.release(run)
    assert (store.stages(), store.measurements(), store.runs()) == before
    store.fail(run, "too late")
    assert store.stages() == before[0]
    assert [(r["status"], r["ended"]) for r in store.runs()] == [("failed", ended), ("running", None)]
    assert LeaseLost.exit_code == 1
    store.finish(again)
    with store.database.writing() as connection:  # as if the first had not said yet how it ended
        connection.execute(update(RUNS).where(RUNS.c.id == run).values(status="interrupted"))
    store.fail(run, "later still")
    stream = io.StringIO()
    jsonl.export(store, stream)  # the end of a run that came too late is in the digest of what another finished
    assert "later still" in stream.getvalue()


@pytest.mark.parametrize(
    ("denied", "log", "mode"),
    [
        ("", None, "rw"),
        ("", b"", "rw"),
        ("x.db", None, "ro&immutable=1"),
        ("x.db", b"log", "ro"),
        ("folder", None, "ro&immutable=1"),
        ("folder", b"", "ro&immutable=1"),
        ("folder", b"log", "ro"),
    ],
)
def test_how_a_file_is_opened(denied: str, log: bytes | None, mode: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What cannot be written is only read; without a log of changes SQLite is told that nobody else writes.

    Each connection looks anew: a run may have begun since.
    """
    path = tmp_path / "folder" / "x.db"
    Store.open(str(path), create=True).close()
    opened: list[str] = []
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda address, **how: opened.append(address) or connect(path, **how))  # type: ignore[func-returns-value]
    monkeypatch.setattr(os, "access", lambda file, how: Path(file).name != denied)
    known = database.Database(str(path))
    known.connect().close()
    if log is not None:
        Path(f"{path}-wal").write_bytes(log)
    known.connect().close()
    without_log = "rw" if mode == "rw" else "ro&immutable=1"
    assert opened == [f"file:{path}?mode={without_log}", f"file:{path}?mode={mode}"]


def test_a_reused_pid_is_not_the_old_process(store: Store) -> None:
    """Our own pid is alive, but this process did not start when the run's did."""
    run = taken(store)
    with store.database.writing() as connection:
        connection.execute(update(RUNS).values(process=f"{this_machine()} 1"))
    assert taken(store) != run


def test_a_zombie_is_dead(store: Store) -> None:
    """A killed worker that nobody has waited for still has its pid."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        run = taken(store, pid=child.pid)
        assert claim(store) is None
        child.kill()
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert taken(store) != run
    finally:
        child.communicate()


def test_another_machine_is_given_fifteen_minutes(store: Store) -> None:
    run = taken(store, host="elsewhere", pid=1)
    assert claim(store) is None
    for seconds, free in ((14 * 60, False), (16 * 60, True)):
        with store.database.writing() as connection:
            connection.execute(update(STAGES).values(heartbeat=ago(seconds)))
        assert row(store).alive is not free
        assert (claim(store) is not None) is free
    with store.database.writing() as connection:
        connection.execute(update(STAGES).values(run=run, heartbeat=ago(16 * 60)))
        connection.execute(update(RUNS).where(RUNS.c.id == run).values(status="running"))
    store.heartbeat(run)
    assert claim(store) is None, "a heartbeat keeps the stage"


MACHINE, BOOT, NAMESPACE = "m1", "b1", "pid:[4026531836]"


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (f"m1 b0 {NAMESPACE} 5", True),  # the same machine, before it was started again
        (f"m2 b0 {NAMESPACE} 5", False),  # another machine of the same name
        ("m1 b1 pid:[4026532000] 5", False),  # a container of the same host name: its pids are not ours
        (f"m1 b1 {NAMESPACE} 5", True),  # pid reused
        ("", False),
        (None, False),
    ],
)
def test_who_is_gone(monkeypatch: pytest.MonkeyPatch, theirs: str | None, expected: bool) -> None:
    monkeypatch.setattr("fatbench.store.liveness.this_machine", lambda: f"{MACHINE} {BOOT} {NAMESPACE}")
    assert is_gone(socket.gethostname(), os.getpid(), theirs) is expected
    assert not is_gone("elsewhere", os.getpid(), theirs)


def _no_file(*_: Any, **__: Any) -> str:
    raise FileNotFoundError


# --- many processes ----------------------------------------------------------------------------------------------


def _race(url: str, start: Any, results: Any) -> None:
    """Open (and maybe make) the database and claim twenty stages at the same time as others do."""
    start.wait()
    with Store.open(url, create=True) as store:
        store.add_cell(CELL, SPEC)
        won = [stage for stage in range(20) if claim(store, f"pgd20-{stage:08x}@1") is not None]
    results.put(won)
    time.sleep(600)  # stay alive: what a dead process holds is free


def test_of_racing_processes_exactly_one_wins(url: str) -> None:
    """Three processes make one database at the same time and claim the same stages."""
    start, results = FORK.Barrier(3), FORK.Queue()
    racers = [FORK.Process(target=_race, args=(url, start, results), daemon=True) for _ in range(3)]
    for racer in racers:
        racer.start()
    try:
        won = [results.get(timeout=300) for _ in racers]
        assert sorted(stage for stages in won for stage in stages) == list(range(20))
    finally:
        for racer in racers:
            racer.kill()
            racer.join()
    with Store.open(url) as store:
        assert len(store.runs()) == 20
        assert taken(store, "pgd20-00000000@1")
    assert "intact" in check(url)


def _endless(url: str, ready: Any) -> None:
    """Go on with the stage, five numbers and one outcome a round, until killed."""
    with Store.open(url) as store:
        run = taken(store)
        ready.set()
        before = row(store).round
        while True:
            before += 1
            numbers = [Number(f"m{i}", before + i / 8, before, client=i - 1) for i in range(5)]
            bits = bytes([128 * (before % 2)])
            store.commit(
                run, numbers=numbers, round=before, checkpoint=f"state-{before}", record={"at": before},
                outcomes=(before - 1, 1, bits),
            )  # fmt: skip


def test_killed_at_random_instants_nothing_is_lost_or_doubled(url: str) -> None:
    """Twelve processes and more go on where the one before was killed; pointer, record, numbers, outcomes agree."""
    with Store.open(url, create=True) as store:
        store.add_cell(CELL, SPEC)
    moments = random.Random(5)
    reached = kills = 0
    while kills < 12 or (reached < 40 and kills < 200):  # on a busy machine many die before their first commit
        kills += 1
        ready = FORK.Event()
        worker = FORK.Process(target=_endless, args=(url, ready))
        worker.start()
        assert ready.wait(300)
        time.sleep(moments.uniform(0.0, 0.06 * max(1, kills - 12)))
        worker.kill()
        worker.join()
        with Store.open(url) as store:
            at = row(store)
            assert (at.status, at.alive) == ("running", False)
            assert at.round >= reached
            reached = at.round
            assert (at.checkpoint, at.record) == ((f"state-{reached}", {"at": reached}) if reached else (None, {}))
            found = {(m["metric"], m["round"], m["client"]): m["value"] for m in store.measurements()}
            assert len(store.measurements()) == 5 * reached
            assert found == {(f"m{i}", r, i - 1): r + i / 8 for r in range(1, reached + 1) for i in range(5)}
            bits = [bits[0] >> 7 for _, _, bits in store.outcomes(CELL, "train")]
            assert bits == [r % 2 for r in range(1, reached + 1)]
    assert reached >= 40
    with Store.open(url) as store:
        assert [r["status"] for r in store.runs()] == ["interrupted"] * (kills - 1) + ["running"]
    assert "intact" in check(url)


def _create_and_die(path: str, moment: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, moment)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    Store.open(path, create=True).close()


@pytest.mark.nightly
def test_killed_while_it_is_made(tmp_path: Path) -> None:
    """Whatever was there when the process that made the database was killed, the next one opens or makes it."""
    for moment in range(1, 21, 2):
        path = str(tmp_path / f"{moment}.db")
        maker = FORK.Process(target=_create_and_die, args=(path, moment * 0.002))
        maker.start()
        maker.join()
        with Store.open(path, create=True) as store:
            store.add_cell(CELL, SPEC)
        assert "intact" in check(path)


def test_used_after_a_fork(store: Store) -> None:
    run = taken(store)
    child = FORK.Process(target=store.commit, args=(run,), kwargs={"round": 1})
    child.start()
    child.join()
    assert child.exitcode == 0
    store.commit(run, round=2)
    assert row(store).round == 2


def test_a_reader_does_not_wait_for_a_writer(store: Store) -> None:
    run = taken(store)
    with store.database.writing() as connection:
        connection.execute(update(STAGES).values(total=77))
        assert row(store).total == 3
    assert row(store).total == 77
    assert run == row(store).run


def test_a_reader_sees_one_state(store: Store) -> None:
    with store.database.reading() as connection:
        before = connection.execute(select(STAGES)).all()
        claim(store)
        assert connection.execute(select(STAGES)).all() == before == []
    assert len(store.stages()) == 1


# --- reading much ------------------------------------------------------------------------------------------------


def test_more_ids_than_a_statement_has_parameters(store: Store) -> None:
    """SQLite allows 32,766 in one statement and PostgreSQL 65,535."""
    ids = [f"{i:012x}" for i in range(3)]
    store.add_cells(dict.fromkeys(ids, SPEC))
    for cell in ids:
        store.finish(taken(store, cell=cell), [Number("x", 1.0, 1)])
    many = [*reversed(ids), *(f"x{i}" for i in range(70_000)), ids[0]]
    assert [m["cell"] for m in store.measurements(many)] == ids
    some = many[:1200]  # several statements; the others are cut up in the same place
    assert [cell for cell, _ in store.stages(some)] == ids
    assert [run["cell"] for run in store.runs(some)] == ids
    assert list(store.cells(some)) == ids


def test_filters(store: Store) -> None:
    for stage in ("a", "b"):
        run = taken(store, stage)
        store.finish(run, [Number("x", 1.0, 1), Number("y", 2.0, 1)])
    assert [(m["stage"], m["metric"]) for m in store.measurements(stages=["b"])] == [("b", "x"), ("b", "y")]
    assert [(m["stage"], m["metric"]) for m in store.measurements(metrics=["y"])] == [("a", "y"), ("b", "y")]
    assert [(m["stage"], m["metric"]) for m in store.measurements([CELL], stages=["a"], metrics=["x"])] == [("a", "x")]
    assert store.measurements([]) == store.measurements(stages=[]) == store.measurements(metrics=[]) == []
    assert store.stages([]) == {}
    assert store.runs([]) == []


def test_order_is_that_of_bytes_everywhere(store: Store) -> None:
    """A server's language would put "B" between "a" and "c"."""
    run = taken(store)
    store.finish(run, [Number(metric, 1.0, 1) for metric in ("b", "B", "a", "_", "é", "c")])
    assert [m["metric"] for m in store.measurements()] == ["B", "_", "a", "b", "c", "é"]


def test_values_come_back_bit_for_bit(store: Store) -> None:
    values = [0.1, 1 / 3, 5e-324, 1e100, -2.5, 0.0, -0.0, 2**53 + 1.0]
    run = taken(store)
    store.finish(run, [Number(f"{i}", value, 1) for i, value in enumerate(values)])
    found = [m["value"] for m in store.measurements()]
    assert [value.hex() for value in found] == [(value + 0.0).hex() for value in values], "and -0.0 is 0.0"


def test_clients_share_what_is_said_of_a_round(store: Store) -> None:
    """A hundred clients: one row says cell, stage, round, metric, run and time, a hundred have a value each."""
    run = taken(store)
    store.commit(run, numbers=[Number("w", 1.0, 1), *(Number("w", k / 7, 1, 9, k) for k in range(100))], round=1)
    with store.database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(schema.ROUND_METRICS)) == 1
    assert [(m["client"], m["value"]) for m in store.measurements()] == [(-1, 1.0), *((k, k / 7) for k in range(100))]
    store.restart(run)
    with store.database.reading() as connection:
        counts = [select(func.count()).select_from(part) for part in (schema.ROUND_METRICS, schema.VALUES)]
        assert [connection.scalar(count) for count in counts] == [0, 0]


# --- the schema --------------------------------------------------------------------------------------------------


def suite_cells(store: Store) -> list[tuple[str, str, str]]:
    with store.database.reading() as connection:
        order = "SELECT suite, preset, cell FROM suite_cells ORDER BY suite, cell"
        return [(row.suite, row.preset, row.cell) for row in connection.execute(text(order))]


def test_a_cell_of_two_suites_is_found_under_both(store: Store, url: str) -> None:
    """A number stands once in `measurements`, under the suite that ran it, and by `suite_cells` under every suite."""
    run = store.claim(CELL, "train", suite="a", total=1, provenance={"preset": "paper"})
    store.finish(run, [Number("loss", 1.0, 1)])
    for _ in range(2):
        for suite in ("a", "b"):
            store.store_points([Point(suite, "paper", CELL)])
    assert suite_cells(store) == [("a", "paper", CELL), ("b", "paper", CELL)]
    assert store.count_trainings() == {("a", "paper", "done"): 1, ("b", "paper", "done"): 1}
    query = "SELECT count(*) FROM measurements m JOIN suite_cells s ON s.cell = m.cell WHERE s.suite = :suite"
    with store.database.reading() as connection:
        assert [connection.scalar(text(query), {"suite": suite}) for suite in ("a", "b", "c")] == [1, 1, 0]
        assert connection.scalar(text("SELECT count(*) FROM measurements")) == 1
    delete_cell(store, CELL)
    assert suite_cells(store) == []
    assert "intact" in check(url)


def test_sqlite_is_set_up_to_survive(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(str(path), create=True) as store, store.database.reading() as connection:
        pragmas = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 60000}
        pragmas["application_id"] = int.from_bytes(b"fatb", "big")
        for pragma, value in pragmas.items():
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == value
    assert [p.name for p in tmp_path.iterdir()] == ["x.db"], "one file when nobody has it open"


def test_two_processes_make_the_schema(store: Store) -> None:
    """Who comes second, with the lock, finds it made; one of another version is refused."""
    with store.database.writing() as connection:
        store.database._create(connection)
    assert list(store.cells()) == [CELL]
    with store.database.writing() as connection:
        connection.execute(update(VERSION).values(version_num="9999"))
        with pytest.raises(DatabaseError, match="has schema 9999"):
            store.database._create(connection)


def test_no_write_ahead_log_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.db"
    Store.open(str(path), create=True).close()
    monkeypatch.setattr(database, "on_network", lambda path: True)
    with Store.open(str(path), create=True) as store, store.database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/home/me/x.db", True), ("/home/local/x.db", False), ("/homes/x.db", False), ("/x.db", False)],
)
def test_network_file_systems(monkeypatch: pytest.MonkeyPatch, path: str, expected: bool) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/home /home {NETWORK[1]} rw 0 0\n/dev/sdb /home/local xfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: mounts)
    assert database.on_network(Path(path)) is expected
    monkeypatch.setattr(Path, "read_text", _no_file)
    assert not database.on_network(Path(path))  # elsewhere than on Linux


def test_foreign_keys_hold(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)foreign key"), store.database.writing() as connection:
        connection.execute(insert(OUTCOME_CHUNKS).values(cell="x", stage="y", start=0, n=1, bits=b"\0"))


def test_a_second_connection_of_a_process_leaves_the_locks_of_the_first(tmp_path):
    """A worker's heartbeat opens the database again; another process that comes and goes must still see the worker.

    POSIX drops all of a process's locks on a file when it closes any handle of it. Were the file looked at other than
    through SQLite, the other process would take itself for the last, and remove the log that the worker writes to.
    """
    file = tmp_path / "r.db"
    with Store.open(str(file), create=True) as worker:
        worker.add_cell("a" * 12, {"seed": 0})
        with Store.open(str(file)) as heartbeat:
            assert heartbeat.cells()
        visit = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM cells'); c.close()"
        subprocess.run([sys.executable, "-c", visit, str(file)], check=True)
        assert file.with_name("r.db-wal").exists()
        worker.add_cell("b" * 12, {"seed": 1})
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM cells").fetchone() == (2,)
    connection.close()
