"""How a database is opened, what a machine cannot do with it, and how it is named."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert, text, update
from sqlalchemy.exc import DBAPIError
from test_store import CELL, SPEC, claim, row, taken
from users import ANN, NOBODY, done_as

from fatbench.engine.rounds import Number
from fatbench.errors import DatabaseError, MachineError, SpecError, Unavailable
from fatbench.store import database, jsonl
from fatbench.store.cleanup import backup
from fatbench.store.database import Locked, NoDatabase, shown_url
from fatbench.store.integrity import check
from fatbench.store.rows import current_time
from fatbench.store.schema import CELLS, SCHEMA, VERSION
from fatbench.store.stages import Store


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url, create=True) as opened:
        opened.add_cell(CELL, SPEC)
        yield opened


# --- opening -----------------------------------------------------------------------------------------------------


def refused(error: type[Exception], url: str | Path, message: str, *, create: bool = False) -> None:
    """Opening fails with exactly this message; {} stands for the address."""
    with pytest.raises(error, match=f"^{re.escape(message.replace('{}', shown_url(str(url))))}$"):
        Store.open(str(url), create=create)


def test_nothing_there_yet(tmp_path: Path) -> None:
    refused(NoDatabase, tmp_path / "no" / "x.db", "{} does not exist: nothing has been run yet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x.db").touch()
    refused(NoDatabase, tmp_path / "x.db", "{} is empty: nothing has been run yet")
    with pytest.raises(NoDatabase, match="does not exist"):
        check(str(tmp_path / "y.db"))
    assert [*tmp_path.iterdir()] == [tmp_path / "x.db"]
    with Store.open(str(tmp_path / "x.db"), create=True) as store:
        assert store.cells() == {}
    assert NoDatabase.exit_code == DatabaseError.exit_code == 4


def test_an_empty_postgres_database(new_postgres: Callable[[], str]) -> None:
    url = new_postgres()
    refused(NoDatabase, url, "{} is empty: nothing has been run yet")


@pytest.mark.parametrize("create", [False, True])
def test_files_of_others(tmp_path: Path, create: bool) -> None:
    note = tmp_path / "note.txt"
    note.write_text("Dear diary, today SQLite")
    refused(DatabaseError, note, "{} is not a fatbench database, nor any SQLite file", create=create)
    assert note.read_text() == "Dear diary, today SQLite"
    refused(DatabaseError, tmp_path, "{} is a folder, not a fatbench database", create=create)
    for statement in ("CREATE TABLE cells(id)", "PRAGMA application_id = 42"):
        other = tmp_path / f"{len(statement)}.db"
        with closing(sqlite3.connect(other)) as connection, connection:
            connection.execute("CREATE TABLE t(x)")
            connection.execute(statement)
        before = other.read_bytes()
        refused(DatabaseError, other, "{} is not a fatbench database", create=create)
        assert other.read_bytes() == before


def _execute(url: str, statement: str) -> None:
    """Something done to a database behind the store's back."""
    with database.Database(url).writing() as connection:
        connection.execute(text(statement))


@pytest.mark.parametrize("number", ["0001", "9999"])
def test_a_database_of_another_schema_is_refused(number: str, store: Store, url: str) -> None:
    with store.database.writing() as connection:
        connection.execute(update(VERSION).values(version_num=number))
    message = f"{{}} has schema {number}, {'older' if number < SCHEMA else 'newer'} than {SCHEMA} of this fatbench: "
    message += database.EXPORT if number < SCHEMA else "update fatbench"
    for create in (False, True):
        refused(DatabaseError, url, message, create=create)
    with pytest.raises(DatabaseError, match=f"has schema {number}"):
        check(url)


def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(str(path), create=True) as store:
        store.add_cells({f"{i:012x}": SPEC for i in range(200)})
        numbers = [Number("loss", i / 16, i // 40 + 1, client=i % 40) for i in range(1000)]
        store.finish(taken(store, cell=f"{7:012x}"), numbers)
    content = bytearray(path.read_bytes())
    for page in range(2, len(content) // 4096 - 1):
        content[page * 4096 : page * 4096 + 100] = b"\xaa" * 100
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=f"^{re.escape(str(path))} is damaged: "):
        check(str(path))
    path.write_bytes(content[:20000])
    with pytest.raises(DatabaseError, match=f"^{re.escape(str(path))} is damaged: "), Store.open(str(path)) as store:
        store.measurements()


def test_check_names_what_does_not_belong(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(str(path), create=True) as store:
        store.add_cell(CELL, SPEC)
        run = taken(store, "pgd20@3")
        store.commit(run, round=8, outcomes=(0, 8, b"\xff"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE outcome_chunks SET start = 4")
        connection.execute("INSERT INTO round_metrics VALUES (7, 'nobody', 'train', 1, 'loss', ?, '')", (run,))
        connection.execute("INSERT INTO numbers VALUES (8, -1, 1.0, 0)")
        connection.execute("ALTER TABLE runs DROP COLUMN log")
    with pytest.raises(DatabaseError, match="is damaged: ") as caught:
        check(str(path))
    message = str(caught.value)
    assert "round_metrics (7,) refers to missing stages" in message
    assert "numbers (8, -1) refers to missing round_metrics" in message
    assert f"outcomes of {CELL} pgd20@3: the chunk at 4 does not follow 0" in message
    assert "the schema has been changed" in message and "log" in message


def test_check_says_what_there_is(store: Store, url: str) -> None:
    store.finish(taken(store), [Number("loss", 1.0, 1), Number("x", 1.0, 1)])
    expected = f"{shown_url(url)} is intact (schema {SCHEMA}): 0 asked, 1 cell, 0 seen data, 0 points,"
    expected += " 0 replicates, 1 run, 1 stage, 0 doubts, 0 outcome chunks, 2 round metrics, 2 numbers"
    assert check(url) == expected
    with store.database.writing() as connection:
        connection.execute(text("CREATE TABLE diary(entry text)"))
    assert check(url) == expected, "what somebody else keeps beside it is not ours to judge"


# --- what a machine cannot do ------------------------------------------------------------------------------------


@pytest.fixture
def locked(reachable: Path) -> Iterator[Path]:
    """A folder with a database that may be read but not written."""
    folder = reachable / "locked"
    with Store.open(str(folder / "x.db"), create=True) as store:
        store.add_cell(CELL, SPEC)
    folder.chmod(0o555)
    (folder / "x.db").chmod(0o444)
    yield folder
    folder.chmod(0o755)


def test_a_read_only_folder(locked: Path) -> None:
    """It can be read from, not written to, and nothing can be made in it."""
    path = locked / "x.db"

    def read() -> None:
        with Store.open(str(path)) as store:
            assert list(store.cells()) == [CELL]
            assert store.stages() == {}

    def write() -> None:
        with Store.open(str(path)) as store:
            claim(store)

    assert done_as(NOBODY, read) == ""
    me = pwd.getpwuid(os.geteuid()).pw_name
    whose = f"belongs to {me}" if me == "root" else "has permissions that forbid it (0{:o})"
    reason = f"{path} cannot be written: it {whose.format(0o444)}"
    assert done_as(NOBODY, write) == f"Unavailable: {reason}"
    assert done_as(NOBODY, lambda: Store.open(str(path), create=True)) == f"MachineError: {reason}"
    new = locked / "y.db"
    said = done_as(NOBODY, lambda: Store.open(str(new), create=True))
    assert said == f"MachineError: {new} cannot be written: its folder {locked} {whose.format(0o555)}"
    deep = locked / "deep" / "y.db"
    said = done_as(NOBODY, lambda: Store.open(str(deep), create=True))
    assert said == f"MachineError: {deep}: cannot make its folder: Permission denied"
    assert sorted(p.name for p in locked.iterdir()) == ["x.db"]


def test_a_read_only_file(locked: Path) -> None:
    path = locked / "x.db"
    locked.chmod(0o777)
    said = done_as(NOBODY, lambda: Store.open(str(path), create=True))
    assert said.startswith(f"MachineError: {path} cannot be written: it ") and said.count("x.db") == 1
    path.chmod(0o000)
    assert done_as(NOBODY, lambda: Store.open(str(path))) == f"MachineError: {path} cannot be read: Permission denied"
    assert MachineError.exit_code == 5


@pytest.fixture
def of_nobody(shared: Path) -> Path:
    """A database in a folder that all share, as its owner's umask 022 leaves it."""
    assert done_as(NOBODY, lambda: Store.open(str(shared / "x.db"), create=True).add_cell(CELL, SPEC)) == ""
    return shared


def _write(path: Path) -> Callable[[], object]:
    return lambda: Store.open(str(path), create=True).add_cells({"c" * 12: SPEC})


def test_the_log_of_a_reader_locks_nobody_out(of_nobody: Path) -> None:
    """SQLite gives a reader who may not write an empty log of theirs, and leaves it: a run removes it."""
    path = of_nobody / "x.db"

    def read(hold: Callable[[], object] = lambda: None) -> None:
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT count(*) FROM cells").fetchone() == (1,)
            hold()

    assert done_as(ANN, read) == ""
    left = {file.name: (file.stat().st_uid, file.stat().st_size) for file in of_nobody.glob("x.db-*")}
    assert left.keys() == {"x.db-wal", "x.db-shm"} and left["x.db-wal"] == (ANN, 0)
    assert done_as(NOBODY, lambda: Store.open(str(path)).cells()) == ""
    assert done_as(NOBODY, _write(path)) == ""
    assert os.listdir(of_nobody) == ["x.db"]
    with Store.open(str(path)) as store:
        assert len(store.cells()) == 2


def test_what_reads_through_us_leaves_nothing_of_a_reader(of_nobody: Path) -> None:
    """Reading, checking and copying by a user who may write the folder and not the file; a link is its target."""
    path = of_nobody / "x.db"
    (of_nobody / "link.db").symlink_to("x.db")

    def look(name: str) -> None:
        with Store.open(str(of_nobody / name)) as store:
            assert list(store.cells()) == [CELL]
            backup(store, of_nobody / f"copy of {name}")
        check(str(of_nobody / name))

    for name in ("x.db", "link.db"):
        assert done_as(ANN, lambda name=name: look(name)) == ""  # type: ignore[misc]
    assert sorted(os.listdir(of_nobody)) == ["copy of link.db", "copy of x.db", "link.db", "x.db"]
    assert done_as(ANN, _write(path)) == f"MachineError: {path} cannot be written: it belongs to nobody"


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_a_database_has_the_permissions_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    """With its log, its copies and exports: a group that works in one folder may write them all."""
    before = os.umask(umask)
    try:
        with Store.open(str(tmp_path / "deep" / "x.db"), create=True) as store:
            store.add_cell(CELL, SPEC)
            backup(store, tmp_path / "deep" / "copy.db")
            jsonl.export(store, tmp_path / "deep" / "x.jsonl")
            files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "deep").iterdir()}
    finally:
        os.umask(before)
    assert files == dict.fromkeys(["x.db", "x.db-wal", "x.db-shm", "copy.db", "x.jsonl"], mode)
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o777 & ~umask


def test_a_group_writes_one_database(shared: Path) -> None:
    """Umask 002: both users write, one after the other and at once; who is killed leaves nothing in the way."""
    path = shared / "group.db"
    os.chown(shared, 0, ANN)
    shared.chmod(0o2775)

    def as_member(uid: int, cell: str) -> str:
        def add() -> None:
            os.umask(0o002)
            killed = Store.open(str(path), create=True)
            killed.add_cell(cell, SPEC)
            os._exit(0)  # its log stays

        return done_as(uid, add, [ANN])

    for uid, cell in ((NOBODY, "a" * 12), (ANN, "b" * 12), (NOBODY, "c" * 12)):
        assert as_member(uid, cell) == ""
    assert (shared / "group.db-wal").stat().st_size
    with Store.open(str(path)) as store:
        assert len(store.cells()) == 3


def test_a_file_that_is_deleted_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(str(path), create=True) as store:
        path.unlink()
        with pytest.raises(Unavailable, match=r"x\.db (cannot be opened|was moved or deleted while it was open)"):
            store.add_cell(CELL, SPEC)
        assert not path.exists()


def test_a_full_database_takes_the_transaction_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own limit on the number of pages gives the same error as a full disk."""
    with Store.open(str(tmp_path / "x.db"), create=True) as store:
        store.add_cell(CELL, SPEC)
        run = taken(store)
        store.commit(run, numbers=[Number("loss", 1.0, 1)], round=1, checkpoint="state-1")
        connect = store.database.connect

        def cramped() -> sqlite3.Connection:
            connection = connect()
            connection.execute("PRAGMA max_page_count = 30")
            return connection

        monkeypatch.setattr(store.database._engine.pool, "_creator", cramped)
        with pytest.raises(MachineError, match=r"x\.db: the disk is full; nothing was written in this step$"):
            store.commit(run, numbers=[Number(f"m{i}", 1.0, 2) for i in range(5000)], round=2, checkpoint="state-2")
        assert (row(store).round, row(store).checkpoint, len(store.measurements())) == (1, "state-1", 1)
        store.commit(run, numbers=[Number("loss", 1.0, 2)], round=2, checkpoint="state-2")
    assert "2 numbers" in check(str(tmp_path / "x.db"))


def _mount(folder: Path, size: str) -> bool:
    mount = ctypes.CDLL(None, use_errno=True).mount
    return bool(mount(b"none", str(folder).encode(), b"tmpfs", 0, f"size={size}".encode()) == 0)


def test_a_full_disk(tmp_path: Path) -> None:
    """A file system of 480 kB, filled up: the step that does not fit is taken back and the database stays whole."""
    if os.geteuid() != 0 or not _mount(tmp_path, "480k"):
        pytest.skip("only root may mount a file system")
    try:
        path = str(tmp_path / "x.db")
        with Store.open(path, create=True) as store:
            store.add_cell(CELL, SPEC)
            run = taken(store)
            done = 0
            with pytest.raises(MachineError, match=r"x\.db: (the disk is full|reading or writing failed)"):
                for round in range(1, 1000):
                    numbers = [Number(f"m{i}", 1.0, round) for i in range(100)]
                    store.commit(run, numbers=numbers, round=round, checkpoint=f"state-{round}")
                    done = round
            assert done > 3
            at = row(store)
            assert (at.round, at.checkpoint, len(store.measurements())) == (done, f"state-{done}", 100 * done)
            assert _mount_larger(tmp_path)
            store.commit(run, numbers=[Number("m0", 1.0, done + 1)], round=done + 1)
        assert "intact" in check(path)
        full = pytest.raises(OSError, match=os.strerror(errno.ENOSPC))
        with (tmp_path / "ballast").open("wb", buffering=0) as ballast, full:
            while True:
                ballast.write(bytes(1 << 12))
        refused_new = str(tmp_path / "new.db")
        with pytest.raises(MachineError, match=r"new\.db: (the disk is full|reading or writing failed)"):
            Store.open(refused_new, create=True)
        assert not Path(refused_new).exists()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _mount_larger(folder: Path) -> bool:
    return subprocess.run(["mount", "-o", "remount,size=2m", str(folder)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("53100", Unavailable, "{}: the server's disk is full; nothing of this step was written"),
        ("25006", MachineError, "{} cannot be written: no ***"),
        ("42501", MachineError, "{} cannot be written: no ***"),
        ("42501 SELECT x", MachineError, "{} cannot be read: no ***"),
        ("42501 SELECT x FOR UPDATE", MachineError, "{} cannot be written: no ***"),
        ("57P01", Locked, "{}: no ***"),  # it is being stopped
        ("53200", Locked, "{}: no ***"),  # it has no memory
        ("42703", None, ""),  # no such column: ours
    ],
)
def test_what_a_server_says_in_words(code: str, kind: type[Exception] | None, message: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    opened = database.Database("postgresql://me:secret@host/x")
    state, _, statement = code.partition(" ")
    error = psycopg.errors.lookup(state)("no\nsecret")
    wrapped = DBAPIError.instance(statement or "INSERT", None, error, psycopg.Error, dialect=opened._engine.dialect)
    found = opened._explanation(wrapped)
    assert (None if found is None else type(found)) == kind
    assert found is None or str(found) == message.replace("{}", "postgresql://me:***@host/x")


@pytest.mark.promise(
    "Faults of the machine", "A PostgreSQL server stopped in the middle of a step rolls it back and fails no cell"
)
def test_a_server_that_is_stopped_takes_the_transaction_back(new_postgres: Callable[[], str]) -> None:
    """No cell fails for it: its stage is given back, or its lease ends."""
    with Store.open(new_postgres(), create=True) as store:
        stopped = pytest.raises(Locked, match="terminating connection due to administrator command")
        with stopped, store.database.writing() as connection:
            connection.execute(insert(CELLS).values(id=CELL, spec="{}", seed=7, created=current_time()))
            connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        assert store.cells() == {}


def test_patience_with_a_database_that_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None by default; else the transaction begins once it can, and what waits says so."""
    monkeypatch.setattr(database, "BUSY", 0.0)
    monkeypatch.setattr(database, "PAUSE", 0.05)
    with Store.open(str(tmp_path / "x.db"), create=True) as store:
        other = sqlite3.connect(tmp_path / "x.db", isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Locked, match="another process has been writing"):
            store.add_cell(CELL, SPEC)
        store.database.patience = 0.1
        begin, sleep, slept = time.monotonic(), time.sleep, []
        monkeypatch.setattr(database.time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
        with pytest.raises(Locked):
            store.add_cell(CELL, SPEC)
        assert time.monotonic() - begin >= 0.1 and set(slept) == {0.05}
        store.database.patience = 60.0
        threading.Timer(0.2, other.rollback).start()
        store.add_cell(CELL, SPEC)
        assert list(store.cells()) == [CELL] and time.monotonic() - begin < 30
        other.close()


def test_a_postgres_database_that_is_not_there(postgres_server: str) -> None:
    url = f"postgresql://postgres:geheim@/nowhere?host={postgres_server}"
    with pytest.raises(MachineError, match='database "nowhere" does not exist') as caught:
        Store.open(url, create=True)
    assert "geheim" not in str(caught.value)


def test_a_postgres_user_who_may_not_write(new_postgres: Callable[[], str]) -> None:
    url = new_postgres()
    with Store.open(url, create=True) as store:
        store.add_cell(CELL, SPEC)
    name = url.rpartition("%3D")[2]
    grant = f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO reader"
    _execute(url, f"CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA {name} TO reader; {grant}")
    with Store.open(url.replace("postgres:geheim", "reader:geheim")) as store:
        assert list(store.cells()) == [CELL]
        with pytest.raises(MachineError, match="cannot be written: permission denied for table cells"):
            claim(store)


# --- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("results/x.db", "results/x.db"),
        ("sqlite:///results/a:b@c.db", "sqlite:///results/a:b@c.db"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:se:c/r@et@host/db", "postgresql://me:***@host/db"),
        ("postgresql://:secret@host/db", "postgresql://:***@host/db"),
        ("postgresql:///db?host=/tmp&user=me&password=secret", "postgresql:///db?host=/tmp&user=me&password=***"),
        ("postgresql:///db?sslpassword=secret&host=/tmp", "postgresql:///db?sslpassword=***&host=/tmp"),
        ("postgresql://me:secret@host:notaport/db", "postgresql://me:***@host:notaport/db"),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the database's address is empty: give a file such as results/fatbench.db, or a URL"),
        ("oracel://me:secret@h/x", "{}: unknown kind of database 'oracel' (known: sqlite, postgresql)"),
        ("mysql://me:se@cret@h/x", "{}: unknown kind of database 'mysql' (known: sqlite, postgresql)"),
        ("postgresql://me:se@cret@h/x", "{}: write %40 for every '@' except the one before the host"),
        ("postgresql://me:secret@h/x?plugin=no", "{}: Can't load plugin: sqlalchemy.plugins:no"),
        ("postgresql://me:or@/x?host=a:1,b:2&port=3", "{}: number of hosts and p***ts don't match"),
        (
            "postgresql://me:secret@host:notaport/db",
            "{}: not a database URL (sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME)",
        ),
        ("://x", "{}: not a database URL (sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME)"),
        ("sqlite://x.db", "{}: a SQLite URL has three slashes, sqlite:///FILE"),
        ("sqlite://", "{}: workers need a file that all of them can open: sqlite:///FILE"),
        ("sqlite:///:memory:", "{}: workers need a file that all of them can open: sqlite:///FILE"),
    ],
)
def test_addresses_that_are_none(url: str, message: str) -> None:
    for create in (False, True):
        refused(SpecError, url, message, create=create)
    assert "secret" not in message.replace("{}", shown_url(url))


def test_the_ways_to_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("a b?#%20.db", "sqlite:///deep/er/b.db", f"sqlite:///{tmp_path}/c.db", "~/d.db"):
        Store.open(name, create=True).close()
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["a b?#%20.db", "c.db", "deep/er/b.db", "home/d.db"]
    with Store.open("c.db") as store:
        monkeypatch.chdir("/")
        assert store.cells() == {}, "a relative path is one from where it was opened"
